"""The norm of a gradient on a device: the bits of a CPU, by the kernel and without it."""

from __future__ import annotations

import pytest
import torch

from elastic_train.parallel.devices.squares import cuda_fold, squares_of_grains, squares_of_tensors
from elastic_train.shards.grains import GRAIN
from elastic_train.shards.norm import grain_squares, split_grains
from tests.gpu.conftest import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="the kernel needs a GPU")
SHAPES = ((3, GRAIN), (70,), (), (5, 30_001), (257,), (0, 4), (2, GRAIN + 1))


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of many sizes and magnitudes, some of another type, one not contiguous."""
    draw = torch.Generator().manual_seed(4)
    drawn = [10.0 ** (number - 3) * torch.randn(shape, generator=draw) for number, shape in enumerate(SHAPES)]
    return [*(tensor.to(dtype) for tensor in drawn), drawn[3].t(), drawn[0].bfloat16()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_device_adds_up_as_a_cpu_does(dtype: torch.dtype) -> None:
    assert cuda_fold() is not None, "Triton compiles here"
    on_cpu = gradients(dtype)
    on_device = [tensor.cuda() for tensor in on_cpu]
    expected = squares_of_tensors(on_cpu)
    assert torch.equal(squares_of_tensors(on_device), expected)
    assert torch.equal(squares_of_grains(split_grains(on_device)), expected)
    assert torch.equal(
        grain_squares(split_grains([tensor for tensor in on_device if tensor.dtype == dtype])),
        grain_squares(split_grains([tensor for tensor in on_cpu if tensor.dtype == dtype])),
    )


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_shows_in_its_grain_alone(value: float) -> None:
    gradient = torch.ones(3 * GRAIN, device="cuda")
    gradient[GRAIN + 5] = value
    squares = squares_of_tensors([gradient])
    assert squares.isfinite().tolist() == [True, False, True]
