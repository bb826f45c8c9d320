#!/usr/bin/python3
"""Staging of device tensors, with a fake device whose copies the test lets happen, in any order.

Exit code 77: there is no PyTorch. TEST_SEED repeats a random run.
"""

import contextlib
import faulthandler
import os
import pathlib
import random
import subprocess
import sys
import threading
import unittest
import warnings
import weakref
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "worker" / "python"))

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own
        import torch
except ImportError:
    print("SKIPPED: PyTorch is not installed")
    sys.exit(77)

from gradwire.torch import _ops, _staging  # noqa: E402
from gradwire.torch._staging import Code, GradwireError, Staging, State  # noqa: E402

DEADLINE_S = 60  # for what must happen; nothing takes that long unless it is broken


class Event:
    """Happens when the test says so; then the copy is done, or has failed."""

    def __init__(self, copy, automatic):
        self.copy = copy
        self.happened = threading.Event()
        self.error = None
        if automatic:
            self.complete()

    def complete(self):
        self.copy()
        self.happened.set()

    def fail(self, text):
        self.error = RuntimeError(text)
        self.happened.set()


class FakeDevice(_staging.Device):
    """Device tensors are CPU tensors here; copies happen when their event does."""

    def __init__(self, automatic=False):
        self.automatic = automatic
        self.pinned = []  # every buffer made, in order
        self.out, self.into = {}, {}  # the last event, by the address of the device tensor
        self.followed = []
        self.refuse = None  # what the next queueing raises

    def _queue(self, copy):
        if self.refuse is not None:
            error, self.refuse = self.refuse, None
            raise error
        return Event(copy, self.automatic)

    def pinned_like(self, tensor):
        self.pinned.append(torch.full_like(tensor, -77))
        return self.pinned[-1]

    def copy_out(self, tensor, host):
        self.out[tensor.data_ptr()] = event = self._queue(lambda: host.copy_(tensor))
        return event

    def copy_in(self, host, tensor):
        self.into[tensor.data_ptr()] = event = self._queue(lambda: tensor.copy_(host))
        return event

    def query(self, event):
        if event.error is not None:
            raise event.error
        return event.happened.is_set()

    def wait(self, event, timeout):
        event.happened.wait(timeout)
        return self.query(event)

    def follow(self, event, tensor):
        self.followed.append(event)


class Push:
    """A handle of the fake library: the average is the tensor plus 1000."""

    def __init__(self, name, host_in, host_out, automatic):
        self.name, self.host_in, self.host_out = name, host_in, host_out
        self.done = threading.Event()
        self.error = None
        self.nonfinite, self.nonfinite_ranks = False, ()
        if automatic:
            self.complete()

    def complete(self):
        self.host_out.copy_(self.host_in + 1000)
        self.done.set()

    def fail(self, error):
        self.error = error
        self.done.set()


class Library:
    """begin and finish."""

    def __init__(self, automatic=False):
        self.automatic = automatic
        self.changed = threading.Condition()
        self.begun = []  # names and other calls, in order
        self.pushes = {}
        self.error = None

    def begin(self, name):
        def begin(host_in, host_out):
            if self.error is not None:
                raise self.error
            with self.changed:
                self.pushes[name] = push = Push(name, host_in, host_out, self.automatic)
                self.begun.append(name)
                self.changed.notify_all()
            return push
        return begin

    def call(self, name):
        def call():
            with self.changed:
                self.begun.append(name)
                self.changed.notify_all()
        return call

    @staticmethod
    def finish(push, timeout):
        if not push.done.wait(DEADLINE_S if timeout is None else timeout):
            return False
        if push.error is not None:
            raise push.error
        return True

    def wait_begun(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= count, DEADLINE_S), self.begun


class StagingTest(unittest.TestCase):

    def setUp(self):
        self.before = set(threading.enumerate())
        self.lost = []  # errors that ended a thread
        patch = mock.patch.object(threading, "excepthook", self.lost.append)
        patch.start()
        self.addCleanup(patch.stop)
        self.start(automatic=False)

    def start(self, automatic):
        self.device = FakeDevice(automatic)
        self.native = Library(automatic)
        self.staging = Staging(self.device, 3, self.native.finish)

    def tearDown(self):
        self.staging.close(orderly=False)
        left = [thread for thread in threading.enumerate() if thread not in self.before]
        self.assertEqual(left, [], "a thread is left over")
        self.assertEqual(self.lost, [])

    def push(self, name, tensor, out=None):
        return self.staging.push(name, tensor, tensor if out is None else out,
                                 self.native.begin(name))

    def reach(self, item, *states):
        """Waits until the item is in one of the states."""
        with self.staging._changed:
            reached = self.staging._changed.wait_for(lambda: item._state in states, DEADLINE_S)
        self.assertTrue(reached, f"{item.name} is {item.state}, expected {states}")

    def copied_out(self, name, tensor, out=None):
        """An item whose push is under way."""
        item = self.push(name, tensor, out)
        self.device.out[tensor.data_ptr()].complete()
        self.reach(item, State.PUSHING)
        return item

    def copying_in(self, name, tensor, out=None):
        item = self.copied_out(name, tensor, out)
        self.native.pushes[name].complete()
        self.reach(item, State.COPYING_IN)
        return item

    def assertFails(self, code, *texts):
        @contextlib.contextmanager
        def context():
            with self.assertRaises(GradwireError) as caught:
                yield caught
            self.assertEqual(caught.exception.code, code)
            for text in texts:
                self.assertIn(text, str(caught.exception))
        return context()


