#!/usr/bin/python3
"""The adaptive methods as PyTorch optimizers, in jobs of two real workers.

Usage: methods_test.py LIBRARY BIN_DIR   (exit code 77: there is no PyTorch)
"""

import pathlib
import subprocess
import tempfile
import unittest

from jobs import BIN, PYTHON, ROOT, environment, main

WORKER = pathlib.Path(__file__).resolve().parent / "methods_worker.py"
DEADLINE_S = 240
ONEBIT = ("compression.min_bytes=0B", "compression.uplink.compressor=onebit",
          "compression.downlink.compressor=onebit")
COVAP = ("compression.filter.type=covap", "compression.filter.interval=2", "partition.fuse_below=0",
         "partition.bytes=16KiB")


class MethodsTest(unittest.TestCase):
    """Scenarios of methods_worker.py. Those that need no settings of their own share a job."""

    def run_job(self, *scenarios, settings=(), folder=None):
        with tempfile.TemporaryDirectory() as own:
            command = [ROOT / "scripts" / "gradwire-launch", "--bin-dir", BIN, "--free-port",
                       "--workers", "2", "--servers", "1"]
            for setting in settings:
                command += ["--set", setting]
            command += ["--", PYTHON, WORKER, folder or own, *scenarios]
            result = subprocess.run([str(word) for word in command], env=environment(), cwd=own,
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
    main()
