"""Tensors in pieces: however they are held and written, the commit has the same bits, and any other cut reads them."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic_train.checkpoint.commits.reader import load, read_state, verify
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.weights import export
from elastic_train.checkpoint.format import layout
from elastic_train.checkpoint.format.layout import Planner, leaves_by_path, plan_attempt
from elastic_train.checkpoint.format.state_tree import Pieces, Span, boxes, span_of
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Store
from elastic_train.parallel.devices.squares import in_memory_order
from elastic_train.placement.grains import GRAIN, CutDims, bounds_of, cut_along
from tests.conftest import ROOT
from tests.elastic_train.checkpoint.commit_samples import State, facts, writer
from tests.elastic_train.checkpoint.commits.test_commits import assert_equal_leaves, assert_equal_trees
from tests.elastic_train.checkpoint.piece_samples import (
    cut,
    cuts,
    dtypes,
    joined,
    large_shapes,
    mapped,
    numbered,
    save_by,
    shapes,
    tensors_of,
)


@pytest.mark.heavy
@settings(max_examples=300)
@given(shapes, st.data())
def test_a_span_is_a_few_boxes_that_are_runs_of_it(shape: torch.Size, data: st.DataObject) -> None:
    """Each box is the same bytes in memory and in a file, and together, in order, they are the span."""
    whole = torch.arange(shape.numel()).reshape(shape)
    span = tuple(sorted(data.draw(st.integers(0, shape.numel())) for _ in range(2)))
    found = boxes(shape, span)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    seen: list[int] = []
    for box in found:
        part = whole[tuple(slice(lo, lo + size) for lo, size in zip(box.offsets, box.sizes, strict=True))]
        assert part.shape == box.sizes and part.is_contiguous() and part.numel()
        assert span_of(shape, box.offsets, box.sizes) == box.span
        seen += part.reshape(-1).tolist()
    assert seen == list(range(*span))


def test_one_element_is_contiguous_whatever_its_strides(local_store: Store) -> None:
    """A piece of one element is placed correctly in a transposed tensor."""
    whole, written = numbered((4, 3)), [[(0, 5)], [(5, 6), (6, 12)]]
    states: list[State] = [{"optimizer": {"m": cut(whole, written, joined(spans))}} for spans in written]
    record = save_by(local_store, writer(local_store), states)
    transposed = torch.zeros(3, 4).T
    load(local_store, record, {"optimizer": {"m": transposed}})
    assert torch.equal(transposed, whole) and not transposed.is_contiguous()


def test_a_box_that_is_no_run_of_elements_is_not_taken_for_one() -> None:
    """Two columns of a matrix are many runs, unless columns come first in memory."""
    assert span_of((3, 4), (0, 1), (3, 2)) is None
    assert span_of((4, 3), (1, 0), (2, 3)) == (3, 9)


def world_of(data: st.DataObject, state: State, size: int, dims: CutDims | None = None) -> list[State]:
    """Cut some tensors of a state over the ranks of a world; each holds what it writes and some more."""
    states: list[dict] = [{key: dict(value) for key, value in state.items()} for _ in range(size)]
    for path, whole in tensors_of(state).items():
        if not data.draw(st.booleans()):
            continue
        numel, along, ends = whole.numel(), data.draw(st.sampled_from([None, *range(whole.ndim)])), tuple[int, ...]()
        if path[0] == "model":
            along = (dims or {}).get(str(path[1]))
            ends = bounds_of(tuple(whole.shape), cut_along(whole.shape, along))
        written = data.draw(cuts(numel, size, ends=ends))
        more = data.draw(cuts(numel, size))
        for rank, tree in enumerate(states):
            tree[path[0]][path[1]] = cut(whole, written, joined_overlapping([*written[rank], *more[rank]]), along)
    return states


def joined_overlapping(spans: Sequence[Span]) -> list[Span]:
    """Return the union of the spans."""
    ends: list[Span] = []
    for lo, hi in sorted(spans):
        if ends and lo <= ends[-1][1]:
            ends[-1] = ends[-1][0], max(hi, ends[-1][1])
        else:
            ends.append((lo, hi))
    return ends


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(shapes, min_size=1, max_size=3), large_shapes, dtypes, st.sampled_from([1, 3, 4, 7]), st.data())
def test_a_commit_does_not_show_how_its_state_was_cut(
    small: list[torch.Size], large: tuple[int, ...], dtype: torch.dtype, size: int, data: st.DataObject
) -> None:
    """Written in pieces by a world, it reads as if one rank had written it: here, in stock torch, and with any cut."""
    tied = numbered(large, dtype)
    whole: State = {
        "model": {"a": tied, "b": tied, "c": numbered((), dtype)},
        "optimizer": {str(number): numbered(shape, dtype, number) for number, shape in enumerate(small)},
        "scheduler": {"last_epoch": 3},
    }
    along = data.draw(st.sampled_from([None, *range(len(large))]))
    dims = {} if along is None else {"a": along, "b": along}
    with tempfile.TemporaryDirectory() as alone_at, tempfile.TemporaryDirectory() as world_at:
        alone, world = open_store(alone_at), open_store(world_at)
        expected = writer(alone).save(whole, dataclasses.replace(facts(1), cut_dims=dims))
        record = save_by(world, writer(world), world_of(data, whole, size, dims), dims=dims)
        verify(world, record)
        assert record.weights_sha256 == expected.weights_sha256
        assert_equal_trees(read_state(world, record), whole)
        stock = mapped({key: whole[key] for key in ("model", "optimizer")}, torch.zeros_like)
        dcp.load(stock, checkpoint_id=f"{world_at}/{record.attempt}", no_dist=True)
        assert_equal_trees(stock, {key: whole[key] for key in ("model", "optimizer")})
        for store, source in ((world, record), (alone, expected)):
            assert_read_into_any_cut(data, store, source, whole)


def assert_read_into_any_cut(data: st.DataObject, store: Store, record: CommitRecord, whole: State) -> None:
    """Read a commit into a state with another cut, and assert that all of it was filled in place."""
    blank = mapped(whole, lambda tensor: torch.ones_like(tensor))
    assert isinstance(blank, dict)
    (state,) = world_of(data, blank, 1)
    for leaves in (state["model"], state["optimizer"]):
        assert isinstance(leaves, dict)
        for name, leaf in leaves.items():
            if isinstance(leaf, Pieces):  # take a part of what a rank of this world of one holds
                (spans,) = data.draw(cuts(leaf.shape.numel(), 1))
                kept = data.draw(st.lists(st.sampled_from(spans), unique=True)) if spans else []
                along = None if leaf.cut is None else leaf.cut.dim
                leaves[name] = cut(torch.ones(leaf.shape, dtype=leaf.dtype), leaf.written, joined(kept), along)
    before = leaves_by_path(state)
    load(store, record, state)
    after, expected = leaves_by_path(state), leaves_by_path(whole)
    for path, leaf in before.items():
        wanted = expected[path]
        if isinstance(leaf, Pieces):
            assert after[path] is leaf and isinstance(wanted, Tensor)
            for (lo, hi), memory in leaf.held.items():
                assert torch.equal(memory, in_memory_order(wanted, leaf.cut)[lo:hi]), path
                around = memory.as_strided((hi - lo + 3,), (1,), memory.storage_offset() - 1)
                assert around[[0, -2, -1]].tolist() == [0, 0, 0], "written beyond what is held"
        elif isinstance(leaf, Tensor):
            assert isinstance(wanted, Tensor) and torch.equal(leaf, wanted)


def test_pieces_in_a_list_are_leaves(local_store: Store) -> None:
    """A list that holds only pieces is split up, like a list of tensors."""
    whole = [numbered((5, 3)), numbered((2,))]
    spans = [[[(0, 7)], [(7, 15)]], [[(0, 2)], []]]
    worlds: list[State] = [
        {
            "more": [cut(tensor, written, written[rank]) for tensor, written in zip(whole, spans, strict=True)],
            "n": {0: 1},
        }
        for rank in range(2)
    ]
    record = save_by(local_store, writer(local_store), worlds)
    assert_equal_trees(read_state(local_store, record), {"more": whole, "n": {0: 1}})


def test_a_fifty_line_reader_reads_pieces(local_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format's documentation suffices to write one that joins boxes."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    read_commit = importlib.import_module("read_a_commit").read_commit
    whole, written = numbered((5, 7, 3)), [[(0, 52)], [], [(52, 105)]]
    states: list[State] = [
        {"optimizer": {"m": cut(whole, written, spans), "none": cut(torch.zeros(0, 4), [[], [], []], [])}}
        for spans in written
    ]
    save_by(local_store, writer(local_store), states)
    assert_equal_leaves(
        read_commit(Path(local_store.url)), {("optimizer", "m"): whole, ("optimizer", "none"): torch.zeros(0, 4)}
    )


def test_a_thirty_line_script_computes_the_hash_of_exported_weights(
    tmp_path: Path, local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases are tensors cut along either dimension, uncut tensors, an empty tensor and a number."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    hash_of = importlib.import_module("hash_of_weights").hash_of
    weights = {"a": numbered((12, 700)), "b": numbered((300, 500)), "c": numbered((3, GRAIN)), "d": numbered(())}
    weights |= {"e": numbered((0, 3)), "f": numbered((130,), torch.bfloat16)}
    weights |= {"parts of one index": numbered((5, 7)), "parts of one element": numbered((1, 7), torch.bfloat16)}
    dims = {"a": 0, "b": 1, "f": 0, "parts of one index": 1, "parts of one element": 1}
    record = writer(local_store).save({"model": weights}, dataclasses.replace(facts(1), cut_dims=dims))
    export(local_store, record, tmp_path / "weights.safetensors", "safetensors")
    assert hash_of(tmp_path / "weights.safetensors") == record.weights_sha256
    assert record.weights_sha256 != writer(local_store).save({"model": weights}, facts(2)).weights_sha256


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ([[(0, GRAIN)], [(GRAIN + 1, 2 * GRAIN)]], "do not cover 'model.w' once"),
        ([[(0, 2 * GRAIN)], [(GRAIN, 2 * GRAIN)]], "do not cover 'model.w' once"),
        ([[(0, GRAIN)], []], "do not cover 'model.w' once"),
        ([[(0, 5)], [(5, 2 * GRAIN)]], "'model.w' is not cut at grains"),
        ([[], [], [(0, 2 * GRAIN)]], "has 3 writers, the save 2"),
    ],
)
def test_a_cut_that_would_lose_elements_is_not_planned(written: list[list[Span]], message: str) -> None:
    """A gap, an overlap, weights whose digest could not be joined, a writer that does not exist."""
    with pytest.raises(AssertionError, match=message):
        plan_attempt({"model": {"w": cut(torch.zeros(2 * GRAIN), written, [])}}, 2)


def test_a_writer_with_pieces_has_a_part_however_small_the_state_is() -> None:
    """No other rank could write them; whole tensors then go to the ranks with the least to write."""
    pieces = cut(torch.zeros(100), [[(0, 60)], [], [(60, 100)]], [])
    state: State = {"optimizer": {"moment": pieces}, "rest": [torch.zeros(50), torch.zeros(30), torch.zeros(20)]}
    parts = plan_attempt(state, 7).parts
    found = [[(slot.path[0], slot.span, slot.shape.numel()) for slot in part.slots] for part in parts]
    assert found == [
        [("optimizer", (0, 60), 60)],
        [("rest", None, 50), ("rest", None, 20)],
        [("optimizer", (60, 100), 40), ("rest", None, 30)],
    ]


def test_loads_come_out_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer's pieces count when whole tensors are distributed."""
    monkeypatch.setattr(layout, "LEAST_PART_BYTES", 1)
    written: list[list[Span]] = [[(0, 70_000)], [(70_000, 100_000)], [], []]
    state: State = {
        "optimizer": cut(torch.zeros(100_000), written, []),
        "rest": [torch.zeros(5_000) for _ in range(30)],
    }
    loads = [sum(slot.frame.size for slot in part.slots) for part in plan_attempt(state, 4).parts]
    assert loads[0] == 280_000 and max(loads[1:]) - min(loads[1:]) <= 20_000 and sum(loads) == 1_000_000


