#!/usr/bin/python3
"""The adaptive methods as PyTorch optimizers, in jobs of two real workers.

Usage: methods_test.py LIBRARY BIN_DIR   (exit code 77: there is no PyTorch)
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKER = pathlib.Path(__file__).resolve().parent / "methods_worker.py"
LIBRARY, BIN = (pathlib.Path(text).resolve() for text in sys.argv[1:3])
del sys.argv[1:3]
DEADLINE_S = 240
SKIPPED = 77
ONEBIT = ("compression.min_bytes=0B", "compression.uplink.compressor=onebit",
          "compression.downlink.compressor=onebit")
COVAP = ("compression.filter.type=covap", "compression.filter.interval=2", "partition.fuse_below=0",
         "partition.bytes=16KiB")


class MethodsTest(unittest.TestCase):
    """Scenarios of methods_worker.py. Those that need no settings of their own share a job."""

    def run_job(self, *scenarios, settings=(), folder=None):
        environment = {key: value for key, value in os.environ.items()
                       if not key.startswith(("GRADWIRE_", "DMLC_"))}
        environment.update(PYTHONPATH=str(ROOT / "worker" / "python"), LIBGRADWIRE=str(LIBRARY),
                           PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
        with tempfile.TemporaryDirectory() as own:
            command = [ROOT / "scripts" / "gradwire-launch", "--bin-dir", BIN, "--free-port",
                       "--workers", "2", "--servers", "1"]
            for setting in settings:
                command += ["--set", setting]
            command += ["--", "/usr/bin/python3", WORKER, folder or own, *scenarios]
            result = subprocess.run([str(word) for word in command], env=environment, cwd=own,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                    timeout=DEADLINE_S, check=False)
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertIn("all done", result.stdout)
        return result.stdout

    def test_methods_that_send_gradients(self):
        with tempfile.TemporaryDirectory() as folder:
            names = ("sgd", "adamw", "lamb", "lans")
            output = self.run_job(*(f"reference:{name}" for name in names),
                                  *(f"goes_on:{name}" for name in names), "loads_before",
                                  "overlap:lans", "overlap:sgd", "unused_and_frozen", "not_packed",
                                  "refusals_in_a_job", folder=folder)
        self.assertEqual(output.count("from the reference"), len(names), output)

    def test_methods_behind_onebit(self):
        settings = (*ONEBIT, "partition.fuse_below=0")
        with tempfile.TemporaryDirectory() as folder:
            self.run_job("reference:clan", "reference:dist_ef_sgdm", "overlap:dist_ef_sgdm",
                         "dropped_and_not_finite", folder=folder, settings=settings)
            self.run_job("goes_on:clan", "goes_on:dist_ef_sgdm", folder=folder, settings=settings)

    def test_methods_that_freeze(self):
        for name, method in (("onebit_adam", "none"), ("onebit_lamb", "onebit_lamb")):
            with self.subTest(name=name), tempfile.TemporaryDirectory() as folder:
                settings = (*ONEBIT, "compression.warmup_steps=50", f"method={method}")
                self.run_job(f"reference:{name}", folder=folder, settings=settings)
                self.run_job(f"goes_on:{name}", folder=folder, settings=settings)
        self.run_job("plain_optimizer", settings=settings)

    def test_what_does_not_go_together_is_refused(self):
        self.run_job("refusals", settings=COVAP)

    def test_under_the_filter(self):
        self.run_job("filtered", settings=(*COVAP, "compression.filter.inactive=skip"))


if __name__ == "__main__":
    found = subprocess.run(["/usr/bin/python3", "-c", "import torch"], stdout=subprocess.DEVNULL,
                           stderr=subprocess.PIPE, text=True, check=False)
    if found.returncode != 0:
        print("SKIPPED:", found.stderr.strip().splitlines()[-1])
        sys.exit(SKIPPED)
    unittest.main(verbosity=2)
