#!/usr/bin/python3
"""The Python package in jobs of two real workers, and its installation.

Usage: package_test.py LIBRARY BIN_DIR
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "worker" / "python"
WORKER = pathlib.Path(__file__).resolve().parent / "worker.py"
LIBRARY, BIN = (pathlib.Path(text).resolve() for text in sys.argv[1:3])
del sys.argv[1:3]
DEADLINE_S = 240


def environment(**more):
    result = {key: value for key, value in os.environ.items()
              if not key.startswith(("GRADWIRE_", "DMLC_"))}
    result.update(PYTHONPATH=str(PACKAGE), LIBGRADWIRE=str(LIBRARY), PYTHONDONTWRITEBYTECODE="1")
    result.update(more)
    return result


def run(command, env, cwd=None):
    return subprocess.run([str(word) for word in command], env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S, check=False,
                          cwd=cwd)


def run_python(text, **more):
    return run(["/usr/bin/python3", "-c", text], environment(**more))


class JobTest(unittest.TestCase):
    """Each scenario of worker.py, with both ranks' checks."""

    def run_job(self, scenario, *settings, expected=0, done=True, **more):
        with tempfile.TemporaryDirectory() as folder:
            command = [ROOT / "scripts" / "gradwire-launch", "--bin-dir", BIN, "--free-port",
                       "--workers", "2", "--servers", "1"]
            for setting in settings:
                command += ["--set", setting]
            result = run([*command, "--", "/usr/bin/python3", WORKER, scenario],
                         environment(GRADWIRE_LOCAL_RANK="1", GRADWIRE_LOCAL_SIZE="2", **more),
                         cwd=folder)
        self.assertEqual(result.returncode, expected, result.stdout)
        if done:
            self.assertIn(f"{scenario} done", result.stdout)
        return result.stdout

    def test_sums_every_dtype_and_shape(self):
        self.run_job("types_and_shapes")

    def test_works_in_place_and_on_arrays_with_strides(self):
        self.run_job("in_place_and_strides")

    def test_takes_another_array_under_the_same_name_every_round(self):
        self.run_job("fresh_arrays")

    def test_shows_the_plan(self):
        self.run_job("plan", "compression.uplink.compressor=onebit", "compression.warmup_steps=5")

    def test_lists_what_the_filter_sends(self):
        for inactive in ("zero_fill", "skip"):
            with self.subTest(inactive=inactive):
                self.run_job("filtered", "compression.filter.type=covap",
                             "compression.filter.interval=2", "partition.bytes=16KiB",
                             "partition.fuse_below=0", f"compression.filter.inactive={inactive}")

    def test_has_many_in_flight_and_loses_no_result(self):
        self.run_job("asynchronous")

    def test_a_wait_with_a_deadline_ends_nothing(self):
        self.run_job("deadline")

    def test_every_compressor_keeps_the_average(self):
        for compressor in ("none", "fp16", "bf16", "onebit", "topk"):
            with self.subTest(compressor=compressor):
                settings = ["compression.min_bytes=0B"]
                if compressor == "topk":
                    settings += ["compression.uplink.ratio=0.2", "compression.downlink.ratio=0.2"]
                self.run_job("compressed", *settings,
                             GRADWIRE_COMPRESSION_UPLINK_COMPRESSOR=compressor,
                             GRADWIRE_COMPRESSION_DOWNLINK_COMPRESSOR=compressor)

    def test_says_which_push_pull_was_not_finite_and_whose_fault_it_was(self):
        for compressor in ("none", "onebit"):
            with self.subTest(compressor=compressor):
                output = self.run_job("not_finite", f"compression.uplink.compressor={compressor}",
                                      f"compression.downlink.compressor={compressor}",
                                      "compression.min_bytes=0B")
                self.assertRegex(output, "void round: not finite.* 2 tensors from 'small' .* step=1 "
                                 """ranks=0 suppressed=0 here="tensor 'bad', element 7""")

    def test_says_once_what_compression_saves_and_costs(self):
        line = (r"compression saves (\d+\.\d+) ms and costs (\d+\.\d+) ms a step(; .*)? saves_ms=\d\S* "
                r"costs_ms=\d\S* goodput_mbit_s=\d")
        for compressor, steps, lines in (("onebit", 49, 0), ("onebit", 120, 1), ("none", 60, 0)):
            with self.subTest(compressor=compressor, steps=steps):
                output = self.run_job("worth", f"compression.uplink.compressor={compressor}",
                                      f"compression.downlink.compressor={compressor}", STEPS=str(steps),
                                      COMPRESSED="yes" if compressor == "onebit" else "no")
                found = re.findall(line, output)
                self.assertEqual(len(found), lines, output)
                for saves, costs, advice in found:
                    self.assertGreater(float(saves), 0)
                    self.assertGreater(float(costs), 0)
                    self.assertEqual("compression.uplink.compressor" in advice,
                                     float(costs) > float(saves), output)

    def test_broadcasts_any_array_exactly(self):
        self.run_job("broadcasts", "compression.uplink.compressor=onebit",
                     "compression.downlink.compressor=onebit", "compression.min_bytes=0B")

    def test_refuses_wrong_calls_by_name(self):
        self.run_job("wrong_calls")

    def test_tensors_that_differ_end_the_job_with_both_values(self):
        # The server's own exit code; the workers have been told and are content.
        output = self.run_job("differing", expected=1, done=False)
        self.assertIn("workers declare different tensors", output)
        self.assertNotIn("Traceback", output)

    def test_saves_and_loads_the_state(self):
        self.run_job("state", "compression.uplink.compressor=onebit",
                     "compression.downlink.compressor=onebit", "compression.min_bytes=0B")

    def test_a_state_that_is_wrong_on_one_rank_ends_the_job_on_both(self):
        for scenario in ("damaged_state", "state_of_another_rank"):
            with self.subTest(scenario=scenario):
                output = self.run_job(scenario, expected=1, done=False)
                self.assertNotIn("Traceback", output)
                self.assertIn(f"{scenario} done", output)

    def test_residuals_follow_learning_rate_and_loss_scale(self):
        self.run_job("scales", "compression.uplink.compressor=onebit",
                     "compression.downlink.compressor=onebit", "compression.min_bytes=0B",
                     "compression.uplink.feedback=ef_lr", "compression.downlink.feedback=ef_lr")

    def test_refuses_to_work_in_a_forked_process(self):
        self.run_job("forked")

    def test_a_program_may_end_without_shutdown(self):
        self.run_job("no_farewell")

    def test_a_lost_peer_is_named_and_has_its_exit_code(self):
        output = self.run_job("lost_peer", expected=5, done=False)
        self.assertIn("rank 0 knows", output)