class Transitions(StagingTest):

    def test_every_state_comes_by_itself(self):
        tensor = torch.arange(4.0)
        item = self.push("a", tensor)
        self.assertEqual(item.state, State.COPYING_OUT)
        self.assertFalse(item.poll())
        self.assertEqual(self.native.begun, [])
        self.device.out[tensor.data_ptr()].complete()
        self.native.wait_begun(1)
        self.reach(item, State.PUSHING)
        self.assertFalse(item.poll())
        self.assertEqual(self.device.into, {})
        self.native.pushes["a"].complete()
        self.reach(item, State.COPYING_IN)
        self.assertTrue(item.poll())
        self.assertEqual(tensor.tolist(), [0, 1, 2, 3], "the copy back has not happened yet")
        self.device.into[tensor.data_ptr()].complete()
        self.reach(item, State.DONE)
        self.assertIs(item.wait(0), tensor)
        self.assertEqual(tensor.tolist(), [1000, 1001, 1002, 1003])

    def test_synchronize_blocks_the_stream_and_not_the_host(self):
        tensor = torch.ones(3)
        item = self.copying_in("a", tensor)
        event = self.device.into[tensor.data_ptr()]
        self.assertIs(item.wait(0), tensor)
        self.assertEqual(self.device.followed, [event])
        self.assertFalse(event.happened.is_set())

    def test_out_is_another_tensor_and_the_source_stays(self):
        tensor, out = torch.ones(2, 3), torch.zeros(2, 3)
        item = self.copying_in("a", tensor, out)
        self.device.into[out.data_ptr()].complete()
        self.assertIs(item.wait(DEADLINE_S), out)
        self.assertTrue(torch.equal(out, torch.full((2, 3), 1001.0)))
        self.assertTrue(torch.equal(tensor, torch.ones(2, 3)))

    def test_a_void_round_is_known(self):
        item = self.copied_out("a", torch.ones(2))
        push = self.native.pushes["a"]
        push.nonfinite, push.nonfinite_ranks = True, (1,)
        push.complete()
        item.wait(DEADLINE_S)
        self.assertEqual((item.nonfinite, item.nonfinite_ranks), (True, (1,)))

    def test_an_out_that_differs_is_refused(self):
        for out in (torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(3, device="meta")):
            with self.assertFails(Code.INVALID_ARGUMENT, "tensor 'a'", "expected"):
                self.push("a", torch.ones(3), out)
        self.assertEqual(self.device.pinned, [])

    def test_a_timeout_ends_nothing_in_any_state(self):
        tensor = torch.ones(3)
        item = self.push("a", tensor)
        for timeout in (0, 0.01):
            with self.assertFails(Code.TIMEOUT, "tensor 'a'", "rank 3", "copying out"):
                item.wait(timeout)
        self.device.out[tensor.data_ptr()].complete()
        self.reach(item, State.PUSHING)
        for timeout in (0, 0.01):
            with self.assertFails(Code.TIMEOUT, "tensor 'a'", "rank 3", "pushing"):
                item.wait(timeout)
        self.native.pushes["a"].complete()
        self.assertIs(item.wait(DEADLINE_S), tensor)

    def test_whoever_waits_overtakes_a_slow_push(self):
        slow, fast = torch.ones(2), torch.ones(2)
        first, second = self.copied_out("slow", slow), self.copied_out("fast", fast)
        self.native.pushes["fast"].complete()
        second.wait(DEADLINE_S)
        self.assertEqual(first.state, State.PUSHING)
        self.assertIn(fast.data_ptr(), self.device.into)

    def test_poll_sees_a_push_that_ended_behind_a_slow_one(self):
        first = self.copied_out("slow", torch.ones(2))
        second = self.copied_out("fast", torch.ones(2))
        self.native.pushes["fast"].complete()
        self.assertTrue(second.poll())
        self.assertFalse(first.poll())

    def test_a_slow_push_stops_no_later_copy_out(self):
        tensors = [torch.full((2,), float(i)) for i in range(20)]
        items = [self.copied_out(f"t{i}", tensor) for i, tensor in enumerate(tensors)]
        self.assertEqual({item.state for item in items}, {State.PUSHING})

    def test_without_a_timeout_it_waits_with_the_jobs_own_deadline(self):
        item = self.copied_out("a", torch.ones(2))
        timeouts = []

        def finish(push, timeout):
            timeouts.append(timeout)
            if timeout is None:
                raise GradwireError(Code.TIMEOUT, "the job stalled", 4)
            return False

        self.staging._finish = finish
        with self.assertFails(Code.TIMEOUT, "the job stalled"):
            item.wait()
        self.assertEqual(item.state, State.FAILED)
        self.assertIsNone(timeouts[-1])

    def test_several_threads_wait_for_one(self):
        tensor = torch.ones(2)
        item = self.push("a", tensor)
        results = []
        waiting = [threading.Thread(target=lambda: results.append(item.wait(DEADLINE_S)))
                   for _ in range(4)]
        for thread in waiting:
            thread.start()
        self.device.out[tensor.data_ptr()].complete()
        self.reach(item, State.PUSHING)
        self.native.pushes["a"].complete()
        for thread in waiting:
            thread.join(DEADLINE_S)
        self.assertEqual([result is tensor for result in results], [True] * 4)
        self.assertEqual(len(self.device.into), 1)


