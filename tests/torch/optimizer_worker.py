#!/usr/bin/python3
"""One worker of a job of optimizer_test.py: runs the scenarios that are named, one after the other,
and exits with 0 if all is as it must be.

Usage: optimizer_worker.py SCENARIO...   (in a job of two workers, started by gradwire-launch)
"""

import copy
import gc
import io
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from unittest import mock

import torch
from torch import nn

import gradwire
import gradwire.torch as gw
from gradwire import Code, GradwireError
from gradwire.torch import _ops

from checks import expect, refused

BATCH = 8


def network(seed=1):
    """A small convolutional net, the same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2), nn.ReLU(),
                         nn.Flatten(), nn.Linear(8 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10))


def batch(step, rank, size=BATCH):
    """Images and labels of a rank; every rank can compute those of all."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(size, 1, 12, 12, generator=generator),
            torch.randint(10, (size,), generator=generator))


def doubled(step, order=None):
    parts = [batch(step, rank) for rank in range(gw.size())]
    images, labels = (torch.cat(column) for column in zip(*parts))
    return (images, labels) if order is None else (images[order], labels[order])


def loss_of(model, data):
    images, labels = data
    return nn.functional.cross_entropy(model(images), labels)


def sgd(model, rate=0.05):
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)


def train(model, optimizer, steps, first=0):
    """A plain loop over this rank's batches."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, batch(step, gw.rank())).backward()
        optimizer.step()


def alone(model, make_optimizer, steps, order=None):
    """What one process makes of all ranks' batches."""
    optimizer = make_optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, doubled(step, order)).backward()
        optimizer.step()
    return model


def distance(model, other):
    """The largest relative difference of two models' tensors, by norm."""
    return max(((a - b).norm() / b.norm()).item()
               for a, b in zip(model.parameters(), other.parameters()))


def expect_same_everywhere(tensors, what):
    """Bit for bit what rank 0 has."""
    for i, tensor in enumerate(tensors):
        mine = tensor.detach().clone()
        theirs = mine.clone()
        gw.broadcast_parameters({"": theirs}, 0, prefix=f"check {tensor.dtype} {list(tensor.shape)}")
        expect(torch.equal(mine, theirs), f"{what}: tensor {i} differs from rank 0's by "
                                          f"{(mine.double() - theirs.double()).abs().max()}")


class Pushes:
    """Counts push-pulls by name while it is entered."""

    def __enter__(self):
        self.names = []
        self._original = _ops.push_pull_async_inplace

        def counting(tensor, *arguments, **named):
            self.names.append(named["name"])
            return self._original(tensor, *arguments, **named)

        _ops.push_pull_async_inplace = counting
        return self

    def __exit__(self, *_):
        _ops.push_pull_async_inplace = self._original


def equals_doubled_batch():
    """One step to 1e-6; fifty within what another order of summation makes."""
    model = network()
    start = copy.deepcopy(model)
    optimizer = gw.DistributedOptimizer(sgd(model), model.named_parameters())
    expect(isinstance(optimizer, torch.optim.SGD), "it is still an SGD")
    train(model, optimizer, 1)
    off = distance(model, alone(copy.deepcopy(start), sgd, 1))
    expect(off <= 1e-6, f"after one step it is {off} off")
    train(model, optimizer, 49, first=1)
    reference = alone(copy.deepcopy(start), sgd, 50)
    orders = [torch.randperm(2 * BATCH, generator=torch.Generator().manual_seed(seed))
              for seed in range(3)]
    allowed = max(distance(alone(copy.deepcopy(start), sgd, 50, order), reference)
                  for order in orders)
    off = distance(model, reference)
    # Three orders are a small sample of all.
    expect(0 < allowed and off <= 3 * allowed, f"after 50 steps: {off}, orders alone: {allowed}")
    expect_same_everywhere(model.parameters(), "after 50 steps")


def two_hundred_steps():
    """Parameters and momenta are the same on all, whatever the compression loses."""
    model = network()
    start = loss_of(model, doubled(0)).item()
    optimizer = gw.DistributedOptimizer(sgd(model, 0.01), model.named_parameters())
    for step in range(200):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, batch(step % 4, gw.rank())).backward()
        optimizer.step()
    expect_same_everywhere(model.parameters(), "after 200 steps")
    expect_same_everywhere([optimizer.state[p]["momentum_buffer"] for p in model.parameters()],
                           "momenta after 200 steps")
    end = loss_of(model, doubled(0)).item()
    expect(end < 0.7 * start, f"the loss went from {start} to {end}")
    expect(optimizer.skipped_steps == 0, "no step is skipped")


def two_models():
    """Both have `weight`; each gets its own average."""
    first, second = nn.Linear(3, 2, bias=False), nn.Linear(4, 1, bias=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizers = [gw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0),
                                              model.named_parameters())
                      for model in (first, second)]
        for step in range(3):
            before = [model.weight.detach().clone() for model in (first, second)]
            mine = gw.rank() + 1 + step
            for factor, model, optimizer in zip((1, 10), (first, second), optimizers):
                optimizer.zero_grad()
                (mine * factor * model.weight).sum().backward()
                optimizer.step()
            for factor, model, old in zip((1, 10), (first, second), before):
                expect(torch.allclose(old - model.weight, torch.full_like(old, factor * (1.5 + step))),
                       f"the average at step {step} of the model with {factor}")


def hooks_of_pytorch_2():
    """Where a tensor takes hooks after accumulation itself, as in 2.x, they are used."""
    taken = []

    def register(parameter, hook):
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        taken.append(node)  # it lives as long as its hook

        def call(*_):
            expect(parameter.grad is not None, "the gradient is there")
            hook(parameter)
        return node.register_hook(call)

    name = "register_post_accumulate_grad_hook"
    model = network()
    with mock.patch.object(torch.Tensor, name, register, create=True):
        optimizer = gw.DistributedOptimizer(sgd(model), model.named_parameters())
    expect(len(taken) == 8, f"{len(taken)} hooks")
    with Pushes() as pushes:
        loss_of(model, batch(0, gw.rank())).backward()
        expect(len(pushes.names) == 8, f"handed over during the backward pass: {pushes.names}")
        optimizer.step()
    expect(distance(model, alone(network(), sgd, 1)) <= 1e-6, "a step with these hooks")


def one_backward_for_two_optimizers():
    """Small tensors of the second optimizer are under way, and incomplete, when the first one's
    step() comes; which they are differs between the ranks. Steps of one alone come in between."""
    models = [nn.ParameterList([nn.Parameter(torch.zeros(n + 1)) for n in range(6)])
              for _ in range(2)]
    optimizers = [gw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0),
                                          model.named_parameters()) for model in models]
    rank, expected = gw.rank(), [[0.0] * 6, [0.0] * 6]
    for step in range(12):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # This rank's part of each model in this step.
        used = {k: [i for i in range(6) if (i + step + rank + k) % 3 == 0] for k in range(2)}
        both = step % 4 != 3
        loss = sum(models[k][i].sum() * (rank + 1)
                   for k in range(2 if both else 1) for i in used[k])
        loss.backward()
        order = (0, 1) if step % 2 == 0 else (1, 0)
        for k in order if both else (0,):
            optimizers[k].step()
        for k in range(2 if both else 1):
            for r in range(2):
                for i in range(6):
                    if (i + step + r + k) % 3 == 0:
                        expected[k][i] -= (r + 1) / 2
        for k in range(2):
            got = [parameter[0].item() for parameter in models[k]]
            expect(got == expected[k], f"step {step}, model {k}: {got}, expected {expected[k]}")


