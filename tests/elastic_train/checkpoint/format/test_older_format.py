"""Commits of older formats are as good as new ones, and the lineage continues from them.

In format 1 files have SHA-256 digests; in formats 1 and 2 the weights' hash is not by grains; in format 3 it is, and no
tensor is cut.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path

import pytest
import torch

from elastic_train.checkpoint import Store, discover, open_store, read_state, verify
from elastic_train.checkpoint.commits.record import decode
from elastic_train.errors import CommitError
from tests.elastic_train.checkpoint.commit_samples import aged, commit_steps, facts, writer

RECORD = (  # as written by the version before BLAKE3
    b'{"attempt":"data/step-000000000002/00000001-a","config_digest":"config","coverage":{"count":2,"sum_a":1844674407'
    b'3709551615,"sum_b":2},"created_at":1.5,"cursor":{"epoch":0,"offset":16},"empty":[],"files":{".metadata":{"blocks'
    b'":[1],"sha256":"cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd","size":7},"__0_0.distcp":{"blo'
    b'cks":[2,3],"sha256":"efefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefef","size":1048577}},"format"'
    b':1,"int_keyed":[["optimizer","state"]],"intervals":[{"hi":2,"lo":0,"term":1}],"manifest_digest":"manifest","metr'
    b'ics":{"diverged":null,"loss":0.5},"parent":null,"parent_key":null,"rng":{"seed":1},"seal":"e40d3cf3fde934c7177e4'
    b'7686172aa7f4903814b2cafd925fe512b658f8a3f00","step":2,"term":1,"versions":{"python":"3.11","torch":"2.13.0"},"we'
    b'ights_sha256":"abababababababababababababababababababababababababababababababab","world_size":2}'
)
STORED = Path(__file__).parent / "stored_format_2"
KEY = "commits/00000001-000000000002.json"


def test_a_record_of_the_previous_version_reads_and_writes_the_same_bytes() -> None:
    """Its digest is the parent digest in its children."""
    record = decode(RECORD, KEY)
    assert record.encode() == RECORD
    assert {(file.algorithm, file.digest[:2]) for file in record.files.values()} == {("sha256", "cd"), ("sha256", "ef")}


def test_a_record_of_a_newer_format_is_refused() -> None:
    """Its meaning is not guessed."""
    with pytest.raises(CommitError, match="has format 5"):
        decode(RECORD.replace(b'"format":1', b'"format":5'), KEY)


@pytest.mark.parametrize("digests", [{}, {"blake3": "a", "sha256": "b"}], ids=["none", "two"])
def test_a_file_record_has_exactly_one_digest(digests: dict[str, str]) -> None:
    """A record whose files have no digest, or two, is refused."""
    (file, *_) = decode(RECORD, KEY).files.values()
    with pytest.raises(ValueError, match="one digest"):
        dataclasses.replace(file, **{"blake3": None, "sha256": None, **digests})


def test_the_lineage_continues_from_a_commit_of_an_older_format(local_store: Store) -> None:
    """It is found, verified, loaded, and continued by a commit of the present format."""
    (record,) = commit_steps(local_store, 1)
    old = aged(local_store, record)
    assert discover(local_store).head == old
    assert read_state(local_store, old)["scheduler"] == {"last_epoch": 1}
    (new,) = commit_steps(local_store, 2, parent=old)
    assert discover(local_store).head == new
    assert (new.parent, new.format, old.format) == (old.digest, 4, 1)
    verify(local_store, old)


@pytest.fixture
def stored(tmp_path: Path) -> Store:
    """A commit by the last version of format 2: weights, moments, a bfloat16 scalar, an empty tensor."""
    return open_store(str(shutil.copytree(STORED, tmp_path / "run")))


def test_a_stored_commit_of_format_2_loads_the_bits_that_its_hash_is_of(stored: Store) -> None:
    """In formats 1 and 2 a hash covers dtype, shape and all bytes of a tensor at once."""
    old = discover(stored).head
    assert old is not None and (old.format, old.step) == (2, 3)
    verify(stored, old)
    state = read_state(stored, old)
    held = state["model"]
    assert isinstance(held, dict)
    assert {"half_scale", "nothing", "1.running_mean"} < held.keys() and state["scheduler"] == {"last_epoch": 3}
    lines = ""
    for name, tensor in sorted(held.items()):
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode() + content).hexdigest()
        lines += f"{name} {digest}\n"
    assert hashlib.sha256(lines.encode()).hexdigest() == old.weights_sha256


def test_the_lineage_continues_from_a_stored_commit_of_format_2(stored: Store) -> None:
    """The same weights have another hash from then on, and older records keep theirs."""
    old = discover(stored).head
    assert old is not None
    commits = writer(stored, old)
    new = commits.save(read_state(stored, old), facts(4))
    found = discover(stored)
    assert (found.head, new.parent, new.format) == (new, old.digest, 4)
    assert new.weights_sha256 != old.weights_sha256
    verify(stored, old)
    verify(stored, new)


def test_a_commit_of_format_3_is_read(local_store: Store) -> None:
    """Without cut tensors it differs from the present format by its number alone."""
    (record,) = commit_steps(local_store, 1)
    old = dataclasses.replace(record, format=3)
    (Path(local_store.url) / record.key).write_bytes(old.encode())
    assert discover(local_store).head == old and not old.is_by_grains
    verify(local_store, old)
    assert read_state(local_store, old)["scheduler"] == {"last_epoch": 1}


def test_a_node_copy_of_an_older_format_is_read(tmp_path: Path) -> None:
    """Its digest is verified there as well."""
    store, far = open_store("memory://older/run", str(tmp_path)), open_store("memory://older/run")
    (record,) = commit_steps(store, 1)
    old = aged(store, record)
    for name in old.files:
        far.delete(f"{old.attempt}/{name}")
    assert read_state(store, old)["scheduler"] == {"last_epoch": 1}


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_damaged_file_of_an_older_format_is_detected(local_store: Store, name: str) -> None:
    """SHA-256 detects a flipped bit before its use, and before the metadata's pickle is opened."""
    first, second = (aged(local_store, record) for record in commit_steps(local_store, 1, 2))
    path = Path(local_store.url) / second.attempt / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found = discover(local_store)
    assert found.head is not None and found.head.step == first.step == 1
    assert "does not match its digest (sha256)" in found.skipped[0][1]
    with pytest.raises(CommitError, match=r"do(es)? not match"):
        read_state(local_store, second)
