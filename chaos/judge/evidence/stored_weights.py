"""Load the weights in a commit's files as any user would: compare digests, then use torch's own `dcp.load`.

No trainer code is used. torch is imported only when there is something to load.
"""

from __future__ import annotations

import hashlib
import io
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from chaos.judge.findings import Violated

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]
_BLOCK = 1 << 20
"""Block size in bytes of a file's checksums in its record."""
_OF_THE_RUN = {"scheduler.recipe"}
"""Values that depend on a run's length: a soak ends with its faults."""
_GRAIN = 1 << 16
"""Most elements hashed at once."""
_MOST_DEGREE = 64
"""Largest number of parts of a dimension whose edges no hashed run crosses, since format 4."""


def load_weights(folder: Path, record: Mapping[str, object]) -> Tensors:
    """Return the model's tensors by name, from a commit record's files below a run's folder."""
    attempt = _attempt_of(folder, record)

    def open_file(name: str) -> BinaryIO | None:
        path = _inside(attempt, attempt / name)
        return path.open("rb") if path.is_file() else None

    for _ in checked_files(record, open_file):
        pass
    return cast(Tensors, _load(attempt, record, lambda section: section == "model"))


def load_averages(folder: Path, record: Mapping[str, object]) -> Tensors:
    """Return the averaged weights by parameter, from the optimizer state in a commit's files."""
    found = _load(_attempt_of(folder, record), record, lambda section: section == "optimizer")
    return {
        name.removeprefix("state.").removesuffix(".ema"): cast("Tensor", value)
        for name, value in found.items()
        if name.startswith("state.") and name.endswith(".ema")
    }


def digests_of_state(folder: Path, record: Mapping[str, object]) -> dict[str, str]:
    """Return a digest of every value in a commit beside the weights: optimizer, schedule and averages.

    `load_weights` has already compared the files with the record.
    """
    import torch

    found = _load(_attempt_of(folder, record), record, lambda section: section != "model", by_section=True)
    return {
        name: _digest_at_once(value) if isinstance(value, torch.Tensor) else repr(value)[:200]
        for name, value in found.items()
        if name not in _OF_THE_RUN
    }


def _attempt_of(folder: Path, record: Mapping[str, object]) -> Path:
    return _inside(folder / "data", folder / str(record["attempt"]))


def _inside(folder: Path, place: Path) -> Path:
    """Return a path that a record names; raise Violated if it is outside its folder."""
    if ".." in place.parts or not place.resolve().is_relative_to(folder.resolve()):
        raise Violated(f"a commit record names {str(place)[-80:]}, which is not below {folder.name}/ of its run")
    return place


def _check_listed(metadata: Any, record: Mapping[str, object]) -> None:
    """Every file that is read has a checksum in the record."""
    listed = cast(Mapping[str, object], record["files"])
    stored = {str(place.relative_path) for place in metadata.storage_data.values()}
    if absent := sorted(stored - listed.keys()):
        raise Violated(f"{record['attempt']}/{absent[0]} holds a part of the state, and its commit record lacks it")


