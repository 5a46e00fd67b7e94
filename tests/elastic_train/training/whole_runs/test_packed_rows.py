"""Packed rows in whole runs: documents are computed one by one, in any layout with the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_train.data.dataset.manifest import build_manifest
from tests.elastic_train.training.jobs import losses, succeed
from tests.elastic_train.training.whole_runs.compared import TERMS, assert_near, assert_same_bits, write
from tests.memory_job import start
from tests.rounding import assert_same_but_for_rounding

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packed")]  # reference runs
Keys = Mapping[str, object]
PIECE = 5


@pytest.fixture(scope="session")
def packed_rows(fewer_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows with every five tokens as a document."""
    folder = tmp_path_factory.mktemp("packed_rows")
    for kind in ("train", "validation"):
        (folder / kind).mkdir()
        for path in (fewer_rows / kind).glob("*.parquet"):
            table = pq.read_table(path)
            documents = [[place // PIECE for place in range(len(row))] for row in table["input_ids"].to_pylist()]
            table = table.append_column("document_ids", pa.array(documents, pa.list_(pa.int32())))
            pq.write_table(table, folder / kind / path.name, row_group_size=17)
        build_manifest(str(folder / kind))
    return folder


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()


def flags(keys: Keys) -> list[str]:
    return [text for key, value in keys.items() for text in (f"--{key}", str(value).lower())]


UNITS, SELECTIVE = ({"parallel.recompute": how} for how in ("units", "selective"))
TENSOR, CONTEXT = {"parallel.tensor": 2}, {"parallel.context": 2}
COMPILED = {"compile": True, "task.params.fixed_width": True}


@pytest.mark.parametrize(
    ("reference", "layouts"),
    [
        ((1, {}), [(3, SELECTIVE), (4, {"parallel.pipeline": 2, "parallel.shards": "parameters", **UNITS})]),
        ((2, TENSOR), [(4, {**TENSOR, **UNITS, "parallel.shards": "gradients"})]),
        ((2, CONTEXT), [(4, {**CONTEXT, **UNITS})]),
        pytest.param((1, COMPILED), [(2, {**COMPILED, **UNITS})], marks=pytest.mark.hunt),
    ],
    ids=["whole", "tensor", "context", "compiled"],
)
def test_layouts_have_the_same_bits(
    tmp_path: Path, packed_rows: Path, reference: tuple[int, Keys], layouts: list[tuple[int, Keys]]
) -> None:
    for number, (num_ranks, keys) in enumerate([reference, *layouts]):
        succeed(start([write(tmp_path / str(number), packed_rows), *flags(keys)], num_ranks=num_ranks))
        assert_same_bits(tmp_path / str(number), tmp_path / "0")


def test_tensor_and_context_ranks_differ_by_rounding_alone(tmp_path: Path, packed_rows: Path) -> None:
    """So documents are apart in each; context ranks attend with a mask."""
    for name, num_ranks, keys in (("whole", 1, {}), ("tensor", 2, TENSOR), ("context", 2, CONTEXT)):
        run = write(tmp_path / name, packed_rows, {"dropout": 0.0})
        succeed(start([run, *flags(keys)], num_ranks=num_ranks))
        assert_same_but_for_rounding(losses(tmp_path / name), losses(tmp_path / "whole"), TERMS)
        assert_near(tmp_path / name, tmp_path / "whole")
