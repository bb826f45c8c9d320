#!/usr/bin/python3
"""Tests of scripts/gradwire-launch with stand-ins for the server and the worker.

Every process of a test carries a mark in its environment, so that "nothing is left behind" can be
checked over all of /proc.
"""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "scripts" / "gradwire-launch"
# Bounds on waiting for something that happens within milliseconds on an idle machine.
PATIENCE_S = 60
# For tests in which it must run out.
SHORT_GRACE = ("--grace", "100ms")
SHORT_KILL = ("--kill-after", "100ms")

# Ends when the file "goodbye" appears, as a server does after every worker's goodbye.
FAKE_SERVER = """#!/usr/bin/python3
import os, sys, time
print("server arguments", *sys.argv[1:], flush=True)
open(os.path.join(os.environ["SCRATCH"], "server." + os.environ["GRADWIRE_RANK"]), "w").close()
code = int(os.environ.get("SERVER_EXIT", "0"))
if code:
    print("the server gives up", file=sys.stderr)
    sys.exit(code)
while not os.path.exists(os.path.join(os.environ["SCRATCH"], "goodbye")):
    time.sleep(0.01)
"""

# Does what its arguments say, one after the other.
FAKE_WORKER = """#!/usr/bin/python3
import os, signal, subprocess, sys, time
rank = os.environ["GRADWIRE_RANK"]
scratch = os.environ["SCRATCH"]
def touch(name):
    open(os.path.join(scratch, name), "w").close()
for word in sys.argv[1:]:
    only, _, action = word.rpartition(":")
    if only and only != rank:
        continue
    verb, _, value = action.partition("=")
    if verb == "print": print(f"rank {rank} says {value}")
    elif verb == "error": print(f"rank {rank}: {value}", file=sys.stderr, flush=True)
    elif verb == "environment":
        for key in sorted(os.environ):
            if key.startswith("GRADWIRE_"): print(key + "=" + os.environ[key])
    elif verb == "goodbye": touch("goodbye")
    elif verb == "wait":
        while not os.path.exists(os.path.join(scratch, value)): time.sleep(0.01)
    elif verb == "sleep": time.sleep(float(value))
    elif verb == "exit": sys.exit(int(value))
    elif verb == "die": os.kill(os.getpid(), getattr(signal, value))
    elif verb == "deaf":
        for name in ("SIGINT", "SIGTERM"): signal.signal(getattr(signal, name), signal.SIG_IGN)
    elif verb == "note":
        def note(number, frame):
            touch("noted." + rank + "." + signal.Signals(number).name)
            sys.exit(0)
        for name in ("SIGINT", "SIGTERM"): signal.signal(getattr(signal, name), note)
    elif verb == "child": subprocess.Popen(["sleep", "1000"])
    elif verb == "ready":
        with open(os.path.join(scratch, "new." + rank), "w") as file: file.write(str(os.getpid()))
        os.rename(os.path.join(scratch, "new." + rank), os.path.join(scratch, "ready." + rank))
    else: sys.exit("unknown action " + action)
"""


