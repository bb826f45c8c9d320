"""What the tests that start jobs share: their arguments, the environment of a job, and main."""

import os
import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = "/usr/bin/python3"
SKIPPED = 77
# The test's own arguments: LIBRARY BIN_DIR.
LIBRARY, BIN = (pathlib.Path(text).resolve() for text in sys.argv[1:3])
del sys.argv[1:3]


def environment(**more):
    """Of a job's processes: nothing of an outer job, one thread each, and `more`."""
    result = {key: value for key, value in os.environ.items()
              if not key.startswith(("GRADWIRE_", "DMLC_"))
              and key not in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")}
    paths = (ROOT / "worker" / "python", ROOT / "tests" / "python_package")
    result.update(PYTHONPATH=":".join(map(str, paths)), LIBGRADWIRE=str(LIBRARY),
                  PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1", **more)
    return result


def main(needs="import torch"):
    """Runs the tests of the program, or says SKIPPED and why where `needs` does not run."""
    found = subprocess.run([PYTHON, "-c", needs], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                           text=True, check=False)
    if found.returncode != 0:
        print("SKIPPED:", found.stderr.strip().splitlines()[-1])
        sys.exit(SKIPPED)
    unittest.main(verbosity=2)
