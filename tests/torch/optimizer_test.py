#!/usr/bin/python3
"""gradwire.torch's optimizer and wrapper in jobs of two real workers.

Usage: optimizer_test.py LIBRARY BIN_DIR   (exit code 77: there is no PyTorch)
"""

import pathlib
import subprocess
import tempfile
import unittest
import uuid

from jobs import BIN, PYTHON, ROOT, environment, main

WORKER = pathlib.Path(__file__).resolve().parent / "optimizer_worker.py"
DEADLINE_S = 240


def processes_of(token):
    """What is still there of a job: pid and command."""
    result = []
    for process in pathlib.Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if f"TEST_JOB={token}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    result.append((process.name, (process / "cmdline").read_bytes()))
            except OSError:
                pass  # it has just ended, or is somebody else's
    return result


class OptimizerTest(unittest.TestCase):
    """Scenarios of optimizer_worker.py, with both ranks' checks. Those that need no settings of their
    own share a job."""

    def run_job(self, *scenarios, settings=(), expected=0):
        token = str(uuid.uuid4())
        with tempfile.TemporaryDirectory() as folder:
            command = [ROOT / "scripts" / "gradwire-launch", "--bin-dir", BIN, "--free-port",
                       "--workers", "2", "--servers", "1"]
            for setting in settings:
                command += ["--set", setting]
            command += ["--", PYTHON, WORKER, *scenarios]
            result = subprocess.run([str(word) for word in command], cwd=folder,
                                    env=environment(TEST_JOB=token,  # marks every process of the job
                                                    TEST_SERVER=str(BIN / "gradwire-server")),
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                    timeout=DEADLINE_S, check=False)
        self.assertEqual(result.returncode, expected, result.stdout)
        if expected == 0:
            self.assertIn("all done", result.stdout)
        self.assertEqual(processes_of(token), [])
        return result.stdout

    def test_two_workers_equal_one_with_the_doubled_batch(self):
        self.run_job("equals_doubled_batch", "hooks_of_pytorch_2")

    def test_parameters_stay_the_same_under_every_compressor(self):
        for compressor in ("none", "fp16", "bf16", "onebit", "topk"):
            with self.subTest(compressor=compressor):
                settings = ["compression.min_bytes=0B"]
                for link in ("uplink", "downlink"):
                    settings.append(f"compression.{link}.compressor={compressor}")
                    if compressor == "topk":
                        settings.append(f"compression.{link}.ratio=0.1")
                self.run_job("two_hundred_steps", settings=settings)

    def test_the_filter_works_with_zeros_and_is_refused_with_skip(self):
        covap = ["compression.filter.type=covap", "compression.filter.interval=3",
                 "compression.filter.c0=1", "partition.fuse_below=0"]
        for compressor in ("none", "fp16"):
            with self.subTest(compressor=compressor):
                self.run_job("two_hundred_steps", settings=[
                    *covap, "compression.min_bytes=0B", f"compression.uplink.compressor={compressor}",
                    f"compression.downlink.compressor={compressor}"])
        self.run_job("refuses_skip", settings=[*covap, "compression.filter.inactive=skip"])

    def test_several_optimizers(self):
        self.run_job("two_models", "one_backward_for_two_optimizers", "one_loss_reaches_both")

    def test_several_optimizers_through_a_change_of_compression(self):
        """Every rank must count the steps alike: a phase begins at one of them."""
        self.run_job("one_backward_for_two_optimizers", settings=[
            "compression.min_bytes=0B", "compression.warmup_steps=4",
            "compression.uplink.compressor=fp16", "compression.downlink.compressor=fp16"])

    def test_clipping_and_several_passes_push_once(self):
        self.run_job("clipping", "several_passes", "closures")

    def test_shared_unused_and_frozen_parameters(self):
        self.run_job("shared_and_unused", "wrong_orders", "gradient_objects")

    def test_dtypes_schedulers_and_states(self):
        self.run_job("dtypes", "schedulers_and_states")

    def test_refuses_what_it_can_not_average(self):
        self.run_job("refusals")

    def test_uneven_batches(self):
        self.run_job("uneven_batches")

    def test_a_rank_that_raises_leaves_nobody_waiting(self):
        output = self.run_job("failing_in_join", expected=1)
        self.assertIn("rank 0 knows", output)

    def test_steps_that_are_not_finite(self):
        self.run_job("not_finite", "mixed_precision")

    def test_residuals_follow_rates_and_scales(self):
        onebit = ["compression.min_bytes=0B", "compression.uplink.compressor=onebit",
                  "compression.downlink.compressor=onebit"]
        self.run_job("residuals_follow_the_scale", settings=onebit)
        self.run_job("learning_rates", settings=[
            *onebit, "compression.uplink.feedback=ef_lr", "compression.downlink.feedback=ef_lr"])

    def test_rank_0_is_told_what_goes_badly_with_the_compression(self):
        for compressor in ("none", "onebit"):
            with self.subTest(compressor=compressor):
                self.run_job("advice", settings=["compression.min_bytes=0B",
                                                 f"compression.uplink.compressor={compressor}"])

    def test_updates_that_overlap_the_next_forward_pass(self):
        self.run_job("overlap")

    def test_the_wrapper(self):
        self.run_job("data_parallel")

    def test_backward_passes_that_fail(self):
        self.run_job("fails_in_backward")

    def test_a_step_that_is_interrupted_can_be_finished(self):
        self.run_job("interrupted")

    def test_one_job_after_another_in_a_process(self):
        self.run_job("second_job")

    def test_an_optimizer_may_go_with_gradients_under_way(self):
        for settings in ([], ["partition.fuse_below=0"]):
            with self.subTest(settings=settings):
                self.run_job("dropped", settings=["timeouts.stall_warn=5s", "timeouts.stall_stop=10s", *settings])

    def test_a_killed_trainer_is_named_and_nothing_is_left(self):
        output = self.run_job("killed", expected=1,
                              settings=["timeouts.heartbeat=250ms", "timeouts.dead_after=2s"])
        self.assertIn("rank 0 knows", output)
        self.assertIn("rank 1 failed first: killed by SIGKILL", output)


if __name__ == "__main__":
    main()