class LaunchTest(unittest.TestCase):
    def setUp(self):
        self._directory = tempfile.TemporaryDirectory()
        self.addCleanup(self._directory.cleanup)
        self.scratch = pathlib.Path(self._directory.name)
        self.bin = self.scratch / "bin"
        self.bin.mkdir()
        self.logs = self.scratch / "logs"
        self.mark = "LAUNCH_TEST_MARK=" + uuid.uuid4().hex
        for name, text in (("gradwire-server", FAKE_SERVER), ("gradwire-train", FAKE_WORKER)):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        self.addCleanup(self.kill_marked)

    def environment(self, **extra):
        environment = {key: value for key, value in os.environ.items()
                       if not key.startswith("GRADWIRE_")}
        key, value = self.mark.split("=")
        environment.update({key: value, "SCRATCH": str(self.scratch)})
        environment.update(extra)
        return environment

    def start(self, *arguments, **extra):
        """Starts the launcher with --bin-dir, --log-dir, a free port and more patience than the test has."""
        command = [str(LAUNCHER), "--bin-dir", str(self.bin), "--log-dir", str(self.logs),
                   "--free-port", "--grace", "100s", "--kill-after", "100s", *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                cwd=self.scratch, env=self.environment(**extra),
                                start_new_session=True)

    def finish(self, launcher):
        out, err = launcher.communicate(timeout=PATIENCE_S)
        return launcher.returncode, out, err

    def launch(self, *arguments, **extra):
        return self.finish(self.start(*arguments, **extra))

    def log(self, who, stream="stdout"):
        return (self.logs / who / f"{stream}.log").read_text()

    def marked(self):
        """Processes of this test that are still running (a dead one's environment is empty)."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    pass
        return found

    def kill_marked(self):
        for pid in self.marked():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def wait_until(self, condition, what):
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            self.assertLess(time.monotonic(), limit, f"waited too long for {what}")
            time.sleep(0.01)

    def wait_ready(self, *ranks):
        self.wait_until(lambda: all((self.scratch / f"ready.{rank}").exists() for rank in ranks),
                        "the workers")

    def assert_nothing_left(self):
        self.wait_until(lambda: not self.marked(), "every process to end")

    # ---- Success ----

    def test_a_job_that_succeeds_exits_with_0_and_leaves_logs_and_no_process(self):
        code, out, err = self.launch("--workers", "3", "--servers", "2", "--", "gradwire-train",
                                     "print=hello", "error=a warning", "0:goodbye")
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted(os.listdir(self.logs)),
                         ["rank.00", "rank.01", "rank.02", "server.00", "server.01"])
        for rank in range(3):
            self.assertEqual(self.log(f"rank.{rank:02d}"), f"rank {rank} says hello\n")
            self.assertEqual(self.log(f"rank.{rank:02d}", "stderr"), f"rank {rank}: a warning\n")
        self.assert_nothing_left()

    def test_rank_0_alone_is_shown(self):
        code, out, err = self.launch("--workers", "2", "--", "gradwire-train", "print=hello",
                                     "error=a warning", "0:goodbye")
        self.assertEqual(code, 0, err)
        self.assertEqual(out, "rank 0 says hello\n")
        self.assertIn("rank 0: a warning\n", err)
        self.assertNotIn("rank 1: a warning\n", err)

    def test_rank_0_is_shown_while_it_runs(self):
        launcher = self.start("--", "gradwire-train", "print=hello", "wait=go", "goodbye")
        self.assertEqual(launcher.stdout.readline(), "rank 0 says hello\n")
        (self.scratch / "go").touch()
        self.assertEqual(self.finish(launcher)[0], 0)

    def test_without_a_command_it_runs_gradwire_train(self):
        (self.scratch / "goodbye").touch()
        code, _, err = self.launch()
        self.assertEqual(code, 0, err)
        self.assertTrue((self.logs / "rank.00" / "stdout.log").exists())

    def test_the_command_may_be_any_program(self):
        (self.scratch / "goodbye").touch()
        code, out, err = self.launch("--", "sh", "-c", "echo \"$0 $GRADWIRE_RANK\"", "a b;c")
        self.assertEqual((code, out), (0, "a b;c 0\n"), err)

    def test_what_a_worker_leaves_running_ends_with_it(self):
        code, _, err = self.launch("--", "gradwire-train", "child", "goodbye")
        self.assertEqual(code, 0, err)
        self.assert_nothing_left()

    def test_logs_of_an_earlier_job_are_not_mixed_in(self):
        for workers in ("3", "1"):
            code, _, err = self.launch("--workers", workers, "--", "gradwire-train",
                                       f"print={workers}", "goodbye")
            self.assertEqual(code, 0, err)
        self.assertEqual(sorted(os.listdir(self.logs)), ["rank.00", "server.00"])
        self.assertEqual(self.log("rank.00"), "rank 0 says 1\n")

    # ---- Environment and configuration ----

    def variables(self, who="rank.00"):
        return dict(line.split("=", 1) for line in self.log(who).splitlines()
                    if line.startswith("GRADWIRE_"))

    def test_workers_are_given_their_environment(self):
        config = self.scratch / "job.yaml"
        config.write_text("job: {workers: 2}\n")
        code, _, err = self.launch("--config", "job.yaml", "--set", "partition.credit=4MiB", "--set",
                                   "compression.uplink.compressor=onebit", "--", "gradwire-train",
                                   "environment", "0:goodbye")
        self.assertEqual(code, 0, err)
        for rank in (0, 1):
            found = self.variables(f"rank.{rank:02d}")
            endpoint = found.pop("GRADWIRE_ENDPOINT")
            self.assertRegex(endpoint, r"^tcp://127\.0\.0\.1:[1-9]\d+$")
            self.assertRegex(found.pop("GRADWIRE_JOB_ID"), r"^local-\d{8}-\d{6}-\d+$")
            self.assertEqual(found, {
                "GRADWIRE_RANK": str(rank), "GRADWIRE_ROLE": "worker",
                "GRADWIRE_LOCAL_RANK": str(rank), "GRADWIRE_LOCAL_SIZE": "2",
                "GRADWIRE_CONFIG": str(config), "GRADWIRE_JOB_WORKERS": "2",
                "GRADWIRE_JOB_SERVERS": "1", "GRADWIRE_PARTITION_CREDIT": "4MiB",
                "GRADWIRE_COMPRESSION_UPLINK_COMPRESSOR": "onebit",
                "GRADWIRE_LOG_DIR": str(self.logs / f"rank.{rank:02d}")})
            self.assertIn(f"at {endpoint},", err)

    def test_servers_are_given_their_index_the_file_and_the_assignments(self):
        config = self.scratch / "job.yaml"
        config.write_text("job: {servers: 2}\n")
        code, _, err = self.launch("--config", str(config), "--set", "log.level=debug", "--",
                                   "gradwire-train", "wait=server.0", "wait=server.1", "environment",
                                   "goodbye")
        self.assertEqual(code, 0, err)
        endpoint, job = (self.variables()[name] for name in ("GRADWIRE_ENDPOINT", "GRADWIRE_JOB_ID"))
        for index in (0, 1):
            save = ["--save-plan", str(self.logs / "server.00" / "plan")] if index == 0 else []
            self.assertEqual(
                self.log(f"server.{index:02d}").split()[2:],
                ["--config", str(config), "--index", str(index), "--set", "log.level=debug", "--set",
                 f"job.id={job}", "--set", "job.workers=1", "--set", "job.servers=2", "--set", f"endpoint={endpoint}", *save])

    def test_the_command_line_goes_before_the_environment_and_that_before_the_file(self):
        (self.scratch / "job.yaml").write_text("job: {workers: 2, servers: 2}\n")
        code, _, err = self.launch("--config", "job.yaml", "--workers", "1", "--", "gradwire-train",
                                   "environment", "goodbye", GRADWIRE_JOB_WORKERS="5",
                                   GRADWIRE_JOB_SERVERS="3")
        self.assertEqual(code, 0, err)
        self.assertEqual(self.variables()["GRADWIRE_JOB_WORKERS"], "1")
        self.assertEqual(self.variables()["GRADWIRE_JOB_SERVERS"], "3")

    def test_a_job_without_an_id_gets_its_own_and_an_id_that_was_set_is_kept(self):
        (self.scratch / "job.yaml").write_text("job: {id: from-file}\n")
        for arguments, extra, expected in (
                ((), {}, "local-[0-9]{8}-[0-9]{6}-[0-9]+"), (("--config", "job.yaml"), {}, "from-file"),
                (("--config", "job.yaml"), {"GRADWIRE_JOB_ID": "from-environment"}, "from-environment"),
                (("--set", "job.id=from-line"), {"GRADWIRE_JOB_ID": "from-environment"}, "from-line")):
            code, _, err = self.launch(*arguments, "--", "gradwire-train", "environment", "goodbye",
                                       **extra)
            self.assertEqual(code, 0, err)
            self.assertRegex(self.variables()["GRADWIRE_JOB_ID"], f"^{expected}$")

    def test_an_endpoint_of_ipv6_is_kept(self):
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError as error:
            self.skipTest(f"no IPv6 here: {error}")
        code, _, err = self.launch("--set", "endpoint=tcp://[::1]:0", "--", "gradwire-train",
                                   "environment", "goodbye")
        self.assertEqual(code, 0, err)
        self.assertRegex(self.variables()["GRADWIRE_ENDPOINT"], r"^tcp://\[::1\]:[1-9]\d+$")

    def test_port_0_means_a_free_port(self):
        launcher = subprocess.run(
            [str(LAUNCHER), "--bin-dir", str(self.bin), "--dry-run", "--set",
             "endpoint=tcp://127.0.0.1:0"], capture_output=True, text=True, timeout=PATIENCE_S,
            env=self.environment(), cwd=self.scratch)
        self.assertEqual(launcher.returncode, 0, launcher.stderr)
        port = int(re.search(r"GRADWIRE_ENDPOINT=tcp://127\.0\.0\.1:(\d+)", launcher.stdout)[1])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))

    # ---- Usage ----

    def refuse(self, *arguments, expect, **extra):
        command = [str(LAUNCHER), "--bin-dir", str(self.bin), "--log-dir", str(self.logs), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S,
                                env=self.environment(**extra), cwd=self.scratch)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn(expect, result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.assertFalse(self.logs.exists())

    def test_usage_errors_exit_with_2_and_start_nothing(self):
        self.refuse("--wrong", expect="unknown argument --wrong")
        self.refuse("train.py", expect="the command goes after --")
        self.refuse("--workers", "none", expect="'none', expected a whole number from 1 to 4096")
        self.refuse("--workers", "0", expect="'0', expected a whole number from 1 to 4096")
        self.refuse("--workers", "2", "--set", "job.workers=3", expect="contradict")
        self.refuse("--set", "partition.credit", expect="expected key.path=value")
        self.refuse("--set", "endpoint=127.0.0.1", expect="expected tcp://host:port")
        self.refuse("--set", "endpoint=tcp://192.0.2.1:5701", expect="not an address of this machine")
        self.refuse("--grace", "soon", expect="--grace is 'soon'")
        self.refuse("--free-port", "--", "no-such-program", expect="found no program no-such-program")
        self.refuse("--free-port", "--", "gradwire-nothing", expect="holds no program gradwire-nothing")
        self.refuse("--free-port", "--", "./nothing", expect="./nothing is not an executable file")
        self.refuse("--config", "nothing.yaml", expect="cannot read the configuration nothing.yaml")
        self.refuse(expect="GRADWIRE_JOB_WORKERS is 'x'", GRADWIRE_JOB_WORKERS="x")

    def test_a_broken_file_is_refused_with_its_name(self):
        (self.scratch / "job.yaml").write_text("job: {workers: 2\n")
        self.refuse("--config", "job.yaml", expect="job.yaml is not valid YAML")
        (self.scratch / "job.yaml").write_text("- a\n")
        self.refuse("--config", "job.yaml", expect="expected keys and values at the top, got a list")
        (self.scratch / "job.yaml").write_bytes(b"job: \xff\n")
        self.refuse("--config", "job.yaml", expect="job.yaml is not UTF-8")

    def test_a_taken_port_is_refused(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen(1)
            port = taken.getsockname()[1]
            self.refuse("--set", f"endpoint=tcp://127.0.0.1:{port}", expect="the port is in use")

    # ---- Failures ----

    def test_the_first_to_fail_is_named_with_its_exit_code_and_last_lines(self):
        code, _, err = self.launch(*SHORT_GRACE, "--workers", "3", "--", "gradwire-train",
                                   "0:sleep=1000", "2:sleep=1000", "error=out of luck", "exit=7")
        self.assertEqual(code, 1)
        self.assertIn("rank 1 failed first: exit code 7", err)
        self.assertIn("    | rank 1: out of luck\n", err)
        self.assertIn("ending server 0, rank 0, rank 2, still running after the failure", err)
        self.assert_nothing_left()

    def test_the_first_error_of_the_first_to_fail_is_shown_if_the_last_lines_do_not_hold_it(self):
        line = "2026-01-02T03:04:05.678Z error worker/0 client: the cause key=1"
        for first in (line, '{"time":"2026-01-02T03:04:05.678Z","level":"error","message":"the cause"}'):
            code, _, err = self.launch(
                *SHORT_GRACE, "--", "sh", "-c", 'echo "an error " >&2; echo "$0" >&2; for i in $(seq 20); '
                'do echo line $i >&2; done; exit 7', first)
            self.assertEqual(code, 1)
            self.assertIn(f"its first error: {first}\n", err)
        code, _, err = self.launch(*SHORT_GRACE, "--", "sh", "-c", 'echo "$0" >&2; exit 7', line)
        self.assertNotIn("its first error", err)
        self.assertIn(f"    | {line}\n", err)

    def test_a_child_ended_by_a_signal_is_named_with_the_signal(self):
        code, _, err = self.launch(*SHORT_GRACE, "--workers", "2", "--", "gradwire-train",
                                   "1:die=SIGSEGV", "sleep=1000")
        self.assertEqual(code, 1)
        self.assertIn("rank 1 failed first: killed by SIGSEGV", err)
        self.assert_nothing_left()

    def test_a_server_that_fails_is_named(self):
        code, _, err = self.launch(*SHORT_GRACE, "--", "gradwire-train", "sleep=1000",
                                   SERVER_EXIT="3")
        self.assertEqual(code, 3)
        self.assertIn("server 0 failed first: exit code 3 (not started in time)", err)
        self.assertIn("    | the server gives up\n", err)
        self.assert_nothing_left()

    def test_codes_2_to_5_are_passed_on_if_all_that_failed_agree(self):
        for expected in (2, 3, 4, 5):
            with self.subTest(code=expected):
                code, _, err = self.launch("--workers", "2", "--", "gradwire-train", "goodbye",
                                           f"exit={expected}")
                self.assertEqual(code, expected, err)

    def test_other_codes_become_1(self):
        self.assertEqual(self.launch("--", "gradwire-train", "goodbye", "exit=77")[0], 1)
        code, _, err = self.launch("--workers", "2", "--", "gradwire-train", "goodbye", "0:exit=3",
                                   "exit=4")
        self.assertEqual(code, 1, err)

    def test_who_lost_a_peer_is_not_named_as_the_first(self):
        launcher = self.start(*SHORT_GRACE, "--workers", "2", "--", "gradwire-train", "ready",
                              "wait=go", "0:exit=5", "exit=9")
        self.wait_ready(0, 1)
        workers = [int((self.scratch / f"ready.{rank}").read_text()) for rank in (0, 1)]
        # The launcher is made to see both ends at the same time.
        launcher.send_signal(signal.SIGSTOP)
        (self.scratch / "go").touch()
        self.wait_until(lambda: not set(workers) & set(self.marked()), "the workers to end")
        launcher.send_signal(signal.SIGCONT)
        code, _, err = self.finish(launcher)
        self.assertEqual(code, 1)
        self.assertIn("rank 1 failed first: exit code 9", err)
        self.assertIn("rank 0 exit code 5 (peer lost)", err)

    def test_a_child_that_ignores_the_request_to_end_is_killed(self):
        code, _, err = self.launch(*SHORT_GRACE, *SHORT_KILL, "--workers", "2", "--",
                                   "gradwire-train", "0:deaf", "ready", "wait=ready.0", "1:exit=1",
                                   "sleep=1000")
        self.assertEqual(code, 1)
        self.assertRegex(err, r"killing (server 0, )?rank 0")
        self.assert_nothing_left()

    def test_servers_that_never_hear_a_goodbye_are_ended_and_that_is_a_failure(self):
        code, _, err = self.launch(*SHORT_GRACE, "--", "gradwire-train", "print=done")
        self.assertEqual(code, 1)
        self.assertIn("server 0 did not hear every worker's goodbye", err)
        self.assert_nothing_left()

    # ---- Interrupts ----

    def test_an_interrupt_is_forwarded_once_and_exits_with_130(self):
        for name in ("SIGINT", "SIGTERM"):
            with self.subTest(signal=name):
                launcher = self.start("--workers", "2", "--", "gradwire-train", "note", "ready",
                                      "sleep=1000")
                self.wait_ready(0, 1)
                launcher.send_signal(getattr(signal, name))
                code, _, err = self.finish(launcher)
                self.assertEqual(code, 130, err)
                for rank in (0, 1):
                    self.assertTrue((self.scratch / f"noted.{rank}.{name}").exists(), err)
                    (self.scratch / f"ready.{rank}").unlink()
                self.assertNotIn("failed first", err)
                self.assert_nothing_left()

    def test_after_an_interrupt_who_stays_is_killed(self):
        launcher = self.start(*SHORT_KILL, "--", "gradwire-train", "deaf", "child", "ready",
                              "sleep=1000")
        self.wait_ready(0)
        launcher.send_signal(signal.SIGINT)
        code, _, err = self.finish(launcher)
        self.assertEqual(code, 130, err)
        self.assertRegex(err, r"killing (server 0, )?rank 0")
        self.assert_nothing_left()

    def test_a_second_interrupt_kills_at_once(self):
        launcher = self.start("--", "gradwire-train", "deaf", "child", "ready",
                              "sleep=1000")
        self.wait_ready(0)
        launcher.send_signal(signal.SIGINT)
        self.wait_until(lambda: "SIGINT" in launcher.stderr.readline(), "the first to be seen")
        launcher.send_signal(signal.SIGINT)
        self.assertEqual(self.finish(launcher)[0], 130)
        self.assert_nothing_left()

    def test_killing_the_launcher_leaves_nothing(self):
        launcher = self.start("--workers", "2", "--servers", "2", "--", "gradwire-train", "deaf",
                              "child", "ready", "sleep=1000")
        self.wait_ready(0, 1)
        self.assertGreaterEqual(len(self.marked()), 7)  # launcher, 2 servers, 2 workers, 2 children
        launcher.kill()
        launcher.communicate(timeout=PATIENCE_S)
        self.assert_nothing_left()

    def test_a_closed_standard_output_does_not_stop_the_job(self):
        launcher = self.start("--", "gradwire-train", "ready", "wait=go", "print=unseen", "goodbye")
        self.wait_ready(0)
        launcher.stdout.close()
        (self.scratch / "go").touch()
        err = launcher.stderr.read()
        self.assertEqual(launcher.wait(timeout=PATIENCE_S), 0, err)
        launcher.stderr.close()
        self.assertEqual(self.log("rank.00"), "rank 0 says unseen\n")


if __name__ == "__main__":
    unittest.main(verbosity=2 if "-v" in sys.argv else 1)
