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
    torch_state, *host = states_of_generators()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        _set_host(*host)


def states_of_generators() -> tuple[torch.Tensor, Any, Any]:
    """Return where the generators of torch (on the CPU), numpy and Python are."""
    return torch.get_rng_state(), *host_states()


def host_states() -> tuple[Any, Any]:
    """Return where the generators of numpy and Python are."""
    return np.random.get_state(), random.getstate()


def _set_host(numpy_state: Any, python_state: Any) -> None:
    np.random.set_state(numpy_state)
    random.setstate(python_state)


@contextlib.contextmanager
def beginning_at(states: tuple[Any, Any]) -> Iterator[None]:
    """Let the generators of numpy and Python be elsewhere, and set them back at the end."""
    kept = host_states()
    _set_host(*states)
    try:
        yield
    finally:
        _set_host(*kept)


def moved_generators(before: tuple[torch.Tensor, Any, Any]) -> list[str]:
    """Return the names of the generators that are no longer where they were."""
    torch_state, *host = before
    return ["torch"] * (not torch.equal(torch_state, torch.get_rng_state())) + moved_hosts((host[0], host[1]))


def moved_hosts(before: tuple[Any, Any]) -> list[str]:
    """Return which of numpy's and Python's generators are no longer where they were."""
    was, now = before, host_states()
    numpy_moved = any(not np.array_equal(one, other) for one, other in zip(was[0], now[0], strict=True))
    return ["numpy.random"] * numpy_moved + ["random"] * (was[1] != now[1])
