#!/usr/bin/python3
"""The checks of this folder find what they are for, each in a small tree with one fault."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.dont_write_bytecode = True

import floors  # noqa: E402
import messages  # noqa: E402
import tidiness  # noqa: E402

GOOD = {
    "common/base/CMakeLists.txt": "gradwire_library(base SOURCES a.cc HEADERS a.h)\n",
    "common/base/a.h": "#pragma once\n#include <string>\n",
    "common/base/a.cc": '#include "common/base/a.h"\n',
    "common/wire/CMakeLists.txt":
        "gradwire_library(wire SOURCES w.cc HEADERS w.h PUBLIC gradwire::base PRIVATE gradwire::proto)\n",
    "common/wire/w.h": '#pragma once\n#include "common/base/a.h"\n',
    "common/wire/w.cc": '#include "common/wire/w.h"\n#include "gradwire/v1/wire.pb.h"\n',
    "common/transport/CMakeLists.txt":
        "gradwire_library(transport\n  SOURCES t.cc HEADERS t.h PUBLIC gradwire::wire\n"
        "  PRIVATE PkgConfig::ZeroMQ)\n",
    "common/transport/t.h": '#pragma once\n#include "common/wire/w.h"\n',
    "common/transport/t.cc": '#include "common/transport/t.h"\n#include <zmq.h>\n',
    "common/plan/CMakeLists.txt": "gradwire_library(plan HEADERS p.h PUBLIC gradwire::wire)\n",
    "common/plan/p.h": '#pragma once\n#include "common/wire/w.h"\n',
    "compressors/CMakeLists.txt":
        "gradwire_library(compressors SOURCES codecs/c.cc PUBLIC gradwire::base)\n",
    "compressors/codecs/c.cc": '#include "common/base/a.h"\n',
    "server/CMakeLists.txt":
        "gradwire_library(server SOURCES s.cc HEADERS s.h PUBLIC gradwire::transport gradwire::plan)\n"
        "gradwire_executable(gradwire-server SOURCES main.cc LINK gradwire::server)\n",
    "server/s.h": '#pragma once\n#include "common/transport/t.h"\n#include "common/plan/p.h"\n',
    "server/s.cc": '#include "server/s.h"\n',
    "server/main.cc": '#include "server/s.h"\n',
    "worker/client/CMakeLists.txt":
        "gradwire_library(client HEADERS c.h PUBLIC gradwire::transport)\n",
    "worker/client/c.h": '#pragma once\n#include "common/transport/t.h"\n',
    "tests/base/CMakeLists.txt": "gradwire_test(base_test SOURCES a_test.cc)\n",
    "tests/base/a_test.cc": '#include "common/base/a.h"\n',
}


class FloorsTest(unittest.TestCase):
    def check(self, changes):
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            for name, text in {**GOOD, **changes}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            return floors.check(root)

    def assert_found(self, changes, *expected):
        found = self.check(changes)
        self.assertEqual(len(found), len(expected), found)
        for text in expected:
            self.assertTrue(any(text in line for line in found), (text, found))

    def test_a_tree_in_order_passes(self):
        self.assertEqual(self.check({}), [])

    def test_an_include_that_points_up_is_found(self):
        self.assert_found({"common/base/a.cc": '#include "common/wire/w.h"\n'},
                          "a.cc: includes common/wire/w.h, but common/base (floor 0)",
                          "w.h of gradwire_wire, which gradwire_base does not link")

    def test_includes_between_neighbours_are_found(self):
        self.assert_found({"compressors/codecs/c.cc": '#  include "common/wire/w.h"\n'},
                          "may not use common/wire", "does not link")
        self.assert_found({"common/plan/p.h": '#pragma once\n#include "common/transport/t.h"\n'},
                          "may not use common/transport", "does not link")
        self.assert_found({"worker/client/c.h": '#pragma once\n#include "server/s.h"\n'},
                          "worker (floor 3) may not use server (floor 3)", "does not link")

    def test_a_library_must_not_include_main(self):
        self.assert_found({"server/s.cc": '#include "server/main.cc"\n'},
                          "server (floor 3) may not use main", "does not link")

    def test_foreign_includes_are_kept_in_their_folder(self):
        for include, library in (("zmq.h", "ZeroMQ"), ("zmq.hpp", "ZeroMQ"), ("tbb/task.h", "oneTBB"),
                                 ("oneapi/tbb/task.h", "oneTBB"), ("yaml-cpp/yaml.h", "yaml-cpp"),
                                 ("Eigen/Core", "Eigen"), ("gradwire/v1/wire.pb.h", "protobuf"),
                                 ("spdlog/spdlog.h", "spdlog")):
            with self.subTest(include=include):
                self.assert_found({"server/s.cc": f"#include <{include}>\n"}, f"{library} belongs into")

    def test_links_that_point_up_or_sideways_are_found(self):
        self.assert_found(
            {"common/wire/CMakeLists.txt":
                 "gradwire_library(wire SOURCES w.cc HEADERS w.h PUBLIC gradwire::base\n"
                 "  PRIVATE gradwire::proto gradwire::plan)\n"},
            "may not link gradwire::plan")
        self.assert_found(
            {"worker/client/CMakeLists.txt":
                 "gradwire_library(client HEADERS c.h PUBLIC gradwire::transport gradwire::server)\n"},
            "may not link gradwire::server")

    def test_foreign_links_are_kept_in_their_folder(self):
        self.assert_found(
            {"common/plan/CMakeLists.txt":
                 "gradwire_library(plan HEADERS p.h PUBLIC gradwire::wire PRIVATE TBB::tbb)\n"},
            "gradwire_plan links oneTBB")

    def test_an_include_without_its_link_is_found(self):
        self.assert_found(
            {"worker/client/CMakeLists.txt": "gradwire_library(client HEADERS c.h PUBLIC gradwire::base)\n"},
            "which gradwire_client does not link")

    def test_a_source_that_is_not_built_is_found(self):
        self.assert_found({"server/forgotten.cc": ""}, "server/forgotten.cc: is in no CMakeLists.txt")
        self.assert_found({"tests/base/b_a_test.cc": ""}, "b_a_test.cc: is in no CMakeLists.txt")

    def test_a_header_without_pragma_once_is_found(self):
        self.assert_found({"common/base/a.h": ""}, "has no #pragma once")

    def test_a_folder_without_a_floor_is_found(self):
        self.assert_found({"common/new/n.h": "#pragma once\n"}, "belongs to no floor",
                          "is in no CMakeLists.txt")


class MessagesTest(unittest.TestCase):
    DOCUMENT = """
