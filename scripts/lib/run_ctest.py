#!/usr/bin/python3
"""run_ctest.py BUILD_DIR [ctest arguments]: runs ctest, lists what was skipped and why, and ends
with ctest's own summary. Exits with ctest's code.

A test says that it, or a part of it, was skipped by a line "SKIPPED: <reason>".
"""

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

REASON = re.compile(r"^\s*SKIPPED:\s*(.+)$", re.MULTILINE)
# Catch2: "All tests passed (12 assertions in 3 test cases)", "test cases: 3 | 2 passed | 1 failed".
CASES = re.compile(r"assertions? in (\d+) test cases?|^test cases:\s*(\d+)", re.MULTILINE)


def summary_of(lines):
    """ctest's summary: from "100% tests passed ..." on."""
    for number in range(len(lines) - 1, -1, -1):
        if re.match(r"\d+% tests passed", lines[number]):
            return [line for line in lines[number:] if line.strip()]
    return []


def headline_last(summary):
    """The same lines, with the label times before and the two that count at the end."""
    head = [line for line in summary if re.match(r"\d+% tests passed|Total Test time", line)]
    return [line for line in summary if line not in head] + head


def read_report(path):
    try:
        return list(xml.etree.ElementTree.parse(path).getroot().iter("testcase"))
    except (OSError, xml.etree.ElementTree.ParseError) as error:
        print(f"cannot read ctest's report: {error}", file=sys.stderr)
        return []


def main(build_dir, arguments):
    with tempfile.TemporaryDirectory() as scratch:
        report = os.path.join(scratch, "junit.xml")
        # One test at a time: several of them start jobs with many processes.
        command = ["ctest", "--test-dir", build_dir, "--output-on-failure", "--no-tests=error",
                   "--test-output-size-passed", "1000000", "--output-junit", report, *arguments]
        ctest = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace")
        lines = []
        for line in ctest.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line.rstrip("\n"))
        code = ctest.wait()
        cases = read_report(report)

    counts = {"passed": 0, "failed": 0, "skipped": 0}
    inner = 0
    skipped = []
    for case in cases:
        output = case.findtext("system-out") or ""
        inner += sum(int(a or b) for a, b in CASES.findall(output))
        reasons = REASON.findall(output)
        status = case.get("status")
        if status == "run":
            counts["passed"] += 1
        elif status == "fail":
            counts["failed"] += 1
        else:
            counts["skipped"] += 1
            if not reasons:
                element = case.find("skipped")
                message = element.get("message") if element is not None else None
                reasons = [message or "it gives no reason"]
        skipped += [(case.get("name"), reason) for reason in reasons]

    print(f"\nctest entries: {len(cases)}: {counts['passed']} passed, {counts['failed']} failed, "
          f"{counts['skipped']} skipped; Catch2 test cases in them: {inner}")
    if skipped:
        print("SKIPPED:")
        for name, reason in skipped:
            print(f"  {name}: {reason}")
    else:
        print("SKIPPED: none")
    print()
    print("\n".join(headline_last(summary_of(lines))), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
