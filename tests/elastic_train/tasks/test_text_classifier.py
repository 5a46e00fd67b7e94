"""The text classifier: what it refuses before training, and what it makes of values that are missing or huge."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_train.config.schema import Config
from elastic_train.data.dataset.manifest import Manifest, build_manifest
from elastic_train.errors import ConfigError, DataError
from elastic_train.job.plan import make_plan
from elastic_train.tasks.text_classifier import TextClassifier

TOKENS = pa.array([[1, 2], [3], None, []], pa.list_(pa.int32()))
LABELS = pa.array([0, 1, 1, 0])


def described(folder: Path, columns: dict[str, pa.Array], **facts: Any) -> Manifest:
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return build_manifest(str(folder), **{"label_column": "label", **facts})


def prepared(manifest: Manifest, **params: Any) -> TextClassifier:
    task = TextClassifier(**{"vocabulary": 8, **params})
    task.prepare(manifest)
    return task


@pytest.mark.parametrize(
    ("tokens", "label", "message"),
    [
        (pa.array([[{"int": 1}], []]), pa.array([0, 1]), "not a list of integers"),
        (pa.array([["a"], []]), pa.array([0, 1]), "not a list of integers"),
        (pa.array([[1], []]), pa.array(["a", "b"]).dictionary_encode(), "not an integer"),
    ],
)
def test_types_that_cannot_be_collated_are_refused(
    tmp_path: Path, tokens: pa.Array, label: pa.Array, message: str
) -> None:
    """Also those whose names hold that of an integer."""
    with pytest.raises(DataError, match=message):
        prepared(described(tmp_path / "rows", {"input_ids": tokens, "label": label}, label_column=None), label="label")


def test_classes_are_those_of_the_label_that_is_trained(tmp_path: Path) -> None:
    """A manifest that counted another column knows neither how many there are nor how they weigh."""
    columns = {"input_ids": TOKENS, "label": LABELS, "topic": pa.array([0, 4, 2, 2])}
    manifest = described(tmp_path / "rows", columns)
    with pytest.raises(DataError, match="label_column='topic'"):
        prepared(manifest, label="topic", class_weights="balanced")
    assert prepared(build_manifest(manifest.url, label_column="topic"), label="topic").num_classes == 5


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"dim": 0}, "dim must be at least 1"),
        ({"depth": -1}, "depth must be at least 0"),
        ({"dropout": 1.5}, "dropout must be"),
        ({"vocabulary": 0}, "vocabulary must be at least 1"),
    ],
)
def test_an_impossible_model_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextClassifier(**params)


def test_numbers_of_any_size_are_taken(tmp_path: Path) -> None:
    """Integers that no float holds exactly are rounded; values that are not finite count as missing."""
    columns = {
        "input_ids": TOKENS,
        "label": LABELS,
        "ns": pa.array([1735689600000000001, None, -5, 0]),
        "ratio": pa.array([math.inf, 0.5, math.nan, -math.inf]),
    }
    task = prepared(described(tmp_path / "rows", columns), numeric=["ns", "ratio"])
    batch = task.collate(pa.table(columns), np.arange(4))
    assert batch["is_missing"].tolist() == [[False, True], [True, False], [False, True], [False, True]]
    assert batch["numeric"].isfinite().all()
    assert batch["numeric"][0, 0].item() == pytest.approx(math.log1p(1735689600000000001))


def test_categories_are_of_every_plain_type(tmp_path: Path) -> None:
    """Half floats, of which Arrow finds no distinct values, included: equal values are one category, none is 0."""
    halves = pa.array([np.float16(0.5), None, np.float16(0.5), np.float16(2)], pa.float16())
    columns = {"input_ids": TOKENS, "label": LABELS, "half": halves, "text": pa.array(["0.5", None, "0.5", "2.0"])}
    task = prepared(described(tmp_path / "rows", columns), categorical=["half", "text"])
    half, text = task.collate(pa.table(columns), np.arange(4))["categories"].T.tolist()
    assert half == text and half[0] == half[2] != half[3] and half[1] == 0


@pytest.mark.parametrize(
    ("tokens", "label", "named"),
    [
        (pa.array([[3], [1, None], [], []], pa.list_(pa.int32())), LABELS, "'input_ids'"),
        (TOKENS, pa.array([0, None, 1, 1]), "'label'"),
    ],
)
def test_a_missing_required_value_is_named(tmp_path: Path, tokens: pa.Array, label: pa.Array, named: str) -> None:
    """A token among others, and a label; a row without tokens is an empty one."""
    task = prepared(described(tmp_path / "rows", {"input_ids": TOKENS, "label": LABELS}))
    assert task.collate(pa.table({"input_ids": TOKENS, "label": LABELS}), np.arange(4))["lengths"].tolist() == [
        2,
        1,
        1,
        1,
    ]
    with pytest.raises(DataError, match=rf"(?=.*sample 71)(?=.*column {named}.* missing .null.)"):
        task.collate(pa.table({"input_ids": tokens, "label": label}), np.arange(70, 74))


def test_a_set_with_one_of_two_classes_has_weights_for_both(tmp_path: Path) -> None:
    task = prepared(
        described(tmp_path / "rows", {"input_ids": TOKENS, "label": pa.array([0] * 4)}), class_weights="balanced"
    )
    batch = task.collate(pa.table({"input_ids": TOKENS, "label": LABELS}), np.arange(4))
    assert task.loss(task.build_model(), batch).total.isfinite()


@pytest.mark.parametrize(
    ("facts", "labels", "message"),
    [
        ({"labels": ("good", "bad")}, [0, 1, 1, 0], None),
        ({}, [0, 0, 0, 0], None),
        ({"label_column": None}, [0, 1, 1, 0], None),
        ({"labels": ("bad", "good")}, [0, 1, 1, 0], "its labels differ from those of"),
        ({}, [0, 2, 1, 0], "labels up to 2, but .* only 2 classes"),
        ({"tokenizer_sha256": "b" * 64}, [0, 1, 1, 0], "its token ids differ from those of"),
    ],
)
def test_a_validation_set_of_another_kind_is_refused(
    tmp_path: Path, facts: dict[str, Any], labels: list[int], message: str | None
) -> None:
    """Classes numbered otherwise, or tokens, would give metrics that mean nothing."""
    known = {"labels": ("good", "bad"), "tokenizer_sha256": "a" * 64}
    described(tmp_path / "train", {"input_ids": TOKENS, "label": LABELS}, **known)
    described(tmp_path / "validation", {"input_ids": TOKENS, "label": pa.array(labels)}, **facts)
    config = Config.model_validate(
        {
            "task": {"params": {"vocabulary": 8}},
            "data": {"train": str(tmp_path / "train"), "validation": str(tmp_path / "validation")},
        }
    )
    if message is None:
        make_plan(config)
        return
    with pytest.raises(DataError, match=message):
        make_plan(config)


@pytest.mark.parametrize(
    ("known", "found", "is_alike"),
    [
        (pa.float64(), pa.int64(), False),
        (pa.int64(), pa.float64(), False),
        (pa.string(), pa.bool_(), False),
        (pa.int64(), pa.int8(), True),
        (pa.int64(), pa.string(), True),
        (pa.float64(), pa.null(), True),
    ],
)
def test_categories_that_are_spelt_otherwise_than_in_training_are_refused(
    tmp_path: Path, known: pa.DataType, found: pa.DataType, is_alike: bool
) -> None:
    """As a file without a missing value, or with whole numbers alone, is read: no category would be a known one."""
    given = {"train": ["1", None, "0", "1"], "validation": [None] * 4 if found == pa.null() else ["1", "1", "0", "1"]}
    train, validation = (
        described(tmp_path / name, {"input_ids": TOKENS, "label": LABELS, "rooms": pa.array(given[name]).cast(kind)})
        for name, kind in (("train", known), ("validation", found))
    )
    task = prepared(train, categorical=["rooms"])
    if is_alike:
        task.check_held_out(validation)
        return
    with pytest.raises(DataError, match=rf"'rooms' is {found}, and {known} in .*, so its .* \(--types rooms={known}\)"):
        task.check_held_out(validation)


def test_text_in_place_of_a_number_is_the_users_mistake() -> None:
    from elastic_train.config.schema import TaskConfig
    from elastic_train.tasks import load_task

    refused = r"refuses them: 'dropout': Input should be a valid number, given 'a tenth'"
    with pytest.raises(ConfigError, match=refused):  # Python's own words name no parameter
        load_task(TaskConfig(params={"dropout": "a tenth"}))
