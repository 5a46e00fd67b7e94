"""Reading commits: only the bytes that are asked for, and commits of older formats."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from torch import Tensor

from elastic_train.checkpoint.commits.reader import discover, load, read_state, verify
from elastic_train.checkpoint.commits.record import decode
from elastic_train.checkpoint.format import reading
from elastic_train.checkpoint.format.layout import Frame, frame_of
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import BLOCK_BYTES, Store
from elastic_train.errors import CommitError, ConfigError
from tests.elastic_train.checkpoint.commit_samples import State, aged, commit_steps, facts, writer
from tests.elastic_train.checkpoint.commits.test_commits import assert_equal_trees
from tests.elastic_train.checkpoint.piece_samples import cut, mapped, numbered, save_by


def test_pieces_of_another_shape_or_type_are_refused(local_store: Store) -> None:
    """They are compared like whole tensors, before anything is read."""
    record = writer(local_store).save({"model": {"w": torch.zeros(4)}}, facts(1))
    wrong = [cut(torch.ones(2, 2), [], [(0, 4)]), cut(torch.ones(4).double(), [], [(0, 4)])]
    for leaf in wrong:
        with pytest.raises(ConfigError, match=r"'model\.w' is .*, the commit holds \(4,\) torch.float32"):
            load(local_store, record, {"model": {"w": leaf}})
        assert leaf.held[0, 4].tolist() == [1.0] * 4


class CountingStore(LocalStore):
    """A local store that records which bytes of data files are read."""

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
    """For any cut of the commit, a rank reads a held span's blocks and each box's head block, without extra memory."""
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


@pytest.mark.heavy
def test_blocks_that_many_small_pieces_share_are_read_once(tmp_path: Path) -> None:
    """A thousand small tensors are not a thousand blocks, even if no rank wants all of a tensor."""
    whole: State = {"optimizer": {str(number): numbered((2_000,), seed=number) for number in range(1_000)}}
    record = writer(open_store(str(tmp_path))).save(whole, facts(1))
    state = mapped(whole, lambda tensor: cut(torch.zeros_like(tensor), [], [(0, 10), (500, 900)]))
    store = CountingStore(tmp_path)
    assert isinstance(state, dict)
    load(store, record, state)
    assert store.num_read <= record.files["__0_0.distcp"].size + 4 * BLOCK_BYTES


def foreign(dtype: torch.dtype, shape: torch.Size, *, has_other_length: bool) -> Frame:
    """Return a file frame that differs from ours, with the elements elsewhere."""
    frame = frame_of(dtype, shape)
    return Frame(frame.head + b"12345678", frame.size, frame.tail[0 if has_other_length else 8 :])


@pytest.mark.parametrize("has_other_length", [False, True])
def test_a_box_in_a_foreign_frame_is_read_as_a_whole(
    local_store: Store, has_other_length: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of torch may write such a frame: its elements are where torch finds them."""
    whole = numbered((4, 9))
    written = [[(0, 13)], [(13, 36)]]
    states: list[State] = [{"optimizer": {"m": cut(whole, written, spans)}} for spans in written]
    record = save_by(local_store, writer(local_store), states)
    monkeypatch.setattr(
        reading, "frame_of", lambda dtype, shape, *_: foreign(dtype, shape, has_other_length=has_other_length)
    )
    leaf = cut(torch.zeros_like(whole), [], [(2, 5), (10, 30)])
    load(local_store, record, {"optimizer": {"m": leaf}})
    assert all(torch.equal(memory, whole.reshape(-1)[lo:hi]) for (lo, hi), memory in leaf.held.items())
    assert_equal_trees(read_state(local_store, record), {"optimizer": {"m": whole}})


def test_tied_tensors_are_read_once_in_whatever_order_they_are_stored(local_store: Store) -> None:
    """The commit was written when the matrix was stored by rows, which is now stored by columns under both names."""
    whole = numbered((5, 7))
    record = writer(local_store).save({"model": {"a": whole, "b": whole}}, facts(1))
    tied = torch.zeros(7, 5).T
    load(local_store, record, {"model": {"a": tied, "b": tied}})
    assert torch.equal(tied, whole)


