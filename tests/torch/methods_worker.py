#!/usr/bin/python3
"""One worker of a job of methods_test.py: runs the scenarios that are named, one after the other, and
exits with 0 if all is as it must be.

Usage: methods_worker.py FOLDER SCENARIO[:METHOD]...   (in a job of two workers, by gradwire-launch)
FOLDER is for what a later job needs.
"""

import pathlib
import sys
import warnings
from unittest import mock

import numpy as np
import torch
from torch import nn

import gradwire.torch as gw
from gradwire import Code, GradwireError
from gradwire._client import require
from gradwire.torch import _ops

from checks import expect, refused

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import reference_methods  # noqa: E402  pylint: disable=wrong-import-position

FOLDER = pathlib.Path(sys.argv[1])
STEPS, SAVED, WARM_UP = 200, 120, 50
TOLERANCE = 1e-5  # of the norm of each tensor
# Name and shape. Those with one dimension are not decayed.
SHAPES = {"matrix": (25, 40), "kernel": (8, 3, 3, 3), "large": (4099, 1), "bias": (7,), "one": (1,),
          "scalar": ()}
# What is given to the class, and the same in the reference's words; the learning rate to begin with.
METHODS = {
    "sgd": (gw.SGD, {"momentum": 0.8, "weight_decay": 0.01}, None, 0.02),
    "adamw": (gw.AdamW, {"betas": (0.8, 0.95)}, {"beta1": 0.8, "beta2": 0.95}, 0.01),
    "lamb": (gw.LAMB, {"norm_high": 5.0}, None, 0.02),
    "lans": (gw.LANS, {"weight_decay": 0.1}, None, 0.02),
    "clan": (gw.CLAN, {"norm_low": 1.0}, None, 0.02),
    "dist_ef_sgdm": (gw.DistEFSGDM, {"weight_decay": 0.01}, None, 0.02),
    "onebit_adam": (gw.OneBitAdam, {"weight_decay": 0.1}, None, 0.01),
    # The job's setting says it.
    "onebit_lamb": (gw.MethodOptimizer, {}, None, 0.01),
}


