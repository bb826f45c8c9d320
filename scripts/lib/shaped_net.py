"""Hosts of their own on one machine, joined by links of a given rate, for tests and benchmarks.

Each host is a network namespace with one card, eth0. All cards meet in a bridge, which lives in one
more namespace, the hub; the machine's own network is not touched. Both ends of each link are
shaped, so that a host sends and receives at the rate independently.

    with ShapedNet(hosts=2, rate="1gbit") as net:
        subprocess.run(net.command(1, ["ip", "address"]), check=True)
        net.cut(1)

The names of the namespaces carry the owner's process id and start time, so that anybody can tell
what a killed owner left behind, and remove it: remove_stale(), which a new net does first.
"""

import errno
import os
import re
import secrets
import shutil
import signal
import subprocess
import time

SUBNET = "10.77.0."
SUBNET_V6 = "fd77::"
MAX_HOSTS = 200
# Far beyond what any command of ip or tc takes on a busy machine.
COMMAND_LIMIT_S = 60
NAME = re.compile(r"(?P<prefix>[a-z][a-z0-9_]{0,31})-(?P<owner>\d+)-(?P<start>\d+)-(?P<tag>[0-9a-f]{6})"
                  r"-(?P<member>hub|h\d+)")
DEFAULT_PREFIX = "gwnet"
# What ip and tc say where the kernel, or a container's rights, lack something.
CANNOT = re.compile(r"Operation not permitted|Permission denied|not supported|Unknown device type|"
                    r"qdisc kind is unknown|Read-only file system", re.IGNORECASE)


class ShapedNetError(Exception):
    """Something went wrong; the message says what."""


class CannotHere(ShapedNetError):
    """This machine or user cannot make namespaces or shaped links: a reason to skip."""


# ---- ip and tc -----------------------------------------------------------------------------------

def _run(arguments, text=None):
    # A translated message would not be recognized.
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        result = subprocess.run(arguments, input=text, capture_output=True, text=True, check=False,
                                timeout=COMMAND_LIMIT_S, env=environment)
    except FileNotFoundError as error:
        raise CannotHere(f"there is no program {arguments[0]} (Debian: apt-get install iproute2)") from error
    except subprocess.TimeoutExpired as error:
        raise ShapedNetError(f"{' '.join(arguments)} did not end within {COMMAND_LIMIT_S} s") from error
    if result.returncode != 0:
        message = f"{' '.join(arguments)}: {result.stderr.strip() or result.stdout.strip()}"
        raise (CannotHere if CANNOT.search(result.stderr) else ShapedNetError)(message)
    return result.stdout


def _batch(program, namespace, lines):
    """One process for many commands. Stops at the first that fails."""
    where = ["-n", namespace] if namespace else []
    _run([program, *where, "-batch", "-"], "\n".join(lines) + "\n")


def require():
    """Raises CannotHere, with the reason, if it is plain that nets cannot be made here."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise CannotHere(f"there is no program {program} (Debian: apt-get install iproute2)")
    if os.geteuid() != 0:
        raise CannotHere(f"only root can make network namespaces, and this is user {os.geteuid()}")


# ---- Rates ---------------------------------------------------------------------------------------

def parse_rate(text):
    """"100mbit", "2.5gbit" -> bits a second; "none" -> None, a link that is not shaped."""
    if text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    bits = float(match[1]) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[match[2]] if match else 0
    if not 1e6 <= bits <= 400e9:
        raise ValueError(f"the rate is '{text}', expected none, or 1mbit to 400gbit, such as 100mbit or "
                         "2.5gbit")
    return int(bits)


def tbf_arguments(bits):
    """The token bucket for a rate. With a smaller burst fast links were measured to stay below their
    rate: 7.0 instead of 8.7 Gb/s at 10 Gb/s."""
    burst = 128 << 10 if bits <= 1e9 else 1 << 20 if bits <= 5e9 else 2 << 20
    # A queue of 32 ms, as a switch has it: deep enough for full rate, and a slow link doesn't delay for seconds.
    limit = min(max(bits * 0.032 / 8, 256 << 10), 8 << 20)
    return f"tbf rate {bits}bit burst {burst} limit {int(max(limit, 2 * burst))}"


# ---- Owners --------------------------------------------------------------------------------------

def _start_time(pid):
    """When the process began, in the kernel's ticks; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return None
        raise
    return None if fields[0] in "ZX" else int(fields[19])


def _owner_is_gone(owner, start):
    # Owner 0 means: nobody's, until somebody takes it down.
    return owner != 0 and _start_time(owner) != start


def _namespaces():
    """{net's name: [its members]} of all nets on this machine."""
    try:
        names = os.listdir("/run/netns")
    except FileNotFoundError:
        return {}
    nets = {}
    for name in names:
        match = NAME.fullmatch(name)
        if match:
            nets.setdefault(name.rsplit("-", 1)[0], []).append(match["member"])
    return nets


def _kill_inside(namespace):
    """Ends all processes in a namespace: with one left, it would live on without a name."""
    limit = time.monotonic() + 10
    while True:
        try:
            pids = [int(pid) for pid in _run(["ip", "netns", "pids", namespace]).split()]
        except ShapedNetError:
            return  # Somebody else removed it.
        pids = [pid for pid in pids if pid != os.getpid()]
        if not pids or time.monotonic() > limit:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)


def _remove(net, members):
    # The hub goes last: a host without its name would leave a link in the hub.
    for member in sorted(members, key=lambda m: m == "hub"):
        namespace = f"{net}-{member}"
        _kill_inside(namespace)
        try:
            _run(["ip", "netns", "delete", namespace])
        except ShapedNetError:
            if os.path.exists(f"/run/netns/{namespace}"):
                raise


