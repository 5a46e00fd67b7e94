"""Check for identical bits: worlds of every mode and size; jobs that are killed, joined, shrunk and resumed."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.figures import Effort
from benchmarks.ranks import Meeting, run
from benchmarks.recovery.jobs import write_live_job
from benchmarks.recovery.live import repeat, run_job
from benchmarks.sharding.commits import SavingJob
from benchmarks.sharding.jobs import MODES, SMALL, Job, Mode
from chaos.judge.evidence.run_files import collect, whole
from chaos.scenario.schedule import Due

RANKS, MORE_STEPS = 2, 6
CHANGES = (
    Due("kill_worker", 0, None, 1.0, is_healed=True),
    Due("kill_node", 1, None, 2.0, is_healed=True),
    Due("start_node", 1, None, 1.0),
)
"""A rank is killed and replaced, a node is killed and rejoins; then the nodes are asked to leave one by one."""


def one_hash(effort: Effort) -> dict[str, object]:
    """Return True if all worlds and all jobs end with the weights of one unsharded rank."""
    return {"one_hash": _of_worlds(effort) & _of_jobs(effort)}


def _of_worlds(effort: Effort) -> bool:
    (alone,) = run(_digest, 1, "none", 1)
    are_equal = True
    for shards, size, copies in itertools.product(MODES, (1, 2, 3, 4), (1, 2)):
        found = run(_digest, size, shards, copies)
        are_equal &= all(of_rank == alone for of_rank in found)
        effort.say(f"{shards}, {size} ranks, {copies} copies: {found[0][:12]}, alone {alone[:12]}")
    return are_equal


def _digest(meeting: Meeting, shards: Mode, copies: int) -> str:
    """Return a commit's digest of the weights after four steps; no single rank need hold them all."""
    job = Job(meeting.group, SMALL, shards, copies)
    for _ in range(4):
        job.step()
    _, record = SavingJob(job, str(meeting.folder / "commits")).save()
    return record.weights_sha256


def _of_jobs(effort: Effort) -> bool:
    """Run live jobs through changes of their world; resume each in the next mode; repeat each in one process."""
    cases = [("none", 1), *itertools.product(MODES, (1, 2))]
    next_mode = dict(zip(("none", *MODES), (*MODES, "none"), strict=True))
    found = [
        _is_equal(effort, shards, copies, next_mode[shards])
        for shards, copies in (cases[-2::-3] if effort.is_quick else cases)
    ]
    return all(found)


def _is_equal(effort: Effort, shards: str, copies: int, then: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        task = {"path": "chaos.tasks.paced_classifier:PacedClassifier"}
        params = {"max_tokens": 32, "dim": 32, "depth": 2, "heads": 4, "dropout": 0.1, "lane_ms": 20}
        changes = {
            "task": {**task, "params": params},
            "parallel": {"shards": shards, "copies": copies},
            "checkpoint": {"every": "20 steps", "keep_last": 2},
        }
        config, job = write_live_job(Path(folder) / "job", 2 * RANKS, changes), Path(folder) / "faulted"
        left = run_job(job, config, [*CHANGES], ranks=RANKS, leave_after_s=3.0, timeout_s=240, forked=True)
        assert left.result is not None, "every run leaves one"
        steps = whole(left.result, "step") + MORE_STEPS
        command = [sys.executable, "-m", "elastic_train", config, "--run.dir", str(job), "--max_steps", str(steps)]
        command += ["--parallel.shards", then]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{shards}, {copies} copies, resumed with {then}:\n{done.stderr}")
        resumed = collect(job)
        expected = repeat(Path(folder) / "alone", config, resumed, "--task.params.lane_ms=0", "--parallel.shards=none")
    assert resumed.result is not None and whole(resumed.result, "step") == steps, "it finished"
    digest, alone = str(resumed.result["weights_sha256"]), str(expected["weights_sha256"])
    worlds = len({whole(line, "term") for line in left.of("form")})
    effort.say(f"{shards}, {copies} copies, {worlds} worlds, then {then}: {digest[:12]}, alone {alone[:12]}")
    return digest == alone