def _load(
    attempt: Path, record: Mapping[str, object], is_wanted: Callable[[object], bool], *, by_section: bool = False
) -> dict[str, object]:
    """Load some sections of a commit's state with torch's own reader; names start with the section if `by_section`."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    if ".metadata" not in cast(Mapping[str, object], record["files"]):
        raise Violated(
            f"{record['attempt']}/.metadata has no digest in its commit record: a pickle is not opened unread"
        )
    metadata = FileSystemReader(attempt).read_metadata()  # a pickle, but its digest has been compared
    _check_listed(metadata, record)
    paths = cast(Mapping[str, tuple[object, ...]], metadata.planner_data)
    wanted: dict[str, object] = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype) if hasattr(tensor, "size") else io.BytesIO()
        for name, kind in metadata.state_dict_metadata.items()
        if is_wanted(paths[name][0])
        for tensor in [cast(Any, kind)]
    }
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns about a single process
            load(cast(dict[str, Any], wanted), checkpoint_id=attempt, no_dist=True)
    except BaseException as error:  # torch's CheckpointException is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise Violated(f"{attempt.name} cannot be loaded by dcp.load: {type(error).__name__}: {error}") from error
    return {".".join(map(str, paths[name][not by_section :])): value for name, value in wanted.items()}


def checked_files(
    record: Mapping[str, object], open_file: Callable[[str], BinaryIO | None]
) -> Iterator[tuple[str, BinaryIO]]:
    """Yield the files that a record lists, at their start; raise Violated if one does not match the record."""
    files = cast(Mapping[str, Mapping[str, object]], record["files"])
    for name, listed in sorted(files.items()):
        where, file = f"{record['attempt']}/{name}", open_file(name)
        if file is None:
            raise Violated(f"{where} is not there, and its commit record lists it")
        with file:
            size, digest, blocks = _measure(file)
            if (size, digest) != (listed["size"], listed["blake3"]):
                told = f"{listed['size']} bytes with BLAKE3 {str(listed['blake3'])[:16]}"
                raise Violated(f"{where} holds {size} bytes with BLAKE3 {digest[:16]}, its commit record says {told}")
            if listed["blocks"] != blocks:
                raise Violated(f"{where}: the checksums of its blocks are not those that its commit record lists")
            file.seek(0, io.SEEK_SET)
            yield name, file


def _measure(file: BinaryIO) -> tuple[int, str, list[int]]:
    """Return a file's size, its digest, and the CRC-32 of each block."""
    from blake3 import blake3

    size, blocks, digest = 0, list[int](), blake3()
    while block := file.read(_BLOCK):
        size += len(block)
        digest.update(block)
        blocks.append(zlib.crc32(block))
    return size, digest.hexdigest(), blocks


def digest_of(tensors: Tensors, fields: Mapping[str, object]) -> str:
    """Return the SHA-256 over all tensors (docs/formats.md, Commits); a record's fields name the tensors' cuts."""
    dims = cast(Mapping[str, int], fields.get("cut_dims") or {})
    lines = "".join(f"{name} {_digest_by_grains(tensor, dims.get(name))}\n" for name, tensor in sorted(tensors.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _digest_by_grains(tensor: Tensor, dim: int | None) -> str:
    """Return the SHA-256 over dtype, shape, and the SHA-256s of runs of elements.

    Runs of a tensor that may be split along a dimension do not cross the edges of equal parts.
    """
    import torch

    how, runs = ("", [tensor.reshape(-1)]) if dim is None else _parts(tensor, dim)
    filled = [run for run in runs if run.numel()]
    grains = [hashlib.sha256(_bytes_of(grain)).digest() for run in filled for grain in torch.split(run, _GRAIN)]
    head = f"{tensor.dtype} {tuple(tensor.shape)}{how} in {len(grains)} grains of {_GRAIN}\n"
    return hashlib.sha256(head.encode() + b"".join(grains)).hexdigest()


def _parts(tensor: Tensor, dim: int) -> tuple[str, list[Tensor]]:
    size = tensor.shape[dim]
    degrees = [degree for degree in range(1, _MOST_DEGREE + 1) if size % degree == 0]
    edges = sorted({part * size // degree for degree in degrees for part in range(degree + 1)})
    first = tensor.movedim(dim, 0)
    return f" cut along {dim}", [first[lo:hi].reshape(-1) for lo, hi in pairwise(edges)]


def _digest_at_once(tensor: Tensor) -> str:
    """Return the SHA-256 over dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    import torch

    dense = tensor.contiguous()  # a single element is, whatever its strides
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data


def first_nonfinite(tensors: Tensors) -> str | None:
    """Return the name of the first tensor with a non-finite number; None if there is none."""
    import torch

    return next((name for name, tensor in sorted(tensors.items()) if not torch.isfinite(tensor).all()), None)
