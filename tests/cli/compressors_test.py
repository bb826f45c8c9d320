#!/usr/bin/python3
"""gradwire compressors, the real program: table, details and JSON say the same.

Usage: compressors_test.py BIN_DIR
"""

import json
import pathlib
import subprocess
import sys
import unittest

BIN = pathlib.Path(sys.argv.pop(1))
DEADLINE_S = 60
CLASSES = {"exact", "contractive", "unbiased", "bounded", "no_claim"}


def run(*arguments):
    return subprocess.run([str(BIN / "gradwire"), "compressors", *arguments], capture_output=True,
                          text=True, timeout=DEADLINE_S, check=False)


class CompressorsTest(unittest.TestCase):
    def printed(self, *arguments):
        done = run(*arguments)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def listed(self, *arguments):
        return json.loads(self.printed("--json", *arguments))["compressors"]

    def refused(self, expect, *arguments):
        done = run(*arguments)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn(expect, done.stderr)

    def test_json_is_complete(self):
        compressors = self.listed()
        self.assertLessEqual({"none", "fp16", "bf16", "onebit", "topk"}, {row["name"] for row in compressors})
        self.assertEqual(len({row["name"] for row in compressors}), len(compressors))
        self.assertEqual(len({row["wire_id"] for row in compressors}), len(compressors))
        for row in compressors:
            with self.subTest(name=row["name"]):
                self.assertIn(row["class"], CLASSES)
                self.assertTrue(row["description"])
                self.assertTrue(0 < row["bytes_per_element"] <= 8)
                for flag in ("fixed_size", "summable", "block_access", "feedback_by_default"):
                    self.assertIsInstance(row[flag], bool)
                for parameter in row["parameters"]:
                    self.assertTrue(parameter["description"], parameter)
                    self.check_default(parameter)

    def check_default(self, parameter):
        default = parameter["default"]
        if parameter["kind"] == "choice":
            self.assertIn(default, parameter["choices"] + [None])
        elif parameter["kind"] == "bool":
            self.assertIn(default, ("true", "false", None))
        else:
            self.assertIn(parameter["kind"], ("number", "integer"))
            self.assertLess(parameter["min"], parameter["max"])
            if default is not None:
                self.assertTrue(parameter["min"] <= float(default) <= parameter["max"], parameter)

    def test_what_is_known_is_right(self):
        rows = {row["name"]: row for row in self.listed()}
        self.assertEqual((rows["none"]["bytes_per_element"], rows["none"]["class"]), (4, "exact"))
        self.assertTrue(rows["none"]["summable"])
        self.assertFalse(rows["none"]["feedback_by_default"])
        self.assertEqual(rows["fp16"]["bytes_per_element"], 2)
        self.assertAlmostEqual(rows["onebit"]["bytes_per_element"], 1 / 8 + 4 / (1 << 20), places=6)
        self.assertTrue(rows["onebit"]["feedback_by_default"])
        # 0.1 % of values of 2 bytes and gaps of about 11 bits.
        self.assertFalse(rows["topk"]["fixed_size"])
        self.assertAlmostEqual(rows["topk"]["bytes_per_element"], 0.0036, delta=0.0003)

    def test_the_table_has_each_name_class_and_parameter(self):
        lines = self.printed().splitlines()
        end = lines.index("")
        rows = {line.split()[0]: line for line in lines[1:end] if not line.startswith(" ")}
        compressors = self.listed()
        self.assertEqual(list(rows), [row["name"] for row in compressors])
        for row in compressors:
            with self.subTest(name=row["name"]):
                text = rows[row["name"]]
                self.assertIn(f"{row['bytes_per_element']:.4f}  {row['class'].replace('_', ' ')}", text)
                self.assertIn("residual" if row["feedback_by_default"] else "none", text.split()[2:])
                self.assertTrue(text.endswith(row["source"]))
                first = lines.index(text)
                for number, parameter in enumerate(row["parameters"]):
                    line = lines[first + number]
                    self.assertIn(f" {parameter['name']} ", line)
                    if parameter["default"] is not None:
                        self.assertIn(f"({parameter['default']})", line)

    def test_the_details_of_one(self):
        for row in self.listed():
            with self.subTest(name=row["name"]):
                text = self.printed(row["name"])
                self.assertIn(f" {row['description']}\n", text)
                for parameter in row["parameters"]:
                    self.assertIn(f"\n{parameter['name']}: {parameter['description']}\n", text)
        self.assertIn("one of fp16, fp32, default fp16", self.printed("topk"))
        self.assertIn("a number from 1e-09 to 1, no default", self.printed("topk"))
        # With parameters: what they make of it.
        half, = self.listed("topk(ratio=0.5,value=fp32)")
        self.assertEqual(half["spec"], "topk(ratio=0.5,value=fp32)")
        self.assertGreater(half["bytes_per_element"], 2)

    def test_wrong_names_end_with_2(self):
        self.refused("no compressor is named 'tpk'; did you mean 'topk'?", "tpk")
        self.refused("has no parameter 'rati'; did you mean 'ratio'?", "topk(rati=1)")
        self.refused("'topk(' is not a compressor", "topk(")
        self.assertEqual(run("--bogus").returncode, 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
