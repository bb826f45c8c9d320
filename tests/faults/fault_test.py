#!/usr/bin/python3
"""Real jobs of two servers and two workers, each hit by one fault at a random moment.

Usage: fault_test.py BIN_DIR [--sanitized] [unittest's arguments]

Whoever is hit, and however: nobody hangs, no sum is wrong, every survivor names the victim by role,
rank and address, in time, and nothing is left over. Each kind of fault is tried at
GRADWIRE_FAULT_MOMENTS moments (default 5; 2 if the programs are sanitized), the first of them while
the job starts. GRADWIRE_TEST_SEED repeats a run's moments. Jobs mostly wait, so several run at
the same time; one that took too long is tried again alone before it counts, since then nothing
but the job itself can be the reason.
"""

import concurrent.futures
import os
import pathlib
import random
import re
import shutil
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
BIN = pathlib.Path(sys.argv.pop(1)).resolve()
SANITIZED = "--sanitized" in sys.argv and not sys.argv.remove("--sanitized")
MOMENTS = int(os.environ.get("GRADWIRE_FAULT_MOMENTS") or (2 if SANITIZED else 5))
SEED = int(os.environ.get("GRADWIRE_TEST_SEED") or random.randrange(1 << 31))
AT_A_TIME = 3 if SANITIZED else 4

# Sanitized programs are ten times slower, and look for leaks as they end.
DEAD_AFTER_S = 4 if SANITIZED else 1
START_S = 20 if SANITIZED else 5
# From the fault to the last survivor's error.
NOTICE_S = DEAD_AFTER_S + (20 if SANITIZED else 2)
# From a survivor's error to its end: it tries to tell peers that may not answer.
CLOSE_S = 20 if SANITIZED else 4
# For what must happen, however busy the machine is.
PATIENCE_S = 120
WORKER, SERVER = "worker", "server"

sys.path.insert(0, str(ROOT / "scripts" / "lib"))
sys.dont_write_bytecode = True
import shaped_net  # noqa: E402


def why_no_net():
    try:
        with shaped_net.ShapedNet(1, prefix=f"f{os.getpid()}"):
            return None
    except shaped_net.CannotHere as error:
        return str(error)


def processes_with(mark):
    """{pid: its environment} of the running processes with this in their environment."""
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/environ", "rb") as file:
                items = file.read().split(b"\0")
        except OSError:
            continue
        if mark.encode() in items:
            found[int(entry.name)] = dict(item.decode().split("=", 1) for item in items if b"=" in item)
    return found


def listening_ports():
    with open("/proc/net/tcp", encoding="ascii") as file:
        rows = [line.split() for line in list(file)[1:]]
    return {str(int(row[1].split(":")[1], 16)) for row in rows if row[3] == "0A"}


