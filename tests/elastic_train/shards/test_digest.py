"""Digests by grains: whoever holds the grains, a tensor has one digest, which changes with every bit of it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.shards.digest import grain_digests, join_grains, tensor_digests
from elastic_train.shards.grains import GRAIN, Listed, lay_out
from elastic_train.shards.holdings import all_held, circle_of
from elastic_train.shards.seats import seats_of

F32 = "torch.float32"
LISTED = [
    Listed("embed", (2, GRAIN), F32, memory=1),
    Listed("bias", (77,), F32, group=1),
    Listed("empty", (0,), F32),
    Listed("weight", (3, 30001), F32, "block"),
    Listed("head", (2, GRAIN), F32, memory=1),
]
LAYOUT = lay_out(LISTED)
VALUES = {
    tensor.names[0]: np.random.default_rng(number).random(tensor.shape, dtype=np.float32)
    for number, tensor in enumerate(LAYOUT.tensors)
}


def whole_digests() -> dict[str, str]:
    """What the replicated path computes: from each whole tensor."""
    digests = {}
    for tensor in LAYOUT.tensors:
        content = memoryview(VALUES[tensor.names[0]].tobytes())
        joined = join_grains(F32, tensor.shape, grain_digests(content, 4))
        digests |= dict.fromkeys(tensor.names, joined)
    return digests


@given(st.integers(1, 12), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_holders_find_the_digests_of_whole_tensors(num_ranks: int, copies: int, draw: random.Random) -> None:
    """Each rank hashes its own grains alone; 32 bytes a grain go on."""
    found: dict[int, bytes] = {}
    holdings = all_held(circle_of(LAYOUT), seats_of([()] * num_ranks, copies))
    draw.shuffle(holdings)
    for grains in holdings:
        for number in grains.tolist():
            values = VALUES[LAYOUT.tensors[LAYOUT.tensor_of[number]].names[0]].reshape(-1)
            piece = values[LAYOUT.lo[number] : LAYOUT.hi[number]].tobytes()
            (digest,) = grain_digests(memoryview(piece), 4)
            assert found.setdefault(number, digest) == digest, "copies agree"
    assert tensor_digests(LAYOUT, found) == whole_digests()


def test_tied_names_have_one_digest_and_units_and_groups_do_not_show() -> None:
    digests = whole_digests()
    assert digests["embed"] == digests["head"] and sorted(digests) == sorted(one.name for one in LISTED)
    plain = lay_out([Listed(one.name, one.shape, one.dtype, "", 0, one.memory) for one in LISTED])
    grains = {
        number: digest
        for tensor in plain.tensors
        for number, digest in zip(
            tensor.grains, grain_digests(memoryview(VALUES[tensor.names[0]].tobytes()), 4), strict=True
        )
    }
    assert tensor_digests(plain, grains) == digests


def test_every_bit_dtype_and_shape_shows() -> None:
    content = bytearray(2 * GRAIN + 3)
    digest = join_grains("torch.uint8", (len(content),), grain_digests(memoryview(content), 1))
    assert digest == "45d7668086f07b582777fff7236715b533370cfad0b13efa979b6bb540755e51"
    for place in (0, GRAIN - 1, GRAIN, len(content) - 1):
        content[place] ^= 1
        assert join_grains("torch.uint8", (len(content),), grain_digests(memoryview(content), 1)) != digest
        content[place] ^= 1
    parts = grain_digests(memoryview(content), 1)
    assert join_grains("torch.uint8", (1, len(content)), parts) != digest
    assert join_grains("torch.int8", (len(content),), parts) != digest
    assert join_grains("torch.uint8", (len(content),), parts[::-1]) != digest


def test_an_empty_tensor_and_a_single_number_have_digests() -> None:
    assert grain_digests(memoryview(b""), 4) == []
    assert join_grains(F32, (0,), []) != join_grains(F32, (0, 2), [])
    assert len(grain_digests(memoryview(b"1234"), 4)) == 1


def test_a_grain_without_a_digest_is_missed() -> None:
    with pytest.raises(KeyError):
        tensor_digests(LAYOUT, {})
