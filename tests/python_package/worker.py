#!/usr/bin/python3
"""One worker of a job of package_test.py: runs the scenario that is named and exits with 0 if all is
as it must be.

Usage: worker.py SCENARIO   (in a job of two workers, started by gradwire-launch)
"""

import copy
import os
import pickle
import signal
import sys
import threading
import warnings

import numpy
import gradwire
from checks import expect, refused
from gradwire import Code, GradwireError

DTYPES = ("float32", "float16", "float64", "int8", "uint8", "int32", "int64")
SHAPES = ((), (1,), (0,), (3, 0, 2), (7, 3), (2, 3, 4), (70000,))


def values(shape, dtype, factor):
    """The same numbers on every rank, small enough for all dtypes, times a factor."""
    count = int(numpy.prod(shape))
    return numpy.asarray(numpy.arange(count).reshape(shape) % 11 * factor, dtype)


def types_and_shapes():
    mine = gradwire.rank() + 1
    for dtype in DTYPES:
        for shape in SHAPES:
            name = f"{dtype}{shape}"
            array = values(shape, dtype, mine)
            before = array.copy()
            result = gradwire.push_pull(array, average=False, name=name)
            expect(result.dtype == array.dtype and result.shape == shape, f"{name}: {result.dtype}")
            expect(numpy.array_equal(result, values(shape, dtype, 3)), f"{name}: {result}")
            expect(numpy.array_equal(array, before), f"{name}: the input has changed")
    # What an array's own mean() gives is no array.
    result = gradwire.push_pull(numpy.float32(mine), name="loss")
    expect(result.shape == () and result == 1.5, f"a number of NumPy's: {result}")
    # Beyond what a double holds exactly.
    large = numpy.array([2**60 + 1, -5], dtype=numpy.int64)
    result = gradwire.push_pull(large if mine == 1 else large * 0 + 2, average=False, name="large")
    expect(result.tolist() == [2**60 + 3, -3], f"int64: {result}")


def in_place_and_strides():
    mine = gradwire.rank() + 1
    array = values((6, 4), "float32", 2 * mine)
    result = gradwire.push_pull(array, name="in place", out=array)
    expect(result is array and numpy.array_equal(array, values((6, 4), "float32", 3)), "in place")

    whole = values((6, 8), "float32", 2 * mine)
    before = whole.copy()
    part = whole[::2, 1::3]
    expected = values((6, 8), "float32", 3)[::2, 1::3]
    expect(numpy.array_equal(gradwire.push_pull(part, name="strided"), expected), "strided input")
    expect(numpy.array_equal(whole, before), "the input has changed")
    gradwire.push_pull(part, name="strided", out=part)
    expect(numpy.array_equal(part, expected), "strided in place")
    whole[::2, 1::3] = before[::2, 1::3]
    expect(numpy.array_equal(whole, before), "elements between the strides have changed")

    fortran = numpy.asfortranarray(values((6, 4), "float64", 2 * mine))
    out = numpy.empty((6, 4), "float64", order="F")
    result = gradwire.push_pull(fortran, name="fortran", out=out)
    expect(result is out and numpy.array_equal(out, values((6, 4), "float64", 3)), "fortran")

    raw = numpy.zeros(4 * 10 + 1, numpy.uint8)
    odd = raw[1:].view(numpy.float32)
    odd[:] = 2 * mine
    expect(not odd.flags.aligned, "the test wants an unaligned array")
    gradwire.push_pull(odd, name="odd", out=odd)
    expect(odd.tolist() == [3.0] * 10, f"unaligned: {odd}")

    constant = values((5,), "float32", 2 * mine)
    constant.flags.writeable = False
    expect(numpy.array_equal(gradwire.push_pull(constant, name="constant"),
                             values((5,), "float32", 3)), "read-only input")


def fresh_arrays():
    """A name, not an object, says which tensor it is."""
    for step in range(100):
        gradient = numpy.full(5000, step * (gradwire.rank() + 1), numpy.float32)
        result = gradwire.push_pull(gradient, name="gradient")
        gradwire.end_step()
        expect(numpy.array_equal(result, numpy.full(5000, step * 1.5, numpy.float32)),
               f"step {step}: {result[:3]}")
    counts = gradwire.stats()
    expect(counts["raw_push_bytes"] == 100 * 5000 * 4, f"{counts}")
    expect(counts["sent_bytes"] > 0 and counts["nonfinite_units"] == 0, f"{counts}")


