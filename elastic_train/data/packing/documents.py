"""Documents to pack: token ids of each source row, made from text or taken as they are, with labels.

A labelled document has shape (tokens, 2): each token, and the target at its position, or IGNORED.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from elastic_train.core.arrays import Int64s
from elastic_train.data.arrow.numbers import numbers_of
from elastic_train.data.corpora.tokenizer import GivenTokenizer, read_tokenizer
from elastic_train.data.dataset.manifest import NAME, TRAIN, VALIDATION, load_manifest
from elastic_train.data.packing.bins import Tokens
from elastic_train.data.tables.files import Chunk
from elastic_train.data.tables.importing import texts_of
from elastic_train.data.tables.labels import column_of
from elastic_train.errors import ConfigError

USUAL = ("input_ids", "text")
LABELS, MASK = "labels", "attention_mask"
IGNORED = -100
"""Label of a token that is no target; the usual convention."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Files of each part, and the tokenizers of those that are datasets with one."""

    parts: Mapping[str, Sequence[Path]]
    tokenizers: Sequence[Path] = ()


def sources_of(given: Sequence[Path]) -> Sources:
    """Return the files to read: those given, and those of given datasets; of a single dataset, both parts."""
    if not given:
        raise ConfigError("name at least one file or dataset to pack")
    parts = [given[0] / name for name in (TRAIN, VALIDATION) if (given[0] / name / NAME).exists()]
    if len(given) == 1 and parts:
        return Sources({part.name: _files_of(part) for part in parts}, _tokenizers_of(parts))
    files = [file for path in given for file in (_files_of(path) if path.is_dir() else [path])]
    return Sources({TRAIN: files}, _tokenizers_of(given))


class Documents:
    """Turns rows into documents; `end` is a token id appended to each.

    Lists of token ids have labels if there is a column of that name. Tokens that a mask hides at either end are
    padding, and dropped.
    """

    def __init__(self, column: str | None, tokenizer: GivenTokenizer | None, end: int | None) -> None:
        self._column, self._tokenizer, self._end = column, tokenizer, end
        self._has_labels: bool | None = None

    def of(self, chunk: Chunk) -> Iterator[Tokens]:
        """Yield the tokens of each row, none for an empty one; raise ConfigError with the row if it is unusable."""
        name = self._column or next((name for name in USUAL if name in chunk.rows.schema.names), USUAL[-1])
        column = column_of(chunk, name, "--column")
        is_tokens = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        self._check_labels(chunk, has_labels=is_tokens and LABELS in chunk.rows.schema.names)
        for tokens in self._given(chunk, name) if is_tokens else self._made(chunk, name):
            yield np.concatenate([tokens, self._end_of(tokens)]) if len(tokens) else tokens

    def _check_labels(self, chunk: Chunk, *, has_labels: bool) -> None:
        """Reject a source in which some rows have labels and others none: packed rows could not tell them apart."""
        if self._has_labels is False and has_labels:  # a missing column is reported when reading
            raise ConfigError(
                f"{chunk.path}: has a column '{LABELS}', and the files before it have none: pack them apart, or give "
                "all rows labels"
            )
        self._has_labels = has_labels

    def _end_of(self, tokens: Tokens) -> Tokens:
        """Return the token that ends a document, a target if the last token is one; empty if not requested."""
        if self._end is None:
            return tokens[:0]
        if tokens.ndim == 1:
            return np.array([self._end], dtype=np.int32)
        return np.array([[self._end, IGNORED if tokens[-1, 1] == IGNORED else self._end]], dtype=np.int32)

    def _made(self, chunk: Chunk, name: str) -> Iterator[Tokens]:
        if self._tokenizer is None:
            raise ConfigError(f"column '{name}' is text: name a tokenizer.json with --tokenizer")
        texts = texts_of(chunk, name)
        filled = [text for text in texts if text]  # tokens that a tokenizer adds are not a document
        made = iter(self._tokenizer.ids_of(filled))
        yield from (next(made) if text else np.zeros(0, dtype=np.int32) for text in texts)

    def _given(self, chunk: Chunk, name: str) -> Iterator[Tokens]:
        most = self._tokenizer.vocabulary_size if self._tokenizer else 1 << 31
        lists = [_whole_numbers(chunk, name, range(most))]
        if self._has_labels:
            lists.append(_whole_numbers(chunk, LABELS, range(most), or_else=IGNORED))
            _check_lengths(chunk, LABELS, name)
        values = lists[0] if len(lists) == 1 else np.stack(lists, axis=1)
        documents = np.split(values, np.cumsum(_lengths(chunk, name))[:-1])
        if MASK not in chunk.rows.schema.names:
            yield from documents
            return
        masks = _whole_numbers(chunk, MASK, range(2))
        _check_lengths(chunk, MASK, name)
        for row, mask in enumerate(np.split(masks, np.cumsum(_lengths(chunk, name))[:-1])):
            yield documents[row][_unpadded(chunk, row, mask)]


