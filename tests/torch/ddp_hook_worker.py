#!/usr/bin/python3
"""One worker of a job of ddp_hook_test.py: runs the scenarios that are named and exits with 0 if all is
as it must be.

Usage: ddp_hook_worker.py SCENARIO...   (in a job of two workers, started by gradwire-launch)
"""

import hashlib
import os
import pathlib
import signal
import sys
import threading
import time
import unittest.mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.torch as gw
from gradwire.torch import Code, GradwireError

from checks import expect, refused

# PyTorch fills a first bucket of 1 MiB and then such small ones, once it has rebuilt them.
BUCKET_MB = 0.01


def hooked(model, **options):
    """The model with Gradwire's hook."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, **options)
    wrapped.register_comm_hook(gw.DDPState(wrapped), gw.comm_hook)
    return wrapped


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 500), nn.ReLU(), nn.Linear(500, 600), nn.ReLU(),
                         nn.Linear(600, 3))


def batch(step, rank=None):
    """Inputs and targets of a rank, of its own by default."""
    generator = torch.Generator().manual_seed(1000 * step + (gw.rank() if rank is None else rank))
    return torch.randn(16, 20, generator=generator), torch.randn(16, 3, generator=generator)


def loss_of(model, step, rank=None):
    inputs, targets = batch(step, rank)
    return nn.functional.mse_loss(model(inputs), targets)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()
            if parameter.grad is not None}


def bits(tensor):
    tensor = tensor.detach()
    return (tensor.view(torch.int16) if tensor.element_size() == 2 else tensor).numpy().tobytes()


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def expect_same_gradients(mine, plain, where):
    mine, plain = gradients(mine), gradients(plain)
    expect(mine.keys() == plain.keys(), f"{where}: {sorted(mine)} and {sorted(plain)}")
    for name, gradient in mine.items():
        off = (gradient - plain[name]).norm() / plain[name].norm().clamp(min=1e-30)
        expect(off <= 1e-6, f"{where}, {name}: relative difference {off}")
        # The sum of two numbers has one order, and half of it is exact.
        expect(same_bits(gradient, plain[name]), f"{where}, {name}: other bits")


def expect_same_on_all(model, where):
    """Bit by bit."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(bits(tensor))
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    expect(torch.equal(both[0], both[1]), f"{where}: the parameters differ between the ranks")


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def equals_plain():
    """With every option that changes how PyTorch fills or empties its buckets."""
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True},
                    {"find_unused_parameters": True},
                    {"static_graph": True, "gradient_as_bucket_view": True}):
        plain = DistributedDataParallel(net(), bucket_cap_mb=BUCKET_MB, **options)
        mine = hooked(net(), **options)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                      for model in (plain, mine)]
        for step in range(5):  # the second has other buckets than the first
            for model, optimizer in zip((plain, mine), optimizers):
                optimizer.zero_grad()
                loss_of(model, step).backward()
            expect_same_gradients(mine, plain, f"{options}, step {step}")
            for optimizer in optimizers:
                optimizer.step()
        expect_same_on_all(mine, f"{options}")


