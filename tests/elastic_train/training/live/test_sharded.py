"""Jobs with sharded state have the bits of replicated state, over worlds, modes, resumptions and lost ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from elastic_train.system.failpoints import VARIABLE
from rendezvous import EtcdServer
from tests.elastic_train.training.jobs import CLASSIFIER, WITNESS, average_of, config, result, succeed
from tests.elastic_train.training.live.test_live import (
    ENDLESS,
    etcd,
    eventually,
    finish,
    history,
    launch,
    leave,
    lose_ranks,
    nothing_left,
    steps_of,
    undisturbed,
    until_whole,
    weights,
    write_config,
)
from tests.memory_job import start

__all__ = ["etcd", "nothing_left", "undisturbed"]  # fixtures
RECIPE = {"lr": 0.01, "warmup_steps": 3, "schedule": "constant", "clip_norm": 0.1, "ema_decay": 0.9}
JOB = {**CLASSIFIER, "optimizer": RECIPE, "validation": {"every": "10 steps", "weights": "ema"}}
STEPS = 20
LIVE_STEPS = 45
NOT_IN_COMMITS = "commits do not hold the frozen weights"


@pytest.mark.slow
def test_a_job_that_changes_its_world_and_its_mode_ends_with_the_bits_of_one_that_did_not(
    tmp_path: Path, rows: Path
) -> None:
    """Commits of one shard mode are continued in the other, with any number of ranks and copies."""
    whole, run = config(tmp_path / "whole", rows, JOB), config(tmp_path / "sharded", rows, JOB)
    succeed(start([whole, "--max_steps", str(STEPS)]))
    stretches: list[tuple[int, int | None, list[str]]] = [
        (6, 3, ["--parallel.shards", "optimizer"]),
        (10, None, []),
        (12, 3, ["--parallel.shards", "gradients"]),
        (14, 4, ["--parallel.shards", "parameters", "--parallel.copies", "3"]),
        (16, 3, ["--parallel.shards", "gradients", "--parallel.copies", "1"]),
        (STEPS, 2, ["--parallel.shards", "parameters", "--parallel.copies", "1"]),
    ]
    for until, num_ranks, how in stretches:
        done = succeed(start([run, "--max_steps", str(until), *how], num_ranks=num_ranks))
        held = "is held once" if "1" in how else f"is held {min(num_ranks or 1, 3 if '3' in how else 2)} times"
        assert (held in done.output) is bool(how)
    for what in ("weights_sha256", "metrics"):
        assert result(tmp_path / "sharded")[what] == result(tmp_path / "whole")[what]
    assert average_of(tmp_path / "sharded") == average_of(tmp_path / "whole")


@pytest.mark.slow
def test_a_task_gets_the_whole_model_in_the_end(tmp_path: Path, rows: Path) -> None:
    """No rank has held the whole model; the check is the witness's count of how often each sample was applied."""
    sharded = ["--parallel.shards", "parameters", "--parallel.copies", "1"]
    succeed(start([config(tmp_path, rows, WITNESS), *sharded], num_ranks=3))
    counts = np.load(tmp_path / "run" / "witness.npy")
    assert counts.size == result(tmp_path)["num_samples"] and set(counts.tolist()) == {WITNESS["epochs"]}


@pytest.mark.slow
def test_ranks_that_die_cost_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, undisturbed: Callable[[int], object]
) -> None:
    """The survivors keep their shards, and the replacement receives its own; `test_lost_ranks` has all shard modes."""
    points, places = tmp_path / "points", ["backward", "applied"]
    points.mkdir()
    environ = {VARIABLE: str(points), "ELASTIC_TRAIN__PARALLEL__SHARDS": "parameters"}
    job = launch(tmp_path, etcd, write_config(tmp_path, rows, ENDLESS), ranks=3, **environ)
    try:
        term, _ = until_whole(tmp_path / "run", 3)
        lose_ranks(tmp_path, points, 3, [(place, "raise" if place == "backward" else "kill") for place in places])
        run = leave(job, tmp_path)
    finally:
        job.kill()
    assert "is held 2 times" in (tmp_path / "node.log").read_text()
    restored = [line for line in run.of("restore") if int(str(line["term"])) > term]
    assert len({line["term"] for line in restored}) >= len(places)
    assert all(int(str(line["step"])) > 0 for line in restored)
    assert weights(run) == undisturbed(steps_of(run))


@pytest.mark.slow
def test_a_lost_share_of_weights_that_no_commit_holds_is_read_by_new_processes(
    tmp_path: Path, rows: Path, etcd: EtcdServer
) -> None:
    """The base of adapters, with one copy of each shard: the survivor restarts and loads all of it."""
    found = {}
    for name, copies in (("lost", "1"), ("kept", "2")):
        folder = tmp_path / name
        known = folder / "known"
        config = write_config(folder, rows, LIVE_STEPS, lane_ms=90.0 if copies == "1" else 0.0, until=known)
        tree = yaml.safe_load(Path(config).read_text())
        tree["task"]["path"] = "tests.tasks:PacedOnBaseUntil"
        Path(config).write_text(yaml.safe_dump(tree))
        environ = {"ELASTIC_TRAIN__PARALLEL__COPIES": copies, "ELASTIC_TRAIN__PARALLEL__SHARDS": "parameters"}
        job = launch(folder, etcd, config, ranks=2, **environ)
        until_whole(folder / "run", 2)
        if copies == "1":
            eventually(lambda: any(line["op"] == "commit" for line in history(folder / "run")), "a commit")  # noqa: B023
            lose_a_share(folder / "run", 2, lambda: NOT_IN_COMMITS in (folder / "node.log").read_text())  # noqa: B023
        known.touch()
        run, log = finish(job, folder)
        found[name] = weights(run)
        assert (NOT_IN_COMMITS in log) is (copies == "1")
    assert found["lost"] == found["kept"]


def lose_a_share(run: Path, size: int, is_lost: Callable[[], bool] | None = None) -> int:
    """Kill the last rank until its shard was lost, which happens unless a commit has that very step; return the term.

    The restore events record a loss, unless all processes restart.
    """
    first, ranks = until_whole(run, size)
    term = first
    for _ in range(10):
        eventually(lambda: is_beyond_its_commit(run), "a step that no commit has")
        os.kill(ranks[size - 1], signal.SIGKILL)
        term, ranks = until_whole(run, size, above=term)
        if is_lost() if is_lost else any(line["op"] == "restore" and line.get("lost") for line in history(run)):
            return first
    raise AssertionError("ten ranks were killed, and no share was lost")


def is_beyond_its_commit(run: Path) -> bool:
    """Return True if applied steps are missing from the newest commit and from a commit that may be in flight."""
    lines = history(run)
    committed, applied = (max(line["step"] for line in lines if line["op"] == op) for op in ("commit", "step"))
    return 3 <= applied - committed <= 8
