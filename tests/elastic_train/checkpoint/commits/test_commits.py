"""A commit returns the saved bits, to this package and to stock torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import importlib
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_train.checkpoint.commits.reader import discover, load, read_state, verify
from elastic_train.checkpoint.format import dcp as format_
from elastic_train.checkpoint.format import layout
from elastic_train.checkpoint.format.dcp import finish_attempt, live_contents, write_part
from elastic_train.checkpoint.format.layout import Planner, bytes_of, leaves_by_path
from elastic_train.checkpoint.format.reading import read_leaves
from elastic_train.checkpoint.format.state_tree import fill, leaves_of, survey
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import ConfigError
from tests.conftest import ROOT, run_source
from tests.elastic_train.checkpoint.commit_samples import (
    State,
    aged,
    commit_steps,
    facts,
    small_state,
    take_steps,
    trained,
    writer,
)

pytestmark = pytest.mark.slow


def assert_equal_trees(actual: object, expected: object) -> None:
    """Assert that every leaf is equal, tensors by type and bit."""
    assert_equal_leaves(dict(leaves_of(actual)), dict(leaves_of(expected)))


def assert_equal_leaves(left: dict[tuple, object], right: dict[tuple, object]) -> None:
    """Assert that leaves are equal, by path."""
    assert left.keys() == right.keys()
    for path, leaf in right.items():
        if isinstance(leaf, torch.Tensor):
            found = left[path]
            assert isinstance(found, torch.Tensor)
            assert (found.dtype, found.shape) == (leaf.dtype, leaf.shape), path
            assert torch.equal(found, leaf), path
        else:
            assert left[path] == leaf, path


def odd_state() -> State:
    """Return a state with every feature that has failed elsewhere."""
    return {
        "model": OrderedDict(w=torch.randn(700_003), b=torch.randn(3, dtype=torch.bfloat16), n=torch.tensor(7)),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}, 10: {}},
            "param_groups": [{"params": [0, 10], "lr": 0.1}],
        },
        "scaler": {},
        "extras": {
            "none": None,
            "tuple": (1, "two"),
            "void": torch.empty(0, 4),
            "list": [torch.ones(2), {"x": True}],
            "e": [],
        },
    }


def test_a_state_comes_back_bit_equal_from_every_store(store: Store) -> None:
    """Tensors of any type and size, plain values, integer keys and empty mappings survive."""
    state = odd_state()
    record = writer(store).save(state, facts(3))
    found = discover(store)
    assert found.head == record
    assert found.skipped == ()
    restored = read_state(store, record)
    assert_equal_trees(restored, state)
    optimizer = restored["optimizer"]
    assert isinstance(optimizer, dict)
    assert sorted(optimizer["state"]) == [0, 10]


def test_an_empty_store_has_no_head(store: Store) -> None:
    """Before the first commit there is nothing to restore, and no error."""
    found = discover(store)
    assert found.head is None
    assert found.skipped == ()


def test_training_resumed_from_a_commit_is_training_uninterrupted(local_store: Store) -> None:
    """A new model and optimizer that load the commit and train on reach the same bits."""
    model, optimizer = trained(3)
    record = writer(local_store).save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, facts(3))
    take_steps(model, optimizer, 3, 6)

    other, other_optimizer = trained(0, seed=9)
    state: State = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
    load(local_store, record, state)
    other_optimizer.load_state_dict(state["optimizer"])
    take_steps(other, other_optimizer, 3, 6)
    assert_equal_trees(other.state_dict(), model.state_dict())
    assert_equal_trees(other_optimizer.state_dict(), optimizer.state_dict())


def test_load_fills_tensors_in_place(local_store: Store) -> None:
    """The load writes to the model's own memory, to avoid a second allocation of its size."""
    (record,) = commit_steps(local_store, 5)
    state = small_state(0)
    weights = state["model"]["w"]
    load(local_store, record, state)
    assert weights.tolist() == [5.0] * 5
    assert state["scheduler"] == {"last_epoch": 5}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"w": torch.zeros(4)}, "'model.w' is .4,. torch.float32, the commit holds .5,. torch.float32"),
        ({"w": torch.zeros(5, dtype=torch.float64)}, "'model.w' is .5,. torch.float64"),
        ({"w": torch.zeros(5), "new": torch.zeros(1)}, "'model.new' is .1,. torch.float32, the commit holds nothing"),
    ],
)
def test_a_changed_model_is_refused(local_store: Store, model: State, message: str) -> None:
    """Another shape, another type (a copy would convert it), or a parameter that the commit lacks is an error."""
    (record,) = commit_steps(local_store, 5)
    with pytest.raises(ConfigError, match=message):
        load(local_store, record, {"model": model})