class Order(StagingTest):

    def test_pushes_begin_as_handed_over_whatever_copy_ends_first(self):
        tensors = [torch.ones(2) for _ in range(5)]
        items = [self.push(f"t{i}", tensor) for i, tensor in enumerate(tensors)]
        for i in (4, 2, 3, 1):
            self.device.out[tensors[i].data_ptr()].complete()
        with self.assertFails(Code.TIMEOUT):
            items[4].wait(0.2)
        self.assertEqual(self.native.begun, [])
        self.device.out[tensors[0].data_ptr()].complete()
        self.native.wait_begun(5)
        self.assertEqual(self.native.begun, ["t0", "t1", "t2", "t3", "t4"])

    def test_the_end_of_a_step_keeps_its_place(self):
        tensors = [torch.ones(2) for _ in range(3)]
        self.push("a", tensors[0])
        self.push("b", tensors[1])
        self.staging.in_order(self.native.call("end of step"))
        self.push("c", tensors[2])
        for i in (2, 1, 0):
            self.device.out[tensors[i].data_ptr()].complete()
        self.native.wait_begun(4)
        self.assertEqual(self.native.begun, ["a", "b", "end of step", "c"])

    def test_an_error_of_such_a_call_comes_with_the_next_push(self):
        for raised, code, text in ((RuntimeError("odd"), Code.INTERNAL, "ending the step failed: odd"),
                                   (GradwireError(Code.UNAVAILABLE, "lost"), Code.UNAVAILABLE, "lost")):
            def call(raised=raised):
                raise raised
            self.staging.in_order(call)
            with self.staging._changed:
                self.assertTrue(self.staging._changed.wait_for(
                    lambda: not self.staging._outgoing, DEADLINE_S))
            with self.assertFails(code, text):
                self.push("a", torch.ones(2))
        self.copied_out("a", torch.ones(2))

    def test_the_queue_is_bounded(self):
        with mock.patch.object(_staging, "_MOST_OUTGOING", 3):
            tensors = [torch.ones(2) for _ in range(4)]
            for i in range(3):
                self.push(f"t{i}", tensors[i])
            entered = threading.Event()

            def push():
                entered.set()
                self.push("t3", tensors[3])

            other = threading.Thread(target=push)
            other.start()
            self.assertTrue(entered.wait(DEADLINE_S))
            other.join(0.3)
            self.assertTrue(other.is_alive())
            self.assertNotIn(tensors[3].data_ptr(), self.device.out)
            self.device.out[tensors[0].data_ptr()].complete()
            other.join(DEADLINE_S)
            self.assertFalse(other.is_alive())