def one_loss_reaches_both():
    """The loss of a generator goes through the discriminator."""
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    makers = [gw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                      model.named_parameters()) for model in (generator, critic)]
    gw.broadcast_parameters(dict(generator.named_parameters()), 0, prefix="generator.")
    gw.broadcast_parameters(dict(critic.named_parameters()), 0, prefix="critic.")
    noise = torch.full((2, 4), gw.rank() + 1.0)
    for _ in range(3):
        makers[0].zero_grad()
        with makers[1].no_sync():
            critic(generator(noise)).mean().backward()
        makers[0].step()
        makers[1].zero_grad()
        critic(generator(noise).detach()).mean().backward()
        makers[1].step()
    expect_same_everywhere([*generator.parameters(), *critic.parameters()], "two players")
    critic(generator(noise)).mean().backward()
    refused("under this optimizer's no_sync()",
            lambda: critic(generator(noise).detach()).mean().backward())
    for maker in makers:
        maker.synchronize()
        maker.zero_grad()


def clipping():
    """One push a step, with the gradients averaged before they are clipped."""

    def clipped(model, data, optimizer):
        optimizer.zero_grad()
        (100 * loss_of(model, data)).backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    model, plain = network(), network()
    optimizer = gw.DistributedOptimizer(sgd(model), model.named_parameters())
    reference = sgd(plain)
    for step in range(4):
        optimizer.zero_grad()
        with Pushes() as pushes:
            (100 * loss_of(model, batch(step, gw.rank()))).backward()
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if step % 2 == 0:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        expect(len(pushes.names) == len(set(pushes.names)) == 8, f"pushed {pushes.names}")
        expected = clipped(plain, doubled(step), reference)
        reference.step()
        expect(norm > 0.5 and abs(norm - expected) < 1e-4 * expected, f"norm {norm} for {expected}")
    expect(distance(model, plain) < 1e-5, "the clipped steps differ")
    loss_of(model, batch(0, 0)).backward()
    with optimizer.skip_synchronize():
        refused("call synchronize() before", optimizer.step)
    optimizer.step()


def several_passes():
    """Added up on each rank, pushed once: with a count, and with no_sync."""
    for way in ("count", "no_sync"):
        model, plain = network(), network()
        optimizer = gw.DistributedOptimizer(sgd(model), model.named_parameters(),
                                            backward_passes_per_step=3 if way == "count" else 1)
        reference = sgd(plain)
        for step in range(2):
            reference.zero_grad()
            for k in range(3):
                loss_of(plain, doubled(3 * step + k)).backward()
            reference.step()
            optimizer.zero_grad()
            with Pushes() as pushes:
                for k in range(3):
                    data = batch(3 * step + k, gw.rank())
                    if way == "no_sync" and k < 2:
                        with optimizer.no_sync():
                            loss_of(model, data).backward()
                    else:
                        loss_of(model, data).backward()
                    expect(bool(pushes.names) == (k == 2), f"{way}: pushed after pass {k}")
                optimizer.step()
            expect(len(pushes.names) == 8, f"{way}: pushed {pushes.names}")
        expect(distance(model, plain) < 1e-5, f"{way}: {distance(model, plain)}")
    # A parameter that only an earlier pass has used.
    parts = nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))])
    optimizer = gw.DistributedOptimizer(torch.optim.SGD(parts.parameters(), lr=1.0),
                                        parts.named_parameters(), backward_passes_per_step=2)
    (parts[0].sum() + parts[1].sum()).backward()
    parts[0].sum().backward()
    optimizer.step()
    expect(parts[0].tolist() == [-2.0] * 2 and parts[1].tolist() == [-1.0] * 3, "sums of passes")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(20, 8)
        self.middle = nn.Linear(8, 8)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(torch.tanh(self.middle(self.embed(tokens))))


def tokens_of(step, rank):
    return torch.randint(20, (6,), generator=torch.Generator().manual_seed(100 * step + rank))


def shared_and_unused():
    model, plain = Tied(), Tied()
    optimizer, reference = gw.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(plain)
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        both = [tokens_of(step, rank) for rank in range(2)]
        model(both[gw.rank()]).square().mean().backward()
        plain(torch.cat(both)).square().mean().backward()
        optimizer.step()
        reference.step()
    expect(distance(model, plain) < 1e-6, "tied parameters")

    # Used on one rank; on none; frozen, and thawed later.
    parts = nn.ParameterDict({name: nn.Parameter(torch.ones(3))
                              for name in ("all", "one", "none", "frozen")})
    parts["frozen"].requires_grad_(False)
    optimizer = gw.DistributedOptimizer(torch.optim.SGD(parts.parameters(), lr=1.0),
                                        parts.named_parameters())
    for step in range(4):
        optimizer.zero_grad(set_to_none=step < 2)
        if step == 2:
            parts["frozen"].requires_grad_(True)
        loss = parts["all"].sum()
        if gw.rank() == 1:
            loss = loss + 4 * parts["one"].sum()
        if parts["frozen"].requires_grad:
            loss = loss + parts["frozen"].sum() * (gw.rank() + 1)
        loss.backward()
        with Pushes() as pushes:
            optimizer.step()
        expect(("Gradient" in pushes.names[0]) and not any("all" in name for name in pushes.names),
               f"what the backward pass had handed over was pushed again: {pushes.names}")
    values = {name: parameter[0].item() for name, parameter in parts.items()}
    expect(values == {"all": -3.0, "one": -7.0, "none": 1.0, "frozen": -2.0}, f"{values}")
    expect(parts["none"].grad is not None and not parts["none"].grad.any(), "zeros for the unused")
    # Frozen in the middle: it stays, also under momentum, and the others go on.
    parts["one"].requires_grad_(False)
    parts["one"].grad = None
    (parts["all"].sum() + parts["frozen"].sum()).backward()
    optimizer.step()
    expect(parts["one"].grad is None and parts["one"][0] == -7.0, "a frozen parameter was updated")


def wrong_orders():
    model = network()
    optimizer = gw.DistributedOptimizer(sgd(model), model.named_parameters())
    data = batch(0, gw.rank())
    loss_of(model, data).backward()
    error = refused("a second gradient of 'Gradient", lambda: loss_of(model, data).backward())
    for part in (f"on rank {gw.rank()}", "backward_passes_per_step", "no_sync()", "on its way"):
        expect(part in str(error), f"'{part}' is not in: {error}")
    refused("it belongs after step()", optimizer.zero_grad)
    optimizer.synchronize()
    error = refused("averaged already", lambda: loss_of(model, data).backward())
    optimizer.zero_grad()
    # All is in order again.
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, 2)
    expect(not any(torch.equal(a, b) for a, b in zip(before, model.parameters())), "no step made")
    expect_same_everywhere(model.parameters(), "after wrong orders")