def asynchronous():
    mine = gradwire.rank() + 1
    shapes = {f"layer{i}": (10 + i, 3) for i in range(5)}
    gradwire.declare({name: numpy.empty(shape, numpy.float32) for name, shape in shapes.items()})
    for step in range(10):
        handles = {}
        for name, shape in reversed(shapes.items()):
            handles[name] = gradwire.push_pull_async(
                values(shape, "float32", 2 * mine * step), name=name)  # nobody else holds the array
        gradwire.end_step()
        for name, shape in shapes.items():
            result = gradwire.synchronize(handles[name], timeout=60)
            expect(gradwire.poll(handles[name]), "poll after synchronize")
            expect(numpy.array_equal(result, values(shape, "float32", 3 * step)), f"{name} {step}")
            expect(gradwire.synchronize(handles[name]) is result, "a second synchronize")

    # A step in which rank 1 lacks a member: it counts as zeros.
    pushed = [name for name in shapes if mine == 1 or name != "layer2"]
    handles = [gradwire.push_pull_async(values(shapes[name], "float32", 2), name=name)
               for name in pushed]
    gradwire.end_step()
    for name, handle in zip(pushed, handles):
        factor = 1 if name == "layer2" else 2
        expect(numpy.array_equal(gradwire.synchronize(handle),
                                 values(shapes[name], "float32", factor)), f"{name}: zeros")

    # Never asked for, but complete: its name is free again, and the result is not lost.
    out = numpy.zeros((8, 8), numpy.float32)
    first = gradwire.push_pull_async(values((8, 4), "float32", 2 * mine), name="lazy", out=out[:, ::2])
    deadline = threading.Event()
    for _ in range(6000):
        if gradwire.poll(first):
            break
        deadline.wait(0.01)
    second = gradwire.push_pull_async(values((8, 4), "float32", 4 * mine), name="lazy")
    expect(numpy.array_equal(out[:, ::2], values((8, 4), "float32", 3)), "a result that nobody awaits")
    expect(gradwire.synchronize(first) is not gradwire.synchronize(second), "two results")
    expect(numpy.array_equal(gradwire.synchronize(second), values((8, 4), "float32", 6)), "second")


def deadline():
    array = numpy.ones(1000, numpy.float32)
    gradwire.declare({"slow": array})
    if gradwire.rank() == 0:
        handle = gradwire.push_pull_async(array, name="slow")
        error = refused("tensor 'slow' on rank 0", gradwire.synchronize, handle,
                        timeout=0.05, code=Code.TIMEOUT)
        expect(error.exit_code == 4, f"exit code {error.exit_code}")
        expect(not gradwire.poll(handle), "poll")
        refused("already in flight", gradwire.push_pull_async, array,
                name="slow")
        refused("state_dict while tensor 'slow' is in flight",
                gradwire.state_dict)
        gradwire.barrier()  # only now does rank 1 push
        expect(gradwire.synchronize(handle).sum() == 1000, "the sum")
    else:
        gradwire.barrier()
        gradwire.push_pull(array, name="slow")


def compressed():
    """Values of one size are what every compressor here reproduces; the residual does the rest."""
    mine = gradwire.rank() + 1
    signs = numpy.where(numpy.sin(numpy.arange(40000)) < 0, -1, 1).astype(numpy.float32)
    total = numpy.zeros_like(signs)
    for _ in range(20):
        total += gradwire.push_pull(signs * mine, name="w")
        gradwire.end_step()
    kind = os.environ["GRADWIRE_COMPRESSION_UPLINK_COMPRESSOR"]
    # All that is missing is in the residuals. Values that are all of one size go in turn with topk,
    # a fifth each round, so workers and server each hold back at most five rounds of 1.5.
    tolerance = {"none": 0, "topk": 2 * 5 * 1.5}.get(kind, 0.01 * 30)
    worst = numpy.abs(total - 30 * signs).max()
    expect(worst <= tolerance, f"{kind}: off by {worst}, at most {tolerance}")
    counts = gradwire.stats()
    ratio = counts["raw_push_bytes"] / counts["sent_bytes"]
    least = {"none": 0.9, "fp16": 1.9, "bf16": 1.9, "onebit": 25, "topk": 2}[kind]
    expect(ratio > least, f"{kind}: ratio {ratio}")


