"""A loader's state continues where it was saved, or is refused: no row is left out or repeated in silence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from elastic_train.core.order import Cursor, Order
from elastic_train.data.dataset.manifest import Manifest, load_manifest
from elastic_train.data.loading.lane_batch import AS_THEY_ARE
from elastic_train.data.loading.loader import LaneLoader
from elastic_train.data.loading.reader import Reader
from elastic_train.data.loading.worker_processes import LaneDataLoader, LaneDataset, LaneSampler
from elastic_train.errors import ConfigError
from tests.conftest import write_rows

LANES, MICRO_BATCH = 4, 3
STEPS = 9  # of 100 rows


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return load_manifest(str(write_rows(tmp_path_factory.mktemp("state") / "rows", 100, group_rows=10, num_files=1)))


def loader_of(dataset: Manifest, num_steps: int = STEPS, micro_batch: int = MICRO_BATCH, **changes: Any) -> LaneLoader:
    of_order = {"num_lanes": LANES, "seed": 1, **changes}
    order = Order(dataset.group_rows, **of_order)
    place = {"lanes": range(2), "micro_batch": micro_batch, "cursor": Cursor(), "num_steps": num_steps}
    return LaneLoader(Reader(dataset, ["label"]), order, lambda rows, ids: {}, **place)  # type: ignore[arg-type]


def inner_of(dataset: Manifest, micro_batch: int = MICRO_BATCH, **changes: Any) -> LaneDataLoader:
    """Return what carries such a loader's lanes with worker processes."""
    order = loader_of(dataset, **changes)._order
    reader = LaneDataset(Reader(dataset, ["label"]), order, lambda rows, ids: {}, micro_batch, AS_THEY_ARE)
    return LaneDataLoader(reader, LaneSampler(order, range(2), micro_batch, Cursor(), STEPS), num_workers=0)


def read(steps: Any) -> list[list[int]]:
    return [[id_ for batch in step for id_ in batch.ids.tolist()] for step in steps]


def after(dataset: Manifest, num_steps: int) -> dict[str, int | str]:
    """Return the state after some steps."""
    loader = loader_of(dataset)
    steps = iter(loader)
    for _ in range(num_steps):
        next(steps)
    return loader.state_dict()


def test_an_iterator_follows_a_state_that_is_loaded_meanwhile(dataset: Manifest) -> None:
    """Forwards and backwards, also before its first step; what it yields and what the state says agree."""
    every = read(loader_of(dataset))
    loader = loader_of(dataset)
    steps = iter(loader)
    loader.load_state_dict(after(dataset, 5))
    found = read([next(steps)])
    loader.load_state_dict(after(dataset, 2))
    found += read([next(steps)])
    assert loader.state_dict() == after(dataset, 3)
    assert found + read(steps) == [every[5], *every[2:]]


def test_a_new_loader_ends_with_the_step_with_which_it_would_have_ended(dataset: Manifest) -> None:
    loader = loader_of(dataset)
    loader.load_state_dict(after(dataset, 6))
    assert read(loader) == read(loader_of(dataset))[6:]


def test_a_state_at_the_end_leaves_no_step_and_says_so(dataset: Manifest, caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(dataset)
    with caplog.at_level(logging.WARNING):
        loader.load_state_dict(after(dataset, STEPS))
    assert "with which this loader ends: it yields no step" in caplog.text
    assert read(loader) == []


def test_a_loader_that_is_used_up_is_refused_until_a_state_is_loaded(dataset: Manifest) -> None:
    loader = loader_of(dataset)
    every = read(loader)
    with pytest.raises(ConfigError, match=r"has yielded all of its steps, up to epoch 1, offset 0: load a state"):
        iter(loader)
    loader.load_state_dict(after(dataset, 7))
    assert read(loader) == every[7:]


def test_a_loop_that_was_left_is_continued_by_the_next_iterator_alone(dataset: Manifest) -> None:
    loader = loader_of(dataset)
    old = iter(loader)
    begun = read([next(old)])
    new = iter(loader)
    begun += read([next(new)])
    with pytest.raises(ConfigError, match="a newer iterator of this loader has begun"):
        next(old)
    assert begun + read(new) == read(loader_of(dataset))


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 2},
        {"num_lanes": 5},
        {"num_lanes": 8},
        {"micro_batch": 1},
        {"micro_batch": 6},
        {"block_row_groups": 2},
        {"is_shuffled": False},
    ],
)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_state_of_another_order_is_refused(dataset: Manifest, other: dict[str, Any], num_steps: int) -> None:
    with pytest.raises(ConfigError, match="dataset, seed, lanes, micro-batch and blocks of row groups must be those"):
        loader_of(dataset, **other).load_state_dict(after(dataset, num_steps))
    with pytest.raises(ConfigError, match="dataset, seed, lanes, micro-batch and blocks of row groups must be those"):
        inner_of(dataset, **other).load_state_dict(after(dataset, num_steps))


