"""Arguments and output of the kernel that squares gradients, with a fake kernel that reads memory by address."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.parallel.devices import squares
from elastic_train.parallel.devices.squares import squares_of_tensors, squares_of_vectors
from elastic_train.placement.grains import GRAIN, cut_along
from elastic_train.placement.norm import grain_squares, lengths_of

TYPES = (torch.float32, torch.bfloat16, torch.float64)
WIDTH = 256


def fold(places: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> None:
    """Sum the squares of each grain into a row, as the kernel does, from its address and length alone."""
    for row, (address, numel) in zip(rows, places.tolist(), strict=True):
        memory = (ctypes.c_byte * (numel * dtype.itemsize)).from_address(address)
        values = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8).copy()).view(dtype).double()
        table = torch.zeros(GRAIN, dtype=torch.float64)
        table[:numel] = values
        table = (table * table).view(GRAIN // WIDTH, WIDTH)
        while len(table) > 1:
            table = table[: len(table) // 2] + table[len(table) // 2 :]
        row.copy_(table[0])


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 3, 255, 257, 30_000, GRAIN, GRAIN + 1, 2 * GRAIN]), st.sampled_from(TYPES)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 3),
)
def test_a_kernel_gets_each_grain_and_its_square_the_place_of_the_grain(
    tensors: list[tuple[int, torch.dtype]], seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(numel, generator=draw, dtype=torch.float64).to(dtype) for numel, dtype in tensors]
    filled = [tensor for tensor in drawn if tensor.numel()]
    if not filled:
        return
    lengths = [lengths_of(tuple(tensor.shape), None) for tensor in filled]
    grains = [grain for tensor, sizes in zip(filled, lengths, strict=True) for grain in tensor.split(list(sizes))]
    expected = torch.cat([grain_squares([grain], [(grain.numel(),)]) for grain in grains])
    assert torch.equal(squares._squares(fold, filled, lengths), expected)
    assert torch.equal(squares_of_tensors((tensor, None) for tensor in drawn), expected)


def test_many_grains_are_folded_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squares, "_BLOCK", 2)
    grains = list(torch.randn(5, 1000, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(squares._squares(fold, grains, [(1000,)] * 5), squares_of_vectors(grains, [(1000,)] * 5))


def test_a_kernel_gets_the_grains_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets a matrix with cut columns from a copy in memory order."""
    monkeypatch.setattr(squares, "_fold_of", lambda tensors: fold)
    values, cut = torch.randn(30, 40, generator=torch.Generator().manual_seed(1)), cut_along((30, 40), 1)
    found = squares_of_tensors([(values, cut)])
    assert found.tolist() == [float(grain_squares([column], [(30,)])) for column in values.t()]


def test_nothing_has_no_squares() -> None:
    assert squares_of_tensors([(torch.empty(0), None)]).tolist() == squares_of_vectors([], []).tolist() == []
