"""Pack documents into rows of one length: bounded-space best fit, i.e. first fit over rows sorted by fill.

A document goes into the fullest open row in which it fits; if there is none, a new row is opened. At most `num_open`
rows are open: the fullest is closed first. This is BBF_k of Csirik and Johnson (Bounded space on-line bin packing: best
is better than first, Algorithmica 31, 2001): for every k >= 2 its worst-case ratio is that of unbounded first fit, 1.7.
Documents longer than a row are cut into whole rows and a rest, and only the rest is packed (as in Ding et al.: Fewer
truncations improve language modeling, ICML 2024). Rows are a pure function of the documents in order; memory is bounded
by the open rows.

Invariant: the pieces of a document, ordered by `lo`, are exactly the document; no row has more than `length` tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
"""A document's tokens: shape (tokens,), or (tokens, 2) with each token's label."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a document, starting at its token `lo`."""

    document: int
    lo: int
    tokens: Tokens


@dataclass(slots=True)
class Row:
    """Consecutive pieces in a row."""

    pieces: list[Piece] = field(default_factory=list)
    used: int = 0

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.used += len(piece.tokens)


class BestFit:
    """Packs documents into rows of at most `length` tokens, with at most `num_open` of them open."""

    def __init__(self, length: int, num_open: int) -> None:
        assert length >= 1 and num_open >= 1, f"no row of {length} tokens, or none of {num_open} open"
        self._length, self._num_open = length, num_open
        self._rooms: list[tuple[int, int]] = []  # (free tokens, number) of the open rows, the fullest first
        self._rows: dict[int, Row] = {}
        self._num_opened = 0

    def add(self, document: int, tokens: Tokens) -> list[Row]:
        """Pack a document, and return the rows that this closes."""
        closed = []
        for lo in range(0, len(tokens), self._length):
            closed += self._place(Piece(document, lo, tokens[lo : lo + self._length]))
        return closed

    def finish(self) -> list[Row]:
        """Return the rows that are still open, in the order in which they were opened."""
        rows = [row for _, row in sorted(self._rows.items())]
        self._rooms.clear()
        self._rows.clear()
        return rows

    def _place(self, piece: Piece) -> list[Row]:
        size = len(piece.tokens)
        if size == self._length:
            return [Row([piece], size)]
        at = bisect_left(self._rooms, (size, -1))
        closed = []
        if at == len(self._rooms):
            if len(self._rooms) == self._num_open:
                closed.append(self._rows.pop(self._rooms.pop(0)[1]))
            at = len(self._rooms)
            self._rooms.append((self._length, self._num_opened))
            self._rows[self._num_opened] = Row()
            self._num_opened += 1
        free, number = self._rooms.pop(at)
        self._rows[number].add(replace(piece, tokens=piece.tokens.copy()))  # a view would keep the whole document alive
        if free > size:
            insort(self._rooms, (free - size, number))
        else:
            closed.append(self._rows.pop(number))
        return closed
