"""Documents to pack: the token ids of each row of a source, made of its text or taken as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from elastic_train.data.arrow.numbers import numbers_of
from elastic_train.data.corpora.tokenizer import GivenTokenizer, read_tokenizer
from elastic_train.data.dataset.manifest import NAME, load_manifest
from elastic_train.data.packing.bins import Tokens
from elastic_train.data.tables.files import Chunk
from elastic_train.data.tables.importing import texts_of
from elastic_train.data.tables.labels import column_of
from elastic_train.data.tables.splitting import TRAIN, VALIDATION
from elastic_train.errors import ConfigError

USUAL = ("input_ids", "text")


@dataclass(frozen=True, slots=True)
class Sources:
    """Files of each part that is given, and the tokenizer that made their tokens, if they are datasets with one."""

    parts: Mapping[str, Sequence[Path]]
    tokenizer: Path | None = None


def sources_of(given: Sequence[Path]) -> Sources:
    """Return the files to read: those given, and those of datasets among them; of one dataset, its two parts."""
    if not given:
        raise ConfigError("name at least one file or dataset to pack")
    parts = [given[0] / name for name in (TRAIN, VALIDATION) if (given[0] / name / NAME).exists()]
    if len(given) == 1 and parts:
        return Sources({part.name: _files_of(part) for part in parts}, _tokenizer_of(parts[0]))
    files = [file for path in given for file in (_files_of(path) if path.is_dir() else [path])]
    return Sources({TRAIN: files}, next(filter(None, map(_tokenizer_of, given)), None))


class Documents:
    """Turns rows into documents; `end` is a token id that is put after each of them."""

    def __init__(self, column: str | None, tokenizer: GivenTokenizer | None, end: int | None) -> None:
        self._column, self._tokenizer = column, tokenizer
        self._end = np.array([] if end is None else [end], dtype=np.int32)

    def of(self, chunk: Chunk) -> Iterator[Tokens]:
        """Yield the tokens of each row, none for an empty one; ConfigError names the row that cannot be used."""
        name = self._column or next((name for name in USUAL if name in chunk.rows.schema.names), USUAL[-1])
        column = column_of(chunk, name, "--column")
        is_tokens = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        for tokens in self._given(chunk, name, column) if is_tokens else self._made(chunk, name):
            yield np.concatenate([tokens, self._end]) if len(tokens) else tokens

    def _made(self, chunk: Chunk, name: str) -> Iterator[Tokens]:
        if self._tokenizer is None:
            raise ConfigError(f"column '{name}' is text: name a tokenizer.json with --tokenizer")
        texts = texts_of(chunk, name)
        filled = [text for text in texts if text]  # what a tokenizer puts around a text is not a document
        made = iter(self._tokenizer.ids_of(filled))
        yield from (next(made) if text else np.zeros(0, dtype=np.int32) for text in texts)

    def _given(self, chunk: Chunk, name: str, column: pa.Array) -> Iterator[Tokens]:
        if not pa.types.is_integer(column.type.value_type):
            raise ConfigError(f"{chunk.path}: column '{name}' is {column.type}, not lists of token ids (--column)")
        most = self._tokenizer.vocabulary_size if self._tokenizer else 1 << 31
        values = column.flatten()
        is_wrong = pc.fill_null(pc.or_kleene(pc.less(values, 0), pc.greater_equal(values, most)), True)
        at = pc.index(is_wrong, True).as_py()
        row = pc.index(pc.is_null(column), True).as_py() if at < 0 else pc.list_parent_indices(column)[at].as_py()
        if row >= 0:
            what = "no list" if at < 0 else f"the token id {values[at].as_py()}"
            raise ConfigError(
                f"{chunk.place_of(row)}: has {what} under '{name}'; ids are whole numbers from 0 to {most - 1}: "
                "correct the row, or name the tokenizer that made it"
            )
        ends = np.cumsum(numbers_of(pc.list_value_length(column)))
        yield from np.split(numbers_of(values.cast(pa.int32())), ends[:-1])


def tokenizer_for(wanted: Path | None, sources: Sources) -> GivenTokenizer | None:
    """Read the tokenizer that was asked for, or the one that the sources' tokens are of."""
    path = wanted or sources.tokenizer
    return read_tokenizer(path) if path else None


def _files_of(folder: Path) -> list[Path]:
    """Return the files of a dataset in the order of its sample ids."""
    if not (folder / NAME).exists():
        raise ConfigError(f"{folder}: has no {NAME}; name a dataset, or files one by one")
    return [folder / entry.path for entry in load_manifest(str(folder)).files]


def _tokenizer_of(path: Path) -> Path | None:
    if not (path / NAME).exists():
        return None
    name = json.loads((path / NAME).read_text()).get("tokenizer")
    return path / name if name else None
