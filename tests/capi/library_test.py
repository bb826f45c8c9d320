#!/usr/bin/python3
"""libgradwire.so shows its interface and nothing else, and the C example runs as a job.

Usage: library_test.py LIBRARY HEADER NM BIN_DIR
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY, HEADER, NM, BIN = (pathlib.Path(text) for text in sys.argv[1:5])
del sys.argv[1:5]
DEADLINE_S = 120


def run(*command, cwd=None):
    return subprocess.run([str(word) for word in command], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S, check=False,
                          cwd=cwd)


def defined_symbols():
    """Names that the library shows, without their versions."""
    result = run(NM, "-D", "--defined-only", LIBRARY)
    if result.returncode != 0:
        raise AssertionError(result.stdout)
    entries = [line.split() for line in result.stdout.splitlines()]
    # An absolute symbol is the name of a version.
    return {entry[-1].split("@")[0] for entry in entries if entry[-2] != "A"}


def declared_functions():
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    return set(re.findall(r"\b(gradwire_\w+)\s*\(", text))


class SymbolsTest(unittest.TestCase):
    def test_shows_exactly_what_the_header_declares(self):
        declared = declared_functions()
        self.assertGreater(len(declared), 20)
        # Sanitizers bring their own.
        shown = {name for name in defined_symbols() if not re.match(r"__(a|t|ub)san|__sanit", name)}
        self.assertEqual(sorted(shown), sorted(declared))

    def test_is_found_under_its_major_version(self):
        result = run("readelf", "-d", LIBRARY)
        self.assertRegex(result.stdout, r"\(SONAME\).*\[libgradwire\.so\.\d+\]")


class ExampleTest(unittest.TestCase):
    def run_example(self, *options):
        with tempfile.TemporaryDirectory() as folder:
            return run(ROOT / "scripts" / "gradwire-launch", "--bin-dir", BIN, "--config",
                       ROOT / "configs" / "onebit.yaml", "--free-port", *options, "--",
                       BIN / "gradwire-c-example", cwd=folder)

    def test_two_workers_average_under_compression(self):
        result = self.run_example("--workers", "2")
        self.assertEqual(result.returncode, 0, result.stdout)
        match = re.search(r"rank 0 of 2: 20 rounds, pushed (\d+) kB as (\d+) kB", result.stdout)
        self.assertTrue(match, result.stdout)
        # One bit of 32 for nearly all, so well under an eighth.
        self.assertLess(int(match[2]) * 8, int(match[1]))

    def test_says_what_is_wrong_with_the_configuration(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "job.yaml"
            path.write_text("job: {workers: 2, wrokers: 3}\n", encoding="utf-8")
            result = subprocess.run(
                [str(BIN / "gradwire-c-example")], env={"GRADWIRE_CONFIG": str(path)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S,
                check=False)
        self.assertEqual(result.returncode, 2, result.stdout)
        self.assertIn("wrokers", result.stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