| Message | What it means |
|---|---|
| `worker 1 at 10.0.0.3 is lost: nothing heard for 1.0 s` | it is gone |
| `not of this table's kind` | x |

| Code | Meaning |
|---|---|
| `no message at all` | x |
"""
    SOURCE = """
LogWarn("lane", "something is odd", {});
Fail(fmt::format("{} is lost: nothing heard "
                 "for {:.1f} s", who, seconds));
"""

    def test_messages_that_only_one_side_has_are_found(self):
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            (root / "docs").mkdir()
            (root / "server").mkdir()
            (root / "docs" / "operations.md").write_text(self.DOCUMENT)
            (root / "server" / "a.cc").write_text(self.SOURCE)
            found = messages.check(root, least_messages=2)
            self.assertEqual(len(found), 2, found)
            self.assertIn("has no message 'something is odd'", found[0])
            self.assertIn("no program says 'not of this table's kind'", found[1])
            self.assertIn("2 messages found", messages.check(root, least_messages=3)[1])


class TidinessTest(unittest.TestCase):
    def setUp(self):
        self._directory = tempfile.TemporaryDirectory()
        self.addCleanup(self._directory.cleanup)
        self.root = pathlib.Path(self._directory.name)
        subprocess.run(["git", "init", "-q", str(self.root)], check=True, timeout=60)

    def write(self, name, text, mode=0o644):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        subprocess.run(["git", "add", "-f", name], cwd=self.root, check=True, timeout=60)

    def found(self, check):
        return "\n".join(tidiness.CHECKS[check](self.root))

    def test_large_files_and_build_output_are_found(self):
        self.write("small", "x" * tidiness.MAX_BYTES)
        self.assertEqual(self.found("files"), "")
        self.write("large", "x" * (tidiness.MAX_BYTES + 1))
        self.write("a/__pycache__/b.pyc", "")
        self.assertIn("large: 1048577 bytes", self.found("files"))
        self.assertIn("b.pyc: build output", self.found("files"))

    def test_commands_and_configurations_must_be_documented(self):
        for name in ("scripts/quickstart", "scripts/test"):
            self.write(name, "", 0o755)
        self.write("configs/job.yaml", "")
        self.write("README.md", "scripts/quickstart scripts/test")
        self.assertEqual(self.found("docs"), "configs/job.yaml: is named neither in README.md nor in docs/")
        self.write("docs/a/b.md", "see configs/job.yaml")
        self.assertEqual(self.found("docs"), "")
        self.write("README.md", "scripts/test")
        self.assertEqual(self.found("docs"), "README.md: does not name scripts/quickstart")

    def test_broken_scripts_are_found(self):
        self.write("a.sh", "echo ok\n")
        self.write("b.py", "print(1)\n")
        self.assertEqual(self.found("scripts"), "")
        self.write("c", "#!/bin/bash\nif\n", 0o755)
        self.write("d", "#!/usr/bin/python3\nif\n", 0o755)
        self.write("e", "#!/bin/sh\n")
        self.write("f", "#!/usr/bin/env python3\n", 0o755)
        self.assertRegex(self.found("scripts"), r"(?s)c: .*syntax error.*d: invalid syntax.*"
                         r"e: begins with #!/bin/sh, but may not be executed.*f: runs with")

    def test_unformatted_code_is_found(self):
        self.write(".clang-format", "BasedOnStyle: Google\n")
        self.write("a.cc", "int a;\n")
        try:
            self.assertEqual(self.found("format"), "")
        except SystemExit:
            self.skipTest("clang-format is not here, or another version")
        self.write("a.cc", "int    a;\n")
        self.assertEqual(self.found("format"), "a.cc: clang-format -i would change it at line 1")


if __name__ == "__main__":
    unittest.main()
