#!/usr/bin/python3
"""gradwire bench codec, the real program with tiny units: that it measures, never how fast.

Usage: bench_test.py BIN_DIR
"""

import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest

BIN = pathlib.Path(sys.argv.pop(1))
SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "bench-codecs"
DEADLINE_S = 240
TINY = ("--repeats", "2", "--rounds", "3")


def run(*arguments):
    return subprocess.run([str(BIN / "gradwire"), "bench", "codec", *arguments], capture_output=True,
                          text=True, timeout=DEADLINE_S, check=False)


class BenchTest(unittest.TestCase):
    def measured(self, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "all.json"
            done = run(*arguments, *TINY, "--json", str(path))
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(path.read_text(encoding="utf-8")), done.stdout

    def refused(self, expect, *arguments):
        done = run(*arguments)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(expect, done.stderr)

    def check_quartiles(self, quartiles):
        self.assertEqual(set(quartiles), {"q1", "median", "q3"})
        for value in quartiles.values():
            self.assertTrue(math.isfinite(value) and value > 0, quartiles)
        self.assertLessEqual(quartiles["q1"], quartiles["median"])
        self.assertLessEqual(quartiles["median"], quartiles["q3"])

    def check_result(self, result, is_sparse, has_two_threads):
        for operation in ("encode", "decode", "decode_add"):
            figures = result[operation]
            for name in ("gb_s", "to_add", "to_memcpy"):
                self.check_quartiles(figures[name])
            self.assertEqual(figures["two_threads"] is not None, has_two_threads)
            self.assertEqual(figures["to_scatter_add"] is not None, is_sparse and operation == "decode_add")
        self.check_quartiles(result["add"]["gb_s"])
        self.assertEqual(result["add"]["two_threads"] is not None, has_two_threads)
        self.check_quartiles(result["memcpy"]["gb_s"])

    def test_every_compressor_is_measured(self):
        found, text = self.measured("--size", "64KiB")
        self.assertTrue(found["machine"]["cpu"])
        self.assertGreater(found["machine"]["cores"], 0)
        self.assertTrue(found["machine"]["compiler"])
        self.assertIn(found["machine"]["instruction_set"], text)
        self.assertIn(found["gradwire"], text)
        self.assertIn(found["command"], text)
        by_spec = {result["spec"]: result for result in found["results"]}
        for spec, result in by_spec.items():
            with self.subTest(spec=spec):
                self.assertEqual((result["bytes"], result["elements"]), (65536, 16384))
                self.check_result(result, spec.startswith(("topk", "randomk", "threshold")), False)
                self.assertIn(f"\n{spec} ", text)
        # Each registered name, as the command that lists them has it.
        listed = subprocess.run([str(BIN / "gradwire"), "compressors", "--json"], capture_output=True,
                                text=True, timeout=DEADLINE_S, check=True)
        names = {row["name"] for row in json.loads(listed.stdout)["compressors"]}
        self.assertEqual({spec.split("(")[0] for spec in by_spec}, names)
        # What is known without a clock: of none, and of n mean-scaled signs of N(0, 1).
        self.assertEqual((by_spec["none"]["bytes_per_element"], by_spec["none"]["relative_error"]), (4, 0))
        self.assertFalse(by_spec["none"]["feedback"])
        self.assertAlmostEqual(by_spec["onebit"]["bytes_per_element"], (65536 / 32 + 4) / 16384, places=5)
        self.assertAlmostEqual(by_spec["onebit"]["relative_error"], math.sqrt(1 - 2 / math.pi), delta=0.02)
        self.assertTrue(by_spec["onebit"]["feedback"])

    def test_two_threads_and_several_sizes(self):
        found, text = self.measured("fp16", "topk(ratio=0.01,value=fp32)", "--size", "4KiB,1000,64KiB",
                                    "--threads", "2")
        self.assertEqual([(result["bytes"], result["spec"]) for result in found["results"]],
                         [(size, spec) for size in (4096, 1000, 65536)
                          for spec in ("fp16", "topk(ratio=0.01,value=fp32)")])
        for result in found["results"]:
            self.check_result(result, result["spec"].startswith("topk"), True)
        for title in ("\n4 KiB: ", "\n1000 bytes: ", "\n64 KiB: "):
            self.assertIn(title, text)

    def test_the_page_marks_what_misses_its_target(self):
        found, _ = self.measured("fp16", "topk(ratio=0.01)", "--size", "64KiB,128KiB", "--threads", "2")
        for result in found["results"]:
            result["bytes"] = {65536: 4 << 20, 131072: 64 << 20}[result["bytes"]]
            result["encode"]["to_add"] = {"q1": 0.39, "median": 0.4, "q3": 0.45}
            result["decode_add"]["to_add"] = {"q1": 1.04, "median": 1.05, "q3": 1.06}
            result["add"]["two_threads"]["median"] = 1.9
            result["encode"]["two_threads"]["median"] = 1.75
            result["decode"]["two_threads"]["median"] = 1.85
        found["results"][1]["decode_add"]["to_scatter_add"] = {"q1": 0.5, "median": 0.59, "q3": 0.6}
        with tempfile.TemporaryDirectory() as folder:
            source, page = pathlib.Path(folder) / "all.json", pathlib.Path(folder) / "codecs.md"
            source.write_text(json.dumps(found), encoding="utf-8")
            done = subprocess.run([str(SCRIPT), "--from", str(source), "--out", str(page)], capture_output=True,
                                  text=True, timeout=DEADLINE_S, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            lines = page.read_text(encoding="utf-8").splitlines()
        fp16 = [line for line in lines if line.startswith("| `fp16` |")]
        topk = [line for line in lines if line.startswith("| `topk(ratio=0.01)` |")]
        self.assertEqual((len(fp16), len(topk)), (3, 3))
        # Encode is aimed at 1.0 and 1.0, decode-add at 1.0 and 1.1.
        self.assertEqual(fp16[0].count("| **0.40** (0.39-0.45) | 1.00 "), 2)
        self.assertTrue(fp16[0].endswith("| 1.05 (1.04-1.06) | 1.00 | **1.05** (1.04-1.06) | 1.10 |"), fp16[0])
        # Encode at 0.11 and 0.45; decode-add over a scatter-add at 0.6, and what was measured at 0.75.
        self.assertIn("| 0.40 (0.39-0.45) | 0.11 | **0.40** (0.39-0.45) | 0.45 "
                      "| **0.59** (0.50-0.60) | 0.60 |", topk[0])
        self.assertIn("| **1.75** | 1.85 |", fp16[2])
        self.assertIn("| 1.90 |", fp16[2])

    def test_an_older_instruction_set(self):
        self.refused("SCALAR", "none", "--target", "Z80")
        found, _ = self.measured("fp16", "--size", "4KiB", "--target", "SCALAR")
        self.assertEqual(found["machine"]["instruction_set"], "SCALAR")

    def test_wrong_command_lines_end_with_2(self):
        self.refused("did you mean 'topk'?", "tpk")
        self.refused("ratio of compressor topk is '2', expected a number from", "topk(ratio=2)")
        self.refused("is not a compressor, expected name", "topk(")
        self.refused("'4 bananas' is not a size", "--size", "4MiB,4 bananas")
        self.refused("--size is '6', expected", "--size", "6")
        self.refused("--size is '2GiB', expected", "--size", "2GiB")
        self.refused("--threads", "--threads", "3")
        self.refused("--repeats", "--repeats", "0")
        self.refused("cannot write '/nowhere/all.json': No such file", "--json", "/nowhere/all.json")
        done = subprocess.run([str(BIN / "gradwire"), "bench"], capture_output=True, text=True,
                              timeout=DEADLINE_S, check=False)
        self.assertEqual(done.returncode, 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
