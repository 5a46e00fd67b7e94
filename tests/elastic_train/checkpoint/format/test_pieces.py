"""Tensors in pieces: whoever holds and writes what, the commit has the same bits, and any other cut reads them."""

from __future__ import annotations

import importlib
import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic_train.checkpoint import CommitRecord, Store, discover, load, open_store, read_state, verify
from elastic_train.checkpoint.format import layout, reading
from elastic_train.checkpoint.format.layout import Planner, leaves_by_path, plan_attempt
from elastic_train.checkpoint.format.pieces import Pieces, Span, boxes, span_of
from elastic_train.checkpoint.format.torch_frame import Frame, frame_of
from elastic_train.checkpoint.stores.checksums import BLOCK_BYTES
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.errors import CommitError, ConfigError
from elastic_train.shards.grains import GRAIN
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


@settings(max_examples=300)
@given(shapes, st.data())
def test_a_span_is_a_few_boxes_that_are_runs_of_it(shape: torch.Size, data: st.DataObject) -> None:
    """Each is the same bytes in memory and in a file, and one after the other they are the span."""
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
    """A piece of one element comes to its place in a tensor that is wanted transposed."""
    whole, written = numbered((4, 3)), [[(0, 5)], [(5, 6), (6, 12)]]
    states: list[State] = [{"optimizer": {"m": cut(whole, written, joined(spans))}} for spans in written]
    record = save_by(local_store, writer(local_store), states)
    transposed = torch.zeros(3, 4).T
    load(local_store, record, {"optimizer": {"m": transposed}})
    assert torch.equal(transposed, whole) and not transposed.is_contiguous()


def test_a_box_that_is_no_run_of_elements_is_not_taken_for_one() -> None:
    """Two columns of a matrix are many runs."""
    with pytest.raises(AssertionError, match="no run"):
        span_of((3, 4), (0, 1), (3, 2))


def world_of(data: st.DataObject, state: State, size: int) -> list[State]:
    """Cut some tensors of a state over the ranks of a world, each of which holds what it writes and some more."""
    states: list[dict] = [{key: dict(value) for key, value in state.items()} for _ in range(size)]
    for path, whole in tensors_of(state).items():
        if not data.draw(st.booleans()):
            continue
        numel, unit = whole.numel(), GRAIN if path[0] == "model" else 1
        written = data.draw(cuts(numel, size, unit=unit))
        more = data.draw(cuts(numel, size))
        for rank, tree in enumerate(states):
            tree[path[0]][path[1]] = cut(whole, written, joined_overlapping([*written[rank], *more[rank]]))
    return states