class Noisy(nn.Module):
    """Parameters of many shapes, each with the gradient x - 0.5, or 2 where it has one element, and
    noise of the rank and step."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def loss(self, step):
        generator = torch.Generator().manual_seed(1000 * step + gw.rank())
        total = 0.0
        for parameter in self.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.numel() == 1:  # means of its gradients must not cancel
                total = total + ((2 + noise / 2) * parameter).sum()
            else:
                total = total + ((parameter - 0.5) ** 2 / 2 + noise * parameter).sum()
        return total

    def values(self):
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}


def groups_of(model):
    parameters = list(model.parameters())
    return [{"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0}]


def distributed(kind, model, params=None, /, overlap=False, **options):
    more = {"overlap_forward": True, "model": model} if overlap else {}
    return gw.DistributedOptimizer(kind(groups_of(model) if params is None else params, **options),
                                   named_parameters=model.named_parameters(), **more)


def make(name):
    """A model, its optimizer and the schedule of a method."""
    kind, options, _, peak = METHODS[name]
    model = Noisy()
    optimizer = distributed(kind, model, lr=peak, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    return model, optimizer, schedule


def same_bits(mine, theirs):
    return all(torch.equal(mine[name].view(torch.int32), theirs[name].view(torch.int32))
               for name in mine)


def expect_same_on_all(model, what):
    for name, parameter in model.named_parameters():
        of_root = parameter.detach().clone()
        gw.broadcast_parameters([(name, of_root)], 0, prefix=f"check {what} ")
        expect(torch.equal(of_root, parameter.detach()), f"{what}: {name} differs by rank")


def one_step(model, optimizer, step):
    optimizer.zero_grad()
    model.loss(step).backward()
    optimizer.step()


# ---- Scenarios ---------------------------------------------------------------------------------


def reference(name):
    """Through the job as scripts/reference_methods.py, with what was pulled; and saved in mid-run."""
    _, options, words, peak = METHODS[name]
    words = dict(options if words is None else words)
    if name.startswith("onebit"):
        words["freeze_step"] = WARM_UP
    model, optimizer, schedule = make(name)
    method = reference_methods.make(name, **words)
    states = {key: method.new(parameter.detach().numpy(), parameter.dim() > 1)
              for key, parameter in model.named_parameters()}
    gradients, sent = {}, {}
    for key, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, key=key: gradients.update({key: gradient.clone()}))
    push = _ops.push_pull_async_inplace

    def watch(tensor, **named):
        sent[named["name"].split(".", 1)[1]] = tensor.clone()
        return push(tensor, **named)

    start, worst = model.values(), 0.0
    last = {key: torch.zeros(()) for key in states}
    for step in range(STEPS):
        if step == SAVED:
            saved = {"model": model.values(), "optimizer": optimizer.state_dict(),
                     "schedule": schedule.state_dict(), "gradwire": gw.state_dict()}
        optimizer.zero_grad()
        with mock.patch.object(_ops, "push_pull_async_inplace", watch):
            model.loss(step).backward()
        optimizer.synchronize()
        pulled = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
        optimizer.step()
        schedule.step()
        for key, state in states.items():
            own = method.send(state, step, gradients[key].numpy().astype(np.float64))
            method.update(state, pulled[key].numpy(), peak * (1 - step / STEPS))
            # What is sent is a sum that may all but cancel in one element: it is rounded in
            # proportion to the summands, a gradient and perhaps what was pulled before.
            least = max(np.linalg.norm(values.numpy()) for values in (gradients[key], last[key]))
            # One element alone may pass 0, where no error is small.
            size = np.linalg.norm(start[key].numpy()) if state.x.size == 1 else 0
            got = dict(model.named_parameters())[key].detach().numpy()
            for what, mine, theirs, scale in (("sent", sent[key].numpy(), own, least),
                                              ("parameters", got, state.x, size)):
                far = np.linalg.norm(mine - theirs) / max(np.linalg.norm(theirs), scale)
                worst = max(worst, far)
                expect(far <= TOLERANCE, f"{name}, step {step}, {what} of {key}: {far:.1e}")
        last = pulled
    expect_same_on_all(model, name)
    for key, values in model.values().items():
        expect(not torch.equal(values, start[key]), f"{name}: {key} has not moved")
    expect(optimizer.skipped_updates == 0 and optimizer.skipped_steps == 0, "skipped")
    saved["end"] = model.values()
    torch.save(saved, FOLDER / f"{name}.{gw.rank()}.pt")
    if gw.rank() == 0:
        print(f"{name}: at most {worst:.1e} from the reference", flush=True)


def goes_on(name):
    """What reference() has saved goes on bit for bit, in a fresh optimizer."""
    saved = torch.load(FOLDER / f"{name}.{gw.rank()}.pt")
    model, optimizer, schedule = make(name)
    expect(not same_bits(model.values(), saved["model"]), "there is something to load")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(saved["model"][key])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    if name in ("clan", "dist_ef_sgdm", "onebit_adam", "onebit_lamb"):  # with residuals
        gw.load_state_dict(saved["gradwire"])
    for step in range(SAVED, STEPS):
        one_step(model, optimizer, step)
        schedule.step()
    expect(same_bits(model.values(), saved["end"]), f"{name} goes on otherwise than it would have")


def loads_before():
    """A state that is loaded before the optimizer is distributed, and one that is broadcast."""
    model = Noisy()
    optimizer = distributed(gw.AdamW, model)
    for step in range(3):
        one_step(model, optimizer, step)
    state, values = optimizer.state_dict(), model.values()
    one_step(model, optimizer, 3)
    later = Noisy()
    later.load_state_dict(values)
    inner = gw.AdamW(groups_of(later))
    inner.load_state_dict(state)
    expect(torch.equal(inner.state_dict()["method"], state["method"]), "it waits")
    after = gw.DistributedOptimizer(inner, later.named_parameters())
    one_step(later, after, 3)
    expect(same_bits(later.values(), model.values()), "loaded before")

    others = Noisy()
    others.load_state_dict(values)
    third = distributed(gw.AdamW, others)
    if gw.rank() == 0:
        third.load_state_dict(state)
    gw.broadcast_optimizer_state(third, 0)
    one_step(others, third, 3)
    expect(same_bits(others.values(), model.values()), "broadcast")

    damaged = dict(state, method=state["method"].clone())
    damaged["method"][40] += 1
    refused("the saved method is damaged", third.load_state_dict, damaged, code=Code.CORRUPT_DATA)
    refused("it lacks 'method'", third.load_state_dict, {"state": {}, "param_groups": []})
    refused("is a list, expected a tensor of bytes", third.load_state_dict, dict(state, method=[1]))
    other = distributed(gw.LAMB, Noisy())
    refused("the saved state is of method adamw, expected lamb", other.load_state_dict, state)
    expect(same_bits(others.values(), model.values()), "a refused state changes nothing")


def overlap(name):
    """overlap_forward gives the same bits."""
    kind, options, _, peak = METHODS[name]
    ends = []
    for overlaps in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 5))
        optimizer = distributed(kind, model, overlap=overlaps, lr=peak, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for step in range(6):
            generator = torch.Generator().manual_seed(1000 * step + gw.rank())
            optimizer.zero_grad()
            model(torch.randn(8, 10, generator=generator)).pow(2).sum().backward()
            optimizer.step()
            schedule.step()
        optimizer.state_dict()  # with all updates applied
        expect_same_on_all(model, f"overlap {name} {overlaps}")
        ends.append({key: value.clone() for key, value in model.state_dict().items()})
    expect(same_bits(*ends), f"{name}: overlap changes the result")


def unused_and_frozen():
    """Parameters without a gradient, for one rank, for all, and frozen and thawed ones."""
    for kind, all_unused_moves in ((gw.LANS, False), (gw.AdamW, True)):
        model = Noisy()
        model.bias.requires_grad_(False)
        optimizer = distributed(kind, model, model.parameters(), lr=0.01)
        model.loss(0).backward()
        optimizer.step()
        expect(same_bits({"bias": model.bias.detach()}, {"bias": Noisy().bias.detach()}), "frozen")

        before = model.values()
        optimizer.zero_grad(set_to_none=True)
        loss = (model.matrix ** 2).sum()
        if gw.rank() == 0:
            loss = loss + (model.kernel ** 2).sum()
        loss.backward()
        optimizer.step()
        after = model.values()
        expect(not torch.equal(before["kernel"], after["kernel"]), "used on rank 0 alone")
        moved = not torch.equal(before["large"], after["large"])
        expect(moved == all_unused_moves, f"{kind.__name__}, used by nobody: moved is {moved}")

        model.bias.requires_grad_(True)
        before = model.values()
        for step in range(2):
            one_step(model, optimizer, step)
        expect(not torch.equal(before["bias"], model.bias.detach()), "thawed")
        model.bias.requires_grad_(False)
        before = model.values()
        one_step(model, optimizer, 7)
        expect(torch.equal(before["bias"], model.bias.detach()), "frozen again")

        more = nn.Parameter(torch.ones(6))
        optimizer._names[more] = ("more", -9)
        optimizer.add_param_group({"params": [more], "weight_decay": 0})
        (more.sum() + model.loss(8)).backward()
        optimizer.step()
        expect(bool((more < 1).all()), "a group that was added")
        expect_same_on_all(model, f"unused {kind.__name__}")


def dropped_and_not_finite():
    """Averages that are not wanted, and such as are not finite."""
    model = Noisy()
    optimizer = distributed(gw.DistEFSGDM, model)
    model.loss(0).backward()
    optimizer.synchronize()
    optimizer.zero_grad()  # drops them
    one_step(model, optimizer, 1)

    before = model.values()
    model.loss(2).backward(retain_graph=False)
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()

    before = model.values()
    optimizer.zero_grad()
    loss = model.loss(3)
    if gw.rank() == 1:
        loss = loss + model.large.sum() * float("inf")
    loss.backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    expect(any("they are left out on every rank" in str(entry.message) for entry in caught),
           [str(entry.message) for entry in caught])
    after = model.values()
    expect(torch.equal(before["large"], after["large"]), "not finite, and moved")
    expect(not torch.equal(before["matrix"], after["matrix"]), "finite, and stays")
    expect((optimizer.skipped_steps, optimizer.skipped_updates) == (1, 1), "counts")
    one_step(model, optimizer, 4)

    # A closure, and a change that autograd must notice.
    def closure():
        optimizer.zero_grad()
        loss = model.loss(5)
        loss.backward()
        return loss

    expect(optimizer.step(closure) is not None, "the loss of a closure")
    product = (model.matrix * model.matrix).sum()
    one_step(model, optimizer, 6)
    try:
        product.backward()
        expect(False, "a changed parameter went unnoticed")
    except RuntimeError as error:
        expect("modified by an inplace operation" in str(error), error)
    expect_same_on_all(model, "dropped")


def not_packed():
    """Parameters and gradients that do not lie in one piece."""
    ends = []
    for packed in (True, False):
        values = torch.linspace(-1, 1, 24).view(4, 6)
        weight = nn.Parameter(values.clone() if packed else values.t().contiguous().t())
        expect(weight.is_contiguous() == packed, "strides")
        optimizer = gw.DistributedOptimizer(gw.LAMB([weight], lr=0.1), [("weight", weight)])
        for step in range(3):
            optimizer.zero_grad()
            (weight * torch.arange(24.0).view(4, 6) * (step + gw.rank())).sum().backward()
            optimizer.step()
        ends.append({"weight": weight.detach().contiguous()})
    expect(same_bits(*ends), "strides change the result")


def refusals():
    """With compression.filter.type covap, zero_fill, and nothing compressed."""
    model = Noisy()

    def attempt(part, kind, *arguments, **options):
        refused(part, distributed, kind, model, *arguments, **options)

    attempt("shrinks parameters whose gradient is zero", gw.LANS)
    attempt("wants a compressor in both directions", gw.CLAN)
    attempt("has no freeze_step, expected the first step after its warm-up", gw.OneBitAdam)
    attempt("sends momenta, and compression.filter.type is covap", gw.OneBitLAMB, freeze_step=5)
    attempt("method is none, and the program names none either", gw.MethodOptimizer, lr=0.1)
    refused("no method is named 'lens'", distributed, gw.MethodOptimizer, model, lr=0.1,
            method="lens", code=Code.NOT_FOUND)
    attempt("beta1 of method adamw is '1.5'", gw.AdamW, betas=(1.5, 0.9))
    refused("betas is (0.9,), expected two numbers", gw.AdamW, model.parameters(), betas=(0.9,))
    refused("lr is -1", gw.SGD, model.parameters(), lr=-1)
    refused("lr is nan", gw.SGD, model.parameters(), lr=float("nan"))
    attempt("the groups have weight_decay [0.1, 0.2]", gw.AdamW,
            [{"params": [model.matrix], "weight_decay": 0.1},
             {"params": [model.kernel], "weight_decay": 0.2}])
    double = nn.Linear(3, 3).double()
    refused("parameter 'weight' is float64 on cpu, expected float32", distributed, gw.SGD, double,
            double.parameters())
    for named in ({"grad_scaler": object()}, {"compression": gw.Compression.fp16}):
        refused(f"{list(named)[0]} with SGD", gw.DistributedOptimizer, gw.SGD(model.parameters()),
                model.named_parameters(), **named)
    refused("makes steps only behind DistributedOptimizer", gw.SGD(model.parameters()).step)
    mine = {"momentum": 0.5 + 0.25 * gw.rank()}
    if gw.rank() == 1:
        refused("the method of rank 1 is sgd(momentum=0.75,weight_decay=0), that of rank 0 "
                "sgd(momentum=0.5", distributed, gw.SGD, model, **mine)
    else:
        other = gw.SGD(groups_of(model), **mine)
        other.open_method(require())
        other.agree_on_method("Gradient.")  # as the other rank; alone it would go on to declare


def refusals_in_a_job():
    """Nothing filtered or compressed."""
    model = Noisy()
    optimizer = distributed(gw.SGD, model)
    try:
        with optimizer.join():
            pass
        expect(False, "join() was accepted")
    except GradwireError as error:
        expect("would have a state of its own" in str(error), error)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    model.loss(0).backward()
    refused("a group has weight_decay 0.5, expected 0 or 0", optimizer.step)
    optimizer.param_groups[0]["weight_decay"] = 0
    optimizer.zero_grad()
    freezing = distributed(gw.OneBitAdam, Noisy(), freeze_step=5)
    refused("expected it to be the only one", freezing.step)


def filtered():
    """With compression.filter: covap, inactive: skip; what is held back stays."""
    model = Noisy()
    optimizer = distributed(gw.LANS, model)
    stayed = moved = 0
    for step in range(6):
        before = model.large.detach().clone()
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.synchronize()
        active = torch.zeros(model.large.numel(), dtype=torch.bool)
        for first, count in optimizer._pulled[model.large].active_ranges():
            active[first:first + count] = True
        active = active.view_as(model.large)
        expect(not model.large.grad[~active].any(), "what is held back is zero")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        changed = model.large.detach() != before
        expect(not (changed & ~active).any(), "held back, and moved")
        stayed += int((~active).sum())
        moved += int((changed & active).sum())
    expect(stayed > 0 and moved > 0, f"{stayed} stayed, {moved} moved")
    expect_same_on_all(model, "filtered")


def plain_optimizer():
    """The job has a method, and the program another optimizer."""
    model = Noisy()
    optimizer = gw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                        model.named_parameters())
    refused("method is onebit_lamb, which this program does not run", optimizer.step)
    refused("the program makes the method onebit_lamb(beta1=0.5", distributed, gw.OneBitLAMB, model,
            betas=(0.5, 0.9))


def main():
    torch.set_num_threads(1)
    gw.init()
    for scenario in sys.argv[2:]:
        function, *arguments = scenario.split(":")
        globals()[function](*arguments)
    gw.shutdown()
    print("all done", flush=True)


if __name__ == "__main__":
    main()
