"""Training jobs on this machine, for comparisons."""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKERS = 2
LIMIT_S = 3600
# Of a result: what a worker would have sent and got uncompressed, and what it did.
BYTES = ("gradient_raw_push_bytes", "gradient_sent_bytes", "gradient_raw_pull_bytes", "gradient_received_bytes")


def train(bin_dir, settings, arguments, program=("gradwire-train",)):
    """What gradwire-train, or another program with the same options, writes of a job of 1 server and 2
    workers; None if it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        result = pathlib.Path(scratch) / "result.json"
        command = [ROOT / "scripts" / "gradwire-launch", "--config", ROOT / "configs" / "plain.yaml",
                   "--bin-dir", bin_dir, "--servers", "1", "--workers", str(WORKERS), "--free-port",
                   *(part for setting in settings for part in ("--set", setting)),
                   "--log-dir", pathlib.Path(scratch) / "logs", "--", *map(str, program), *map(str, arguments),
                   "--json", result]
        environment = {**os.environ, "OMP_NUM_THREADS": "1",
                       "LIBGRADWIRE": str(bin_dir.resolve().parent / "lib" / "libgradwire.so")}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False,
                              env=environment)
        if done.returncode != 0:
            sys.stderr.write(done.stdout.decode(errors="replace"))
            print(f"a job with {' '.join(settings)}: exit code {done.returncode}", file=sys.stderr)
            return None
        return json.loads(result.read_text(encoding="utf-8"))


def measure(kept, chosen, names, job, keys, shown):
    """{"options": chosen, "runs": {name: [result of each seed]}}, or None if a job failed.

    job(name, seed) runs one. Kept after each run in the file `kept`: with the same options it goes on
    where it was stopped. Of a result only `keys` are kept; shown(result) is printed.
    """
    measured = {"options": chosen, "runs": {name: [] for name in names}}
    if kept.exists():
        before = json.loads(kept.read_text(encoding="utf-8"))
        complete = all(len(results) == len(chosen["seeds"]) for results in before["runs"].values())
        if not complete and before["options"] == chosen and set(before["runs"]) == set(names):
            measured = before
    # Seed by seed, so that a change of the machine's load meets all alike.
    for number, seed in enumerate(chosen["seeds"]):
        for name in names:
            if len(measured["runs"][name]) > number:
                continue
            result = job(name, seed)
            if result is None:
                return None
            measured["runs"][name].append({key: result[key] for key in keys})
            kept.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
            print(f"seed {seed}  {name:40} {shown(result)}  {result['seconds']:.0f} s", flush=True)
    return measured


def ratios(results):
    """Raw bytes over bytes on the wire, of pushes and of pulls."""
    sums = {key: sum(result[key] for result in results) for key in BYTES}
    return (sums["gradient_raw_push_bytes"] / sums["gradient_sent_bytes"],
            sums["gradient_raw_pull_bytes"] / sums["gradient_received_bytes"])


def mean(results, key, factor=1):
    return statistics.mean(factor * result[key] for result in results)


def pyplot():
    """matplotlib's pyplot, which writes the same file for the same numbers; None where it isn't installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gradwire"
    from matplotlib import pyplot as plots
    return plots
