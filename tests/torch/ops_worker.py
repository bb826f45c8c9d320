#!/usr/bin/python3
"""One worker of a job of ops_test.py: runs the scenarios that are named and exits with 0 if all is as it
must be.

Usage: ops_worker.py SCENARIO...   (in a job of two workers, started by gradwire-launch)
"""

import sys
import time

import numpy
import torch
from torch import nn

import gradwire
import gradwire.torch as gw
from gradwire.torch import Code

from checks import expect, refused

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
SHAPES = ((), (1,), (0,), (3, 0, 2), (7, 3), (2, 3, 4), (70000,))


def values(shape, dtype, factor):
    """The same numbers on every rank, small enough for all dtypes, times a factor."""
    count = int(numpy.prod(shape))
    return (torch.arange(count).reshape(shape) % 11 * factor).to(dtype)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def bits(tensor):
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy().tobytes()


def dtypes_and_shapes():
    mine = gw.rank() + 1
    for dtype in FLOATS + INTEGERS:
        for shape in SHAPES:
            name = f"{dtype}{shape}"
            tensor = values(shape, dtype, 2 * mine)
            before = tensor.clone()
            total = gw.push_pull(tensor, average=False, name=f"{name} sum")
            expect(same(total, values(shape, dtype, 6)), f"{name}: sum {total}")
            mean = gw.push_pull(tensor, name=f"{name} mean")
            expect(same(mean, values(shape, dtype, 3)), f"{name}: mean {mean}")
            expect(same(tensor, before), f"{name}: the input has changed")
            result = gw.push_pull_inplace(tensor, name=f"{name} mean")
            expect(same(tensor, values(shape, dtype, 3)), f"{name}: in place {tensor}")
            expect(result.data_ptr() == tensor.data_ptr(), f"{name}: in place, elsewhere")
    # Beyond what a double holds exactly.
    large = torch.tensor([2**60 + 1, -5])
    total = gw.push_pull(large if mine == 1 else torch.full_like(large, 2), average=False, name="large")
    expect(total.tolist() == [2**60 + 3, -3], f"int64: {total}")
    half = gw.push_pull(torch.tensor([mine, -mine]), name="rounded")
    expect(half.tolist() == [1, -2], f"averages of integers are rounded down: {half}")


def fresh_tensors():
    """A name, not an object, says which tensor it is."""
    for step in range(100):
        gradient = torch.full((50, 100), float(step * (gw.rank() + 1)))
        result = gw.push_pull(gradient, name="gradient")
        gw.end_step()
        expect(same(result, torch.full((50, 100), step * 1.5)), f"step {step}: {result[0, :3]}")
    # `version` is BytePS's, and means nothing.
    result = gw.push_pull(torch.ones(50, 100), True, "gradient", 7, 3)
    expect(same(result, torch.ones(50, 100)), "with all arguments by position")


def strides():
    mine = gw.rank() + 1
    whole = values((6, 8), torch.float32, 2 * mine)
    before = whole.clone()
    expected = values((6, 8), torch.float32, 3)
    parts = {"columns": (slice(None), slice(2, 5)), "every second": (slice(None, None, 2), slice(1, 8, 3)),
             "one column": (slice(None), 3), "rows": (slice(2, 4), slice(None))}
    for name, part in parts.items():
        result = gw.push_pull(whole[part], name=name)
        expect(same(result, expected[part]) and result.is_contiguous(), f"{name}: {result}")
        expect(same(whole, before), f"{name}: the input has changed")
        gw.push_pull_inplace(whole[part], name=name)
        expect(same(whole[part], expected[part]), f"{name} in place: {whole[part]}")
        whole[part] = before[part]
        expect(same(whole, before), f"{name}: what lies between has changed")
    expect(same(gw.push_pull(whole.t(), name="transposed"), expected.t()), "transposed")
    gw.push_pull_inplace(whole.t(), name="transposed")
    expect(same(whole, expected), "transposed, in place")

    image = values((2, 3, 4, 5), torch.float32, 2 * mine).contiguous(memory_format=torch.channels_last)
    gw.push_pull_inplace(image, name="channels last")
    expect(same(image, values((2, 3, 4, 5), torch.float32, 3)), "channels last")
    expect(image.is_contiguous(memory_format=torch.channels_last), "channels last: another order")

    one = torch.full((1, 3), 2.0 * mine).expand(4, 3)
    expect(same(gw.push_pull(one, name="expanded"), torch.full((4, 3), 3.0)), "expanded")
    negative = torch.complex(torch.zeros(4), torch.full((4,), 2.0 * mine)).conj().imag
    expect(negative.is_neg(), "the test wants a tensor that is negated later")
    expect(same(gw.push_pull(negative, name="negative"), torch.full((4,), -3.0)), "negated later")


