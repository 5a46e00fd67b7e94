"""The cut of a model into grains: fixed by its tensors alone, so that no world, rank or mode shows in it.

A grain is a run of at most GRAIN elements of one tensor; only a tensor's last grain is shorter. Grains are numbered in
the model's order, tensor by tensor. Tensors that are gathered together, and that one optimizer setting updates, stand
in one *flat* vector, each at a multiple of ALIGN elements: fused kernels then give equal bits wherever a run of grains
is cut out. The elements between a tensor's end and the next multiple belong to its last grain's span; they are zero,
are never updated, and count in no norm and no digest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from elastic_train.core.arrays import Int64s
from elastic_train.errors import ConfigError

GRAIN = 1 << 16
"""Elements of a whole grain."""
ALIGN = 64
"""Elements: every tensor begins at a multiple of this in its flat vector."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One name of a tensor, as a model lists it; names that share a `memory` are tied: one tensor.

    `unit` is what is gathered together (a block). `group` is the number of the optimizer's parameter group, None for a
    tensor that is frozen.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    unit: str = ""
    group: int | None = 0
    memory: Hashable = None


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat vector of `numel` elements, padding included."""

    unit: str
    dtype: str
    group: int | None
    numel: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's place: at element `start` of a flat vector, its grains from number `first_grain` on.

    `names` are all of its names, the first one first. `units` are those that use it: more than one where a tie crosses
    them, and then it stands with what is in no unit, "".
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    units: tuple[str, ...]
    flat: int
    start: int
    first_grain: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def grains(self) -> range:
        """The numbers of its grains, in order of its elements; none if it is empty."""
        return range(self.first_grain, self.first_grain + -(-self.numel // GRAIN))


@dataclass(frozen=True)
class Layout:
    """Tensors in the model's order, and the flat vectors that they stand in, in the order of their first tensors."""

    tensors: tuple[Tensor, ...]
    flats: tuple[Flat, ...]

    @property
    def num_grains(self) -> int:
        return self.tensors[-1].grains.stop if self.tensors else 0

    @cached_property
    def tensor_of(self) -> Int64s:
        """The number of every grain's tensor; shape (grains,)."""
        return np.repeat(np.arange(len(self.tensors)), [len(tensor.grains) for tensor in self.tensors])

    @cached_property
    def flat_of(self) -> Int64s:
        """The number of every grain's flat vector; shape (grains,)."""
        return self._of_tensors([tensor.flat for tensor in self.tensors])

    @cached_property
    def lo(self) -> Int64s:
        """The element of its tensor that every grain begins with; shape (grains,)."""
        return GRAIN * (np.arange(self.num_grains) - self._of_tensors([t.first_grain for t in self.tensors]))

    @cached_property
    def hi(self) -> Int64s:
        """The element of its tensor that every grain ends before; shape (grains,)."""
        return np.minimum(self.lo + GRAIN, self._of_tensors([tensor.numel for tensor in self.tensors]))

    @cached_property
    def start(self) -> Int64s:
        """The element of its flat vector that every grain begins with, a multiple of ALIGN; shape (grains,)."""
        return self._of_tensors([tensor.start for tensor in self.tensors]) + self.lo

    @cached_property
    def span(self) -> Int64s:
        """The elements that every grain takes of its flat vector, padding included; shape (grains,)."""
        return -(-(self.hi - self.lo) // ALIGN) * ALIGN

    @cached_property
    def trained(self) -> Int64s:
        """The numbers of the grains that the optimizer updates, ascending: all but frozen tensors'."""
        is_trained = np.array([flat.group is not None for flat in self.flats], dtype=bool)
        return np.flatnonzero(is_trained[self.flat_of])

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything that decides where a grain is; ranks that exchange grains must have the same."""
        tensors = [(t.names, t.shape, t.units, t.flat, t.start, t.first_grain) for t in self.tensors]
        flats = [(flat.unit, flat.dtype, flat.group, flat.numel) for flat in self.flats]
        return hashlib.sha256(json.dumps([GRAIN, ALIGN, tensors, flats]).encode()).hexdigest()

    def _of_tensors(self, values: Sequence[int]) -> Int64s:
        return np.array(values, dtype=np.int64)[self.tensor_of]


def lay_out(listed: Iterable[Listed]) -> Layout:
    """Lay a model's tensors out, tied ones once, at the place of their first name.

    Raises ConfigError for a name that comes twice, and for tied names that differ in shape, dtype or parameter group.
    """
    flats: dict[tuple[str, str, int | None], int] = {}
    ends: list[int] = []
    tensors: list[Tensor] = []
    next_grain = 0
    for names in _tied(listed):
        first = names[0]
        units = tuple(dict.fromkeys(one.unit for one in names))
        # What several units use is gathered with what all of them stand in.
        flat = flats.setdefault((first.unit if len(units) == 1 else "", first.dtype, first.group), len(flats))
        ends += [0] * (len(flats) - len(ends))
        tensor = Tensor(tuple(one.name for one in names), first.shape, units, flat, ends[flat], next_grain)
        ends[flat] += -(-tensor.numel // ALIGN) * ALIGN
        next_grain = tensor.grains.stop
        tensors.append(tensor)
    return Layout(tuple(tensors), tuple(Flat(*key, end) for key, end in zip(flats, ends, strict=True)))


def _tied(listed: Iterable[Listed]) -> list[list[Listed]]:
    """Return the names of each tensor, in the order of their first names."""
    tensors: dict[Hashable, list[Listed]] = {}
    seen: set[str] = set()
    for one in listed:
        if one.name in seen:
            raise ConfigError(f"the model lists two tensors as '{one.name}'; a name stands for one tensor")
        seen.add(one.name)
        tensors.setdefault(("", one.name) if one.memory is None else ("tied", one.memory), []).append(one)
    for first, *others in tensors.values():
        for other in others:
            if (first.shape, first.dtype, first.group) != (other.shape, other.dtype, other.group):
                raise ConfigError(
                    f"'{first.name}' ({first.dtype} {first.shape}, parameter group {first.group}) and '{other.name}' "
                    f"({other.dtype} {other.shape}, parameter group {other.group}) share memory, but not shape, dtype "
                    "and parameter group: tie whole tensors, or give each its own memory"
                )
    return list(tensors.values())
