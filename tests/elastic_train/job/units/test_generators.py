"""Generators are seeded as by `torch.manual_seed`, without its cost."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from botocore.retries.standard import ExponentialBackoff
from pyetcd.client import Endpoint, MultiEndpointEtcd3Client

from elastic_train.job.units import generators
from elastic_train.job.units.generators import moved_generators, seed_generators, states_of_generators, undisturbed


@pytest.fixture(autouse=True)
def _found_again() -> Iterator[None]:
    """Each test detects its own accelerator, and leaves none."""
    generators._accelerators.cache_clear()
    yield
    generators._accelerators.cache_clear()


@pytest.mark.parametrize("seed", [0, 7, (1 << 63) - 1])
def test_the_numbers_are_those_of_manual_seed(seed: int) -> None:
    torch.manual_seed(seed)
    expected = torch.rand(3), torch.nn.functional.dropout(torch.ones(99))
    seed_generators(seed)
    found = torch.rand(3), torch.nn.functional.dropout(torch.ones(99))
    assert all(map(torch.equal, found, expected))


def test_devices_that_nobody_uses_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed records its caller once for each device."""
    noted = []
    monkeypatch.setattr(traceback, "format_stack", lambda: noted.append(1) or [])  # type: ignore[func-returns-value]
    torch.manual_seed(3)
    if not torch.cuda.is_available():
        assert noted
    noted.clear()
    seed_generators(3)
    assert torch.cuda.is_available() or not noted


@pytest.mark.parametrize("name", ["manual_seed_all", "manual_seed"])
def test_an_accelerator_is_seeded_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All of its devices, if its module has a function for that."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch, "get_device_module", lambda: SimpleNamespace(**{"manual_seed": None, name: seeded.append})
    )
    seed_generators(5)
    seed_generators(6)
    assert seeded == [5, 6]


def test_numpy_and_python_begin_at_the_seed() -> None:
    """Their global generators give the same numbers after the same seed, and others after another one."""

    def draw(seed: int) -> tuple[float, float, float]:
        seed_generators(seed)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draw(7) == draw(7)
    assert not set(draw(7)) & set(draw(1 << 40))
    assert not set(draw(7)) & set(draw((1 << 63) - 1))


@pytest.mark.parametrize(
    ("name", "draws"), [("torch", lambda: torch.rand(1)), ("numpy.random", np.random.rand), ("random", random.random)]
)
def test_a_generator_that_was_drawn_from_is_named(name: str, draws: Callable[[], object]) -> None:
    with undisturbed():
        before = states_of_generators()
        assert moved_generators(before) == []
        draws()
        assert moved_generators(before) == [name]


def test_an_etcd_client_that_opens_elsewhere_draws_nothing_from_a_task() -> None:
    """pyetcd chooses an endpoint at random. A job was refused when a thread opened a client beside `collate`."""
    seed_generators(3)
    drawn = random.random()
    seed_generators(3)
    before = states_of_generators()
    MultiEndpointEtcd3Client([Endpoint("localhost", 2379, secure=False)])
    assert not moved_generators(before)
    assert random.random() == drawn


def test_a_pause_of_botocores_standard_retries_draws_nothing_from_a_task() -> None:
    """A client for S3 is often older than the first task."""
    made = ExponentialBackoff()
    for pause in (made, ExponentialBackoff()):
        before = states_of_generators()
        assert 0 <= pause.delay_amount(SimpleNamespace(attempt_number=2)) <= 2
        assert not moved_generators(before)


@pytest.mark.slow  # imports MLflow
@pytest.mark.parametrize("name", generators._LIBRARIES)
def test_libraries_that_draw_have_a_generator_of_their_own(name: str) -> None:
    library = pytest.importorskip(name)
    generators.set_libraries_apart()
    assert isinstance(library.random, random.Random)