def not_finite():
    mine = gradwire.rank() + 1
    sizes = {"good": 20000, "small": 50, "bad": 100}  # the small ones travel together
    arrays = {name: numpy.full(size, mine, numpy.float32) for name, size in sizes.items()}
    gradwire.declare(arrays)
    for step in range(3):
        if mine == 1:
            arrays["bad"][7] = numpy.inf if step == 1 else mine
        handles = {name: gradwire.push_pull_async(array, name=name)
                   for name, array in arrays.items()}
        expect(not handles["bad"].nonfinite, "before it is synchronized")
        gradwire.end_step()
        results = {name: gradwire.synchronize(handle) for name, handle in handles.items()}
        for name, handle in handles.items():
            is_void = step == 1 and name != "good"
            expect(bool(numpy.isnan(results[name]).any()) == is_void, f"{name} in step {step}")
            expect((handle.nonfinite, handle.nonfinite_ranks) == (is_void, (0,) if is_void else ()),
                   f"{name} in step {step}: {handle.nonfinite}, {handle.nonfinite_ranks}")
        if step == 1:
            kept = handles["bad"]
    expect(kept.nonfinite and kept.nonfinite_ranks == (0,), "a handle keeps what it knows")
    handle = gradwire.push_pull_async(numpy.full(4, 3e38, numpy.float32), average=False, name="sum")
    gradwire.end_step()
    expect(numpy.isnan(gradwire.synchronize(handle)).all(), "a sum that overflows")
    expect(handle.nonfinite and handle.nonfinite_ranks == (), "nobody's fault")


def worth():
    """One line says after 50 steps what compression is worth."""
    gradient = numpy.ones(100000, numpy.float32)
    for _ in range(int(os.environ["STEPS"])):
        gradwire.push_pull(gradient, name="gradient")
        gradwire.end_step()
    counts = gradwire.stats()
    expect(counts["goodput"] > 0, f"{counts}")
    is_compressed = os.environ["COMPRESSED"] == "yes"
    for name in ("compression_saves_ms", "compression_costs_ms"):
        expect((counts[name] > 0) == is_compressed, f"{counts}")
    for name in ("step_ms", "comm_ms", "compute_ms", "exposed_ms", "ccr"):
        expect(counts[name] > 0, f"{counts}")
    expect(counts["step_ms"] >= counts["compute_ms"] + counts["exposed_ms"], f"{counts}")


def plan():
    """What has been declared, as the configuration compresses it."""
    gradwire.declare({"w": numpy.zeros((300, 1000), numpy.float32), "b": numpy.zeros(7, numpy.int64)})
    known = gradwire.plan()
    expect((known["workers"], known["servers"], known["lanes"]) == (2, 1, 1), f"{known}")
    parts = [(member, unit) for unit in known["units"] for member in unit["members"]]
    whole = sum(member["elements"] for member, _ in parts if member["tensor"] == "w")
    expect(whole == 300000, f"{parts}")
    first, integers = parts[0][1], parts[-1][1]
    expect((first["dtype"], first["op"]) == ("float32", "average"), f"{first}")
    expect([phase["first_step"] for phase in first["phases"]] == [0, 5], f"{first}")
    expect(first["phases"][0]["uplink"] == "none", f"{first}")
    steady = first["phases"][1]
    expect((steady["uplink"], steady["uplink_class"], steady["uplink_feedback"],
            steady["downlink"], steady["downlink_class"], steady["downlink_feedback"])
           == ("onebit", "contractive", "ef", "none", "exact", "none"), f"{steady}")
    expect(integers["dtype"] == "int64" and len(integers["phases"]) == 1, f"{integers}")