def _whole_numbers(chunk: Chunk, name: str, known: range, or_else: int | None = None) -> Tokens:
    """Return all values of a list column, concatenated; raise ConfigError with the first invalid row."""
    column = chunk.rows.column(name)
    is_lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if not is_lists or not pa.types.is_integer(column.type.value_type):
        raise ConfigError(f"{chunk.path}: column '{name}' is {column.type}, not lists of token ids (--column)")
    values = column.flatten()
    is_wrong = pc.or_kleene(pc.less(values, known.start), pc.greater_equal(values, known.stop))
    if or_else is not None:
        is_wrong = pc.and_kleene(is_wrong, pc.not_equal(values, or_else))
    at = pc.index(pc.fill_null(is_wrong, True), True).as_py()
    row = pc.index(pc.is_null(column), True).as_py() if at < 0 else pc.list_parent_indices(column)[at].as_py()
    if row >= 0:
        what = "no list" if at < 0 else f"the token id {values[at].as_py()}"
        ids = f"ids are whole numbers from 0 to {known.stop - 1}{'' if or_else is None else f', or {or_else}'}"
        raise ConfigError(
            f"{chunk.place_of(row)}: has {what} under '{name}'; {ids}: correct the row, or name the tokenizer that "
            "made it"
        )
    return numbers_of(values.cast(pa.int32()))


def _lengths(chunk: Chunk, name: str) -> Int64s:
    return numbers_of(pc.list_value_length(chunk.rows.column(name))).astype(np.int64)


def _check_lengths(chunk: Chunk, name: str, tokens: str) -> None:
    """Reject a list without one value per token."""
    has, needs = _lengths(chunk, name), _lengths(chunk, tokens)
    if (has != needs).any():
        row = int(np.flatnonzero(has != needs)[0])
        raise ConfigError(
            f"{chunk.place_of(row)}: has {has[row]} values under '{name}', but {needs[row]} under '{tokens}': give one "
            "for each token"
        )


def _unpadded(chunk: Chunk, row: int, mask: Tokens) -> slice:
    """Return the range of tokens that a mask shows; raise ConfigError if it hides some between them."""
    shown = np.flatnonzero(mask)
    if not len(shown):
        return slice(0, 0)
    lo, hi = int(shown[0]), int(shown[-1]) + 1
    if len(shown) != hi - lo:
        raise ConfigError(
            f"{chunk.place_of(row)}: '{MASK}' hides tokens between others, which packed rows cannot: leave these "
            "tokens out, or the column"
        )
    return slice(lo, hi)


def tokenizer_for(wanted: Path | None, sources: Sources) -> GivenTokenizer | None:
    """Return the tokenizer of the tokens; raise ConfigError if none was named and datasets have several."""
    found = [read_tokenizer(path) for path in ([wanted] if wanted else sources.tokenizers)]
    for path, other in zip(sources.tokenizers, found, strict=False):
        if other.sha256 != found[0].sha256:
            raise ConfigError(
                f"{path}: is another tokenizer than {sources.tokenizers[0]}, so equal token ids mean different texts: "
                "pack the datasets apart, or import them with one --tokenizer"
            )
    return found[0] if found else None


def _files_of(folder: Path) -> list[Path]:
    """Return the files of a dataset in sample id order."""
    if not (folder / NAME).exists():
        raise ConfigError(f"{folder}: has no {NAME}; name a dataset, or files one by one")
    return [folder / entry.path for entry in load_manifest(str(folder)).files]


def _tokenizers_of(paths: Sequence[Path]) -> list[Path]:
    manifests = [(path, json.loads((path / NAME).read_text())) for path in paths if (path / NAME).exists()]
    return [path / found["tokenizer"] for path, found in manifests if found.get("tokenizer")]