class Failures(StagingTest):

    def fails_again(self, item, code, *texts):
        for _ in range(2):
            with self.assertFails(code, *texts):
                item.wait(DEADLINE_S)
        self.assertEqual(item.state, State.FAILED)
        self.assertTrue(item.poll())

    def others_go_on(self):
        tensor = torch.ones(2)
        item = self.copying_in("other", tensor)
        self.device.into[tensor.data_ptr()].complete()
        self.assertEqual(item.wait(DEADLINE_S).tolist(), [1001, 1001])

    def test_a_copy_out_that_cannot_begin(self):
        self.device.refuse = RuntimeError("out of memory")
        item = self.push("a", torch.ones(2))
        self.fails_again(item, Code.INTERNAL, "'a'", "rank 3", "to the host failed: out of memory")
        self.assertEqual(self.native.begun, [])
        self.others_go_on()

    def test_a_copy_out_that_fails_on_the_way(self):
        tensor = torch.ones(2)
        item = self.push("a", tensor)
        self.device.out[tensor.data_ptr()].fail("illegal access")
        self.fails_again(item, Code.INTERNAL, "'a'", "rank 3", "to the host failed: illegal access")
        self.assertEqual(self.native.begun, [])
        self.others_go_on()

    def test_a_push_that_cannot_begin(self):
        tensor = torch.ones(2)
        self.native.error = RuntimeError("odd")
        item = self.push("a", tensor)
        self.device.out[tensor.data_ptr()].complete()
        self.fails_again(item, Code.INTERNAL, "'a'", "rank 3", "its push could not begin: odd")
        self.native.error = None
        self.others_go_on()

    def test_a_push_that_fails(self):
        for raised, code, text in ((RuntimeError("odd"), Code.INTERNAL, "its push failed: odd"),
                                   (GradwireError(Code.UNAVAILABLE, "server 1 is lost", 5),
                                    Code.UNAVAILABLE, "server 1 is lost")):
            with self.subTest(text=text):
                item = self.copied_out("a", torch.ones(2))
                self.native.pushes["a"].fail(raised)
                self.reach(item, State.FAILED)  # nobody waits for it
                self.fails_again(item, code, text)
        self.others_go_on()

    def test_a_copy_back_that_cannot_begin(self):
        item = self.copied_out("a", torch.ones(2))
        self.device.refuse = RuntimeError("no stream")
        self.native.pushes["a"].complete()
        self.fails_again(item, Code.INTERNAL, "'a'", "rank 3", "to the device failed: no stream")
        self.others_go_on()

    def test_a_copy_back_that_fails_on_the_way(self):
        tensor = torch.ones(2)
        item = self.copying_in("a", tensor)
        self.device.into[tensor.data_ptr()].fail("illegal access")
        self.reach(item, State.FAILED)
        self.fails_again(item, Code.INTERNAL, "'a'", "to the device failed: illegal access")
        self.others_go_on()

    def test_all_that_is_pending_fails_with_the_client(self):
        lost = GradwireError(Code.UNAVAILABLE, "server 1 is lost", 5)
        pushing = [self.copied_out(f"p{i}", torch.ones(2)) for i in range(3)]
        tensors = [torch.ones(2) for _ in range(3)]
        copying = [self.push(f"c{i}", tensor) for i, tensor in enumerate(tensors)]
        self.native.error = lost
        for push in self.native.pushes.values():
            push.fail(lost)
        for tensor in tensors:
            self.device.out[tensor.data_ptr()].complete()
        for item in pushing + copying:
            with self.assertFails(Code.UNAVAILABLE, "server 1 is lost"):
                item.wait(DEADLINE_S)

    def test_an_interrupt_of_the_one_who_waits_ends_nothing(self):
        tensor = torch.ones(2)
        item = self.copied_out("a", tensor)
        real, main = self.native.finish, threading.current_thread()

        def interrupted(push, timeout):
            if threading.current_thread() is main:
                raise KeyboardInterrupt
            return real(push, timeout)

        self.staging._finish = interrupted
        with self.assertRaises(KeyboardInterrupt):
            item.wait(DEADLINE_S)
        self.staging._finish = real
        self.native.pushes["a"].complete()
        self.assertIs(item.wait(DEADLINE_S), tensor)