class Branches(nn.Module):
    """Layers that are used when the step says so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(20, 600)
        self.even = nn.Linear(600, 3)
        self.odd = nn.Linear(600, 3)
        self.never = nn.Linear(600, 3)

    def forward(self, inputs, number):
        return (self.odd if number % 2 else self.even)(self.first(inputs).relu())


def unused_parameters():
    plain = DistributedDataParallel(Branches(), bucket_cap_mb=BUCKET_MB, find_unused_parameters=True)
    mine = hooked(Branches(), find_unused_parameters=True)
    for step in range(6):
        # In every third step all ranks use the same layer, else each its own.
        number = 0 if step % 3 == 0 else gw.rank()
        for model in (plain, mine):
            model.zero_grad(set_to_none=True)
            inputs, targets = batch(step)
            nn.functional.mse_loss(model(inputs, number), targets).backward()
        expect_same_gradients(mine, plain, f"step {step}")
        expect(mine.module.never.weight.grad is None, "a layer that nobody uses has a gradient")


def accumulates_in_no_sync():
    plain = DistributedDataParallel(net(), bucket_cap_mb=BUCKET_MB)
    mine = hooked(net())
    before = gw.stats()["raw_push_bytes"]
    for step in range(0, 9, 3):
        for model in (plain, mine):
            model.zero_grad()
            with model.no_sync():
                loss_of(model, step).backward()
                loss_of(model, step + 1).backward()
            loss_of(model, step + 2).backward()
        expect_same_gradients(mine, plain, f"step {step}")
    pushed = gw.stats()["raw_push_bytes"] - before
    once = sum(4 * parameter.numel() for parameter in mine.parameters())
    expect(pushed == 3 * once, f"{pushed} bytes were pushed, expected 3 times {once}")


def joins():
    """A rank without batches counts as zeros, and the average is still over all ranks."""
    plain = DistributedDataParallel(net(), bucket_cap_mb=BUCKET_MB)
    mine = hooked(net())
    for model in (plain, mine):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(4 + 2 * gw.rank()):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
    for name, parameter in mine.module.named_parameters():
        expect(same_bits(parameter, dict(plain.module.named_parameters())[name]), f"{name}: other bits")
    expect_same_on_all(mine, "after join")


class Scale(nn.Module):
    """One number an input; PyTorch can compute it in any dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3000).remainder(7).to(dtype))
        self.bias = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, inputs):
        return (self.weight * inputs).sum() + self.bias


def other_dtypes():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        # gloo of PyTorch 1 can't broadcast bfloat16, and all ranks have the same parameters here.
        with unittest.mock.patch("torch.nn.parallel.distributed._sync_module_states"):
            model = hooked(Scale(dtype))
        for step in range(3):
            model.zero_grad()
            inputs = torch.arange(3000).remainder(5).to(dtype) * (gw.rank() + 1)
            model(inputs).backward()
            expected = torch.arange(3000).remainder(5).to(dtype) * 1.5
            expect(same_bits(model.module.weight.grad, expected), f"{dtype}, step {step}: weight")
            expect(model.module.bias.grad.item() == 1 and model.module.bias.grad.dtype == dtype,
                   f"{dtype}, step {step}: bias")


def not_finite():
    """A gradient that is not finite on one rank is NaN on all, and the next round is a new one."""
    model = hooked(net())
    for step in range(4):
        model.zero_grad()
        loss = loss_of(model, step)
        if step == 1 and gw.rank() == 1:
            loss = loss * float("inf")
        loss.backward()
        found = [name for name, gradient in gradients(model).items()
                 if not torch.isfinite(gradient).all()]
        every = [name for name, _ in model.named_parameters()]
        expect(found == (every if step == 1 else []), f"step {step}: {found} are not finite")
        if step == 1:
            expect(all(torch.isnan(gradient).all() for gradient in gradients(model).values()),
                   "not NaN everywhere")


def several_models():
    """Parameters of the same names in two models, in one backward pass and in turn."""
    models = [hooked(net(seed)) for seed in (1, 2)]
    plain = [DistributedDataParallel(net(seed), bucket_cap_mb=BUCKET_MB) for seed in (1, 2)]
    for step in range(3):
        for first, second in (models, plain):
            first.zero_grad()
            second.zero_grad()
            inputs, targets = batch(step)
            # The second looks at what the first has made of its inputs.
            made = torch.cat([first(inputs), inputs[:, 3:]], dim=1)
            nn.functional.mse_loss(second(made), targets).backward()
        for mine, other in zip(models, plain):
            expect_same_gradients(mine, other, f"one pass, step {step}")
    for step in range(3, 7):
        for mine, other in zip(models, plain):
            for model in (mine, other):
                model.zero_grad()
                loss_of(model, step).backward()
            expect_same_gradients(mine, other, f"in turn, step {step}")
    # Only one of them trains from now on.
    for step in range(7, 10):
        for model in (models[0], plain[0]):
            model.zero_grad()
            loss_of(model, step).backward()
        expect_same_gradients(models[0], plain[0], f"alone, step {step}")


