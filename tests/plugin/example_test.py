#!/usr/bin/python3
"""A plug-in as a stranger makes one: Gradwire is installed, the example is built outside of its tree,
checked, and trains in both directions; and what a job says of plug-ins that are wrong.

Usage: example_test.py BUILD_DIR FAULTY_PLUGINS_DIR
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

BUILD, FAULTY = (pathlib.Path(text) for text in sys.argv[1:3])
del sys.argv[1:3]
ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path("/usr/share/datasets/fashion-mnist")
SKIP = 77
DEADLINE_S = 60


def run(*command):
    return subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=DEADLINE_S, check=False)


class PluginTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = pathlib.Path(tempfile.mkdtemp(prefix="gradwire-plugin-test-"))
        cls.addClassCleanup(shutil.rmtree, cls.scratch)
        cls.prefix = cls.scratch / "prefix"
        cls.bin = cls.prefix / "bin"
        cls.must("cmake", "--install", BUILD, "--prefix", cls.prefix)
        # A copy, so that nothing of the tree around it can help.
        example = shutil.copytree(ROOT / "compressors" / "plugin" / "example", cls.scratch / "example")
        cls.built = cls.scratch / "built"
        cls.must("cmake", "-G", "Ninja", "-S", example, "-B", cls.built, f"-DCMAKE_PREFIX_PATH={cls.prefix}")
        cls.must("cmake", "--build", cls.built)
        cls.plugin = cls.built / "libgradwire_fixed.so"

    @staticmethod
    def must(*command):
        done = run(*command)
        if done.returncode != 0:
            raise AssertionError(f"{command}:\n{done.stdout}")
        return done.stdout

    def job(self, name, *settings, each=(), uplink="{compressor: fixed, bits: 4}", downlink="{compressor: fixed}"):
        """Runs a job of two workers and servers, with the settings given to all and the arguments `each`
        to the workers alone; returns how it ended, all logs and the workers' reports."""
        folder = self.scratch / name
        folder.mkdir()
        (folder / "job.yaml").write_text(
            "job: {workers: 2, servers: 2}\nendpoint: tcp://127.0.0.1:0\n"
            "timeouts: {start: 20s}\npartition: {fuse_below: 4KiB}\n"
            f"compression: {{min_bytes: 1KiB, uplink: {uplink}, downlink: {downlink}}}\n",
            encoding="utf-8")
        done = run(self.bin / "gradwire-launch", "--config", folder / "job.yaml", "--log-dir", folder / "logs",
                   *[word for setting in settings for word in ("--set", setting)], "--",
                   self.bin / "gradwire-train", "--model", "conv", "--steps", "4", "--batch", "16",
                   "--train-limit", "256", "--test-limit", "256", "--lr", "0.01",
                   "--json", folder / "report{rank}.json", *each)
        logs = "".join(path.read_text(encoding="utf-8") for path in sorted((folder / "logs").rglob("*.log")))
        reports = [folder / f"report{rank}.json" for rank in range(2)]
        return done, logs, [json.loads(path.read_text()) for path in reports if path.exists()]

    def test_the_example_passes_its_own_tests(self):
        self.assertIn("100% tests passed", self.must("ctest", "--test-dir", self.built))
        # The golden files come from the description: written again, they are the same.
        golden = self.scratch / "golden"
        self.must("/usr/bin/python3", ROOT / "compressors" / "plugin" / "example" / "golden.py", golden)
        committed = ROOT / "compressors" / "plugin" / "example" / "golden"
        names = sorted(path.name for path in committed.iterdir())
        self.assertEqual(names, sorted(path.name for path in golden.iterdir()))
        for name in names:
            self.assertEqual((committed / name).read_bytes(), (golden / name).read_bytes(), name)

    def test_the_tool_lists_and_measures_it_beside_the_others(self):
        tool = self.bin / "gradwire"
        listed = json.loads(self.must(tool, "compressors", "--plugin", self.plugin, "--json"))["compressors"]
        names = [row["name"] for row in listed]
        self.assertLess({"none", "onebit"}, set(names))
        self.assertEqual(names.count("fixed"), 1)
        self.assertIn("bits", self.must(tool, "compressors", "fixed(bits=4)", "--plugin", self.plugin))
        figures = self.scratch / "figures.json"
        self.must(tool, "bench", "codec", "fixed(bits=4)", "none", "--plugin", self.plugin, "--size", "64KiB",
                  "--repeats", "1", "--rounds", "1", "--json", figures)
        rows = {row["spec"]: row for row in json.loads(figures.read_text())["results"]}
        self.assertAlmostEqual(rows["fixed(bits=4)"]["bytes_per_element"], 0.5, delta=0.01)
        self.assertGreater(rows["fixed(bits=4)"]["encode"]["gb_s"]["median"], 0)
        for command in (("compressors",), ("bench", "codec")):
            done = run(tool, *command, "--plugin", self.scratch / "nothing.so")
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn("cannot be loaded", done.stdout)

    def test_the_tool_finds_a_fault(self):
        done = run(self.bin / "gradwire", "plugin", FAULTY / "libplugin_garbage.so")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("checked garbage: FAULTY", done.stdout)
        other = self.scratch / "other"
        other.mkdir()
        (other / "a.spec").write_text("fixed\n1\nencode\n")
        (other / "a.bin").write_bytes(b"\0\0\1")
        for name in ("a.in", "a.out"):
            (other / name).write_bytes(b"\0\0\0\0")
        done = run(self.bin / "gradwire", "plugin", self.plugin, "--golden", other)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("a.spec encodes to 3 bytes that differ from the 3 expected at byte 2", done.stdout)

    def test_a_job_trains_with_it_in_both_directions(self):
        done, logs, reports = self.job("train", f"plugins=[{self.plugin}]")
        self.assertEqual(done.returncode, 0, done.stdout + logs)
        self.assertEqual(len(reports), 2)
        for report in reports:
            self.assertEqual((report["uplink"], report["downlink"]), ("fixed(bits=4)", "fixed"))
            # Nearly 8 and 4: two bytes a unit, and biases under min_bytes as they are.
            self.assertGreater(report["push_ratio"], 7.5)
            self.assertGreater(report["pull_ratio"], 3.9)
            self.assertEqual(report["nonfinite_units"], 0)
        self.assertEqual(reports[0]["digest"], reports[1]["digest"])

    def test_every_process_must_have_it(self):
        done, logs, _ = self.job("missing")
        self.assertEqual(done.returncode, 2, done.stdout)
        self.assertIn("no compressor is named 'fixed'", logs)
        # A worker that has it and a root that has not: by name, whatever the paths are.
        worker_only = ("--set", f"plugins=[{self.plugin}]")
        plain = {"uplink": "{compressor: onebit}", "downlink": "{compressor: onebit}"}
        done, logs, _ = self.job("unequal", each=worker_only, **plain)
        self.assertEqual(done.returncode, 2, done.stdout)
        self.assertRegex(logs, r"configurations differ: plugins is \[fixed 1\] on worker \d .*, \[\] on the root")
        # Another path to the same compressor is no difference.
        copy = shutil.copy(self.plugin, self.scratch / "libcopy.so")
        done, logs, _ = self.job("paths", f"plugins=[{self.plugin}]", each=("--set", f"plugins=[{copy}]"))
        self.assertEqual(done.returncode, 0, done.stdout + logs)

    def test_wrong_libraries_end_the_start_with_the_reason(self):
        expected = {
            FAULTY / "libplugin_future.so": "has plug-in ABI version 2, this program has 1",
            FAULTY / "libplugin_empty.so": "has no function gradwire_get_plugin",
            FAULTY / "libplugin_taken.so": "has a compressor topk, but that name is taken by a built-in compressor",
            ROOT / "README.md": "cannot be loaded: ",
            self.scratch / "nothing.so": "cannot be loaded: ",
        }
        for path, text in expected.items():
            for program in ("gradwire-server", "gradwire-train"):
                done = run(self.bin / program, "--set", f"plugins=[{path}]")
                self.assertEqual(done.returncode, 2, done.stdout)
                self.assertIn(f"plug-in '{path}' {text}", done.stdout)

    def test_sizes_that_cannot_be_end_the_job_by_name(self):
        path = FAULTY / "libplugin_garbage.so"
        done, logs, _ = self.job("garbage", f"plugins=[{path}]", uplink="{compressor: garbage}",
                                 downlink="{compressor: onebit}")
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertRegex(logs, rf"plug-in '{path}', compressor garbage: encode made \d+ bytes of \d+ elements")


if __name__ == "__main__":
    if not DATA.is_dir():
        print("SKIPPED: the data set is not installed (Debian package dataset-fashion-mnist)")
        sys.exit(SKIP)
    # What a launcher around the tests has set is not for their jobs.
    for variable in list(os.environ):
        if variable.startswith(("GRADWIRE_", "BYTEPS_", "DMLC_", "SLURM_", "OMPI_", "MASTER_")) or variable in (
                "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
                "JOB_COMPLETION_INDEX"):
            del os.environ[variable]
    unittest.main(verbosity=2)
