#!/usr/bin/python3
"""A job that was saved and ended, servers too, goes on in a fresh job as if nothing had happened.

Usage: resume_test.py LIBRARY BIN_DIR   (exit code 77: there is no PyTorch)
"""

import pathlib
import subprocess
import tempfile
import unittest

from jobs import BIN, PYTHON, ROOT, environment, main

WORKER = pathlib.Path(__file__).resolve().parent / "resume_worker.py"
DEADLINE_S = 240
# Biases travel together, weights alone, so that both servers have something.
SETTINGS = ("compression.min_bytes=0B", "partition.fuse_below=1KiB")
ONEBIT = (*SETTINGS, "compression.uplink.compressor=onebit", "compression.downlink.compressor=onebit")
TOPK = (*SETTINGS, "compression.uplink.compressor=topk", "compression.downlink.compressor=topk",
        "compression.uplink.ratio=0.1", "compression.downlink.ratio=0.1")


class ResumeTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_job(self, load, save, steps, kind="sgd", when="after", settings=ONEBIT, workers=2, expected=0):
        """Returns what all workers have said. load, save: names of saved states, None for none."""
        places = []
        for name in (load, save):
            places.append("-" if name is None else self.folder / name)
        if save is not None:
            places[1].mkdir()
        with tempfile.TemporaryDirectory() as logs:
            command = [ROOT / "scripts" / "gradwire-launch", "--bin-dir", BIN, "--free-port", "--log-dir",
                       logs, "--workers", workers, "--servers", 2]
            for setting in settings:
                command += ["--set", setting]
            command += ["--", PYTHON, WORKER, *places, steps, kind, when]
            result = subprocess.run([str(word) for word in command], env=environment(), cwd=self.folder,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                    timeout=DEADLINE_S, check=False)
            text = "".join(path.read_text(encoding="utf-8")
                           for path in sorted(pathlib.Path(logs).glob("**/std*.log")))
        self.assertEqual(result.returncode, expected, result.stdout + text)
        self.assertEqual(text.count("all done"), workers if expected == 0 else 0, text)
        return text

    def parameters(self, name, rank):
        import torch  # pylint: disable=import-outside-toplevel
        return torch.load(self.folder / name / f"{rank}.pt")["model"]

    def expect_same(self, name, other):
        for rank in range(2):
            mine, theirs = self.parameters(name, rank), self.parameters(other, rank)
            for key in mine:
                self.assertEqual(mine[key].numpy().tobytes(), theirs[key].numpy().tobytes(),
                                 f"{key} of rank {rank}")

    def expect_goes_on(self, kind, settings):
        """Ten steps in one job are five in one and five in another."""
        self.run_job(None, "whole", 10, kind, settings=settings)
        self.run_job(None, "half", 5, kind, settings=settings)
        self.assertNotEqual(
            [tensor.tolist() for tensor in self.parameters("half", 0).values()],
            [tensor.tolist() for tensor in self.parameters("whole", 0).values()])
        for when in ("before", "after"):
            text = self.run_job("half", when, 5, kind, when, settings)
            self.assertNotIn("compressed otherwise", text)
            self.assertNotIn("are not used", text)
            self.expect_same(when, "whole")

    def test_goes_on_bit_for_bit(self):
        for kind in ("sgd", "adam"):
            with self.subTest(kind=kind):
                self.setUp()
                self.expect_goes_on(kind, ONEBIT)

    def test_goes_on_bit_for_bit_with_warm_up_after_the_cut(self):
        self.expect_goes_on("sgd", (*ONEBIT, "compression.warmup_steps=7"))

    def test_residuals_make_a_difference(self):
        """Without Gradwire's state the same five steps give something else: the test can fail."""
        import torch  # pylint: disable=import-outside-toplevel
        self.run_job(None, "whole", 10)
        self.run_job(None, "half", 5)
        self.run_job(None, "empty", 0)
        for rank in range(2):
            path = self.folder / "half" / f"{rank}.pt"
            saved = torch.load(path)
            saved["gradwire"] = torch.load(self.folder / "empty" / f"{rank}.pt")["gradwire"]
            torch.save(saved, path)
        self.run_job("half", "rest", 5)
        with self.assertRaises(AssertionError):
            self.expect_same("rest", "whole")

    def test_another_number_of_workers_is_refused(self):
        self.run_job(None, "two", 2)
        text = self.run_job("two", None, 2, workers=1, expected=1)
        self.assertIn("the saved state is of a job of 2 workers, this one has 1", text)
        self.assertIn("restore none: all residuals begin at zero then", text)

    def test_another_compressor_goes_on(self):
        self.run_job(None, "onebit", 5)
        for when in ("before", "after"):
            with self.subTest(when=when):
                text = self.run_job("onebit", when, 5, when=when, settings=TOPK)
                self.assertEqual(text.count("is compressed otherwise than when the state was saved"), 1)
                self.assertIn("it was onebit with ef up and onebit with ef down, it is topk(", text)
                self.assertNotIn("are not used", text)

    def test_no_compressor_goes_on_and_names_what_is_not_used(self):
        self.run_job(None, "onebit", 5)
        text = self.run_job("onebit", "none", 5, settings=())
        self.assertEqual(text.count("are not used"), 2, text)  # on each worker
        self.assertIn("'Gradient.0.weight'", text)


if __name__ == "__main__":
    main()
