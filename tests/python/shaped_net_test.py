#!/usr/bin/python3
"""Tests of scripts/shaped_net: hosts, rates, cut links, and that nothing is left behind."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "scripts" / "shaped_net"
SKIPPED = 77
PATIENCE_S = 60

sys.path.insert(0, str(ROOT / "scripts" / "lib"))
sys.dont_write_bytecode = True
import shaped_net  # noqa: E402

# listen ADDRESS: prints the port, takes one connection, prints how many bytes came and in what time.
LISTEN = """
import socket, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.socket(family) as server:
    server.bind((sys.argv[1], 0)); server.listen(1); server.settimeout(60)
    print(server.getsockname()[1], flush=True)
    peer, _ = server.accept()
    peer.settimeout(60)
    start, total = time.monotonic(), 0
    while data := peer.recv(1 << 16): total += len(data)
    print(total, time.monotonic() - start, flush=True)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as peer:
    peer.sendall(bytes(int(sys.argv[3])))
"""
# Sends a byte and waits for it to come back, again and again; prints what became of each.
ECHO = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind((sys.argv[1], 7)); print("up", flush=True)
    while True: server.sendto(*server.recvfrom(100))
"""
PROBE = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.settimeout(0.3)
    for _ in range(int(sys.argv[2])):
        try:
            probe.sendto(b"x", (sys.argv[1], 7)); probe.recv(100)
            sys.exit(0)
        except OSError: pass
