#!/usr/bin/python3
"""Real processes: gradwire-server and push-pull workers, stopped and continued.

Usage: process_test.py BIN_DIR
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest

BIN = pathlib.Path(sys.argv.pop(1))
DEADLINE_S = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
    """A child whose output lines are read as they come."""

    def __init__(self, program, *arguments):
        self.popen = subprocess.Popen(
            [str(BIN / program), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines = []
        self.errors = ""
        self.changed = threading.Condition()
        self.readers = [threading.Thread(target=self.read_output), threading.Thread(target=self.read_errors)]
        for reader in self.readers:
            reader.start()

    def read_output(self):
        for line in self.popen.stdout:
            with self.changed:
                self.lines.append(line.strip())
                self.changed.notify_all()

    def read_errors(self):
        self.errors = self.popen.stderr.read()

    def has(self, line):
        with self.changed:
            return line in self.lines

    def wait_for(self, line):
        with self.changed:
            return self.changed.wait_for(lambda: line in self.lines, DEADLINE_S)

    def wait(self):
        code = self.popen.wait(DEADLINE_S)
        for reader in self.readers:
            reader.join()
        self.popen.stdout.close()
        self.popen.stderr.close()
        return code

    def state(self):
        stat = pathlib.Path(f"/proc/{self.popen.pid}/stat").read_text()
        return stat.rsplit(")", 1)[1].split()[0]


class ProcessTest(unittest.TestCase):
    def setUp(self):
        self.processes = []

    def tearDown(self):
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.kill()
                process.wait()

    def start(self, program, *arguments):
        process = Process(program, *arguments)
        self.processes.append(process)
        return process

    def test_a_stopped_worker_gets_its_own_rounds_bytes(self):
        for compressor in ("none", "fp16"):
            with self.subTest(compressor=compressor):
                self.stop_and_continue(compressor)

    def stop_and_continue(self, compressor):
        settings = ["--set", "job.workers=2", "--set", f"endpoint=tcp://127.0.0.1:{free_port()}"]
        for side in ("uplink", "downlink"):
            settings += ["--set", f"compression.{side}.compressor={compressor}"]
        server = self.start("gradwire-server", *settings)
        common = ["--tensors", "6", "--elements", "200000", "--rounds", "12", "--warm-up", "0",
                  "--check", "--verbose", *settings]
        # Rank 0 pushes round 5 when rank 1 has already stopped, just after its own push.
        running = self.start("push_pull_worker", "--rank", "0", "--delay-at", "5", "--delay-ms", "600",
                             *common)
        stopped = self.start("push_pull_worker", "--rank", "1", "--stop-at", "5", *common)
        self.assertTrue(running.wait_for("done 5"), running.errors)
        self.assertTrue(running.wait_for("pushed 6"))
        time.sleep(1.0)
        self.assertEqual(stopped.state(), "T")
        self.assertFalse(stopped.has("done 5"))
        # One round ahead is as far as it may: the stopped worker's part of round 6 is missing.
        self.assertFalse(running.has("done 6"))
        stopped.popen.send_signal(signal.SIGCONT)
        for worker in (running, stopped):
            self.assertEqual(worker.wait(), 0, worker.errors)
            self.assertTrue(worker.has("done 11"))
            self.assertEqual(json.loads(worker.lines[-1])["reconnects"], 0)
        self.assertEqual(server.wait(), 0, server.errors)

    def test_the_server_names_a_killed_worker_and_everyone_ends(self):
        settings = ["--set", "job.workers=2", "--set", f"endpoint=tcp://127.0.0.1:{free_port()}",
                    "--set", "timeouts.dead_after=1s"]
        server = self.start("gradwire-server", *settings)
        common = ["--tensors", "4", "--elements", "100000", "--rounds", "100000", "--verbose", *settings]
        survivor = self.start("push_pull_worker", "--rank", "0", *common)
        victim = self.start("push_pull_worker", "--rank", "1", *common)
        self.assertTrue(victim.wait_for("done 20"), victim.errors)
        victim.popen.kill()
        self.assertEqual(survivor.wait(), 5, survivor.errors)
        self.assertEqual(server.wait(), 5, server.errors)
        for process in (survivor, server):
            self.assertRegex(process.errors, r"worker 1 (at [0-9.]+ \(host .*\) )?is lost")

    def test_a_missing_worker_is_named_when_the_start_deadline_passes(self):
        settings = ["--set", "job.workers=2", "--set", f"endpoint=tcp://127.0.0.1:{free_port()}",
                    "--set", "timeouts.start=1s"]
        server = self.start("gradwire-server", *settings)
        worker = self.start("push_pull_worker", "--rank", "0", *settings)
        self.assertEqual(server.wait(), 3, server.errors)
        self.assertEqual(worker.wait(), 3, worker.errors)
        self.assertIn("missing worker 1", server.errors)

    def test_logs_in_json_are_an_object_a_line(self):
        settings = ["--set", "job.workers=2", "--set", f"endpoint=tcp://127.0.0.1:{free_port()}",
                    "--set", "timeouts.start=1s", "--set", "log.format=json"]
        server = self.start("gradwire-server", *settings)
        worker = self.start("push_pull_worker", "--rank", "0", *settings)
        self.assertEqual(server.wait(), 3, server.errors)
        self.assertEqual(worker.wait(), 3, worker.errors)
        for process, name in ((server, "server/0"), (worker, "worker/0")):
            lines = [json.loads(line) for line in process.errors.splitlines()]
            self.assertTrue(lines)
            for line in lines:
                self.assertLessEqual({"time", "level", "process", "component", "message"}, line.keys())
                self.assertEqual(line["process"], name)
            errors = [line for line in lines if line["level"] == "error"]
            self.assertTrue(any("missing worker 1" in str(line) for line in errors), process.errors)
        # Numbers are numbers.
        done = next(line for line in map(json.loads, server.errors.splitlines()) if line["message"] == "done")
        self.assertEqual(done["rounds"], 0)

    def test_a_plan_that_cannot_be_saved_is_named_to_everyone(self):
        settings = ["--set", f"endpoint=tcp://127.0.0.1:{free_port()}"]
        server = self.start("gradwire-server", "--save-plan", "/nowhere/plan", *settings)
        worker = self.start("push_pull_worker", "--rank", "0", "--rounds", "1", *settings)
        self.assertNotEqual(worker.wait(), 0, worker.errors)
        self.assertNotEqual(server.wait(), 0, server.errors)
        for process in (server, worker):
            self.assertRegex(process.errors, r" error .*/nowhere/plan")

    def test_an_interrupted_server_ends_with_130(self):
        server = self.start("gradwire-server", "--set", f"endpoint=tcp://127.0.0.1:{free_port()}")
        time.sleep(0.3)
        server.popen.send_signal(signal.SIGTERM)
        self.assertEqual(server.wait(), 130, server.errors)

    def test_a_wrong_setting_is_a_usage_error(self):
        server = self.start("gradwire-server", "--set", "partition.credits=4MiB")
        self.assertEqual(server.wait(), 2)
        self.assertIn("partition.credit", server.errors)


if __name__ == "__main__":
    os.environ.pop("GRADWIRE_CONFIG", None)
    unittest.main(verbosity=2)
