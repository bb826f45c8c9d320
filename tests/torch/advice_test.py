#!/usr/bin/python3
"""Which optimizers and compressors are warned of together.

Usage: advice_test.py   (exit code 77: there is no PyTorch)
"""

import importlib.util
import pathlib
import re
import sys
import unittest
import warnings

try:
    import torch
except ImportError as error:
    print(f"SKIPPED: this needs PyTorch (Debian: python3-torch): {error}")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parents[2]
# By its file: the package does not show it.
_SPEC = importlib.util.spec_from_file_location(
    "advice", ROOT / "worker" / "python" / "gradwire" / "torch" / "_advice.py")
_advice = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_advice)
sys.path.insert(0, str(ROOT / "worker" / "python"))
import gradwire.torch as methods  # noqa: E402  pylint: disable=wrong-import-position

CLASSES = {"none": "exact", "fp16": "contractive", "bf16": "contractive", "onebit": "contractive",
           "topk": "contractive", "two_means": "no_claim", "qsgd": "unbiased"}


def phase(uplink, downlink):
    def class_of(compressor):
        return CLASSES["two_means" if "two_means" in compressor else compressor.split("(")[0]]

    return {"uplink": uplink, "downlink": downlink, "uplink_class": class_of(uplink),
            "downlink_class": class_of(downlink)}


def unit(phases, *names):
    return {"phases": phases, "members": [{"tensor": name} for name in names]}


def plan(uplink, downlink="none", name="weight"):
    return {"units": [unit([phase("none", "none")], "bias"), unit([phase(uplink, downlink)], name)]}


def parameters():
    return [torch.nn.Parameter(torch.zeros(3))]


def advice(optimizer, of_plan, names=("weight", "bias")):
    return _advice.advice(optimizer, of_plan, names)


class AdviceTest(unittest.TestCase):

    def test_adaptive_optimizers_are_warned_of_biased_compressors_in_either_direction(self):
        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam,
                     torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Adagrad,
                     torch.optim.Adadelta):
            for of_plan in (plan("onebit"), plan("none", "topk(ratio=0.01)"),
                            plan("onebit(scaling=two_means)")):
                with self.subTest(kind=kind.__name__, plan=of_plan):
                    text = advice(kind(parameters(), lr=0.1), of_plan)
                    self.assertIn(kind.__name__, text)
                    self.assertIn("'weight'", text)
                    self.assertIn("configs/adam.yaml", text)

    def test_exact_unbiased_and_rounding_compressors_are_fine_with_adam(self):
        adam = torch.optim.Adam(parameters(), lr=0.1)
        for compressor in ("none", "fp16", "bf16", "qsgd"):
            self.assertIsNone(advice(adam, plan(compressor, compressor)), compressor)

    def test_optimizers_of_other_libraries_are_known_by_the_names_of_their_classes(self):
        class FusedLAMB(torch.optim.SGD):
            pass

        class Mine(torch.optim.Adam):
            pass

        class Lion(torch.optim.SGD):
            pass

        self.assertIn("FusedLAMB", advice(FusedLAMB(parameters(), lr=0.1), plan("topk")))
        self.assertIn("Mine", advice(Mine(parameters(), lr=0.1), plan("topk")))
        self.assertIsNone(advice(Lion(parameters(), lr=0.1), plan("topk")))

    def test_long_momentum_is_warned_of_onebit_alone(self):
        def sgd(momentum):
            return torch.optim.SGD(parameters(), lr=0.1, momentum=momentum)

        text = advice(sgd(0.9), plan("onebit", "onebit"))
        self.assertIn("momentum 0.9 and onebit", text)
        self.assertIn("configs/sgd_momentum.yaml", text)
        self.assertIn("onebit", advice(sgd(0.99), plan("topk", "onebit")))
        self.assertIsNone(advice(sgd(0.5), plan("onebit", "onebit")))
        self.assertIsNone(advice(sgd(0.9), plan("topk", "topk")))

    def test_one_group_with_long_momentum_is_enough(self):
        groups = [{"params": parameters(), "momentum": 0.0}, {"params": parameters(), "momentum": 0.95}]
        self.assertIn("0.95", advice(torch.optim.SGD(groups, lr=0.1), plan("onebit")))

    def test_methods_that_are_made_for_compression_are_fine(self):
        for kind in (methods.LANS, methods.CLAN, methods.DistEFSGDM, methods.OneBitAdam,
                     methods.OneBitLAMB):
            self.assertIsNone(advice(kind(parameters()), plan("onebit", "onebit")), kind.__name__)
        self.assertIsNone(advice(methods.MethodOptimizer(parameters(), 0.1, "clan"), plan("onebit")))
        for optimizer in (methods.AdamW(parameters()), methods.LAMB(parameters()),
                          methods.MethodOptimizer(parameters(), 0.1, "adamw(beta1=0.8)")):
            self.assertIn("configs/adam.yaml", advice(optimizer, plan("onebit")))
        self.assertIn("momentum 0.9", advice(methods.SGD(parameters()), plan("onebit")))

    def test_only_the_optimizers_own_tensors_count(self):
        adam = torch.optim.Adam(parameters(), lr=0.1)
        self.assertIsNone(advice(adam, plan("onebit", name="other")))
        self.assertIsNone(advice(adam, plan("onebit"), names=()))

    def test_only_the_last_phase_counts(self):
        adam = torch.optim.Adam(parameters(), lr=0.1)
        warm_up = {"units": [unit([phase("none", "none"), phase("topk", "topk")], "weight")]}
        self.assertIn("topk", advice(adam, warm_up))
        ends_plain = {"units": [unit([phase("topk", "topk"), phase("none", "none")], "weight")]}
        self.assertIsNone(advice(adam, ends_plain))

    def test_a_tensor_in_several_units_is_counted_once(self):
        cut = {"units": [unit([phase("onebit", "onebit")], "weight"),
                         unit([phase("onebit", "onebit")], "weight", "bias", "other")]}
        text = advice(torch.optim.Adam(parameters(), lr=0.1), cut)
        self.assertIn("'weight' and 1 more tensor:", text)

    def test_it_is_a_warning(self):
        adam = torch.optim.Adam(parameters(), lr=0.1)
        for compressor, expected in (("onebit", 1), ("bf16", 0)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _advice.advise(adam, plan(compressor), ("weight",))
            self.assertEqual([warning.category for warning in caught], [UserWarning] * expected)

    def test_the_files_that_it_names_are_there(self):
        source = (ROOT / "worker" / "python" / "gradwire" / "torch" / "_advice.py").read_text("utf-8")
        names = set(re.findall(r"(?:configs|docs)/[a-z_/]+\.(?:yaml|md)", source))
        self.assertIn("configs/adam.yaml", names)
        for name in names:
            self.assertTrue((ROOT / name).is_file(), name)


if __name__ == "__main__":
    unittest.main()