def kill(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def is_running(pid):
    """Neither gone nor a zombie, which its parent has yet to notice."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in "ZX"


def is_stopped(pid):
    states = [pathlib.Path(task, "stat").read_text().rsplit(")", 1)[1].split()[0]
              for task in pathlib.Path(f"/proc/{pid}/task").iterdir()]
    return all(state == "T" for state in states)


def wait_until(condition, what, limit_s=PATIENCE_S):
    limit = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > limit:
            raise AssertionError(f"waited {limit_s} s for {what}")
        time.sleep(0.01)


def lost_line(role, rank):
    """How a survivor names the lost: by role, rank and address."""
    extra = r"(?: lane \d+)?(?: \(the root\))?" if role == SERVER else ""
    return re.compile(rf"\b{role} {rank}{extra} at [^\s,]*\d[^\s,]*(?: \([^)]*\))? is lost\b")


ERROR_LINE = re.compile(r"(?m)^\d{4}-\d\d-\d\d\S* error ")
ANY_LOST = re.compile(r"\b(worker|server) (\d+)[^:;]{0,200}? is lost\b")


def names_it(role, rank, text):
    """True if a job that had not started says whom it misses."""
    if lost_line(role, rank).search(text):
        return True
    if role == SERVER and rank == 0:
        return re.search(r"(root|server 0)[^\n]* at tcp://\S+", text) is not None
    return re.search(rf"\b{role}s? [^\n]*?\b{rank}\b", text) is not None


class TooSlow(AssertionError):
    """A promise about time was not kept; all else was."""


class Job:
    """Two servers and two workers."""

    def __init__(self, rounds=1_000_000, settings=(), options=(), command=None, workers=2,
                 elements=40_000):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="faults."))
        self.mark = f"GWFAULT_MARK={uuid.uuid4().hex}"
        self.members = {}  # (role, rank): pid
        self.codes = {}    # (role, rank): exit code; minus a signal's number
        self.workers = workers
        self.settings = [f"timeouts.dead_after={DEAD_AFTER_S}s", f"timeouts.start={START_S}s", *settings]
        self.options = options
        self.command = command or self.worker_command(rounds, elements)
        self.launcher = None
        self.launched = ""

    @staticmethod
    def worker_command(rounds, elements=40_000):
        return [str(BIN / "push_pull_worker"), "--tensors", "3", "--elements", str(elements), "--rounds",
                str(rounds), "--warm-up", "0", "--check", "--verbose"]

    def environment(self):
        environment = {key: value for key, value in os.environ.items()
                       if not key.startswith(("GRADWIRE_", "DMLC_", "BYTEPS_", "SLURM_", "OMPI_"))}
        key, value = self.mark.split("=")
        environment[key] = value
        return environment

    def everyone(self):
        return [(SERVER, 0), (SERVER, 1), *((WORKER, rank) for rank in range(self.workers))]

    def folder(self, member):
        return self.directory / f"{'server' if member[0] == SERVER else 'rank'}.{member[1]:02d}"

    def errors(self, member):
        try:
            return (self.folder(member) / "stderr.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def output(self, member):
        try:
            return (self.folder(member) / "stdout.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def start(self):
        sets = [word for text in self.settings for word in ("--set", text)]
        # The test ends what has to be ended; the launcher would only hide who hangs.
        command = [str(LAUNCHER), "--bin-dir", str(BIN), "--log-dir", str(self.directory), "--free-port",
                   "--grace", "1000s", "--workers", str(self.workers), "--servers", "2", *sets,
                   *self.options, "--", *self.command]
        with open(self.directory / "launcher.log", "wb") as log:
            self.launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log,
                                             env=self.environment(), start_new_session=True)

    def launcher_says(self):
        return (self.directory / "launcher.log").read_text(errors="replace")

    def find(self, *members):
        """Waits until these processes run and knows them from then on."""
        def all_there():
            for pid, environment in processes_with(self.mark).items():
                role, rank = environment.get("GRADWIRE_ROLE"), environment.get("GRADWIRE_RANK")
                if role and self.is_program(pid):
                    self.members.setdefault((role, int(rank)), pid)
            return all(member in self.members for member in members)
        wait_until(all_there, f"{members} to run")

    @staticmethod
    def is_program(pid):
        # Between fork and exec a child is still the launcher, whose environment has no role anyway.
        try:
            return os.readlink(f"/proc/{pid}/exe").startswith(str(BIN))
        except OSError:
            return False

    def wait_round(self, round_number):
        wait_until(lambda: f"done {round_number}\n" in self.output((WORKER, 0)) or self.someone_ended(),
                   f"round {round_number}")

    def someone_ended(self):
        return any(not is_running(pid) for pid in self.members.values())

    def wait_ended(self, members, since, limit_s):
        """Waits until they have ended. Returns {member: seconds since the fault} of their first errors
        and of their ends; who still runs is in neither."""
        noticed, ended = {}, {}
        while True:
            now = time.monotonic() - since
            for member in members:
                # Seen here and not read from the log: the wall clock may be set at any time.
                if member not in ended and not is_running(self.members[member]):
                    ended[member] = now
                if member not in noticed and ERROR_LINE.search(self.errors(member)):
                    noticed[member] = now
            if len(ended) == len(members) or now > limit_s:
                return noticed, ended
            time.sleep(0.02)

    def finish(self):
        """The launcher's exit code, and with it what it says of the others'."""
        code = self.launcher.wait(PATIENCE_S)
        self.launched = self.launcher_says()
        return code

    def code_of(self, member):
        if member in self.codes:
            return self.codes[member]
        name = f"{'server' if member[0] == SERVER else 'rank'} {member[1]}"
        match = (re.search(rf"(?:did not succeed:.*[ ,]|^gradwire-launch: ){name}(?: failed first:)? exit code "
                           r"(\d+)", self.launched, re.MULTILINE))
        return int(match[1]) if match else None

    def report(self):
        parts = [f"launcher: {self.launched or self.launcher_says()}"] if self.launcher else []
        for member in self.everyone():
            parts.append(f"--- {member[0]} {member[1]} (exit code {self.code_of(member)}):\n"
                         f"{self.errors(member)[-3000:]}")
        return "\n".join(parts)

    def ports(self):
        return set(re.findall(r"tcp://(?:127\.0\.0\.1):(\d+)",
                              "".join(self.errors(member) for member in self.everyone())))

    def nothing_left(self):
        wait_until(lambda: not processes_with(self.mark), "every process to end", 60)
        if not self.is_elsewhere:
            # A process that ends gives up its environment a moment before its sockets.
            ports = self.ports()
            wait_until(lambda: not ports & listening_ports(), f"nobody to listen on one of {ports}", 20)

    is_elsewhere = False

    def end(self):
        """Whatever has happened, ends what there is."""
        for _ in range(3):
            for pid in processes_with(self.mark):
                kill(pid, signal.SIGKILL)
        if self.launcher is not None:
            self.launcher.wait(PATIENCE_S)
        shutil.rmtree(self.directory, ignore_errors=True)


class JobOnHosts(Job):
    """Each process on a host of its own. The launcher starts jobs on one machine only, so it is not
    used."""

    is_elsewhere = True

    def __init__(self, rate="1gbit", elements=40_000):
        super().__init__(elements=elements)
        self.net = shaped_net.ShapedNet(4, rate=rate, prefix=f"f{os.getpid()}")
        self.popens = {}

    def start(self):
        for number, member in enumerate(self.everyone()):
            self.folder(member).mkdir()
            host = self.net.hosts[number]
            sets = [*self.settings, "job.workers=2", "job.servers=2", "job.id=faults",
                    f"endpoint=tcp://{self.net.hosts[0].address}:5701", f"server.bind={host.address}",
                    "security.insecure=true"]
            program = ([BIN / "gradwire-server", "--index", member[1]] if member[0] == SERVER else
                       [*self.command, "--rank", member[1]])
            command = self.net.command(number, [*program, *(w for s in sets for w in ("--set", s))])
            with open(self.folder(member) / "stdout.log", "wb") as out, \
                    open(self.folder(member) / "stderr.log", "wb") as err:
                # `ip netns exec` becomes the program, so the pid is the program's.
                self.popens[member] = subprocess.Popen(
                    command, stdout=out, stderr=err, start_new_session=True,
                    env={**self.environment(), "GRADWIRE_ROLE": member[0], "GRADWIRE_RANK": str(member[1])})

    def finish(self):
        for member, popen in self.popens.items():
            self.codes[member] = popen.wait(PATIENCE_S)
        return 0

    def cut(self, member):
        self.net.cut(self.everyone().index(member))

    def nothing_left(self):
        super().nothing_left()
        self.net.down()
        left = [name for name in os.listdir("/run/netns") if name.startswith(self.net.name)]
        if left:
            raise AssertionError(f"namespaces are left: {left}")

    def end(self):
        super().end()
        for popen in self.popens.values():
            popen.wait(PATIENCE_S)
        self.net.down()


class Moment:
    """When, and whom of several, a fault hits. Printed, and the same for the same seed."""

    def __init__(self, victim, fault, number, last_round=200):
        chance = random.Random(f"{SEED}/{victim}/{fault}/{number}")
        self.fault = fault
        self.victim = {"worker": (WORKER, chance.randrange(2)), "root": (SERVER, 0),
                       "server": (SERVER, 1), "launcher": None}[victim]
        self.in_start = number == 0
        # A start takes some ten milliseconds on an idle machine.
        self.round = None if self.in_start else chance.randrange(1, last_round)
        self.delay_ms = chance.randrange(0, 250 if self.in_start else 50)
        self.text = (f"{victim}, {fault}, number {number}: {self.victim or ''} hit {self.delay_ms} ms after "
                     + ("its start" if self.in_start else f"round {self.round}"))


def hit(job, moment):
    """One job and its fault. Raises AssertionError, and TooSlow if only the time is wrong."""
    everyone = job.everyone()
    job.start()
    if moment.in_start:
        job.find(moment.victim or (SERVER, 0))
    else:
        job.find(*everyone)
        job.wait_round(moment.round)
    time.sleep(moment.delay_ms / 1000)  # The moment is the test's input.
    if moment.in_start:
        # Who is not there yet will come: the launcher starts all at once.
        job.find(moment.victim or (SERVER, 0))
    fault_at = time.monotonic()
    if moment.victim is None:
        kill(job.launcher.pid, signal.SIGKILL)
        job.launcher.wait(PATIENCE_S)
        wait_until(lambda: not processes_with(job.mark), "everything to end with the launcher",
                   60 if SANITIZED else 20)
        job.nothing_left()
        return None
    pid = job.members[moment.victim]
    if moment.fault == "cut":
        job.cut(moment.victim)
    else:
        kill(pid, signal.SIGKILL if moment.fault == "kill" else signal.SIGSTOP)
    survivors = [member for member in everyone if member != moment.victim]
    if moment.in_start:
        job.find(*survivors)
    # If it was hit before anybody knew it, it is the start that fails, later.
    bound = START_S + NOTICE_S if moment.in_start else NOTICE_S
    noticed, ended = job.wait_ended(survivors, fault_at, bound + CLOSE_S + PATIENCE_S / 4)
    hanging = [member for member in survivors if member not in ended]
    victim_hangs = moment.fault == "cut" and not hanging and not job.wait_ended(
        [moment.victim], fault_at, bound + CLOSE_S + PATIENCE_S / 4)[1]
    if hanging or victim_hangs:
        raise AssertionError(f"{hanging or moment.victim} still run(s), "
                             f"{time.monotonic() - fault_at:.0f} s after the fault\n{job.report()}")
    if moment.fault == "stop":
        kill(pid, signal.SIGKILL)
    job.finish()
    problems = []
    started = not moment.in_start or any("done 0\n" in job.output((WORKER, rank)) for rank in (0, 1))
    for member in survivors:
        text = job.errors(member)
        code = job.code_of(member)
        who = f"{member[0]} {member[1]}"
        wrong = re.search(r"round \d+: got .*, expected .*", text)
        if wrong:
            problems.append(f"{who} has a wrong sum: {wrong[0]}")
        if started:
            if code != 5:
                problems.append(f"{who} gives exit code {code}, expected 5")
            if not lost_line(*moment.victim).search(text):
                problems.append(f"{who} does not name the victim with its address")
        else:
            if code not in (3, 5):
                problems.append(f"{who} gives exit code {code}, expected 3 or 5")
            if not names_it(*moment.victim, text):
                problems.append(f"{who} does not name the victim")
        if member not in noticed:
            problems.append(f"{who} logs no error")
        for role, rank in ANY_LOST.findall(text):
            if (role, int(rank)) != moment.victim:
                problems.append(f"{who} says that {role} {rank} is lost, which is not the victim")
    if moment.fault == "kill":
        name = f"{'server' if moment.victim[0] == SERVER else 'rank'} {moment.victim[1]}"
        if f"{name} failed first: killed by SIGKILL" not in job.launched:
            problems.append(f"the launcher does not name {name} as the first to fail")
    try:
        job.nothing_left()
    except AssertionError as error:
        problems.append(str(error))
    if problems:
        raise AssertionError("\n".join(dict.fromkeys(problems)) + "\n" + job.report())
    for what, times, limit in (("noticed", noticed, bound), ("ended", ended, bound + CLOSE_S)):
        last = max(times, key=times.get)
        if times[last] > limit:
            raise TooSlow(f"{last[0]} {last[1]} {what} {times[last]:.2f} s after the fault, expected "
                          f"at most {limit} s\n{job.report()}")
    return max(noticed.values()), max(ended.values())


def try_moment(moment, make_job):
    job = make_job()
    try:
        return hit(job, moment)
    finally:
        job.end()


class Striking(unittest.TestCase):
    def strike(self, victim, fault, make_job=Job, last_round=200):
        moments = [Moment(victim, fault, number, last_round) for number in range(MOMENTS)]
        times, slow, failed = [], [], []
        with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
            runs = [(moment, pool.submit(try_moment, moment, make_job)) for moment in moments]
            for moment, run in runs:
                try:
                    times.append(run.result())
                except TooSlow as error:
                    slow.append((moment, str(error).splitlines()[0]))
                except Exception as error:  # one report for all moments
                    failed.append(f"{moment.text}: {error}")
        for moment, reason in slow:
            print(f"\n  again, alone: {moment.text}: {reason}", flush=True)
            try:
                times.append(try_moment(moment, make_job))
            except AssertionError as error:
                failed.append(f"{moment.text}, alone: {error}")
        shown = ", ".join(f"{noticed:.2f}/{ended:.2f}" for noticed, ended in filter(None, times))
        if shown:
            print(f"\n  {victim}, {fault}: all survivors noticed/ended after {shown} s", flush=True)
        if failed:
            self.fail(f"{len(failed)} of {MOMENTS} moments failed (GRADWIRE_TEST_SEED={SEED}):\n\n"
                      + "\n\n".join(failed))


class FaultTest(Striking):
    def test_a_killed_worker(self):
        self.strike("worker", "kill")

    def test_a_killed_root(self):
        self.strike("root", "kill")

    def test_a_killed_server(self):
        self.strike("server", "kill")

    def test_a_stopped_worker(self):
        self.strike("worker", "stop")

    def test_a_stopped_root(self):
        self.strike("root", "stop")

    def test_a_stopped_server(self):
        self.strike("server", "stop")

    def test_a_killed_launcher(self):
        self.strike("launcher", "kill")


class LinkTest(Striking):
    def test_a_cut_link_of_a_worker(self):
        self.strike("worker", "cut", JobOnHosts)

    def test_a_cut_link_of_the_root(self):
        self.strike("root", "cut", JobOnHosts)

    def test_a_cut_link_of_a_server(self):
        self.strike("server", "cut", JobOnHosts)

    def test_a_cut_link_that_was_full(self):
        """What waits to be sent lets no ping out after it: TCP itself has to give up."""
        self.strike("worker", "cut", lambda: JobOnHosts("100mbit", 1_500_000), last_round=4)


class EndingTest(unittest.TestCase):
    def job(self, **arguments):
        job = Job(**arguments)
        self.addCleanup(job.end)
        job.start()
        return job

    def split(self, first, other):
        """A command that does `other` on rank 1, `first` elsewhere."""
        return ["/bin/sh", "-c", f'if [ "$GRADWIRE_RANK" = 1 ]; then {other}; else {first}; fi']

    def worker(self, rounds):
        return "exec " + " ".join(Job.worker_command(rounds))

    def test_a_job_that_ends_well_has_every_goodbye_acknowledged(self):
        job = self.job(rounds=20)
        self.assertEqual(job.finish(), 0, job.report())
        for member in job.everyone():
            self.assertNotRegex(job.errors(member), r"(?m)^\S+ (error|warn) ", job.report())
        for rank in (0, 1):
            self.assertIn("done 19\n", job.output((WORKER, rank)))
        job.nothing_left()

    def test_a_worker_that_leaves_early_is_named(self):
        job = self.job(command=self.split(self.worker(1_000_000), self.worker(10)))
        self.assertIn(job.finish(), (1, 5), job.report())
        for member in ((SERVER, 0), (SERVER, 1), (WORKER, 0)):
            self.assertRegex(job.errors(member), r"worker 1 at \S+(?: \([^)]*\))? has left, and others wait for it",
                             job.report())
            self.assertNotRegex(job.errors(member), "is lost")
        self.assertIn("done 9\n", job.output((WORKER, 1)))
        job.nothing_left()

    def test_an_interrupt_ends_everyone_and_a_second_at_once(self):
        for times in (1, 2):
            with self.subTest(times=times):
                job = self.job()
                job.find(*job.everyone())
                job.wait_round(5)
                if times == 2:
                    # It cannot answer the first.
                    pid = job.members[WORKER, 0]
                    kill(pid, signal.SIGSTOP)
                    # A thread that still runs would take the interrupt for all of them.
                    wait_until(lambda pid=pid: is_stopped(pid), "every thread of rank 0 to stop")
                job.launcher.send_signal(signal.SIGINT)
                wait_until(lambda job=job: "SIGINT" in job.launcher_says(), "the launcher to say so")
                if times == 2:
                    self.assertIsNone(job.launcher.poll())
                    job.launcher.send_signal(signal.SIGINT)
                self.assertEqual(job.finish(), 130, job.report())
                self.assertNotIn("failed first", job.launched)
                job.nothing_left()

    def second_life(self, job):
        """Starts rank 1 once more, with the environment that the first was given; what it says."""
        again = subprocess.run(job.command, env=job.environment_of_rank_1, capture_output=True, text=True,
                               check=False, timeout=PATIENCE_S)
        self.assertNotIn(again.returncode, (0, -signal.SIGKILL), again.stderr)
        return again.stderr

    def running_job(self):
        job = self.job()
        job.find(*job.everyone())
        job.wait_round(5)
        job.environment_of_rank_1 = processes_with(job.mark)[job.members[WORKER, 1]]
        return job

    def test_a_second_life_beside_the_first_is_refused_by_name_and_the_job_goes_on(self):
        job = self.running_job()
        said = self.second_life(job)
        for text in (said, job.errors((SERVER, 0))):
            self.assertRegex(text, r"worker 1 at \S+[^\n]* is refused: worker 1 at \S+[^\n]* is already in the job",
                             job.report())
        rounds = job.output((WORKER, 0)).count("done ")
        job.wait_round(rounds + 100)
        self.assertFalse(job.someone_ended(), job.report())
        job.launcher.send_signal(signal.SIGTERM)
        self.assertEqual(job.finish(), 130, job.report())
        job.nothing_left()

    def test_a_second_life_after_the_first_is_refused_by_name_and_the_job_ends(self):
        job = self.running_job()
        kill(job.members[WORKER, 1], signal.SIGKILL)
        self.assertRegex(self.second_life(job), r"\bworker 1\b", job.report())
        job.finish()
        for member in ((SERVER, 0), (SERVER, 1), (WORKER, 0)):
            self.assertEqual(job.code_of(member), 5, job.report())
            self.assertRegex(job.errors(member), lost_line(WORKER, 1), job.report())
        self.assertIn("rank 1 failed first: killed by SIGKILL", job.launched)
        job.nothing_left()

    def test_a_worker_that_never_comes_is_waited_for_and_then_named(self):
        job = self.job(settings=[f"timeouts.start={START_S // 2}s"],
                       command=self.split(self.worker(10), "exec sleep 1000"))
        job.find((SERVER, 0), (SERVER, 1), (WORKER, 0))
        _, ended = job.wait_ended(list(job.members), time.monotonic(), PATIENCE_S)
        self.assertEqual(len(ended), 3, job.report())
        for pid, environment in processes_with(job.mark).items():
            if environment.get("GRADWIRE_RANK") == "1" and environment.get("GRADWIRE_ROLE") == WORKER:
                kill(pid, signal.SIGTERM)
        job.finish()
        for member in ((SERVER, 0), (SERVER, 1), (WORKER, 0)):
            self.assertEqual(job.code_of(member), 3, job.report())
            self.assertRegex(job.errors(member), r"missing worker 1\b", job.report())
        self.assertRegex(job.errors((SERVER, 0)), r"waiting for\b", job.report())
        job.nothing_left()


if __name__ == "__main__":
    print(f"GRADWIRE_TEST_SEED={SEED}, {MOMENTS} moments for each fault", flush=True)
    reason = why_no_net()
    if reason:
        print(f"SKIPPED: cut links: {reason}")
        LinkTest = unittest.skip(reason)(LinkTest)
    unittest.main(verbosity=2)