def joined_overlapping(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of the elements that any of these have."""
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
    """Written in pieces by a world, it is the whole that one rank writes, to us, to stock torch, and to any cut."""
    tied = numbered(large, dtype)
    whole: State = {
        "model": {"a": tied, "b": tied, "c": numbered((), dtype)},
        "optimizer": {str(number): numbered(shape, dtype, number) for number, shape in enumerate(small)},
        "scheduler": {"last_epoch": 3},
    }
    with tempfile.TemporaryDirectory() as alone_at, tempfile.TemporaryDirectory() as world_at:
        alone, world = open_store(alone_at), open_store(world_at)
        expected = writer(alone).save(whole, facts(1))
        record = save_by(world, writer(world), world_of(data, whole, size))
        verify(world, record)
        assert record.weights_sha256 == expected.weights_sha256
        assert_equal_trees(read_state(world, record), whole)
        stock = mapped({key: whole[key] for key in ("model", "optimizer")}, torch.zeros_like)
        dcp.load(stock, checkpoint_id=f"{world_at}/{record.attempt}", no_dist=True)
        assert_equal_trees(stock, {key: whole[key] for key in ("model", "optimizer")})
        for store, source in ((world, record), (alone, expected)):
            assert_read_into_any_cut(data, store, source, whole)


def assert_read_into_any_cut(data: st.DataObject, store: Store, record: CommitRecord, whole: State) -> None:
    """Read a commit into a state that is cut in another way, and see that all of it has been filled in place."""
    blank = mapped(whole, lambda tensor: torch.ones_like(tensor))
    assert isinstance(blank, dict)
    (state,) = world_of(data, blank, 1)
    for leaves in (state["model"], state["optimizer"]):
        assert isinstance(leaves, dict)
        for name, leaf in leaves.items():
            if isinstance(leaf, Pieces):  # of what a rank of this world of one holds, take a part
                (spans,) = data.draw(cuts(leaf.shape.numel(), 1))
                kept = data.draw(st.lists(st.sampled_from(spans), unique=True)) if spans else []
                leaves[name] = cut(torch.ones(leaf.shape, dtype=leaf.dtype), leaf.written, joined(kept))
    before = leaves_by_path(state)
    load(store, record, state)
    after, expected = leaves_by_path(state), leaves_by_path(whole)
    for path, leaf in before.items():
        wanted = expected[path]
        if isinstance(leaf, Pieces):
            assert after[path] is leaf and isinstance(wanted, Tensor)
            for (lo, hi), memory in leaf.held.items():
                assert torch.equal(memory, wanted.reshape(-1)[lo:hi]), path
                around = memory.as_strided((hi - lo + 3,), (1,), memory.storage_offset() - 1)
                assert around[[0, -2, -1]].tolist() == [0, 0, 0], "written beyond what is held"
        elif isinstance(leaf, Tensor):
            assert isinstance(wanted, Tensor) and torch.equal(leaf, wanted)


def test_pieces_in_a_list_are_leaves(local_store: Store) -> None:
    """A list that holds nothing but pieces is divided, as one of tensors is."""
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
    """The page about the format is enough to write one that puts boxes together."""
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
    """Nobody else could write them; whole tensors then go where there is least to write."""
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
    """What pieces give a writer counts when whole tensors are dealt out."""
    monkeypatch.setattr(layout, "LEAST_PART_BYTES", 1)
    written: list[list[Span]] = [[(0, 70_000)], [(70_000, 100_000)], [], []]
    state: State = {
        "optimizer": cut(torch.zeros(100_000), written, []),
        "rest": [torch.zeros(5_000) for _ in range(30)],
    }
    loads = [sum(slot.frame.size for slot in part.slots) for part in plan_attempt(state, 4).parts]
    assert loads[0] == 280_000 and max(loads[1:]) - min(loads[1:]) <= 20_000 and sum(loads) == 1_000_000


def test_a_plan_is_kept_while_writers_write_the_same_spans() -> None:
    """What a rank holds, and where its memory is, does not matter."""
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


def test_pieces_of_another_shape_or_type_are_refused(local_store: Store) -> None:
    """They are compared as whole tensors are, before anything is read."""
    record = writer(local_store).save({"model": {"w": torch.zeros(4)}}, facts(1))
    wrong = [cut(torch.ones(2, 2), [], [(0, 4)]), cut(torch.ones(4).double(), [], [(0, 4)])]
    for leaf in wrong:
        with pytest.raises(ConfigError, match=r"'model\.w' is .*, the commit holds \(4,\) torch.float32"):
            load(local_store, record, {"model": {"w": leaf}})
        assert leaf.held[0, 4].tolist() == [1.0] * 4


class CountingStore(LocalStore):
    """A local store that notes which bytes of data files are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.num_read = 0

    def open(self, key: str) -> BinaryIO:
        file = super().open(key)
        return CountingFile(file, self) if key.endswith(".distcp") else file  # type: ignore[return-value]


class CountingFile:
    """Counts the bytes that are read of a file."""

    def __init__(self, file: BinaryIO, store: CountingStore) -> None:
        self._file, self._store = file, store

    def seek(self, offset: int) -> int:
        return self._file.seek(offset)

    def readinto(self, view: memoryview) -> int:
        num_read = self._file.readinto(view)  # type: ignore[attr-defined]
        self._store.num_read += num_read
        return int(num_read)

    def close(self) -> None:
        self._file.close()


@pytest.mark.parametrize("is_cut", [False, True])
def test_only_the_blocks_that_are_needed_are_read(
    tmp_path: Path, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the commit was cut: a held span's blocks, and one for the head of each box; no other memory is taken."""
    size = 6 << 20
    whole = torch.arange(size, dtype=torch.float32).reshape(3, -1)
    step = size // 4
    written = [[(lo, lo + step)] for lo in range(0, size, step)] if is_cut else [[(0, size)]]
    states: list[State] = [{"optimizer": {"m": cut(whole, written, spans)}} for spans in written]
    record = save_by(open_store(str(tmp_path)), writer(open_store(str(tmp_path))), states)
    leaf = cut(torch.zeros_like(whole), [], [(1_000, 2_000), (size // 2 - 300_000, size // 2 + 300_000)])
    store = CountingStore(tmp_path)
    taken: list[int] = []
    allocate = torch.empty

    def empty(*shape: int, **kinds: object) -> Tensor:
        found = allocate(*shape, **kinds)  # type: ignore[call-overload]
        taken.append(found.nbytes)
        return found

    monkeypatch.setattr(torch, "empty", empty)
    load(store, record, {"optimizer": {"m": leaf}})
    assert all(torch.equal(memory, whole.reshape(-1)[lo:hi]) for (lo, hi), memory in leaf.held.items())
    needed = sum(memory.nbytes for memory in leaf.held.values())
    assert needed < store.num_read <= needed + 8 * BLOCK_BYTES < whole.nbytes
    assert sum(taken) < BLOCK_BYTES


def test_blocks_that_many_small_pieces_share_are_read_once(tmp_path: Path) -> None:
    """A thousand small tensors are not a thousand blocks, though nobody wants all of any of them."""
    whole: State = {"optimizer": {str(number): numbered((2_000,), seed=number) for number in range(1_000)}}
    record = writer(open_store(str(tmp_path))).save(whole, facts(1))
    state = mapped(whole, lambda tensor: cut(torch.zeros_like(tensor), [], [(0, 10), (500, 900)]))
    store = CountingStore(tmp_path)
    assert isinstance(state, dict)
    load(store, record, state)
    assert store.num_read <= record.files["__0_0.distcp"].size + 4 * BLOCK_BYTES


def foreign(dtype: torch.dtype, shape: torch.Size, *, has_other_length: bool) -> Frame:
    """Return a frame that no file has, in which the elements are elsewhere."""
    frame = frame_of(dtype, shape)
    return Frame(frame.head + b"12345678", frame.size, frame.tail[0 if has_other_length else 8 :])


@pytest.mark.parametrize("has_other_length", [False, True])
def test_a_box_in_a_foreign_frame_is_read_as_a_whole(
    local_store: Store, has_other_length: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another version of torch may write it: its elements are where torch finds them."""
    whole = numbered((4, 9))
    written = [[(0, 13)], [(13, 36)]]
    states: list[State] = [{"optimizer": {"m": cut(whole, written, spans)}} for spans in written]
    record = save_by(local_store, writer(local_store), states)
    monkeypatch.setattr(
        reading, "frame_of", lambda dtype, shape: foreign(dtype, shape, has_other_length=has_other_length)
    )
    leaf = cut(torch.zeros_like(whole), [], [(2, 5), (10, 30)])
    load(local_store, record, {"optimizer": {"m": leaf}})
    assert all(torch.equal(memory, whole.reshape(-1)[lo:hi]) for (lo, hi), memory in leaf.held.items())
    assert_equal_trees(read_state(local_store, record), {"optimizer": {"m": whole}})


@pytest.mark.parametrize("place", [0.001, 0.3, 0.9])
def test_a_damaged_byte_of_a_piece_is_refused_by_whoever_reads_it(tmp_path: Path, place: float) -> None:
    """Its block's checksum shows it; the other blocks, and so other ranks' pieces, are still good."""
    store = open_store(str(tmp_path))
    size = 3 << 20
    whole = numbered((size,))
    written = [[(0, size // 2)], [(size // 2, size)]]
    states: list[State] = [{"optimizer": {"m": cut(whole, written, spans)}} for spans in written]
    record = save_by(store, writer(store), states)
    path = tmp_path / record.attempt / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 2
    path.write_bytes(content)
    first, last = (cut(torch.zeros_like(whole), [], [span]) for span in ((0, size // 2), (size // 2, size)))
    load(store, record, {"optimizer": {"m": first}})
    assert torch.equal(first.held[0, size // 2], whole[: size // 2])
    with pytest.raises(CommitError, match=r"__1_0\.distcp: bytes .* do not match their checksum"):
        load(store, record, {"optimizer": {"m": last}})
    with pytest.raises(CommitError):
        discover(store)


def test_a_span_that_its_writer_does_not_hold_is_not_written(local_store: Store) -> None:
    """A writer never writes memory that is another rank's."""
    states: list[State] = [{"optimizer": {"m": cut(torch.zeros(8), [[(0, 8)]], [(0, 7)])}}]
    with pytest.raises(AssertionError, match="in none of the spans"):
        save_by(local_store, writer(local_store), states)


def test_every_dimension_costs_two_boxes_at_most() -> None:
    """The bound is reached: a span that begins and ends in the middle of everything."""
    shape = (4, 4, 4, 4)
    most = max(len(boxes(shape, span)) for span in itertools.combinations(range(math.prod(shape) + 1), 2))
    assert most == 7
