"""The generators that a lane's forward pass draws from: torch's own, of CPU and accelerator, numpy's and Python's."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from elastic_train.core.lanes import lane_seed
from elastic_train.data.loading.lane_batch import LaneBatch


def seed_generators(seed: int) -> None:
    """Begin all random numbers of this process at `seed`, below 2^63: torch's, and the global ones of numpy and Python.

    torch's are those of `torch.manual_seed`, in less time. That one also notes the call stack for every kind of device
    that torch knows and this process does not use, in case it ever will: as much work as a small model's forward and
    backward pass.
    """
    seed_host_generators(seed)
    torch.default_generator.manual_seed(seed)
    for seed_accelerator in _accelerators():
        seed_accelerator(seed)


def seed_host_generators(seed: int) -> None:
    """Begin the random numbers of the modules `random` and `numpy.random` at `seed`; torch's stay where they are."""
    random.seed(seed)
    np.random.seed((seed ^ seed >> 32) & 0xFFFFFFFF)


def seed_validated(batch: LaneBatch) -> None:
    """Begin all random numbers for a micro-batch of a validation: the same in each, whatever the run and the world."""
    seed_generators(lane_seed(0, batch.lo, batch.lane))


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


def moved_generators(before: tuple[torch.Tensor, Any, Any]) -> list[str]:
    """Return the names of the generators that are no longer where they were."""
    was, now = before, states_of_generators()
    numpy_moved = any(not np.array_equal(one, other) for one, other in zip(was[1], now[1], strict=True))
    moved = {"torch": not torch.equal(was[0], now[0]), "numpy.random": numpy_moved, "random": was[2] != now[2]}
    return [name for name, has_moved in moved.items() if has_moved]
