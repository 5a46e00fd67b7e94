"""Parts of rows: each token is in one of them, all have as much to attend to, and tokens see what whole rows' do."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.parallel.attention.documents import Documents, lengths_of, mask_of
from elastic_train.tasks.placements import ContextPart
from elastic_train.tasks.rows.token_rows import TokenColumns, causal_within, part_of, sight_of, tokens_of
from elastic_train.tasks.task import Batch

rows = st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=21), min_size=1, max_size=4)
counts = st.integers(1, 5)


@given(st.integers(1, 6), counts)
def test_parts_have_each_token_once_and_as_many_to_attend_to(run: int, count: int) -> None:
    parts = [tokens_of(2 * count * run, number, count) for number in range(count)]
    assert sorted(torch.cat(parts).tolist()) == list(range(2 * count * run))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    assert len({(len(part), int((part + 1).sum())) for part in parts}) == 1


def collated(values: list[list[tuple[int, int]]], *, has_documents: bool) -> Batch:
    columns = {
        "tokens": pa.array([[token for token, _ in row] for row in values], pa.list_(pa.int32())),
        "documents": pa.array([sorted(document for _, document in row) for row in values], pa.list_(pa.int32())),
    }
    chosen = TokenColumns("tokens", documents="documents" if has_documents else None)
    return chosen.collate(pa.table(columns), np.arange(len(values)), 21, 10)


def test_a_document_that_is_one_run_of_tokens_needs_no_mask() -> None:
    """Masked tokens on its sides do no harm; inside, they do."""
    rows = pa.table({"t": [[1] * 5, [1] * 4], "d": [[3, 3, 7, 7, 7], [7, 7, 3, 3]], "m": [[0, 1, 1, 1, 0], [1] * 4]})
    columns = TokenColumns("t", documents="d", attention="m")
    batch = columns.collate(rows, np.arange(2), 21, 10)
    assert lengths_of(batch["ends_on_host"]) == [1, 1, 2, 4, 2, 2, 4]  # of rows padded to eight
    assert isinstance(sight_of(batch), Documents)
    columns = TokenColumns("t", documents="d", attention="h")
    holed = rows.append_column("h", pa.array([[1, 1, 1, 0, 1], [1] * 4]))
    batch = columns.collate(holed, np.arange(2), 21, 10)
    assert "ends_on_host" not in batch and torch.equal(sight_of(batch), causal_within(batch["documents"]))


@given(rows)
def test_documents_see_what_a_mask_lets_them_see(values: list[list[tuple[int, int]]]) -> None:
    batch = collated(values, has_documents=True)
    seen = mask_of(Documents.of(batch["ends_on_host"], torch.device("cpu")), *batch["tokens"].shape)
    assert seen.equal(causal_within(batch["documents"]))


@given(rows, counts, st.booleans(), st.sampled_from([1, 2, 3, 8]))
def test_a_part_has_its_tokens_of_a_batch_and_sees_what_they_see(
    values: list[list[tuple[int, int]]], count: int, has_documents: bool, multiple: int
) -> None:
    """Whatever the width is; what is added to it, so that it can be divided, is seen by none and is no target."""
    batch = collated(values, has_documents=has_documents)
    num_rows, width = batch["tokens"].shape
    padded = width + -width % (count * math.lcm(2, multiple))
    documents = batch.get("documents", torch.zeros_like(batch["tokens"]))
    sees = causal_within(documents)[:, 0]
    order = torch.cat([tokens_of(padded, number, count) for number in range(count)])
    pairs = []
    for number in range(count):
        mine = tokens_of(padded, number, count)
        part = part_of(batch, ContextPart(number, count, torch.Tensor.clone, multiple))
        real, keys = mine[mine < width], order < width
        is_real = mine < width
        assert part["tokens"][:, is_real].equal(batch["tokens"][:, real])
        positions = batch.get("positions", torch.arange(width).expand(num_rows, width))
        assert part["positions"].expand(num_rows, -1)[:, is_real].equal(positions[:, real])
        mask = part["mask"].expand(num_rows, 1, -1, -1)[:, 0]
        assert mask[:, is_real][:, :, keys].equal(sees[:, real][:, :, order[keys]])
        assert not mask[:, is_real][:, :, ~keys].any() and bool(mask.any(-1).all())
        row, place = part["places"] // len(mine), mine[part["places"] % len(mine)]
        pairs += list(zip((row * width + place).tolist(), part["targets"].tolist(), strict=True))
    assert sorted(pairs) == list(zip(batch["places"].tolist(), batch["targets"].tolist(), strict=True))
