"""Imports: a split without common texts, the documented columns, a tokeniser beside the data, the same bytes again."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from elastic_train.data.corpora import origin
from elastic_train.data.corpora.origin import Sample, measure
from elastic_train.data.dataset.manifest import Manifest, load_manifest
from elastic_train.data.dataset.row_lengths import load_lengths
from elastic_train.data.dataset.schemas import PLAIN, POLICY, Schema
from elastic_train.data.dataset.verify import verify
from elastic_train.data.tables import texts as corpora
from elastic_train.data.tables.importing import Written
from elastic_train.data.tables.texts import Options
from elastic_train.errors import ConfigError
from tests.elastic_train.data.corpora.test_docstrings import write_functions

pytestmark = pytest.mark.slow

OPTIONS = Options(num_samples=200, seed=3, vocabulary=600, max_tokens=16)


def write_texts(path: Path, num_rows: int = 60) -> Path:
    """Write JSON lines under three labels, the first the commonest."""
    rows = [
        {"text": f"text number {i} of {i % 7} words", "label": "aab"[i % 3] if i % 10 else "c"} for i in range(num_rows)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def table_of(manifest: Manifest) -> pa.Table:
    return pa.concat_tables(pq.read_table(f"{manifest.url}/{file.path}") for file in manifest.files)


def check_part(manifest: Manifest, schema: Schema) -> None:
    """Columns and types are the schema's, labels and tokens are never missing, the tokeniser is the one named."""
    rows = table_of(manifest)
    assert rows.schema.equals(schema.columns)
    assert (manifest.schema_name, manifest.label_column) == (schema.name, schema.label)
    assert (manifest.numeric_columns, manifest.categorical_columns) == (schema.numeric, schema.categorical)
    assert [rows.column(name).null_count for name in ("input_ids", schema.label)] == [0, 0]
    content = (Path(manifest.url) / "tokenizer.json").read_bytes()
    assert (manifest.tokenizer, manifest.tokenizer_sha256) == ("tokenizer.json", hashlib.sha256(content).hexdigest())
    assert manifest.vocabulary_size == Tokenizer.from_str(content.decode()).get_vocab_size()
    assert [verdict.wrong for verdict in verify(manifest)] == [None] * (len(manifest.files) + 2)


def texts_of(manifest: Manifest) -> list[tuple[str, str]]:
    """Return what the rows say: decoded text and the name of the label."""
    tokenizer = Tokenizer.from_file(f"{manifest.url}/tokenizer.json")
    rows = table_of(manifest)
    labels = rows.column(str(manifest.label_column)).to_pylist()
    texts = tokenizer.decode_batch(rows.column("input_ids").to_pylist())
    return [(text, (manifest.labels or ())[label]) for text, label in zip(texts, labels, strict=True)]


def test_text_becomes_rows(tmp_path: Path) -> None:
    """Every text comes back from its ids under its own label; labels are numbered by frequency; both parts agree."""
    path = write_texts(tmp_path / "a.jsonl")
    imported = corpora.import_text(tmp_path / "out", {"train": [path]}, Options(seed=3, vocabulary=600, max_tokens=100))
    for manifest in (imported.manifests[0], imported.manifests[1]):
        check_part(manifest, PLAIN)
        assert manifest.labels == ("a", "b", "c")
        tokens = table_of(manifest).column("input_ids").to_pylist()
        assert load_lengths(manifest)(np.arange(len(tokens))).tolist() == list(map(len, tokens))
    rows = [(row["text"], row["label"]) for row in map(json.loads, path.read_text().splitlines())]
    assert Counter(texts_of(imported.manifests[0]) + texts_of(imported.manifests[1])) == Counter(rows)
    assert (imported.manifests[0].num_rows, imported.manifests[1].num_rows) == (53, 7)


def test_texts_are_cut_at_max_tokens(tmp_path: Path) -> None:
    """No row holds more tokens than were asked for."""
    imported = corpora.import_text(
        tmp_path / "out", {"train": [write_texts(tmp_path / "a.jsonl")]}, Options(max_tokens=4)
    )
    assert {len(ids) for ids in table_of(imported.manifests[0]).column("input_ids").to_pylist()} == {4}


def test_the_same_import_has_the_same_bytes(tmp_path: Path) -> None:
    """Two imports of the same texts have equal files; asked again, the second is there already."""
    path = write_texts(tmp_path / "a.jsonl")
    first, second = (corpora.import_text(tmp_path / name, {"train": [path]}, OPTIONS) for name in ("x", "y"))
    assert [each.digest for each in first.manifests] == [each.digest for each in second.manifests]
    again = corpora.import_text(tmp_path / "y", {"train": [path]}, OPTIONS)
    assert again == Written(second.manifests, is_new=False)


