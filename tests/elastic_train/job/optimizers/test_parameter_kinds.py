"""Updates that would be lost to rounding are reported before training."""

from __future__ import annotations

import pytest
import torch

from elastic_train.job.optimizers.choice import precision_hazard


@pytest.mark.parametrize(
    ("dtype", "name", "lr", "is_lost"),
    [
        (torch.bfloat16, "adamw", 5e-6, True),
        (torch.float16, "torch.optim:Adam", 1e-7, True),
        (torch.bfloat16, "adamw", 1e-2, False),
        (torch.float32, "adamw", 5e-6, False),
        (torch.bfloat16, "sgd", 5e-6, False),
    ],
)
def test_updates_below_the_precision_of_weights_are_warned_of(
    dtype: torch.dtype, name: str, lr: float, is_lost: bool
) -> None:
    """The warning names type, key, value and fraction; frozen weights have no updates."""
    weights = (torch.randn(300, 50, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype).requires_grad_()
    frozen = torch.ones(9000, dtype=torch.bfloat16)
    hazard = precision_hazard([weights, frozen], name, lr)
    assert bool(hazard) == is_lost
    if is_lost:
        assert "16" in hazard and f"optimizer.lr, {lr:g}, rounds to nothing for 9" in hazard
