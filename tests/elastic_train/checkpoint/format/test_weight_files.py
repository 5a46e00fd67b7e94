"""Weight files written tensor by tensor equal those that safetensors and torch write at once."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.weights import Kind, ReadTensors, open_weights, write_safetensors, write_torch
from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import CommitError, ConfigError
from tests.elastic_train.checkpoint.commit_samples import State, facts, writer

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.bool,
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(), (3,), (0,), (2, 5), (1, 0, 4), (7, 1, 3)]


def tensors_of(dtypes: Sequence[torch.dtype]) -> dict[str, Tensor]:
    """Return tensors of all shapes, not ordered by name."""
    generator = torch.Generator().manual_seed(1)
    return {
        f"{place % 3}.größe.{str(dtype).removeprefix('torch.')}.{place}": torch.randint(
            0, 2, shape, generator=generator
        ).to(dtype)
        for dtype in dtypes
        for place, shape in enumerate(SHAPES)
    }


def plain_safetensors(file: IO[bytes], kinds: Mapping[str, Kind], read: ReadTensors) -> None:
    write_safetensors(file, kinds, read, {})


def kinds_of(tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    return {name: Kind(one.dtype, one.shape) for name, one in tensors.items()}


@pytest.mark.parametrize("dtypes", [DTYPES, *([one] for one in DTYPES)], ids=str)
def test_safetensors_are_the_bytes_of_its_own_writer(dtypes: list[torch.dtype]) -> None:
    tensors, file = tensors_of(dtypes), io.BytesIO()
    write_safetensors(file, kinds_of(tensors), lambda names: (tensors[name] for name in names), {"format": "pt"})
    assert file.getvalue() == save(tensors, {"format": "pt"})


def test_safetensors_are_read_with_what_they_say_of_themselves() -> None:
    tensors, file = tensors_of([torch.float32]), io.BytesIO()
    write_safetensors(
        file, kinds_of(tensors), lambda names: (tensors[name] for name in names), {"commit": 'a "b"', "ä": "ü\n"}
    )
    found = load(file.getvalue())
    assert set(found) == set(tensors) and all(found[name].equal(one) for name, one in tensors.items())


def test_a_type_that_safetensors_lack_is_refused_before_a_byte_is_written() -> None:
    tensors, file = {"a": torch.ones(2), "z": torch.ones(2, dtype=torch.complex128)}, io.BytesIO()
    with pytest.raises(ConfigError, match=r"no type for z \(torch.complex128\): use --to torch"):
        write_safetensors(file, kinds_of(tensors), lambda names: (tensors[name] for name in names), {})
    assert not file.getvalue()


@pytest.mark.parametrize("dtypes", [[torch.float32], DTYPES], ids=str)
def test_torch_reads_what_it_would_have_written_itself(dtypes: list[torch.dtype]) -> None:
    """Tensors are in the order of the state, also beyond ten tensors."""
    tensors, file = tensors_of(dtypes), io.BytesIO()
    write_torch(file, kinds_of(tensors), lambda names: (tensors[name] for name in names))
    theirs = io.BytesIO()
    torch.save(tensors, theirs)
    found = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    expected = torch.load(io.BytesIO(theirs.getvalue()), weights_only=True)
    assert list(found) == list(expected) == list(tensors)
    for name, one in expected.items():
        assert type(found[name]) is type(one) and found[name].dtype == one.dtype and found[name].is_contiguous()
        assert found[name].device == one.device and found[name].requires_grad == one.requires_grad
        assert found[name].view(torch.uint8).equal(one.view(torch.uint8)) if one.ndim else found[name].equal(one)


class Full(io.BytesIO):
    """A file on a disk with room for a given number of bytes."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._num_bytes = num_bytes

    def write(self, content: object, /) -> int:
        if self.tell() + memoryview(content).nbytes > self._num_bytes:  # type: ignore[arg-type]
            raise OSError(28, "No space left on device")
        return super().write(content)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_bytes", [0, 1000, 5000, 40_000])
def test_a_full_disk_is_what_the_error_says(num_bytes: int) -> None:
    tensors = {str(number): torch.full((1000,), float(number)) for number in range(12)}
    for write in (write_torch, plain_safetensors):
        with pytest.raises(OSError, match="No space left on device"):
            write(Full(num_bytes), kinds_of(tensors), lambda names: (tensors[name] for name in names))


def test_what_is_wrong_with_a_tensor_is_what_the_error_says() -> None:
    tensors = {str(number): torch.full((1000,), float(number)) for number in range(4)}

    def read(names: Sequence[str]) -> Iterator[Tensor]:
        yield tensors[names[0]]
        raise CommitError("the file was damaged")

    for write in (write_torch, plain_safetensors):
        with pytest.raises(CommitError, match="the file was damaged"):
            write(io.BytesIO(), kinds_of(tensors), read)


def test_averages_are_read_in_place_of_the_weights_that_have_one(local_store: Store) -> None:
    """A tied weight's average is stored under its first name; frozen weights have none."""
    weights = {"embed": torch.arange(3.0), "head": torch.arange(3.0), "frozen": torch.ones(3)}
    commits = writer(local_store)

    def commit(step: int, **moments: Tensor) -> CommitRecord:
        state: State = {"model": weights, "optimizer": {"state": {"embed": {"exp_avg": torch.zeros(3), **moments}}}}
        return commits.save(state, facts(step))

    with open_weights(local_store, commit(1, ema=torch.full((3,), 9.0)), "ema") as stored:
        found = {name: tensor.tolist() for name, tensor in zip(stored.kinds, stored.read([*stored.kinds]), strict=True)}
    assert found == {"embed": [9.0] * 3, "head": [9.0] * 3, "frozen": [1.0] * 3}
    with pytest.raises(ConfigError, match="holds no average"), open_weights(local_store, commit(2), "ema"):
        pass
