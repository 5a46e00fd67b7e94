"""What several rooms' tests share: a small real dataset, and runs of the trainer as users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings

from elastic_train.data.dataset.manifest import build_manifest

ROOT = Path(__file__).parent.parent
CLASSES = 4
settings.register_profile("any machine", deadline=None)  # how long an example takes says nothing of the law
settings.load_profile("any machine")


def write_rows(folder: Path, num_rows: int, *, seed: int = 0, num_files: int = 3, group_rows: int = 17) -> Path:
    """Write tokenised rows of a learnable label with metadata, some of it missing, and their manifest."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, CLASSES, num_rows)
    tokens = [rng.integers(1 + 8 * kind, 12 + 8 * kind, rng.integers(3, 24)).astype(np.int32) for kind in label]
    size = rng.integers(0, 1000, num_rows).astype(np.float64)
    size[rng.random(num_rows) < 0.07] = np.nan
    kinds = np.array(["module", "class", "function", None], dtype=object)[rng.integers(0, 4, num_rows)]
    table = pa.table(
        {
            "input_ids": pa.array(tokens, pa.list_(pa.int32())),
            "size": pa.array(size, pa.float64(), from_pandas=True),
            "kind": pa.array(kinds, pa.string()),
            "label": pa.array(label, pa.int32()),
        }
    )
    folder.mkdir(parents=True)
    share = -(-num_rows // num_files)
    for number in range(num_files):
        pq.write_table(table.slice(number * share, share), folder / f"part-{number}.parquet", row_group_size=group_rows)
    build_manifest(str(folder), label_column="label")
    return folder


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training set of 331 rows (a prime) and a validation set of 101."""
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder / "train", 331, seed=1)
    write_rows(folder / "validation", 101, seed=2)
    return folder


@dataclass(frozen=True)
class Finished:
    """How a started command ended."""

    code: int
    output: str


def start(
    arguments: list[str], *, num_ranks: int | None = None, environ: dict[str, str] | None = None, timeout_s: float = 280
) -> Finished:
    """Run `python -m elastic_train ...` by itself, or as `num_ranks` ranks under torchrun --standalone."""
    launcher = (
        [] if num_ranks is None else ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m"]
    )
    command = [sys.executable, "-m", *launcher, "elastic_train", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Finished(done.returncode, done.stdout)