class AloneTest(unittest.TestCase):
    def test_says_where_it_looked_for_the_library(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(PACKAGE / "gradwire", pathlib.Path(folder) / "gradwire")
            env = environment(PYTHONPATH=folder)
            del env["LIBGRADWIRE"]
            text = ("import gradwire, gradwire._library as l\n"
                    "l._FILE_NAMES = ('libgradwire_of_nobody.so',)\n"
                    "try: gradwire.init()\n"
                    "except gradwire.GradwireError as e: print(e.code.name, e.exit_code, e)")
            result = run(["/usr/bin/python3", "-c", text], env)
        self.assertTrue(result.stdout.startswith("NOT_FOUND 2 "), result.stdout)
        self.assertIn(f"{folder}/gradwire/libgradwire_of_nobody.so (not there)", result.stdout)
        self.assertIn("LIBGRADWIRE", result.stdout)

    def test_says_what_is_wrong_with_the_library_that_is_given(self):
        text = ("import gradwire\n"
                "try: gradwire.init()\n"
                "except gradwire.GradwireError as e: print(e)")
        for path, part in (("/nonexistent/libgradwire.so", "not there"), (__file__, "invalid ELF"),
                           ("libc.so.6", "another library")):
            with self.subTest(path=path):
                result = run_python(text, LIBGRADWIRE=path)
                self.assertIn(path, result.stdout)
                self.assertIn(part, result.stdout)

    def test_a_library_that_lacks_a_function_is_named_with_it(self):
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            self.skipTest("SKIPPED: there is no C compiler")
        with tempfile.TemporaryDirectory() as folder:
            source, library = (pathlib.Path(folder) / name for name in ("old.c", "libold.so"))
            source.write_text("unsigned gradwire_abi_version(void) { return 1; }\n"
                              "void gradwire_version(void) {}\n", encoding="utf-8")
            built = run([compiler, "-shared", "-fPIC", source, "-o", library], environment())
            self.assertEqual(built.returncode, 0, built.stdout)
            result = run_python("import gradwire\n"
                                "try: gradwire.init()\n"
                                "except gradwire.GradwireError as e: print(e)",
                                LIBGRADWIRE=str(library))
        self.assertIn(f"{library} (lacks gradwire_last_error, gradwire_init, ", result.stdout)
        self.assertNotIn("gradwire_version", result.stdout)

    def test_says_that_init_comes_first(self):
        for call in ("rank()", "barrier()", "stats()", "end_step()", "state_dict()",
                     "push_pull(numpy.ones(1), name='w')"):
            with self.subTest(call=call):
                result = run_python(
                    "import gradwire, numpy\n"
                    f"try: gradwire.{call}\n"
                    "except gradwire.GradwireError as e: print(e)\n"
                    "gradwire.shutdown()\n"
                    "print(gradwire.is_initialized())")
                self.assertEqual(result.stdout.splitlines(), [
                    "gradwire is not initialized: call gradwire.init() first", "False"])

    def test_a_wrong_configuration_is_exit_code_2(self):
        result = run_python(
            "import gradwire, sys\n"
            "try: gradwire.init(settings={'job.wrokers': 2}, rank=0)\n"
            "except gradwire.GradwireError as e: print(e); sys.exit(e.exit_code)")
        self.assertEqual(result.returncode, 2, result.stdout)
        self.assertIn("job.wrokers", result.stdout)

    def test_structures_are_those_of_the_header(self):
        """The sizes that a C compiler gives, so that the two can't drift apart."""
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            self.skipTest("SKIPPED: there is no C compiler")
        with tempfile.TemporaryDirectory() as folder:
            source, program = pathlib.Path(folder) / "sizes.c", pathlib.Path(folder) / "sizes"
            source.write_text(
                '#include "worker/capi/gradwire.h"\n#include <stdio.h>\n'
                'int main(void) { printf("%zu %zu %zu %d %d\\n", sizeof(gradwire_tensor), '
                "sizeof(gradwire_handle), sizeof(gradwire_stats), GRADWIRE_ABI_VERSION, "
                "(int)GRADWIRE_INTERNAL); return 0; }\n", encoding="utf-8")
            built = run([compiler, "-I", ROOT, source, "-o", program], environment())
            self.assertEqual(built.returncode, 0, built.stdout)
            expected = run([program], environment()).stdout.strip()
        result = run_python(
            "import ctypes, gradwire, gradwire._library as l\n"
            "print(*map(ctypes.sizeof, (l.Tensor, l.Handle, l.Stats)), l.ABI_VERSION,"
            " max(gradwire.Code).value)")
        self.assertEqual(result.stdout.strip(), expected)


class InstallTest(unittest.TestCase):
    def test_pip_installs_it_without_a_network(self):
        missing = run(["/usr/bin/python3", "-c", "import setuptools, wheel, pip, venv, ensurepip"],
                      environment())
        if missing.returncode != 0:
            self.skipTest(f"SKIPPED: {missing.stdout.strip().splitlines()[-1]}")
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            env = environment(HOME=str(folder), PIP_NO_INDEX="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
            del env["PYTHONPATH"]
            made = run(["/usr/bin/python3", "-m", "venv", "--system-site-packages", folder / "venv"],
                       env)
            self.assertEqual(made.returncode, 0, made.stdout)
            # setuptools writes beside what it builds, so not in the tree.
            shutil.copytree(PACKAGE, folder / "source")
            python = folder / "venv" / "bin" / "python3"
            installed = run([python, "-m", "pip", "install", "--no-build-isolation",
                             folder / "source"], env)
            self.assertEqual(installed.returncode, 0, installed.stdout)
            result = run([python, "-c", "import gradwire; print(gradwire.version(), gradwire.__file__);"
                          "import importlib.metadata as m; print(m.version('gradwire'));"
                          "import pathlib; print((pathlib.Path(gradwire.__file__).parent /"
                          " 'py.typed').exists())"], env, cwd=folder)
        lines = result.stdout.splitlines()
        self.assertEqual(len(lines), 3, result.stdout)
        self.assertIn(str(folder / "venv"), lines[0])
        self.assertEqual(lines[0].split()[0], lines[1])  # library and package are of one version
        self.assertEqual(lines[2], "True")


if __name__ == "__main__":
    unittest.main(verbosity=2)
