"""The norm of a gradient on a device: the bits of a CPU, by the kernel and without it."""

from __future__ import annotations

import pytest
import torch

from elastic_train.parallel.devices.squares import (
    cuda_fold,
    grain_squares,
    in_memory_order,
    lengths_of,
    squares_of_tensors,
)
from elastic_train.placement.grains import GRAIN, Cut, cut_along
from tests.gpu.conftest import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="the kernel needs a GPU")
SHAPES = ((3, GRAIN), (70,), (), (5, 30_001), (257,), (0, 4), (2, GRAIN + 1), (720, 144), (96, 40))


def gradients(dtype: torch.dtype) -> list[tuple[torch.Tensor, Cut | None]]:
    """Tensors of many sizes and magnitudes, some of another type, one not contiguous, some cut."""
    draw = torch.Generator().manual_seed(4)
    drawn = [10.0 ** (number - 3) * torch.randn(shape, generator=draw) for number, shape in enumerate(SHAPES)]
    whole = [*(tensor.to(dtype) for tensor in drawn), drawn[3].t(), drawn[0].bfloat16()]
    return [*((one, None) for one in whole), (whole[7], cut_along((720, 144), 0)), (whole[8], cut_along((96, 40), 1))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_device_adds_up_as_a_cpu_does(dtype: torch.dtype) -> None:
    """By the kernel and by torch's operations."""
    assert cuda_fold() is not None, "Triton compiles here"
    on_cpu = gradients(dtype)
    on_device = [(tensor.cuda(), cut) for tensor, cut in on_cpu]
    expected = squares_of_tensors(on_cpu)
    assert torch.equal(squares_of_tensors(on_device), expected)
    filled = [(tensor, cut) for tensor, cut in on_device if tensor.numel()]
    vectors = [in_memory_order(tensor, cut) for tensor, cut in filled]
    lengths = [lengths_of(tuple(tensor.shape), cut) for tensor, cut in filled]
    assert torch.equal(grain_squares(vectors, lengths), expected)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_shows_in_its_grain_alone(value: float) -> None:
    gradient = torch.ones(3 * GRAIN, device="cuda")
    gradient[GRAIN + 5] = value
    squares = squares_of_tensors([(gradient, None)])
    assert squares.isfinite().tolist() == [True, False, True]
