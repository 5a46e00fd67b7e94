"""The cut of a model into grains; it depends only on the tensors, not on world, rank, degree or mode.

A grain is a run of at most GRAIN elements of one tensor. If ranks can each have a part of a tensor, the cut dimension
comes first in its *memory order*, so that a part is a run of elements; and no grain crosses the edge of a part at any
degree up to MOST_DEGREE that divides the dimension. A part is then a number of whole grains at every degree, and
measurements per grain (norm, digest) are the same at every degree.

Grains are numbered in the model's order, tensor by tensor. Tensors that are gathered together and have the same
optimizer settings lie in one *flat* vector, each at a multiple of ALIGN elements. The padding after a tensor belongs to
the span of its last grain; it is zero, never updated, and not part of any norm or digest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elastic_train.core.arrays import Int64s
from elastic_train.errors import ConfigError

GRAIN = 1 << 16
"""Maximum length of a grain, in elements."""
ALIGN = 64
"""Alignment of tensors in flat vectors, in elements."""
MOST_DEGREE = 64
"""Maximum number of ranks among which a dimension may be cut."""

CutDims = Mapping[str, int]
"""Dimension along which ranks can have a part each, by parameter name; others stay whole."""


class Cut(NamedTuple):
    """The dimension along which a tensor may be cut, and the indices that no grain crosses.

    `edges` ascend from 0 to the dimension's size.
    """

    dim: int
    edges: tuple[int, ...]

    def part(self, lo: int, hi: int) -> Cut:
        """Return the cut of the part [lo, hi) of the dimension; `lo` and `hi` must be edges."""
        return Cut(self.dim, tuple(edge - lo for edge in self.edges if lo <= edge <= hi))


@cache
def edges_of(size: int) -> tuple[int, ...]:
    """Return the indices at which any degree that divides it cuts a dimension, both ends included, ascending."""
    degrees = [degree for degree in range(1, MOST_DEGREE + 1) if size % degree == 0]
    return tuple(sorted({part * size // degree for degree in degrees for part in range(degree + 1)}))


def cut_along(shape: Sequence[int], dim: int | None) -> Cut | None:
    """Return the cut of a tensor along a dimension; None for a tensor that every rank holds whole."""
    return None if dim is None else Cut(dim, edges_of(shape[dim]))


@cache
def bounds_of(shape: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
    """Return the starts of a tensor's grains in its memory order and the end of the last one, in elements."""
    numel = math.prod(shape)
    if not numel:
        return (0,)
    row = 1 if cut is None else numel // shape[cut.dim]
    edges = (0, numel) if cut is None else [edge * row for edge in cut.edges]
    return (0, *(at for lo, hi in pairwise(edges) for at in (*range(lo + GRAIN, hi, GRAIN), hi)))


def strides_of(shape: Sequence[int], cut: Cut | None) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor stored in its memory order."""
    first = 0 if cut is None else cut.dim
    rest = [size for dim, size in enumerate(shape) if dim != first]
    strides = [math.prod(rest[at + 1 :]) for at in range(len(rest))]
    return (*strides[:first], math.prod(rest), *strides[first:]) if shape else ()


@dataclass(frozen=True, slots=True)
class Listed:
    """One name of a tensor, as listed by a model; names with the same `memory` are tied: one tensor.

    `unit` is the block it is gathered with. `group` is the number of the optimizer's parameter group, None for a frozen
    tensor. `cut` gives the dimension along which it may be cut, None if it stays whole. A tensor that `is_atomic` is
    held whole or not at all, e.g. because the optimizer updates matrices.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    unit: str = ""
    group: int | None = 0
    memory: Hashable = None
    cut: Cut | None = None
    is_atomic: bool = False


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat vector of `numel` elements, padding included."""

    unit: str
    dtype: str
    group: int | None
    numel: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's position: from element `start` of a flat vector, with grains from number `first_grain`.

    `names` has all its names, the first one first. `units` are the units that use it; if a tie spans several, it lies
    in the flat vectors of no unit, "". Its elements are in memory order, `cut.dim` first. A rank holds all grains of a
    tensor that `is_atomic`, or none.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    units: tuple[str, ...]
    flat: int
    start: int
    first_grain: int
    cut: Cut | None = None
    is_atomic: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Start of each grain, and the end of the last one."""
        return bounds_of(self.shape, self.cut)

    @property
    def grains(self) -> range:
        """Numbers of its grains, in the order of its elements; empty for an empty tensor."""
        return range(self.first_grain, self.first_grain + len(self.bounds) - 1)


