#!/usr/bin/python3
"""gradwire.torch's calls on tensors in jobs of two real workers.

Usage: ops_test.py LIBRARY BIN_DIR   (exit code 77: there is no PyTorch)
"""

import pathlib
import subprocess
import tempfile
import unittest

from jobs import BIN, PYTHON, ROOT, environment, main

WORKER = pathlib.Path(__file__).resolve().parent / "ops_worker.py"
DEADLINE_S = 120


def run(command, folder):
    return subprocess.run([str(word) for word in command], env=environment(), cwd=folder,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=DEADLINE_S, check=False)


class OpsTest(unittest.TestCase):
    """Scenarios of ops_worker.py, with both ranks' checks."""

    def launch(self, *command, options=()):
        with tempfile.TemporaryDirectory() as folder:
            result = run([ROOT / "scripts" / "gradwire-launch", "--bin-dir", BIN, "--free-port",
                          "--workers", "2", *options, "--", PYTHON, *command], folder)
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertIn("all done", result.stdout)

    def test_sums_and_averages_every_dtype_shape_and_layout(self):
        self.launch(WORKER, "dtypes_and_shapes", "fresh_tensors", "strides", "gradients_required",
                    "cast")

    def test_has_many_in_flight(self):
        self.launch(WORKER, "asynchronous")

    def test_refuses_wrong_calls_by_name_also_in_data_loaders(self):
        self.launch(WORKER, "wrong_calls", "data_loaders")

    def test_broadcasts_tensors_and_optimizers_exactly_under_compression(self):
        self.launch(WORKER, "broadcasts", "optimizer_states",
                    options=["--config", ROOT / "configs" / "onebit.yaml", "--set",
                             "compression.min_bytes=0B"])

    def test_either_may_be_imported_first(self):
        for order in ("import torch; import gradwire.torch as gw; gw.init()",
                      "import gradwire.torch as gw; gw.init(); import torch",
                      "import gradwire; gradwire.init(); import torch; import gradwire.torch as gw"):
            with self.subTest(order=order):
                # Both make use of threads: PyTorch in the product, Gradwire in the average.
                self.launch("-c", f"{order}; a = torch.ones(300, 300);"
                            "b = gw.push_pull(a @ a, name='x') @ a;"
                            "assert float(b[0, 0]) == 90000, b; gw.shutdown(); print('all done')")


if __name__ == "__main__":
    main()
