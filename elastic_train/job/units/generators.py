"""Seed, save and restore the random generators of a forward pass: torch (CPU, accelerator), numpy and Python."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from elastic_train.core.lanes import lane_seed
from elastic_train.data.loading.lane_batch import LaneBatch

_LIBRARIES = (
    "aiohttp.connector",
    "botocore.retryhandler",
    "botocore.utils",
    "google.api_core.retry.retry_base",
    "google.auth._exponential_backoff",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.telemetry.client",
    "mlflow.utils.name_utils",
    "mlflow.utils.request_utils",
    "mlflow.utils.rest_utils",
    "pyetcd.client",
    "tenacity.wait",
    "urllib3.util.retry",
    "wandb.sdk.lib.retry",
    "wandb.util",
)
"""Modules that draw from Python's generator in threads of their own: an endpoint of etcd, a pause, a run's name."""
_own = random.Random()


def set_libraries_apart() -> None:
    """Let libraries draw from another generator, or a thread's draw would change the numbers of a forward pass."""
    for name in _LIBRARIES:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "random", None) is random:
            module.random = _own  # type: ignore[attr-defined]
    # The pauses of AWS_RETRY_MODE=standard: a client that was made before has the function, not the module.
    backoff = getattr(sys.modules.get("botocore.retries.standard"), "ExponentialBackoff", None)
    if backoff is not None and not hasattr(backoff, "_random"):
        backoff._random = property(lambda pause: _own.random, lambda pause, given: None)


def seed_generators(seed: int) -> None:
    """Seed torch and the global generators of numpy and Python with `seed`, below 2^63.

    Equal to `torch.manual_seed` for torch, but faster: that function also queues a seed, with a stack trace, for every
    unused device type, which costs as much as a small model's forward and backward pass.
    """
    seed_host_generators(seed)
    torch.default_generator.manual_seed(seed)
    for seed_accelerator in _accelerators():
        seed_accelerator(seed)


def seed_host_generators(seed: int) -> None:
    """Seed the modules `random` and `numpy.random`, but not torch."""
    set_libraries_apart()
    random.seed(seed)
    np.random.seed((seed ^ seed >> 32) & 0xFFFFFFFF)


def seed_validated(batch: LaneBatch) -> None:
    """Seed all generators for a validation micro-batch, independently of run and world."""
    seed_generators(lane_seed(0, batch.lo, batch.lane))


@functools.cache
def _accelerators() -> tuple[Callable[[int], None], ...]:
    """Return functions that seed all devices of this process's accelerator type; empty without an accelerator."""
    if not torch.accelerator.is_available():
        return ()
    module = torch.get_device_module()
    return (getattr(module, "manual_seed_all", None) or module.manual_seed,)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the generators of torch (CPU), numpy and Python on exit."""
    torch_state, *host = states_of_generators()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        _set_host(*host)


def states_of_generators() -> tuple[torch.Tensor, Any, Any]:
    """Return the states of the generators of torch (CPU), numpy and Python."""
    return torch.get_rng_state(), *host_states()


def host_states() -> tuple[Any, Any]:
    """Return the states of the generators of numpy and Python, from which libraries no longer draw."""
    set_libraries_apart()
    return np.random.get_state(), random.getstate()


def _set_host(numpy_state: Any, python_state: Any) -> None:
    np.random.set_state(numpy_state)
    random.setstate(python_state)


@contextlib.contextmanager
def beginning_at(states: tuple[Any, Any]) -> Iterator[None]:
    """Set the generators of numpy and Python to `states`, and restore them on exit."""
    kept = host_states()
    _set_host(*states)
    try:
        yield
    finally:
        _set_host(*kept)


def moved_generators(before: tuple[torch.Tensor, Any, Any]) -> list[str]:
    """Return the names of the generators whose state has changed since `before`."""
    torch_state, *host = before
    return ["torch"] * (not torch.equal(torch_state, torch.get_rng_state())) + moved_hosts((host[0], host[1]))


def moved_hosts(before: tuple[Any, Any]) -> list[str]:
    """Return the names of numpy's and Python's generators whose state has changed since `before`."""
    was, now = before, host_states()
    numpy_moved = any(not np.array_equal(one, other) for one, other in zip(was[0], now[0], strict=True))
    return ["numpy.random"] * numpy_moved + ["random"] * (was[1] != now[1])
