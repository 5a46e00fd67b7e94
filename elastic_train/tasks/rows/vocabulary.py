"""Check a dataset's token ids against the model's: reject before training, with row and remedy."""

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

from elastic_train.data.arrow.numbers import plain_name
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.value_ranges import first_outside, outside
from elastic_train.errors import ConfigError, DataError
from elastic_train.system.wording import sdk_errors

TOKENIZER = "tokenizer.json"
Ids = npt.NDArray[np.int64]
_TOKENISE = (
    "Text becomes token ids as it is imported: by `elastic-train data import text OUT FILES`, which trains a "
    "tokenizer, or by `data import rows` with --tokenizer"
)
_INTEGER_LISTS = re.compile(r"(large_)?list<.*: u?int(8|16|32|64)( not null)?>")


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
