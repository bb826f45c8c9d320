#!/usr/bin/python3
"""The examples of worker/python/examples, each for a few steps in a job of two real workers.

Usage: examples_test.py LIBRARY BIN_DIR   (exit code 77: there is no PyTorch, or no data set)
"""

import gzip
import pathlib
import re
import struct
import subprocess
import tempfile
import unittest

from jobs import BIN, PYTHON, ROOT, environment, main

EXAMPLES = ROOT / "worker" / "python" / "examples"
DEADLINE_S = 240


def write_idx(path, shape, values):
    path.write_bytes(gzip.compress(struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape) +
                                   bytes(values)))


def write_easy_images(folder):
    """Two kinds of images in the files of Fashion-MNIST: bright above (class 3) or below (class 7)."""
    above = bytes([200] * 392 + [0] * 392)
    below = above[::-1]
    for part, count in (("train", 400), ("t10k", 100)):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", (count, 28, 28),
                  (above + below) * (count // 2))
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", (count,), [3, 7] * (count // 2))


class ExamplesTest(unittest.TestCase):

    def run_example(self, name, *arguments, config="onebit.yaml", expected=0, every_rank=False):
        """Returns what rank 0 has said, or all ranks."""
        with tempfile.TemporaryDirectory() as folder:
            command = [ROOT / "scripts" / "gradwire-launch", "--config", ROOT / "configs" / config,
                       "--bin-dir", BIN, "--free-port", "--workers", "2", "--servers", "1",
                       "--log-dir", pathlib.Path(folder) / "logs", "--", PYTHON,
                       EXAMPLES / name, *arguments]
            result = subprocess.run([str(word) for word in command], env=environment(), cwd=folder,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                    timeout=DEADLINE_S, check=False)
            logs = "".join(path.read_text(encoding="utf-8") for path in
                           sorted(pathlib.Path(folder).glob("logs/**/std*.log")))
        self.assertEqual(result.returncode, expected, result.stdout)
        return logs if every_rank else result.stdout

    def losses(self, output):
        found = [float(text) for text in re.findall(r"^step \d+ of \d+: loss ([\d.]+),", output, re.M)]
        self.assertTrue(found, output)
        return found

    def test_fashion_mnist_learns_what_is_easy(self):
        for optimizer, config in (("sgd", "sgd.yaml"), ("adam", "adam.yaml")):
            with self.subTest(optimizer=optimizer), tempfile.TemporaryDirectory() as folder:
                write_easy_images(pathlib.Path(folder))
                output = self.run_example("fashion_mnist.py", "--steps", "30", "--batch", "16",
                                          "--optimizer", optimizer, "--data", folder, config=config)
                self.assertIn("step 30 of 30", output)
                accuracy = float(re.search(r"test accuracy ([\d.]+) %", output)[1])
                # Guessing gives 50 at best.
                self.assertGreater(accuracy, 90, output)
                self.assertNotIn("UserWarning", output)

    def test_rank_0_warns_of_adam_with_onebit(self):
        with tempfile.TemporaryDirectory() as folder:
            write_easy_images(pathlib.Path(folder))
            arguments = ("fashion_mnist.py", "--steps", "1", "--batch", "4", "--optimizer", "adam",
                         "--data", folder)
            output = self.run_example(*arguments, every_rank=True)
        self.assertEqual(output.count("UserWarning: Adam with onebit"), 1, output)
        self.assertIn("for 'Gradient.fc1.weight': what a biased compressor", output)

    def test_fashion_mnist_counts_epochs_in_steps(self):
        with tempfile.TemporaryDirectory() as folder:
            write_easy_images(pathlib.Path(folder))
            output = self.run_example("fashion_mnist.py", "--epochs", "2", "--batch", "64", "--data",
                                      folder)
        # 400 images, 200 a worker: 3 whole batches an epoch.
        self.assertIn("step 6 of 6", output)

    def test_fashion_mnist_reads_debians_files(self):
        if not pathlib.Path("/usr/share/datasets/fashion-mnist").is_dir():
            self.skipTest("Debian's package dataset-fashion-mnist is not installed")
        output = self.run_example("fashion_mnist.py", "--steps", "3", "--batch", "8")
        self.assertIn("test accuracy", output)

    def test_fashion_mnist_says_which_file_is_missing(self):
        output = self.run_example("fashion_mnist.py", "--data", "/nowhere", expected=1)
        self.assertIn("there is no /nowhere/train-images-idx3-ubyte.gz", output)

    def test_the_language_model_learns_and_writes(self):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "text").write_text("You may copy this. " * 100, encoding="utf-8")
            output = self.run_example("language_model.py", "--steps", "30", "--batch", "4", "--data",
                                      folder, config="adam.yaml")
        first, last = (lambda found: (found[0], found[-1]))(self.losses(output))
        # The text has 13 characters: knowing no more than how often each comes gives 2.4.
        self.assertLess(last, 2.0, output)
        self.assertLess(last, first, output)
        self.assertIn("\nYou may ", output)

    def test_the_language_model_learns_by_a_method(self):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "text").write_text("You may copy this. " * 100, encoding="utf-8")
            output = self.run_example("language_model.py", "--steps", "30", "--batch", "4", "--data",
                                      folder, "--method", "clan", "--lr", "0.02", config="onebit.yaml",
                                      every_rank=True)
        first, last = (lambda found: (found[0], found[-1]))(self.losses(output))
        # 13 characters: knowing no more than that gives 2.56.
        self.assertLess(last, 2.4, output)
        self.assertLess(last, first, output)
        self.assertNotIn("UserWarning", output)

    def test_the_language_model_reads_debians_licences(self):
        output = self.run_example("language_model.py", "--steps", "2", "--batch", "2")
        self.assertRegex(output, r"\d{6} characters, \d{6} parameters")

    def test_linear_regression_finds_the_weights(self):
        output = self.run_example("linear_regression.py", config="plain.yaml")
        # 2000 rows with noise of 0.1: a weight is off by 0.1 / sqrt(2000) = 0.0022 (standard
        # deviation), the worst of 100 by less than 5 of those.
        self.assertLess(float(re.findall(r"largest error of a weight ([\d.]+)", output)[-1]), 0.011)


if __name__ == "__main__":
    main()
