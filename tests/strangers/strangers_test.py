#!/usr/bin/python3
"""A job of real processes runs while strangers throw things at its server.

Usage: strangers_test.py BIN_DIR [--sanitized]     (GRADWIRE_TEST_SEED repeats a run)
"""

import os
import pathlib
import random
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
import unittest

BIN = pathlib.Path(sys.argv.pop(1))
SANITIZED = "--sanitized" in sys.argv
if SANITIZED:
    sys.argv.remove("--sanitized")
# A job of a second or two; long enough for all the idle connections to be opened while it runs.
ROUNDS = 120 if SANITIZED else 1000
IDLE_ROUNDS = 900 if SANITIZED else 3000
IDLE_CONNECTIONS = 1000
_, MOST_DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)
DEADLINE_S = 90
GROWTH_KIB = 50 * 1024
SEED = int(os.environ.get("GRADWIRE_TEST_SEED") or str(random.SystemRandom().getrandbits(32)), 0)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
ANSWER_BYTES = 64 + 43  # a ROUTER's; it takes messages after it


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def number(field, value):
    return varint(field << 3) + varint(value)


def text(field, value):
    return varint(field << 3 | 2) + varint(len(value)) + value


def frame(data, more=False):
    if len(data) <= 255:
        return bytes([more, len(data)]) + data
    return bytes([more | 2]) + struct.pack(">Q", len(data)) + data


def hello(job=b"strangers", version=1, rank=0):
    header = number(1, 1) + number(2, 1) + number(3, rank) + b"\x21" + struct.pack("<Q", 7) + number(10, 1)
    body = text(1, job) + number(2, version) + number(3, 1) + number(4, rank) + b"\x29" + struct.pack("<Q", 7)
    return frame(header, more=True) + frame(body)