def remove_stale():
    """Removes the nets whose owner is gone, with the processes in them. Returns their names."""
    removed = []
    for net, members in sorted(_namespaces().items()):
        _, owner, start, _ = net.split("-")
        if _owner_is_gone(int(owner), int(start)):
            _remove(net, members)
            removed.append(net)
    return removed


def list_nets():
    """[(net's name, owner's pid, is the owner gone, number of hosts)]"""
    rows = []
    for net, members in sorted(_namespaces().items()):
        _, owner, start, _ = net.split("-")
        rows.append((net, int(owner), _owner_is_gone(int(owner), int(start)),
                     sum(member != "hub" for member in members)))
    return rows


# ---- A net ---------------------------------------------------------------------------------------

class Host:
    def __init__(self, net, index):
        self.index = index
        self.namespace = f"{net}-h{index}"
        self.address = f"{SUBNET}{index + 1}"
        self.address_v6 = f"{SUBNET_V6}{index + 1:x}"


class ShapedNet:
    """Hosts 0 to N-1, with the addresses 10.77.0.1 and on (the same in every net: nets don't meet).

    Threads: one at a time. Errors: CannotHere, ShapedNetError, ValueError for a wrong argument.
    """

    def __init__(self, hosts, rate="1gbit", prefix=DEFAULT_PREFIX, ipv6=False, owner=None):
        """owner: the pid with whose end the net becomes stale; None is this process, 0 nobody."""
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"{hosts} hosts wanted, expected 1 to {MAX_HOSTS}")
        bits = parse_rate(rate)
        owner = os.getpid() if owner is None else owner
        start = _start_time(owner) if owner else 0
        if start is None:
            raise ValueError(f"the owner {owner} is not a running process")
        self.name = f"{prefix}-{owner}-{start}-{secrets.token_hex(3)}"
        if not NAME.fullmatch(self.name + "-hub"):
            raise ValueError(f"the prefix is '{prefix}', expected a letter, then letters, digits or _, "
                             "all small, at most 32")
        self.hub = f"{self.name}-hub"
        self.hosts = [Host(self.name, index) for index in range(hosts)]
        require()
        remove_stale()
        try:
            self._build(ipv6)
            self._shape(bits, self.hosts)
        except BaseException:
            self.down()
            raise

    @classmethod
    def find(cls, name):
        """The net that somebody else made."""
        members = _namespaces().get(name)
        if members is None:
            raise ShapedNetError(f"there is no net {name}")
        net = cls.__new__(cls)
        net.name = name
        net.hub = f"{name}-hub"
        net.hosts = [Host(name, index) for index in sorted(int(m[1:]) for m in members if m != "hub")]
        return net

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.down()

    def _build(self, ipv6):
        _batch("ip", None, [f"netns add {name}" for name in
                            (self.hub, *(host.namespace for host in self.hosts))])
        lines = ["link add br0 type bridge", "link set br0 up"]
        for host in self.hosts:
            lines += [f"link add name eth0 netns {host.namespace} type veth peer name p{host.index}",
                      f"link set p{host.index} master br0", f"link set p{host.index} up"]
        _batch("ip", self.hub, lines)
        for host in self.hosts:
            lines = ["link set lo up", f"address add {host.address}/24 dev eth0"]
            if ipv6:
                # Without the search for duplicates, which takes a second or two.
                lines.append(f"address add {host.address_v6}/64 dev eth0 nodad")
            _batch("ip", host.namespace, [*lines, "link set eth0 up"])

    def _shape(self, bits, hosts):
        for host in hosts:
            for namespace, device in ((host.namespace, "eth0"), (self.hub, f"p{host.index}")):
                if bits is not None:
                    _run(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root",
                          *tbf_arguments(bits).split()])
                elif "tbf" in _run(["tc", "-n", namespace, "qdisc", "show", "dev", device]):
                    _run(["tc", "-n", namespace, "qdisc", "delete", "dev", device, "root"])

    def host(self, which):
        """The host of an index or of a namespace's name."""
        for host in self.hosts:
            if str(which) in (str(host.index), host.namespace):
                return host
        raise ShapedNetError(f"{self.name} has no host {which}; it has {len(self.hosts)}, from 0")

    def command(self, which, arguments):
        """The command that runs `arguments` on a host."""
        return ["ip", "netns", "exec", self.host(which).namespace, *map(str, arguments)]

    def set_rate(self, rate, which=None):
        """Of one host's link, or of all."""
        self._shape(parse_rate(rate), self.hosts if which is None else [self.host(which)])

    def cut(self, which):
        """Takes the host's link away, as a pulled cable does: packets vanish, nobody is told."""
        _run(["ip", "-n", self.hub, "link", "set", f"p{self.host(which).index}", "down"])

    def restore(self, which):
        _run(["ip", "-n", self.hub, "link", "set", f"p{self.host(which).index}", "up"])

    def down(self):
        """Ends the processes in the hosts and removes them. May be called again."""
        _remove(self.name, _namespaces().get(self.name, []))

    def environment(self):
        """What a command is given to find its hosts."""
        return {"SHAPED_NET": self.name,
                "SHAPED_NET_HOSTS": " ".join(host.namespace for host in self.hosts),
                "SHAPED_NET_ADDRESSES": " ".join(host.address for host in self.hosts),
                "SHAPED_NET_ADDRESSES_V6": " ".join(host.address_v6 for host in self.hosts)}
