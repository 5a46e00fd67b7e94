"""The function that turns rows into tensors, with or without random numbers: `collate(rows, ids[, draw])`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_train.core.sample_random import SampleRandom

if TYPE_CHECKING:
    from torch import Tensor

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
