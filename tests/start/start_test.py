#!/usr/bin/python3
"""A job starts, or says exactly which address is wrong: real servers and workers on addresses that
are taken, missing, ambiguous or unreachable.

Usage: start_test.py BIN_DIR

What needs root (hosts of their own, another /etc/hosts) says SKIPPED with the reason without it.
"""

import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "lib"))
sys.dont_write_bytecode = True

import shaped_net  # noqa: E402

BIN = pathlib.Path(sys.argv.pop(1)) if len(sys.argv) > 1 else ROOT / "build" / "release" / "bin"
DEADLINE_S = 60
ADDRESS = re.compile(r"\blistening\b.* address=(\S+)")
ADVERTISED = re.compile(r"\blistening\b.* advertised=(\S+)")
NOT_STARTED = 3
USAGE = 2


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


def listener(port=0, host="127.0.0.1"):
    """A socket that keeps a port from others."""
    holder = socket.socket()
    try:
        holder.bind((host, port))
        holder.listen()
    except OSError:
        holder.close()
        raise
    return holder


def hold_row(count):
    """Listening sockets on that many ports in a row."""
    chooser = random.Random(os.getpid())
    for _ in range(200):
        first = chooser.randrange(20000, 30000)
        held = []
        try:
            for port in range(first, first + count):
                held.append(listener(port))
            return first, held
        except OSError:
            for holder in held:
                holder.close()
    raise AssertionError(f"found no {count} free ports in a row")


class Process:
    """A child whose errors are read as they come."""

    def __init__(self, command):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GRADWIRE_")}
        self.popen = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL,
                                      stderr=subprocess.PIPE, text=True, env=environment)
        self.errors = ""
        self.ended = False
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self.read_errors)
        self.reader.start()

    def read_errors(self):
        for line in self.popen.stderr:
            with self.changed:
                self.errors += line
                self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def wait_for(self, pattern):
        """The first match in what was written, None if it ends or the deadline passes without."""
        pattern = re.compile(pattern)
        with self.changed:
            self.changed.wait_for(lambda: self.ended or pattern.search(self.errors), DEADLINE_S)
            return pattern.search(self.errors)

    def wait(self):
        code = self.popen.wait(DEADLINE_S)
        self.reader.join()
        self.popen.stderr.close()
        return code


class StartTest(unittest.TestCase):
    def setUp(self):
        self.processes = []
        self.addCleanup(self.end_processes)

    def end_processes(self):
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.kill()
            if not process.popen.stderr.closed:
                process.wait()

    def run_program(self, program, *arguments, prefix=(), **settings):
        """Settings: server__bind="..." is --set server.bind=..."""
        command = [*prefix, BIN / program, *arguments]
        for key, value in settings.items():
            command += ["--set", f"{key.replace('__', '.')}={value}"]
        process = Process(command)
        self.processes.append(process)
        return process

    def server(self, index=0, **settings):
        settings.setdefault("endpoint", "tcp://127.0.0.1:0")
        settings.setdefault("timeouts__start", "20s")
        return self.run_program("gradwire-server", "--index", index, **settings)

    def worker(self, rank=0, rounds=3, tensors=3, elements=20000, **settings):
        settings.setdefault("timeouts__start", "20s")
        return self.run_program("push_pull_worker", "--rank", rank, "--check", "--rounds", rounds, "--warm-up",
                                0, "--tensors", tensors, "--elements", elements, **settings)

    def hold(self, holder):
        self.addCleanup(holder.close)
        return holder

    def address_of(self, server):
        match = server.wait_for(ADDRESS)
        self.assertIsNotNone(match, server.errors)
        return match[1]

    def assert_ends_well(self, *processes):
        for process in processes:
            self.assertEqual(process.wait(), 0, "\n".join(each.errors for each in processes))

    def assert_refused(self, process, code, *texts):
        self.assertEqual(process.wait(), code, process.errors)
        for text in texts:
            self.assertIn(text, process.errors)
        # One line says it all.
        self.assertEqual(len([line for line in process.errors.splitlines() if " error " in line]), 1,
                         process.errors)

    def need_ipv6(self):
        if not has_ipv6():
            self.skipTest("this machine has no IPv6")

    def with_hosts(self, text):
        """A command's beginning that gives it an /etc/hosts of its own, which ends with it."""
        if os.geteuid() != 0:
            self.skipTest(f"only root can give a process another /etc/hosts, and this is user {os.geteuid()}")
        if shutil.which("unshare") is None:
            self.skipTest("there is no program unshare")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        hosts = pathlib.Path(folder.name) / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + text)
        prefix = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', hosts]
        probe = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        if probe.returncode != 0:
            self.skipTest(f"a process cannot have another /etc/hosts here: {probe.stderr.strip()}")
        return prefix

    def net(self, hosts, **options):
        try:
            net = shaped_net.ShapedNet(hosts, rate="none", **options)
        except shaped_net.CannotHere as error:
            self.skipTest(str(error))
        # After the processes have ended: cleanups run in reverse order.
        self.addCleanup(net.down)
        self.addCleanup(self.end_processes)
        return net


