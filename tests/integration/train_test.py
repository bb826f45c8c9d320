#!/usr/bin/python3
"""Training jobs through gradwire-launch: the same parameters whatever the speed knobs, plan replay.

Usage: train_test.py BIN_DIR [--sanitized]     (sanitized programs are ten times slower: fewer jobs)
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
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

    def command(self, workers, *settings, model="conv", steps=8, config="onebit.yaml", extra=()):
        """A small job; with it where its logs and rank 0's report will be."""
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
        return [str(c) for c in command], logs, report

    def train(self, *arguments, fails=False, **options):
        """Runs a small job; returns the report of rank 0 and the job's log directory, or what it says as it fails."""
        command, logs, report = self.command(*arguments, **options)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=DEADLINE_S)
        if fails:
            self.assertEqual(done.returncode, 1, done.stdout)
            return done.stdout
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

    def test_a_run_that_is_stopped_and_restored_ends_as_if_nothing_had_been(self):
        frozen = ["method=onebit_adam", "compression.warmup_steps=10"]
        filtered = ["compression.filter.type=covap", "compression.filter.interval=3", "partition.bytes=64KiB"]
        jobs = {  # settings, where it is stopped
            "momentum": ([], 7),
            "lans": (["method=lans"], 7),
            "1-bit Adam in the warm-up": (frozen, 7),
            "1-bit Adam at the freeze": (frozen, 10),
            "1-bit Adam after the freeze": (frozen, 13),
            "momentum with the filter": (filtered, 7),
            "lans with the filter": ([*filtered, "compression.filter.inactive=skip", "method=lans"], 8),
            "residuals that follow the learning rate": (
                ["compression.uplink.feedback=ef_lr", "compression.downlink.feedback=ef_lr"], 7),
        }
        if SANITIZED:
            jobs = {name: jobs[name] for name in ("1-bit Adam after the freeze", "momentum with the filter")}
        for name, (settings, stop_at) in jobs.items():
            with self.subTest(name):
                folder = self.scratch / name
                extra = ("--lr", "0.01", "--progress-every", "0")
                whole, _ = self.train(2, *settings, steps=20, extra=extra)
                stopped, _ = self.train(2, *settings, steps=20,
                                        extra=(*extra, "--save", folder, "--stop-at", stop_at))
                self.assertEqual(stopped["steps"], stop_at)
                self.assertNotEqual(stopped["digest"], whole["digest"])
                self.assertEqual(sorted(file.name for file in folder.iterdir()),
                                 [f"rank-{rank}.step-{stop_at}" for rank in range(2)])
                # With new servers, as many as there were or not.
                restored, _ = self.train(2, *settings, "job.servers=3", steps=20,
                                         extra=(*extra, "--restore", folder))
                self.assertEqual(restored["digest"], whole["digest"])
                self.assertEqual(restored["steps"], 20)
                self.assertEqual(restored["restored_step"], stop_at)
                self.assertIsNone(whole["restored_step"])

    @unittest.skipIf(SANITIZED, "too slow, and runs no other code")
    def test_a_run_that_is_killed_goes_on_where_it_was_saved(self):
        folder = self.scratch / "states"
        extra = ("--progress-every", "0")
        whole, _ = self.train(2, steps=400, extra=extra)
        saving = (*extra, "--save", folder, "--save-every", "7")
        command, _, _ = self.command(2, steps=400, extra=saving)
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while not list(folder.glob("rank-0.step-[1-9][0-9]")) and job.poll() is None:
                self.assertLess(time.monotonic(), deadline, "no state was saved")
                time.sleep(0.005)
        finally:
            job.kill()  # all its processes end with it, wherever they are
            job.wait()
        self.assertEqual(job.returncode, -signal.SIGKILL, "the job was over before it was killed")
        # It goes on, and goes on to save.
        restored, _ = self.train(2, steps=400, extra=(*saving, "--restore", folder))
        self.assertEqual(restored["digest"], whole["digest"])
        self.assertGreaterEqual(restored["restored_step"], 7)
        self.assertEqual(restored["restored_step"] % 7, 0)
        self.assertEqual(sorted(file.name for file in folder.iterdir()),
                         ["rank-0.step-399", "rank-1.step-399"])

    @unittest.skipIf(SANITIZED, "trainer_test runs this code")
    def test_every_rank_says_why_a_saved_run_is_not_restored(self):
        folder = self.scratch / "states"
        extra = ("--lr", "0.01", "--progress-every", "0")
        self.train(2, extra=(*extra, "--save", folder, "--stop-at", 3))
        restoring = (*extra, "--restore", folder)
        self.assertIn("the saved run has workers 2, expected 1", self.train(1, extra=restoring, fails=True))
        self.assertIn("there is no saved run of rank 2 in '", self.train(3, extra=restoring, fails=True))
        self.assertIn("the saved run has another model: 8 tensors, expected 6",
                      self.train(2, model="mlp", extra=restoring, fails=True))
        self.assertIn("the saved run has method none, expected lans",
                      self.train(2, "method=lans", extra=restoring, fails=True))
        file = folder / "rank-1.step-3"
        whole = file.read_bytes()
        file.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
        self.train(2, extra=restoring, fails=True)
        for rank, says in enumerate(["rank 1 cannot restore the run: its own log says why",
                                     "rank-1.step-3': the saved run is damaged: checksum"]):
            log = self.scratch / f"run{self.runs}" / f"rank.0{rank}" / "stderr.log"
            self.assertIn(says, log.read_text())
        # The files of another run: the same step, other parameters.
        other = self.scratch / "other"
        self.train(2, "compression.uplink.compressor=none", extra=(*extra, "--save", other, "--stop-at", 3))
        file.write_bytes((other / file.name).read_bytes())
        self.assertIn("after 3 steps the parameters of rank", self.train(2, extra=restoring, fails=True))

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