class Shutdown(StagingTest):

    def closed(self, item, state):
        with self.assertFails(Code.UNAVAILABLE, f"'{item.name}'", "rank 3", state, "shut down"):
            item.wait(DEADLINE_S)
        with self.assertFails(Code.UNAVAILABLE, "shut down"):
            self.push("later", torch.ones(2))
        with self.assertFails(Code.UNAVAILABLE, "shut down"):
            self.staging.in_order(lambda: None)

    def test_while_copying_out(self):
        item = self.push("a", torch.ones(2))
        self.staging.close(orderly=False)
        self.closed(item, "copying out")
        self.assertEqual(self.native.begun, [])

    def test_while_pushing(self):
        item = self.copied_out("a", torch.ones(2))
        self.staging.close(orderly=False)
        self.closed(item, "pushing")

    def test_while_copying_in(self):
        item = self.copying_in("a", torch.ones(2))
        self.staging.close(orderly=False)
        self.closed(item, "copying in")

    def test_what_is_done_stays_done(self):
        tensor = torch.ones(2)
        item = self.copying_in("a", tensor)
        self.device.into[tensor.data_ptr()].complete()
        self.reach(item, State.DONE)
        self.staging.close(orderly=True)
        self.assertIs(item.wait(0), tensor)

    def test_before_the_first_push_and_twice(self):
        self.staging.close(orderly=True)
        self.staging.close(orderly=False)
        with self.assertFails(Code.UNAVAILABLE, "shut down"):
            self.push("a", torch.ones(2))

    def test_in_order_all_that_was_handed_over_begins_first(self):
        tensors = [torch.ones(2) for _ in range(3)]
        items = [self.push(f"t{i}", tensor) for i, tensor in enumerate(tensors)]
        closing = threading.Thread(target=self.staging.close, args=(True, DEADLINE_S))
        closing.start()
        for tensor in reversed(tensors):
            self.device.out[tensor.data_ptr()].complete()
        closing.join(DEADLINE_S)
        self.assertFalse(closing.is_alive())
        self.assertEqual(self.native.begun, ["t0", "t1", "t2"])
        self.closed(items[0], "pushing")

    def test_in_order_it_does_not_wait_for_ever(self):
        item = self.push("a", torch.ones(2))
        self.staging.close(True, 0.2)
        self.closed(item, "copying out")

    def test_who_waits_is_told(self):
        for state in (State.COPYING_OUT, State.PUSHING):
            with self.subTest(state=state):
                self.start(automatic=False)
                item = (self.push if state is State.COPYING_OUT else self.copied_out)("a", torch.ones(2))
                errors = []

                def wait(item=item, errors=errors):
                    try:
                        item.wait(DEADLINE_S)
                    except GradwireError as error:
                        errors.append(error)

                waiting = threading.Thread(target=wait)
                waiting.start()
                self.staging.close(orderly=False)
                if state is State.PUSHING:
                    self.native.pushes["a"].complete()  # the library's own wait ends
                waiting.join(DEADLINE_S)
                self.assertEqual([error.code for error in errors], [Code.UNAVAILABLE])

    def test_a_thread_that_does_not_end_is_named(self):
        release = threading.Event()
        entered = threading.Event()

        def begin(host_in, host_out):
            entered.set()
            release.wait(DEADLINE_S)

        tensor = torch.ones(2)
        self.staging.push("a", tensor, tensor, begin)
        self.device.out[tensor.data_ptr()].complete()
        self.assertTrue(entered.wait(DEADLINE_S))
        with self.assertFails(Code.TIMEOUT, "rank 3", "gradwire-out"):
            self.staging.close(False, 0.05)
        release.set()

    def test_a_program_without_shutdown_ends(self):
        script = ("import staging_test as t, torch\n"
                  "d, l = t.FakeDevice(), t.Library()\n"
                  "s = t.Staging(d, 0, l.finish)\n"
                  "x = torch.ones(2); items = [s.push(n, x, x, l.begin(n)) for n in 'ab']\n"
                  "print('pushed')\n")
        result = subprocess.run([sys.executable, "-c", script], cwd=pathlib.Path(__file__).parent,
                                env=dict(os.environ, PYTHONDONTWRITEBYTECODE="1"), timeout=DEADLINE_S,
                                capture_output=True, text=True, check=False)
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "pushed\n", ""))


class Buffers(StagingTest):

    def through(self, name, tensor):
        item = self.copying_in(name, tensor)
        self.device.into[tensor.data_ptr()].complete()
        self.reach(item, State.DONE)

    def test_a_name_keeps_its_buffer(self):
        for _ in range(5):
            for name in "ab":
                self.through(name, torch.ones(3))
        self.assertEqual(len(self.device.pinned), 2)

    def test_a_buffer_in_flight_is_not_used_again(self):
        first = torch.full((2,), 1.0)
        for prepare in (self.push, self.copied_out, self.copying_in):
            with self.subTest(state=prepare.__name__):
                self.start(automatic=False)
                prepare("a", first)
                self.push("a", torch.full((2,), 2.0))
                self.assertEqual(len(self.device.pinned), 2)
                self.assertNotEqual(self.device.pinned[0].data_ptr(), self.device.pinned[1].data_ptr())
                self.staging.close(orderly=False)

    def test_a_buffer_is_free_when_its_copy_back_has_ended(self):
        tensor = torch.ones(2)
        self.copying_in("a", tensor)
        # Seen by the next push itself, if no thread has been there yet.
        self.device.into[tensor.data_ptr()].complete()
        self.push("a", torch.ones(2))
        self.assertEqual(len(self.device.pinned), 1)

    def test_the_buffer_of_a_failed_push_is_not_used_again(self):
        item = self.copied_out("a", torch.ones(2))
        self.native.pushes["a"].fail(RuntimeError("odd"))
        self.reach(item, State.FAILED)
        self.through("a", torch.ones(2))
        self.assertEqual(len(self.device.pinned), 2)

    def test_another_shape_or_dtype_gets_another_buffer(self):
        for tensor in (torch.ones(2), torch.ones(3), torch.ones(3, dtype=torch.float64)):
            self.through("a", tensor)
        self.assertEqual([(tuple(buffer.shape), buffer.dtype) for buffer in self.device.pinned],
                         [((2,), torch.float32), ((3,), torch.float32), ((3,), torch.float64)])

    def test_tensors_are_let_go(self):
        tensor = torch.ones(2)
        item = self.copying_in("a", tensor, torch.zeros(2))
        self.device.into[item._out.data_ptr()].complete()
        self.reach(item, State.DONE)
        gone = weakref.ref(tensor)
        self.device.out.clear()
        self.native.pushes.clear()
        del tensor
        self.assertIsNone(gone())


