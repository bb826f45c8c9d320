#!/usr/bin/python3
"""tidiness.py ROOT CHECK: one of the checks below. Exits with 0, 1 (violations, printed) or 77
(skipped, with the reason).

    files    no tracked file above 1 MiB, no build output tracked
    docs     the README names both commands; every file of configs/ is named in README or docs
    scripts  shell files parse, Python files compile, what has a #! may be executed
    format   clang-format changes nothing
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

SKIPPED = 77
MAX_BYTES = 1 << 20
# Other versions of clang-format lay some lines out differently.
CLANG_FORMAT_MAJOR = 14


def skip(reason):
    print(f"SKIPPED: {reason}")
    sys.exit(SKIPPED)


def tracked_files(root):
    if shutil.which("git") is None:
        skip("git is not installed")
    # The tree may belong to another user than the one who runs the tests.
    result = subprocess.run(["git", "-c", f"safe.directory={root}", "ls-files", "-z"], cwd=root,
                            capture_output=True, check=False, timeout=60)
    if result.returncode != 0:
        skip("the tree is not a git checkout")
    return [name for name in result.stdout.decode().split("\0") if name and (root / name).is_file()]


def check_files(root):
    for name in tracked_files(root):
        size = (root / name).stat().st_size
        if size > MAX_BYTES:
            yield f"{name}: {size} bytes; a tracked file has at most {MAX_BYTES}"
        if re.search(r"(^|/)(build|__pycache__|CMakeFiles)/|\.(o|a|so|pyc)$", name):
            yield f"{name}: build output is tracked"


def check_docs(root):
    readme = root / "README.md"
    texts = {path: path.read_text(encoding="utf-8")
             for path in [readme, *sorted((root / "docs").rglob("*.md"))] if path.is_file()}
    for command in ("scripts/quickstart", "scripts/test"):
        if command not in texts.get(readme, ""):
            yield f"README.md: does not name {command}"
        if not os.access(root / command, os.X_OK):
            yield f"{command}: is not there, or may not be executed"
    for config in sorted((root / "configs").glob("*.yaml")):
        if not any(config.name in text for text in texts.values()):
            yield f"configs/{config.name}: is named neither in README.md nor in docs/"


def interpreter(path):
    with open(path, "rb") as file:
        line = file.readline(200)
    return line[2:].decode("utf-8", "replace").strip() if line.startswith(b"#!") else ""


def check_scripts(root):
    for name in tracked_files(root):
        path = root / name
        runs_with = interpreter(path)
        if runs_with and not os.access(path, os.X_OK):
            yield f"{name}: begins with #!{runs_with}, but may not be executed"
        if "python" in runs_with or name.endswith(".py"):
            if runs_with and runs_with != "/usr/bin/python3":
                yield f"{name}: runs with {runs_with}, expected /usr/bin/python3"
            try:
                compile(path.read_text(encoding="utf-8"), name, "exec")
            except (SyntaxError, UnicodeDecodeError) as error:
                yield f"{name}: {error}"
        elif re.search(r"\b(ba)?sh$", runs_with) or name.endswith(".sh"):
            result = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True,
                                    check=False, timeout=60)
            if result.returncode != 0:
                yield f"{name}: {result.stderr.strip()}"


def check_format(root):
    candidates = [f"clang-format-{CLANG_FORMAT_MAJOR}", "clang-format"]
    program = next((name for name in candidates if shutil.which(name)), None)
    if program is None:
        skip("clang-format is not installed")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True,
                             timeout=60).stdout
    if f"version {CLANG_FORMAT_MAJOR}." not in version:
        skip(f"the tree is formatted with clang-format {CLANG_FORMAT_MAJOR}, here is {version.strip()}")
    names = [name for name in tracked_files(root) if name.endswith((".h", ".cc"))]
    result = subprocess.run([program, "--dry-run", "--Werror", "--style=file", *names], cwd=root,
                            capture_output=True, text=True, check=False, timeout=300)
    if result.returncode != 0:
        lines = {}
        for name, line in re.findall(r"^(\S+?):(\d+):\d+: error:", result.stderr, re.MULTILINE):
            lines.setdefault(name, []).append(line)
        for name, where in lines.items():
            yield f"{name}: clang-format -i would change it at line {', '.join(where[:5])}" + (
                ", ..." if len(where) > 5 else "")
        if not lines:
            yield result.stderr


CHECKS = {"files": check_files, "docs": check_docs, "scripts": check_scripts, "format": check_format}


def main(arguments):
    violations = list(CHECKS[arguments[1]](pathlib.Path(arguments[0]).resolve()))
    print("\n".join(violations) if violations else f"{arguments[1]}: nothing to complain about")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
