#!/usr/bin/python3
"""gradwire bench net, the real program with a tiny model: that its figures add up, never how fast.

Usage: net_test.py BIN_DIR
"""

import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
DEADLINE_S = 120
# The rate of the test's links, and TCP's share of it, in bytes a ms.
BYTES_PER_MS = 100e6 / 8 * 1448 / 1514 / 1e3
MODEL = "a.weight 1000 100\na.bias 100\nb.weight 100 2000\nb.bias 2000\n"
ELEMENTS = 100000 + 100 + 200000 + 2000
CANNOT = 77


class NetTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        self.model = self.folder / "model.txt"
        self.model.write_text(MODEL, encoding="utf-8")
        (self.folder / "tmp").mkdir()
        # Every process of the job has it on its command line.
        self.mark = f"job.id=net-test-{os.getpid()}"

    def command(self, *arguments):
        return [str(BIN / "gradwire"), "bench", "net", "--model", str(self.model), "--json",
                str(self.folder / "all.json"), "--launches", "1", "--warm-up", "0", "--set", self.mark,
                "--set", "compression.min_bytes=0B", *arguments]

    def environment(self):
        return {**os.environ, "TMPDIR": str(self.folder / "tmp")}

    def run_bench(self, *arguments):
        return subprocess.run(self.command(*arguments), capture_output=True, text=True,
                              env=self.environment(), timeout=DEADLINE_S, check=False)

    def measured(self, *arguments):
        done = self.run_bench(*arguments)
        if done.returncode == CANNOT:
            self.skipTest(done.stderr.strip())
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check_nothing_is_left()
        found = json.loads((self.folder / "all.json").read_text(encoding="utf-8"))
        return {result["compressor"]: result for result in found["results"]}, done.stdout

    def of_the_job(self):
        pids = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if self.mark.encode() in path.read_bytes():
                    pids.append(path.parent.name)
            except OSError:
                pass  # has just ended
        return pids

    def check_nothing_is_left(self):
        limit = time.monotonic() + 20
        while self.of_the_job() and time.monotonic() < limit:
            time.sleep(0.05)
        self.assertEqual(self.of_the_job(), [])
        self.assertEqual(list((self.folder / "tmp").iterdir()), [])

    def check_result(self, result, steps, bytes_of_gradients, workers):
        [launch] = result["launches"]
        self.assertEqual(len(launch["workers"]), workers)
        for worker in launch["workers"]:
            each = worker["each_step"]
            self.assertEqual(len(each), steps)
            for direction in ("up", "down"):
                plan = sum(server[direction] for server in worker["servers"])
                self.assertEqual(plan, bytes_of_gradients)
                name = "sent_bytes" if direction == "up" else "received_bytes"
                # The last step's may still be on their way; headers and receipts are small.
                total = sum(step[name] for step in each)
                self.assertGreaterEqual(total, (steps - 1) * plan)
                self.assertLessEqual(total, steps * 1.1 * plan + 20000)
                self.assertEqual(worker["overlap"][f"{direction}_bytes"], plan)
            for step in each:
                parts = step["compute_ms"] + step["exposed_ms"] + step["hand_over_ms"]
                self.assertGreaterEqual(step["step_ms"], parts - 0.01)
            self.assertGreaterEqual(sum(step["compute_ms"] for step in each), 20 * steps - 1)
        self.assertAlmostEqual(result["exposed_ms"], result["step_ms"] - result["compute_ms"], places=6)
        for name in ("worker_cpu_ms", "server_cpu_ms", "goodput", "ccr", "comm_ms"):
            self.assertGreater(result[name], 0, name)

    def test_on_loopback_time_and_bytes_add_up(self):
        plot = self.folder / "plot.png"
        found, text = self.measured("--compute-ms", "20", "--steps", "6", "--compressor", "none",
                                    "--compressor", "fp16", "--workers", "2", "--servers", "2", "--plot", str(plot))
        self.check_result(found["none"], 6, 4 * ELEMENTS, 2)
        self.check_result(found["fp16"], 6, 2 * ELEMENTS, 2)
        self.assertIsNone(found["none"]["bound_ms"])
        self.assertIn("20 ms of compute a step (asleep)", text)
        self.assertEqual(plot.read_bytes()[1:4], b"PNG")

    def test_compute_may_burn(self):
        found, text = self.measured("--compute-ms", "20", "--steps", "3", "--compressor", "none", "--compute",
                                    "burn", "--workers", "1")
        self.assertIn("(burning CPU time)", text)
        self.check_result(found["none"], 3, 4 * ELEMENTS, 1)
        self.assertGreater(found["none"]["worker_cpu_ms"], 15)  # by which sleeping is told from burning

    def test_a_filter_sends_each_unit_once_in_its_interval(self):
        found, _ = self.measured("--compute-ms", "20", "--steps", "8", "--compressor", "none", "--compressor", "fp16",
                                 "--filter", "covap(interval=4)", "--filter", "fp16+covap(interval=2,c0=1)",
                                 "--set", "partition.bytes=64KiB", "--set", "partition.fuse_below=16KiB")
        self.assertEqual(list(found), ["none", "fp16", "covap(interval=4)", "fp16+covap(interval=2,c0=1)"])
        for name, interval in (("none", None), ("fp16", None), ("covap(interval=4)", 4),
                               ("fp16+covap(interval=2,c0=1)", 2)):
            self.assertEqual(found[name]["interval"], interval)
            for worker in found[name]["launches"][0]["workers"]:
                self.assertEqual({step["interval"] for step in worker["each_step"]}, {interval or 0})
                width = 2 if "fp16" in name else 4
                [server] = worker["servers"]
                for direction in ("up", "down"):
                    self.assertAlmostEqual(server[direction], width * ELEMENTS / (interval or 1), delta=1)
                # Eight steps are two or four intervals; the last step's may still be on their way.
                total = sum(step["sent_bytes"] for step in worker["each_step"])
                self.assertLessEqual(total, 8 * (1.1 * server["up"] + 20000))
                self.assertGreaterEqual(total, 6 * server["up"])
                if interval:
                    overlap = worker["overlap"]
                    self.assertAlmostEqual(overlap["full_ccr"], interval * overlap["ccr"],
                                           delta=0.01 * overlap["full_ccr"] + 0.001)

    def test_a_measured_interval_is_that_of_the_step(self):
        # Little compute beside many bytes. There are few units, so the interval is small and soon begins.
        found, _ = self.measured("--compute-ms", "20", "--steps", "40", "--compressor", "none", "--filter", "covap",
                                 "--workers", "1", "--rate", "100mbit", "--set", "partition.bytes=256KiB")
        worker = found["covap"]["launches"][0]["workers"][0]
        intervals = [step["interval"] for step in worker["each_step"]]
        self.assertEqual(intervals[:16], [1] * 16)
        self.assertGreater(intervals[-1], 1)
        self.assertEqual(found["covap"]["interval"], worker["interval"])
        before = sum(step["sent_bytes"] for step in worker["each_step"][:8])
        self.assertLess(sum(step["sent_bytes"] for step in worker["each_step"][-8:]), 0.8 * before)

    def test_on_shaped_links_no_step_is_faster_than_the_bound(self):
        # Nothing here is too slow on a busy machine.
        for colocated in (False, True):
            with self.subTest(colocated=colocated):
                found, _ = self.measured(
                    "--rate", "100mbit", "--compute-ms", "20", "--steps", "8", "--compressor", "none",
                    "--compressor", "onebit", *(["--colocated"] if colocated else []))
                none = found["none"]
                self.check_result(none, 8, 4 * ELEMENTS, 2)
                # One server, alone: two workers' gradients. On a worker's host: the other worker's.
                bound = 4 * ELEMENTS * (1 if colocated else 2) / BYTES_PER_MS
                self.assertAlmostEqual(none["bound_ms"], bound, places=6)
                self.assertAlmostEqual(none["bound_share"], bound / none["step_ms"], places=6)
                slowest = max(sum(step["step_ms"] for step in worker["each_step"])
                              for worker in none["launches"][0]["workers"])
                # The last step's bytes may be missing, and a link lets 128 KiB pass at once.
                self.assertGreater(slowest, (7 * bound - 2 * (128 << 10) / BYTES_PER_MS) * 0.95)
                # A link is not faster than its rate, and 32 times the bytes take longer.
                least = 4 * ELEMENTS / BYTES_PER_MS
                remote = [worker["overlap"] for worker in none["launches"][0]["workers"]][-1]
                self.assertGreater(remote["comm_ms"], 0.7 * least)
                small = found["onebit"]["launches"][0]["workers"][-1]["overlap"]
                self.assertGreater(remote["comm_ms"], small["comm_ms"])

    def test_ccr_falls_with_more_compute_and_links_are_not_faster_than_they_are(self):
        ratios = []
        for compute_ms in (20, 400):
            found, _ = self.measured("--rate", "100mbit", "--workers", "1", "--compute-ms", str(compute_ms),
                                     "--steps", "6", "--compressor", "none")
            self.check_result(found["none"], 6, 4 * ELEMENTS, 1)
            overlap = found["none"]["launches"][0]["workers"][0]["overlap"]
            known = 4 * ELEMENTS / BYTES_PER_MS / overlap["compute_ms"]
            self.assertGreater(overlap["ccr"], 0.7 * known)
            ratios.append(overlap["ccr"])
        # 20 times the compute: a machine that stalls a little changes nothing.
        self.assertGreater(ratios[0], 2 * ratios[1])

    @unittest.skipIf(importlib.util.find_spec("torch") is None, "PyTorch is not installed")
    def test_gloo_runs_beside_it(self):
        for words in ([], ["--rate", "100mbit"]):
            found, _ = self.measured("--compute-ms", "20", "--steps", "4", "--compressor", "fp16", "--peer", "gloo",
                                     *words)
            gloo = found["gloo"]
            self.assertEqual(len(gloo["launches"][0]["workers"]), 2)
            for worker in gloo["launches"][0]["workers"]:
                self.assertEqual(worker["gradient_bytes"], 4 * ELEMENTS)
                self.assertEqual(len(worker["each_step"]), 4)
                self.assertGreaterEqual(sum(step["compute_ms"] for step in worker["each_step"]), 79)
            self.assertIsNone(gloo["server_cpu_ms"])
            if words:
                # Two in a ring send the gradients once.
                self.assertAlmostEqual(gloo["bound_ms"], 4 * ELEMENTS / BYTES_PER_MS, places=6)
                self.assertGreater(gloo["sent_bytes"], 0.7 * 4 * ELEMENTS)
            else:
                self.assertIsNone(gloo["sent_bytes"])

    def test_the_ccr_script_has_a_row_for_each_job(self):
        done = subprocess.run([str(SCRIPTS / "bench-ccr"), "--bin-dir", str(BIN), "--ccr", "2", "--rate", "100mbit",
                               "--elements", "2048", "--steps", "3"],
                              capture_output=True, text=True, timeout=3 * DEADLINE_S, check=False)
        if done.returncode == CANNOT:
            self.skipTest(done.stderr.strip())
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if re.match(r"\| \d", line)]
        self.assertEqual(len(rows), 4, done.stdout)
        for _, alone, window, known, measured, ratio in rows:
            self.assertAlmostEqual(float(known), float(alone) / float(window), delta=0.1 * float(known) + 0.01)
            self.assertAlmostEqual(float(ratio), float(measured) / float(known), delta=0.1 * float(ratio) + 0.01)

    def test_a_job_that_fails_leaves_nothing(self):
        done = self.run_bench("--set", "job.colour=red")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("job.colour", done.stderr)
        self.check_nothing_is_left()

    def test_ended_by_a_signal_it_leaves_nothing(self):
        bench = subprocess.Popen(self.command("--steps", "10000", "--compute-ms", "50"),
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self.environment())
        try:
            limit = time.monotonic() + 20
            while len(self.of_the_job()) < 4 and time.monotonic() < limit:
                time.sleep(0.05)
            self.assertGreaterEqual(len(self.of_the_job()), 4)  # it, a server and two workers
            bench.send_signal(signal.SIGTERM)
            self.assertEqual(bench.wait(30), 128 + signal.SIGTERM)
        finally:
            bench.kill()
            bench.wait()
        self.check_nothing_is_left()

    def test_a_wrong_command_line_is_refused(self):
        for words, expect in ((["--workers", "0"], "--workers is 0, expected 1 to 64"),
                              (["--rate", "fast"], "--rate: the rate is 'fast'"),
                              (["--colocated"], "--colocated needs --rate"),
                              (["--filter", "covap(4)"], "--filter is 'covap(4)', expected"),
                              (["--filter", "lossy"], "--filter is 'lossy', expected"),
                              (["--compute", "think"], "--compute")):
            done = self.run_bench(*words)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(expect, done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
