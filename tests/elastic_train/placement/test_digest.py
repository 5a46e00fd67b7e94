"""Digests by grains: a tensor has one digest, whichever ranks hold its grains, and every bit changes it."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.checkpoint.format.dcp import digest_of
from elastic_train.parallel.devices.squares import in_memory_order
from elastic_train.placement.grains import (
    GRAIN,
    Listed,
    Tensor,
    bounds_of,
    cut_along,
    digests_of,
    join_grains,
    lay_out,
    tensor_digests,
)
from elastic_train.placement.holdings import all_held, circle_of
from elastic_train.placement.seats import seats_of

F32 = "torch.float32"
LISTED = [
    Listed("embed", (2, GRAIN), F32, memory=1),
    Listed("bias", (77,), F32, group=1),
    Listed("empty", (0,), F32),
    Listed("weight", (3, 30001), F32, "block"),
    Listed("head", (2, GRAIN), F32, memory=1),
    Listed("columns", (6, 500), F32, "block", cut=cut_along((6, 500), 0)),
    Listed("rows", (50_000, 6), F32, "block", cut=cut_along((50_000, 6), 1)),
]
LAYOUT = lay_out(LISTED)
VALUES = {
    tensor.names[0]: np.random.default_rng(number).random(tensor.shape, dtype=np.float32)
    for number, tensor in enumerate(LAYOUT.tensors)
}


def grains_of(content: bytearray) -> list[bytes]:
    return digests_of(memoryview(content), 1, bounds_of((len(content),), None))


def in_order(tensor: Tensor) -> npt.NDArray[np.float32]:
    """Return a tensor's elements in its memory order."""
    return in_memory_order(torch.from_numpy(VALUES[tensor.names[0]]), tensor.cut).numpy()  # type: ignore[no-any-return]


def whole_digests() -> dict[str, str]:
    """The digests in the replicated case: from each whole tensor."""
    digests = {}
    for tensor in LAYOUT.tensors:
        values = torch.from_numpy(VALUES[tensor.names[0]])
        digests |= dict.fromkeys(tensor.names, digest_of(values, None if tensor.cut is None else tensor.cut.dim))
    return digests


@pytest.mark.heavy
@given(st.integers(1, 12), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_holders_find_the_digests_of_whole_tensors(num_ranks: int, copies: int, draw: random.Random) -> None:
    """Each rank hashes only its own grains, and sends 32 bytes per grain."""
    found: dict[int, bytes] = {}
    holdings = all_held(circle_of(LAYOUT), seats_of([()] * num_ranks, copies))
    draw.shuffle(holdings)
    for grains in holdings:
        for number in grains.tolist():
            tensor = LAYOUT.tensors[LAYOUT.tensor_of[number]]
            values = in_order(tensor)[LAYOUT.lo[number] : LAYOUT.hi[number]]
            digest = hashlib.sha256(values.tobytes()).digest()
            assert found.setdefault(number, digest) == digest, "copies agree"
    assert tensor_digests(LAYOUT, found) == whole_digests()


def test_tied_names_have_one_digest_and_units_and_groups_do_not_show() -> None:
    digests = whole_digests()
    assert digests["embed"] == digests["head"] and sorted(digests) == sorted(one.name for one in LISTED)
    plain = lay_out([Listed(one.name, one.shape, one.dtype, "", 0, one.memory, one.cut) for one in LISTED])
    grains = {
        number: digest
        for tensor in plain.tensors
        for number, digest in zip(
            tensor.grains, digests_of(memoryview(in_order(tensor).tobytes()), 4, tensor.bounds), strict=True
        )
    }
    assert tensor_digests(plain, grains) == digests


def test_every_bit_dtype_and_shape_shows() -> None:
    content = bytearray(2 * GRAIN + 3)
    digest = join_grains("torch.uint8", (len(content),), None, grains_of(content))
    assert digest == "45d7668086f07b582777fff7236715b533370cfad0b13efa979b6bb540755e51"
    for place in (0, GRAIN - 1, GRAIN, len(content) - 1):
        content[place] ^= 1
        assert join_grains("torch.uint8", (len(content),), None, grains_of(content)) != digest
        content[place] ^= 1
    parts = grains_of(content)
    assert join_grains("torch.uint8", (1, len(content)), None, parts) != digest
    assert join_grains("torch.int8", (len(content),), None, parts) != digest
    assert join_grains("torch.uint8", (len(content),), None, parts[::-1]) != digest


def test_an_empty_tensor_and_a_single_number_have_digests() -> None:
    assert digests_of(memoryview(b""), 4, bounds_of((0,), None)) == []
    assert join_grains(F32, (0,), None, []) != join_grains(F32, (0, 2), None, [])
    assert len(digests_of(memoryview(b"1234"), 4, bounds_of((), None))) == 1


def test_a_grain_without_a_digest_is_missed() -> None:
    with pytest.raises(KeyError):
        tensor_digests(LAYOUT, {})
