#!/usr/bin/python3
"""floors.py ROOT: an include and a link may only point down.

    main, cli, trainer, capi
    server | worker                                 (never each other)
    common/transport | pipeline | plan | config     (not each other)
    compressors | common/wire                       (not each other)
    common/base, proto

Also: who may include which third-party library, and that every source file is in the build.
Prints every violation and exits with 1 if there is one.
"""

import pathlib
import re
import sys

# Longest prefix wins. A part is what may include freely within itself.
PARTS = [  # path prefix, part, floor
    ("proto", "proto", 0),
    ("common/base", "common/base", 0),
    ("common/wire", "common/wire", 1),
    ("compressors", "compressors", 1),
    ("common/transport", "common/transport", 2),
    ("common/pipeline", "common/pipeline", 2),
    ("common/plan", "common/plan", 2),
    ("common/config", "common/config", 2),
    ("server", "server", 3),
    ("worker", "worker", 3),
    ("server/main.cc", "main", 4),
    ("worker/capi", "capi", 4),
    ("worker/cli", "cli", 4),
    ("worker/trainer", "trainer", 4),
]
CODE = ("common", "compressors", "server", "worker")

# Which files alone may include what, and which CMake targets belong to it.
THIRD_PARTY = [
    ("oneTBB", r"(oneapi/)?tbb/.*", r"TBB::\w+", ("common/pipeline",)),
    ("ZeroMQ", r"zmq.*", r"PkgConfig::ZeroMQ", ("common/transport",)),
    ("yaml-cpp", r"yaml-cpp/.*", r"yaml-cpp(::yaml-cpp)?|\$\{YAML_CPP_LIBRARIES\}", ("common/config",)),
    ("Eigen", r"Eigen/.*", r"Eigen3::Eigen", ("worker/trainer",)),
    ("protobuf", r".*\.pb\.h|google/protobuf/.*", r"gradwire::proto|protobuf::libprotobuf[\w-]*",
     ("common/wire", "proto")),
    ("spdlog", r"spdlog/.*", r"spdlog::\w+", ("common/base",)),
]

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
CALL = re.compile(r"^\s*(gradwire_library|gradwire_executable|target_link_libraries)\s*\(([^)]*)\)",
                  re.MULTILINE)


def part_of(path):
    """(part, floor) of a path relative to the root, or None outside of the floors."""
    best = None
    for prefix, part, floor in PARTS:
        if path == prefix or path.startswith(prefix + "/"):
            if best is None or len(prefix) > len(best[0]):
                best = (prefix, part, floor)
    return best and best[1:]


def source_files(root, suffixes, folders=CODE):
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in suffixes and path.is_file():
                yield path.relative_to(root).as_posix()


def points_down(source, target):
    return source[0] == target[0] or target[1] < source[1]


def check_includes(root):
    for path in source_files(root, (".h", ".cc")):
        text = (root / path).read_text(encoding="utf-8")
        here = part_of(path)
        if here is None:
            yield f"{path}: belongs to no floor; give its folder one in tests/tree/floors.py"
            continue
        for included in INCLUDE.findall(text):
            target = part_of(included) if (root / included).is_file() else None
            if target and not points_down(here, target):
                yield (f"{path}: includes {included}, but {here[0]} (floor {here[1]}) may not use "
                       f"{target[0]} (floor {target[1]})")
            for library, pattern, _, allowed in THIRD_PARTY:
                if re.fullmatch(pattern, included) and not path.startswith(
                        tuple(folder + "/" for folder in allowed)):
                    yield f"{path}: includes {included}; {library} belongs into {', '.join(allowed)}"
        # Highway's "-inl.h" files are read once for each instruction set.
        if path.endswith(".h") and not path.endswith("-inl.h") and "#pragma once" not in text:
            yield f"{path}: has no #pragma once"


class Target:
    def __init__(self, name, folder, sources):
        self.name = name
        self.folder = folder
        self.sources = sources  # paths
        self.links = []         # names of our libraries, as gradwire::<name>
        self.foreign = []