sys.exit(1)
"""


def namespaces(prefix):
    try:
        return [name for name in os.listdir("/run/netns") if name.startswith(prefix + "-")]
    except FileNotFoundError:
        return []


class ShapedNetTest(unittest.TestCase):
    def setUp(self):
        # Its own prefix, so that what others do at the same time does not count.
        self.prefix = f"t{os.getpid()}"
        self.processes = []
        self.addCleanup(self.end)

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(PATIENCE_S)
            for stream in (process.stdout, process.stderr):
                if stream:
                    stream.close()
        self.assertEqual(namespaces(self.prefix), [])

    def net(self, **arguments):
        net = shaped_net.ShapedNet(prefix=self.prefix, **arguments)
        self.addCleanup(net.down)
        return net

    def start(self, arguments, **options):
        process = subprocess.Popen([str(a) for a in arguments], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, **options)
        self.processes.append(process)
        return process

    def call(self, *arguments, **options):
        return subprocess.run([str(PROGRAM), *map(str, arguments)], capture_output=True, text=True,
                              timeout=PATIENCE_S, check=False, **options)

    def wait_until(self, condition, what):
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            self.assertLess(time.monotonic(), limit, f"waited too long for {what}")
            time.sleep(0.02)

    def transfer(self, net, size, address=None):
        """Seconds that `size` bytes take from host 0 to host 1."""
        address = address or net.hosts[1].address
        listener = self.start(net.command(1, ["/usr/bin/python3", "-c", LISTEN, address]))
        port = listener.stdout.readline().strip()
        self.assertTrue(port, "the listener gives no port")
        subprocess.run(net.command(0, ["/usr/bin/python3", "-c", SEND, address, port, size]),
                       timeout=PATIENCE_S, check=True)
        total, seconds = listener.stdout.readline().split()
        self.assertEqual(int(total), size)
        return float(seconds)

    def reaches(self, net, attempts):
        return subprocess.run(net.command(0, ["/usr/bin/python3", "-c", PROBE, net.hosts[1].address,
                                              attempts]), timeout=PATIENCE_S, check=False).returncode == 0

    # ---- Links ----

    def test_hosts_reach_each_other_over_both_kinds_of_address(self):
        net = self.net(hosts=2, ipv6=True)
        self.transfer(net, 1000)
        self.transfer(net, 1000, net.hosts[1].address_v6)

    def test_a_link_is_as_fast_as_it_is_told(self):
        net = self.net(hosts=2, rate="100mbit")
        # 4 MB at 100 Mb/s take 0.32 s, but for the burst.
        self.assertGreater(self.transfer(net, 4 << 20), 0.25)
        # Slower yet; and a free link is faster than either, if only by much less than it could be.
        net.set_rate("20mbit", 1)
        slow = self.transfer(net, 1 << 20)
        self.assertGreater(slow, 0.25)
        net.set_rate("none")
        self.assertLess(self.transfer(net, 1 << 20), slow)
        self.assertNotIn("tbf", subprocess.run(net.command(1, ["tc", "qdisc"]), capture_output=True,
                                               text=True, timeout=PATIENCE_S, check=True).stdout)

    def test_a_cut_link_lets_nothing_through_until_it_is_restored(self):
        net = self.net(hosts=2)
        echo = self.start(net.command(1, ["/usr/bin/python3", "-c", ECHO, net.hosts[1].address]))
        self.assertEqual(echo.stdout.readline(), "up\n")
        self.assertTrue(self.reaches(net, 20))
        net.cut(1)
        self.assertFalse(self.reaches(net, 3))
        net.restore(1)
        self.assertTrue(self.reaches(net, 60))

    def test_two_nets_with_the_same_addresses_do_not_meet(self):
        first, second = self.net(hosts=2), self.net(hosts=2)
        echo = self.start(first.command(1, ["/usr/bin/python3", "-c", ECHO, first.hosts[1].address]))
        self.assertEqual(echo.stdout.readline(), "up\n")
        self.assertTrue(self.reaches(first, 20))
        self.assertFalse(self.reaches(second, 3))

    # ---- The command ----

    def test_up_prints_the_hosts_and_the_other_actions_find_them(self):
        up = self.call("up", "--hosts", 2, "--name", self.prefix, "--owner", os.getpid())
        self.assertEqual(up.returncode, 0, up.stderr)
        rows = [line.split() for line in up.stdout.splitlines()]
        self.assertEqual([row[1] for row in rows], ["10.77.0.1", "10.77.0.2"])
        name = rows[0][0].rsplit("-", 1)[0]
        self.addCleanup(lambda: self.call("down", "--net", name))
        self.assertIn(f"{name}  2 host(s)  of {os.getpid()}\n", self.call("list").stdout)
        for host in (1, rows[1][0]):
            shown = self.call("exec", "--net", name, host, "--", "ip", "address", "show", "eth0")
            self.assertIn("10.77.0.2/24", shown.stdout, shown.stderr)
        self.assertEqual(self.call("exec", "--net", name, 0, "--", "sh", "-c", "exit 7").returncode, 7)
        for action in (("rate", "10mbit"), ("rate", "1gbit", 1), ("cut", 1), ("restore", 1), ("cleanup",)):
            where = () if action == ("cleanup",) else ("--net", name)
            done = self.call(action[0], *where, *action[1:])
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(namespaces(self.prefix)), 3)
        self.assertEqual(self.call("down", "--net", name).returncode, 0)
        self.assertEqual(namespaces(self.prefix), [])

    def test_run_tells_the_command_its_hosts_and_gives_its_exit_code(self):
        done = self.call("run", "--hosts", 2, "--name", self.prefix, "--", "sh", "-c",
                         'echo $SHAPED_NET_HOSTS; echo $SHAPED_NET_ADDRESSES; '
                         f'{PROGRAM} exec 1 -- ip -o -4 address show eth0; exit 7')
        self.assertEqual(done.returncode, 7, done.stderr)
        self.assertRegex(done.stdout, rf"^{self.prefix}-\S+-h0 {self.prefix}-\S+-h1\n"
                                      r"10\.77\.0\.1 10\.77\.0\.2\n.*10\.77\.0\.2/24")
        self.assertEqual(namespaces(self.prefix), [])
        done = self.call("run", "--hosts", 1, "--name", self.prefix, "--", "/nothing/here")
        self.assertEqual(done.returncode, 127)
        self.assertIn("cannot run /nothing/here", done.stderr)
        self.assertEqual(namespaces(self.prefix), [])

    def begin(self, *words):
        """A run whose command, on a host of its own, waits for ever."""
        run = self.start([PROGRAM, "run", "--hosts", 2, "--name", self.prefix, *words, "--", "sh", "-c",
                          f"{PROGRAM} exec 1 -- sleep 1000 & echo up; wait"], start_new_session=True)
        self.assertEqual(run.stdout.readline(), "up\n")
        self.assertEqual(len(namespaces(self.prefix)), 3)
        return run

    def test_signals_end_the_command_and_remove_the_net(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=number):
                run = self.begin()
                run.send_signal(number)
                self.assertEqual(run.wait(PATIENCE_S), 128 + number, run.stderr.read())
                self.assertEqual(namespaces(self.prefix), [])

    def test_a_command_that_ignores_signals_is_killed(self):
        run = self.start([PROGRAM, "run", "--hosts", 1, "--name", self.prefix, "--kill-after", "0.1", "--",
                          "sh", "-c", "trap '' INT; echo up; while :; do sleep 1; done"])
        self.assertEqual(run.stdout.readline(), "up\n")
        run.send_signal(signal.SIGINT)
        self.assertEqual(run.wait(PATIENCE_S), 130)
        self.assertIn("killing the command", run.stderr.read())

    def test_what_a_killed_run_left_is_removed_by_the_next(self):
        for action in (("cleanup",), ("run", "--hosts", "1", "--name", self.prefix, "--", "true")):
            with self.subTest(action=action[0]):
                run = self.begin()
                name = namespaces(self.prefix)[0].rsplit("-", 1)[0]
                # Its sleep may not be there yet; it is what has to end with the net.
                inside = ["ip", "netns", "pids", name + "-h1"]
                self.wait_until(lambda: subprocess.run(inside, capture_output=True, text=True, check=True,
                                                       timeout=PATIENCE_S).stdout, "the sleep")
                pids = subprocess.run(inside, capture_output=True, text=True, check=True,
                                      timeout=PATIENCE_S).stdout.split()
                run.kill()
                run.wait(PATIENCE_S)
                self.assertEqual(len(namespaces(self.prefix)), 3)
                self.assertRegex(self.call("list").stdout, f"{name}.*{run.pid}, which is gone")
                done = self.call(*action)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(namespaces(self.prefix), [])
                self.wait_until(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids),
                                "the processes inside to end")


class WithoutRightsTest(unittest.TestCase):
    """Needs no privilege."""

    def call(self, *arguments, **options):
        return subprocess.run([str(PROGRAM), *arguments], capture_output=True, text=True, check=False,
                              timeout=PATIENCE_S, **options)

    def test_without_rights_or_programs_it_says_so_and_exits_with_77(self):
        done = self.call("list", env={"PATH": "/nothing/here"})
        self.assertEqual((done.returncode, "there is no program ip" in done.stderr), (SKIPPED, True))
        if os.geteuid() == 0:
            # The script is read by root, before the user changes.
            code = ("import os, runpy, sys\nsource = open(sys.argv[1]).read()\nsys.path.insert(0, sys.argv[2])\n"
                    "import shaped_net\nos.setuid(65534)\n"
                    "try: shaped_net.ShapedNet(2)\nexcept shaped_net.CannotHere as error: sys.exit(str(error))")
            done = subprocess.run(["/usr/bin/python3", "-B", "-c", code, str(PROGRAM),
                                   str(ROOT / "scripts" / "lib")], capture_output=True, text=True,
                                  check=False, timeout=PATIENCE_S)
            self.assertIn("only root can make network namespaces, and this is user 65534", done.stderr)

    def test_usage_errors_exit_with_2(self):
        for arguments in (("fly",), ("up",), ("run", "--hosts", "2"), ("cut",), ("up", "--hosts", "x")):
            done = self.call(*arguments)
            self.assertEqual(done.returncode, 2, (arguments, done.stderr))
            self.assertNotIn("Traceback", done.stderr)

    def test_wrong_values_are_named(self):
        for wrong in ("fast", "10", "0mbit", "1mbps", "1000gbit", "-1gbit"):
            with self.assertRaisesRegex(ValueError, f"the rate is '{wrong}', expected"):
                shaped_net.parse_rate(wrong)
        self.assertEqual(shaped_net.parse_rate("2.5gbit"), 2_500_000_000)
        self.assertIsNone(shaped_net.parse_rate("none"))
        with self.assertRaisesRegex(ValueError, "0 hosts wanted"):
            shaped_net.ShapedNet(0)
        with self.assertRaisesRegex(ValueError, "the prefix is 'A-b'"):
            shaped_net.ShapedNet(1, prefix="A-b")

    def test_bursts_are_large_enough_for_the_rate(self):
        for rate, burst in (("100mbit", 128 << 10), ("1gbit", 128 << 10), ("2.5gbit", 1 << 20),
                            ("10gbit", 2 << 20)):
            found = re.search(r"burst (\d+) limit (\d+)",
                              shaped_net.tbf_arguments(shaped_net.parse_rate(rate)))
            self.assertEqual(int(found[1]), burst)
            self.assertGreaterEqual(int(found[2]), 2 * burst)


def why_not():
    """None if nets can be made here."""
    try:
        with shaped_net.ShapedNet(1, prefix=f"t{os.getpid()}"):
            return None
    except shaped_net.CannotHere as error:
        return str(error)


if __name__ == "__main__":
    reason = why_not()
    if reason:
        print(f"SKIPPED: all with hosts of their own: {reason}")
        ShapedNetTest = unittest.skip(reason)(ShapedNetTest)
    unittest.main(verbosity=2 if "-v" in sys.argv else 1)