def closures():
    model, plain = network(), network()
    optimizer, reference = gw.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(plain)

    def closure_of(network_, optimizer_, data):
        def closure():
            optimizer_.zero_grad()
            loss = loss_of(network_, data)
            loss.backward()
            return loss
        return closure

    for step in range(3):
        loss = optimizer.step(closure_of(model, optimizer, batch(step, gw.rank())))
        expect(torch.is_tensor(loss), f"the closure's loss, not {loss}")
        reference.step(closure_of(plain, reference, doubled(step)))
    expect(distance(model, plain) < 1e-5, "steps with a closure")

    # LBFGS calls it several times, and decides by the loss, which therefore is averaged.
    model, plain = nn.Linear(5, 1), nn.Linear(5, 1)
    for m in (model, plain):
        nn.init.constant_(m.weight, 0.1)
        nn.init.zeros_(m.bias)
    inputs = [torch.randn(10, 5, generator=torch.Generator().manual_seed(r)) for r in range(2)]

    def make(m):
        return torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=5)

    optimizer, reference = gw.DistributedOptimizer(make(model), model.named_parameters()), make(plain)

    def mine():
        optimizer.zero_grad()
        loss = (model(inputs[gw.rank()]) - 1).square().mean()
        loss.backward()
        return gw.push_pull(loss.detach(), name="lbfgs loss")

    def all_of_it():
        reference.zero_grad()
        loss = (plain(torch.cat(inputs)) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(mine)
        reference.step(all_of_it)
    expect(distance(model, plain) < 1e-4, f"LBFGS: {distance(model, plain)}")
    expect_same_everywhere(model.parameters(), "LBFGS")


def gradient_objects():
    """A fresh tensor each time or the same one; with strides; expanded; replaced by the user."""
    rank = gw.rank()
    weight = nn.Parameter(torch.zeros(6, 4))
    image = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    scalar, empty = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(0, 3))
    parameters = {"weight": weight, "image": image, "scalar": scalar, "empty": empty}
    optimizer = gw.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=1.0),
                                        parameters.items())
    seen = set()
    for step in range(6):
        kind = step % 3
        if kind == 0:
            optimizer.zero_grad(set_to_none=True)
        elif kind == 1:
            optimizer.zero_grad(set_to_none=False)
        else:  # autograd adds to what is there, so it keeps these strides
            optimizer.zero_grad(set_to_none=True)
            weight.grad = torch.zeros(4, 6).t()
            expect(not weight.grad.is_contiguous(), "the test wants strides")
        pattern = torch.arange(24.0).view(6, 4) * (2 * rank + 1)
        loss = (weight * pattern).sum() + (image * (rank + 1)).sum() + scalar * 2 * rank + empty.sum()
        loss.backward()
        seen.add(weight.grad.data_ptr())
        before = weight.detach().clone()
        optimizer.step()
        expect(torch.equal(before - weight, torch.arange(24.0).view(6, 4) * 2), f"step {step}")
        expect(torch.equal(weight.grad, torch.arange(24.0).view(6, 4) * 2), f"gradient {step}")
        expect(torch.equal(image, torch.full_like(image, -1.5 * (step + 1))), f"strides {step}")
        expect(scalar.item() == -(step + 1), f"scalar {scalar}")
    # Gradients that came from elsewhere than backward().
    optimizer.zero_grad(set_to_none=True)
    weight.grad = torch.full((6, 4), float(rank))
    before = weight.detach().clone()
    optimizer.step()
    expect(torch.equal(before - weight, torch.full((6, 4), 0.5)), "a gradient set by hand")


