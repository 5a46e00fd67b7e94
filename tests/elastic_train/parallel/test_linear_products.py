"""Float8 products with a scale for each row: against plain arithmetic, and as a layer of a model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from elastic_train.parallel.linear_products import ScaledLinear, quantise, scaled_product
from tests.float8 import needs_float8

pytestmark = needs_float8
SHAPES = [(1, 16, 16), (7, 32, 48), (48, 64, 16), (130, 176, 64)]
"""Rows, inputs and outputs of a layer."""


def scaled_row(row: list[float]) -> list[float]:
    """Return a row as float8 represents it: three bits after the first, times the row's power of two."""
    largest = max(map(abs, row))
    if largest == 0:
        return row
    unit = 2.0 ** -math.floor(math.log2(448 / largest))
    return [_rounded(value / unit) * unit for value in row]


def _rounded(value: float) -> float:
    """Round to e4m3: half to even, and below 2^-6 in steps of 2^-9."""
    step = 2.0 ** (max(-6, math.frexp(value)[1] - 1) - 3) if value else 1.0
    return round(value / step) * step


def expected(rows: Tensor, others: Tensor) -> Tensor:
    """Return `rows @ others.T` of matrices quantised row by row, in plain numbers."""
    left, right = ([scaled_row(row) for row in one.double().tolist()] for one in (rows, others))
    return torch.tensor([[math.fsum(map(float.__mul__, row, other)) for other in right] for row in left])


def drawn(*shape: int) -> Tensor:
    """Draw values whose rows and columns differ in size by a factor of thousands."""
    draw = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, generator=draw)
    return values * 2.0 ** torch.randint(-12, 12, (*shape[:-1], 1), generator=draw)


@pytest.mark.parametrize(("num_rows", "inputs", "outputs"), SHAPES)
def test_a_product_is_that_of_plain_numbers(num_rows: int, inputs: int, outputs: int) -> None:
    rows, others = drawn(num_rows, inputs), drawn(outputs, inputs)
    right = expected(rows, others)
    found = scaled_product(rows, others)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), right.double(), rtol=2**-8, atol=float(right.abs().max()) * 1e-6)


def test_a_row_is_quantised_without_regard_to_others() -> None:
    rows = drawn(64, 32)
    rows[3] = 0.0
    for form in (rows, rows.bfloat16(), rows.t().contiguous().t()):
        whole, scales = quantise(form)
        assert whole.is_contiguous() and torch.equal(torch.frexp(scales)[0], torch.full((64, 1), 0.5))
        for lo, hi in ((0, 1), (3, 20), (63, 64)):
            part, of_part = quantise(form[lo:hi])
            assert torch.equal(part.view(torch.uint8), whole[lo:hi].view(torch.uint8))
            assert torch.equal(of_part, scales[lo:hi])


def test_values_that_are_not_finite_stay_so_and_in_their_row() -> None:
    for value in (math.nan, math.inf, -math.inf):
        rows, others = drawn(4, 16), drawn(16, 16)
        rows[2, 5] = value
        assert scaled_product(rows, others).isnan().all(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_rows", "inputs", "outputs"), SHAPES)
def test_a_layer_makes_three_products(num_rows: int, inputs: int, outputs: int, bias: bool) -> None:
    """Its output and both gradients are those of matrices quantised along what is summed; a bias is plain."""
    layer = scaled(nn.Linear(inputs, outputs, bias=bias))
    given, back = drawn(num_rows, inputs).requires_grad_(), drawn(num_rows, outputs).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        made = layer(given[None])
    assert made.dtype is torch.bfloat16 and made.shape == (1, num_rows, outputs)
    made.backward(back[None])
    low, weight = given.detach().bfloat16(), layer.weight.detach()
    assert layer.weight.grad is not None and given.grad is not None
    near(made[0].detach() - (layer.bias if bias else 0.0), expected(low, weight), 2**-7)
    near(given.grad, expected(back, weight.t()), 2**-8)
    near(layer.weight.grad, expected(back.t(), low.t()), 2**-8)
    if bias:
        near(layer.bias.grad, back.double().sum(0), 2**-7)


def test_a_layer_takes_a_vector() -> None:
    """As `nn.Linear` does."""
    layer, given = scaled(nn.Linear(32, 48)), drawn(1, 32)
    with torch.autocast("cpu", torch.bfloat16):
        one, row = layer(given[0]), layer(given)
    assert one.shape == (48,) and torch.equal(one, row[0])
    one.sum().backward()
    assert layer.weight.grad is not None


def near(found: Tensor | None, right: Tensor, rtol: float) -> None:
    assert found is not None
    torch.testing.assert_close(found.double(), right.double(), rtol=rtol, atol=float(right.abs().max()) * rtol / 4)


def scaled(layer: nn.Linear) -> nn.Linear:
    layer.__class__ = ScaledLinear
    return layer


def test_outside_autocast_without_rows_and_with_odd_sizes_a_layer_is_plain() -> None:
    """So a router that is kept in full precision stays so, and a part that a rank has may be of any size."""
    odd, even = nn.Linear(24, 16), nn.Linear(16, 32)
    for layer, shape, enabled in ((odd, (5, 24), True), (even, (5, 16), False), (even, (0, 16), True)):
        given = drawn(*shape)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            layer.__class__ = nn.Linear
            plain = layer(given)
            assert torch.equal(scaled(layer)(given), plain)


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    layer, given = scaled(nn.Linear(16, 16)), drawn(3, 16)
    layer.weight.requires_grad = False
    with torch.autocast("cpu", torch.bfloat16):
        layer(given).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None


def test_a_pass_keeps_no_copy_of_a_weight() -> None:
    """Autocast keeps one in bf16; float8 keeps the layer's input, in bf16, and the weight itself."""
    layer, kept = scaled(nn.Linear(64, 256)), list[Tensor]()
    keeping = torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one)
    with keeping, torch.autocast("cpu", torch.bfloat16):
        layer(drawn(8, 64))
    assert sum(one.nbytes for one in kept if one is not layer.weight) == 2 * 8 * 64
