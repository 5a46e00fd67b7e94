"""The three products of a linear layer, plain or in float8 with a dynamic scale for each row (rowwise scaling).

Each product is `rows @ others.T`. Both matrices are quantised to e4m3 by rows, that is along the dimension that is
summed over, so a scale is a function of its row alone: no lane, rank or earlier step has an effect. Scales are powers
of two, so scaling never rounds. A row with a value that is not finite becomes NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

MULTIPLE = 16
"""The kernels take only sizes of a weight that this divides."""
_LARGEST = 448.0
"""The largest value of e4m3."""
_LEAST = 2.0**-100
"""Rows with smaller values only are scaled as if they had this one: its scale's inverse is still a float32."""
_EXPONENT = -1 << 23
"""The bits of a float32 that are its sign and exponent."""


class Products(NamedTuple):
    """A layer's output for an input; the gradients of the input and of the weight, for matrices of rows."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    of_input: Callable[[Tensor, Tensor], Tensor]
    """(gradient of the output, weight) -> gradient of the input."""
    of_weight: Callable[[Tensor, Tensor], Tensor]
    """(gradient of the output, input) -> gradient of the weight."""


class ScaledLinear(nn.Linear):
    """A linear layer that computes in float8 under autocast; everything but its products is an `nn.Linear`'s."""

    def forward(self, given: Tensor) -> Tensor:
        return products_of(self, given).linear(given, self.weight, self.bias)


def products_of(layer: nn.Linear, given: Tensor) -> Products:
    """Return how a layer computes with an input: plainly where the model has switched autocast off, or has no input."""
    scales = type(layer) is ScaledLinear and torch.is_autocast_enabled(given.device.type) and given.numel()
    return SCALED if scales and fits(layer.weight.shape) else PLAIN


def fits(shape: Iterable[int]) -> bool:
    """Return True if the kernels take a weight of this shape."""
    return all(size and size % MULTIPLE == 0 for size in shape)


def scaled_product(rows: Tensor, others: Tensor) -> Tensor:
    """Return `rows @ others.T` in bfloat16, of matrices quantised by rows."""
    return multiply(*quantise(rows), *quantise(others))


def multiply(rows: Tensor, scales: Tensor, others: Tensor, of_others: Tensor) -> Tensor:
    """Return `(rows * scales) @ (others * of_others).T` in bfloat16, of matrices in e4m3."""
    return torch._scaled_mm(
        rows, others.t(), scale_a=scales, scale_b=of_others.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix as e4m3, contiguous, and the scale of each row (rows, 1), which its values are to be times."""
    largest = rows.abs().amax(1, keepdim=True).float().clamp(min=_LEAST)
    factor = ((_LARGEST / largest).view(torch.int32) & _EXPONENT).view(torch.float32)
    return (rows.float() * factor).to(torch.float8_e4m3fn).contiguous(), factor.reciprocal()


def _linear(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a layer's output; its input and gradients are those of autocast."""
    low = given.to(torch.get_autocast_dtype(given.device.type))
    made: Tensor = _Scaled.apply(low.reshape(-1, low.shape[-1]), weight)  # type: ignore[no-untyped-call]
    made = made.view(*given.shape[:-1], len(weight))
    return made if bias is None else made + bias.to(made.dtype)


class _Scaled(Function):
    """Saves the input as it is and the weight itself: no copy of either outlives a pass."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(given, weight)
        return scaled_product(given, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        given, weight = ctx.saved_tensors
        needs_given, needs_weight = ctx.needs_input_grad
        of_given = SCALED.of_input(gradient, weight).to(given.dtype) if needs_given else None
        return of_given, SCALED.of_weight(gradient, given).to(weight.dtype) if needs_weight else None


def _of_weight(gradient: Tensor, given: Tensor) -> Tensor:
    """Return the gradient of a weight, summed over the rows; rows of zeros make them a multiple of 16."""
    missing = -len(given) % MULTIPLE
    gradient, given = (F.pad(one, (0, 0, 0, missing)) if missing else one for one in (gradient, given))
    return scaled_product(gradient.t(), given.t())


PLAIN = Products(
    F.linear,
    lambda gradient, weight: gradient @ weight.to(gradient.dtype),
    lambda gradient, given: gradient.t() @ given.to(gradient.dtype),
)
SCALED = Products(_linear, lambda gradient, weight: scaled_product(gradient, weight.t()), _of_weight)
