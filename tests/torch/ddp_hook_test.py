#!/usr/bin/python3
"""The hook for PyTorch's own DistributedDataParallel in jobs of two real workers, and its example.

Usage: ddp_hook_test.py LIBRARY BIN_DIR   (exit code 77: there is no PyTorch with gloo)
"""

import os
import pathlib
import re
import socket
import subprocess
import tempfile
import unittest
import uuid

from jobs import BIN, PYTHON, ROOT, environment, main

WORKER = pathlib.Path(__file__).resolve().parent / "ddp_hook_worker.py"
EXAMPLE = ROOT / "worker" / "python" / "examples" / "ddp_hook.py"
DATA = pathlib.Path("/usr/share/datasets/fashion-mnist")
DEADLINE_S = 120


def run(command, folder, **more):
    return subprocess.run([str(word) for word in command], env=environment(**more), cwd=folder,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=DEADLINE_S, check=False)


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


class JobTest(unittest.TestCase):
    """Starts jobs, and sees to it that nothing of them stays."""

    def launch(self, command, settings=(), expected=0, servers=1):
        token = str(uuid.uuid4())
        with tempfile.TemporaryDirectory() as folder:
            launcher = [ROOT / "scripts" / "gradwire-launch", "--bin-dir", BIN, "--free-port",
                        "--workers", "2", "--servers", str(servers)]
            for setting in settings:
                launcher += ["--set", setting]
            result = run([*launcher, "--", PYTHON, *command], folder, TEST_JOB=token)
        self.assertEqual(result.returncode, expected, result.stdout)
        self.assertEqual(processes_of(token), [])
        return result.stdout


class HookTest(JobTest):
    """Scenarios of ddp_hook_worker.py, with both ranks' checks."""

    def run_job(self, *scenarios, settings=(), expected=0, word="all done"):
        self.assertIn(word, self.launch([WORKER, *scenarios], settings, expected))

    def test_gradients_are_those_of_plain_ddp_bit_by_bit(self):
        self.run_job("equals_plain", "unused_parameters", "accumulates_in_no_sync", "joins",
                     "several_models")

    def test_other_dtypes_values_and_futures(self):
        self.run_job("other_dtypes", "not_finite", "futures")

    def test_refuses_by_name_and_ends_its_thread_with_the_connection(self):
        self.run_job("wrong_calls", "reconnects")

    def test_all_workers_have_the_same_bits_after_fifty_compressed_steps(self):
        for compressor, settings in (("onebit", []), ("topk", ["ratio=0.1"])):
            with self.subTest(compressor=compressor):
                self.run_job("fifty_steps", settings=["compression.min_bytes=0B"] + [
                    f"compression.{link}.{setting}" for link in ("uplink", "downlink")
                    for setting in (f"compressor={compressor}", *settings)])

    def test_the_filter_works_with_zeros_and_is_refused_with_skip(self):
        covap = ["compression.filter.type=covap", "compression.filter.interval=3"]
        self.run_job("fifty_steps", settings=covap)
        self.run_job("refuses_skip", settings=[*covap, "compression.filter.inactive=skip"])

    def test_a_lost_server_is_an_error_of_backward(self):
        self.run_job("lost_server", settings=["timeouts.dead_after=1s"], expected=1,
                     word="rank 0 knows")

    def test_a_rank_without_a_backward_pass_is_an_error_of_the_others_backward(self):
        self.run_job("stall", settings=["timeouts.stall_stop=2s"], expected=4, word="rank 0 knows")

    def test_a_program_may_end_without_shutdown(self):
        self.run_job("no_farewell")

    def test_a_program_that_fails_in_its_backward_pass_ends_at_once(self):
        self.run_job("fails_halfway", expected=1, word="rank 0 knows")


@unittest.skipUnless(DATA.is_dir(), "SKIPPED: there is no Debian package dataset-fashion-mnist")
class ExampleTest(JobTest):
    STEPS = 40

    def check(self, output):
        """Guessing recognizes 10 %."""
        share = re.search(r"([\d.]+) % of the 10000 test images", output)
        self.assertIsNotNone(share, output)
        self.assertGreater(float(share[1]), 40, output)

    def test_runs_under_the_launcher(self):
        config = ["compression.uplink.compressor=onebit", "compression.downlink.compressor=onebit"]
        self.check(self.launch([EXAMPLE, "--steps", self.STEPS], config, servers=2))

    def test_differs_from_a_plain_script_by_one_line(self):
        lines = [line for line in EXAMPLE.read_text(encoding="utf-8").splitlines()
                 if "register_comm_hook" in line]
        self.assertEqual(lines, ["    model.register_comm_hook(gradwire.torch.DDPState(model), "
                                 "gradwire.torch.comm_hook)"])

    def test_runs_under_torchrun_with_a_server_beside_it(self):
        port = free_ports()
        token = str(uuid.uuid4())
        with tempfile.TemporaryDirectory() as folder:
            server = subprocess.Popen(
                [str(BIN / "gradwire-server"), "--set", f"endpoint=tcp://127.0.0.1:{port + 1}",
                 "--set", "job.workers=2"], env=environment(TEST_JOB=token), cwd=folder,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            try:
                result = run([PYTHON, "-m", "torch.distributed.run", "--nproc_per_node=2",
                              "--master_addr=127.0.0.1", f"--master_port={port}",
                              # PyTorch 1.13 fails on Python 3.11 without these; they mean rank 9.
                              "--redirects=9:1", "--tee=9:1", EXAMPLE, "--steps", self.STEPS],
                             folder, TEST_JOB=token)
                self.assertEqual(result.returncode, 0, result.stdout)
                output, _ = server.communicate(timeout=DEADLINE_S)
                self.assertEqual(server.returncode, 0, output)
            finally:
                server.kill()
                server.wait()
                server.stdout.close()
        self.check(result.stdout)
        self.assertEqual(processes_of(token), [])


def free_ports():
    """A port for torchrun; the next one is free too, for Gradwire. Below those that the kernel gives
    away, so that nobody takes them meanwhile."""
    for port in range(21000 + os.getpid() % 1000 * 10, 32000, 2):
        try:
            for number in (port, port + 1):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
            return port
        except OSError:
            continue
    raise AssertionError("found no two free ports")


if __name__ == "__main__":
    main("import torch.distributed as d; assert d.is_gloo_available(), 'PyTorch has no gloo'")
