"""Evidence that a simulated job leaves for the judge: histories, stored commits, result."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from chaos.judge.evidence.identities import identified
from chaos.judge.evidence.run_files import Commit, Evidence, is_void, with_one_clock
from chaos.sim.job.run_record import RunRecord
from chaos.sim.job.surroundings import Surroundings
from chaos.sim.machine.object_store import Storage
from chaos.sim.modelled.commit_files import load_weights
from elastic_train.config.schema import Config


def _commits(store: Storage) -> list[Commit]:
    """Return the commits of one store; a job that used several has no single lineage."""
    return [
        Commit.of(key, content)
        for key, (content, _) in sorted(store.files.items())
        if key.startswith("commits/") and not is_void(content)
    ]


def left_by(around: Surroundings, record: RunRecord, config: Config) -> Evidence:
    """Return the evidence of a job that has been run."""
    shape, tracking = around.shape, around.tracking
    promised: dict[str, Any] = {
        "recovery": shape.recovery,
        "patience_s": shape.patience_s,
        "recovery_s": shape.recovery_s,
        "max_restarts": shape.max_restarts,
    }
    record.write(
        "chaos",
        "scenario",
        name="sim",
        seed=around.seed,
        spare_nodes=shape.nodes - shape.min_nodes,
        **promised,
        command=[],
    )
    left = Evidence(
        folder=Path("sim"),
        processes=identified([record.lines[name] for name in sorted(record.lines)]),
        commits=[commit for store in (around.storage, *around.storage.ever_private) for commit in _commits(store)],
        config=config.model_dump(mode="json"),
        result=record.result,
        witness=record.witness if record.is_done else None,
        metrics=None if tracking is None else tracking.metrics,
        tracked=None if tracking is None else tracking.server.held(),
        rows=sum(shape.rows),
        load=functools.partial(load_weights, around.storage.files),
    )
    return with_one_clock(left)
