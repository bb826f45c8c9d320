#!/usr/bin/python3
"""messages.py ROOT: docs/operations.md and the programs speak of the same messages.

Of every message in the document's tables the longest run of plain words must occur in a text of the
sources, and every fixed text that is logged as a warning or an error must be in the document.
Prints every violation and exits with 1 if there is one.
"""

import pathlib
import re
import sys

CATALOGUE = "docs/operations.md"
SOURCES = ("server", "worker", "common", "compressors", "scripts")
LITERAL = r'"(?:[^"\\\n]|\\.)*"'
WORDS = re.compile(r"[a-z]+(?: [a-z]+)+|[a-z]{6,}")
# A message of the system's own, and field names, which stand apart in the sources.
NOT_OURS = ("address already in use", "network is unreachable")


def words_of(text):
    return " ".join(re.sub(r"[^a-z']", " ", text.lower().replace("\\n", " ")).split())


def literals_of(source):
    """String literals; those that stand side by side are one."""
    source = re.sub(r"^\s*(//|#).*$", "", source, flags=re.MULTILINE)
    for group in re.finditer(rf"f?{LITERAL}(?:\s*f?{LITERAL})*", source):
        yield "".join(text[1:-1].replace('\\"', '"') for text in re.findall(LITERAL, group[0]))


def source_files(root):
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".cc", ".h", ".py") or path.name in ("gradwire-launch", "shaped_net"):
                yield path


def messages_of(document):
    """The code in the first column of every table whose head is `Message`."""
    inside = False
    for line in document.splitlines():
        if line.startswith("| Message"):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|-"):
            yield from re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", line)[1])


def fixed_part(message):
    """The longest run of words that is no value: those have quotes, digits, dots or are in capitals."""
    plain = re.sub(r"'[^']*'|\S*[\d=<>\[\]]\S*|\b[\w-]+\.[\w.]+|\.\.\.|\b[A-Z]\b", " | ", message)
    # Who and what a message is about differs.
    plain = re.sub(r"\b(server|worker|rank|tensor|lane|onebit|none|expected|gradwire-\w+|[A-Z_]{2,})\b", " | ",
                   plain)
    parts = [words_of(part) for part in re.split(r"[|:;,()\"/]", plain)]
    return max(parts, key=len, default="")


def check(root, least_messages=80):
    document = (root / CATALOGUE).read_text(encoding="utf-8")
    texts = []
    problems = []
    catalogue = words_of(" ".join(messages_of(document)))
    for path in source_files(root):
        source = path.read_text(encoding="utf-8")
        texts += [words_of(text) for text in literals_of(source)]
        for call in re.finditer(rf"Log(?:Warn|Error)\(\s*{LITERAL},\s*({LITERAL}(?:\s*{LITERAL})*)", source):
            text = "".join(part[1:-1] for part in re.findall(LITERAL, call[1]))
            if words_of(text.split(":")[0]) not in catalogue:
                problems.append(f"{path.relative_to(root)}: {CATALOGUE} has no message '{text}'")
    corpus = "\n".join(texts)
    messages = list(messages_of(document))
    if len(messages) < least_messages:
        problems.append(f"{CATALOGUE}: {len(messages)} messages found, the tables are not read")
    for message in messages:
        part = fixed_part(message)
        if len(part) >= 6 and part not in corpus and part not in NOT_OURS:
            problems.append(f"{CATALOGUE}: no program says '{part}' (of `{message}`)")
    return problems


if __name__ == "__main__":
    found = check(pathlib.Path(sys.argv[1]).resolve())
    print("\n".join(found))
    sys.exit(1 if found else 0)