def broadcasts():
    rank = gradwire.rank()
    everything = [
        numpy.arange(1000, dtype=numpy.float32), numpy.array([True, False]), numpy.array(7, "int16"),
        numpy.array([1 + 2j]), numpy.zeros((0, 3)), numpy.array(["some", "text"]),
        numpy.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]), numpy.array([3], dtype=">u2"),
        numpy.asfortranarray(numpy.arange(12.0).reshape(3, 4)), numpy.arange(20)[::3],
        numpy.array([numpy.nan, -0.0, numpy.inf])]
    for i, expected in enumerate(everything):
        array = expected if rank == 1 else numpy.zeros_like(expected)
        result = gradwire.broadcast(array, root=1, name=f"b{i}")
        expect(result is array, f"{i}: another object")
        expect(array.tobytes() == expected.tobytes(), f"{i}: {array} is not {expected}")
    constant = numpy.ones(3)
    if rank == 0:
        constant.flags.writeable = False  # the root's own is only read
    else:
        constant[:] = 0
    gradwire.broadcast(constant, name="constant")
    expect(constant.tolist() == [1, 1, 1], "from a read-only array")
    refused("Python objects", gradwire.broadcast, numpy.array([{}]), name="o")
    refused("root is 2", gradwire.broadcast, numpy.zeros(1), root=2, name="r")
    refused("no name", gradwire.broadcast, numpy.zeros(1))


def wrong_calls():
    refused("initialized already", gradwire.init)
    array = numpy.ones(4, numpy.float32)
    for dtype in ("bool", "complex64", "uint16", "int16", "uint64", "datetime64[s]", "object"):
        name = numpy.dtype(dtype).name
        refused(f"tensor 'x' is {name}", gradwire.push_pull,
                numpy.zeros(3, dtype), name="x")
    refused("other byte order", gradwire.push_pull,
            numpy.ones(3, numpy.dtype("f4").newbyteorder()), name="x")
    refused("has no name of its own", gradwire.push_pull, array)
    refused("0 bytes, expected 1 to 1024", gradwire.push_pull, array, name="")
    refused("zero byte", gradwire.push_pull, array, name="a\0b")
    for wrong in ([1.0, 2.0], 3.0, None):
        try:
            gradwire.push_pull(wrong, name="x")
        except TypeError as error:
            expect(type(wrong).__name__ in str(error), str(error))
        else:
            raise AssertionError(f"{wrong!r} was accepted")
    gradwire.push_pull(array, name="w")
    refused("tensor 'w' has shape [5], it was declared with [4]",
            gradwire.push_pull, numpy.ones(5, numpy.float32), name="w")
    refused("tensor 'w' is float64, it was declared as float32",
            gradwire.push_pull, numpy.ones(4), name="w")
    refused("wanted as a sum, it was declared as an average",
            gradwire.push_pull, array, average=False, name="w")
    refused("expected float32 of [4]", gradwire.push_pull, array, name="w",
            out=numpy.ones(4))
    constant = numpy.ones(4, numpy.float32)
    constant.flags.writeable = False
    refused("can't be written", gradwire.push_pull, array, name="w",
            out=constant)
    both = numpy.ones(6, numpy.float32)
    refused("overlap", gradwire.push_pull, both[:4], name="w", out=both[2:])
    # Nothing of this has hurt the job.
    expect(gradwire.push_pull(array, name="w").tolist() == [1.0] * 4, "the job goes on")


def differing():
    """What the ranks declare differently ends the job, on both with the same words."""
    error = refused("[2] on rank 0", gradwire.declare,
                    {"v": numpy.ones(2 + gradwire.rank())})
    copy = pickle.loads(pickle.dumps(error))
    expect((copy.code, str(copy), copy.exit_code) == (error.code, str(error), error.exit_code),
           "an error goes through pickle")
    refused(str(error), gradwire.barrier, code=error.code)


