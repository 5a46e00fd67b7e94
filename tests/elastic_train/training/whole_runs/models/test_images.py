"""Images in whole runs: one hash at any world size and through a kill, with BatchNorm and augmentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.data.tables.digits import import_digits
from elastic_train.system.failpoints import VARIABLE, arm
from tests.conftest import start
from tests.elastic_train.training.jobs import config, result, succeed

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("images")]  # one run to compare with

PARAMS: dict[str, object] = {"size": 8, "channels": 1, "model": {"width": 4}}
IMAGES: dict[str, object] = {
    "task": {
        "path": "elastic_train.tasks.image_classifier:ImageClassifier",
        "params": {**PARAMS, "mixup": 0.2, "cutmix": 1.0},
    },
    "batch": {"global_batch": 96, "micro_batch": 24},
    "optimizer": {"lr": 0.01, "warmup_steps": 3},
    "max_steps": 10,
    "validation": {"every_steps": 6, "max_samples": 60},
    "checkpoint": {"every_steps": 4, "keep_last": 3},
}
WORLDS: list[tuple[int, list[str]]] = [
    (2, ["--parallel.recompute", "units"]),
    (3, ["--parallel.shards", "gradients"]),
    (4, ["--parallel.shards", "parameters"]),
]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "rows"
    import_digits(folder, share=0.1, seed=7)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> dict[str, object]:
    """The result of one process."""
    folder = tmp_path_factory.mktemp("images")
    succeed(start([config(folder, digits, IMAGES)]))
    return result(folder)


@pytest.mark.parametrize(("num_ranks", "how"), WORLDS)
def test_any_world_gives_the_same_bits(
    tmp_path: Path, digits: Path, alone: dict[str, object], num_ranks: int, how: list[str]
) -> None:
    """Crops, flips and mixtures are the samples' own, statistics of BatchNorm the lanes' mean."""
    succeed(start([config(tmp_path, digits, IMAGES), *how], num_ranks=num_ranks))
    found = result(tmp_path)
    assert [found[key] for key in ("weights_sha256", "metrics")] == [
        alone[key] for key in ("weights_sha256", "metrics")
    ]


def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, digits: Path, alone: dict[str, object]
) -> None:
    """Killed at its second commit, and resumed from the first by another number of ranks."""
    points = tmp_path / "points"
    points.mkdir()
    arm(points, "record", "kill", nth=2)
    path = config(tmp_path, digits, IMAGES)
    assert start([path], num_ranks=2, environ={VARIABLE: str(points)}).code != 0
    done = succeed(start([path], num_ranks=3))
    assert "resumed from commits/" in done.output
    assert result(tmp_path)["weights_sha256"] == alone["weights_sha256"]
