"""Rows of tokens as tensors for a language model: padded late, with the positions to be predicted.

Targets are the next tokens of the same document that are not masked. Only their positions enter the loss, so their
number is known before a device has computed anything.

One of several ranks may compute some tokens of each row. Of twice as many runs of tokens as parts, each part has one
from the left and its mirror image from the right, so that all parts have equal work in causal attention (as in Llama 3,
Grattafiori et al. 2024, section 3.3.2).

A dataset's token ids are checked against the model's vocabulary before training, and rejected with row and remedy.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_train.data.arrow.numbers import first_incomplete, lengths_of, pad_lists, plain_name
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.value_ranges import first_outside, outside
from elastic_train.errors import ConfigError, DataError
from elastic_train.parallel.attention.documents import Documents
from elastic_train.parallel.attention.kernels import masks_documents
from elastic_train.system.wording import sdk_errors
from elastic_train.tasks.placements import ContextPart
from elastic_train.tasks.task import ON_HOST, Batch

IGNORED = -100
"""Label of a token that is no target; the usual convention."""
_WIDTH_MULTIPLE = 8

ENDS = f"ends{ON_HOST}"
PADDING = -1
"""Document number of tokens that belong to none."""

TOKENIZER = "tokenizer.json"
Ids = npt.NDArray[np.int64]
_TOKENISE = (
    "Text becomes token ids as it is imported: by `elastic-train data import text OUT FILES`, which trains a "
    "tokenizer, or by `data import rows` with --tokenizer"
)
_INTEGER_LISTS = re.compile(r"(large_)?list<.*: u?int(8|16|32|64)( not null)?>")


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

        With documents, or a mask inside a row, also `positions` and `documents`, of the tokens' shape; and unless a
        document has masked tokens inside, `ends_on_host` (`parallel.attention.documents`). Raise DataError with a
        sample for missing values, lists of differing lengths, and ids outside [0, vocabulary).
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
            if (ends := _ends(documents)) is not None:
                batch[ENDS] = ends
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


def _ends(documents: Ids) -> npt.NDArray[np.int32] | None:
    """Return the ends of documents in rows as one sequence, filled up; None if a document is not one run of tokens."""
    begins = np.ones(documents.shape, dtype=bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    again = begins[:, 1:] & (documents[:, 1:] == np.maximum.accumulate(documents, axis=1)[:, :-1])
    if (again & (documents[:, 1:] != PADDING)).any():
        return None
    starts = np.flatnonzero(begins)
    ends = np.full(documents.size + 1, documents.size, dtype=np.int32)
    ends[: len(starts)] = starts
    return ends


def tokens_of(width: int, number: int, count: int) -> Tensor:
    """Return the ascending positions of a part's tokens, in rows of a width that is a multiple of 2 * count."""
    run = width // (2 * count)
    left, right = number * run, (2 * count - 1 - number) * run
    return torch.cat((torch.arange(left, left + run), torch.arange(right, right + run)))


def causal_within(documents: Tensor) -> Tensor:
    """Return which tokens each token sees: those of its document up to itself; (rows, 1, width, width) of bool."""
    width = documents.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def sight_of(batch: Batch) -> Documents | Tensor | None:
    """Return what the tokens of whole rows see: their documents, or a mask; None if all before them."""
    documents, ends = batch.get("documents"), batch.get(ENDS)
    if documents is None:
        return None
    if ends is None or masks_documents(documents.device):
        return causal_within(documents)
    return Documents.of(ends, documents.device)