def read_targets(root):
    """Targets made by gradwire_library and gradwire_executable, with what they link."""
    targets = {}
    for path in source_files(root, (".txt",)):
        if not path.endswith("/CMakeLists.txt"):
            continue
        folder = path.rsplit("/", 1)[0]
        text = re.sub(r"#.*", "", (root / path).read_text(encoding="utf-8"))
        for function, body in CALL.findall(text):
            words = body.split()
            name = words[0]
            if function == "gradwire_library":
                name = "gradwire_" + name
            target = targets.setdefault(name, Target(name, folder, []))
            for word in words[1:]:
                if word.startswith("gradwire::"):
                    target.links.append(word[len("gradwire::"):])
                elif re.search(r"\.(cc|h)$", word):
                    target.sources.append(f"{folder}/{word}")
                else:
                    target.foreign.append(word)
    return targets


def reachable(name, targets, seen=None):
    seen = set() if seen is None else seen
    if name not in seen and name in targets:
        seen.add(name)
        for link in targets[name].links:
            reachable("gradwire_" + link, targets, seen)
    return seen


def target_part(target):
    """A target stands where its highest source does (server/main.cc is above server)."""
    parts = [part_of(source) for source in target.sources] or [part_of(target.folder + "/")]
    parts = [part for part in parts if part]
    return max(parts, key=lambda part: part[1]) if parts else None


def check_links(root):
    targets = read_targets(root)
    owner = {source: target for target in targets.values() for source in target.sources}
    for target in targets.values():
        here = target_part(target)
        for link in target.links:
            other = targets.get("gradwire_" + link)
            if other is None:
                # gradwire::plugin is what is installed for those who build outside of the tree.
                if link not in ("proto", "plugin"):
                    yield f"{target.folder}/CMakeLists.txt: {target.name} links the unknown gradwire::{link}"
                continue
            there = target_part(other)
            if here and there and not points_down(here, there):
                yield (f"{target.folder}/CMakeLists.txt: {target.name} ({here[0]}, floor {here[1]}) may "
                       f"not link gradwire::{link} ({there[0]}, floor {there[1]})")
        for library, _, pattern, allowed in THIRD_PARTY:
            words = target.foreign + ["gradwire::" + link for link in target.links]
            if any(re.fullmatch(pattern, word) for word in words) and not (
                    target.folder + "/").startswith(tuple(folder + "/" for folder in allowed)):
                yield (f"{target.folder}/CMakeLists.txt: {target.name} links {library}, which belongs "
                       f"into {', '.join(allowed)}")
        known = reachable(target.name, targets)
        for source in target.sources:
            if not (root / source).is_file():
                yield f"{target.folder}/CMakeLists.txt: {target.name} names {source}, which is not there"
                continue
            for included in INCLUDE.findall((root / source).read_text(encoding="utf-8")):
                needed = owner.get(included)
                if needed and needed.name not in known:
                    yield (f"{source}: includes {included} of {needed.name}, which {target.name} does "
                           "not link")


def check_sources(root):
    """A file that no CMakeLists.txt names is never compiled, and its tests never run."""
    for path in source_files(root, (".cc", ".h"), (*CODE, "tests")):
        if path.startswith("tests/") and path.endswith(".h"):
            continue
        named = False
        for folder in pathlib.PurePosixPath(path).parents:
            lists = root / folder / "CMakeLists.txt"
            name = re.escape(pathlib.PurePosixPath(path).relative_to(folder).as_posix())
            if lists.is_file() and re.search(rf"(?<![\w./-]){name}(?![\w./-])",
                                             lists.read_text(encoding="utf-8")):
                named = True
        if not named:
            yield f"{path}: is in no CMakeLists.txt"


def check(root):
    return [*check_includes(root), *check_links(root), *check_sources(root)]


if __name__ == "__main__":
    violations = check(pathlib.Path(sys.argv[1]).resolve())
    print("\n".join(violations) if violations else "every include and link points down")
    sys.exit(1 if violations else 0)
