"""A rank computes one gradient wrongly in a live world: an audit names it, and the result's bits are unaffected."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from chaos.judge.evidence.run_files import Evidence
from chaos.tasks.orders import done_by, give
from rendezvous import EtcdServer
from tests.elastic_train.training.jobs import history, result, succeed
from tests.elastic_train.training.live.test_layouts import MODEL
from tests.elastic_train.training.live.test_layouts import write_config as write_cells
from tests.elastic_train.training.live.test_live import (
    NO_HANG_S,
    etcd,
    eventually,
    finish,
    launch,
    nothing_left,
    undisturbed,
    weights,
    write_config,
)
from tests.memory_job import start

pytestmark = pytest.mark.slow
__all__ = ["etcd", "nothing_left", "undisturbed"]  # fixtures
STEPS, FIRST = 30, 6


UNTIL = {
    "chaos.tasks.paced_classifier:PacedClassifier": "tests.tasks:PacedUntil",
    "chaos.tasks.paced_language:PacedLanguage": "tests.tasks:PacedLanguageUntil",
}


def assert_named(
    folder: Path, etcd: EtcdServer, config: str, num_ranks: int, num_right: int, lane_ms: float
) -> Evidence:
    """Make a rank compute a wrong gradient; assert that it is named with lane and samples and the step is repeated."""
    path, points, known = Path(config), folder / "points", folder / "known"
    tree = yaml.safe_load(path.read_text())
    tree["run"]["audit_lanes"], tree["task"]["path"] = 1, UNTIL[tree["task"]["path"]]
    tree["task"]["params"] |= {"lane_ms": lane_ms, "until": str(known)}
    tree["hang_timeout_s"] = NO_HANG_S
    path.write_text(yaml.safe_dump(tree))
    points.mkdir()
    job = launch(folder, etcd, str(path), ranks=num_ranks, nnodes="1:1", ELASTIC_FAILPOINTS=str(points))
    eventually(lambda: any(int(str(line["step"])) >= FIRST for line in history(folder, "step")), f"step {FIRST}")
    assert give(points, "flip_gradient")
    eventually(lambda: done_by(points, "flip_gradient") is not None, "a gradient that is wrong")
    known.touch()
    run, log = finish(job, folder)
    [pid] = re.findall(r"process (\d+) flipped a bit of the gradient", str(done_by(points, "flip_gradient")))
    [event] = [line for line in run.of("event") if line["kind"] == "wrong_gradient"]
    ranks = {line["pid"]: line["rank"] for line in run.of("form")}
    assert event["of_rank"] == ranks[int(pid)], log
    assert (event["value"], event["usual"]) == (1, num_right)
    assert event["lane"] in range(4) and len(event["samples"]) == 6
    assert not run.of("rollback")
    return run


def test_a_rank_that_computes_wrongly_is_named(
    tmp_path: Path, rows: Path, etcd: EtcdServer, undisturbed: Callable[[int], object]
) -> None:
    """The auditor's computation and one more by all ranks identify it; other steps have no event."""
    config = write_config(tmp_path, rows, STEPS)
    assert weights(assert_named(tmp_path, etcd, config, num_ranks=3, num_right=4, lane_ms=100.0)) == undisturbed(STEPS)


@pytest.mark.hunt
@pytest.mark.parametrize(
    "parallel",
    [
        {"shards": "gradients", "wire": "bf16"},
        {"shards": "parameters", "offload": "all"},
        pytest.param({"shards": "parameters"}, marks=pytest.mark.long),
    ],
)
def test_a_rank_is_named_whose_gradients_are_rounded_or_in_shards(
    tmp_path: Path, rows: Path, etcd: EtcdServer, parallel: dict[str, object]
) -> None:
    """A lane's gradient is checked before it is cut and sent; weights are gathered for the ranks that recompute it."""
    paths = [write_config(folder, rows, STEPS) for folder in (tmp_path, tmp_path / "alone")]
    for path in map(Path, paths):
        tree = yaml.safe_load(path.read_text())
        tree["parallel"] = parallel
        path.write_text(yaml.safe_dump(tree))
    run = assert_named(tmp_path, etcd, paths[0], num_ranks=3, num_right=4, lane_ms=100.0)
    succeed(start([paths[1]]))
    assert weights(run) == result(tmp_path / "alone")["weights_sha256"]


@pytest.mark.hunt
@pytest.mark.parametrize(
    ("sizes", "parallel"),
    [({"depth": 4}, {"pipeline": 2, "schedule": "interleaved"}), ({"experts": 4, "hidden": 16}, {"expert": 2})],
)
def test_a_rank_of_a_cell_that_computes_wrongly_is_named(
    tmp_path: Path, rows: Path, etcd: EtcdServer, sizes: dict[str, object], parallel: dict[str, object]
) -> None:
    """The rank has one of a stage's chunks, or some of the experts; audit and repetition compare each rank of two cells
    with its counterpart."""
    sizes = {**MODEL, **sizes}
    config = write_cells(tmp_path, rows, STEPS, parallel, sizes)
    run = assert_named(tmp_path, etcd, config, num_ranks=4, num_right=7, lane_ms=100.0)
    succeed(start([write_cells(tmp_path / "alone", rows, STEPS, {}, sizes)]))
    assert weights(run) == result(tmp_path / "alone")["weights_sha256"]
