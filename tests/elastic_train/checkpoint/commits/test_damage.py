"""Damage of any kind is detected before use, reported, and skipped along the lineage."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.checkpoint.commits.reader import discover, load, read_state
from elastic_train.checkpoint.commits.record import CommitRecord, decode
from elastic_train.checkpoint.stores import store as stores
from elastic_train.checkpoint.stores.checksums import CheckedFile, HashingSink
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import BLOCK_BYTES, FileRecord, Store
from elastic_train.errors import CommitError, StorageError
from tests.elastic_train.checkpoint.commit_samples import commit_steps, facts, small_state, writer


def files_of(store: Store, record: CommitRecord) -> list[Path]:
    """Return the paths of a commit's record and files."""
    return [Path(store.url) / record.key, *(Path(store.url) / record.attempt / name for name in record.files)]


def flip(path: Path, place: float) -> None:
    """Flip one bit of a file, at a fraction of its length."""
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0.0, 0.37, 0.5, 0.93, 1.0])
@pytest.mark.parametrize("file", [0, 1, 2], ids=["record", "data", "metadata"])
def test_one_flipped_bit_is_passed_over(local_store: Store, file: int, place: float) -> None:
    """Wherever the bit is, the previous commit is found, with the reason."""
    first, second = commit_steps(local_store, 1, 2)
    flip(files_of(local_store, second)[file], place)
    found = discover(local_store)
    assert found.head == first
    ((key, why),) = found.skipped
    assert key == second.key
    assert why


def test_damage_is_passed_over_on_every_kind_of_store(store: Store) -> None:
    """A flipped bit or a truncated object in any store; the last valid commit before them is found."""
    first, *others = commit_steps(store, 1, 2, 3, 4)
    keys = [others[0].key, f"{others[1].attempt}/__0_0.distcp", f"{others[2].attempt}/.metadata"]
    for key, harm in zip(
        keys, (lambda c: c[:-9] + b"?" + c[-8:], lambda c: c[:-1], lambda c: b"?" + c[1:]), strict=True
    ):
        content = harm(stores.read(store, key))
        store.delete(key)
        store.create(key, content)
    found = discover(store)
    assert found.head == first
    assert [key for key, _ in found.skipped] == [commit.key for commit in reversed(others)]


@pytest.mark.parametrize("file", [0, 1, 2], ids=["record", "data", "metadata"])
@pytest.mark.parametrize("harm", ["truncate", "empty", "grow", "remove"])
def test_a_file_of_the_wrong_size_is_passed_over(local_store: Store, file: int, harm: str) -> None:
    """Truncated, emptied, grown or missing: the previous commit is found."""
    first, second = commit_steps(local_store, 1, 2)
    path = files_of(local_store, second)[file]
    size = path.stat().st_size
    if harm == "remove":
        path.unlink()
    else:
        os.truncate(path, {"truncate": size - 1, "empty": 0, "grow": size + 1}[harm])
    assert discover(local_store).head == first


def test_no_valid_commit_left_is_an_error_that_names_every_commit(local_store: Store) -> None:
    """If every commit is damaged, training does not silently start over: exit code 65."""
    commits = commit_steps(local_store, 1, 2, 3)
    for commit in commits:
        flip(files_of(local_store, commit)[1], 0.5)
    with pytest.raises(CommitError) as caught:
        discover(local_store)
    assert all(commit.key in str(caught.value) for commit in commits)
    assert caught.value.exit_code == 65


def test_a_leftover_attempt_is_not_a_commit(local_store: Store) -> None:
    """Files without a record are ignored."""
    (first,) = commit_steps(local_store, 1)
    with local_store.write("data/step-000000000009/00000001-dead/__0_0.distcp") as sink:
        sink.write(b"half a checkpoint")
    found = discover(local_store)
    assert found.head == first
    assert found.skipped == ()


def test_a_late_record_of_an_older_term_is_passed_over(local_store: Store) -> None:
    """Order is (term, step): a higher step of an older term is neither the head nor an error.

    After a damaged commit comes its parent, not the late record that sorts between them.
    """
    late_writer = writer(local_store)
    first = late_writer.save(small_state(1), facts(1))
    (newer,) = commit_steps(local_store, 2, parent=first)
    with pytest.raises(Exception, match="term 2 was claimed"):
        late_writer.save(small_state(9), facts(9))
    assert (Path(local_store.url) / "commits/00000001-000000000009.json").exists()
    found = discover(local_store)
    assert found.head == newer
    assert found.skipped == ()
    flip(files_of(local_store, newer)[1], 0.5)
    found = discover(local_store)
    assert found.head == first
    assert [key for key, _ in found.skipped] == [newer.key, "commits/00000001-000000000009.json"]


def test_a_head_missing_from_the_store_is_reported(local_store: Store) -> None:
    """If the commit that the fence names is gone, discovery says so and continues."""
    (first,) = commit_steps(local_store, 1)
    found = discover(local_store, published="commits/00000004-000000000002.json")
    assert found.head == first
    assert "not in the store" in found.skipped[0][1]