class Thrower:
    """Throws at a port of this host; keeps its connections open until closed."""

    def __init__(self, port, seed, server_pid, job_runs):
        self.port = port
        self.server_pid = server_pid
        self.job_runs = job_runs
        self.random = random.Random(seed)
        self.sockets = []
        self.most_open = 0

    def connect(self):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        self.sockets.append(connection)
        return connection

    def say(self, data):
        connection = self.connect()
        try:
            connection.sendall(data)
        except OSError:
            pass  # closed already: that is an answer, too
        return connection

    def handshake(self):
        connection = self.say(GREETING + READY)
        left = ANSWER_BYTES
        while left:
            got = connection.recv(left)
            if not got:
                break
            left -= len(got)
        return connection

    def after_handshake(self, data):
        try:
            self.handshake().sendall(data)
        except OSError:
            pass

    def close(self):
        for connection in self.sockets:
            connection.close()
        self.sockets = []

    def hang_up(self):
        """What ends early is counted when it ends."""
        time.sleep(0.05)
        self.close()

    def connections_at_server(self):
        """Connections of strangers that the server has a descriptor of."""
        here = {str(connection.getsockname()[1]) for connection in self.sockets}
        held = set()
        inodes = set()
        for descriptor in pathlib.Path(f"/proc/{self.server_pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(descriptor))
            except OSError:
                pass  # closed meanwhile
        for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            peer = str(int(fields[2].split(":")[1], 16))
            if peer in here and f"socket:[{fields[9]}]" in inodes:
                held.add(peer)
        return len(held)

    # What is thrown. Each comes back soon.
    def nothing(self):
        pass

    def random_bytes(self):
        # Not 0xff first: that is how ZeroMQ's own greeting begins, which has a case of its own.
        self.say(b"\x42" + self.random.randbytes(100_000))

    def http(self):
        self.say(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n")
        self.hang_up()

    def greeting_and_garbage(self):
        self.say(GREETING + self.random.randbytes(4096))

    def truncated_frames(self):
        self.after_handshake(b"\x01\x20" + b"x" * 7)  # more to come, 32 bytes, of which 7
        self.hang_up()

    def huge_frame(self):
        self.after_handshake(b"\x02" + struct.pack(">Q", 1 << 40) + b"x" * 100)

    def garbage_protobuf(self):
        self.after_handshake(frame(self.random.randbytes(40)) * 100)

    def rank_out_of_range(self):
        self.after_handshake(hello(rank=17))

    def foreign_job(self):
        self.after_handshake(hello(job=b"another"))

    def other_version(self):
        self.after_handshake(hello(version=9))

    def idle(self):
        for _ in range(IDLE_CONNECTIONS):
            self.connect()
        until = time.monotonic() + 5
        # Held by the server, and not only by its backlog, while the job goes on.
        while time.monotonic() < until and self.job_runs() and self.most_open < IDLE_CONNECTIONS:
            self.most_open = max(self.most_open, self.connections_at_server())
        self.hang_up()

    def flood(self):
        connection = self.handshake()
        connection.settimeout(0.2)
        data = frame(number(1, 1) + number(2, 16)) * 10_000  # heartbeats of nobody
        until = time.monotonic() + 2
        while time.monotonic() < until:
            try:
                connection.sendall(data)
            except OSError:
                return


class StrangersTest(unittest.TestCase):
    def setUp(self):
        self.processes = []

    def tearDown(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def start(self, program, *arguments, **streams):
        process = subprocess.Popen([str(BIN / program), *arguments], **streams)
        self.processes.append(process)
        return process

    def run_job(self, name):
        """Runs a job at whose server `name` is thrown; returns the server's output and memory."""
        port = free_port()
        settings = ["--set", "job.workers=2", "--set", "job.id=strangers",
                    "--set", f"endpoint=tcp://127.0.0.1:{port}"]
        server = self.start("gradwire-server", *settings, stderr=subprocess.PIPE, text=True)
        errors = []
        reader = threading.Thread(target=lambda: errors.append(server.stderr.read()))
        reader.start()
        rounds = IDLE_ROUNDS if name == "idle" else ROUNDS
        job = [self.start("push_pull_worker", "--rank", str(rank), "--tensors", "4", "--elements", "50000",
                          "--rounds", str(rounds), "--warm-up", "0", "--check", "--verbose", *settings,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
               for rank in range(2)]
        running = threading.Event()

        def drain(worker, first):
            for line in worker.stdout:
                if first and line.strip() == "done 5":
                    running.set()

        drains = [threading.Thread(target=drain, args=(w, i == 0)) for i, w in enumerate(job)]
        for thread in drains:
            thread.start()
        peak = 0
        thrower = Thrower(port, SEED, server.pid, lambda: job[0].poll() is None)
        try:
            self.assertTrue(running.wait(DEADLINE_S))
            # Again and again, so that some of it meets every moment of a round.
            throws = 0
            until = time.monotonic() + DEADLINE_S
            most = 2 if name == "idle" else 30
            while throws < most and time.monotonic() < until:
                thrower_failed = None
                try:
                    getattr(thrower, name)()
                except OSError as error:
                    thrower_failed = error
                if throws == 0:
                    self.assertIsNone(thrower_failed, f"nothing was thrown: {thrower_failed}")
                throws += 1
                status = pathlib.Path(f"/proc/{server.pid}/status").read_text()
                found = re.search(r"VmHWM:\s+(\d+) kB", status)
                if found:
                    peak = max(peak, int(found[1]))
                if job[0].poll() is not None:
                    break
            for worker in job:
                self.assertEqual(worker.wait(DEADLINE_S), 0)
            self.assertEqual(server.wait(DEADLINE_S), 0)
        finally:
            thrower.close()
            for process in (server, *job):
                if process.poll() is None:
                    process.kill()
                    process.wait()
            for thread in (*drains, reader):
                thread.join()
            for process in job:
                process.stdout.close()
            server.stderr.close()
        if name == "idle":
            self.assertEqual(thrower.most_open, IDLE_CONNECTIONS)
        return errors[0], peak

    def test_strangers_harm_nobody(self):
        print(f"GRADWIRE_TEST_SEED={SEED}", flush=True)
        _, usual = self.run_job("nothing")
        self.assertGreater(usual, 0)
        # What the server's last line must count, where the case decides it.
        cases = {
            "random_bytes": "chosen_routing_id", "http": "closed_early", "greeting_and_garbage": "not_zmtp",
            "truncated_frames": "never_spoke", "huge_frame": "never_spoke", "garbage_protobuf": "bad_headers",
            "rank_out_of_range": "out_of_range", "foreign_job": "foreign_job", "other_version": "other_version",
            "idle": "closed_early", "flood": "unknown_peer",
        }
        for name, counter in cases.items():
            with self.subTest(thrown=name):
                if name == "idle" and MOST_DESCRIPTORS < 5 * IDLE_CONNECTIONS:
                    self.skipTest(f"{MOST_DESCRIPTORS} descriptors are allowed here; a server gives a quarter of "
                                  "them to connections that say nothing")
                log, peak = self.run_job(name)
                done = [line for line in log.splitlines() if "server: done" in line]
                self.assertEqual(len(done), 1, log)
                print(f"{name}: {(peak - usual) / 1024:.1f} MiB more; {done[0].split('done ')[1]}", flush=True)
                if not SANITIZED:  # they keep what is freed, to find who uses it
                    self.assertLess(peak - usual, GROWTH_KIB)
                if counter:
                    found = re.search(rf"\b{counter}=(\d+)", done[0])
                    self.assertTrue(found and int(found[1]) > 0, done[0])

    def test_an_open_port_must_be_meant(self):
        server = self.start("gradwire-server", "--set", "server.bind=0.0.0.0", "--set",
                            f"endpoint=tcp://127.0.0.1:{free_port()}", stderr=subprocess.PIPE, text=True)
        _, errors = server.communicate(timeout=DEADLINE_S)
        self.assertEqual(server.returncode, 2, errors)
        self.assertIn("security.insecure", errors)


if __name__ == "__main__":
    os.environ.pop("GRADWIRE_CONFIG", None)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(MOST_DESCRIPTORS, 4096), MOST_DESCRIPTORS))
    unittest.main(verbosity=2)
