"""Jobs whose ranks share one device: one hash in every world, through faults and commits, and in each precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from chaos.judge.evidence.run_files import collect
from elastic_train.system.failpoints import VARIABLE
from rendezvous import EtcdServer
from tests.conftest import start
from tests.elastic_train.training.live.test_live import (
    etcd,
    launch,
    lose_peers,
    nothing_left,
    steps_of,
    weights,
    write_config,
)

__all__ = ["etcd", "nothing_left"]  # fixtures
pytestmark = pytest.mark.slow
STEPS = 30


def write_job(folder: Path, rows: Path, device: str, *, steps: int = STEPS, **keys: object) -> str:
    """Write a job for a device that ranks share; `keys` are those of its configuration."""
    path = Path(write_config(folder, rows, steps, lane_ms=0.0))
    asked = "auto" if device == "cpu" else device  # a CPU by name is refused with offload
    tree = yaml.safe_load(path.read_text()) | {"device": asked, "hang_timeout_s": 60.0}
    tree["parallel"] = {"transport": "gloo", **keys.pop("parallel", {})}  # type: ignore[dict-item]
    path.write_text(yaml.safe_dump(tree | keys))
    return str(path)


def hash_of(folder: Path, rows: Path, device: str, num_ranks: int | None = None, **keys: object) -> object:
    """Train a job to its end; return the weights' hash."""
    done = start([write_job(folder, rows, device, **keys)], num_ranks=num_ranks)  # type: ignore[arg-type]
    assert done.code == 0, done.output
    assert f"steps, {device}" in done.output, done.output
    return weights(collect(folder / "run"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_worlds_that_share_a_device_have_one_hash(tmp_path: Path, rows: Path, device: str, precision: str) -> None:
    """Lanes are added in the tree's order on a device, too, and a scaler decides from reduced values."""
    found = {
        num_ranks: hash_of(tmp_path / str(num_ranks), rows, device, num_ranks, precision=precision)
        for num_ranks in (None, 2, 3)
    }
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("shards", ["optimizer", "gradients", "parameters"])
def test_state_in_shards_has_the_hash_of_whole_state(tmp_path: Path, rows: Path, device: str, shards: str) -> None:
    found = {
        mode: hash_of(tmp_path / mode, rows, device, 2, parallel={"shards": mode, "copies": 1})
        for mode in ("none", shards)
    }
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize(
    ("shards", "offload"), [("none", "optimizer"), ("gradients", "optimizer"), ("parameters", "all")]
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_state_in_host_memory_has_the_hash_of_state_on_the_device(
    tmp_path: Path, rows: Path, device: str, shards: str, offload: str, num_ranks: int
) -> None:
    """It is pinned, goes through the device in blocks, and is committed from where it is."""
    checkpoint = {"every": "5 steps", "keep_last": 2}
    found = {
        parallel["offload"]: hash_of(
            tmp_path / str(parallel["offload"]), rows, device, num_ranks, parallel=parallel, checkpoint=checkpoint
        )
        for parallel in ({"offload": "none"}, {"offload": offload, "shards": shards, "copies": 1})
    }
    assert len(set(found.values())) == 1, found


def test_a_commit_from_a_device_continues_with_the_same_bits(tmp_path: Path, rows: Path, device: str) -> None:
    """It is copied from the device while the next steps compute there."""
    whole = hash_of(tmp_path / "whole", rows, device)
    folder = tmp_path / "parts"
    checkpoint = {"every": "5 steps", "keep_last": 2}
    for steps in (17, STEPS):
        last = hash_of(folder, rows, device, steps=steps, checkpoint=checkpoint)
    assert last == whole


def test_a_killed_and_a_frozen_rank_cost_no_step(tmp_path: Path, rows: Path, etcd: EtcdServer, device: str) -> None:
    """Workers are replaced by programs where a fork would find CUDA begun; survivors keep state and process."""
    points = tmp_path / "points"
    points.mkdir()
    config = write_job(tmp_path, rows, device, steps=100_000)
    job = launch(tmp_path, etcd, config, ranks=3, nnodes="1:1", **{VARIABLE: str(points)})
    try:
        run = lose_peers(job, tmp_path, points, ("exchange", "applied"))
    finally:
        job.kill()
    assert weights(run) == hash_of(tmp_path / "alone", rows, device, steps=steps_of(run))