class Many(StagingTest):

    def test_many_tensors_at_once(self):
        self.start(automatic=True)
        for _ in range(3):
            tensors = [torch.full((i % 7,), float(i)) for i in range(2000)]
            items = [self.push(f"t{i}", tensor) for i, tensor in enumerate(tensors)]
            for i, item in enumerate(items):
                self.assertEqual(item.wait(DEADLINE_S).tolist(), [1000.0 + i] * (i % 7))
        self.assertEqual(self.native.begun, [f"t{i}" for i in range(2000)] * 3)

    def test_random_orders(self):
        seed = int(os.environ.get("TEST_SEED") or random.randrange(1 << 32))
        print(f"TEST_SEED={seed}", flush=True)
        choice = random.Random(seed)
        for _ in range(20):
            self.start(automatic=False)
            self.random_run(random.Random(choice.random()))

    def random_run(self, choice):
        """Copies, pushes and failures happen in a random order, from another thread."""
        names = [f"t{i}" for i in range(choice.randrange(1, 60))]
        tensors = [torch.full((3,), float(i)) for i in range(len(names))]
        fates = {name: choice.choices(["fine", "out", "push", "in"], [9, 1, 1, 1])[0] for name in names}
        items = [self.push(name, tensor) for name, tensor in zip(names, tensors)]

        def world():
            order = list(zip(names, tensors))
            choice.shuffle(order)
            for name, tensor in order:
                event = self.device.out[tensor.data_ptr()]
                event.fail("odd") if fates[name] == "out" else event.complete()
            alive = [name for name in names if fates[name] != "out"]
            self.native.wait_begun(len(alive))
            choice.shuffle(alive)
            for name in alive:
                push = self.native.pushes[name]
                push.fail(RuntimeError("odd")) if fates[name] == "push" else push.complete()
            alive = [entry for entry in order if fates[entry[0]] in ("fine", "in")]
            for name, tensor in alive:
                self.reach(items[names.index(name)], State.COPYING_IN)
                event = self.device.into[tensor.data_ptr()]
                event.fail("odd") if fates[name] == "in" else event.complete()

        other = threading.Thread(target=world)
        other.start()
        waited = list(range(len(items)))
        random.Random(choice.random()).shuffle(waited)
        for i in waited:
            if fates[names[i]] in ("out", "push"):
                with self.assertFails(Code.INTERNAL, f"'{names[i]}'", "odd"):
                    items[i].wait(DEADLINE_S)
            elif fates[names[i]] == "fine":
                items[i].wait(DEADLINE_S)
        other.join(DEADLINE_S)
        self.assertFalse(other.is_alive())
        for item, name, tensor in zip(items, names, tensors):
            self.reach(item, State.DONE if fates[name] == "fine" else State.FAILED)
            if fates[name] == "fine":
                self.assertEqual(tensor.tolist(), [1000.0 + names.index(name)] * 3)
        self.assertEqual(self.native.begun, [name for name in names if fates[name] != "out"])
        self.staging.close(orderly=True)


class FakeCuda:
    """torch.cuda as far as CudaDevice uses it: writes down what it is asked for."""

    def __init__(self):
        self.log = []
        self.capturing = False
        self.inside = None  # the stream of the `with` block
        cuda = self

        class Stream:
            count = 0

            def __init__(self, device):
                Stream.count += 1
                self.name = f"side{Stream.count}"
                self.device = device

            def wait_stream(self, other):
                cuda.log.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event):
                cuda.log.append(f"{self.name} waits for an event of {event.stream.name}")

        class CudaEvent:
            def __init__(self):
                self.answers = [False, False, True]

            def record(self, stream):
                self.stream = stream
                cuda.log.append(f"event on {stream.name}")

            def query(self):
                return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

        self.Stream, self.Event = Stream, CudaEvent
        self.current = Stream(None)
        self.current.name = "current"
        Stream.count = 0

    def current_stream(self, device):
        return self.current

    def is_current_stream_capturing(self):
        return self.capturing

    @contextlib.contextmanager
    def stream(self, stream):
        self.inside = stream
        yield
        self.inside = None


class FakeTensor:
    """A tensor of a device that is not there."""

    def __init__(self, name, cuda, device):
        self.name, self.cuda, self.device = name, cuda, device

    def detach(self):
        return self

    def resolve_neg(self):
        return self

    def copy_(self, other, non_blocking):
        assert non_blocking
        self.cuda.log.append(f"{self.name} <- {other.name} on {self.cuda.inside.name}")

    def record_stream(self, stream):
        self.cuda.log.append(f"{self.name} is used on {stream.name}")


