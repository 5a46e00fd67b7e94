"""A loader's output, one lane's micro-batch of one step; its `collate(rows, ids[, draw])`; rules for bad samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import Tensor

from elastic_train.core.arrays import Int64s
from elastic_train.core.keyed_random import SampleRandom
from elastic_train.data.arrow.rows import Rows
from elastic_train.errors import UnreadableError


@dataclass(frozen=True, slots=True)
class LaneBatch:
    """One lane's micro-batch of the positions [lo, hi) of its epoch; `ids`, shape (n,), are those read.

    `tensors` is None if no sample is left, or row groups are `unreadable` (reason by number): such a micro-batch must
    not be trained on. `num_left_out` positions are in holes, `num_truncated` rows were truncated.
    """

    lane: int
    epoch: int
    lo: int
    hi: int
    ids: Int64s
    tensors: dict[str, Tensor] | None = field(repr=False)
    num_left_out: int = 0
    num_truncated: int = 0
    unreadable: Mapping[int, str] = field(default_factory=dict)

    def pin_memory(self) -> LaneBatch:
        """Return a copy with pinned tensors, which a device can copy while it computes."""
        if self.tensors is None:
            return self
        return replace(self, tensors={name: tensor.pin_memory() for name, tensor in self.tensors.items()})


PlainCollate = Callable[[pa.Table, npt.NDArray[np.int64]], "dict[str, Tensor]"]
DrawingCollate = Callable[[pa.Table, npt.NDArray[np.int64], SampleRandom], "dict[str, Tensor]"]
Collate = PlainCollate | DrawingCollate

EXPECTED = "collate(rows, ids), or collate(rows, ids, draw) to draw random numbers"

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def takes_draw(collate: Collate) -> bool:
    """Return True if a function takes random numbers: its third parameter is required, or named `draw`.

    A third parameter with a default and another name is left alone. Raise TypeError if the function accepts neither two
    nor three arguments.
    """
    signature = inspect.signature(collate)
    positional = [each for each in signature.parameters.values() if each.kind in _POSITIONAL]
    third = positional[2] if len(positional) > 2 else None
    is_drawing = third is not None and (third.name == "draw" or third.default is inspect.Parameter.empty)
    try:
        signature.bind(*[None] * (3 if is_drawing else 2))
    except TypeError as error:
        name = getattr(collate, "__qualname__", repr(collate))
        raise TypeError(f"{name}{signature} cannot be called ({error}); expected {EXPECTED}") from error
    return is_drawing


class Collator:
    """Calls a function of either kind; picklable if the function is. `is_training` is passed on with random numbers."""

    def __init__(self, collate: Collate, *, is_training: bool = True) -> None:
        self._collate, self._takes_draw, self._is_training = collate, takes_draw(collate), is_training

    def __call__(
        self, rows: pa.Table, ids: npt.NDArray[np.int64], seed: int, epochs: npt.NDArray[np.int64] | int
    ) -> dict[str, Tensor]:
        """Turn rows into tensors; random numbers, if used, depend on seed, epochs and ids only."""
        if self._takes_draw:
            draw = SampleRandom(seed, epochs, ids, self._is_training)
            return cast(DrawingCollate, self._collate)(rows, ids, draw)
        return cast(PlainCollate, self._collate)(rows, ids)


@dataclass(frozen=True, slots=True)
class SampleRules:
    """Rules for samples that cannot be used as they are.

    `holes` are row groups by number, each with its first step without them; `left_out` are id ranges [lo, hi), each
    with its first step. With `quarantines` an unreadable row group is named in its micro-batch instead of raising.
    `longest` bounds the values of list columns; longer rows are truncated if `truncates`, else they raise.
    """

    holes: tuple[tuple[int, int], ...] = ()
    left_out: tuple[tuple[int, int, int], ...] = ()
    quarantines: bool = False
    longest: Mapping[str, int] = field(default_factory=dict)
    truncates: bool = False


AS_THEY_ARE = SampleRules()


class Decoder(Protocol):
    """Decodes row groups; thread-safe."""

    def decode(self, group: int) -> Rows:
        """Return the rows of a row group, or raise UnreadableError."""


class SkippingHoles:
    """A decoder that does not read holes in effect at a step."""

    def __init__(self, decoder: Decoder, rules: SampleRules, step: int) -> None:
        self._decoder = decoder
        self._left_out = frozenset(group for group, since in rules.holes if since <= step)

    def decode(self, group: int) -> Rows:
        if group in self._left_out:
            raise UnreadableError(f"row group {group} is in a hole")
        return self._decoder.decode(group)
