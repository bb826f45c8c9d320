#!/usr/bin/python3
"""reference_test.py REPLAY SOURCE_DIR: every method against scripts/reference_methods.py.

Two workers are played in the reference; what they pull, compressed to a sign and a scale after the
warm-up, is replayed to the C++ as rank 0. Parameters and what is sent stay within 1e-5 of the
reference (of the norm of each tensor) over 200 steps.
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np

REPLAY, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2])
sys.path.insert(0, str(SOURCE / "scripts"))
import reference_methods  # noqa: E402

STEPS = 200
TOLERANCE = 1e-5
# name, parameters, peak rate
CASES = [
    ("sgd", {}, 0.02),
    ("sgd", {"momentum": 0.5, "weight_decay": 0.01}, 0.05),
    ("adamw", {}, 0.01),
    ("adamw", {"beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "bias_correction": False}, 0.01),
    ("lamb", {}, 0.02),
    ("lamb", {"norm_low": 2.0, "norm_high": 5.0, "bias_correction": False}, 0.01),
    ("lans", {}, 0.02),
    ("lans", {"norm_low": 1.0, "norm_high": 4.0, "beta1": 0.5, "weight_decay": 0.1}, 0.02),
    ("clan", {"weight_decay": 0.0}, 0.02),
    ("dist_ef_sgdm", {"weight_decay": 0.01}, 0.02),
    ("dist_ef_sgdm", {"momentum": 0.5}, 0.02),
    ("onebit_adam", {"freeze_step": 50}, 0.01),
    ("onebit_adam", {"freeze_step": 1, "beta2": 0.9, "weight_decay": 0.1}, 0.001),
    ("onebit_adam", {"freeze_step": 100, "bias_correction": False, "eps": 1e-3,
                     "v_floor": 0}, 0.01),
    ("onebit_lamb", {"freeze_step": 50}, 0.01),
    ("onebit_lamb", {"freeze_step": 50, "v_floor": 0.7}, 0.01),
    ("onebit_lamb", {"freeze_step": 60, "beta2": 0.95, "bias_correction": False}, 0.01),
]
# n, decays, kind
TENSORS = [(51, True, ""), (7, False, ""), (1, True, ""), (1000, True, ""), (4099, True, ""),
           (32, True, "zero parameters"), (64, True, "zero gradient"),
           (100, True, "half in the warm-up"), (48, True, "tiny"), (16, False, "large")]


class Recording:
    """What the reference does in a case, and what the C++ is given."""

    def __init__(self, name, parameters, peak):
        self.spec = name
        if parameters:
            self.spec += "(" + ",".join(f"{key}={str(value).lower()}"
                                        for key, value in parameters.items()) + ")"
        rng = np.random.default_rng(7)
        freeze = parameters.get("freeze_step", 0)
        self.rates = [peak * (1 - step / STEPS) for step in range(STEPS)]
        self.start = [np.zeros(n, np.float32) if kind == "zero parameters"
                      else rng.standard_normal(n).astype(np.float32) for n, _, kind in TENSORS]
        workers = [reference_methods.make(name, **parameters) for _ in range(2)]
        states = [[method.new(x, decays) for x, (_, decays, _) in zip(self.start, TENSORS)]
                  for method in workers]
        self.replayed = []   # (gradient, pulled) by step and tensor
        self.expected = []   # (sent, parameters)
        for step, rate in enumerate(self.rates):
            for i, (n, _, kind) in enumerate(TENSORS):
                gradients, sent = [], []
                for method, own in zip(workers, states):
                    noise = rng.standard_normal(n)
                    gradient = own[i].x - 0.5 + noise
                    if kind in ("tiny", "large"):  # not of x, or SGD diverges
                        gradient = noise * {"tiny": 1e-6, "large": 1e4}[kind]
                    if kind == "zero gradient":
                        gradient[:] = 0
                    if kind == "half in the warm-up" and step < max(freeze, 1):
                        gradient[:n // 2] = 0
                    gradients.append(gradient.astype(np.float32))
                    sent.append(method.send(own[i], step, gradients[-1].astype(np.float64)))
                pulled = (sent[0] + sent[1]) / 2
                if step >= freeze and "onebit" in name:
                    pulled = np.where(pulled < 0, -1.0, 1.0) * np.mean(np.abs(pulled))
                pulled = pulled.astype(np.float32)
                for method, own in zip(workers, states):
                    method.update(own[i], pulled, rate)
                self.replayed.append((gradients[0], pulled))
                self.expected.append((sent[0], states[0][i].x.copy()))

    def replay(self, save_at):
        parts = [np.array([len(TENSORS), STEPS], "<u4").tobytes()]
        parts += [np.array([n, decays], "<u8").tobytes() for n, decays, _ in TENSORS]
        parts.append(np.array(self.rates, "<f8").tobytes())
        parts += [x.tobytes() for x in self.start]
        parts += [values.tobytes() for pair in self.replayed for values in pair]
        with tempfile.TemporaryDirectory() as folder:
            source, target = pathlib.Path(folder, "in"), pathlib.Path(folder, "out")
            source.write_bytes(b"".join(parts))
            subprocess.run([REPLAY, self.spec, source, target, str(save_at)], check=True, timeout=120)
            return target.read_bytes()


def distance(got, expected, scale):
    """Of the norm, or of `scale` if that is larger; the plain difference where both are zero."""
    norm = max(np.linalg.norm(expected), scale)
    return np.linalg.norm(got - expected) / (norm if norm > 0 else 1)


class ReferenceTest(unittest.TestCase):
    def test_every_method_is_among_the_cases(self):
        self.assertEqual({name for name, _, _ in CASES}, set(reference_methods.METHODS))

    def test_every_method_follows_the_reference(self):
        worst = {}
        for name, parameters, peak in CASES:
            run = Recording(name, parameters, peak)
            numbers = np.frombuffer(run.replay(0), "<f4").astype(np.float64)
            at = 0
            for position, (sent, x) in enumerate(run.expected):
                step, i = divmod(position, len(TENSORS))
                # What is sent is a sum of a gradient and a momentum, which may all but cancel in a
                # tensor of one element: rounding is in proportion to the summands.
                gradient = np.linalg.norm(run.replayed[position][0])
                for what, expected, scale in (("sent", sent, gradient), ("parameters", x, 0)):
                    got = numbers[at:at + expected.size]
                    at += expected.size
                    far = distance(got, expected, scale)
                    worst[run.spec, what] = max(worst.get((run.spec, what), 0), far)
                    self.assertLessEqual(far, TOLERANCE, (run.spec, step, TENSORS[i], what))
            self.assertEqual(at, numbers.size)
            # The run went somewhere, so that the comparison says something.
            moved = np.linalg.norm(run.expected[-len(TENSORS)][1] - run.start[0])
            self.assertGreater(moved, 0.05 * np.linalg.norm(run.start[0]), run.spec)
        for (spec, what), far in worst.items():
            print(f"{spec} {what}: at most {far:.1e}")

    def test_a_restored_run_goes_on_bit_for_bit(self):
        for name, parameters, peak in CASES:
            run = Recording(name, parameters, peak)
            uninterrupted = run.replay(0)
            for save_at in (1, 50, 130):
                self.assertEqual(run.replay(save_at), uninterrupted, (run.spec, save_at))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
