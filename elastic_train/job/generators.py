"""The generators that a lane's forward pass draws from: torch's own, of the CPU and of the accelerator."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Begin all random numbers of this process at `seed`, below 2^63, as `torch.manual_seed` does, in less time.

    That one also notes the call stack for every kind of device that torch knows and this process does not use, in case
    it ever will: as much work as a small model's forward and backward pass.
    """
    torch.default_generator.manual_seed(seed)
    for seed_accelerator in _accelerators():
        seed_accelerator(seed)


@functools.cache
def _accelerators() -> tuple[Callable[[int], None], ...]:
    """Return what seeds all devices of this process's kind of accelerator; nothing where there is none."""
    if not torch.accelerator.is_available():
        return ()
    module = torch.get_device_module()
    return (getattr(module, "manual_seed_all", None) or module.manual_seed,)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Set the generators of torch, numpy and Python back to where they were, whatever runs inside."""
    kept = states_of_generators()
    try:
        yield
    finally:
        torch_state, numpy_state, python_state = kept
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def states_of_generators() -> tuple[torch.Tensor, Any, Any]:
    """Return where the generators of torch (on the CPU), numpy and Python are."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()
