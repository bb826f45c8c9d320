#!/usr/bin/python3
"""Training jobs through gradwire-launch: the same parameters whatever the speed knobs, plan replay.

Usage: train_test.py BIN_DIR [--sanitized]     (sanitized programs are ten times slower: fewer jobs)
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

BIN = pathlib.Path(sys.argv.pop(1))
SANITIZED = "--sanitized" in sys.argv and not sys.argv.remove("--sanitized")
ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path("/usr/share/datasets/fashion-mnist")
SKIP = 77
DEADLINE_S = 240


class TrainTest(unittest.TestCase):
    def setUp(self):
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="gradwire-train-test-"))
        self.addCleanup(shutil.rmtree, self.scratch)
        self.runs = 0

    def train(self, workers, *settings, model="conv", steps=8, config="onebit.yaml", extra=()):
        """Runs a small job; returns the report of rank 0 and the job's log directory."""
        self.runs += 1
        logs = self.scratch / f"run{self.runs}"
        report = self.scratch / f"report{self.runs}.json"
        command = [ROOT / "scripts" / "gradwire-launch", "--config", ROOT / "configs" / config,
                   "--bin-dir", BIN, "--workers", str(workers), "--log-dir", logs,
                   "--set", "endpoint=tcp://127.0.0.1:0", "--set", "compression.warmup_steps=0",
                   "--set", "compression.min_bytes=1KiB", "--set", "partition.fuse_below=4KiB",
                   *[a for s in settings for a in ("--set", s)], "--",
                   "gradwire-train", "--model", model, "--steps", str(steps), "--batch", "16",
                   "--train-limit", "1024", "--test-limit", "256", "--json", report,
                   *(extra or ("--lr", "0.01"))]
        done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, timeout=DEADLINE_S)
        self.assertEqual(done.returncode, 0, done.stdout)
        return json.loads(report.read_text()), logs

    def test_no_speed_knob_changes_the_trained_parameters(self):
        variants = {
            2: [[], [], ["job.servers=3"], ["server.lanes=3"], ["partition.credit=64KiB"],
                ["worker.threads=2", "server.threads=2"],
                ["job.servers=3", "server.lanes=3", "partition.credit=128KiB", "worker.threads=1"]],
            4: [[], [], ["job.servers=3"], ["server.lanes=3"]],
        }
        if SANITIZED:
            variants = {2: [variants[2][0], variants[2][-1]]}
        for workers, settings in variants.items():
            digests = [self.train(workers, *each)[0]["digest"] for each in settings]
            self.assertEqual(digests, [digests[0]] * len(digests), f"{workers} workers")

    def test_a_text_is_trained_to_the_same_parameters_too(self):
        one, _ = self.train(2, model="charlm", steps=4)
        two, _ = self.train(2, "job.servers=3", "partition.credit=64KiB", model="charlm", steps=4)
        self.assertEqual(one["digest"], two["digest"])
        self.assertGreater(one["test_loss"], 0)

    @unittest.skipIf(SANITIZED, "runs no other code")
    def test_the_report_has_how_much_communication_is_hidden(self):
        report, _ = self.train(2, steps=20)
        for name in ("step_ms", "comm_ms", "compute_ms", "exposed_ms"):
            self.assertGreater(report[name], 0, name)
        self.assertAlmostEqual(report["ccr"], report["comm_ms"] / report["compute_ms"], places=5)

    @unittest.skipIf(SANITIZED, "runs no other code")
    def test_another_seed_gives_other_parameters(self):
        # Otherwise the digests above would say nothing.
        one, _ = self.train(2, "job.seed=1")
        two, _ = self.train(2, "job.seed=2")
        self.assertNotEqual(one["digest"], two["digest"])

    def test_residuals_may_follow_the_learning_rate(self):
        ef_lr = ["compression.uplink.feedback=ef_lr", "compression.downlink.feedback=ef_lr"]
        plain, _ = self.train(2)
        one, _ = self.train(2, *ef_lr)
        two, _ = self.train(2, *ef_lr, "job.servers=2", "worker.threads=1")
        self.assertEqual(one["digest"], two["digest"])
        self.assertNotEqual(one["digest"], plain["digest"])

    @unittest.skipIf(SANITIZED, "plan_test runs this code")
    def test_a_saved_plan_is_replayed(self):
        first, logs = self.train(2)
        saved = logs / "server.00" / "plan"
        self.assertGreater(saved.stat().st_size, 100)
        # Another partition size would cut other units; the plan has the last word.
        again, _ = self.train(2, f"plan={saved}", "partition.bytes=64KiB")
        self.assertEqual(first["digest"], again["digest"])
        other, _ = self.train(2, "partition.bytes=64KiB")
        self.assertNotEqual(first["digest"], other["digest"])

    @unittest.skipIf(SANITIZED, "integration_covap_test runs this code")
    def test_the_filter_trains_with_zero_fill_and_with_skip(self):
        plain, _ = self.train(2, config="plain.yaml", steps=60)
        unfiltered = ["compression.filter.type=covap", "compression.filter.interval=1"]
        one, _ = self.train(2, *unfiltered, config="plain.yaml", steps=60)
        self.assertEqual(one["digest"], plain["digest"])
        digests = {plain["digest"]}
        for inactive in ("zero_fill", "skip"):
            settings = ["compression.filter.type=covap", "compression.filter.interval=3",
                        f"compression.filter.inactive={inactive}", "partition.bytes=64KiB"]
            first, _ = self.train(2, *settings, config="plain.yaml", steps=60)
            again, _ = self.train(2, *settings, "job.servers=3", "worker.threads=2",
                                  config="plain.yaml", steps=60)
            self.assertEqual(first["digest"], again["digest"], inactive)
            # A third of the bytes, with headers and heartbeats.
            self.assertLess(first["gradient_sent_bytes"], plain["gradient_sent_bytes"] / 2)
            self.assertLess(first["last_loss"], 0.97 * first["first_loss"], inactive)
            digests.add(first["digest"])
        self.assertEqual(len(digests), 3)

    def train_with(self, method, *settings, config="onebit.yaml"):
        """With the method's own rate, twice: also with another placement, which changes nothing."""
        settings = [f"method={method}", *settings]
        extra = ("--progress-every", "0")
        first, _ = self.train(2, *settings, config=config, steps=60, extra=extra)
        again, _ = self.train(2, *settings, "job.servers=3", "worker.threads=2", config=config,
                              steps=60, extra=extra)
        self.assertEqual(first["digest"], again["digest"], method)
        self.assertEqual(first["skipped_updates"], 0, method)
        self.assertLess(first["last_loss"], 0.97 * first["first_loss"], method)
        return first

    @unittest.skipIf(SANITIZED, "trainer_test and methods_test run this code")
    def test_methods_train_over_onebit(self):
        digests = {self.train_with("clan")["digest"], self.train_with("dist_ef_sgdm")["digest"]}
        frozen = "compression.warmup_steps=30"
        plain = self.train_with("adamw", frozen)
        digests.add(plain["digest"])
        for method in ("onebit_adam", "onebit_lamb"):
            report = self.train_with(method, frozen)
            # Half of the steps are 32 times smaller.
            self.assertGreater(report["push_ratio"], 1.8)
            self.assertLess(report["last_loss"], 1.2 * plain["last_loss"], method)
            digests.add(report["digest"])
        self.assertEqual(len(digests), 5)

    @unittest.skipIf(SANITIZED, "trainer_test and integration_covap_test run this code")
    def test_methods_train_with_the_filter(self):
        settings = ["compression.filter.type=covap", "compression.filter.interval=3",
                    "partition.bytes=64KiB"]
        skip = "compression.filter.inactive=skip"
        self.train_with("lans", *settings, skip, config="plain.yaml")
        self.train_with("dist_ef_sgdm", *settings, skip, config="plain.yaml")
        self.train_with("dist_ef_sgdm", *settings, config="plain.yaml")

    @unittest.skipIf(SANITIZED, "runs no other code")
    def test_onebit_is_28_times_smaller_both_ways(self):
        report, _ = self.train(2, model="mlp", steps=6)
        self.assertGreater(report["push_ratio"], 28)
        self.assertGreater(report["pull_ratio"], 28)
        self.assertEqual(report["nonfinite_units"], 0)


if __name__ == "__main__":
    if not DATA.is_dir():
        print("SKIPPED: the data set is not installed (Debian package dataset-fashion-mnist)")
        sys.exit(SKIP)
    # What a launcher around the tests has set is not for their jobs.
    for name in list(os.environ):
        if name.startswith(("GRADWIRE_", "BYTEPS_", "DMLC_", "SLURM_", "OMPI_", "MASTER_")) or name in (
                "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
                "JOB_COMPLETION_INDEX"):
            del os.environ[name]
    unittest.main(verbosity=2)