def test_another_import_does_not_overwrite(tmp_path: Path) -> None:
    """Other options over a finished dataset are refused by name; `replace` takes its place."""
    path = write_texts(tmp_path / "a.jsonl")
    before = corpora.import_text(tmp_path / "out", {"train": [path]}, OPTIONS)
    with pytest.raises(ConfigError, match=r"made differently \(seed\)"):
        corpora.import_text(tmp_path / "out", {"train": [path]}, Options(200, 4, 600, 16))
    assert load_manifest(str(tmp_path / "out" / "train")) == before.manifests[0]
    after = corpora.import_text(tmp_path / "out", {"train": [path]}, Options(200, 4, 600, 16, replace=True))
    assert (after.is_new, after.manifests == before.manifests) == (True, False)


def test_docstrings_become_policy_rows(tmp_path: Path) -> None:
    """Labels are the libraries that are there, the commonest first, and 7 % or more of the metadata is missing."""
    for library, num_functions in (("torch", 90), ("sympy", 50), ("joblib", 9)):
        write_functions(tmp_path / "packages", library, num_functions)
    imported = corpora.import_docstrings(tmp_path / "out", OPTIONS, site_packages=tmp_path / "packages")
    for manifest in (imported.manifests[0], imported.manifests[1]):
        check_part(manifest, POLICY)
        assert manifest.labels == ("torch", "sympy", "joblib")
    assert imported.manifests[0].num_rows + imported.manifests[1].num_rows == 82 + 40 + 1
    made_from = origin.read_origin(tmp_path / "out") or {}
    assert made_from["libraries"] == {"torch": "", "sympy": "", "joblib": ""}
    assert made_from["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_some_metadata_is_dropped_as_in_practice(tmp_path: Path) -> None:
    """Of values that are all known 7 % are dropped; their rows stay."""
    for library in ("torch", "sympy"):
        write_functions(tmp_path / "packages", library, 1200)
    options = Options(num_samples=2400, seed=3, vocabulary=600, max_tokens=16)
    imported = corpora.import_docstrings(tmp_path / "out", options, site_packages=tmp_path / "packages")
    rows = table_of(imported.manifests[0])
    missing = {name: rows.column(name).null_count / rows.num_rows for name in ("num_chars", "num_lines", "code_share")}
    assert rows.num_rows > 1000
    assert [name for name, share in missing.items() if not 0.05 <= share <= 0.09] == []


def test_texts_of_ones_own_validate(tmp_path: Path) -> None:
    """Each file becomes its part; the tokenizer and the numbers of labels are those of the training texts."""
    train, held = write_texts(tmp_path / "a.jsonl"), tmp_path / "b.csv"
    held.write_text("text,label\ntext number 1 of 1 words,c\nnever seen,a\n")
    options = Options(seed=3, vocabulary=600, max_tokens=100)
    imported = corpora.import_text(tmp_path / "out", {"train": [train], "validation": [held]}, options)
    assert (imported.manifests[0].num_rows, imported.manifests[1].num_rows) == (60, 2)
    assert imported.manifests[1].labels == imported.manifests[0].labels == ("a", "b", "c")
    assert imported.manifests[1].tokenizer_sha256 == imported.manifests[0].tokenizer_sha256
    assert sorted(texts_of(imported.manifests[1])) == [("never seen", "a"), ("text number 1 of 1 words", "c")]
    with pytest.raises(ConfigError, match="made differently"):
        corpora.import_text(tmp_path / "out", {"train": [train, held]}, options)
    held.write_text("text,label\na text,d\n")
    with pytest.raises(ConfigError, match="validation texts have labels that no training text has: d"):
        corpora.import_text(tmp_path / "other", {"train": [train], "validation": [held]}, options)


labelled = st.lists(st.tuples(st.sampled_from("tuvwxyz"), st.sampled_from("abc")), min_size=1, max_size=40)


@given(labelled, st.integers(0, 9))
def test_no_text_is_on_both_sides(rows: list[tuple[str, str]], seed: int) -> None:
    """A split keeps every sample once, and a text on one side, also a text that stands under two labels."""
    train, validation = corpora.split([Sample(text, label, measure(text)) for text, label in rows], seed)
    assert Counter((sample.text, sample.label) for sample in train + validation) == Counter(rows)
    assert sorted({sample.text for sample in train} & {sample.text for sample in validation}) == []


@given(st.lists(st.sampled_from("tuvwxyz"), min_size=1, max_size=40), st.integers(0, 9))
def test_a_label_with_two_texts_is_on_both_sides(texts: list[str], seed: int) -> None:
    """A label validates with one of its texts as soon as it has two, and never with its only one."""
    train, validation = corpora.split([Sample(text, "a", ()) for text in texts], seed)
    num_texts = len(Counter(texts))
    assert len(Counter(sample.text for sample in validation)) == (1 if num_texts > 1 else 0)
    assert len(Counter(sample.text for sample in train)) == num_texts - (1 if num_texts > 1 else 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("x", "a"), ("y", "a")], r"the texts have one label, a; a classifier needs at least 2"),
        ([("x", "a"), ("y", "b")], "2 texts are too few to keep 10% of them for validation"),
    ],
)
def test_too_little_text_is_refused(tmp_path: Path, rows: list[tuple[str, str]], message: str) -> None:
    """One label, or one text a label, makes no dataset; no files are left."""
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in rows))
    with pytest.raises(ConfigError, match=message):
        corpora.import_text(tmp_path / "out", {"train": [path]}, OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