def futures():
    """What other hooks may do with the future of this one."""
    plain = DistributedDataParallel(net(), bucket_cap_mb=BUCKET_MB)
    mine = DistributedDataParallel(net(), bucket_cap_mb=BUCKET_MB)
    state = gw.DDPState(mine.module.named_parameters())
    seen = []

    def hook(given, bucket):
        seen.append(bucket.is_last())
        return gw.comm_hook(given, bucket).then(lambda future: future.value() * 2)

    mine.register_comm_hook(state, hook)
    for step in range(3):
        for model in (plain, mine):
            model.zero_grad()
            loss_of(model, step).backward()
        for parameter in plain.parameters():
            parameter.grad *= 2
        expect_same_gradients(mine, plain, f"step {step}")
    expect(seen.count(True) == 3 and seen.count(False) > 0, f"no other buckets: {seen}")


def fifty_steps():
    model = hooked(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with torch.no_grad():
        before = sum(loss_of(model, 0, rank).item() for rank in range(2))
    for step in range(50):
        optimizer.zero_grad()
        loss_of(model, step % 2).backward()
        optimizer.step()
    with torch.no_grad():
        after = sum(loss_of(model, 0, rank).item() for rank in range(2))
    expect(after < 0.8 * before, f"the loss was {before} and is {after}")
    expect_same_on_all(model, "after 50 steps")
    counts = gw.stats()
    expect(counts["sent_bytes"] < counts["raw_push_bytes"] / 2, f"not compressed: {counts}")


def refuses_skip():
    """What the filter leaves in a bucket would be taken for a gradient."""
    refused("compression.filter.inactive is skip, which gradwire.torch",
            hooked, net())


def wrong_calls():
    refused("no parameter that requires a gradient", gw.DDPState,
            nn.ReLU())
    refused("expected pairs of a name and a parameter", gw.DDPState,
            net().parameters())
    complex_model = nn.Module()
    complex_model.weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    refused("parameter 'weight' is complex64", gw.DDPState, complex_model)

    model = DistributedDataParallel(net())
    model.register_comm_hook(None, gw.comm_hook)
    try:
        loss_of(model, 0).backward()
    except RuntimeError as error:
        expect("its state is a NoneType" in str(error), str(error))
    else:
        raise AssertionError("a hook without state was accepted")

    # Averaged twice is refused, whichever comes first.
    mine = hooked(net())
    refused("and a DistributedDataParallel would do it again",
            gw.DistributedDataParallel, mine.module)
    refused("and a DistributedOptimizer would do it again",
            gw.DistributedOptimizer, torch.optim.SGD(mine.parameters(), lr=0.1),
            named_parameters=mine.named_parameters())
    wrapped = gw.DistributedDataParallel(net())
    refused("averaged by a DistributedDataParallel already", gw.DDPState,
            wrapped.module)

    # An optimizer that was there first gives them up.
    model = net()
    optimizer = gw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                        named_parameters=model.named_parameters())
    loss_of(hooked(model), 0).backward()
    refused("has lost its parameters", optimizer.step)

    # Frozen parameters, and those that PyTorch is told to leave alone, are no business of ours.
    partly = net()
    partly[0].weight.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(partly, ["2.weight"])
    partly = hooked(partly)
    loss_of(partly, 0).backward()
    expect("2.weight" in gradients(partly.module), "an ignored parameter's own gradient")

    # Both ranks' backward() say it, by name, and the job goes on.
    model = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    model.register_comm_hook(gw.DDPState(model), gw.comm_hook)
    refused("weight' is sparse",
            model(torch.tensor([1, 2])).sum().backward)

    model = net()
    state = gw.DDPState(list(model.named_parameters())[:-1])
    model = DistributedDataParallel(model)
    model.register_comm_hook(state, gw.comm_hook)
    refused("a parameter of shape [3] is in a bucket on rank",
            loss_of(model, 0).backward)

    loss_of(mine, 0).backward()