def dtypes():
    """Parameters of 16 and 64 bits, and fp16 on the wire for others."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        parameters = {f"{dtype} {n}": nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 50000)}
        optimizer = gw.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=1.0),
                                            parameters.items())
        for step in range(3):
            optimizer.zero_grad()
            sum(p.sum() * (1 + 2 * gw.rank()) for p in parameters.values()).backward()
            optimizer.step()
        for name, parameter in parameters.items():
            expect(parameter.dtype == dtype and torch.all(parameter == -6.0), f"{name}: {parameter}")
    model, plain = network(), network()
    optimizer = gw.DistributedOptimizer(sgd(model), model.named_parameters(),
                                        compression=gw.Compression.fp16)
    before = gradwire.stats()["raw_push_bytes"]
    train(model, optimizer, 5)
    pushed = gradwire.stats()["raw_push_bytes"] - before
    count = sum(parameter.numel() for parameter in model.parameters())
    expect(pushed == 5 * 2 * count, f"pushed {pushed} bytes for {count} elements in 5 steps")
    off = distance(model, alone(plain, sgd, 5))
    expect(0 < off < 2e-3, f"fp16 on the wire: {off}")
    expect(all(parameter.grad.dtype == torch.float32 for parameter in model.parameters()), "dtype")
    expect_same_everywhere(model.parameters(), "fp16 on the wire")


def schedulers_and_states():
    for early in (True, False):
        model, plain = network(), network()
        optimizer, reference = sgd(model), sgd(plain)
        rates = torch.optim.lr_scheduler.StepLR(reference, 2, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
            if early:
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            optimizer = gw.DistributedOptimizer(optimizer, model.named_parameters())
            if not early:
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            for step in range(5):
                train(model, optimizer, 1, first=step)
                scheduler.step()
                reference.zero_grad()
                loss_of(plain, doubled(step)).backward()
                reference.step()
                rates.step()
        expect(optimizer.param_groups[0]["lr"] == 0.05 / 4, f"{optimizer.param_groups[0]['lr']}")
        expect(distance(model, plain) < 1e-5, "under a scheduler")

    # Adam's state saved and loaded into another one.
    model = network()
    optimizer = gw.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01),
                                        model.named_parameters())
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 3, first=3)
    again = network(seed=2)
    other = gw.DistributedOptimizer(torch.optim.Adam(again.parameters(), lr=1.0),
                                    again.named_parameters())
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(again, other, 3, first=3)
    expect(all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters())),
           "resumed from a state")
    plain = torch.optim.Adam(network().parameters())
    plain.load_state_dict(optimizer.state_dict())  # a wrapped optimizer's state is a plain one's

    # Groups, one of them added later.
    model = network()
    parts = [list(layer.parameters()) for layer in (model[0], model[2], model[5], model[7])]
    optimizer = gw.DistributedOptimizer(
        torch.optim.SGD([{"params": parts[0]}, {"params": parts[1], "lr": 0.0}], lr=0.1),
        model.named_parameters())
    expect(repr(optimizer).startswith("SGD"), repr(optimizer))
    train(model, optimizer, 1)
    untouched = [p.detach().clone() for p in parts[2] + parts[3]]
    optimizer.add_param_group({"params": parts[2] + parts[3], "lr": 0.2})
    fixed = [p.detach().clone() for p in parts[1]]
    model.zero_grad()
    train(model, optimizer, 1, first=1)
    expect(all(torch.equal(a, b) for a, b in zip(fixed, parts[1])), "a group without a rate moved")
    expect(not any(torch.equal(a, b) for a, b in zip(untouched, parts[2] + parts[3])), "added group")
    expect_same_everywhere(model.parameters(), "groups")
    foreign = nn.Parameter(torch.zeros(2, 3))
    refused("parameter 0 of group 3 (shape [2, 3])", optimizer.add_param_group, {"params": [foreign]})
    train(model, optimizer, 1, first=2)  # it is as if nothing had been added

    # Without names they are numbered, and can be added to.
    numbered = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = gw.DistributedOptimizer(torch.optim.SGD(numbered[:2], lr=1.0))
    with Pushes() as pushes:
        (numbered[0] + numbered[1]).sum().backward()
        optimizer.step()
        optimizer.add_param_group({"params": numbered[2:]})
        optimizer.zero_grad()
        sum(numbered).sum().backward()
        optimizer.step()
    expect([name.split(".", 1)[1] for name in sorted(pushes.names)]
           == ["0.0", "0.0", "0.1", "0.1", "1.0"], f"{pushes.names}")
    expect(numbered[0].tolist() == [-2.0] * 2 and numbered[2].tolist() == [-1.0] * 2, f"{numbered}")

    # A model can be saved and copied while an optimizer has its parameters.
    torch.save(model, io.BytesIO())
    copy.deepcopy(model)
    refused("can't be copied or pickled", copy.deepcopy, optimizer)
    refused("can't be copied or pickled", torch.save, optimizer, io.BytesIO())

    # A new optimizer for the same parameters takes them over.
    second = gw.DistributedOptimizer(torch.optim.SGD(numbered, lr=1.0))
    optimizer.zero_grad()
    sum(numbered).sum().backward()
    refused("has lost its parameters", optimizer.step)
    second.step()
    expect(numbered[2].tolist() == [-2.0] * 2, f"{numbered}")


def refusals():
    model = network()
    named = list(model.named_parameters())
    wrap = gw.DistributedOptimizer

    def optimizer_of(*parameters):
        return torch.optim.SGD(parameters or model.parameters(), lr=0.1)

    refused("two parameters are named '0.bias'", wrap, optimizer_of(),
            [(name.replace("2.bias", "0.bias"), parameter) for name, parameter in named])
    refused("parameter 1 of group 0 (shape [4]) is not among", wrap, optimizer_of(),
            [entry for entry in named if entry[0] != "0.bias"])
    refused("expected pairs of a name and a parameter", wrap, optimizer_of(), model.parameters())
    for tensor, part in ((torch.zeros(2, dtype=torch.complex64), "is complex64"),
                         (torch.zeros(2, dtype=torch.bool), "is bool"),
                         (torch.zeros(2, 2).to_sparse(), "is sparse")):
        parameter = nn.Parameter(tensor, requires_grad=tensor.dtype != torch.bool)
        refused(f"parameter 'odd' {part}", wrap, optimizer_of(parameter), [("odd", parameter)])
        holder = nn.Linear(1, 1)
        holder.odd = parameter
        refused(f"parameter 'odd' {part}", gw.DistributedDataParallel, holder)
    for count in (0, -1, 1.5, True):
        refused("backward_passes_per_step is", wrap, optimizer_of(), named,
                backward_passes_per_step=count)
    refused("go together", wrap, optimizer_of(), named, overlap_forward=True)
    refused("go together", wrap, optimizer_of(), named, model=model)
    refused("with LBFGS", wrap, torch.optim.LBFGS(model.parameters()), named, overlap_forward=True,
            model=model)
    refused("with grad_scaler", wrap, optimizer_of(), named, overlap_forward=True, model=model,
            grad_scaler=Scaler())

    # What FSDP, DTensor and torch.compile make, by the names of their classes.
    sharded = type("FullyShardedDataParallel", (nn.Sequential,), {})(nn.Linear(2, 2))
    refused("the module is sharded by FSDP", gw.DistributedDataParallel, sharded)
    refused("module '0' is sharded by FSDP", gw.DistributedDataParallel, nn.Sequential(sharded))
    parallel = type("DistributedDataParallel", (nn.Sequential,), {})(nn.Linear(2, 2))
    refused("is a DistributedDataParallel, which averages", gw.DistributedDataParallel, parallel)
    flat = type("FlatParameter", (nn.Parameter,), {})(torch.zeros(3))
    refused("parameter 'flat' is a FlatParameter", wrap, optimizer_of(flat), [("flat", flat)])
    compiled = type("OptimizedModule", (nn.Sequential,), {})(nn.Linear(2, 2))
    refused("compiled by torch.compile", wrap, optimizer_of(*compiled.parameters()),
            compiled.named_parameters(), overlap_forward=True, model=compiled)

    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = wrap(optimizer_of(embedding.weight), [("embedding", embedding.weight)])
    refused("embedding' is sparse", lambda: embedding(torch.tensor([1])).sum().backward())
    optimizer.zero_grad(set_to_none=True)

    optimizer = wrap(optimizer_of(), named)
    refused("is distributed already", wrap, optimizer, named)
    refused("use one of the two", gw.DistributedDataParallel, model)
    try:
        wrap(model)
    except TypeError as error:
        expect("got a Sequential" in str(error), f"{error}")
    else:
        raise AssertionError("a model was taken for an optimizer")
    with optimizer.join():
        def again():
            with optimizer.join():
                pass
        refused("join() inside another join()", again)
    train(model, optimizer, 1)


def uneven_batches():
    rank = gw.rank()
    for counts in ((3, 5), (4, 2), (0, 2), (0, 0), (3, 3)):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        gw.broadcast_parameters(dict(model.named_parameters()), 0, prefix=f"uneven{counts}.")
        optimizer = gw.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01),
                                            model.named_parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        generator = torch.Generator().manual_seed(rank)
        with optimizer.join(model.named_buffers()):
            for _ in range(counts[rank]):
                optimizer.zero_grad()
                model(torch.randn(5, 4, generator=generator)).square().sum().backward()
                optimizer.step()
                scheduler.step()
        what = f"uneven batches {counts}"
        expect_same_everywhere([*model.parameters()], what)
        if max(counts) > 0:
            expect_same_everywhere(model.buffers(), what + ", buffers")
            states = [optimizer.state[p] for p in model.parameters()]
            expect_same_everywhere([state["exp_avg"] for state in states], what + ", state")
            steps = {int(state["step"]) for state in states}
            expect(steps == {max(counts)}, f"{what}: Adam counts {steps} steps")
            last = 0 if counts[0] == max(counts) else 1
            expect(model[1].num_batches_tracked == counts[last], f"{what}: batches of rank {last}")
        train_again = model(torch.ones(5, 4) * rank).square().sum()
        optimizer.zero_grad()
        train_again.backward()
        optimizer.step()
        expect_same_everywhere(model.parameters(), what + ", and on")

    # The divisor stays the number of workers.
    weight = nn.Parameter(torch.zeros(2))
    optimizer = gw.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    with optimizer.join():
        for _ in range(1 + 2 * rank):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
    expect(weight.tolist() == [-2.0, -2.0], f"1 + 1/2 + 1/2 steps give {weight}")

    def left_early():
        with optimizer.join():
            optimizer.zero_grad()
            weight.sum().backward()

    error = refused("left", left_early, code=Code.INVALID_ARGUMENT)
    expect("between backward() and step()" in str(error), f"{error}")


def failing_in_join():
    """One rank raises; the other hears of it and neither waits."""
    model = network()
    optimizer = gw.DistributedOptimizer(sgd(model), model.named_parameters())
    try:
        with optimizer.join():
            for step in range(10):
                if step == 3 and gw.rank() == 1:
                    raise ZeroDivisionError("a batch that can't be read")
                train(model, optimizer, 1, first=step)
    except ZeroDivisionError:
        expect(gw.rank() == 1, "who raises")
        print("rank 1 has raised", flush=True)
        sys.exit(1)
    except GradwireError as error:
        expect("rank 1 has left join() with an error" in str(error), f"{error}")
        expect(error.exit_code == 5, f"{error.exit_code}")
        print("rank 0 knows", flush=True)
        sys.exit(5)
    raise AssertionError("nobody has raised")


def not_finite():
    """An infinity on one rank: all leave the step out and say which tensor."""
    model = network()
    optimizer = gw.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01),
                                        model.named_parameters())
    train(model, optimizer, 2)
    for way in ("step", "clip", "closure"):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        skipped = optimizer.skipped_steps
        images, labels = batch(7, gw.rank())
        if gw.rank() == 1:
            images = images * float("inf")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if way == "closure":
                def closure():
                    optimizer.zero_grad()
                    loss = loss_of(model, (images, labels))
                    loss.backward()
                    return loss
                optimizer.step(closure)
            else:
                optimizer.zero_grad()
                loss_of(model, (images, labels)).backward()
                if way == "clip":
                    optimizer.synchronize()
                    expect(all(p.grad.isnan().any() for p in model.parameters()), "NaN everywhere")
                optimizer.step()
        expect(len(caught) == 1 and "Gradient" in str(caught[0].message)
               and "not finite, because of rank 1: the step" in str(caught[0].message),
               f"{way}: {[str(c.message) for c in caught]}")
        expect(optimizer.skipped_steps == skipped + 1, f"{way}: {optimizer.skipped_steps}")
        after = (model.state_dict(), optimizer.state_dict()["state"])
        expect(all(torch.equal(after[0][key], value) for key, value in before[0].items()), way)
        expect(all(torch.equal(after[1][i]["exp_avg"], state["exp_avg"])
                   and torch.equal(after[1][i]["step"], state["step"])
                   for i, state in before[1].items()), f"{way}: the state has changed")
    train(model, optimizer, 2)
    expect(all(p.isfinite().all() for p in model.parameters()), "it goes on")
    expect_same_everywhere(model.parameters(), "after skipped steps")


class Scaler(torch.cuda.amp.GradScaler):
    """PyTorch's own, on the CPU: what needs CUDA there (three operations on tensors) is done here."""

    def __init__(self):
        # It disables itself without CUDA.
        module = sys.modules[torch.cuda.amp.GradScaler.__module__]
        with mock.patch.object(module, "amp_definitely_not_available", lambda: False):
            super().__init__(init_scale=1024.0)
        self._lazy_init_scale_growth_tracker(torch.device("cpu"))
        self.skipped = 0

    def scale(self, outputs):
        return outputs * self._scale

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not parameter.grad.isfinite().all():
                        found_inf.fill_(1.0)
                    parameter.grad *= inv_scale
        return {found_inf.device: found_inf}

    def update(self, new_scale=None):
        found = any(bool(found_inf) for state in self._per_optimizer_states.values()
                    for found_inf in state["found_inf_per_device"].values())
        self.skipped += found
        super().update(self.get_scale() * (0.5 if found else 2.0))


