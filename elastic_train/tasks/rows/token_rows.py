"""Rows of tokens as tensors for a language model: padded late, with the positions to be predicted.

Targets are the next tokens of the same document that are not masked. Only their positions enter the loss, so their
number is known before a device has computed anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from elastic_train.data.arrow.lists import first_incomplete, lengths_of, pad_lists
from elastic_train.errors import DataError
from elastic_train.tasks.rows.token_parts import PADDING
from elastic_train.tasks.rows.vocabulary import Ids, check_range, unfit_tokens
from elastic_train.tasks.task import Batch

IGNORED = -100
"""Label of a token that is no target; the usual convention."""
_WIDTH_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Columns of integer lists, one value per token; all but `tokens` may be None.

    `labels` are the tokens to predict, or IGNORED. `attention` is 0 for tokens that are neither read nor predicted.
    `documents` numbers the documents of a packed row: a run of equal numbers is a document, none sees another, and
    positions start at 0 in each and count masked tokens.
    """

    tokens: str
    labels: str | None = None
    attention: str | None = None
    documents: str | None = None
    has_fixed_width: bool = False
    """True if every micro-batch has the full row width, so that all have one shape."""

    def names(self) -> Iterator[str]:
        yield from filter(None, (self.tokens, self.labels, self.attention, self.documents))

    def collate(self, rows: pa.Table, ids: Ids, max_tokens: int, vocabulary: int) -> Batch:
        """Return `tokens` (rows, width), `places` (targets,) in their flat form, and `targets` (targets,).

        With documents, or a mask inside a row, also `positions` and `documents`, of the tokens' shape. Raise DataError
        with a sample for missing values, lists of differing lengths, and ids outside [0, vocabulary).
        """
        lengths = self._check(rows, ids)
        multiple = max_tokens if self.has_fixed_width else _WIDTH_MULTIPLE
        padded = {
            name: pad_lists(rows.column(name), max_width=max_tokens, multiple=multiple)[0] for name in self.names()
        }
        tokens = padded[self.tokens]
        check_range(tokens, ids, self.tokens, vocabulary)
        is_real = np.arange(tokens.shape[1]) < np.minimum(lengths, max_tokens)[:, None]
        if self.attention:
            is_real &= padded[self.attention] != 0
        labels = padded[self.labels] if self.labels else tokens
        if self.labels:
            check_range(np.where(labels == IGNORED, 0, labels), ids, self.labels, vocabulary)
        runs = self._runs(padded, lengths)
        documents = self._documents(runs, is_real)
        is_target = is_real[:, 1:] & (labels[:, 1:] >= 0)
        if documents is not None:
            is_target &= documents[:, 1:] == documents[:, :-1]
        row, place = np.nonzero(is_target)
        batch = {"tokens": tokens, "places": row * tokens.shape[1] + place, "targets": labels[row, place + 1]}
        if documents is not None:
            batch |= {"documents": documents, "positions": _positions(runs)}
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def unfit_rows(self, rows: pa.Table, vocabulary: int) -> Sequence[tuple[int, str]]:
        """Return the rows that `collate` rejects for their ids or differing lengths, with reasons."""
        unfit = [*unfit_tokens(rows, self.tokens, vocabulary)]
        if self.labels:
            unfit += unfit_tokens(rows, self.labels, vocabulary, exempt=IGNORED)
        lengths = lengths_of(rows.column(self.tokens))
        for name in self.names():
            others = lengths_of(rows.column(name))
            unfit += [
                (row, self._uneven(name, others, lengths, row)) for row in np.flatnonzero(others != lengths).tolist()
            ]
        return sorted(unfit)

    def _uneven(self, name: str, others: Ids, lengths: Ids, row: int) -> str:
        return (
            f"it has {others[row]} values in column '{name}', but {lengths[row]} in '{self.tokens}': give one for each "
            "token"
        )

    def _check(self, rows: pa.Table, ids: Ids) -> Ids:
        lengths = lengths_of(rows.column(self.tokens))
        for name in self.names():
            if (row := first_incomplete(rows.column(name))) is not None:
                raise DataError(
                    f"column '{name}': a value is missing (null) in sample {ids[row]}; write the data again without "
                    "missing values"
                )
            others = lengths_of(rows.column(name))
            if (others != lengths).any():
                row = int(np.flatnonzero(others != lengths)[0])
                raise DataError(f"sample {ids[row]}: {self._uneven(name, others, lengths, row)}")
        return lengths

    def _runs(self, padded: dict[str, Ids], lengths: Ids) -> Ids:
        """Return every token's document number within its row, masked or not; padding counts as one more."""
        tokens = padded[self.tokens]
        ids = padded[self.documents] if self.documents else np.zeros_like(tokens)
        begins = np.zeros(tokens.shape, dtype=bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        begins |= np.arange(tokens.shape[1]) == lengths[:, None]
        return begins.cumsum(axis=1)

    def _documents(self, runs: Ids, is_real: npt.NDArray[np.bool_]) -> Ids | None:
        """Return every token's document, PADDING for none; None if a causal mask hides all that must be hidden."""
        if self.documents:
            return np.where(is_real, runs, PADDING)
        is_prefix = not (is_real[:, 1:] & ~is_real[:, :-1]).any()
        return None if is_prefix else np.where(is_real, 0, PADDING)


def uneven_widths(count: int, max_tokens: int, *, has_fixed_width: bool) -> str:
    """Return, by key or size, the width of micro-batches that is not divisible by `count`; "" if all are."""
    if max_tokens % count:
        return f"task.params.max_tokens: {max_tokens}"
    if _WIDTH_MULTIPLE % count and not has_fixed_width:
        return f"rows that are padded to a multiple of {_WIDTH_MULTIPLE} tokens (task.params.fixed_width: false)"
    return ""


def _positions(runs: Ids) -> Ids:
    """Return how many tokens of its document precede each token."""
    places = np.arange(runs.shape[1])
    begins = np.ones(runs.shape, dtype=bool)
    begins[:, 1:] = runs[:, 1:] != runs[:, :-1]
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