def reconnects():
    """The hook belongs to a connection; the thread ends with it."""
    def waiters():
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("gradwire")]

    model = hooked(net())
    loss_of(model, 0).backward()
    expect(len(waiters()) == 1, f"{waiters()}")
    gw.shutdown()
    assert waiters() == [], waiters()
    model.zero_grad()
    with torch.no_grad():
        inputs, targets = torch.ones(16, 20), torch.ones(16, 3)
    try:
        nn.functional.mse_loss(model(inputs), targets).backward()
    except GradwireError as error:
        assert "not initialized" in str(error), error
    else:
        raise AssertionError("a backward pass without a connection")


def lost_server():
    """Rank 0 kills the server; both ranks' backward() say so."""
    for static in (False, True):
        model = hooked(net(), static_graph=static)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not static:
            train(model, optimizer, 3)
    dist.barrier()
    if gw.rank() == 0:
        kill_server()
    # The graph is static from here on: the futures are waited for in the same call as the hooks.
    started = time.monotonic()
    error = refused("server", train, model, optimizer, 100, code=Code.UNAVAILABLE)
    expect(time.monotonic() - started < 30, "it took too long")
    print(f"rank {gw.rank()} knows", flush=True)
    sys.exit(error.exit_code)


def kill_server():
    """The one of this job: it is a child of the launcher, as we are."""
    for process in pathlib.Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            # "pid (name) state parent ..."
            name, _, rest = (process / "stat").read_text().partition("(")[2].rpartition(")")
            if name == "gradwire-server" and int(rest.split()[1]) == os.getppid():
                os.kill(int(process.name), signal.SIGKILL)
                return
        except OSError:
            pass  # it has just ended
    raise AssertionError("found no server")


def stall():
    """Rank 1 has no backward pass; the job's deadline ends rank 0's."""
    model = hooked(net())
    dist.barrier()
    if gw.rank() == 0:
        error = refused("Gradient.", loss_of(model, 0).backward, code=Code.TIMEOUT)
        print("rank 0 knows", flush=True)
        sys.exit(error.exit_code)
    try:
        gw.barrier()
    except GradwireError as error:
        sys.exit(error.exit_code)


class Fails(torch.autograd.Function):
    """Fails in the backward pass."""

    @staticmethod
    def forward(context, inputs):
        return inputs.clone()

    @staticmethod
    def backward(context, gradient):
        raise ValueError("the backward pass has failed")


def fails_halfway():
    """A rank that ends with buckets under way, without shutdown, is gone at once; the other's backward()
    names it."""
    model = hooked(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    dist.barrier()
    if gw.rank() == 1:
        second = model.module[2]
        plain = second.forward
        second.forward = lambda inputs: plain(Fails.apply(inputs))
        try:
            loss_of(model, 2).backward()
        finally:
            expect(gradwire._client.current().pending, "no bucket is under way")
    error = refused("worker 1", loss_of(model, 2).backward, code=Code.UNAVAILABLE)
    print("rank 0 knows", flush=True)
    sys.exit(error.exit_code)


def no_farewell():
    """A program may end without shutdown; its thread does not hold it."""
    model = hooked(net())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    print("all done", flush=True)
    sys.exit(0)


SCENARIOS = {function.__name__: function for function in (
    equals_plain, unused_parameters, accumulates_in_no_sync, joins, other_dtypes, not_finite,
    several_models, futures, fifty_steps, refuses_skip, wrong_calls, reconnects, no_farewell, lost_server, stall,
    fails_halfway)}


def main():
    torch.set_num_threads(1)
    gw.init()
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=gw.rank(),
                            world_size=gw.size())
    for scenario in sys.argv[1:]:
        SCENARIOS[scenario]()
    if gw.is_initialized():
        gw.barrier()
        gw.shutdown()
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("gradwire") for name in names), names
    print("all done", flush=True)


if __name__ == "__main__":
    main()
