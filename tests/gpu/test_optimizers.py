"""Updates on a device: one hash for every optimizer, and fused ones that show no cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.config.recipe import OptimizerConfig
from elastic_train.job.optimizers.choice import choose
from elastic_train.job.optimizers.rehearsal import shows_no_cut
from tests.gpu.test_training import hash_of

pytestmark = pytest.mark.slow
RECIPES: dict[str, dict[str, object]] = {
    "sgd": {"name": "sgd", "options": {"momentum": 0.9}},
    "muon": {"name": "muon"},
    "adafactor": {"name": "adafactor"},
}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_update_is_fused_and_shows_no_cut(device: str, name: str) -> None:
    """If the kernel shows one, the loop is used in its place: then decision 0134 promises too much."""
    choice = choose(OptimizerConfig(name=name), device)
    assert shows_no_cut(choice.make, {}, device)
    [group] = choice.tried().param_groups
    assert bool(group["fused"]) is (device != "cpu")


@pytest.mark.parametrize("name", RECIPES)
def test_worlds_that_share_a_device_have_one_hash(tmp_path: Path, rows: Path, device: str, name: str) -> None:
    recipe = {"lr": 0.003, "warmup_steps": 2, "ema_decay": 0.9, **RECIPES[name]}
    validation = {"every": "10 steps", "weights": "ema"}
    found = {
        hash_of(tmp_path / str(num), rows, device, num, optimizer=recipe, validation=validation) for num in (None, 2)
    }
    if name == "sgd":
        sharded = {"shards": "parameters"}
        keys: dict[str, object] = {"optimizer": recipe, "validation": validation, "parallel": sharded}
        found.add(hash_of(tmp_path / "sharded", rows, device, 3, **keys))
    assert len(found) == 1, found
