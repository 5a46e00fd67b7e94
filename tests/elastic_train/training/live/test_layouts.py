"""Layouts that lose ranks, in processes: while a copy of each shard survives, no step is lost and no bit differs.

Every layout loses ranks at every point in memory (`whole_runs.test_lost_ranks`); here are the layouts whose survivors
wait for one another in different ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from chaos.judge.invariants.rollbacks import copies
from chaos.judge.invariants.whole_run import check_kept
from chaos.judge.job_shape import cell_size
from elastic_train.system.failpoints import VARIABLE
from rendezvous import EtcdServer
from tests.conftest import standby_with
from tests.elastic_train.tasks.language_rows import LLAMA
from tests.elastic_train.training.jobs import result, succeed
from tests.elastic_train.training.live.test_live import (
    ENDLESS,
    JOB,
    etcd,
    launch,
    leave,
    lose_ranks,
    nothing_left,
    steps_of,
    until_whole,
    weights,
)
from tests.memory_job import start

__all__ = ["etcd", "nothing_left"]  # fixtures
pytestmark = pytest.mark.slow
HUNT = pytest.mark.hunt
Parallel = Mapping[str, object]
MODEL = {"vocabulary": 64, "dim": 16, "depth": 2, "heads": 2, "dropout": 0.1, "tied": False}
OF_TRANSFORMERS = {**LLAMA, "vocab_size": 64, "tie_word_embeddings": False, "attention_dropout": 0.1}
OWN_BITS = ("tensor", "sequence", "context")
"""The degrees that determine the bits: the undisturbed job has only these."""


def write_config(
    folder: Path,
    rows: Path,
    steps: int,
    parallel: Parallel,
    sizes: Mapping[str, object] = MODEL,
    tasks: str = "chaos.tasks.paced_language",
) -> str:
    """Write the configuration of a language model, of transformers if `sizes` is given; an endless job's lanes take
    longer."""
    model = {"hf": {"config": sizes}} if "model_type" in sizes else {"model": sizes}
    params = {**model, "max_tokens": 16, "lane_ms": 40.0 if steps == ENDLESS else 0.0}
    tree = {
        **JOB,
        "run": {"dir": str(folder / "run"), "seed": 5},
        "data": {"train": str(rows / "train"), "too_long": "truncate"},
        "validation": {},
        "task": {"path": f"{tasks}:PacedLanguage", "params": params},
        "parallel": parallel,
        "max_steps": steps,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "config.yaml")


def sizes_of(parallel: Parallel) -> Mapping[str, object]:
    depth = {"depth": 4} if parallel.get("schedule") == "interleaved" else {}
    return {**MODEL, **depth, **({"experts": 4, "hidden": 16} if "expert" in parallel else {})}


def assert_nothing_is_lost(
    folder: Path,
    rows: Path,
    etcd: EtcdServer,
    parallel: Parallel,
    num_cells: int,
    places: Sequence[str],
    sizes: Mapping[str, object] | None = None,
    tasks: str = "chaos.tasks.paced_language",
) -> None:
    """Kill a rank of a cell at each place in turn; the others continue with their processes and shards.

    A new process replaces the rank and receives its shard. The final weights equal those of an undisturbed job of as
    many steps, with one cell and nothing sharded.
    """
    points, sizes = folder / "points", sizes or sizes_of(parallel)
    points.mkdir()
    config = write_config(folder, rows, ENDLESS, parallel, sizes, tasks)
    per_cell = cell_size({"parallel": parallel})
    size = per_cell * num_cells
    job = launch(folder, etcd, config, ranks=size, **{VARIABLE: str(points)})
    try:
        term, _ = until_whole(folder / "run", size, least=2)
        lose_ranks(folder, points, size, [(place, "kill") for place in places])
        log = (folder / "node.log").read_text()
        run = leave(job, folder)
    finally:
        job.kill()
    whole = f"{num_cells} cells of {per_cell} ranks" if num_cells > 1 else f"{per_cell} ranks make one cell, and"
    assert whole in log or (num_cells == 1 and f"1 cell of {per_cell} ranks" in log), log
    assert "Traceback" not in log, log
    check_kept(run)
    copies(run)
    restored = [line for line in run.of("restore") if int(str(line["term"])) > term]
    assert len({line["term"] for line in restored}) >= len(places)
    assert all(int(str(line["step"])) > 0 for line in restored) and not run.of("rollback")
    alone = {key: value for key, value in parallel.items() if key in OWN_BITS}
    undisturbed = write_config(folder / "alone", rows, steps_of(run), alone, sizes)
    succeed(start([undisturbed], num_ranks=cell_size({"parallel": alone})))
    assert weights(run) == result(folder / "alone")["weights_sha256"]


TENSOR, CONTEXT, STAGES, EXPERTS = {"tensor": 2}, {"context": 2}, {"pipeline": 2}, {"expert": 2}
PARAMETERS = {"shards": "parameters", "copies": 2}
ROWS = [
    # stages gather weights while the other cell waits for gradients
    pytest.param({**STAGES, **PARAMETERS}, 2, ("forward 5", "backward 7", "applied")),
    # the other pipeline waits for its experts, a stage waits for activations
    pytest.param({**EXPERTS, **STAGES, "recompute": "units"}, 2, ("backward 13",)),
    pytest.param(TENSOR, 2, ("backward", "apply", "commit"), marks=HUNT),
    pytest.param({**CONTEXT, **PARAMETERS}, 2, ("backward 3", "applied"), marks=HUNT),
]


@pytest.mark.parametrize(("parallel", "num_cells", "places"), ROWS, ids=str)
def test_ranks_that_die_cost_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, parallel: Parallel, num_cells: int, places: Sequence[str]
) -> None:
    assert_nothing_is_lost(tmp_path, rows, etcd, parallel, num_cells, places)


@HUNT
@pytest.mark.xdist_group("transformers")  # one process imports transformers
def test_stages_of_transformers_that_die_cost_no_applied_step(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """A newcomer has no weights until its peer in the other cell sends it those of its stage."""
    pytest.importorskip("transformers")
    standby_with("tests.preload_transformers")
    assert_nothing_is_lost(tmp_path, rows, etcd, STAGES, 2, ["backward 7"], OF_TRANSFORMERS)