def test_the_loader_of_worker_processes_has_the_same_states(dataset: Manifest) -> None:
    """They are those of `LaneLoader`, which takes them; a sampler alone knows its order, and no dataset."""
    inner, state = inner_of(dataset), after(dataset, 5)
    inner.load_state_dict(state)
    assert inner.state_dict() == state
    sampler = inner.batch_sampler
    assert sampler.state_dict() != state and (sampler.state_dict()["epoch"], sampler.state_dict()["offset"]) == (0, 15)
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(ConfigError, match="a loader's state is of order"):
        sampler.load_state_dict({**state, "order": "another"})
    with pytest.raises(ConfigError, match="does not say which order its offset 3 is a place in"):
        inner.load_state_dict({"epoch": 0, "offset": 3})
    with pytest.raises(ConfigError, match=r"is at step 10, and this loader ends with step 9"):
        inner.load_state_dict({**state, "epoch": 1, "offset": 3})


def test_a_state_of_another_dataset_is_refused(dataset: Manifest, tmp_path: Path) -> None:
    """Of as many rows in as many row groups."""
    other = load_manifest(str(write_rows(tmp_path / "rows", 100, seed=1, group_rows=10, num_files=1)))
    assert other.group_rows.tolist() == dataset.group_rows.tolist()
    for one in (loader_of(other), inner_of(other)):
        with pytest.raises(ConfigError, match="dataset, seed, lanes"):
            one.load_state_dict(after(dataset, 2))


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({}, "epoch None"),
        ({"epoch": 0}, "offset None"),
        ({"offset": 3}, "epoch None"),
        ({"epoch": "0", "offset": 3}, "epoch '0'"),
        ({"epoch": 0, "offset": 3.0}, "offset 3.0"),
        ({"epoch": True, "offset": 3}, "epoch True"),
        ({"epoch": 0, "offset": -3}, "offset -3"),
        ({"epoch": -1, "offset": 0}, "epoch -1"),
        ({"epoch": None, "offset": None}, "epoch None"),
        ([0, 3], "state is list"),
        (None, "state is NoneType"),
        ('{"epoch": 0}', "state is str"),
    ],
)
def test_what_is_no_state_is_refused(dataset: Manifest, state: Any, named: str) -> None:
    sampler = LaneSampler(loader_of(dataset)._order, range(2), MICRO_BATCH, Cursor(), STEPS)
    for one in (loader_of(dataset), inner_of(dataset), sampler):
        with pytest.raises(ConfigError, match=named):
            one.load_state_dict(state)


@pytest.mark.parametrize("offset", [1, 4, 27, 999])
def test_an_offset_at_which_no_step_begins_is_refused(dataset: Manifest, offset: int) -> None:
    state, found = {**after(dataset, 1), "offset": offset}, f"offset {offset} of epoch 0 is not where a step begins"
    loader, order = loader_of(dataset), loader_of(dataset)._order
    with pytest.raises(ConfigError, match=found):
        loader.load_state_dict(state)
    with pytest.raises(ConfigError, match=found):
        inner_of(dataset).load_state_dict(state)
    with pytest.raises(ConfigError, match=found):
        LaneLoader(
            Reader(dataset, ["label"]),
            order,
            lambda rows, ids: {},
            lanes=range(2),
            micro_batch=MICRO_BATCH,
            cursor=Cursor(0, offset),
            num_steps=1,
        )
    assert read(loader) == read(loader_of(dataset)), "what is refused changes nothing"


def test_a_state_after_the_last_step_is_refused(dataset: Manifest) -> None:
    with pytest.raises(ConfigError, match="is at step 5, and this loader ends with step 3: give it more steps"):
        loader_of(dataset, 3).load_state_dict(after(dataset, 5))


def test_a_state_without_a_fingerprint_is_taken_at_an_epochs_beginning_alone(dataset: Manifest) -> None:
    loader = loader_of(dataset, 2 * STEPS)
    loader.load_state_dict({"epoch": 1, "offset": 0})
    assert len(read(loader)) == STEPS
    with pytest.raises(ConfigError, match=r"does not say which order its offset 6 is a place in.*cursor=Cursor"):
        loader.load_state_dict({"epoch": 1, "offset": 6})