def mixed_precision():
    model, plain = network(), network()
    scaler = Scaler()
    optimizer = gw.DistributedOptimizer(sgd(model), model.named_parameters(), grad_scaler=scaler)
    reference = sgd(plain)
    told = []

    def tell(scale):
        told.append(scale)
        gradwire.set_loss_scale(scale)

    with mock.patch.object(_ops, "set_loss_scale", tell):
        for step in range(8):
            images, labels = batch(step, gw.rank())
            overflow = step in (2, 5)
            if overflow and gw.rank() == 1:
                images = images * float("inf")
            expected = scaler.get_scale()
            if step % 4 == 2:
                model.zero_grad(set_to_none=True)  # the optimizer does not see it
            else:
                optimizer.zero_grad()
            before = [p.detach().clone() for p in model.parameters()]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                scaler.scale(loss_of(model, (images, labels))).backward()
                expect(told[-1] == expected, f"step {step}: told {told}, the scale is {expected}")
                if step % 2 == 0:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                scaler.step(optimizer)
                scaler.update()
            expect(bool(caught) == overflow, f"step {step}: {[str(c.message) for c in caught]}")
            if overflow:
                expect(all(torch.equal(a, b) for a, b in zip(before, model.parameters())), "skipped")
            else:
                reference.zero_grad()
                loss_of(plain, doubled(step)).backward()
                nn.utils.clip_grad_norm_(plain.parameters(), 10.0 if step % 2 == 0 else 1e9)
                reference.step()
    gradwire.set_loss_scale(0)  # for the scenarios that follow
    expect(scaler.skipped == optimizer.skipped_steps == 2, f"{scaler.skipped} skipped")
    expect(len(told) == 8, f"the scale changes each step: {told}")
    expect(distance(model, plain) < 1e-5, f"{distance(model, plain)}")

    def join():
        with optimizer.join():
            pass
    refused("join() with grad_scaler", join)


def residuals_follow_the_scale():
    """Under a compressor that keeps residuals, a loss scale that changes by powers of two changes no
    bit of the training."""
    models = network(), network()
    scaler = Scaler()
    scaled = gw.DistributedOptimizer(sgd(models[0]), models[0].named_parameters(),
                                     grad_scaler=scaler)
    for step in range(10):
        scaled.zero_grad()
        scaler.scale(loss_of(models[0], batch(step, gw.rank()))).backward()
        scaler.step(scaled)
        scaler.update()
    gw.set_loss_scale(0)  # not given
    plain = gw.DistributedOptimizer(sgd(models[1]), models[1].named_parameters())
    train(models[1], plain, 10)
    expect(scaler.get_scale() == 1024 * 2.0**10, f"the scale is {scaler.get_scale()}")
    expect(all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters())),
           f"scaled and plain training differ by {distance(*models)}")
    off = distance(models[1], alone(network(), sgd, 10))
    expect(off > 1e-3, f"the test wants a compressor that keeps residuals; it is {off} off")


