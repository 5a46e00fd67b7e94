"""The norm by grains has the same bits however a gradient is cut, and is close to the exact norm."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_train.parallel.devices import squares
from elastic_train.parallel.devices.squares import (
    clip_factor,
    in_memory_order,
    lengths_of,
    squares_of_tensors,
    total_norm,
)
from elastic_train.placement.grains import GRAIN, Cut, Layout, Listed, cut_along, lay_out
from elastic_train.placement.holdings import all_held, circle_of, runs_of
from elastic_train.placement.seats import seats_of
from tests.elastic_train.placement.laws import check_norms, squares_of_grains

LISTED = [
    Listed("embed", (3, GRAIN), "torch.float32", memory=0),
    Listed("bias", (70,), "torch.float32", group=1),
    Listed("scalar", (), "torch.float32", group=1),
    Listed("empty", (0, 4), "torch.float32"),
    Listed("weight", (5, 30001), "torch.float32", "block"),
    Listed("head", (3, GRAIN), "torch.float32", memory=0),
    Listed("again", (70,), "torch.float32", "block", 1),
    Listed("columns", (96, 500), "torch.float32", "block", cut=cut_along((96, 500), 0)),
    Listed("rows", (96, 500), "torch.float32", "block", cut=cut_along((96, 500), 1)),
]
LAYOUT = lay_out(LISTED)


def gradients() -> list[Tensor]:
    """One gradient for each tensor of the layout, with very different magnitudes."""
    draw = torch.Generator().manual_seed(3)
    return [
        torch.randn(tensor.shape, generator=draw) * 10.0 ** (number - 4) for number, tensor in enumerate(LAYOUT.tensors)
    ]


def cut_gradients() -> list[tuple[Tensor, Cut | None]]:
    return [(gradient, tensor.cut) for gradient, tensor in zip(gradients(), LAYOUT.tensors, strict=True)]


def flat_vectors(layout: Layout, tensors: list[Tensor]) -> list[Tensor]:
    """Return the layout's flat vectors, filled."""
    flats = [torch.zeros(flat.numel) for flat in layout.flats]
    for tensor, values in zip(layout.tensors, tensors, strict=True):
        flats[tensor.flat][tensor.start : tensor.start + tensor.numel] = in_memory_order(values, tensor.cut)
    return flats


def uncut() -> dict[int, float]:
    """The norm in the replicated case: from whole tensors in the model's order."""
    return dict(enumerate(squares_of_tensors(cut_gradients()).tolist()))


