#!/usr/bin/python3
"""Runs libFuzzer on every target of the fuzz programs for a number of seconds.

Stops at the first finding and names the file that reproduces it. Wants the build of scripts/fuzz.
"""

import argparse
import concurrent.futures
import datetime
import fnmatch
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "fuzz"
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
RESULTS = ROOT / "docs" / "results" / "fuzz.md"
PROGRAMS = ("decoder", "frame", "config")
# The largest inputs there are: two arrays of 5000 floats for the decoders, and some text.
MAX_BYTES = {"decoder": 40200, "frame": 4096, "config": 8192}
# An input that takes longer, or more memory, is a finding.
INPUT_SECONDS = 20
INPUT_MIB = 2048
GRACE_S = 120
# What is kept in the tree of a target's corpus: the smallest inputs up to so many bytes.
KEPT_BYTES = 10000
KEPT_FILE_BYTES = 1000
# From here on the page is written by hand, and stays.
FINDINGS = "## Findings"
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


def parse_command_line():
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=300,
                        help="of each target; default 300; 0 runs nothing, for --save and --write")
    parser.add_argument("--jobs", type=int, default=1, help="targets at once; default 1")
    parser.add_argument("--only", default="*", metavar="PATTERNS",
                        help="targets, such as 'decoder/topk,frame/*'; default all")
    parser.add_argument("--save", action="store_true",
                        help="put the smallest inputs that reach new code into tests/fuzz/corpus")
    parser.add_argument("--write", action="store_true",
                        help="write docs/results/fuzz.md, of every target's last run")
    options = parser.parse_args()
    for name, least in (("seconds", 0), ("jobs", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}, expected at least {least}")
    return options


class Finding(Exception):
    """A target has ended with an error."""


class Target:
    """One target of one program, with its folders under build/fuzz/fuzz."""

    def __init__(self, program, name):
        self.program = program
        self.name = name
        self.id = f"{program}/{name}"
        self.binary = BUILD / "bin" / f"{program}_fuzz"
        self.folder = BUILD / "fuzz" / program / name
        self.kept = CORPUS / program / name
        self.log = self.folder / "log"
        self.environment = {**os.environ, **ENVIRONMENT, "GRADWIRE_FUZZ_TARGET": name}

    def prepare(self):
        """Seeds and what is kept, into a fresh corpus."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for part in ("corpus", "minimal", "findings"):
            (self.folder / part).mkdir(parents=True)
        subprocess.run([BUILD / "bin" / f"{self.program}_replay", "--seeds", self.name,
                        self.folder / "corpus"], check=True, timeout=120)
        if self.kept.is_dir():
            for path in self.kept.iterdir():
                shutil.copy(path, self.folder / "corpus" / path.name)

    def numbers(self):
        """What the last run says; exits if there was none, or it has not ended well."""
        output = self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else ""
        if not re.search(r"^Done \d+ runs in \d+ second", output, re.MULTILINE):
            sys.exit(f"{self.id} has no finished run in {self.folder}")
        return {
            "seconds": last(r"^Done \d+ runs in (\d+) second", output),
            "executions": last(r"stat::number_of_executed_units:\s*(\d+)", output),
            "rate": last(r"stat::average_exec_per_sec:\s*(\d+)", output),
            "edges": last(r"\bcov: (\d+)", output),
            "corpus": len(list((self.folder / "minimal").iterdir())),
        }

    def arguments(self, *more):
        return [self.binary, f"-max_len={MAX_BYTES[self.program]}", f"-timeout={INPUT_SECONDS}",
                f"-rss_limit_mb={INPUT_MIB}", f"-artifact_prefix={self.folder}/findings/",
                "-print_final_stats=1", "-verbosity=1", *more]


class Fuzzer:
    """Runs targets, several at once; the first finding ends all."""

    def __init__(self, options):
        self.options = options
        self.lock = threading.Lock()
        self.running = set()
        self.stopped = False

    def call(self, target, arguments, seconds, log):
        """Returns the output; raises Finding if the program fails."""
        with open(log, "w", encoding="utf-8") as file:
            with self.lock:
                if self.stopped:
                    raise concurrent.futures.CancelledError
                process = subprocess.Popen([str(a) for a in arguments], env=target.environment,
                                           stdout=file, stderr=file, cwd=target.folder)
                self.running.add(process)
            try:
                code = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                code = "no end"
            finally:
                process.kill()
                process.wait()
                with self.lock:
                    self.running.discard(process)
        if self.stopped:
            raise concurrent.futures.CancelledError
        output = log.read_text(encoding="utf-8", errors="replace")
        if code != 0:
            raise Finding(describe(target, code, output, log))
        return output

    def stop(self):
        with self.lock:
            self.stopped = True
            for process in self.running:
                process.kill()

    def run(self, target):
        target.prepare()
        self.call(target, target.arguments(f"-max_total_time={self.options.seconds}",
                                           target.folder / "corpus"),
                  self.options.seconds + GRACE_S, target.log)
        self.call(target, target.arguments("-merge=1", target.folder / "minimal",
                                           target.folder / "corpus"),
                  GRACE_S * 5, target.folder / "merge_log")
        numbers = target.numbers()
        print(f"{target.id}: {numbers['executions']} executions, {numbers['edges']} edges, no finding",
              file=sys.stderr, flush=True)


def last(pattern, output):
    found = re.findall(pattern, output, re.MULTILINE)
    return int(found[-1]) if found else 0


def describe(target, code, output, log):
    """What broke, the file and how to run it again."""
    what = re.findall(r"^(?:broken rule: .*|.*runtime error: .*|==\d+==\s?ERROR: .*)$", output,
                      re.MULTILINE)
    lines = [f"{target.id} has ended with {code}: {what[0] if what else 'see the log'}",
             f"  log: {log}"]
    for path in sorted((target.folder / "findings").iterdir()):
        lines.append(f"  file: {path}")
        lines.append(f"  again: GRADWIRE_FUZZ_TARGET={target.name} {target.binary} {path}")
        lines.append(f"  once fixed: mkdir -p {target.kept} && cp {path} {target.kept}/")
    return "\n".join(lines)


def list_targets(patterns):
    targets = []
    for program in PROGRAMS:
        output = subprocess.run([BUILD / "bin" / f"{program}_replay", "--targets"], check=True,
                                capture_output=True, text=True, timeout=60).stdout
        targets += [Target(program, name) for name in output.split()]
    chosen = [t for t in targets if any(fnmatch.fnmatch(t.id, p) for p in patterns.split(","))]
    if not chosen:
        sys.exit(f"no target is like '{patterns}'; there are " + ", ".join(t.id for t in targets))
    return chosen


def save(target):
    """Puts the smallest inputs of the minimal corpus into the tree, beside findings of before."""
    paths = sorted((target.folder / "minimal").iterdir(), key=lambda p: (p.stat().st_size, p.name))
    kept = 0
    target.kept.mkdir(parents=True, exist_ok=True)
    there = {path.read_bytes() for path in target.kept.iterdir()}
    kept = sum(len(data) for data in there)
    for path in paths:
        data = path.read_bytes()
        if data in there or not data:
            continue
        kept += len(data)
        if kept > KEPT_BYTES or len(data) > KEPT_FILE_BYTES:
            break
        (target.kept / path.name[:16]).write_bytes(data)


def machine():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")),
                     "unknown")
    return f"{os.cpu_count()} cores of {model}"


def table(targets):
    lines = ["| target | seconds | executions | executions/s | coverage edges | corpus | findings |",
             "|---|---|---|---|---|---|---|"]
    all_numbers = [target.numbers() for target in targets]
    for target, numbers in zip(targets, all_numbers):
        lines.append(f"| {target.id} | {numbers['seconds']} | {numbers['executions']} | "
                     f"{numbers['rate']} | {numbers['edges']} | {numbers['corpus']} | 0 |")
    total = {key: sum(numbers[key] for numbers in all_numbers)
             for key in ("seconds", "executions", "corpus")}
    lines.append(f"| all {len(targets)} | {total['seconds']} | {total['executions']} | | | "
                 f"{total['corpus']} | 0 |")
    return "\n".join(lines)


def report(targets):
    compiler = subprocess.run(["clang++", "--version"], capture_output=True, text=True, check=True,
                              timeout=60).stdout.splitlines()[0]
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.is_file() else ""
    findings = text[text.index(FINDINGS):] if FINDINGS in text else FINDINGS + "\n\nNone yet.\n"
    return f"""# Fuzzing

What libFuzzer found in the code that reads bytes from the network or from files: every compressor's
decoders (and its encoders on arbitrary floats, with feedback), the header and the control messages, a
configuration's text and saved residuals. The rules that an input may break are in `tests/fuzz`.

```
scripts/fuzz --seconds {max(target.numbers()['seconds'] for target in targets) // 10 * 10} --save --write
```

Machine: {machine()}, shared; {compiler}, `-O2`, address and undefined-behaviour sanitizers.
{datetime.date.today().isoformat()}.

{table(targets)}

Each row is the target's last run; runs share the cores, at the lowest priority, so the rates say little. Edges are
what libFuzzer counts in our own instrumented code, registry, config and plan included. The corpus is what
`-merge=1` leaves of it; a small part is in `tests/fuzz/corpus` and is run by the ordinary test suite.

{findings}"""


def run_all(targets, options):
    """Returns the first finding, or None."""
    print(f"{len(targets)} targets, {options.seconds} s each, {options.jobs} at once", file=sys.stderr,
          flush=True)
    fuzzer = Fuzzer(options)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        tasks = [pool.submit(fuzzer.run, target) for target in targets]
        try:
            for task in concurrent.futures.as_completed(tasks):
                task.result()
        except Finding as finding:
            return finding
        finally:
            fuzzer.stop()
            pool.shutdown(cancel_futures=True)
    return None


def main():
    options = parse_command_line()
    targets = list_targets(options.only)
    if options.seconds > 0:
        finding = run_all(targets, options)
        if finding:
            print(f"FINDING in {finding}")
            return 1
    if options.save:
        for target in targets:
            save(target)
    print(table(targets))
    if options.write:
        RESULTS.write_text(report(list_targets("*")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
