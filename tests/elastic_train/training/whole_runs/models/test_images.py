"""Images in whole runs: one hash at any world size and after a kill, with BatchNorm and augmentation."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from elastic_train.data.dataset.manifest import build_manifest, load_manifest
from elastic_train.data.tables.digits import import_digits
from elastic_train.system.watchdog import Watchdog
from elastic_train.tasks.image_classifier import ImageClassifier
from elastic_train.training.opening import inspection
from elastic_train.training.session import Inspected
from tests.conftest import PATIENCE_S
from tests.elastic_train.training.jobs import config, history, result, succeed
from tests.memory_job import AT_SECOND_COMMIT, start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("images")]  # one reference run

PARAMS: dict[str, object] = {"size": 8, "channels": 1, "model": {"width": 4}}
IMAGES: dict[str, object] = {
    "task": {
        "path": "elastic_train.tasks.image_classifier:ImageClassifier",
        "params": {**PARAMS, "mixup": 0.2, "cutmix": 1.0},
    },
    "batch": {"global_batch": 96, "micro_batch": 24},
    "optimizer": {"lr": 0.01, "warmup_steps": 3},
    "max_steps": 4,
    "validation": {"every": "3 steps", "max_samples": 60},
    "checkpoint": {"every": "2 steps", "keep_last": 3},
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
    """Crops, flips and mixtures depend on the sample alone; BatchNorm's statistics are the mean over lanes."""
    succeed(start([config(tmp_path, digits, IMAGES), *how], num_ranks=num_ranks))
    found = result(tmp_path)
    assert [found[key] for key in ("weights_sha256", "metrics")] == [
        alone[key] for key in ("weights_sha256", "metrics")
    ]


def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, digits: Path, alone: dict[str, object]
) -> None:
    """Killed at its second commit, and resumed from the first with another number of ranks."""
    path = config(tmp_path, digits, IMAGES)
    assert start([path], num_ranks=2, lose=AT_SECOND_COMMIT).code != 0
    done = succeed(start([path], num_ranks=3))
    assert "Resuming from step" in done.output
    assert result(tmp_path)["weights_sha256"] == alone["weights_sha256"]


def jpeg(seed: int) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24, 24), dtype=np.uint8)).save(content, "jpeg")
    return content.getvalue()


@pytest.mark.parametrize("part", ["train", "validation"])
def test_an_image_that_is_cut_off_is_refused_before_the_first_step(tmp_path: Path, part: str) -> None:
    """The error for an unimported Parquet file in either part has file, row group, row and what to do.

    Each row group of the part has one such image, and the other part is a single row group: so one of the two ranks
    reaches a bad row group first, which is inspected however little time there is.
    """
    images = {name: [jpeg(seed) for seed in range(120)] for name in ("train", "validation")}
    for number in range(7, 120, 50):
        images[part][number] = images[part][number][:-40]
    for name, contents in images.items():
        (tmp_path / "rows" / name).mkdir(parents=True)
        table = pa.table({"image": contents, "label": [number % 2 for number in range(120)]})
        pq.write_table(table, tmp_path / "rows" / name / "a.parquet", row_group_size=50 if name == part else 120)
        build_manifest(str(tmp_path / "rows" / name), label_column="label")
    done = start([config(tmp_path, tmp_path / "rows", IMAGES)], num_ranks=2)
    assert done.code == 65
    where = rf"rows/{part}: sample (\d+) \(a\.parquet, row group (\d), row 7\): column 'image' is not an image"
    found = re.search(where, done.output)
    assert found is not None and int(found[1]) == 50 * int(found[2]) + 7, done.output
    assert "leave the row out, and build the manifest again" in done.output
    assert history(tmp_path, "apply") == []


def test_rows_are_inspected_once_in_a_run(tmp_path: Path, digits: Path) -> None:
    """Two ranks inspect as many rows as time permits, and do not repeat it on resume."""
    path = config(tmp_path, digits, {**IMAGES, "max_steps": 2})
    said = r"[\d,]+ of 1,797 rows were inspected before the first step, and are fit for the task"
    assert re.search(said, succeed(start([path], num_ranks=2)).output)
    assert "rows were inspected" not in succeed(start([path, "--max_steps", "3"])).output


def test_all_rows_of_a_small_dataset_are_inspected(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks each inspect a part, and the parts together are all rows."""
    monkeypatch.setattr(inspection, "LIMIT_S", PATIENCE_S)
    manifests = [load_manifest(str(digits / part)) for part in ("train", "validation")]
    feed = SimpleNamespace(manifests=manifests)
    limits = SimpleNamespace(peer_timeout_s=PATIENCE_S / inspection.LIMIT_SHARE)
    task = ImageClassifier(**PARAMS)  # type: ignore[arg-type]
    task.prepare(manifests[0])
    plan = SimpleNamespace(task=task, feed=feed, config=limits)
    parts: list[Inspected] = []
    said: list[str] = []

    def gather(part: Inspected) -> list[Inspected]:
        parts.append(part)
        return parts

    for rank in range(3):
        process = SimpleNamespace(plan=plan, inspected=[], watchdog=Watchdog())
        group = SimpleNamespace(rank=rank, size=3, all_gather_objects=gather)
        inspection.inspect_rows(process, SimpleNamespace(group=group, announce=said.append))  # type: ignore[arg-type]
    assert all(part.num_rows > 0 for part in parts) and sum(part.num_rows for part in parts) == 1797
    assert said[-1] == "1,797 of 1,797 rows were inspected before the first step, and are fit for the task"
