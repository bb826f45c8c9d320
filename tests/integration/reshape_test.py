#!/usr/bin/python3
"""The filter's measured interval follows a link that changes in mid-run, and nothing is lost.

Two workers and a server on shaped links; computing is sleep. The links are made slower and then faster, which
nobody tells the job. Counted in steps, never in time: a slow machine takes longer and measures the same.

Every gradient is of small integers. Whatever is pulled must be, bit for bit, the sum of all that the workers have
handed over since the element was sent last.

Usage: reshape_test.py BIN_DIR LIBRARY     (77: no shaped links can be made here)
"""

import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts" / "lib"), str(ROOT / "worker" / "python")]
sys.dont_write_bytecode = True

CANNOT = 77
WORKERS = 2
TENSORS, ELEMENTS = 16, 1 << 17  # one unit each; many times what a link lets through at once
COMPUTE_S = 0.14
# The step in which the links get a rate.
RATES = ((0, "500mbit"), (48, "200mbit"), (96, "1gbit"))
STEPS = 140
FOLLOWS_WITHIN = 40
LIMIT_S = 150
# A machine that stalls for long makes a link look unsteady.
ATTEMPTS = 2


# ---- A worker ------------------------------------------------------------------------------------

def work(rank, settings):
    import gradwire
    import numpy
    gradwire.init(settings=settings, rank=rank)
    names = [f"layer{index}" for index in range(TENSORS)]
    arrays = {name: numpy.zeros(ELEMENTS, numpy.float32) for name in names}
    gradwire.declare(arrays, average=False)
    outputs = {name: numpy.empty(ELEMENTS, numpy.float32) for name in names}
    pattern = numpy.arange(ELEMENTS, dtype=numpy.float32) % 7
    waiting = {name: numpy.zeros(ELEMENTS, numpy.float32) for name in names}  # of all workers, not yet sent
    for step in range(STEPS):
        handles = {}
        for index in reversed(range(TENSORS)):
            time.sleep(COMPUTE_S * 2 / 3 / TENSORS)
            name = names[index]
            arrays[name][:] = pattern + (rank + step + index) % 5
            for other in range(WORKERS):
                waiting[name] += pattern + (other + step + index) % 5
            handles[name] = gradwire.push_pull_async(arrays[name], average=False, name=name, out=outputs[name])
        interval = gradwire.stats()["interval"]
        gradwire.end_step()
        for name in names:
            gradwire.synchronize(handles[name])
            sent = numpy.zeros(ELEMENTS, bool)
            for first, count in handles[name].active_ranges():
                sent[first:first + count] = True
            expected = numpy.where(sent, waiting[name], 0)
            if not numpy.array_equal(outputs[name], expected):
                sys.exit(f"rank {rank}, step {step}, {name}: the output is not what was handed over since the last")
            waiting[name][sent] = 0
            time.sleep(COMPUTE_S / 3 / TENSORS)
        print(json.dumps({"step": step, "interval": interval}), flush=True)
    gradwire.shutdown()


# ---- The job -------------------------------------------------------------------------------------

def run_job(net, binary, library, folder):
    """The interval in every step, and what rank 0 has logged."""
    settings = {"endpoint": f"tcp://{net.hosts[0].address}:5701", "job.workers": WORKERS, "job.servers": 1,
                "security.insecure": "true", "compression.filter.type": "covap", "compression.filter.c0": 1,
                "compression.min_bytes": "0B", "partition.bytes": f"{4 * ELEMENTS}B", "partition.fuse_below": "0B",
                "timeouts.start": "30s", "log.format": "text"}
    words = [word for key, value in {**settings, "server.bind": net.hosts[0].address, "log.level": "warn"}.items()
             for word in ("--set", f"{key}={value}")]
    environment = {**os.environ, "LIBGRADWIRE": str(library)}
    processes = []
    intervals = []
    try:
        processes.append(subprocess.Popen(net.command(0, [binary / "gradwire-server", "--index", "0", *words])))
        for rank in range(WORKERS):
            with open(folder / f"worker{rank}.err", "w", encoding="utf-8") as log:
                processes.append(subprocess.Popen(
                    net.command(1 + rank, [sys.executable, __file__, "--worker", str(rank), json.dumps(settings)]),
                    env=environment, stderr=log, text=True,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL))
        for line in processes[1].stdout:
            told = json.loads(line)
            intervals.append(told["interval"])
            for step, rate in RATES[1:]:
                if told["step"] == step:
                    net.set_rate(rate)
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    log = (folder / "worker0.err").read_text(encoding="utf-8")
    if codes != [0] * len(codes):
        others = (folder / "worker1.err").read_text(encoding="utf-8")
        sys.exit(f"exit codes {codes}: {log[-600:]} {others[-600:]}")
    return intervals, log


def rule(ccr):
    return min(max(1, math.ceil(ccr / 0.9)), TENSORS)


def check(intervals, log):
    """Ends the test if a rule is broken. Returns what did not follow the links, as text."""
    changes = re.findall(r"another interval fits better from=(\d+) to=(\d+) ccr=([\d.]+)", log)
    print(f"changes (from, to, CCR): {changes}", flush=True)
    for _, to, ccr in changes:
        if not rule(float(ccr) - 0.005) <= int(to) <= rule(float(ccr) + 0.005):  # it is rounded
            sys.exit(f"interval {to} at a CCR of {ccr}, the rule says {rule(float(ccr))}")
    held = [interval for index, interval in enumerate(intervals) if index == 0 or interval != intervals[index - 1]]
    if held != [1, *(int(to) for _, to, _ in changes)][:len(held)]:
        sys.exit(f"the steps had the intervals {held}")
    found = []
    if intervals[RATES[1][0]] == 1:
        found.append(f"the interval is still 1 after {RATES[1][0]} steps")
    for (step, _), faster in ((RATES[1], False), (RATES[2], True)):
        before, after = intervals[step], intervals[step + FOLLOWS_WITHIN]
        print(f"step {step}: interval {before}, {FOLLOWS_WITHIN} steps later {after}", flush=True)
        # The link is 2.5 times slower, and then 5 times faster.
        if (after > 0.6 * before) if faster else (after < 1.5 * before):
            found.append(f"the links changed in step {step}, and the interval went from {before} to {after}")
    return found


def main():
    from shaped_net import CannotHere, ShapedNet
    binary, library = (pathlib.Path(word).resolve() for word in sys.argv[1:3])
    try:
        import numpy  # noqa: F401
    except ImportError:
        print("skipped: there is no NumPy (Debian: apt-get install python3-numpy)")
        return CANNOT
    found = []
    for _ in range(ATTEMPTS):
        try:
            net = ShapedNet(hosts=1 + WORKERS, rate=RATES[0][1])
        except CannotHere as reason:
            print(f"skipped: {reason}")
            return CANNOT
        with net, tempfile.TemporaryDirectory() as folder:
            found = check(*run_job(net, binary, library, pathlib.Path(folder)))
        if not found:
            return 0
        print("; ".join(found), flush=True)
    return 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        sys.exit(main())