@dataclass(frozen=True)
class Layout:
    """Tensors in the model's order, and their flat vectors, in order of their first tensors."""

    tensors: tuple[Tensor, ...]
    flats: tuple[Flat, ...]

    @property
    def num_grains(self) -> int:
        return self.tensors[-1].grains.stop if self.tensors else 0

    @cached_property
    def tensor_of(self) -> Int64s:
        """Number of every grain's tensor; shape (grains,)."""
        return np.repeat(np.arange(len(self.tensors)), [len(tensor.grains) for tensor in self.tensors])

    @cached_property
    def flat_of(self) -> Int64s:
        """Number of every grain's flat vector; shape (grains,)."""
        return self._of_tensors([tensor.flat for tensor in self.tensors])

    @cached_property
    def lo(self) -> Int64s:
        """First element of every grain within its tensor; shape (grains,)."""
        return np.array([at for tensor in self.tensors for at in tensor.bounds[:-1]], dtype=np.int64)

    @cached_property
    def hi(self) -> Int64s:
        """End of every grain within its tensor; shape (grains,)."""
        return np.array([at for tensor in self.tensors for at in tensor.bounds[1:]], dtype=np.int64)

    @cached_property
    def start(self) -> Int64s:
        """First element of every grain within its flat vector; shape (grains,)."""
        return self._of_tensors([tensor.start for tensor in self.tensors]) + self.lo

    @cached_property
    def span(self) -> Int64s:
        """Number of elements of every grain in its flat vector, padding included; shape (grains,)."""
        is_last = self.hi == self._of_tensors([tensor.numel for tensor in self.tensors])
        return self.hi - self.lo + np.where(is_last, -self.hi % ALIGN, 0)

    @cached_property
    def atom(self) -> Int64s:
        """First of the grains that must be held with every grain, itself if it may be held alone; shape (grains,)."""
        first = self._of_tensors([tensor.first_grain if tensor.is_atomic else -1 for tensor in self.tensors])
        return np.where(first < 0, np.arange(self.num_grains), first)

    @cached_property
    def is_trained(self) -> npt.NDArray[np.bool_]:
        """True for each grain that the optimizer updates; shape (grains,)."""
        return np.array([flat.group is not None for flat in self.flats], dtype=np.bool_)[self.flat_of]

    @cached_property
    def trained(self) -> Int64s:
        """Numbers of the grains that the optimizer updates (all but frozen tensors'), ascending."""
        return self.trained_of(np.arange(self.num_grains))

    def trained_of(self, grains: Int64s) -> Int64s:
        """Return the grains among `grains` that the optimizer updates."""
        return grains[self.is_trained[grains]]

    @cached_property
    def dims(self) -> CutDims:
        """Cut dimension of each tensor that may be cut, by each of its names."""
        return {name: tensor.cut.dim for tensor in self.tensors if tensor.cut is not None for name in tensor.names}

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Number of each tensor, by each of its names."""
        return {name: number for number, tensor in enumerate(self.tensors) for name in tensor.names}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything that determines grains' positions; equal on ranks that exchange grains."""
        tensors = [
            (t.names, t.shape, t.units, t.flat, t.start, t.first_grain, t.cut, *(["atomic"] if t.is_atomic else []))
            for t in self.tensors
        ]
        flats = [(flat.unit, flat.dtype, flat.group, flat.numel) for flat in self.flats]
        return hashlib.sha256(json.dumps([GRAIN, ALIGN, tensors, flats]).encode()).hexdigest()

    def _of_tensors(self, values: Sequence[int]) -> Int64s:
        return np.array(values, dtype=np.int64)[self.tensor_of]


