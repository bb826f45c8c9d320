#!/usr/bin/python3
"""A script for PyTorch's own DistributedDataParallel, in which Gradwire averages the gradients.

    PYTHONPATH=worker/python scripts/gradwire-launch --config configs/onebit.yaml --free-port -- \\
        /usr/bin/python3 worker/python/examples/ddp_hook.py --epochs 2

What was added to the script is marked with (1) and (2). It runs as well under torchrun, with the servers
started beside it; docs/torch.md says how.
"""

import argparse
import os

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import data
import gradwire.torch


def init_process_group():
    """gloo, which DistributedDataParallel uses for all that is no gradient.

    torchrun tells where rank 0's store is. Without it, rank 0 opens one on a free port and tells by
    Gradwire. That is for one machine; across several, set MASTER_ADDR and MASTER_PORT.
    """
    rank, size = gradwire.torch.rank(), gradwire.torch.size()
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo", rank=rank, world_size=size)
        return
    port = numpy.zeros(1, numpy.int64)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        port[0] = store.port
    gradwire.broadcast(port, root=0, name="port of the store")
    if rank != 0:
        store = dist.TCPStore("127.0.0.1", int(port[0]), size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def parse_command_line():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2, help="how often each image is seen")
    parser.add_argument("--steps", type=int, help="instead of --epochs")
    parser.add_argument("--batch", type=int, default=64, help="images a step, of each worker")
    parser.add_argument("--data", default=data.FASHION_MNIST, help="the dataset's folder")
    return parser.parse_args()


def main():
    options = parse_command_line()
    torch.set_num_threads(1)  # Several workers share this machine.
    gradwire.torch.init()  # (1) Rank and configuration come from the launcher or torchrun.
    init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),  # 28 x 28 -> 14 x 14
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),  # -> 7 x 7
        nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)))
    # (2) The only line that differs from plain DistributedDataParallel.
    model.register_comm_hook(gradwire.torch.DDPState(model), gradwire.torch.comm_hook)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    images, labels = data.fashion_mnist("train", options.data)
    steps = options.steps or options.epochs * (len(images) // (size * options.batch))
    batches = data.batches_of_images(images, labels, options.batch, steps, 1, rank, size)
    for step, (some, expected) in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(some), expected)
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 50 == 0 or step == steps):
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)

    if rank == 0:
        images, labels = data.fashion_mnist("t10k", options.data)
        model.eval()
        with torch.no_grad():
            guesses = torch.cat([model.module(some).argmax(1) for some in images.split(500)])
        right = 100 * (guesses == labels).float().mean().item()
        print(f"{right:.2f} % of the {len(labels)} test images are recognized", flush=True)
    dist.destroy_process_group()
    gradwire.torch.shutdown()


if __name__ == "__main__":
    main()