def gradients_required():
    mine = gw.rank() + 1
    leaf = nn.Parameter(torch.full((5,), 2.0 * mine))
    result = gw.push_pull(leaf, name="leaf")
    expect(not result.requires_grad and result.tolist() == [3.0] * 5, f"of a leaf: {result}")
    result = gw.push_pull(leaf * 2, name="leaf")
    expect(not result.requires_grad and result.tolist() == [6.0] * 5, f"of a product: {result}")
    gw.push_pull_inplace(leaf, name="leaf")
    expect(leaf.requires_grad and leaf.is_leaf and leaf.tolist() == [3.0] * 5, f"in place: {leaf}")
    (leaf * mine).sum().backward()
    gw.push_pull_inplace(leaf.grad, name="leaf")
    expect(leaf.grad.tolist() == [1.5] * 5, f"gradient: {leaf.grad}")


def asynchronous():
    mine = gw.rank() + 1
    shapes = {f"layer{i}": (10 + i, 3) for i in range(5)}
    gw.declare({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    for step in range(5):
        handles = {name: gw.push_pull_async_inplace(values(shape, torch.float32, 2 * mine * step),
                                                    name=name)  # nobody else holds the tensor
                   for name, shape in reversed(shapes.items())}
        gw.end_step()
        for name, handle in handles.items():
            result = gw.synchronize(handle, timeout=60)
            expect(gw.poll(handle), "poll after synchronize")
            expect(same(result, values(shapes[name], torch.float32, 3 * step)), f"{name} {step}")
            expect(gw.synchronize(handle) is result, "a second synchronize")

    tensor = torch.ones(1000)
    gw.declare({"slow": tensor})
    if mine == 1:
        handle = gw.push_pull_async(tensor, name="slow")
        refused("tensor 'slow' on rank 0", gw.synchronize, handle, timeout=0.05, code=Code.TIMEOUT)
        expect(not gw.poll(handle), "poll")
        refused("already in flight", gw.push_pull_async, tensor, name="slow")
        gw.barrier()  # only now does rank 1 push
        expect(gw.synchronize(handle).sum() == 1000, "the sum")
    else:
        gw.barrier()
        gw.push_pull(tensor, name="slow")

    # The average may come just when the caller's time is over: then it is there.
    client = gradwire._client.current()
    look = client.is_complete

    def look_later(handle):
        client.is_complete = look
        gw.barrier()
        while not look(handle):
            time.sleep(0.001)
        return True

    gw.declare({"late": tensor[::2]})
    if mine == 1:
        handle = gw.push_pull_async(tensor[::2], name="late")
        client.is_complete = look_later
        expect(gw.synchronize(handle, timeout=0.01).sum() == 500, "a result at the last moment")
    else:
        gw.barrier()
        gw.push_pull(tensor[::2], name="late")


def cast():
    mine = gw.rank() + 1
    for dtype in FLOATS + INTEGERS:
        tensor = values((9, 5), dtype, 2 * mine)
        result = gw.push_pull(tensor, name=f"cast {dtype}", compression=gw.Compression.fp16)
        expect(same(result, values((9, 5), dtype, 3)), f"{dtype}: {result}")
        gw.push_pull_inplace(tensor[:, ::2], name=f"cast {dtype} part", compression=gw.Compression.fp16)
        expect(same(tensor[:, ::2], values((9, 5), dtype, 3)[:, ::2]), f"{dtype} in place: {tensor}")
    before = gw.stats()["raw_push_bytes"]
    gw.push_pull(torch.ones(1000), name="cast", compression=gw.Compression.fp16)
    expect(gw.stats()["raw_push_bytes"] - before == 2000, "4 bytes an element went out")


def wrong_calls():
    for dtype in (torch.bool, torch.complex64, torch.complex128, torch.int16):
        for call in (gw.push_pull, gw.push_pull_inplace, gw.push_pull_async, gw.push_pull_async_inplace):
            refused(f"tensor 'x' is {dtype}, expected one of", call,
                    torch.zeros(3, dtype=dtype), name="x")
        refused(f"tensor 'x' is {dtype}", gw.declare,
                {"x": torch.zeros(3, dtype=dtype)})
    refused("tensor 'x' is sparse", gw.push_pull,
            torch.eye(3).to_sparse(), name="x")
    # A tensor on a device has no address that may be read; nothing was declared either.
    for call in (gw.push_pull, gw.push_pull_inplace, gw.push_pull_async, gw.push_pull_async_inplace):
        refused("tensor 'x' is on meta", call, torch.zeros(3, device="meta"),
                name="x")
        refused("tensor 'x' is on meta", call,
                torch.zeros(4, 4, device="meta")[:, 1], name="x")
    refused("is on meta", gw.broadcast_parameters,
            {"x": torch.zeros(3, device="meta")}, root_rank=0)
    expect(gw.push_pull(torch.ones(5), name="x").tolist() == [1.0] * 5, "the name is still free")

    refused("needs a name", gw.push_pull, torch.ones(4))
    refused("zero byte", gw.push_pull, torch.ones(4), name="a\0b")
    for wrong in ([1.0, 2.0], 3.0, None, numpy.ones(3)):
        try:
            gw.push_pull(wrong, name="x")
        except TypeError as error:
            expect(type(wrong).__name__ in str(error) and "'x'" in str(error), str(error))
        else:
            raise AssertionError(f"{wrong!r} was accepted")
    tensor = torch.ones(4)
    gw.push_pull(tensor, name="w")
    refused("tensor 'w' has shape [5], it was declared with [4]", gw.push_pull,
            torch.ones(5), name="w")
    refused("tensor 'w' is float64, it was declared as float32", gw.push_pull,
            tensor.double(), name="w")
    refused("wanted as a sum, it was declared as an average", gw.push_pull,
            tensor, average=False, name="w")
    expect(gw.push_pull(tensor, name="w").tolist() == [1.0] * 4, "the job goes on")


def broadcasts():
    """Byte for byte, whatever is configured for gradients."""
    # Quiet and signalling NaN with something in them, infinities, both zeros, a denormal number.
    odd = numpy.array([0x7fc12345, 0xffc54321, 0x7f812345, 0x7f800000, 0xff800000, 0x80000000, 0,
                       1, 0x3f800001], numpy.uint32).view(numpy.float32)
    generator = torch.Generator().manual_seed(5)
    everything = {
        "odd": torch.from_numpy(odd.copy()),
        "large": torch.randn(300, 400, generator=generator),
        "counter": torch.tensor([2**40 + 1, -2**50 - 3, 2**62 + 7]), "number": torch.tensor(2**41 + 1),
        "mask": torch.rand(1000, generator=generator) < 0.5, "one mask": torch.tensor(True),
        "complex": torch.tensor([1 + 2j, float("nan") * 1j]), "short": torch.tensor([-7], dtype=torch.int16),
        "half": torch.randn(100, generator=generator).half(),
        "brain": torch.randn(100, generator=generator).bfloat16(),
        "double": torch.randn(100, generator=generator).double() * 1e-310, "empty": torch.zeros(0, 3),
        "strided": torch.randn(8, 9, generator=generator)[::2, 1::3],
        "transposed": torch.randn(8, 9, generator=generator).t(),
        "parameter": nn.Parameter(torch.randn(5, generator=generator))}
    for root in (0, 1):
        mine = {name: tensor.detach().clone() if root == gw.rank() else torch.zeros_like(tensor)
                for name, tensor in everything.items()}
        mine["parameter"] = nn.Parameter(mine["parameter"])
        if root != gw.rank():
            mine["strided"] = torch.zeros(8, 9)[::2, 1::3]
            mine["transposed"] = torch.zeros(8, 9).t()
        places = {name: tensor.data_ptr() for name, tensor in mine.items()}
        gw.broadcast_parameters(mine, root_rank=root, prefix=f"from {root}.")
        for name, tensor in everything.items():
            expect(bits(mine[name]) == bits(tensor), f"root {root}, {name}: {mine[name]}")
            expect(mine[name].data_ptr() == places[name], f"root {root}, {name}: another place")

    torch.manual_seed(gw.rank())
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40))
    model(torch.randn(8, 30))
    if gw.rank() == 0:
        model[1].num_batches_tracked += 2**45
    gw.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40))
    expected(torch.randn(8, 30))
    expected[1].num_batches_tracked += 2**45
    for name, tensor in expected.state_dict().items():
        expect(bits(model.state_dict()[name]) == bits(tensor), f"{name}: {model.state_dict()[name]}")
    gw.broadcast_parameters(model.named_parameters(), root_rank=1, prefix="pairs.")

    refused("root is 2", gw.broadcast_parameters, {}, root_rank=2)
    other = {"a": torch.zeros(3 + gw.rank())}
    if gw.rank() == 0:
        gw.broadcast_parameters({}, root_rank=0, prefix="differing.")
    else:
        refused("rank 1 broadcasts 1 tensors, rank 0 0", gw.broadcast_parameters,
                other, root_rank=0, prefix="differing.")


