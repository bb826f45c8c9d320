"""One rank of `gradwire bench net --peer gloo`: PyTorch's all-reduce over the same emulated compute.

Buckets as DistributedDataParallel makes them: in the order of the backward pass, the first of 1 MiB and
the others of 25 MiB; a bucket is reduced as soon as its last gradient is there, and the forward pass
waits for the bucket that it needs. Prints what `gradwire bench net-worker` prints, as far as it has it.
"""

import argparse
import datetime
import json
import math
import os
import resource
import time

import torch
import torch.distributed as dist

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
SHORTEST_SLEEP_S = 0.0005
TIMEOUT_S = 120


def read_model(path):
    """Elements of each tensor, in the order of the forward pass."""
    with open(path, encoding="utf-8") as file:
        lines = [line.split("#")[0].split() for line in file]
    return [math.prod(int(extent) for extent in words[1:]) for words in lines if words]


def make_buckets(elements):
    """The bucket of each tensor, and the elements of each bucket."""
    bucket_of, sizes, limit = [0] * len(elements), [0], FIRST_BUCKET_BYTES
    for tensor in reversed(range(len(elements))):
        if sizes[-1] and 4 * (sizes[-1] + elements[tensor]) > limit:
            sizes.append(0)
            limit = BUCKET_BYTES
        sizes[-1] += elements[tensor]
        bucket_of[tensor] = len(sizes) - 1
    return bucket_of, sizes


class Compute:
    def __init__(self, kind):
        self.kind = kind
        self.due = 0.0
        self.spent = 0.0

    def work(self, seconds, is_last=False):
        self.due += seconds
        if self.due < (0 if is_last else SHORTEST_SLEEP_S):
            return
        begin = time.monotonic()
        if self.kind == "sleep":
            time.sleep(self.due)
            self.due -= time.monotonic() - begin
        else:
            cpu = time.thread_time()
            while time.thread_time() - cpu < self.due:
                pass
            self.due = 0.0
        self.spent += time.monotonic() - begin


class Rank:
    def __init__(self, options):
        self.elements = read_model(options.model)
        self.bucket_of, sizes = make_buckets(self.elements)
        self.buckets = [torch.randn(size) for size in sizes]
        self.missing = [self.bucket_of.count(bucket) for bucket in range(len(sizes))]
        self.works = [None] * len(sizes)
        self.compute = Compute(options.compute)
        self.blocked = self.handing_over = 0.0
        total = options.compute_ms / 1e3 / sum(self.elements)
        self.forward_s = total * (1 - options.backward_share)  # an element
        self.backward_s = total * options.backward_share

    def need(self, bucket):
        if self.works[bucket] is None:
            return
        begin = time.monotonic()
        self.works[bucket].wait()
        self.blocked += time.monotonic() - begin
        self.works[bucket] = None
        self.buckets[bucket].div_(dist.get_world_size())

    def step(self):
        for tensor, number in enumerate(self.elements):
            self.need(self.bucket_of[tensor])
            self.compute.work(self.forward_s * number)
        missing = list(self.missing)
        for tensor in reversed(range(len(self.elements))):
            self.compute.work(self.backward_s * self.elements[tensor], is_last=tensor == 0)
            bucket = self.bucket_of[tensor]
            missing[bucket] -= 1
            if missing[bucket] == 0:
                begin = time.monotonic()
                self.works[bucket] = dist.all_reduce(self.buckets[bucket], async_op=True)
                self.handing_over += time.monotonic() - begin


def traffic(interface):
    """(sent, received) bytes of frames; (None, None) on loopback, which all ranks share."""
    if interface == "lo":
        return None, None
    with open("/proc/net/dev", encoding="ascii") as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                fields = numbers.split()
                return int(fields[8]), int(fields[0])
    raise SystemExit(f"there is no interface {interface}")


def cpu_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--address")
    parser.add_argument("--interface")
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warm-up", type=int)
    parser.add_argument("--compute-ms", type=float)
    parser.add_argument("--backward-share", type=float)
    parser.add_argument("--compute")
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = options.interface
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{options.address}", rank=options.rank,
                            world_size=options.workers, timeout=datetime.timedelta(seconds=TIMEOUT_S))
    rank = Rank(options)
    for _ in range(options.warm_up):
        rank.step()
    cpu = cpu_s()
    steps = []
    for _ in range(options.steps):
        begin = (time.monotonic(), rank.compute.spent, rank.blocked, rank.handing_over)
        sent, received = traffic(options.interface)
        rank.step()
        end = (time.monotonic(), rank.compute.spent, rank.blocked, rank.handing_over)
        now_sent, now_received = traffic(options.interface)
        step = {name: 1e3 * (b - a) for name, a, b in
                zip(("step_ms", "compute_ms", "exposed_ms", "hand_over_ms"), begin, end)}
        step["sent_bytes"] = None if sent is None else now_sent - sent
        step["received_bytes"] = None if received is None else now_received - received
        steps.append(step)
    report = {"rank": options.rank, "compute": options.compute, "cpu_ms": 1e3 * (cpu_s() - cpu) / options.steps,
              "units": len(rank.buckets), "gradient_bytes": 4 * sum(rank.elements)}
    for bucket in range(len(rank.buckets)):
        rank.need(bucket)
    dist.barrier()
    for line in (*steps, report):
        print(json.dumps(line))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
