#!/usr/bin/python3
"""Trains a small convolutional network on Fashion-MNIST, on several workers.

    PYTHONPATH=worker/python scripts/gradwire-launch --config configs/sgd.yaml --free-port -- \\
        /usr/bin/python3 worker/python/examples/fashion_mnist.py --epochs 2

Each worker computes the gradients of its own images; Gradwire averages them, compressed as the
configuration says; all workers then make the same step. The lines that do it are marked with (1) to (4).
"""

import argparse
import time

import torch
from torch import nn

import data
import gradwire.torch as gw


class Net(nn.Module):
    """Two layers that look at 3 x 3 pixels at a time, then two that look at all. 409,034 numbers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 7 * 7, 256)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, images):
        x = nn.functional.max_pool2d(self.conv1(images).relu(), 2)  # 28 x 28 -> 14 x 14
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)  # -> 7 x 7
        return self.fc2(self.fc1(x.flatten(1)).relu())


def accuracy(model, images, labels):
    """The share of images whose most probable class is the right one, in percent."""
    model.eval()
    right = 0
    with torch.no_grad():
        for at in range(0, len(images), 100):
            guess = model(images[at:at + 100]).argmax(1)
            right += int((guess == labels[at:at + 100]).sum())
    model.train()
    return 100 * right / len(images)


def parse_command_line():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2, help="how often each image is seen")
    parser.add_argument("--steps", type=int, help="instead of --epochs")
    parser.add_argument("--batch", type=int, default=64, help="images a step, of each worker")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, help="the first learning rate; it falls to 0 at the end")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--data", default=data.FASHION_MNIST, help="the dataset's folder")
    return parser.parse_args()


def main():
    options = parse_command_line()
    torch.set_num_threads(1)  # Several workers share this machine.

    gw.init()  # (1) Rank and configuration come from the launcher.

    torch.manual_seed(options.seed)
    model = Net()
    if options.optimizer == "sgd":
        # Momentum 0.9 would add up what compression sends late; see docs/torch.md.
        optimizer = torch.optim.SGD(model.parameters(), lr=options.lr or 0.1, momentum=0.5)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr or 0.001)

    # (2) From now on step() uses the average of all workers' gradients.
    optimizer = gw.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # (3) All begin with what rank 0 has.
    gw.broadcast_parameters(model.state_dict(), root_rank=0)

    images, labels = data.fashion_mnist("train", options.data)
    per_epoch = len(images) // gw.size() // options.batch
    steps = options.epochs * per_epoch if options.steps is None else options.steps
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))

    start = time.monotonic()
    batches = data.batches_of_images(images, labels, options.batch, steps, options.seed, gw.rank(),
                                     gw.size())
    for step, (x, y) in enumerate(batches, 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # Gradients leave for the servers while it still runs.
        optimizer.step()  # Waits for their averages.
        scheduler.step()
        if gw.rank() == 0 and (step % 50 == 0 or step == steps):
            print(f"step {step} of {steps}: loss {loss.item():.3f}, "
                  f"{1000 * (time.monotonic() - start) / step:.0f} ms a step", flush=True)

    if gw.rank() == 0:
        print(f"test accuracy {accuracy(model, *data.fashion_mnist('t10k', options.data)):.2f} %",
              flush=True)
    gw.shutdown()  # (4)


if __name__ == "__main__":
    main()