def typed(value):
    """Something to compare that tells 1 from 1.0 and True, and tensors by their bits."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), bits(value))
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [typed(item) for item in value])
    return (type(value).__name__, value)


def three_steps(kind, **options):
    """A model and its optimizer after three steps, the same wherever it is called."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 2))
    optimizer = kind([{"params": model[0].parameters(), **options}, {"params": model[1].parameters()}],
                     lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 40)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def optimizer_states():
    adam = {"lr": 0.1 + 0.2, "betas": (0.8, 0.99), "eps": 1e-12, "amsgrad": True}
    for number, (kind, options) in enumerate((
            (torch.optim.Adam, adam), (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
            (torch.optim.SGD, {}), (torch.optim.Rprop, {}), (torch.optim.RMSprop, {"centered": True}))):
        _, expected = three_steps(kind, **options)
        expected.param_groups[1].update(lr=7, note="text", nothing=None, flag=True, counter=2**45 + 1,
                                        several=[1, 2.0, (None, False)], numpy=numpy.float64(0.1))
        if gw.rank() == 0:
            optimizer = expected
        else:
            torch.manual_seed(9)
            model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 2))
            optimizer = kind([{"params": model[0].parameters()}, {"params": model[1].parameters()}],
                             lr=0.5)
            optimizer.param_groups[0]["left over"] = 1
        gw.broadcast_optimizer_state(optimizer, root_rank=0, prefix=f"{number}.")
        mine, root = optimizer.state_dict(), expected.state_dict()
        if gw.rank() != 0:
            root["param_groups"][1]["numpy"] = 0.1  # a number of Python's own
        expect(typed(mine["param_groups"]) == typed(root["param_groups"]),
               f"{kind.__name__}: {mine['param_groups']} is not {root['param_groups']}")
        expect(typed(mine["state"]) == typed(root["state"]), f"{kind.__name__}: another state")

    # It is a state to go on with: the next step is the same.
    model, optimizer = three_steps(torch.optim.Adam, **adam)
    if gw.rank() == 1:
        again = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 2))
        again.load_state_dict(model.state_dict())
        model = again
        optimizer = torch.optim.Adam([{"params": model[0].parameters()},
                                      {"params": model[1].parameters()}])
    gw.broadcast_optimizer_state(optimizer, root_rank=0, prefix="goes on.")
    optimizer.zero_grad()
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        theirs = parameter.detach().clone()
        gw.broadcast_parameters({name: theirs}, root_rank=0, prefix="after.")
        expect(bits(theirs) == bits(parameter), f"{name} differs after the next step")

    kinds = (torch.optim.SGD, torch.optim.Adagrad)
    parameter = nn.Parameter(torch.zeros(3))
    other = kinds[gw.rank()]([parameter], lr=0.1)
    if gw.rank() == 1:
        refused("rank 1 has a Adagrad and not a SGD", gw.broadcast_optimizer_state,
                other, root_rank=0, prefix="kinds.")
    else:
        gw.broadcast_optimizer_state(other, root_rank=0, prefix="kinds.")


