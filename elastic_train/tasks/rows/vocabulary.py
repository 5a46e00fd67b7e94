"""Whether a dataset's token ids are the model's: refused before training, with the row, and what to do."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_train.data.arrow.plain_types import plain_name
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.value_ranges import first_outside, outside
from elastic_train.errors import ConfigError, DataError
from elastic_train.system.sdk_errors import sdk_errors

TOKENIZER = "tokenizer.json"
Ids = npt.NDArray[np.int64]
_TOKENISE = (
    "Text becomes token ids as it is imported: by `elastic-train data import text OUT FILES`, which trains a "
    "tokenizer, or by `data import rows` with --tokenizer"
)
_INTEGER_LISTS = re.compile(r"(large_)?list<.*: u?int(8|16|32|64)( not null)?>")


def check_lists(manifest: Manifest, *columns: str) -> None:
    """Refuse columns that there are not, or that are no lists of integers."""
    for name in columns:
        if name not in manifest.columns:
            is_text = any(plain_name(kind) in ("string", "large_string") for kind in manifest.columns.values())
            there = f"{manifest.url}: no column '{name}'; it has {', '.join(manifest.columns)}"
            raise DataError(f"{there}. {_TOKENISE}" if is_text else there)
        if not _INTEGER_LISTS.fullmatch(plain_name(manifest.columns[name])):
            raise DataError(f"{manifest.url}: column '{name}' is {manifest.columns[name]}, not a list of integers")


def check_token_ids(manifest: Manifest, column: str, vocabulary: int) -> None:
    """Refuse a dataset with token ids that a model of so many does not have; names the first row that has one.

    Rows are looked at only if the manifest does not say how many ids its tokenizer has.
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
    """Yield the rows that have a token id outside of [0, vocabulary), but for an `exempt` one, and the reason."""
    for row, value in zip(*outside(rows.column(name), 0, vocabulary, exempt), strict=True):
        why = f"it has {value} in column '{name}', the model takes token ids from 0 to {vocabulary - 1}: {_REMEDY}"
        yield int(row), why


def check_range(values: Ids, ids: Ids, column: str, vocabulary: int) -> None:
    """Refuse micro-batches, (rows, width), with ids that are not in [0, vocabulary); names a sample of `ids`."""
    if values.size and (values.min() < 0 or values.max() >= vocabulary):
        row, place = np.argwhere((values < 0) | (values >= vocabulary))[0]
        raise DataError(
            f"sample {ids[row]} has {values[row, place]} in column '{column}', the model takes token ids from 0 to "
            f"{vocabulary - 1}: make its vocabulary larger, or tokenise the text with its own tokenizer"
        )


def check_tokenizer(manifest: Manifest, folder: Path) -> None:
    """Refuse a dataset whose tokenizer gives tokens other ids than the one in a model's folder.

    Where either has no tokenizer.json, nothing is known and nothing refused.
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
    """Return the ids of the tokens of a tokenizer.json: of its model, and those that were added."""
    found = json.loads(content)
    known = found.get("model", {}).get("vocab", {})
    if isinstance(known, list):  # Unigram: tokens with their scores, by id
        known = {token: number for number, (token, _) in enumerate(known)}
    return {**known, **{added["content"]: added["id"] for added in found.get("added_tokens", ())}}


def check_same_tokens(known: Manifest, other: Manifest) -> None:
    """Refuse a validation set, or a source of a mixture, that was tokenised otherwise than the training set."""
    mine, theirs = known.tokenizer_sha256, other.tokenizer_sha256
    if mine is not None and theirs is not None and mine != theirs:
        raise DataError(
            f"{other.url}: its token ids differ from those of {known.url}, so what was learned there means something "
            "else here; tokenise both with one tokenizer.json, or import them together"
        )