class BannerTest(StartTest):
    def test_the_banner_says_who_and_where(self):
        version = re.search(r"project\(gradwire VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
        server = self.server(job__id="banner", job__workers=3, server__lanes=2, server__threads=1)
        settings = server.wait_for(r".* settings .*")
        self.assertIsNotNone(settings, server.errors)
        listening = server.wait_for(r".* listening .*")[0]
        for field in (f"version={version}", "job=banner", "role=root", "index=0"):
            self.assertIn(field, listening)
        self.assertRegex(listening, r" address=tcp://127\.0\.0\.1:\d+,\d+ advertised=tcp://127\.0\.0\.1:\d+,\d+ ")
        for field in ("workers=3", "servers=1", "lanes=2", "threads=1", "average", 'who_may_talk="this machine"'):
            self.assertIn(field, settings[0])


class PortTest(StartTest):
    def test_a_port_in_use_is_named_with_what_to_do(self):
        port = self.hold(listener()).getsockname()[1]
        server = self.server(endpoint=f"tcp://127.0.0.1:{port}")
        self.assert_refused(server, NOT_STARTED, f"cannot listen on tcp://127.0.0.1:{port}",
                            "Address already in use", "`endpoint`")

    def test_port_0_takes_a_free_one_and_says_which(self):
        server = self.server()
        address = self.address_of(server)
        self.assertRegex(address, r"^tcp://127\.0\.0\.1:[1-9]\d*$")
        self.assert_ends_well(self.worker(endpoint=address), server)

    def test_lanes_take_the_free_ports_of_a_range_that_is_taken_in_part(self):
        first, held = hold_row(5)
        for holder in held:
            self.hold(holder)
        held[1].close()
        held[4].close()
        server = self.server(server__lanes=3, server__port_range=f"{first}-{first + 4}")
        address = self.address_of(server)
        self.assertRegex(address, rf"^tcp://127\.0\.0\.1:\d+,{first + 1},{first + 4}$")
        self.assert_ends_well(
            self.worker(endpoint=address.split(",", maxsplit=1)[0], server__lanes=3), server)

    def test_an_exhausted_range_names_range_address_and_reason(self):
        first, held = hold_row(3)
        for holder in held:
            self.hold(holder)
        held[0].close()
        server = self.server(server__lanes=3, server__port_range=f"{first}-{first + 2}")
        self.assert_refused(server, NOT_STARTED, f"server.port_range {first}-{first + 2}",
                            f"tcp://127.0.0.1:{first + 2}: Address already in use", "lane 2 of server 0")

    def test_a_range_smaller_than_the_lanes_is_a_usage_error(self):
        server = self.server(server__lanes=4, server__port_range="20000-20001")
        self.assert_refused(server, USAGE, "server.port_range 20000-20001 has 2 port(s)", "needs 3")

    def test_another_server_leaves_the_endpoints_port_to_the_root(self):
        first, held = hold_row(2)
        for holder in held:
            holder.close()
        common = {"endpoint": f"tcp://127.0.0.1:{first}", "job__servers": 2,
                  "server__port_range": f"{first}-{first + 1}"}
        other = self.server(1, **common)
        self.assertEqual(self.address_of(other), f"tcp://127.0.0.1:{first + 1}")
        root = self.server(0, **common)
        self.assert_ends_well(self.worker(endpoint=common["endpoint"], job__servers=2), root, other)


class BindTest(StartTest):
    def test_a_wrong_interface_name_lists_those_there_are(self):
        self.assert_refused(self.server(server__interface="nonesuch0"), USAGE,
                            "server.interface is nonesuch0", "lo 127.0.0.1")

    def test_the_loopback_interface_needs_no_leave(self):
        server = self.server(server__interface="lo")
        self.assert_ends_well(self.worker(endpoint=self.address_of(server)), server)

    def test_an_address_of_another_host_is_refused(self):
        server = self.server(server__bind="203.0.113.77", security__insecure="true")
        self.assert_refused(server, USAGE, "server.bind is 203.0.113.77", "no address of this host", "lo 127.0.0.1")

    def test_a_name_that_does_not_resolve_is_named(self):
        self.assert_refused(self.server(server__bind="nobody.invalid"), NOT_STARTED,
                            "server.bind is nobody.invalid", "cannot resolve")

    def test_others_than_loopback_need_leave(self):
        for bind in ("0.0.0.0", "::", "[::]"):
            with self.subTest(bind=bind):
                if ":" in bind and not has_ipv6():
                    continue
                self.assert_refused(self.server(server__bind=bind), USAGE, "server.bind", "security.insecure")

    def test_ipv6_from_end_to_end(self):
        self.need_ipv6()
        for bind in ("::1", "[::1]"):
            with self.subTest(bind=bind):
                common = {"server__bind": bind, "job__workers": 2, "job__servers": 2, "server__lanes": 2}
                root = self.server(endpoint="tcp://[::1]:0", **common)
                address = self.address_of(root).split(",", maxsplit=1)[0]
                self.assertRegex(address, r"^tcp://\[::1\]:\d+$")
                other = self.server(1, endpoint=address, **common)
                workers = [self.worker(rank, endpoint=address, **common) for rank in range(2)]
                self.assert_ends_well(*workers, root, other)

    def test_an_endpoint_where_the_root_does_not_listen_is_refused(self):
        server = self.server(endpoint="tcp://127.0.0.2:0", server__bind="127.0.0.1")
        self.assert_refused(server, USAGE, "endpoint is tcp://127.0.0.2:0", "listen on 127.0.0.1 only",
                            "server.bind to 127.0.0.2")

    def test_an_endpoint_that_is_no_host_is_refused(self):
        self.assert_refused(self.server(endpoint="tcp://0.0.0.0:0"), USAGE, "endpoint is tcp://0.0.0.0:0",
                            "nobody can connect to")
        self.assert_refused(self.server(endpoint="tcp://fd00::1:5701"), USAGE, "without brackets")


class AdvertiseTest(StartTest):
    def test_an_address_that_cannot_be_right_is_refused(self):
        for advertise, text in (("203.0.113.77", "no address of this host"), ("0.0.0.0", "nobody can connect to"),
                                ("127.0.0.2", "listens on 127.0.0.1 only")):
            with self.subTest(advertise=advertise):
                self.assert_refused(self.server(server__advertise=advertise), USAGE,
                                    f"server.advertise is {advertise}", text)

    def test_a_name_is_told_as_it_is_written(self):
        server = self.server(server__advertise="localhost")
        self.assertIsNotNone(server.wait_for(r"advertised=tcp://localhost:\d+"), server.errors)

    def test_a_name_with_debians_127_0_1_1_is_refused(self):
        hosts = self.with_hosts("127.0.1.1 trainer.example trainer\n")
        server = self.server(prefix=hosts, server__bind="0.0.0.0", security__insecure="true",
                             server__advertise="trainer")
        self.assert_refused(server, USAGE, "'trainer' (127.0.1.1)", "/etc/hosts", "server.advertise")

    def test_listening_on_a_name_with_127_0_1_1_is_warned_of(self):
        hosts = self.with_hosts("127.0.1.1 trainer\n")
        server = self.server(prefix=hosts, endpoint="tcp://trainer:0", server__bind="trainer")
        self.assertRegex(self.address_of(server), r"^tcp://127\.0\.1\.1:\d+$")
        self.assertRegex(server.errors, r"warning.*/etc/hosts.*bind=trainer address=127\.0\.1\.1")


class NameTest(StartTest):
    def test_of_a_name_with_two_addresses_the_servers_own_is_listened_on(self):
        hosts = self.with_hosts("203.0.113.77 ps\n127.0.0.1 ps\n")
        server = self.server(prefix=hosts, endpoint="tcp://ps:0", server__bind="ps", security__insecure="true")
        self.assertRegex(self.address_of(server), r"^tcp://127\.0\.0\.1:\d+$")

    def test_a_name_with_one_address_elsewhere_needs_leave(self):
        hosts = self.with_hosts("203.0.113.77 ps\n127.0.0.1 ps\n")
        self.assert_refused(self.server(prefix=hosts, endpoint="tcp://ps:0", server__bind="ps"), USAGE,
                            "203.0.113.77", "127.0.0.1", "security.insecure")

    def run_through_name(self, lines):
        hosts = self.with_hosts(lines)
        server = self.server(prefix=hosts, endpoint="tcp://ps:0")
        port = self.address_of(server).rsplit(":", 1)[1]
        self.assert_ends_well(self.worker(prefix=hosts, endpoint=f"tcp://ps:{port}"), server)

    def test_a_name_with_an_unreachable_ipv6_address_is_connected_to(self):
        self.run_through_name("2001:db8::77 ps\n127.0.0.1 ps\n")

    def test_a_name_whose_first_address_is_dead_is_connected_to(self):
        # One where nobody listens, and one that no network leads to (RFC 5737).
        self.run_through_name("127.0.0.3 ps\n203.0.113.77 ps\n127.0.0.1 ps\n")


class JobTest(StartTest):
    def test_two_jobs_with_equal_ids_and_free_ports_never_meet(self):
        jobs = []
        for elements in (20000, 31000):
            server = self.server(job__id="twin", job__workers=2)
            jobs.append((server, self.address_of(server), elements))
        self.assertNotEqual(jobs[0][1], jobs[1][1])
        for server, address, elements in jobs:
            for rank in range(2):
                self.worker(rank, elements=elements, rounds=20, endpoint=address, job__id="twin", job__workers=2)
        self.assert_ends_well(*self.processes)

    def test_a_worker_of_another_job_is_refused_with_both_ids(self):
        server = self.server(job__id="mine")
        address = self.address_of(server)
        stranger = self.worker(endpoint=address, job__id="other")
        self.assertNotEqual(stranger.wait(), 0)
        for text in ("'other'", "'mine'"):
            self.assertIn(text, stranger.errors)
        # The job goes on.
        self.assert_ends_well(self.worker(endpoint=address, job__id="mine"), server)
        self.assertIn("'other'", server.errors)


class HostsTest(StartTest):
    def test_servers_on_all_addresses_advertise_what_others_reach(self):
        net = self.net(3)
        common = {"endpoint": f"tcp://{net.hosts[0].address}:5701", "job__servers": 2, "job__workers": 2,
                  "server__bind": "0.0.0.0", "security__insecure": "true"}
        root = self.server(0, prefix=net.command(0, []), **common)
        other = self.server(1, prefix=net.command(1, []), **common)
        workers = [self.worker(rank, prefix=net.command(rank + 1, []), **common) for rank in range(2)]
        self.assert_ends_well(*workers, root, other)
        for server, host in ((root, 0), (other, 1)):
            self.assertRegex(ADVERTISED.search(server.errors)[1], rf"^tcp://{net.hosts[host].address}:\d+$")

    def test_a_server_that_advertises_a_card_the_root_cannot_reach_is_named(self):
        net = self.net(2)
        # Another address of its own, in a network that the root has no route to.
        subprocess.run(net.command(1, ["ip", "address", "add", "10.99.0.1/24", "dev", "eth0"]), check=True,
                       timeout=DEADLINE_S)
        common = {"endpoint": f"tcp://{net.hosts[0].address}:5701", "job__servers": 2, "server__bind": "0.0.0.0",
                  "security__insecure": "true"}
        root = self.server(0, prefix=net.command(0, []), **common)
        other = self.server(1, prefix=net.command(1, []), server__advertise="10.99.0.1", **common)
        worker = self.worker(prefix=net.command(0, []), **common)
        for process in (root, other, worker):
            self.assertEqual(process.wait(), NOT_STARTED, process.errors)
            self.assertIn("server 1", process.errors)
            self.assertRegex(process.errors, r"tcp://10\.99\.0\.1:\d+")
        self.assertIn("Network is unreachable", root.errors)

    def test_a_loopback_address_is_refused_when_others_are_elsewhere(self):
        net = self.net(2)
        common = {"endpoint": f"tcp://{net.hosts[0].address}:5701", "job__servers": 2, "security__insecure": "true"}
        root = self.server(0, prefix=net.command(0, []), server__bind="0.0.0.0", **common)
        # The default of server.bind, as in a file that was written for one host.
        other = self.server(1, prefix=net.command(1, []), **common)
        worker = self.worker(prefix=net.command(0, []), **common)
        for process in (root, other, worker):
            self.assertEqual(process.wait(), USAGE, process.errors)
            self.assertRegex(process.errors, rf"server 1 at {net.hosts[1].address} .*advertises the loopback address "
                                             r"tcp://127\.0\.0\.1:\d+")
            self.assertIn("server.interface", process.errors)

    def test_all_addresses_of_ipv6_serve_ipv4_as_well(self):
        self.need_ipv6()
        net = self.net(2, ipv6=True)
        for endpoint in (f"[{net.hosts[0].address_v6}]", net.hosts[0].address):
            with self.subTest(endpoint=endpoint):
                common = {"endpoint": f"tcp://{endpoint}:5701", "job__servers": 2, "server__bind": "::",
                          "security__insecure": "true"}
                root = self.server(0, prefix=net.command(0, []), **common)
                other = self.server(1, prefix=net.command(1, []), **common)
                self.assert_ends_well(self.worker(prefix=net.command(1, []), **common), root, other)
                v6 = endpoint.startswith("[")
                self.assertRegex(ADVERTISED.search(other.errors)[1],
                                 rf"^tcp://{re.escape(f'[{net.hosts[1].address_v6}]' if v6 else net.hosts[1].address)}:")

    def test_all_addresses_of_ipv4_do_not_serve_an_ipv6_endpoint(self):
        self.need_ipv6()
        net = self.net(2, ipv6=True)
        common = {"endpoint": f"tcp://[{net.hosts[0].address_v6}]:5701", "job__servers": 2,
                  "server__bind": "0.0.0.0", "security__insecure": "true"}
        root = self.server(0, prefix=net.command(0, []), **common)
        self.assert_refused(root, USAGE, "listen on 0.0.0.0 only")
        other = self.server(1, prefix=net.command(1, []), **common)
        self.assert_refused(other, USAGE, "IPv4 alone", net.hosts[1].address_v6)

    def test_an_interface_is_listened_on(self):
        net = self.net(2)
        common = {"endpoint": f"tcp://{net.hosts[0].address}:0", "server__interface": "eth0"}
        self.assert_refused(self.server(prefix=net.command(0, []), **common), USAGE, "security.insecure",
                            net.hosts[0].address)
        server = self.server(prefix=net.command(0, []), security__insecure="true", **common)
        address = self.address_of(server)
        self.assertTrue(address.startswith(f"tcp://{net.hosts[0].address}:"), address)
        self.assert_ends_well(self.worker(prefix=net.command(1, []), endpoint=address), server)

    def test_a_root_started_on_the_wrong_host_says_so(self):
        net = self.net(2)
        server = self.server(prefix=net.command(1, []), endpoint=f"tcp://{net.hosts[0].address}:5701",
                             server__bind="0.0.0.0", security__insecure="true")
        self.assert_refused(server, USAGE, f"endpoint is tcp://{net.hosts[0].address}:5701", "no address of this host",
                            f"eth0 {net.hosts[1].address}")

    def test_a_server_without_a_route_to_the_endpoint_says_so(self):
        net = self.net(1)
        server = self.server(1, prefix=net.command(0, []), endpoint="tcp://10.99.0.1:5701", job__servers=2,
                             server__bind="0.0.0.0", security__insecure="true")
        self.assert_refused(server, NOT_STARTED, "no route from this host to tcp://10.99.0.1:5701",
                            "Network is unreachable", "server.advertise")


if __name__ == "__main__":
    unittest.main()