@pytest.mark.parametrize(
    ("extras", "message"),
    [({"path": Path("x")}, "'path' is a "), ({"m": {0: 1, "a": 2}}, "'m' has keys of type int and str")],
)
def test_a_state_that_could_not_be_read_back_is_not_saved(local_store: Store, extras: State, message: str) -> None:
    """A state that would need a trusted pickle, or would lose keys, is refused, and none of its files remain."""
    with pytest.raises(ConfigError, match=message):
        writer(local_store).save(extras, facts(1))
    assert local_store.list("data/") == []
    assert discover(local_store).head is None


def test_stock_dcp_reads_a_commit_in_one_process(local_store: Store) -> None:
    """torch's loader, without knowledge of this package, loads the same bits."""
    model, optimizer = trained(2)
    record = writer(local_store).save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, facts(2))
    other, _ = trained(0, seed=9)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=f"{local_store.url}/{record.attempt}", no_dist=True)
    assert_equal_trees(other.state_dict(), model.state_dict())


STOCK_READER = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
folder, meeting = sys.argv[1:]
torch.set_num_threads(1)
rank, others = 0, []
while rank == 0 and len(others) < 2:  # one process pays for the imports
    others.append(os.fork())
    rank = 0 if others[-1] else len(others)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=3)
for size in (1, 2, 3):
    group = dist.new_group(range(size))
    if rank < size:
        mesh = DeviceMesh.from_group(group, "cpu")
        half = {"w": distribute_tensor(torch.zeros(1001), mesh, [Shard(0)]), "b": torch.zeros(7)}
        dcp.load({"model": half}, checkpoint_id=folder, process_group=group)
        assert half["w"].to_local().numel() < 1001 or size == 1
        whole = half["w"].full_tensor()
        assert torch.equal(whole, torch.arange(1001.0) / 3), (size, whole)
        assert torch.equal(half["b"], torch.arange(7.0) / 7), (size, half["b"])
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    assert [os.waitpid(other, 0)[1] for other in others] == [0, 0]
"""


def test_stock_dcp_reads_the_newest_commit_over_one_two_and_three_ranks(local_store: Store, tmp_path: Path) -> None:
    """With other worlds and another layout every rank reads its shard, and together they have the same bits."""
    commit_steps(local_store, 1)
    head = discover(local_store).head
    state: State = {"model": {"w": torch.arange(1001.0) / 3, "b": torch.arange(7.0) / 7}}
    record = writer(local_store, head).save(state, facts(2))
    assert discover(local_store).head == record
    folder, meeting = f"{local_store.url}/{record.attempt}", str(tmp_path / "meeting")
    result = run_source(STOCK_READER, folder, meeting)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("is_older", [False, True])
def test_a_fifty_line_reader_reads_a_commit(
    local_store: Store, is_older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format's documentation suffices to write one, and the example from it gets the same bits."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    read_commit = importlib.import_module("read_a_commit").read_commit
    commit_steps(local_store, 1)
    state = odd_state()
    record = writer(local_store, discover(local_store).head).save(state, facts(3))
    if is_older:
        aged(local_store, record)
    for step, torn in enumerate((b"", b'{"format":4,', b"[]"), start=4):  # by a disk, or a machine that went down
        (Path(local_store.url) / "commits" / f"00000009-{step:012d}.json").write_bytes(torn)
    assert_equal_leaves(read_commit(Path(local_store.url)), dict(leaves_of(state)))


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_a_state_can_be_spread_over_writers(
    local_store: Store, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank computes the same plan without communication and writes its part; the parts form the whole."""
    monkeypatch.setattr(layout, "LEAST_PART_BYTES", 1)
    state = odd_state()
    leaves = leaves_by_path(state)
    planners = [Planner() for _ in range(num_parts)]
    plans = [planner.plan(state, leaves, num_parts) for planner in planners]
    written = []
    for place, (planner, plan) in enumerate(zip(planners, plans, strict=True)):
        plain = planner.encode(plan, leaves) if place == 0 else {}
        part = plan.parts[place]
        written.append(write_part(local_store, "data/x/y", part, live_contents(part, leaves), plain))
    files = finish_attempt(local_store, "data/x/y", plans[0], written)
    restored: State = {}
    fill(restored, read_leaves(local_store, "data/x/y", files, {}), *survey(state))
    assert len(files) == num_parts + 1
    assert_equal_trees(restored, state)


