#!/usr/bin/python3
"""How long the trainer's thread is busy with Gradwire's own work, as a share of a step.

    gradwire-launch --workers 2 --servers 1 -- /usr/bin/python3 tests/torch/bench_overhead.py

Own work is what DistributedOptimizer does in hooks and in step(), without the optimizer's own step
and without waiting for averages. Prints medians of the steps' shares, of wall time and of this
thread's CPU time. Nothing is gated: it is a number for docs/results.
"""

import argparse
import statistics
import time

import torch
from torch import nn

import gradwire.torch as gw
from gradwire._client import require
from gradwire.torch._gradients import GradientExchange


class Clock:
    """Wall and CPU seconds inside some functions, those inside others not counted."""

    def __init__(self):
        self.total = [0.0, 0.0]
        self._entered = 0
        self._since = (0.0, 0.0)

    @staticmethod
    def now():
        return time.perf_counter(), time.thread_time()

    def _switch(self, counts):
        now = self.now()
        if not counts:
            for i in range(2):
                self.total[i] += now[i] - self._since[i]
        self._since = now

    def inside(self, function):
        """Time in `function` counts."""
        def call(*arguments, **named):
            if self._entered == 0:
                self._switch(True)
            self._entered += 1
            try:
                return function(*arguments, **named)
            finally:
                self._entered -= 1
                if self._entered == 0:
                    self._switch(False)
        return call

    def outside(self, function):
        """Time in `function` does not count, when it is called from one whose time does."""
        def call(*arguments, **named):
            if self._entered == 0:
                return function(*arguments, **named)
            self._switch(False)
            try:
                return function(*arguments, **named)
            finally:
                self._switch(True)
        return call


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(),
                         nn.Linear(128, 10))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gw.init()
    clock = Clock()
    client = require()
    client.native.gradwire_wait = clock.outside(client.native.gradwire_wait)
    GradientExchange._on_gradient = clock.inside(GradientExchange._on_gradient)
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = gw.DistributedOptimizer(inner, model.named_parameters())
    optimizer._inner_step = clock.outside(optimizer._inner_step)
    step_of = clock.inside(optimizer.step)
    images, labels = torch.randn(options.batch, 1, 28, 28), torch.randint(10, (options.batch,))
    shares, lengths, own = [], [], []
    for step in range(options.steps + 10):
        before, start = list(clock.total), clock.now()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        step_of()
        end = clock.now()
        if step >= 10:  # the first ones set everything up
            lengths.append([end[i] - start[i] for i in range(2)])
            own.append([clock.total[i] - before[i] for i in range(2)])
            shares.append([own[-1][i] / lengths[-1][i] for i in range(2)])
    for i, kind in enumerate(("wall", "CPU")):
        print(f"rank {gw.rank()}: {kind} time of a step "
              f"{1e3 * statistics.median(row[i] for row in lengths):.2f} ms, Gradwire's own work "
              f"{1e6 * statistics.median(row[i] for row in own):.0f} us, "
              f"{100 * statistics.median(row[i] for row in shares):.2f} % of the step", flush=True)
    gw.shutdown()


if __name__ == "__main__":
    main()
