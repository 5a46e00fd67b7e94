"""Laws of packing: every document is in the rows once, whole and in order; no row is too long; few rows are open."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.data.packing.bins import BestFit, Piece, Row, Tokens

SIZES = st.lists(st.integers(0, 40), max_size=60)


def documents_of(sizes: list[int]) -> list[Tokens]:
    """Return documents of these sizes; no token occurs twice."""
    ends = np.cumsum([0, *sizes])
    return [np.arange(lo, hi, dtype=np.int32) for lo, hi in itertools.pairwise(ends)]


def packed(documents: list[Tokens], length: int, num_open: int) -> list[Row]:
    bins = BestFit(length, num_open)
    closed = [row for number, tokens in enumerate(documents) for row in bins.add(number, tokens)]
    return closed + bins.finish()


def unpacked(rows: list[Row], num_documents: int) -> list[list[int]]:
    """Put each document together again, of its pieces."""
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for row in rows:
        for piece in row.pieces:
            pieces[piece.document].append(piece)
    found = []
    for number in range(num_documents):
        document: list[int] = []
        for piece in sorted(pieces[number], key=lambda piece: piece.lo):
            assert piece.lo == len(document), "a piece says where in its document it begins"
            document += piece.tokens.tolist()
        found.append(document)
    return found


@given(SIZES, st.integers(1, 17), st.integers(1, 5))
def test_every_document_is_in_the_rows_exactly_once(sizes: list[int], length: int, num_open: int) -> None:
    documents = documents_of(sizes)
    rows = packed(documents, length, num_open)
    assert unpacked(rows, len(documents)) == [document.tolist() for document in documents]
    assert sum(row.used for row in rows) == sum(sizes)
    for row in rows:
        assert 1 <= row.used == sum(len(piece.tokens) for piece in row.pieces) <= length


@given(SIZES, st.integers(1, 17), st.integers(1, 5))
def test_no_more_rows_are_open_than_allowed(sizes: list[int], length: int, num_open: int) -> None:
    """Memory holds the open rows only."""
    bins, closed = BestFit(length, num_open), 0
    for number, tokens in enumerate(documents_of(sizes)):
        closed += sum(row.used for row in bins.add(number, tokens))
        assert sum(sizes[: number + 1]) - closed <= num_open * (length - 1)
    assert len(bins.finish()) <= num_open
    assert bins.finish() == []


@given(SIZES, st.integers(1, 17))
def test_with_room_for_all_rows_any_two_together_would_not_fit(sizes: list[int], length: int) -> None:
    """The classic bound of any-fit: a row is opened only for what fits nowhere else."""
    rows = packed(documents_of(sizes), length, num_open=1000)
    used = sorted(row.used for row in rows)
    assert sum(1 for size in used if 2 * size <= length) <= 1


@pytest.mark.parametrize(
    ("sizes", "num_open", "rows"),
    [
        ([6, 8, 2], 8, [[8, 2], [6]]),
        ([6, 5, 4], 8, [[6, 4], [5]]),
        ([6, 7, 8, 2], 2, [[7], [8, 2], [6]]),
        ([25], 8, [[10], [10], [5]]),
        ([10, 3, 10], 1, [[10], [10], [3]]),
        ([0, 0], 8, []),
    ],
    ids=["best fit", "not the emptiest", "the fullest is closed", "cut", "whole rows close nothing", "empty"],
)
def test_which_row_a_document_goes_into(sizes: list[int], num_open: int, rows: list[list[int]]) -> None:
    found = packed(documents_of(sizes), 10, num_open)
    assert [[len(piece.tokens) for piece in row.pieces] for row in found] == rows


def test_a_row_keeps_no_more_than_its_own_tokens() -> None:
    """An open row that kept a view would hold the whole file's block in memory."""
    tokens = np.arange(100_003, dtype=np.int32)
    (row,) = [row for row in packed([tokens], 100_000, 4) if row.used == 3]
    assert row.pieces[0].tokens.base is None
