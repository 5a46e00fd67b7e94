"""A flipped bit in a live world: no rank keeps its state, and the job ends with the bits of an undisturbed one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rendezvous import EtcdServer
from tests.elastic_train.training.live.test_live import (
    PARAMS,
    etcd,
    finish,
    launch,
    nothing_left,
    undisturbed,
    weights,
    write_config,
)

pytestmark = pytest.mark.slow
__all__ = ["etcd", "nothing_left", "undisturbed"]  # fixtures
STEPS = 50


def test_no_flipped_state_is_handed_over(
    tmp_path: Path, rows: Path, etcd: EtcdServer, undisturbed: Callable[[int], object]
) -> None:
    """All three ranks exit and new ones load the last commit, as the majority has also summed wrong gradients."""
    path = Path(write_config(tmp_path, rows, STEPS))
    params = {**PARAMS, "marker": str(tmp_path / "flipped"), "after": 24, "rank": 0}
    path.write_text(
        yaml.safe_dump({**yaml.safe_load(path.read_text()), "task": {"path": "tests.tasks:Flips", "params": params}})
    )
    job = launch(tmp_path, etcd, str(path), ranks=3, nnodes="1:1")
    run, log = finish(job, tmp_path)
    named = re.findall(r"step (\d+): ranks \[\d\] hold other weights than the 2 others", log)
    assert len(named) == 3 and len(set(named)) == 1, log
    assert weights(run) == undisturbed(STEPS)
