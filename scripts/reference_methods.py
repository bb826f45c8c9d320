#!/usr/bin/python3
"""An independent second implementation of the adaptive methods, in NumPy and double precision.

Written from the formulas of docs/methods.md, not from the C++, so that a misreading in one cannot hide
in the other; tests/methods/reference_test.py compares them. As a program it prints how each method
comes down on a small quadratic:

  reference_methods.py [STEPS]

A method is made with its parameters and keeps one State a tensor:

  method = make("lans", beta1=0.95)
  state = method.new(x0, decays=True)       x0: the parameters, any shape
  sent = method.send(state, step, gradient) what a worker pushes in this step, counted from 0
  method.update(state, pulled, rate)        state.x changes
"""

import sys
import types

import numpy as np


def _norm(values):
    return float(np.sqrt(np.sum(np.square(values))))


class Method:
    defaults = {}

    def __init__(self, **given):
        unknown = set(given) - set(self.defaults)
        if unknown:
            raise ValueError(f"unknown parameters {sorted(unknown)}")
        self.p = types.SimpleNamespace(**{**self.defaults, **given})

    def new(self, x, decays=True):
        zeros = np.zeros(np.shape(x))
        return types.SimpleNamespace(x=np.array(x, dtype=np.float64), t=0, frozen=False,
                                     decay=self.p.weight_decay if decays else 0.0,
                                     m=zeros.copy(), v=zeros.copy(), w=zeros.copy())

    def send(self, state, step, gradient):
        return np.array(gradient, dtype=np.float64)

    def update(self, state, pulled, rate):
        state.t += 1
        self._update(state, np.asarray(pulled, dtype=np.float64), rate)


class Sgd(Method):
    defaults = {"momentum": 0.9, "weight_decay": 0.0}

    def _update(self, s, pulled, rate):
        s.v = self.p.momentum * s.v + pulled + s.decay * s.x
        s.x = s.x - rate * s.v


class DistEfSgdm(Method):
    defaults = {"momentum": 0.9, "weight_decay": 0.0}

    def send(self, s, step, gradient):
        s.m = self.p.momentum * s.m + gradient
        return gradient + self.p.momentum * s.m

    def _update(self, s, pulled, rate):
        s.w = self.p.momentum * (s.w + s.decay * s.x)
        s.x = s.x - rate * (pulled + s.w + s.decay * s.x)


class AdamW(Method):
    defaults = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01,
                "bias_correction": True}

    def moments(self, s, g):
        """m^ and v^ after this gradient."""
        s.m = self.p.beta1 * s.m + (1 - self.p.beta1) * g
        s.v = self.p.beta2 * s.v + (1 - self.p.beta2) * g ** 2
        if not self.p.bias_correction:
            return s.m, s.v
        return s.m / (1 - self.p.beta1 ** s.t), s.v / (1 - self.p.beta2 ** s.t)

    def _update(self, s, pulled, rate):
        m, v = self.moments(s, pulled)
        s.x = s.x - rate * (m / (np.sqrt(v) + self.p.eps) + s.decay * s.x)


class Lamb(AdamW):
    defaults = {**AdamW.defaults, "eps": 1e-6, "norm_low": 0.0, "norm_high": np.inf}

    def trust(self, x, direction):
        if _norm(x) == 0 or _norm(direction) == 0:
            return 1.0
        return min(max(_norm(x), self.p.norm_low), self.p.norm_high) / _norm(direction)

    def _update(self, s, pulled, rate):
        m, v = self.moments(s, pulled)
        r = m / (np.sqrt(v) + self.p.eps) + s.decay * s.x
        s.ratio = self.trust(s.x, r)
        s.x = s.x - rate * s.ratio * r


class Lans(Lamb):
    def _update(self, s, pulled, rate):
        norm = _norm(pulled)
        g = pulled / (norm + self.p.eps) if norm > 0 else pulled
        m, v = self.moments(s, g)
        divisor = np.sqrt(v) + self.p.eps
        r = m / divisor + s.decay * s.x
        c = g / divisor + s.decay * s.x
        s.x = s.x - rate * (self.p.beta1 * self.trust(s.x, r) * r
                            + (1 - self.p.beta1) * self.trust(s.x, c) * c)


class Onebit:
    """The warm-up of the two methods that freeze."""

    def send(self, s, step, gradient):
        if step < self.p.freeze_step:
            return np.array(gradient, dtype=np.float64)
        if not s.frozen:
            s.frozen = True
            if self.p.bias_correction:
                s.v = s.v / (1 - self.p.beta2 ** s.t)
            s.mask = s.v > 0
            if s.mask.any():
                least = self.p.v_floor ** 2 * np.mean(s.v[s.mask])
                s.v = np.where(s.mask, np.maximum(s.v, least), 0)
            self.freeze(s)
        return np.where(s.mask, self.p.beta1 * s.m + (1 - self.p.beta1) * gradient, 0) * s.scale


class OnebitAdam(Onebit, AdamW):
    defaults = {**AdamW.defaults, "weight_decay": 0.0, "freeze_step": None, "v_floor": 0.1}

    def freeze(self, s):
        s.scale = 1.0

    def _update(self, s, pulled, rate):
        if not s.frozen:
            return AdamW._update(self, s, pulled, rate)
        s.m = np.where(s.mask, pulled, 0)
        s.x = s.x - rate * (s.m / (np.sqrt(s.v) + self.p.eps) + s.decay * s.x)


class OnebitLamb(Onebit, Lamb):
    defaults = {**Lamb.defaults, "freeze_step": None, "v_floor": 0.1}

    def freeze(self, s):
        s.fresh = s.v.copy()
        s.factor = 1.0
        s.scale = np.sqrt(s.m.size) / _norm(s.m) if _norm(s.m) > 0 else 1.0

    def _update(self, s, pulled, rate):
        if not s.frozen:
            Lamb._update(self, s, pulled, rate)
            s.mean = s.ratio if s.t == 1 else 0.9 * s.mean + 0.1 * s.ratio
            return
        before = s.m
        s.m = np.where(s.mask, pulled / s.scale, 0)
        gradient = (s.m - self.p.beta1 * before) / (1 - self.p.beta1)
        s.fresh = self.p.beta2 * s.fresh + (1 - self.p.beta2) * gradient ** 2
        factor = 0.0
        if s.mask.any():
            factor = float(np.max(np.sqrt(s.v[s.mask]) / np.sqrt(s.fresh[s.mask])))
        factor = min(max(factor, 0.5), 4.0)
        s.factor = min(max(factor, 0.9 * s.factor), 1.1 * s.factor)
        s.x = s.x - rate * s.mean * s.factor * (s.m / (np.sqrt(s.v) + self.p.eps) + s.decay * s.x)


METHODS = {"sgd": Sgd, "adamw": AdamW, "lamb": Lamb, "lans": Lans, "clan": Lans,
           "dist_ef_sgdm": DistEfSgdm, "onebit_adam": OnebitAdam, "onebit_lamb": OnebitLamb}


def make(name, **parameters):
    return METHODS[name](**parameters)


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    curvature = np.linspace(0.1, 2, 50)
    for name in METHODS:
        method = make(name, **({"freeze_step": steps // 4} if "onebit" in name else {}))
        state = method.new(np.ones(50))
        for step in range(steps):
            gradient = curvature * state.x
            rate = 0.02 * (1 - step / steps)
            method.update(state, method.send(state, step, gradient), rate)
        print(f"{name:13} |x| from {np.sqrt(50):.3f} to {_norm(state.x):.4f}")


if __name__ == "__main__":
    main()