class Cuda(unittest.TestCase):
    """What is asked of torch.cuda, in which order. That is all that can be said without a GPU."""

    def setUp(self):
        self.cuda = FakeCuda()
        for patch in (mock.patch.object(torch, "cuda", self.cuda),
                      mock.patch.object(_staging, "_warned", False)):
            patch.start()
            self.addCleanup(patch.stop)
        self.device = _staging.CudaDevice()
        self.tensor = FakeTensor("tensor", self.cuda, torch.device("cuda", 1))
        self.host = FakeTensor("host", self.cuda, torch.device("cpu"))

    def quietly(self, call, *arguments):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return call(*arguments)

    def test_copies_are_ordered_by_streams_and_events(self):
        self.quietly(self.device.copy_out, self.tensor, self.host)
        self.assertEqual(self.cuda.log, ["side1 waits for current", "host <- tensor on side1",
                                         "event on side1", "tensor is used on side1"])
        self.cuda.log.clear()
        event = self.device.copy_in(self.host, self.tensor)
        self.device.follow(event, self.tensor)
        self.assertEqual(self.cuda.log, ["tensor <- host on side2", "event on side2",
                                         "tensor is used on side2",
                                         "current waits for an event of side2"])

    def test_a_device_keeps_its_streams_and_another_has_its_own(self):
        for index in (1, 1, 0, 1):
            tensor = FakeTensor("tensor", self.cuda, torch.device("cuda", index))
            self.quietly(self.device.copy_out, tensor, self.host)
        self.assertEqual(self.cuda.Stream.count, 4)

    def test_untested_is_said_once(self):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            _staging.CudaDevice()
            self.assertEqual(seen, [])
            for device in (self.device, self.device, _staging.CudaDevice()):
                device.copy_out(self.tensor, self.host)
        self.assertEqual([entry.category for entry in seen], [RuntimeWarning])
        self.assertIn("untested on a GPU", str(seen[0].message))

    def test_a_captured_stream_is_refused(self):
        self.cuda.capturing = True
        with self.assertRaises(GradwireError) as caught:
            self.quietly(self.device.copy_out, self.tensor, self.host)
        self.assertIn("CUDA graph", str(caught.exception))
        self.assertEqual(self.cuda.log, [])

    def test_waiting_has_a_deadline(self):
        event = self.cuda.Event()
        self.assertTrue(self.device.wait(event, DEADLINE_S))
        self.assertTrue(self.device.query(event))
        event.answers = [False]
        self.assertFalse(self.device.wait(event, 0.01))

    def test_buffers_are_pinned_and_packed(self):
        tensor = torch.zeros(3, 2, dtype=torch.float64).t()
        with mock.patch.object(torch, "empty") as empty:
            self.device.pinned_like(tensor)
        empty.assert_called_once_with(torch.Size([2, 3]), dtype=torch.float64, pin_memory=True)


class FakeClient:
    def __init__(self):
        self.before_close = []
        self.forked = False

        self.declared = []
        self.tensors = set()  # names
        self.pushed = []  # declarations, and the ends of steps
        self.native = mock.Mock()
        self.native.gradwire_end_step.side_effect = lambda pointer: self.pushed.append("end of step")

    def rank(self):
        return 2

    def pointer(self):
        return 1

    def check(self, status):
        pass

    def declare(self, batch):
        self.declared += [entry.name for entry in batch]
        self.tensors.update(self.declared)

    def value(self, name):
        return {"filter_skips": 0.0}[name]

    def push_pull(self, declared, memory):
        self.pushed.append(declared.name)
        self.memory = memory
        push = Push(declared.name, memory.result, memory.result, automatic=True)
        return mock.Mock(wait=lambda timeout: push.done.wait())

    def check_process(self):
        if self.forked:
            raise GradwireError(Code.INVALID_ARGUMENT, "forked")