def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as a bias on attention scores: all blocks then share one tensor instead of making their own."""
    if torch.is_autocast_enabled(mask.device.type):
        dtype = torch.get_autocast_dtype(mask.device.type)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def part_of(batch: Batch, part: ContextPart) -> Batch:
    """Return a part of the output of `TokenColumns.collate`.

    It has the part's `tokens` and `positions` (rows, width of the part), `places` in their flat form, and `targets`, as
    a micro-batch does; `mask` (rows or 1, 1, width of the part, width of all) is true where a token of the part sees
    one of all parts', in part order.
    """
    tokens, device = batch["tokens"], batch["tokens"].device
    width = tokens.shape[1]
    missing = -width % (part.count * math.lcm(2, part.multiple))
    by_part = [tokens_of(width + missing, number, part.count).to(device) for number in range(part.count)]
    mine, all_of_them = by_part[part.number], torch.cat(by_part)
    mask = (all_of_them <= mine[:, None])[None, None]
    positions, in_row = batch.get("positions"), mine.clamp(max=width - 1)  # a model may have no positions for padding
    if (documents := batch.get("documents")) is not None:
        padded = F.pad(documents, (0, missing), value=PADDING)
        mask = mask & (padded[:, mine, None] == padded[:, None, all_of_them])[:, None]
    number_of = torch.full((width + missing,), -1, device=device)
    number_of[mine] = torch.arange(len(mine), device=device)
    row, place = batch["places"] // width, number_of[batch["places"] % width]
    is_mine = place >= 0
    return {
        "tokens": F.pad(tokens, (0, missing))[:, mine],
        "positions": in_row[None] if positions is None else F.pad(positions, (0, missing))[:, mine],
        "places": (row * len(mine) + place)[is_mine],
        "targets": batch["targets"][is_mine],
        "mask": mask,
    }


def check_lists(manifest: Manifest, *columns: str) -> None:
    """Reject missing columns, and those that are not lists of integers."""
    for name in columns:
        if name not in manifest.columns:
            is_text = any(plain_name(kind) in ("string", "large_string") for kind in manifest.columns.values())
            there = f"{manifest.url}: no column '{name}'; it has {', '.join(manifest.columns)}"
            raise DataError(f"{there}. {_TOKENISE}" if is_text else there)
        if not _INTEGER_LISTS.fullmatch(plain_name(manifest.columns[name])):
            raise DataError(f"{manifest.url}: column '{name}' is {manifest.columns[name]}, not a list of integers")


def check_token_ids(manifest: Manifest, column: str, vocabulary: int) -> None:
    """Reject a dataset with token ids outside a model's vocabulary; name the first such row.

    Rows are read only if the manifest does not have the tokenizer's vocabulary size.
    """
    if manifest.vocabulary_size is not None:
        if manifest.vocabulary_size > vocabulary:
            raise ConfigError(
                f"{manifest.url}: its tokenizer has {manifest.vocabulary_size} token ids, the model takes "
                f"{vocabulary}: {_REMEDY}"
            )
        return
    found = first_outside(manifest, column, 0, vocabulary)
    if found is not None:
        raise DataError(
            f"{manifest.url}: {found} has token id {found.value} in column '{column}', the model takes those from 0 to "
            f"{vocabulary - 1}: {_REMEDY}"
        )


_REMEDY = "make the model's vocabulary larger, or tokenise the text with the model's own tokenizer"


def unfit_tokens(rows: pa.Table, name: str, vocabulary: int, exempt: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield the rows with a token id outside [0, vocabulary), except `exempt`, and the reason."""
    for row, value in zip(*outside(rows.column(name), 0, vocabulary, exempt), strict=True):
        why = f"it has {value} in column '{name}', the model takes token ids from 0 to {vocabulary - 1}: {_REMEDY}"
        yield int(row), why


def check_range(values: Ids, ids: Ids, column: str, vocabulary: int) -> None:
    """Reject micro-batches, (rows, width), with ids outside [0, vocabulary); name a sample of `ids`."""
    if values.size and (values.min() < 0 or values.max() >= vocabulary):
        row, place = np.argwhere((values < 0) | (values >= vocabulary))[0]
        raise DataError(
            f"sample {ids[row]} has {values[row, place]} in column '{column}', the model takes token ids from 0 to "
            f"{vocabulary - 1}: make its vocabulary larger, or tokenise the text with its own tokenizer"
        )


def check_tokenizer(manifest: Manifest, folder: Path) -> None:
    """Reject a dataset whose tokenizer assigns other ids than the one in a model's folder.

    If either has no tokenizer.json, nothing is rejected.
    """
    theirs = folder / TOKENIZER
    if manifest.tokenizer is None or not theirs.is_file():
        return
    content, where = theirs.read_bytes(), f"{manifest.url.rstrip('/')}/{manifest.tokenizer}"
    if hashlib.sha256(content).hexdigest() == manifest.tokenizer_sha256:
        return
    try:
        with fsspec.open(where, "rb") as file:
            mine = _ids_of(file.read())
    except sdk_errors(OSError, ValueError) as error:
        raise DataError(f"{where}: cannot be read: {error}") from error
    other = _ids_of(content)
    wrong = next((token for token in mine if other.get(token) != mine[token]), None)
    if wrong is not None:
        raise DataError(
            f"{where}: token {wrong!r} has id {mine[wrong]}, in {theirs} it has {other.get(wrong, 'none')}: the "
            "data was tokenised for another model; tokenise it again with the model's tokenizer.json"
        )


def _ids_of(content: bytes) -> Mapping[str, int]:
    """Return the token ids of a tokenizer.json: the model's, and added ones."""
    found = json.loads(content)
    known = found.get("model", {}).get("vocab", {})
    if isinstance(known, list):  # Unigram: tokens with scores, by id
        known = {token: number for number, (token, _) in enumerate(known)}
    return {**known, **{added["content"]: added["id"] for added in found.get("added_tokens", ())}}


def check_same_tokens(known: Manifest, other: Manifest) -> None:
    """Reject a validation set or mixture source tokenised differently from the training set."""
    mine, theirs = known.tokenizer_sha256, other.tokenizer_sha256
    if mine is not None and theirs is not None and mine != theirs:
        raise DataError(
            f"{other.url}: its token ids differ from those of {known.url}, so what was learned there means something "
            "else here; tokenise both with one tokenizer.json, or import them together"
        )