def state():
    gradwire.load_state_dict(gradwire.state_dict())  # nothing is declared yet
    rng = numpy.random.default_rng(gradwire.rank())
    first, second, third = (rng.standard_normal(20000).astype(numpy.float32) for _ in range(3))
    gradwire.push_pull(first, name="w")
    gradwire.end_step()
    saved = gradwire.state_dict()
    expect((saved["version"], saved["rank"], saved["size"]) == (2, gradwire.rank(), 2), "a state")
    expect(len(saved["state"]) > 80000 and saved["plan"] == gradwire.plan(), "a state")
    expected = [gradwire.push_pull(array, name="w") for array in (second, third)]
    expect(gradwire.state_dict()["state"] != saved["state"], "the residual has not changed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradwire.load_state_dict(pickle.loads(pickle.dumps(saved)))
    expect(not caught, f"{caught}")
    expect(gradwire.state_dict() == saved, "the state is another one")
    refused_states(saved)
    expect(gradwire.state_dict() == saved, "a refused state has changed something")
    for array, result in zip((second, third), expected):
        expect(numpy.array_equal(gradwire.push_pull(array, name="w"), result), "another result")

    # Of a job that sent everything with topk.
    other = copy.deepcopy(saved)
    for unit in other["plan"]["units"]:
        for phase in unit["phases"]:
            phase.update(uplink="topk(ratio=0.01)", downlink="none", downlink_feedback="none")
        later = copy.deepcopy(unit)
        later["members"][0]["tensor"] = "later"
    other["plan"]["units"].append(later)
    words = (" is compressed otherwise than when the state was saved: it was topk(ratio=0.01) with ef up "
             "and none down, it is onebit with ef up and onebit with ef down")
    for call, name in ((lambda: gradwire.load_state_dict(other), "w"),
                       (lambda: gradwire.declare({"later": first}), "later"),
                       (lambda: gradwire.declare({"last": first}), None)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        texts = [str(warning.message) for warning in caught]
        if name is None or gradwire.rank() != 0:
            expect(texts == [], f"{texts}")
        else:
            expect(len(texts) == 1 and texts[0].startswith(f"tensor '{name}'" + words), f"{texts}")


def refused_states(saved):
    refused("it lacks rank, size, plan, state", gradwire.load_state_dict,
            {"version": 2})
    refused("the state has version 1, expected 2", gradwire.load_state_dict,
            {"version": 1, "rank": 0, "size": 2, "residuals": b""})
    refused("no state of gradwire but a bytes", gradwire.load_state_dict,
            saved["state"])
    refused("'state' is a str, expected bytes", gradwire.load_state_dict,
            dict(saved, state="text"))
    for plan_of_nothing in (None, {}, {"units": [{}]}, {"units": 3}):
        refused("'plan' is no plan", gradwire.load_state_dict,
                dict(saved, plan=plan_of_nothing))


def damaged_state():
    """On one rank alone: the other is told."""
    saved = gradwire.state_dict()
    if gradwire.rank() == 1:
        saved["state"] = saved["state"][:-1]
    refused("the saved state is damaged", gradwire.load_state_dict, saved, code=Code.CORRUPT_DATA)


def state_of_another_rank():
    saved = gradwire.state_dict()
    theirs = numpy.frombuffer(saved["state"], numpy.uint8).copy()
    gradwire.broadcast(theirs, name="state")
    refused("rank 1 restores the state of rank 0", gradwire.load_state_dict,
            dict(saved, state=theirs.tobytes()))


def scales():
    names = ("plain", "scaled")
    arrays = {name: numpy.zeros(20000, numpy.float32) for name in names}
    gradwire.declare(arrays)
    refused("no learning rate was given", gradwire.push_pull,
            arrays["plain"], name="plain")
    refused("'unknown', which is not declared", gradwire.set_learning_rate,
            0.1, ["plain", "unknown"])
    for wrong in (-1.0, float("nan"), float("inf")):
        refused("learning rate is", gradwire.set_learning_rate, wrong)
        refused("loss scale is", gradwire.set_loss_scale, wrong)
    gradwire.set_learning_rate(0.1, names=["plain"])
    refused("tensor 'scaled'", gradwire.push_pull, arrays["scaled"],
            name="scaled")
    rng = numpy.random.default_rng(gradwire.rank())
    for step in range(12):
        rate, scale = 0.1 / 2 ** (step // 3), 1024 * 2 ** (step % 4)
        gradwire.set_learning_rate(rate)
        gradient = rng.standard_normal(20000).astype(numpy.float32)
        gradwire.set_loss_scale(0)
        plain = gradwire.push_pull(gradient, name="plain")
        gradwire.set_loss_scale(scale)
        scaled = gradwire.push_pull(gradient * numpy.float32(scale), name="scaled")
        expect(numpy.array_equal(scaled / numpy.float32(scale), plain), f"step {step}")
        gradwire.end_step()


def forked():
    array = numpy.ones(4, numpy.float32)
    handle = gradwire.push_pull_async(array, name="w")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)  # whatever happens, it ends
            for call in (gradwire.rank, gradwire.barrier, gradwire.stats, gradwire.shutdown,
                         lambda: gradwire.push_pull(array, name="w"),
                         lambda: gradwire.synchronize(handle), lambda: gradwire.poll(handle)):
                try:
                    call()
                except GradwireError as error:
                    if "was forked from it" not in str(error):
                        raise
                else:
                    raise AssertionError("a call in a forked process was accepted")
            if gradwire.is_initialized():
                raise AssertionError("a forked process counts as initialized")
            code = 0
        except BaseException as error:  # pylint: disable=broad-except
            print(f"in the forked process: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    expect(status == 0, f"the forked process ended with {status}")
    expect(gradwire.synchronize(handle).tolist() == [1.0] * 4, "the job goes on")


def no_farewell():
    """A program that just ends is no error for the others."""
    gradwire.push_pull(numpy.ones(3, numpy.float32), name="w")


def lost_peer():
    """Rank 1 ends in the middle; rank 0 learns who it was, and exits as it should."""
    array = numpy.ones(4, numpy.float32)
    gradwire.declare({"left": array})
    gradwire.declare({"right": array})
    if gradwire.rank() == 1:
        gradwire.push_pull_async(array, name="right")
        sys.exit(0)
    try:
        gradwire.push_pull(array, name="left")
    except GradwireError as error:
        expect(error.code == Code.UNAVAILABLE and "worker 1" in str(error), repr(error))
        print("rank 0 knows", flush=True)
        sys.exit(error.exit_code)
    raise AssertionError("the push-pull has completed")


def filtered():
    """A step sends one of two units; with skip the other half of `out` stays."""
    array = numpy.ones(8192, numpy.float32)
    for step in range(4):
        out = numpy.full(8192, -1, numpy.float32)
        handle = gradwire.push_pull_async(array, average=False, name="w", out=out)
        gradwire.end_step()
        gradwire.synchronize(handle)
        expect(handle.active_ranges() == [(step % 2 * 4096, 4096)], f"{handle.active_ranges()}")
        sent, held = out.reshape(2, 4096)[[step % 2, 1 - step % 2]]
        kept = -1 if gradwire.plan()["filter"]["inactive"] == "skip" else 0
        expect((sent > 0).all() and (held == kept).all(), f"step {step}: {sent[0]}, {held[0]}")
    plan = gradwire.plan()
    expect(plan["filter"]["stages"][0]["interval"] == 2, str(plan["filter"]))
    expect([unit["filter_classes"] for unit in plan["units"]] == [[0], [1]], "classes")
    expect(gradwire.stats()["held_back_units"] == 4, str(gradwire.stats()))
    expect(gradwire.stats()["interval"] == 2, str(gradwire.stats()))
    # What is left alone of an array that the package makes is zeros.
    fresh = gradwire.push_pull(array, average=False, name="w")
    expect((fresh[4096:] == 0).all() and (fresh[:4096] > 0).all(), "a fresh array")


SCENARIOS = {function.__name__: function for function in (
    types_and_shapes, in_place_and_strides, fresh_arrays, asynchronous, deadline, compressed,
    not_finite, worth, filtered, plan, broadcasts, wrong_calls, differing, state, damaged_state,
    state_of_another_rank, scales, forked, no_farewell, lost_peer)}


def main():
    scenario = sys.argv[1]
    gradwire.init()
    expect(gradwire.is_initialized() and gradwire.size() == 2 and gradwire.rank() in (0, 1), "init")
    local = tuple(int(os.environ["GRADWIRE_LOCAL_" + name]) for name in ("RANK", "SIZE"))
    expect((gradwire.local_rank(), gradwire.local_size()) == local,
           f"local rank {gradwire.local_rank()} of {gradwire.local_size()}, expected {local}")
    SCENARIOS[scenario]()
    if scenario not in ("no_farewell", "differing", "damaged_state", "state_of_another_rank"):
        gradwire.shutdown()
        gradwire.shutdown()
        assert not gradwire.is_initialized()
    print(f"{scenario} done", flush=True)


if __name__ == "__main__":
    main()