@pytest.mark.parametrize("place", [0.001, 0.3, 0.9])
def test_a_damaged_byte_of_a_piece_is_refused_by_whoever_reads_it(tmp_path: Path, place: float) -> None:
    """Its block's checksum fails; the other blocks, and thus other ranks' pieces, are still valid."""
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


RECORD = (  # as written by the version before cut tensors
    b'{"attempt":"data/step-000000000002/00000001-a","config_digest":"config","coverage":{"count":2,"sum_a":1844674407'
    b'3709551615,"sum_b":2},"created_at":1.5,"cursor":{"epoch":0,"offset":16},"empty":[],"files":{".metadata":{"blake3'
    b'":"cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd","blocks":[1],"size":7},"__0_0.distcp":{"bla'
    b'ke3":"efefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefef","blocks":[2,3],"size":1048577}},"format"'
    b':3,"int_keyed":[["optimizer","state"]],"intervals":[{"hi":2,"lo":0,"term":1}],"manifest_digest":"manifest","metr'
    b'ics":{"diverged":null,"loss":0.5},"parent":null,"parent_key":null,"rng":{"seed":1},"seal":"147bdab8e4fb5b25b9c76'
    b'a3002f1997d9e8c650c826a8420ed09b9a8974d4518","step":2,"term":1,"versions":{"python":"3.11","torch":"2.13.0"},"we'
    b'ights_sha256":"abababababababababababababababababababababababababababababababab","world_size":2}'
)
STORED = Path(__file__).parent / "stored_format_3"
KEY = "commits/00000001-000000000002.json"


def test_a_record_of_the_previous_version_reads_and_writes_the_same_bytes() -> None:
    """Its digest is the parent digest in its children."""
    record = decode(RECORD, KEY)
    assert record.encode() == RECORD
    assert {file.blake3[:2] for file in record.files.values()} == {"cd", "ef"}


def test_a_record_of_a_newer_format_is_refused() -> None:
    """Its meaning is not guessed."""
    with pytest.raises(CommitError, match="has format 5"):
        decode(RECORD.replace(b'"format":3', b'"format":5'), KEY)


def test_the_lineage_continues_from_a_commit_of_an_older_format(local_store: Store) -> None:
    """It is found, verified, loaded, and continued by a commit of the present format."""
    (record,) = commit_steps(local_store, 1)
    old = aged(local_store, record)
    assert discover(local_store).head == old
    assert read_state(local_store, old)["scheduler"] == {"last_epoch": 1}
    (new,) = commit_steps(local_store, 2, parent=old)
    assert discover(local_store).head == new
    assert (new.parent, new.format, old.format) == (old.digest, 4, 3)
    verify(local_store, old)


@pytest.fixture
def stored(tmp_path: Path) -> Store:
    """A commit of an early version: weights, moments, a bfloat16 scalar, an empty tensor."""
    return open_store(str(shutil.copytree(STORED, tmp_path / "run")))


def test_a_stored_commit_of_format_3_is_read(stored: Store) -> None:
    old = discover(stored).head
    assert old is not None and (old.format, old.step, old.is_by_grains) == (3, 3, False)
    verify(stored, old)
    state = read_state(stored, old)
    held = state["model"]
    assert isinstance(held, dict)
    assert {"half_scale", "nothing", "1.running_mean"} < held.keys() and state["scheduler"] == {"last_epoch": 3}


def test_the_lineage_continues_from_a_stored_commit_of_format_3(stored: Store) -> None:
    """Weights without cuts have the same hash."""
    old = discover(stored).head
    assert old is not None
    commits = writer(stored, old)
    new = commits.save(read_state(stored, old), facts(4))
    found = discover(stored)
    assert (found.head, new.parent, new.format) == (new, old.digest, 4)
    assert new.weights_sha256 == old.weights_sha256
    verify(stored, old)
    verify(stored, new)