def advice():
    """Rank 0 alone is told, once, what goes badly with the job's compression."""
    for make, is_bad in ((torch.optim.Adam, True), (sgd, True), (torch.optim.SGD, False)):
        model = network()
        optimizer = make(model) if make is sgd else make(model.parameters(), lr=0.01)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = gw.DistributedOptimizer(optimizer, model.named_parameters())
            train(model, optimizer, 2)
        texts = [str(warning.message) for warning in caught]
        is_onebit = gw.plan()["units"][0]["phases"][-1]["uplink"] == "onebit"
        expected = int(is_bad and is_onebit and gw.rank() == 0)
        expect(len(texts) == expected and all("onebit" in text for text in texts), f"{make}: {texts}")


def learning_rates():
    """Told before a step's first push, when they change; for ef_lr they must be known everywhere."""
    told = []

    def tell(rate, names):
        told.append((rate, len(names)))
        gw.set_learning_rate(rate, names)

    model = network()
    model[7].bias.requires_grad_(False)
    inner = torch.optim.SGD([{"params": [*model[0].parameters(), *model[2].parameters()]},
                             {"params": [*model[5].parameters(), *model[7].parameters()],
                              "lr": 0.2}], lr=0.1)
    optimizer = gw.DistributedOptimizer(inner, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    with mock.patch.object(_ops, "set_learning_rate", tell):
        for step in range(6):
            if step == 3:
                model[7].bias.requires_grad_(True)
            optimizer.zero_grad()
            del told[:]
            loss_of(model, batch(step, gw.rank())).backward()
            rates = [0.1 * 0.5 ** (step // 2), 0.2 * 0.5 ** (step // 2)]
            expected = list(zip(rates, (4, 3 if step < 3 else 4))) if step % 2 == 0 else []
            expect(told == expected, f"step {step}: told {told}, expected {expected}")
            optimizer.step()
            # Who is new in the middle of a step is told of at once.
            expect(told == (expected if step != 3 else [(rates[1], 4)]), f"step {step}: told {told}")
            scheduler.step()
    expect_same_everywhere(model.parameters(), "rates")
    with optimizer.join():
        for step in range(2 + gw.rank()):
            train(model, optimizer, 1, first=step)
            scheduler.step()
    expect_same_everywhere(model.parameters(), "rates of a rank that goes on")
    train(model, optimizer, 2)
    expect_same_everywhere(model.parameters(), "and on")


class Attention(nn.Module):
    """Has a module whose forward nobody calls (out_proj) and a tied parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(20, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(8))
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        return self.out(x)


def overlap():
    """Bit for bit what the plain mode makes."""
    def tokens(step):
        generator = torch.Generator().manual_seed(10 * step + gw.rank())
        return torch.randint(20, (2, 5), generator=generator)

    def run(overlapped, make, passes):
        model = Attention()
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        extra = {"overlap_forward": True, "model": model} if overlapped else {}
        optimizer = gw.DistributedOptimizer(optimizer, model.named_parameters(),
                                            backward_passes_per_step=passes, **extra)
        losses, late = [], 0
        for step in range(8):
            if step % 3 == 0:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            for k in range(1, passes):
                model(tokens(100 * k + step)).square().mean().backward()
            loss = nn.functional.cross_entropy(model(tokens(step)).flatten(0, 1),
                                               tokens(step).flatten())
            if step % 3 == 1 and passes == 1:
                optimizer.zero_grad(set_to_none=False)
            if step % 3 == 2 and passes == 1:
                model.zero_grad(set_to_none=True)
            loss.backward()
            if step == 5:
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if overlapped:
                late += len(optimizer._overlap.pending)
            scheduler.step()
            losses.append(loss.item())
        if overlapped:
            expect(late == 7 * len(list(model.parameters())), f"{late} updates came after step()")
            state = {key: value.clone() for key, value in model.state_dict().items()}
            expect(not optimizer._overlap.pending, "state_dict waits")
            for key, value in model.state_dict().items():
                expect(torch.equal(value, state[key]), f"{key} changes after state_dict")
        optimizer.synchronize()
        return model, optimizer, losses

    makers = (lambda m: torch.optim.SGD([{"params": [*m.embed.parameters()], "lr": 0.3},
                                         {"params": [p for n, p in m.named_parameters()
                                                     if "embed" not in n]}], lr=0.1, momentum=0.9),
              lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
              lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True))
    for make, passes in zip(makers, (1, 1, 2)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the scheduler's, of a wrong order
            plain, overlapped = run(False, make, passes), run(True, make, passes)
        expect(plain[2] == overlapped[2], f"losses: {plain[2]} and {overlapped[2]}")
        for (name, a), b in zip(plain[0].named_parameters(), overlapped[0].parameters()):
            expect(torch.equal(a, b), f"'{name}' differs")
        states = [run_[1].state_dict()["state"] for run_ in (plain, overlapped)]
        for i, state in states[0].items():
            for key, value in state.items():
                expect(torch.equal(value, states[1][i][key]), f"state {i} {key}")
        expect_same_everywhere(overlapped[0].parameters(), "overlapped")

    # A layer waits for its own parameters only.
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = gw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                        model.named_parameters(), overlap_forward=True, model=model)
    left = []
    model[1].register_forward_pre_hook(lambda *_: left.append(len(optimizer._overlap.pending)))
    model[0].register_forward_hook(lambda *_: left.append(len(optimizer._overlap.pending)))
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    expect(left[-2:] == [2, 0], f"pending after the first layer and at the second: {left}")
    refused("step(closure) with overlap_forward", optimizer.step, lambda: None)
    # Parameters used past their module's forward.
    (model[1].weight.sum() + optimizer.param_groups[0]["lr"]).detach()
    refused("before its last update was applied", lambda: model[1].weight.sum().backward())
    optimizer.synchronize()
    optimizer.zero_grad()
    optimizer.synchronize()  # there is nothing to finish

    # Infinities: each tensor is left out, on every rank.
    weight = [p.detach().clone() for p in model.parameters()]
    factor = float("inf") if gw.rank() == 1 else 1.0
    (model(torch.ones(1, 4)).sum() * factor).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.synchronize()
    expect(len(caught) == 1 and optimizer.skipped_steps == 1, f"{[str(c.message) for c in caught]}")
    expect(all(torch.equal(a, b) for a, b in zip(weight, model.parameters())), "left out")

    # Uneven batches.
    optimizer.zero_grad()
    with optimizer.join():
        for _ in range(2 + gw.rank()):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    expect_same_everywhere(model.parameters(), "overlapped and uneven")

    class Counting(torch.optim.SGD):
        """Keeps a count in its group, as some optimizers do."""

        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    model = nn.Linear(2, 2)
    inner = Counting(model.parameters(), lr=0.1)
    inner.param_groups[0]["count"] = 0
    optimizer = gw.DistributedOptimizer(inner, model.named_parameters(), overlap_forward=True,
                                        model=model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    refused("Counting keeps 'count' in its parameter group", optimizer.synchronize)


def data_parallel():
    torch.manual_seed(gw.rank())  # rank 0's parameters must win
    inner = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    inner[1].running_mean += gw.rank()
    model = gw.DistributedDataParallel(inner)
    expect_same_everywhere(inner.parameters(), "at the start")
    expect_same_everywhere(inner.buffers(), "buffers at the start")
    expect(list(model.state_dict()) == list(inner.state_dict()), "state_dict has no prefix")
    model.load_state_dict(inner.state_dict())
    plain = copy.deepcopy(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def inputs(step, rank):
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))

    for step in range(3):
        optimizer.zero_grad()
        model(inputs(step, gw.rank())).square().mean().backward()
        averaged = [p.grad.clone() for p in inner.parameters()]
        expect_same_everywhere(averaged, "gradients when backward() returns")
        if step == 0:
            sums = [torch.zeros_like(p) for p in plain.parameters()]
            for rank in range(2):
                other = copy.deepcopy(plain)
                other(inputs(0, rank)).square().mean().backward()
                for total, parameter in zip(sums, other.parameters()):
                    total += parameter.grad / 2
            expect(all(torch.allclose(a, b, atol=1e-7) for a, b in zip(averaged, sums)), "average")
        optimizer.step()
    expect_same_everywhere(inner.parameters(), "after steps")
    model(inputs(9, gw.rank()))  # the ranks' buffers go apart here, and together in the next pass
    with torch.no_grad():
        model(inputs(10, 0))
    model(inputs(11, 0))
    expect_same_everywhere(inner.buffers(), "buffers after a forward pass on equal inputs")
    model.eval()
    model(inputs(12, gw.rank()) if gw.rank() == 0 else inputs(12, 1))  # not collective

    # no_sync, unused and frozen parameters.
    parts = nn.ModuleDict({name: nn.Linear(1, 1, bias=False)
                           for name in ("all", "one", "none", "cold")})
    parts.forward = lambda names: sum(parts[name].weight.sum() * (gw.rank() + 1) for name in names)
    parts["cold"].weight.requires_grad_(False)
    model = gw.DistributedDataParallel(parts)
    mine = ["all", "one"] if gw.rank() == 1 else ["all"]
    with Pushes() as pushes:
        with model.no_sync():
            model(mine).backward()
        expect(not pushes.names, f"no_sync pushed {pushes.names}")
        expect(parts["all"].weight.grad.item() == gw.rank() + 1, "it adds up here")
        model(["all"]).backward()
    expect(len(pushes.names) == 3, f"{pushes.names}")
    got = [parts[name].weight.grad.item() for name in ("all", "one", "none")]
    expect(got == [3.0, 1.0, 0.0] and parts["cold"].weight.grad is None, f"{got}")

    # Two wrappers in one backward pass, in another order on each rank.
    models = [gw.DistributedDataParallel(nn.Linear(2, 3)) for _ in range(2)]
    for step in range(3):
        order = models if (step + gw.rank()) % 2 else models[::-1]
        for m in models:
            m.zero_grad()
        x = torch.full((1, 2), gw.rank() + 1.0)
        sum(m(x).sum() for m in order).backward()
        for m in models:
            got = m.module.weight.grad
            expect(torch.equal(got, torch.full((3, 2), 1.5)), f"two wrappers: {got}")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models[0].zero_grad()
        (models[0](torch.ones(1, 2)).sum() * (float("inf") if gw.rank() else 1)).backward()
    expect(len(caught) == 1 and "not finite" in str(caught[0].message), f"{len(caught)} warnings")
    expect(models[0].module.weight.grad.isnan().all(), "NaN everywhere")

    half = gw.DistributedDataParallel(nn.Linear(3, 1), compression=gw.Compression.fp16)
    half(torch.full((1, 3), 0.1 * (gw.rank() + 1))).sum().backward()
    expect(torch.allclose(half.module.weight.grad, torch.full((1, 3), 0.15), rtol=2e-3)
           and half.module.weight.grad.dtype == torch.float32, f"{half.module.weight.grad}")
    refused("save or copy its module", copy.deepcopy, half)
    copy.deepcopy(half.module)
    refused("expected one device at most", gw.DistributedDataParallel, nn.Linear(1, 1), [0, 1])
    refused("no parameter that requires a gradient", gw.DistributedDataParallel, nn.ReLU())
    refused("use one of the two", gw.DistributedOptimizer,
            torch.optim.SGD(half.parameters(), lr=0.1), half.named_parameters())
    try:
        gw.DistributedDataParallel(optimizer)
    except TypeError as error:
        expect("got a SGD" in str(error), f"{error}")
    else:
        raise AssertionError("an optimizer was taken for a module")


def fails_in_backward():
    """A wrapper whose backward pass has failed says so; an optimizer can be told to go on."""
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_, values):
            return values.clone()

        @staticmethod
        def backward(_, gradient):
            raise ValueError("of the script's own")

    def fail(first, second):
        try:
            second(Fails.apply(first(torch.ones(2, 3)))).sum().backward()
        except ValueError as error:
            expect("of the script's own" in str(error), str(error))
        else:
            raise AssertionError("the backward pass did not fail")

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = gw.DistributedOptimizer(sgd(model), model.named_parameters())
    gw.broadcast_parameters(model.state_dict())
    fail(model[0], model[1])
    refused("call synchronize() first", optimizer.zero_grad)
    optimizer.synchronize()
    optimizer.zero_grad()
    model(torch.ones(2, 3) * (gw.rank() + 1)).sum().backward()
    optimizer.step()
    expect_same_everywhere(model.parameters(), "after a backward pass that failed")

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.fails = nn.Linear(3, 3), nn.Linear(3, 1), True

        def forward(self, values):
            values = self.first(values)
            return self.second(Fails.apply(values) if self.fails else values)

    wrapped = gw.DistributedDataParallel(Half())
    try:
        wrapped(torch.ones(2, 3)).sum().backward()
    except ValueError:
        pass
    wrapped.module.fails = False
    refused("the last backward pass ended with an error", wrapped(torch.ones(2, 3)).sum().backward)
    wrapped._exchange.send_rest()  # so that this job can end in order
    wrapped._exchange.receive_all()


def interrupted():
    """Ctrl-C while step() waits: the step can be finished, counts once, and leaves nothing out."""
    model, calm = network(), network()
    optimizer = gw.DistributedOptimizer(sgd(model), model.named_parameters())
    without = gw.DistributedOptimizer(sgd(calm), calm.named_parameters())
    train(calm, without, 3)
    receive = type(optimizer._exchange).receive

    def receive_two(exchange, slot):
        finite = receive(exchange, slot)
        if slot is exchange.slots[1]:
            raise KeyboardInterrupt
        return finite

    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(step, gw.rank())).backward()
        if gw.rank() == 0 and step == 1:
            with mock.patch.object(type(optimizer._exchange), "receive", receive_two):
                try:
                    optimizer.step()
                except KeyboardInterrupt:
                    pass
                else:
                    raise AssertionError("step() was not interrupted")
        optimizer.step()  # servers refuse a rank that has ended more steps than others
    expect_same_everywhere(model.parameters(), "after Ctrl-C")
    expect(distance(model, calm) == 0, f"{distance(model, calm)} from what nobody interrupts")

    # With a tensor that is not finite: it is not forgotten.
    bad = network(2)
    third = gw.DistributedOptimizer(sgd(bad), bad.named_parameters())
    (bad[0].weight * float("inf")).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mock.patch.object(type(third._exchange), "receive", receive_two):
            try:
                third.step()
            except KeyboardInterrupt:
                pass
        third.step()
    expect(third.skipped_steps == 1, f"{third.skipped_steps} steps left out")


def second_job():
    """A process may train in one job after another, each with its own servers. Nothing of the first
    reaches the second, not even a step that was left half done."""
    model = network()
    optimizer = gw.DistributedOptimizer(sgd(model), model.named_parameters())
    wrapped = gw.DistributedDataParallel(nn.Linear(3, 1))
    train(model, optimizer, 2)
    loss_of(model, batch(2, gw.rank())).backward()  # and no step()
    rank, server = gw.rank(), None
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port[0] = probe.getsockname()[1]
    gw.broadcast_parameters([("port", port)])
    endpoint = f"tcp://127.0.0.1:{port.item()}"
    gw.shutdown()
    if rank == 0:
        server = subprocess.Popen([os.environ["TEST_SERVER"], "--set", f"endpoint={endpoint}",
                                   "--set", "job.workers=2"],
                                  env={key: value for key, value in os.environ.items()
                                       if key != "GRADWIRE_ROLE"})
    try:
        gw.init(settings={"endpoint": endpoint}, rank=rank)
        refused("made for a connection that is closed", optimizer.step)
        again = gw.DistributedOptimizer(sgd(model), model.named_parameters())
        taken = gw.DistributedOptimizer(sgd(wrapped), wrapped.module.named_parameters())
        expect(again._exchange.prefix == "Gradient." and taken._exchange.prefix == "Gradient@1.",
               f"{again._exchange.prefix}, {taken._exchange.prefix}")
        with mock.patch.object(_ops, "end_step", wraps=_ops.end_step) as ended:
            for step in range(3):
                train(model, again, 1, first=step)
                wrapped.module(torch.ones(1, 3)).sum().backward()
                taken.step()
        expect(ended.call_count == 3, f"{ended.call_count} steps, expected 3")
        expect_same_everywhere(model.parameters(), "in the second job")
        refused("has lost its parameters", optimizer.step)
        gw.shutdown()
        if server is not None:
            exit_code = server.wait(timeout=60)
            if exit_code != 0:
                raise AssertionError(f"the second server ended with {exit_code}")
    finally:
        if server is not None and server.poll() is None:
            server.kill()
            server.wait()


def dropped():
    """An optimizer that is gone between backward() and step(), wholly or partly under way, leaves the
    parameters to the next one, and the steps to the others."""
    for parts in (8, 4):  # all layers, or those in front: the others' gradients are not under way
        model, same = network(), network()
        optimizer = gw.DistributedOptimizer(sgd(model), model.named_parameters())
        train(model, optimizer, 2)
        images, _ = batch(7, gw.rank())
        model[:parts](images).square().mean().backward()
        del optimizer
        if gw.rank() == 0:
            gc.collect()  # when it goes is not the same everywhere
        # Without one the model is like any other.
        model[:parts](images).square().mean().backward()
        model.zero_grad()
        same.load_state_dict(model.state_dict())
        optimizer = gw.DistributedOptimizer(sgd(model), model.named_parameters())
        with mock.patch.object(_ops, "end_step", wraps=_ops.end_step) as ended:
            train(model, optimizer, 5)
        # Two steps may have gone until it is clear that the others rest.
        expect(ended.call_count >= 3, f"{parts} parts: {ended.call_count} steps have ended")
        alone(same, sgd, 5)
        expect(distance(model, same) < 1e-5, f"{parts} parts: {distance(model, same)}")
        expect_same_everywhere(model.parameters(), f"{parts} parts")

    gone, stays = network(), network(2)
    optimizer = gw.DistributedOptimizer(sgd(gone), gone.named_parameters())
    other = gw.DistributedOptimizer(sgd(stays), stays.named_parameters())
    train(gone, optimizer, 2)
    train(stays, other, 2)
    gone[:4](batch(7, gw.rank())[0]).square().mean().backward()
    before = [parameter.grad.clone() for parameter in gone.parameters()]
    del optimizer
    with mock.patch.object(_ops, "end_step", wraps=_ops.end_step) as ended:
        train(stays, other, 4, first=2)
    expect(ended.call_count >= 2, f"the other optimizer: {ended.call_count} steps have ended")
    expect_same_everywhere(stays.parameters(), "the other optimizer's model")
    after = [parameter.grad for parameter in gone.parameters()]
    expect(all(torch.equal(*pair) for pair in list(zip(before, after))[4:]),
           "gradients that were not under way are left alone")


def killed():
    """Rank 1 is killed between two steps; rank 0 says who."""
    model = network()
    optimizer = gw.DistributedOptimizer(sgd(model), model.named_parameters())
    try:
        for step in range(10**6):
            if gw.rank() == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, 1, first=step % 10)
    except GradwireError as error:
        expect(error.code == Code.UNAVAILABLE and "worker 1" in str(error), repr(error))
        print(f"rank 0 knows at {time.monotonic()}", flush=True)
        sys.exit(error.exit_code)


def refuses_skip():
    """An optimizer would take what the filter leaves in a gradient for one."""
    model = network()
    refused("compression.filter.inactive is skip, which gradwire.torch does not support",
            gw.DistributedOptimizer, sgd(model), model.named_parameters())
    refused("expected zero_fill", gw.push_pull, torch.ones(3), name="a tensor")


SCENARIOS = {function.__name__: function for function in (
    equals_doubled_batch, hooks_of_pytorch_2, two_hundred_steps, two_models, one_backward_for_two_optimizers,
    one_loss_reaches_both, clipping, several_passes, shared_and_unused, wrong_orders, closures,
    gradient_objects, dtypes, schedulers_and_states, refusals, uneven_batches, failing_in_join,
    not_finite, mixed_precision, residuals_follow_the_scale, advice, learning_rates, overlap, data_parallel,
    fails_in_backward, interrupted, second_job, dropped, killed, refuses_skip)}


def main():
    torch.set_num_threads(1)
    gw.init()
    expect(gw.size() == 2, f"{gw.size()} workers")
    for scenario in sys.argv[1:]:
        start = time.monotonic()
        try:
            SCENARIOS[scenario]()
        except AssertionError:
            print(f"scenario {scenario}:", file=sys.stderr)
            raise
        print(f"{scenario} done in {time.monotonic() - start:.2f} s", flush=True)
    gw.shutdown()
    print("all done", flush=True)


if __name__ == "__main__":
    main()
