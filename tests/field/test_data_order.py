"""Reports about which samples a loader gives after it was resumed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from elastic_train.core.lanes import owned_lanes
from elastic_train.core.order import Cursor, Order
from elastic_train.data.dataset.manifest import Manifest, load_manifest
from elastic_train.data.loading.loader import LaneLoader
from elastic_train.data.loading.reader import Reader
from tests.conftest import write_rows
from tests.elastic_train.data.loading.worker_collate import collate

NUM_LANES, MICRO_BATCH, NUM_EPOCHS = 4, 3, 3
Steps = list[list[int]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return load_manifest(str(write_rows(tmp_path_factory.mktemp("order") / "rows", 53, group_rows=7)))


def order_of(dataset: Manifest) -> Order:
    return Order(dataset.group_rows, num_lanes=NUM_LANES, seed=3, block_row_groups=2)


def per_epoch(dataset: Manifest) -> int:
    return order_of(dataset).num_steps(MICRO_BATCH)


def loader_of(dataset: Manifest, state: dict[str, Any] | None = None, lanes: range = range(NUM_LANES)) -> LaneLoader:
    """Return a loader of three epochs, as a new process would make it."""
    order = order_of(dataset)
    loader = LaneLoader(
        Reader(dataset, ["label"]),
        order,
        collate,
        lanes=lanes,
        micro_batch=MICRO_BATCH,
        cursor=Cursor(),
        num_steps=NUM_EPOCHS * order.num_steps(MICRO_BATCH),
    )
    if state is not None:
        loader.load_state_dict(state)
    return loader


def take(loader: LaneLoader, num_steps: int | None = None) -> Steps:
    """Return the samples of the next steps."""
    steps: Steps = []
    for step in loader:
        steps.append([id_ for batch in step for id_ in batch.ids.tolist()])
        if len(steps) == num_steps:
            break
    return steps


def test_a_resume_in_the_second_epoch_continues_the_order_of_that_epoch(dataset: Manifest) -> None:
    """The rest of epoch 0's order was given: https://github.com/huggingface/accelerate/issues/2823."""
    whole, taken = take(loader_of(dataset)), per_epoch(dataset) + 2
    first = loader_of(dataset)
    assert take(first, taken) == whole[:taken]
    assert take(loader_of(dataset, first.state_dict())) == whole[taken:]


def test_the_epoch_after_a_resumed_one_is_not_the_resumed_one_again(dataset: Manifest) -> None:
    """The same permutation came twice in a row: https://github.com/huggingface/accelerate/pull/4233."""
    first, length = loader_of(dataset), per_epoch(dataset)
    begun = take(first, 2)
    rest = take(loader_of(dataset, first.state_dict()))
    steps = begun + rest
    epochs = [steps[number * length : (number + 1) * length] for number in range(NUM_EPOCHS)]
    assert steps == take(loader_of(dataset))
    assert all(Counter(id_ for step in epoch for id_ in step) == Counter(range(53)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_second_resume_within_an_epoch_counts_from_its_beginning(dataset: Manifest) -> None:
    """It counted from the first resume: https://github.com/KempnerInstitute/KempnerForge/issues/57."""
    steps: Steps = []
    state = None
    for num_steps in (2, 1, 1, None):
        loader = loader_of(dataset, state)
        steps += take(loader, num_steps)
        state = loader.state_dict()
    assert steps == take(loader_of(dataset))


def test_a_state_from_the_end_of_an_epoch_begins_the_next_one(dataset: Manifest) -> None:
    """A whole epoch was dropped or given again: https://github.com/meta-pytorch/data/issues/1437."""
    first, length = loader_of(dataset), per_epoch(dataset)
    take(first, length)
    assert take(loader_of(dataset, first.state_dict())) == take(loader_of(dataset))[length:]


def test_a_resume_on_fewer_ranks_gives_every_other_sample_once(dataset: Manifest) -> None:
    """A state was of one number of ranks alone: https://github.com/Lightning-AI/litData/pull/878."""
    before = [loader_of(dataset, lanes=owned_lanes(rank, 4, NUM_LANES)) for rank in range(4)]
    seen = Counter(id_ for loader in before for step in take(loader, 2) for id_ in step)
    (state,) = {str(loader.state_dict()): loader.state_dict() for loader in before}.values()
    left = per_epoch(dataset) - 2
    after = [loader_of(dataset, state, owned_lanes(rank, 3, NUM_LANES)) for rank in range(3)]
    seen.update(id_ for loader in after for step in take(loader, left) for id_ in step)
    assert seen == Counter(range(53))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_have_equally_many_steps_whatever_is_left_over(dataset: Manifest, num_ranks: int) -> None:
    """Ranks with a batch more waited for ever: https://github.com/modelscope/ms-swift/pull/10141."""
    lengths = {
        len(take(loader_of(dataset, lanes=owned_lanes(rank, num_ranks, NUM_LANES)))) for rank in range(num_ranks)
    }
    assert lengths == {NUM_EPOCHS * per_epoch(dataset)}
