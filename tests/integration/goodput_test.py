#!/usr/bin/python3
"""The goodput that a client measures is about the rate of its link.

A machine with other work to do makes a transfer slower, never faster: above the rate fails at once, below it
only if it is so every time.

Usage: goodput_test.py BIN_DIR     (77: no shaped links can be made here)
"""

import json
import pathlib
import subprocess
import sys

BIN = pathlib.Path(sys.argv[1])
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "lib"))
sys.dont_write_bytecode = True
from shaped_net import CannotHere, ShapedNet, parse_rate  # noqa: E402

LIMIT_S = 120
ATTEMPTS = 4
# Frames take a twentieth; the bucket of a link lets 128 KiB pass at once.
LEAST, MOST = 0.5, 1.3


def measure(net, compressor, threads):
    """Bytes a second, as a worker on host 1 sees the way to a server on host 0."""
    common = [f"endpoint=tcp://{net.hosts[0].address}:5701", "job.workers=1", "job.servers=1",
              f"server.bind={net.hosts[0].address}", "security.insecure=true",
              f"compression.uplink.compressor={compressor}",
              f"compression.downlink.compressor={compressor}",
              "compression.min_bytes=0B", "partition.bytes=256KiB", "timeouts.start=30s"]
    settings = [part for setting in common for part in ("--set", setting)]
    server = subprocess.Popen(net.command(0, [BIN / "gradwire-server", "--index", "0", *settings]))
    try:
        worker = subprocess.run(
            net.command(1, [BIN / "push_pull_worker", "--rank", "0", *settings,
                            "--set", f"worker.threads={threads}", "--tensors", "4",
                            "--elements", "512000", "--rounds", "5", "--warm-up", "1"]),
            stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
        server.wait(LIMIT_S)
    finally:
        server.kill()
        server.wait()
    return json.loads(worker.stdout.splitlines()[-1])["goodput"]


def main():
    failed = False
    for rate in ("100mbit", "300mbit"):
        try:
            net = ShapedNet(hosts=2, rate=rate)
        except CannotHere as reason:
            print(f"skipped: {reason}")
            return 77
        with net:
            for compressor, threads in (("none", 0), ("none", 1), ("fp16", 0), ("fp16", 1)):
                best = 0
                for _ in range(ATTEMPTS):
                    ratio = measure(net, compressor, threads) / (parse_rate(rate) / 8)
                    print(f"{rate}, {compressor}, {threads} threads: {ratio:.2f} of the rate", flush=True)
                    best = max(best, ratio)
                    if best >= LEAST:
                        break
                failed |= not LEAST <= best <= MOST
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
