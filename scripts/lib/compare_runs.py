#!/usr/bin/python3
"""Trains the same network with and without compression and prints a comparison.

Same seed, steps and learning rate for all runs; the rate falls to 0 at the end, so that the runs are
compared at rest. Each run is one job of 1 server and 2 workers, started by gradwire-launch.
"""

import argparse
import ctypes
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNS = [  # name, configuration
    ("plain", "plain.yaml"),
    ("onebit", "onebit.yaml"),
    ("topk 1 %", "topk.yaml"),
]
WORKERS = 2
# Compression from the first step on, so that the ratios are those of the compressors; the learning
# rate has a warm-up of its own.
ADJUSTMENTS = ("--set", "compression.warmup_steps=0")
PR_SET_PDEATHSIG = 1
# Almost two epochs with two workers and a batch of 64.
DEFAULT_STEPS = 900
# Momentum 0.5 with this rate moves as far as 0.9 with a fifth of it, and compression bears it better: what
# onebit keeps back comes late, and a long memory adds it to what has come since (docs/results/accuracy.md).
DEFAULT_RATE = 0.05
DEFAULT_MOMENTUM = 0.5


def parse_command_line():
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__)
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64, help="of each worker")
    parser.add_argument("--lr", type=float, default=DEFAULT_RATE, help="the peak")
    parser.add_argument("--momentum", type=float, default=DEFAULT_MOMENTUM)
    parser.add_argument("--model", choices=("mlp", "conv"), default="mlp")
    parser.add_argument("--json", metavar="FILE", help="also write all results to this file")
    options = parser.parse_args()
    for name in ("steps", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, expected at least 1")
    return options


class Interrupted(Exception):
    """Ctrl-C or a request to end, between two jobs or during one."""


class Runner:
    """Runs jobs one after the other and passes on the signals that should end them."""

    def __init__(self, options, scratch):
        self.options = options
        self.scratch = scratch
        self.launcher = None
        self.interrupted = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number, _frame):
        self.interrupted = True
        if self.launcher is not None:
            self.launcher.send_signal(number)

    def run(self, name, config):
        """The trainer's result, or (code, None) if the job failed."""
        options = self.options
        result = self.scratch / f"{config}.json"
        command = [
            str(ROOT / "scripts" / "gradwire-launch"), "--config", str(ROOT / "configs" / config),
            "--bin-dir", str(ROOT / "build" / "release" / "bin"), "--servers", "1", "--workers",
            str(WORKERS), "--free-port", *ADJUSTMENTS, "--log-dir", str(self.scratch / config), "--",
            "gradwire-train", "--model", options.model, "--steps", str(options.steps), "--batch",
            str(options.batch), "--lr", str(options.lr), "--momentum", str(options.momentum), "--seed",
            str(options.seed), "--json", str(result)]
        print(f"\n== {name}: configs/{config}, {options.model}, 1 server, {WORKERS} workers",
              flush=True)
        # A setting in the caller's environment would go before the files that are compared here.
        environment = {key: value for key, value in os.environ.items()
                       if not key.startswith("GRADWIRE_")}
        self.launcher = subprocess.Popen(command, env=environment, preexec_fn=set_apart)
        code = self.launcher.wait()
        self.launcher = None
        if self.interrupted:
            raise Interrupted
        if code != 0:
            return code, None
        return 0, json.loads(result.read_text(encoding="utf-8"))


def set_apart():
    """In the launcher, before it starts: in a process group of its own, so that Ctrl-C reaches it once,
    through us; and the kernel ends it (and so its job) if we are killed."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def megabytes(count):
    return f"{count / 1e6:.2f}"


def ratio(raw, wire):
    return f"{raw / wire:.1f}" if wire else "-"


def table(rows):
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width)
                                             for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def compare(results):
    plain = results[0][1]["accuracy"]
    rows = [["run", "test accuracy", "to plain", "push raw MB", "wire MB", "ratio", "pull raw MB",
             "wire MB", "ratio", "broadcast MB", "seconds", "steps", "seed"]]
    for name, result in results:
        push = result["gradient_raw_push_bytes"], result["gradient_sent_bytes"]
        pull = result["gradient_raw_pull_bytes"], result["gradient_received_bytes"]
        accuracy = result["accuracy"]
        rows.append([
            name, f"{100 * accuracy:.2f} %", f"{100 * (accuracy - plain):+.2f} pp",
            megabytes(push[0]), megabytes(push[1]), ratio(*push),
            megabytes(pull[0]), megabytes(pull[1]), ratio(*pull),
            # Rank 0 sends the first parameters, the others receive them.
            megabytes(max(result["broadcast_sent_bytes"], result["broadcast_received_bytes"])),
            f"{result['seconds']:.1f}", str(result["steps"]), str(result["seed"])])
    return table(rows)


def main():
    options = parse_command_line()
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="quickstart-", dir=ROOT / "build"))
    runner = Runner(options, scratch)
    results = []
    try:
        for name, config in RUNS:
            code, result = runner.run(name, config)
            if code != 0:
                print(f"\nquickstart: the run '{name}' failed with exit code {code}; logs are kept in "
                      f"{scratch}", file=sys.stderr)
                return code
            results.append((name, result))
    except Interrupted:
        shutil.rmtree(scratch)
        print("quickstart: interrupted", file=sys.stderr)
        return 130
    shutil.rmtree(scratch)
    if options.json:
        pathlib.Path(options.json).write_text(
            json.dumps(dict(results), indent=2) + "\n", encoding="utf-8")
    print(f"\nFashion-MNIST, {options.model}, 1 server and {WORKERS} workers on this machine, batch "
          f"{options.batch} each. Bytes are those\nof rank 0, gradient rounds only; wire bytes include "
          "headers and framing. MB = 1e6 bytes.\n")
    print(compare(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