@pytest.mark.heavy
@given(st.integers(1, 40), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_the_norm_is_that_of_the_uncut_gradient(num_ranks: int, copies: int, draw: random.Random) -> None:
    """This holds in any world, for any order of a rank's grains, from flat vectors of which it has only its runs."""
    flats = flat_vectors(LAYOUT, gradients())
    found: dict[int, float] = {}
    for grains in all_held(circle_of(LAYOUT), seats_of([()] * num_ranks, copies)):
        runs = {(run.flat, run.lo): flats[run.flat][run.lo : run.hi].clone() for run in runs_of(LAYOUT, grains)}
        numbers = grains.tolist()
        draw.shuffle(numbers)
        pieces = []
        for number in numbers:
            flat, start = int(LAYOUT.flat_of[number]), int(LAYOUT.start[number])
            (lo, run), *_ = [(lo, run) for (f, lo), run in runs.items() if f == flat and lo <= start < lo + run.numel()]
            pieces.append(run[start - lo :][: int(LAYOUT.hi[number] - LAYOUT.lo[number])])
        own = dict(zip(numbers, squares_of_grains(pieces).tolist(), strict=True))
        assert all(found.get(number, square) == square for number, square in own.items()), "copies agree"
        found |= own
    check_norms(found, uncut())


def by_definition(grain: Tensor) -> float:
    """Return the sum along the tree, of one grain."""
    row = torch.zeros(GRAIN, dtype=torch.float64)
    row[: grain.numel()] = grain.double() ** 2
    while row.numel() > 1:
        row = row[: row.numel() // 2] + row[row.numel() // 2 :]
    return float(row)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("block", [1 << 10, 8 * GRAIN])
def test_tables_of_grains_do_not_show(dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alternating lengths, many or few, short or long; in one batch or in many, and again in reused buffers."""
    monkeypatch.setattr(squares, "_AT_ONCE", {"cpu": block})
    squares._kept.cache_clear()
    squares._batches.cache_clear()
    draw = torch.Generator().manual_seed(block)
    shapes = [
        (720, 24),
        (720, 25),
        (720,),
        (720,),
        (336, 40),
        (96, 700),
        (2752, 3),
        (4, GRAIN + 1),
        (13, 7),
        (1,),
        (9,),
    ]
    cuts = [cut_along(shape, 0 if shape[0] > 13 else None) for shape in shapes * 2]
    for _ in range(2):
        drawn = [torch.randn(shape, generator=draw).to(dtype) * 10.0 ** (n % 7) for n, shape in enumerate(shapes * 2)]
        lengths = [lengths_of(tuple(one.shape), cut) for one, cut in zip(drawn, cuts, strict=True)]
        grains = [grain for one, of in zip(drawn, lengths, strict=True) for grain in one.reshape(-1).split(list(of))]
        assert squares_of_tensors(zip(drawn, cuts, strict=True)).tolist() == list(map(by_definition, grains))
        drawn[0][5, 5] = torch.inf


def test_the_norm_is_close_to_the_exact_one() -> None:
    """The error is a few units in the last place of float64, computed with integer multiples of the least float32."""
    units = [math.ldexp(x, 149) for g in gradients() for x in g.double().reshape(-1).tolist()]
    assert all(unit.is_integer() for unit in units)
    exact = Fraction(sum(int(unit) ** 2 for unit in units), 1 << 298)
    found = total_norm(np.array(list(uncut().values())))
    assert found == pytest.approx(math.sqrt(exact), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_the_norm_of_complex_gradients_has_both_parts(dtype: torch.dtype) -> None:
    """A grain has as many of them as of real numbers; a part that is not finite is seen."""
    drawn = torch.randn(3, GRAIN, dtype=dtype, generator=torch.Generator().manual_seed(1))
    found = squares_of_tensors([(drawn, None), (torch.ones(5), None)])
    torch.testing.assert_close(found[:3], drawn.abs().double().square().sum(1))
    assert found.tolist()[3:] == [5.0]
    drawn[1, 7] = complex(0.0, math.inf)
    assert squares_of_tensors([(drawn, None)]).isfinite().tolist() == [True, False, True]


def test_torchs_norm_is_the_same_to_its_own_precision() -> None:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients()]
    for parameter, gradient in zip(parameters, gradients(), strict=True):
        parameter.grad = gradient
    found = total_norm(np.array(list(uncut().values())))
    assert found == pytest.approx(float(nn.utils.get_total_norm([p.grad for p in parameters])), rel=1e-5)


def test_the_norm_is_frozen() -> None:
    """Another tree within a grain, or another precision, would change the bits of every run that clips."""
    values = (torch.arange(3 * GRAIN + 77) * 7919 % 10007 - 5000).float() / 4096
    found = total_norm(squares_of_tensors([(values[:70], None), (values, None)]).numpy())
    assert found.hex() == "0x1.38d66052e9e6dp+8"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_show(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    uncut_by_one_thread = uncut()
    torch.set_num_threads(threads)
    try:
        check_norms(uncut(), uncut_by_one_thread)
    finally:
        torch.set_num_threads(before)


@pytest.mark.heavy
@pytest.mark.parametrize(("shape", "dim"), [((96, 500), 0), ((96, 500), 1), ((4, 10, 300_000), 0), ((6,), 0)])
def test_parts_have_the_norm_of_the_whole(shape: tuple[int, ...], dim: int) -> None:
    """This holds at every degree, from the parts as each rank has them."""
    whole, cut = torch.randn(shape, generator=torch.Generator().manual_seed(2)), cut_along(shape, dim)
    expected = total_norm(squares_of_tensors([(whole, cut)]).numpy())
    assert cut is not None and expected == pytest.approx(float(whole.double().norm()), rel=1e-12)
    for degree in (degree for degree in (1, 2, 3, 4, 5, 12) if shape[dim] % degree == 0):
        size = shape[dim] // degree
        parts = [(part.clone(), cut.part(n * size, n * size + size)) for n, part in enumerate(whole.split(size, dim))]
        assert total_norm(squares_of_tensors(parts[::-1]).numpy()) == expected


def test_where_a_gradient_is_in_memory_does_not_show() -> None:
    """This holds for any alignment, and for non-contiguous tensors."""
    values = torch.randn(GRAIN, generator=torch.Generator().manual_seed(1))
    expected = squares_of_grains([values])
    for shift in range(9):
        moved = torch.zeros(GRAIN + 9)
        moved[shift : shift + GRAIN] = values
        assert torch.equal(squares_of_grains([moved[shift : shift + GRAIN]]), expected)
    assert torch.equal(squares_of_tensors([(values.view(256, 256).t().contiguous().t(), None)]), expected)


@given(st.integers(1, 300))
def test_a_short_grain_is_a_grain_filled_up_with_zeros(length: int) -> None:
    """Padding thus contributes nothing, wherever else it is summed."""
    values = torch.randn(length, generator=torch.Generator().manual_seed(length))
    padded = torch.zeros(512)
    padded[:length] = values
    assert torch.equal(squares_of_grains([values]), squares_of_grains([padded]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_squares_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    """The largest and smallest values of each narrow type have a norm, as have ordinary float64 values."""
    extreme = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    for value in (extreme.max, extreme.smallest_normal):
        found = total_norm(squares_of_grains([torch.full((4,), value, dtype=dtype)]).numpy())
        assert found == pytest.approx(2 * value)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_has_no_finite_norm(bad: float) -> None:
    values = torch.ones(3 * GRAIN)
    values[GRAIN + 7] = bad
    assert not math.isfinite(total_norm(squares_of_tensors([(values, None)]).numpy()))


def test_a_norm_above_the_largest_number_is_infinite() -> None:
    assert total_norm(np.array([1e308, 1e308])) == math.inf


def test_between_two_norms_nothing_of_the_room_is_held() -> None:
    """This holds for scattered rows and copied runs: a rank's share of a small model may be smaller than the buffer."""
    vectors = [in_memory_order(gradient, cut) for gradient, cut in cut_gradients()]
    lengths = [lengths_of(tuple(gradient.shape), cut) for gradient, cut in cut_gradients()]
    assert any(batch.scatters for batch in squares._batches(tuple(lengths), "cpu"))
    first, again = (squares.grain_squares(vectors, lengths) for _ in range(2))
    assert squares._kept(tuple(lengths))._room.untyped_storage().nbytes() == 0
    assert torch.equal(first, again)


def test_a_kernel_that_does_not_compile_is_found_out_before_a_step_needs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton compiles a kernel when it is first called; torch's operations are used instead."""

    def fold(*_: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(squares, "triton_fold", lambda: fold)
    squares.cuda_fold.cache_clear()
    try:
        assert squares.cuda_fold() is None and "Triton cannot compile" in caplog.text
    finally:
        squares.cuda_fold.cache_clear()


def test_nothing_has_norm_zero() -> None:
    assert total_norm(squares_of_grains([]).numpy()) == 0.0


@pytest.mark.parametrize(
    ("norm", "limit", "factor"), [(0.5, 1.0, 1.0), (2.0, 1.0, 1 / 2.000001), (math.inf, 1.0, 0.0), (0.0, math.inf, 1.0)]
)
def test_clipping_multiplies_by_what_torch_would(norm: float, limit: float, factor: float) -> None:
    assert clip_factor(norm, limit) == factor


def test_clipping_by_a_norm_that_is_not_a_number_is_seen() -> None:
    assert math.isnan(clip_factor(math.nan, 1.0))
