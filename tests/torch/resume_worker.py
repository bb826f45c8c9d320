#!/usr/bin/python3
"""One worker of a job of resume_test.py: trains some steps, perhaps from what an earlier job has saved,
and saves everything.

Usage: resume_worker.py LOAD SAVE STEPS OPTIMIZER WHEN   (started by gradwire-launch)
LOAD and SAVE are folders, "-" for none; WHEN is `before` or `after`, of the optimizer's distribution,
for the load of Gradwire's state.
"""

import pathlib
import sys
import warnings

import torch
from torch import nn

import gradwire.torch as gw

BATCH = 8


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def batch(step):
    generator = torch.Generator().manual_seed(1000 * step + gw.rank())
    return (torch.randn(BATCH, 20, generator=generator),
            torch.randint(5, (BATCH,), generator=generator))


def main():
    load, save, steps, kind, when = sys.argv[1:]
    gw.init()
    model = network()
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    saved = None
    first = 0
    if load != "-":
        saved = torch.load(pathlib.Path(load) / f"{gw.rank()}.pt")
        first = saved["step"]
        if when == "before":
            gw.load_state_dict(saved["gradwire"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if kind == "adam" else "default")  # it bears onebit badly
        optimizer = gw.DistributedOptimizer(optimizer, model.named_parameters())
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if when == "after":
            gw.load_state_dict(saved["gradwire"])
    for step in range(first, first + int(steps)):
        optimizer.zero_grad()
        images, labels = batch(step)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    if save != "-":
        torch.save({"step": first + int(steps), "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(), "gradwire": gw.state_dict()},
                   pathlib.Path(save) / f"{gw.rank()}.pt")
    gw.shutdown()
    print("all done", flush=True)


if __name__ == "__main__":
    main()
