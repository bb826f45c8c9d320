#!/usr/bin/python3
"""A worker of scripts/bench-methods --model transformer: trains the small transformer of
worker/python/examples/language_model.py with the job's method. Rank 0 writes what gradwire-train writes of a
run, as far as it is compared there.
"""

import argparse
import json
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "worker" / "python"), str(ROOT / "worker" / "python" / "examples")]

import torch  # noqa: E402
from torch import nn  # noqa: E402

import data  # noqa: E402
import gradwire.torch as gw  # noqa: E402
import language_model  # noqa: E402

WIDTH, LAYERS = 64, 2
WARM_UP = 100  # steps in which the learning rate rises
LAST = 100  # steps whose mean loss is the training's
HELD_OUT = 10  # one of so many: the end of each text, for the test


def texts(folder):
    """What to train on and what to test on [n], in int64; how many characters there are."""
    numbers, alphabet = data.characters(folder)
    parts = [], []
    # characters() puts one character between two texts.
    start = 0
    for path in sorted(path for path in pathlib.Path(folder).iterdir() if not path.is_symlink()):
        length = len(path.read_text(encoding="utf-8", errors="replace"))
        text = numbers[start:start + length]
        cut = length - length // HELD_OUT
        parts[0].append(text[:cut])
        parts[1].append(text[cut:])
        start += length + 1
    return torch.cat(parts[0]), torch.cat(parts[1]), len(alphabet)


def test(model, text):
    """Mean loss in nats and share of right guesses, over pieces that follow one another."""
    context = language_model.CONTEXT
    count = (len(text) - 1) // context
    inputs = text[:count * context].view(count, context)
    labels = text[1:count * context + 1].view(count, context)
    loss = right = 0.0
    model.eval()
    with torch.no_grad():
        for piece, label in zip(inputs.split(64), labels.split(64)):
            scores = model(piece).flatten(0, 1)
            loss += float(nn.functional.cross_entropy(scores, label.flatten(), reduction="sum"))
            right += int((scores.argmax(1) == label.flatten()).sum())
    model.train()
    return loss / labels.numel(), right / labels.numel()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, default=16, help="pieces of text a step")
    parser.add_argument("--lr", type=float, required=True, help="the peak")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--test-every", type=int, required=True)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    language_model.WIDTH, language_model.LAYERS = WIDTH, LAYERS
    gw.init()
    text, held_out, characters = texts(data.LICENSES)
    torch.manual_seed(options.seed)
    model = language_model.LanguageModel(characters)
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() > 1]},
              {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0}]
    optimizer = gw.DistributedOptimizer(gw.MethodOptimizer(groups, lr=options.lr),
                                        named_parameters=model.named_parameters())
    gw.broadcast_parameters(model.state_dict(), root_rank=0)
    before = gw.stats()
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, options.steps - WARM_UP))
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [WARM_UP])

    places = torch.Generator().manual_seed(1000 * options.seed + gw.rank())
    context = language_model.CONTEXT
    losses, curve = [], []
    start = time.monotonic()
    tests = 0.0  # seconds in tests
    for step in range(1, options.steps + 1):
        first = torch.randint(len(text) - context, (options.batch, 1), generator=places)
        pieces = text[first + torch.arange(context + 1)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if gw.rank() == 0 and step % options.test_every == 0:
            now = time.monotonic()
            test_loss, accuracy = test(model, held_out)
            curve.append({"step": step, "seconds": now - start - tests, "test_loss": test_loss, "accuracy": accuracy,
                          "loss": sum(losses[-options.test_every:]) / options.test_every})
            tests += time.monotonic() - now
    seconds = time.monotonic() - start - tests
    if gw.rank() == 0:
        after = gw.stats()
        test_loss, accuracy = test(model, held_out)
        last = losses[-LAST:]
        result = {"steps": options.steps, "seconds": seconds, "last_loss": sum(last) / len(last),
                  "test_loss": test_loss, "accuracy": accuracy, "curve": curve}
        for key in ("raw_push_bytes", "sent_bytes", "raw_pull_bytes", "received_bytes"):
            result[f"gradient_{key}"] = after[key] - before[key]
        options.json.write_text(json.dumps(result), encoding="utf-8")
    gw.shutdown()


if __name__ == "__main__":
    main()