def test_a_commit_names_its_parent_and_its_intervals(local_store: Store) -> None:
    """Commits form a chain by digest, across terms, whose intervals tile [0, step)."""
    first, second = commit_steps(local_store, 3, 7)
    (third,) = commit_steps(local_store, 9, parent=second)
    assert [commit.parent for commit in (first, second, third)] == [None, first.digest, second.digest]
    assert [str(interval) for interval in third.intervals] == ["[0, 7) of term 1", "[7, 9) of term 2"]
    verify(local_store, third)


def test_a_metric_that_is_not_finite_is_null(local_store: Store) -> None:
    """A diverged loss does not make the record unreadable."""
    (record,) = commit_steps(local_store, 1)
    assert record.metrics == {"loss": 0.5, "diverged": None}


leaf = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3))
names = st.text("abc", min_size=1, max_size=2)
trees = st.recursive(
    leaf,
    lambda below: st.one_of(
        st.dictionaries(names, below, max_size=3),
        st.dictionaries(st.integers(0, 20), below, max_size=3),
        st.lists(below, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@example({"a": [[]], "b": [[{0: [1]}, 2], []]})
@given(st.dictionaries(names, trees, max_size=3))
@example({"a": [[]], "b": [[1], [{}]]})
def test_any_tree_of_plain_values_comes_back(state: State) -> None:
    """Shape, keys and values of a nested state survive the file format."""
    store = open_store(f"memory://trees/{id(state)}")
    record = writer(store).save(state, facts(1))
    assert read_state(store, record) == state
    filled: State = copy.deepcopy(state)
    load(store, record, filled)
    assert filled == state


def test_a_state_on_a_device_is_copied_a_few_tensors_at_a_time(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow hashing is: a host without memory for a copy of the whole state can commit it alone."""
    num_tensors, num_copied, all_copied = 20, 0, threading.Event()

    def counted(tensor: torch.Tensor) -> memoryview:
        nonlocal num_copied
        num_copied += 1
        if num_copied == num_tensors:
            all_copied.set()
        return bytes_of(tensor)

    copied_at_first: list[int] = []

    def digest(dtype: torch.dtype, shape: torch.Size, content: memoryview, *_: object) -> str:
        if not copied_at_first:
            all_copied.wait(0.5)
            copied_at_first.append(num_copied)
        return "digest"

    monkeypatch.setattr(format_, "bytes_of", counted)
    monkeypatch.setattr(format_, "tensor_digest", digest)
    state: State = {"model": {str(number): torch.ones(3) for number in range(num_tensors)}}
    writer(local_store).save(state, facts(1))
    assert num_copied == num_tensors and copied_at_first[0] <= 5
