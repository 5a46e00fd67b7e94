"""Turn samples into a dataset: split, train the tokeniser, shuffle, write both parts with manifests.

A text's hash decides its part, so equal texts are never in both, even under two labels; every label with at least two
texts is in both. Rows are permuted before writing, so every file mixes all labels.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.data.corpora import docstrings, origin
from elastic_train.data.corpora import tokenizer as tokenise
from elastic_train.data.corpora.origin import Sample
from elastic_train.data.dataset.manifest import SHARE, TRAIN, VALIDATION, Manifest, build_manifest
from elastic_train.data.dataset.row_lengths import note_lengths
from elastic_train.data.dataset.schemas import PLAIN, POLICY, Schema
from elastic_train.data.tables.files import has_header, header_of, opened
from elastic_train.data.tables.importing import Written, load_parts
from elastic_train.data.tables.objects import read_objects
from elastic_train.errors import ConfigError
from elastic_train.system.progress_bar import Track, silent

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROWS_PER_GROUP = 512
ROWS_PER_FILE = 8192
MIN_FILES = 4
MISSING_SHARE = 0.07
MOST_NAMED = 10
"""Most unusable rows that an error names."""
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Options:
    """Options of every import: number of samples, seed, vocabulary size, most tokens of a text.

    `skips` leaves out rows that cannot be used.
    """

    num_samples: int = 28_000
    seed: int = 7
    vocabulary: int = tokenise.VOCABULARY
    max_tokens: int = 512
    replace: bool = False
    skips: bool = False


DEFAULTS = Options()


def import_docstrings(
    out: Path, options: Options = DEFAULTS, *, site_packages: Path | None = None, track: Track = silent
) -> Written:
    """Make a dataset of the docstrings in `site_packages` (default: the running interpreter's)."""
    folder = site_packages or docstrings.site_packages()
    made_from = _origin("docstrings", options, libraries=docstrings.versions(folder))
    if origin.is_finished(out, made_from, replace=options.replace):
        return load_parts(out)
    samples = docstrings.read_docstrings(folder, options.num_samples, options.seed, track=track)
    return _write(out, {TRAIN: samples}, POLICY, made_from, options, track)


def import_text(
    out: Path,
    parts: Mapping[str, Sequence[Path]],
    options: Options = DEFAULTS,
    *,
    text_key: str = "text",
    label_key: str = "label",
    track: Track = silent,
) -> Written:
    """Make a dataset of a user's own files, with every row, whatever `options.num_samples` says.

    Without a 'validation' part, a tenth of the texts is kept for validation.
    """
    left_out: list[str] | None = [] if options.skips else None
    samples: dict[str, list[Sample]] = {}
    for name, files in parts.items():
        num_before = len(left_out or ())
        samples[name] = read_samples(files, text_key, label_key, left_out)
        if left_out and not samples[name]:
            wrong = left_out[num_before:][:MOST_NAMED]
            raise ConfigError(*wrong, f"no row of the {'training' if name == TRAIN else name} files can be used")
    content = [(name, sample.text, sample.label) for name, of_part in samples.items() for sample in of_part]
    made_from = _origin("text", options, content_sha256=hashlib.sha256(repr(content).encode()).hexdigest())
    if origin.is_finished(out, made_from, replace=options.replace):
        return load_parts(out)
    return replace(_write(out, samples, PLAIN, made_from, options, track), left_out=tuple(left_out or ()))


def _origin(source: str, options: Options, **facts: object) -> dict[str, object]:
    """Return everything that the bytes of a dataset depend on."""
    return {
        "source": source,
        "num_samples": options.num_samples,
        "seed": options.seed,
        "vocabulary": options.vocabulary,
        "max_tokens": options.max_tokens,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "tokenizers": tokenise.version(),
        "pyarrow": pa.__version__,
        **facts,
    }


def _write(
    out: Path,
    parts: Mapping[str, Sequence[Sample]],
    schema: Schema,
    made_from: origin.Origin,
    options: Options,
    track: Track,
) -> Written:
    samples = parts[TRAIN]
    labels = tuple(label for label, _ in sorted(Counter(s.label for s in samples).items(), key=lambda i: (-i[1], i[0])))
    if len(labels) < 2:
        raise ConfigError(f"the texts have one label, {', '.join(labels)}; a classifier needs at least 2")
    if VALIDATION in parts:
        train, validation = samples, parts[VALIDATION]
        if unknown := sorted({sample.label for sample in validation} - {*labels}):
            raise ConfigError(
                f"the validation texts have labels that no training text has: {', '.join(unknown)}; correct them, or "
                "add training texts with these labels"
            )
    else:
        train, validation = split(samples, options.seed)
    if not train or not validation:
        raise ConfigError(f"{len(samples)} texts are too few to keep {SHARE:.0%} of them for validation")
    stages = iter(track(("tokeniser", "train", "validation"), "tokenising and writing", 3, "stages"))
    next(stages)
    tokenizer = tokenise.train_tokenizer((sample.text for sample in train), options.vocabulary)
    with origin.filled(out, made_from) as folder:
        for name, part in ((TRAIN, train), (VALIDATION, validation)):
            next(stages)
            _write_part(folder / name, part, labels, schema, tokenizer, options)
    next(stages, None)
    return replace(load_parts(out), is_new=True)


def split(samples: Sequence[Sample], seed: int) -> tuple[list[Sample], list[Sample]]:
    """Split samples into training and validation: the tenth of each label with the smallest hashes validates."""
    by_label: dict[str, dict[bytes, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    owner: dict[bytes, str] = {}  # a text under several labels goes where the first one puts it
    for sample in samples:
        key = hashlib.sha256(f"{seed}/{sample.text}".encode(errors="replace")).digest()
        by_label[owner.setdefault(key, sample.label)][key].append(sample)
    train: list[Sample] = []
    validation: list[Sample] = []
    for texts in by_label.values():
        num_validation = max(1, round(len(texts) * SHARE)) if len(texts) > 1 else 0
        for place, key in enumerate(sorted(texts)):
            (validation if place < num_validation else train).extend(texts[key])
    return train, validation


def _write_part(
    folder: Path,
    samples: Sequence[Sample],
    labels: Sequence[str],
    schema: Schema,
    tokenizer: Tokenizer,
    options: Options,
) -> Manifest:
    """Write one part: its files, tokenizer.json, and the manifest."""
    folder.mkdir()
    rng = np.random.default_rng([options.seed, len(samples)])
    table = _table([samples[place] for place in rng.permutation(len(samples))], labels, schema, tokenizer, options, rng)
    num_files = min(len(samples), max(MIN_FILES, -(-len(samples) // ROWS_PER_FILE)))
    bounds = [len(samples) * number // num_files for number in range(num_files + 1)]
    for number, (lo, hi) in enumerate(pairwise(bounds)):
        path = folder / f"part-{number:05d}.parquet"
        pq.write_table(table.slice(lo, hi - lo), path, row_group_size=ROWS_PER_GROUP, compression="zstd")
    content = tokenizer.to_str().encode()
    (folder / tokenise.FILE_NAME).write_bytes(content)
    manifest = build_manifest(
        str(folder),
        label_column=schema.label,
        labels=tuple(labels),
        schema_name=schema.name,
        numeric_columns=schema.numeric,
        categorical_columns=schema.categorical,
        tokenizer=tokenise.FILE_NAME,
        tokenizer_sha256=hashlib.sha256(content).hexdigest(),
        vocabulary_size=tokenizer.get_vocab_size(),
    )
    note_lengths(manifest)
    return manifest


def _table(
    samples: Sequence[Sample],
    labels: Sequence[str],
    schema: Schema,
    tokenizer: Tokenizer,
    options: Options,
    rng: np.random.Generator,
) -> pa.Table:
    """Return the rows in sample order; some metadata values are dropped, as happens in practice."""
    number_of = {label: number for number, label in enumerate(labels)}
    chunks = [samples[first : first + _CHUNK] for first in range(0, len(samples), _CHUNK)]
    ids = [tokenise.encode(tokenizer, [sample.text for sample in chunk], options.max_tokens) for chunk in chunks]
    columns: dict[str, list[object]] = {
        "input_ids": [row for chunk in ids for row in chunk],
        schema.label: [number_of[sample.label] for sample in samples],
    }
    metadata = zip(*((*sample.numeric, *sample.categorical) for sample in samples), strict=True)
    for name, values in zip((*schema.numeric, *schema.categorical), metadata, strict=True):
        known = sum(value is not None for value in values) / len(values)
        # Where many values are unknown anyway, fewer are dropped: at least MISSING_SHARE is missing.
        drop = max(0.0, 1 - (1 - MISSING_SHARE) / known) if known else 0.0
        columns[name] = [
            None if missing else value for value, missing in zip(values, rng.random(len(values)) < drop, strict=True)
        ]
    return pa.table(columns, schema=schema.columns)


def read_samples(
    files: Sequence[Path], text_key: str, label_key: str, left_out: list[str] | None = None
) -> list[Sample]:
    """Read samples in file order; raise ConfigError with file and row of the first unusable rows.

    With a list of rows to be left out, unusable rows are added there.
    """
    if not files:
        raise ConfigError("name at least one file to import: .jsonl, .csv or .txt")
    samples: list[Sample] = []
    wrong = left_out if left_out is not None else []
    for path in files:
        for sample in _read(path, text_key, label_key):
            if isinstance(sample, Sample):
                samples.append(sample)
            else:
                wrong.append(sample)
            if left_out is None and len(wrong) == MOST_NAMED:
                raise ConfigError(*wrong, "later rows were not read")
    if wrong and left_out is None:
        raise ConfigError(*wrong)
    return samples


def _read(path: Path, text_key: str, label_key: str) -> Iterator[Sample | str]:
    """Yield a file's samples, and what is wrong with the other rows."""
    if path.suffix.lower() == ".txt":
        yield from _paragraphs(path)
        return
    header = header_of(path) if has_header(path) else []
    options = {
        f"'{key}'": name for key, name in ((text_key, "--text-key"), (label_key, "--label-key")) if key not in header
    }
    if header and options:
        raise ConfigError(
            f"{path}: has no column {' and no column '.join(options)}; its columns: {', '.join(header)} (choose with "
            f"{' and '.join(options.values())})"
        )
    for rows in read_objects([path]):
        for number, row in rows.values:
            place = f"{path}: row {number}"
            try:
                yield f"{place}: {row}" if isinstance(row, str) else _sample(row, text_key, label_key, place)
            except ConfigError as error:
                yield str(error)


def _sample(row: Mapping[str, object], text_key: str, label_key: str, place: str) -> Sample:
    label = _field(row, label_key, "--label-key", place)
    if origin.is_no_label(label):
        raise ConfigError(origin.no_label(place, label_key))
    return Sample(_field(row, text_key, "--text-key", place), label)


def _paragraphs(path: Path) -> Iterator[Sample]:
    """Yield the blocks of lines between blank lines, labelled with the file's stem."""
    with opened(path) as file:
        content = file.read().decode("utf-8-sig")
    blocks = "\n".join(line.rstrip() for line in content.replace("\r\n", "\n").split("\n")).split("\n\n")
    texts = [block.strip("\n") for block in blocks if block.strip()]
    if not texts:
        raise ConfigError(f"{path}: holds no text")
    yield from (Sample(text, path.stem) for text in texts)


def _field(row: Mapping[str, object], key: str, option: str, place: str) -> str:
    value = row.get(key)
    if value is None or value != value or isinstance(value, list | dict) or not str(value).strip():
        if key in row:
            raise ConfigError(f"{place}: '{key}' is empty or no text; correct the row, or leave it out (--skip-unfit)")
        known = ", ".join(row) or "none"
        raise ConfigError(f"{place}: no value under '{key}'; keys there: {known} (choose with {option})")
    return str(value)
