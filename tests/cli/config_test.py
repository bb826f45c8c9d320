#!/usr/bin/python3
"""The real programs with environments: gradwire config, and what server and workers make of them.

Usage: config_test.py BIN_DIR
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

BIN = pathlib.Path(sys.argv.pop(1))
DEADLINE_S = 60
PROGRAMS = ("gradwire-server", "gradwire-train", "push_pull_worker")


def run(program, *arguments, **environment):
    return subprocess.run([str(BIN / program), *arguments], env={"PATH": "/usr/bin:/bin", **environment},
                          capture_output=True, text=True, timeout=DEADLINE_S, check=False)


class ConfigTest(unittest.TestCase):
    def described(self, *arguments, **environment):
        done = run("gradwire", "config", "--json", *arguments, **environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        values = {row["name"]: (row["value"], row["source"]) for row in found["keys"] + found["process"]}
        return values, found

    def refused(self, program, expect, *arguments, **environment):
        done = run(program, *arguments, **environment)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(expect, done.stderr)

    def test_each_layer_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "job.yaml"
            path.write_text("partition:\n  credit: 4MiB\nendpoint: tcp://b:1\n")
            values, found = self.described("--config", str(path), "--set", "log.level=warn", RANK="1",
                                           WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="29500",
                                           GRADWIRE_JOB_SEED="7", BYTEPS_NUMA_ON="1")
        self.assertEqual(values["log.level"], ("warn", "--set log.level"))
        self.assertEqual(values["job.seed"], ("7", "GRADWIRE_JOB_SEED"))
        self.assertEqual(values["job.workers"], ("2", "WORLD_SIZE"))
        self.assertEqual(values["endpoint"], ("tcp://a:29501", "MASTER_ADDR, MASTER_PORT"))
        self.assertEqual(values["partition.credit"], ("4MiB", f"{path}:2"))
        self.assertEqual(values["job.servers"], ("1", "default"))
        self.assertEqual(values["rank"], ("1", "RANK"))
        self.assertEqual(values["config"], (str(path), "--config"))
        self.assertEqual(found["ignored"], [{"name": "BYTEPS_NUMA_ON", "note": ""}])
        self.assertEqual(len(found["warnings"]), 1)
        self.assertIn("overrules tcp://b:1", found["warnings"][0])

    def test_a_path_in_any_language_comes_out_as_it_is(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "jöb \"№1\".yaml"
            path.write_text("partition: {credit: 4MiB}\n")
            values, _ = self.described("--config", str(path))
            self.assertEqual(values["partition.credit"], ("4MiB", f"{path}:1"))
            done = run("gradwire", "config", "--config", str(path))
            self.assertIn(f"{path}:1", done.stdout)

    def test_a_server_sees_its_own(self):
        values, _ = self.described("--server", SLURM_PROCID="1", SLURM_NTASKS="2", RANK="0")
        self.assertEqual(values["role"], ("server", "program"))
        self.assertEqual(values["rank"], ("1", "SLURM_PROCID"))
        self.assertEqual(values["job.servers"], ("2", "SLURM_NTASKS"))
        self.assertEqual(self.described(DMLC_ROLE="server")[0]["role"], ("server", "DMLC_ROLE"))

    def test_the_text_has_aligned_columns(self):
        done = run("gradwire", "config", WORLD_SIZE="2", DMLC_ENABLE_RDMA="0")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        rows = {line.split()[0]: line for line in lines if line}
        self.assertEqual(rows["job.workers"].index("WORLD_SIZE"), rows["job.seed"].index("default"))
        self.assertIn("DMLC_ENABLE_RDMA has no meaning here: the network is TCP", lines)

    def test_wrong_configurations_end_with_2(self):
        self.refused("gradwire", "did you mean 'partition.credit'?", "config", "--set",
                     "partition.credits=1MiB")
        self.refused("gradwire", "did you mean 'GRADWIRE_PARTITION_CREDIT'?", "config",
                     GRADWIRE_PARTITION_CREDITS="1MiB")
        self.refused("gradwire", "metrics are not available yet", "config", "--set", "metrics.listen=*:80")
        self.refused("gradwire", "method lans does without", "config", "--set", "method=clan")
        self.refused("gradwire", "RANK is 'two', expected a whole number", "config", RANK="two")
        self.refused("gradwire", "--bogus", "config", "--bogus")
        self.assertEqual(run("gradwire").returncode, 2)

    def test_the_version(self):
        done = run("gradwire", "--version")
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stdout, r"^gradwire \d+\.\d+\.\d+\n$")

    def test_a_scheduler_has_nothing_to_do(self):
        for program, arguments in ((("gradwire"), ["config"]), *((name, []) for name in PROGRAMS)):
            with self.subTest(program=program):
                done = run(program, *arguments, DMLC_ROLE="scheduler", DMLC_NUM_WORKER="2")
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("server 0, the root, does its work", done.stdout + done.stderr)

    def test_programs_refuse_what_is_not_for_them(self):
        for program in PROGRAMS:
            with self.subTest(program=program):
                mine, other = ("server", "worker") if program == "gradwire-server" else ("worker", "server")
                self.refused(program, f"GRADWIRE_ROLE is '{other}', but this program is a {mine}",
                             GRADWIRE_ROLE=other)
                self.refused(program, f"DMLC_ROLE is '{other}', but this program is a {mine}",
                             DMLC_ROLE=other)
                self.refused(program, "training is synchronous", BYTEPS_ENABLE_ASYNC="1")
                self.refused(program, "SLURM_PROCID", GRADWIRE_JOB_WORKERS="2", GRADWIRE_JOB_SERVERS="2")
                self.refused(program, "SLURM_PROCID is '2', expected below 2", SLURM_PROCID="2",
                             GRADWIRE_JOB_WORKERS="2", GRADWIRE_JOB_SERVERS="2")

    def test_a_program_warns_of_what_overrules_its_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "job.yaml"
            path.write_text("endpoint: tcp://b:9\ntimeouts: {start: 100ms}\n")
            # Nothing listens on port 1.
            done = run("push_pull_worker", "--config", str(path), DMLC_PS_ROOT_URI="127.0.0.1",
                       DMLC_PS_ROOT_PORT="1")
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, which overrules tcp://b:9", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
