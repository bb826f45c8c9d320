#!/usr/bin/python3
"""Trains a small transformer to guess the next character of licence texts, on several workers.

    PYTHONPATH=worker/python scripts/gradwire-launch --config configs/adam.yaml --free-port -- \\
        /usr/bin/python3 worker/python/examples/language_model.py --steps 300

With --method clan (or another name in docs/methods.md) its parameters follow that method instead of Adam:

    ... scripts/gradwire-launch --config configs/onebit.yaml --free-port -- ... --method clan

At the end it writes some text of its own. After 300 steps that looks like English from afar; give it some
thousands for words.
"""

import argparse
import time

import torch
from torch import nn

import data
import gradwire.torch as gw

CONTEXT = 64  # characters that the model sees
WIDTH = 96  # numbers that describe a character at its place
HEADS = 4
LAYERS = 3


class Block(nn.Module):
    """Each character looks at those before it (attention), then each is worked on by itself."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, hidden):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=hidden, need_weights=False)[0]
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class LanguageModel(nn.Module):
    """From the numbers of characters [batch, length] to a score for each possible next one."""

    def __init__(self, alphabet_size):
        super().__init__()
        self.character = nn.Embedding(alphabet_size, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, alphabet_size)

    def forward(self, numbers):
        length = numbers.shape[1]
        x = self.character(numbers) + self.place(torch.arange(length))
        # True: this character may not look at that one, because it comes later.
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, hidden)
        return self.head(self.norm(x))


def parse_command_line():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="pieces of text a step, of each worker")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.002, help="the first; it falls to 0 at the end")
    parser.add_argument("--method", help="an adaptive method such as clan, instead of Adam")
    parser.add_argument("--data", default=data.LICENSES, help="a folder of texts")
    return parser.parse_args()


def write(model, alphabet, start, length):
    """`length` more characters after `start`, each drawn with the probability that the model gives."""
    number_of = {character: number for number, character in enumerate(alphabet)}
    numbers = [number_of[character] for character in start]
    model.eval()
    with torch.no_grad():
        for _ in range(length):
            scores = model(torch.tensor([numbers[-CONTEXT:]]))[0, -1]
            numbers.append(int(torch.multinomial(scores.softmax(0), 1)))
    model.train()
    return "".join(alphabet[number] for number in numbers)


def make_optimizer(model, options):
    """Adam, or a method that knows how its gradients travel. Biases and norms are not decayed."""
    if options.method is None:
        return torch.optim.Adam(model.parameters(), lr=options.lr)
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() > 1]},
              {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0}]
    return gw.MethodOptimizer(groups, lr=options.lr, method=options.method)


def main():
    options = parse_command_line()
    torch.set_num_threads(1)  # Several workers share this machine.
    gw.init()

    text, alphabet = data.characters(options.data)
    torch.manual_seed(options.seed)
    model = LanguageModel(len(alphabet))
    optimizer = gw.DistributedOptimizer(make_optimizer(model, options),
                                        named_parameters=model.named_parameters())
    gw.broadcast_parameters(model.state_dict(), root_rank=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, options.steps))

    if gw.rank() == 0:
        print(f"{len(text)} characters, {sum(p.numel() for p in model.parameters())} parameters")
    # Each worker reads at other places.
    places = torch.Generator().manual_seed(1000 * options.seed + gw.rank())
    start = time.monotonic()
    for step in range(1, options.steps + 1):
        first = torch.randint(len(text) - CONTEXT, (options.batch, 1), generator=places)
        pieces = text[first + torch.arange(CONTEXT + 1)]
        optimizer.zero_grad()
        scores = model(pieces[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        if gw.rank() == 0 and (step % 50 == 0 or step in (1, options.steps)):
            # A loss of x: on average the model is as unsure as between exp(x) equal characters.
            print(f"step {step} of {options.steps}: loss {loss.item():.3f}, "
                  f"{1000 * (time.monotonic() - start) / step:.0f} ms a step", flush=True)

    if gw.rank() == 0:
        print(write(model, alphabet, "You may ", 200), flush=True)
    gw.shutdown()


if __name__ == "__main__":
    main()