def lay_out(listed: Iterable[Listed]) -> Layout:
    """Lay out a model's tensors, tied ones once, at the position of their first name.

    Raises ConfigError for a duplicate name, and for tied names that differ in shape, dtype, cut or parameter group.
    """
    flats: dict[tuple[str, str, int | None], int] = {}
    ends: list[int] = []
    tensors: list[Tensor] = []
    next_grain = 0
    for names in _tied(listed):
        first = names[0]
        units = tuple(dict.fromkeys(one.unit for one in names))
        # A tensor of several units is gathered with the rest of the model.
        flat = flats.setdefault((first.unit if len(units) == 1 else "", first.dtype, first.group), len(flats))
        ends += [0] * (len(flats) - len(ends))
        tied = tuple(one.name for one in names)
        tensor = Tensor(tied, first.shape, units, flat, ends[flat], next_grain, first.cut, first.is_atomic)
        ends[flat] += -(-tensor.numel // ALIGN) * ALIGN
        next_grain = tensor.grains.stop
        tensors.append(tensor)
    return Layout(tuple(tensors), tuple(Flat(*key, end) for key, end in zip(flats, ends, strict=True)))


def _tied(listed: Iterable[Listed]) -> list[list[Listed]]:
    """Return the names of each tensor, in order of their first names."""
    tensors: dict[Hashable, list[Listed]] = {}
    seen: set[str] = set()
    for one in listed:
        if one.name in seen:
            raise ConfigError(f"the model lists two tensors as '{one.name}'; a name stands for one tensor")
        seen.add(one.name)
        tensors.setdefault(("", one.name) if one.memory is None else ("tied", one.memory), []).append(one)
    for first, *others in tensors.values():
        for other in others:
            if (first.shape, first.dtype, first.group, first.cut) != (other.shape, other.dtype, other.group, other.cut):
                raise ConfigError(
                    f"'{first.name}' ({first.dtype} {first.shape}, parameter group {first.group}) and '{other.name}' "
                    f"({other.dtype} {other.shape}, parameter group {other.group}) share memory, but not shape, dtype "
                    "and parameter group: tie whole tensors, or give each its own memory"
                )
    return list(tensors.values())


def digests_of(content: memoryview, itemsize: int, bounds: Sequence[int]) -> list[bytes]:
    """Return the SHA-256 of every grain, in order; `content` is in memory order, `bounds` in elements."""
    flat = content.cast("B")
    return [hashlib.sha256(flat[lo * itemsize : hi * itemsize]).digest() for lo, hi in pairwise(bounds)]


def join_grains(dtype: str, shape: Sequence[int], cut: Cut | None, grains: Iterable[bytes]) -> str:
    """Return a tensor's digest from those of all of its grains, in order."""
    found = list(grains)
    how = "" if cut is None else f" cut along {cut.dim}"
    head = f"{dtype} {tuple(shape)}{how} in {len(found)} grains of {GRAIN}\n"
    return hashlib.sha256(head.encode() + b"".join(found)).hexdigest()


def tensor_digests(layout: Layout, grains: Mapping[int, bytes]) -> dict[str, str]:
    """Return the digest of every tensor, under each of its names, from those of all grains, by number.

    Raises KeyError for a grain without a digest.
    """
    digests: dict[str, str] = {}
    for tensor in layout.tensors:
        dtype = layout.flats[tensor.flat].dtype
        joined = join_grains(dtype, tensor.shape, tensor.cut, (grains[number] for number in tensor.grains))
        digests |= dict.fromkeys(tensor.names, joined)
    return digests
