#!/usr/bin/python3
"""Workers that do not do the same, as real processes: who is told what, and with which exit code.

Usage: contracts_test.py BIN_DIR
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

BIN = pathlib.Path(sys.argv.pop(1)).resolve()
LAUNCHER = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "gradwire-launch"
# A bound on hanging, not a measure: each job takes a few seconds.
DEADLINE_S = 60


class Job:
    def __init__(self, directory, result, workers):
        self.code = result.returncode
        self.launcher = result.stderr
        self.out = []
        self.errors = []
        for rank in range(workers):
            place = pathlib.Path(directory) / f"rank.{rank:02d}"
            self.out.append((place / "stdout.log").read_text())
            self.errors.append((place / "stderr.log").read_text())
        self.server = (pathlib.Path(directory) / "server.00" / "stderr.log").read_text()

    def __str__(self):
        parts = [f"launcher ({self.code}):", self.launcher, "server 0:", self.server]
        for rank, (out, errors) in enumerate(zip(self.out, self.errors)):
            parts += [f"rank {rank}:", out, errors]
        return "\n".join(parts)


class ContractsTest(unittest.TestCase):
    maxDiff = None

    def run_job(self, *words, workers=2, settings=()):
        """Runs `connect` and then the words on every rank."""
        values = ["timeouts.dead_after=1s", "timeouts.start=10s", "timeouts.stall_warn=500ms",
                  "timeouts.stall_stop=2s", *settings]
        before = [word for word in words if re.match(r"([0-9,]+:)?(set|rank)=", word)]
        after = [word for word in words if word not in before]
        with tempfile.TemporaryDirectory() as directory:
            command = [str(LAUNCHER), "--free-port", "--workers", str(workers), "--bin-dir", str(BIN),
                       "--log-dir", directory, "--grace", "8s"]
            for value in values:
                command += ["--set", value]
            command += ["--", str(BIN / "scripted_worker"), *before, "connect", *after]
            result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S,
                                    check=False)
            return Job(directory, result, workers)

    def expect(self, job, codes, *texts, ranks=None):
        """Each rank ends with its code, and each of the texts is in the log of each rank."""
        for rank, code in enumerate(codes):
            self.assertIn(f"exit {code}\n", job.out[rank], f"rank {rank}\n{job}")
        for rank in range(len(codes)) if ranks is None else ranks:
            for text in texts:
                self.assertRegex(job.errors[rank], text, f"rank {rank}\n{job}")

    # --- calls that are refused where they are made ---------------------------------------------

    def test_a_refused_push_leaves_the_job_alone(self):
        for word, text in (("?push=a", "tensor 'a' on rank 0 is already in flight"),
                           ("?push_short=a", "tensor 'a': input is 3996 bytes.*expected 4000"),
                           ("?push_unknown", "tensor id 12345 is unknown, 1 are declared")):
            with self.subTest(word):
                job = self.run_job("declare=a:1000:float32:average", "1:sleep_ms=500", "push=a",
                                   f"0:{word}", "wait=a",
                                   "push=a", "wait=a", "close")
                self.expect(job, [0, 0])
                self.assertRegex(job.out[0], f"refused: InvalidArgument: {text}", str(job))
                self.assertEqual(job.code, 0, str(job))

    def test_calls_after_close_are_refused(self):
        job = self.run_job("declare=a:1000:float32:average", "push=a", "close", "wait=a", "?push=a",
                           "?end_step", "?barrier", "?declare=b:1:float32:average", "?broadcast=p:8:0",
                           "close")
        self.expect(job, [0, 0])
        for out in job.out:
            self.assertEqual(out.count("after Close"), 5, str(job))

    # --- declarations ---------------------------------------------------------------------------

    def test_different_declarations_name_tensor_ranks_and_values(self):
        for theirs, texts in (
                ("a:1001:float32:average", ("'a'", "1000", "1001")),
                ("a:1000:float16:average", ("'a'", "float32", "float16")),
                ("a:1000:float32:sum", ("'a'", "average", "sum")),
                ("b:1000:float32:average", ("'a'", "'b'")),
                ("a:1000:float32:average,b:5:float32:average", ("only rank 1 has 'b'",))):
            with self.subTest(theirs):
                job = self.run_job("0:declare=a:1000:float32:average", f"1:declare={theirs}")
                self.expect(job, [1, 1], r"rank 0", r"rank 1", *texts)
                self.assertEqual(job.code, 1, str(job))

    def test_another_order_of_declaration_is_named(self):
        a, b = "a:10:float32:average", "b:20:float32:average"
        job = self.run_job(f"0:declare={a},{b}", f"1:declare={b},{a}")
        self.expect(job, [1, 1], "position 0", "'a'", "'b'")
        job = self.run_job(f"0:declare={a}", f"0:declare={b}", f"1:declare={b}", f"1:declare={a}")
        self.expect(job, [1, 1], "batch 0 position 0", "'a'", "'b'")

    def test_different_broadcasts_are_named(self):
        job = self.run_job("0:broadcast=p:100:0", "1:broadcast=p:99:0")
        self.expect(job, [1, 1], "'broadcast:p'", "100", "99")
        job = self.run_job("0:broadcast=p:100:0", "1:broadcast=p:100:1")
        self.expect(job, [1, 1], "broadcast:p", "ranks 0 and 1 both broadcast")
        job = self.run_job("0:broadcast=p:100:1", "1:broadcast=p:100:0")
        self.expect(job, [1, 1], "broadcast:p", "no rank broadcasts")
        job = self.run_job("broadcast=p:100:2")
        self.expect(job, [1, 1], "root 2 is out of range, the job has 2 workers")

    # --- ranks that wait for each other for ever ------------------------------------------------

    def test_a_barrier_against_a_declaration_stalls_by_name(self):
        job = self.run_job("declare=w:10:float32:average", "push=w", "wait=w", "0:barrier",
                           "1:declare=a:1000:float32:average")
        self.expect(job, [4, 4], "barrier", "declaration")
        self.assertEqual(job.code, 4, str(job))

    def test_a_worker_that_never_pushes_stalls_by_name(self):
        job = self.run_job("declare=a:1000:float32:average", "0:push=a", "0:wait=a", "1:sleep_ms=1000",
                           "1:barrier")
        self.expect(job, [4, 4])
        self.assertRegex(job.errors[0], "warning .*tensor 'a' has waited: .*server 0 and waits for the "
                         "other workers", str(job))
        self.assertRegex(job.server, "'a'", str(job))
        self.assertEqual(job.code, 4, str(job))

    def test_a_tensor_that_waits_is_named_while_others_make_progress(self):
        # Too large to be fused: two units, two rounds.
        going_on = ["push=b", "wait=b", "sleep_ms=100"] * 60
        job = self.run_job("declare=a:100000:float32:average,b:100000:float32:average", "0:push=a", *going_on)
        self.expect(job, [4, 4], r"stalled for .*'a'.*ranks 0 are here, 1 missing.*worker 1 at 127\.0\.0\.1")
        self.assertRegex(job.server, r"warning server/0 lane: stalled .*'a'", str(job))
        self.assertNotRegex(job.server, r"stalled .*'b'", str(job))
        self.assertEqual(job.code, 4, str(job))

    def test_a_worker_that_takes_fewer_steps_is_named(self):
        job = self.run_job("declare=a:1000:float32:average", "push=a", "wait=a", "1:close", "1:exit=0",
                           "push=a", "wait=a", "close")
        self.expect(job, [5, 0], "worker 1 .*has left, and others wait for it", "'a'", ranks=[0])
        self.assertEqual(job.code, 5, str(job))

    # --- the end --------------------------------------------------------------------------------

    def test_close_waits_for_what_is_in_flight(self):
        job = self.run_job("declare=a:200000:float32:average", "1:sleep_ms=700", "push=a", "close",
                           "wait=a")
        self.expect(job, [0, 0])
        self.assertEqual(job.code, 0, str(job))

    def test_close_refuses_a_fused_unit_that_is_not_complete(self):
        job = self.run_job("declare=a:10:float32:average,b:10:float32:average", "0:push=a", "0:close",
                           "1:push=a", "1:push=b", "1:wait=b")
        self.expect(job, [1, 1], "tensor 'a' is in flight: it is fused with 'b'")

    def test_a_worker_that_drops_its_client_in_mid_round_is_named(self):
        job = self.run_job("declare=a:200000:float32:average", "0:push=a", "0:drop", "0:exit=7",
                           "1:sleep_ms=300", "1:wait=a", "1:barrier")
        self.expect(job, [7, 5], r"worker 0 ends with 1 push-pull\(s\) in flight: tensor 'a'",
                    ranks=[1])

    # --- the start ------------------------------------------------------------------------------

    def test_a_shared_setting_that_differs_is_named(self):
        job = self.run_job("1:set=partition.fuse_below=32KiB")
        self.expect(job, [2, 2], "configurations differ: partition.fuse_below is .*32.* on worker 1",
                    "64")
        self.assertEqual(job.code, 2, str(job))

    def test_a_foreign_job_is_refused_with_both_names(self):
        start = time.monotonic()
        job = self.run_job("1:set=job.id=other", settings=["job.id=ours"])
        self.assertIn("exit 2\n", job.out[1], str(job))
        self.assertRegex(job.errors[1], "belongs to job 'other', this server to job 'ours'", str(job))
        self.assertLess(time.monotonic() - start, DEADLINE_S)

    def test_a_rank_out_of_range_is_refused(self):
        job = self.run_job("1:rank=7")
        self.assertIn("exit 2\n", job.out[1], str(job))
        self.assertRegex(job.errors[1], "rank 7 is out of range: the job has 2 workers", str(job))


if __name__ == "__main__":
    unittest.main(verbosity=2)