class Numbers(torch.utils.data.Dataset):
    """Items that a forked process makes, with or without Gradwire."""

    def __init__(self, use):
        self.use = use

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.use()
        return torch.full((3,), float(index))


def data_loaders():
    gw.push_pull(torch.ones(3), name="before")
    loader = torch.utils.data.DataLoader(Numbers(lambda: None), batch_size=2, num_workers=2,
                                         timeout=60)
    for _ in range(2):
        for number, items in enumerate(loader):
            result = gw.push_pull(items * (gw.rank() + 1), name="item")
            expect(same(result, items * 1.5) and items[0, 0] == 2 * number, f"{items}: {result}")
    calls = {"push_pull": lambda: gw.push_pull(torch.ones(3), name="item"),
             "declare": lambda: gw.declare({"new": torch.ones(3)}), "end_step": gw.end_step,
             "broadcast": lambda: gw.broadcast_parameters({"new": torch.ones(3)}, root_rank=0)}
    for name, call in calls.items():
        loader = torch.utils.data.DataLoader(Numbers(call), num_workers=1, timeout=60)
        try:
            next(iter(loader))
        except RuntimeError as error:
            expect("GradwireError" in str(error) and "was forked from it" in str(error),
                   f"{name}: {error}")
        else:
            raise AssertionError(f"{name} in a process of a data loader was accepted")
    expect(gw.push_pull(torch.ones(3), name="before").sum() == 3, "the job goes on")


SCENARIOS = {function.__name__: function for function in (
    dtypes_and_shapes, fresh_tensors, strides, gradients_required, asynchronous, cast, wrong_calls,
    broadcasts, optimizer_states, data_loaders)}


def main():
    torch.set_num_threads(1)
    gw.init()
    expect(gw.size() == 2 and gw.local_size() == 2 and gw.local_rank() == gw.rank(), "who is who")
    for scenario in sys.argv[1:]:
        SCENARIOS[scenario]()
    gw.shutdown()
    print("all done", flush=True)


if __name__ == "__main__":
    main()