class Operations(unittest.TestCase):
    """push_pull and end_step of tensors that are taken for a device's."""

    def setUp(self):
        self.client, self.device = FakeClient(), FakeDevice()
        for patch in (mock.patch.object(_ops, "is_staged", lambda tensor: True),
                      mock.patch.object(_ops, "require", lambda: self.client),
                      mock.patch.object(_staging, "CudaDevice", lambda: self.device)):
            patch.start()
            self.addCleanup(patch.stop)
        self.addCleanup(lambda: [close(False) for close in self.client.before_close])

    def finish(self, tensor, out, handle):
        self.device.out[tensor.data_ptr()].complete()
        _ops.synchronize(handle, DEADLINE_S)
        self.device.into[out.data_ptr()].complete()

    def test_a_tensor_is_declared_at_once_and_pushed_from_host_memory(self):
        tensor = torch.ones(2)
        handle = _ops.push_pull_async_inplace(tensor, name="a")
        self.assertEqual((self.client.declared, self.client.pushed), (["a"], []))
        self.assertFalse(_ops.poll(handle))
        self.finish(tensor, tensor, handle)
        self.assertEqual(tensor.tolist(), [1001, 1001])
        host = self.device.pinned[0].data_ptr()
        self.assertEqual((self.client.memory.source, self.client.memory.target), (host, host))

    def test_what_is_cast_travels_as_it_was_cast(self):
        tensor = torch.ones(2)
        handle = _ops.push_pull_async_inplace(tensor, name="a", compression=_ops.Compression.fp16)
        self.device.automatic = True  # the copy back
        (event,) = self.device.out.values()
        event.complete()
        self.assertEqual(_ops.synchronize(handle, DEADLINE_S).tolist(), [1001, 1001])
        self.assertEqual([buffer.dtype for buffer in self.device.pinned], [torch.float16])
        self.assertEqual(tensor.dtype, torch.float32)

    def test_a_step_ends_after_what_was_pushed_in_it(self):
        with mock.patch.object(_ops, "_end_step", lambda: self.client.pushed.append("at once")):
            _ops.end_step()
        first, second = torch.ones(2), torch.ones(2)
        handles = [_ops.push_pull_async_inplace(first, name="a")]
        _ops.end_step()
        handles.append(_ops.push_pull_async_inplace(second, name="b"))
        self.device.out[second.data_ptr()].complete()
        self.assertEqual(self.client.pushed, ["at once"])
        for tensor, handle in zip((first, second), handles):
            if not self.device.out[tensor.data_ptr()].happened.is_set():
                self.device.out[tensor.data_ptr()].complete()
            _ops.synchronize(handle, DEADLINE_S)
        self.assertEqual(self.client.pushed, ["at once", "a", "end of step", "b"])

    def test_a_tensor_of_the_host_waits_for_the_end_of_the_step_before(self):
        tensor, host = torch.ones(2), torch.ones(2)
        _ops.push_pull_async_inplace(tensor, name="a")
        _ops.end_step()
        with mock.patch.object(_ops, "is_staged", lambda tensor: False):
            pushing = threading.Thread(target=_ops.push_pull_async_inplace, args=(host,),
                                       kwargs={"name": "host"})
            pushing.start()
            pushing.join(0.2)
            self.assertEqual(self.client.pushed, [])
            self.device.out[tensor.data_ptr()].complete()
            pushing.join(DEADLINE_S)
        self.assertEqual(self.client.pushed, ["a", "end of step", "host"])

    def test_no_address_of_a_device_is_taken(self):
        with self.assertRaisesRegex(GradwireError, "tensor 'a' is on meta, expected cpu"):
            _ops.host_pointer(torch.ones(2, device="meta"), "a")


class Clients(unittest.TestCase):

    def test_a_client_has_one_staging_which_ends_with_it(self):
        client, other = FakeClient(), FakeClient()
        staging = _staging.staging_of(client)
        self.assertIs(_staging.staging_of(client), staging)
        self.assertIsNot(_staging.staging_of(other), staging)
        self.assertEqual(len(client.before_close), 1)
        client.before_close[0](True)
        with self.assertRaisesRegex(GradwireError, "rank 2: the client is shut down"):
            staging.in_order(lambda: None)

    def test_a_forked_process_is_refused_before_anything_locks(self):
        client = FakeClient()
        staging = _staging.staging_of(client)
        client.forked = True
        tensor = torch.ones(2)
        item = _staging.Staged(staging, "a", tensor, tensor, lambda a, b: None)
        with staging._changed:  # as if another thread had it at the fork
            for call in (lambda: staging.push("a", tensor, tensor, None), item.wait, item.poll,
                         lambda: item.state, lambda: staging.in_order(lambda: None)):
                with self.assertRaisesRegex(GradwireError, "forked"):
                    call()

    def test_a_timeout_of_the_library_is_no_error_while_it_can_still_come(self):
        handle = mock.Mock()
        handle.wait.side_effect = None
        self.assertTrue(_staging.finish_push(handle, 0.1))
        handle.wait.assert_called_with(0.1)
        handle.wait.side_effect = GradwireError(Code.TIMEOUT, "late", 4)
        handle.poll.return_value = False
        self.assertFalse(_staging.finish_push(handle, 0.1))
        for timeout, complete in ((None, False), (0.1, True)):  # the job's own deadline
            handle.poll.return_value = complete
            with self.assertRaisesRegex(GradwireError, "late"):
                _staging.finish_push(handle, timeout)
        handle.wait.side_effect = GradwireError(Code.UNAVAILABLE, "lost", 5)
        handle.poll.return_value = False
        with self.assertRaisesRegex(GradwireError, "lost"):
            _staging.finish_push(handle, 0.1)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(240, exit=True)
    unittest.main()