def test_a_record_under_another_key_is_refused(local_store: Store) -> None:
    """A copied record does not make a second commit."""
    (first,) = commit_steps(local_store, 1)
    local_store.create("commits/00000007-000000000001.json", first.encode())
    found = discover(local_store)
    assert found.head == first
    assert "holds the record of" in found.skipped[0][1]


class SilentStore(LocalStore):
    """A store that answers no read of a data file."""

    def open(self, key: str) -> BinaryIO:
        if key.startswith("data/"):
            raise StorageError(f"{key}: no answer")
        return super().open(key)


def test_a_store_that_does_not_answer_is_not_damage(local_store: Store) -> None:
    """An outage ends the search: falling back would lose steps unnecessarily."""
    commit_steps(local_store, 1, 2)
    with pytest.raises(StorageError, match="no answer"):
        discover(SilentStore(local_store.url))


class Bomb:
    """A pickle that leaves a file behind when it is opened."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def test_no_pickle_is_opened_before_its_digest_is_verified(local_store: Store, tmp_path: Path) -> None:
    """Replaced metadata is refused unopened, by discovery and by a load that skips discovery."""
    first, second = commit_steps(local_store, 1, 2)
    (Path(local_store.url) / second.attempt / ".metadata").write_bytes(pickle.dumps(Bomb(str(tmp_path / "bang"))))
    assert discover(local_store).head == first
    with pytest.raises(CommitError, match="digest"):
        read_state(local_store, second)
    assert not (tmp_path / "bang").exists()


def test_a_load_checks_the_blocks_that_it_reads(local_store: Store) -> None:
    """A bit that flips after discovery does not reach the model."""
    (record,) = commit_steps(local_store, 1)
    flip(files_of(local_store, record)[1], 0.5)
    with pytest.raises(CommitError, match="do not match their checksum"):
        load(local_store, record, small_state(0))


@functools.cache
def sealed_record() -> CommitRecord:
    """Return the record of some commit."""
    return commit_steps(open_store("memory://bits/run"), 1)[0]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_flipped_bit_of_a_record_is_seen(data: st.DataObject) -> None:
    """Every bit of a record is covered by its checksum."""
    record = sealed_record()
    content = bytearray(record.encode())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CommitError):
        decode(bytes(content), record.key)


class Collected:
    """A sink in memory."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, content: bytes | memoryview, /) -> int:
        self.content += bytes(content)
        return len(content)


sizes = st.sampled_from([0, 1, 100, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 7])


def checked(content: bytes, record: FileRecord) -> CheckedFile:
    """Open bytes as a file with known checksums."""
    return CheckedFile(cast(BinaryIO, io.BytesIO(content)), record, "x")


@pytest.mark.heavy
@settings(max_examples=30, deadline=None)
@given(st.lists(sizes, max_size=4), st.data())
def test_checksums_do_not_depend_on_how_bytes_arrive(pieces: list[int], data: st.DataObject) -> None:
    """Blocks belong to the file, however it is cut into writes, and any part of it reads back, however cut."""
    collected = Collected()
    sink = HashingSink(collected)
    whole = b"".join(bytes([number + 1]) * size for number, size in enumerate(pieces))
    for number, size in enumerate(pieces):
        sink.write(bytes([number + 1]) * size)
    sink.close()
    record = sink.record()
    assert collected.content == whole
    assert record.blocks == tuple(zlib.crc32(whole[at : at + BLOCK_BYTES]) for at in range(0, len(whole), BLOCK_BYTES))
    lo, cut, hi = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=3, max_size=3)))
    part = memoryview(bytearray(hi - lo))
    checked(whole, record).fill(lo, [part[: cut - lo], part[cut - lo :]])
    assert part == whole[lo:hi]
    with pytest.raises(CommitError, match="ends at byte"):
        checked(whole, record).fill(lo, [part, memoryview(bytearray(len(whole) - hi + 1))])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3 * BLOCK_BYTES), st.data())
def test_a_flipped_bit_is_seen_only_by_reads_of_its_block(size: int, data: st.DataObject) -> None:
    """Exactly the blocks that are read are checked: the neighbours of a damaged block remain valid."""
    whole = bytes(size)
    record = FileRecord(size, tuple(zlib.crc32(whole[at : at + BLOCK_BYTES]) for at in range(0, size, BLOCK_BYTES)), "")
    bad = data.draw(st.integers(0, size - 1))
    harmed = bytearray(whole)
    harmed[bad] ^= 1 << data.draw(st.integers(0, 7))
    lo, hi = sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True)))
    is_touched = lo // BLOCK_BYTES <= bad // BLOCK_BYTES <= (hi - 1) // BLOCK_BYTES
    part = bytearray(hi - lo)
    with pytest.raises(CommitError, match="checksum") if is_touched else contextlib.nullcontext():
        checked(bytes(harmed), record).fill(lo, [memoryview(part)])
    assert is_touched or part == bytes(hi - lo)


def test_a_file_record_must_have_all_its_blocks() -> None:
    """A record whose block checksums do not fit its size is refused."""
    with pytest.raises(ValueError, match="block checksums"):
        FileRecord(BLOCK_BYTES + 1, (1,), "")