def test_a_plan_is_kept_while_writers_write_the_same_spans() -> None:
    """The spans that a rank holds, and their addresses, do not matter."""
    planner, whole = Planner(), torch.zeros(10)
    states: list[State] = [
        {"optimizer": {"m": cut(whole, written, held)}}
        for written, held in [
            ([[(0, 4)], [(4, 10)]], [(0, 4)]),
            ([((0, 4),), ((4, 10),)], [(0, 9)]),
            ([[(0, 5)], [(5, 10)]], []),
        ]
    ]
    first, second, other = (planner.plan(state, leaves_by_path(state), 2) for state in states)
    assert first is second and other is not first


def test_a_span_that_its_writer_does_not_hold_is_not_written(local_store: Store) -> None:
    """A writer never writes another rank's memory."""
    states: list[State] = [{"optimizer": {"m": cut(torch.zeros(8), [[(0, 8)]], [(0, 7)])}}]
    with pytest.raises(AssertionError, match=r"this rank does not hold elements \(0, 8\)"):
        save_by(local_store, writer(local_store), states)


@pytest.mark.heavy
def test_every_dimension_costs_two_boxes_at_most() -> None:
    """The bound is reached by a span that begins and ends in the middle of every dimension."""
    shape = (4, 4, 4, 4)
    most = max(len(boxes(shape, span)) for span in itertools.combinations(range(math.prod(shape) + 1), 2))
    assert most == 7
