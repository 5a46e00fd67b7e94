"""A plan's view of a mixture, and the sources that it refuses by name before training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_train.config.schema import Config
from elastic_train.core.accounting import CoverageSums
from elastic_train.core.mixture import Mixture, SourceFacts
from elastic_train.data.dataset.manifest import Manifest, build_manifest, load_manifest
from elastic_train.data.dataset.training_sources import Source, join
from elastic_train.errors import ConfigError, DataError, ElasticTrainError
from elastic_train.job.plan import Plan, check_same_sources, make_plan
from tests.conftest import write_rows

LANGUAGE = {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": {"model": {"dim": 8, "heads": 1, "depth": 1}}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    write_rows(folder / "wiki", 60, seed=1)
    write_rows(folder / "code", 20, seed=2, num_files=1)
    return folder


def planned(*sources: Path, task: object = None, **changes: object) -> Plan:
    mixture = [{"source": str(source), "weight": weight} for source, weight in zip(sources, (3, 1), strict=False)]
    tree = {"data": {"mixture": mixture}, "device": "cpu", "batch": {"global_batch": 16, "micro_batch": 4}, **changes}
    return make_plan(Config.model_validate({**tree, "task": task or {"params": {"vocabulary": 64}}}))


def write_tokens(folder: Path, *, kind: pa.DataType | None = None, packed: bool = False, **facts: object) -> Path:
    """Write rows that have only tokens, as a language model reads them."""
    columns = {"input_ids": pa.array([[number, 1, 2] for number in range(30)], pa.list_(kind or pa.int32()))}
    if packed:
        columns["document_ids"] = pa.array([[0, 0, 1]] * 30, pa.list_(pa.int32()))
    folder.mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=7)
    build_manifest(str(folder), **{"vocabulary_size": 40, **facts})
    return folder


def test_a_plan_has_the_rows_of_all_sources(data: Path) -> None:
    """Sources are numbered one after another; training ends with the slowest one, as `validate` explains."""
    plan = planned(data / "wiki", data / "code")
    assert isinstance(plan.order, Mixture)
    assert plan.manifest.num_rows == plan.order.num_samples == 80
    assert plan.order.first_id.tolist() == [0, 60]
    assert [file.path for file in plan.manifest.files] == [
        *(f"0/part-{n}.parquet" for n in range(3)),
        "1/part-0.parquet",
    ]
    facts = plan.describe()
    assert facts["steps"] == plan.total_steps == 5
    assert facts["source wiki"] == "60 samples, 3 of 4 places, 1.00 epochs"
    assert facts["source code"] == "20 samples, 1 of 4 places, 1.00 epochs"
    assert "steps an epoch" not in facts
    assert planned(data / "wiki", data / "code", max_steps=11).total_steps == 11


def test_labels_count_as_often_as_they_are_seen() -> None:
    """Class weights balance the training data: 3 of 4 places have the first source's labels, whatever its size."""

    def source(share: int, counts: tuple[int, ...]) -> Source:
        rows = sum(counts)
        return Source("x", share, Manifest("x", (), {}, rows, CoverageSums.of_all(rows), label_counts=counts))

    assert join([source(3, (10, 10)), source(1, (0, 0, 20))]).label_counts == (15, 15, 10)
    assert join([source(1, (1000, 3000)), source(1, (4, 0))]).label_counts == (2503, 1502)


def test_one_source_is_the_dataset_itself(data: Path) -> None:
    """Ids and files are the dataset's own."""
    plan = planned(data / "wiki")
    assert plan.manifest == load_manifest(str(data / "wiki"))


@pytest.mark.parametrize(
    ("other", "error", "expected"),
    [
        ("nowhere", ConfigError, ["nowhere: no manifest.json"]),
        ("few", DataError, ["few: has 3 rows", "one for each of the 4 lanes", "leave it out"]),
        ("copy", DataError, ["copy: holds the same rows as", "wiki (digest", "the sum of their weights"]),
        ("plain", ConfigError, ["the manifest of", "plain names no label column"]),
    ],
)
def test_a_source_that_does_not_fit_is_refused(
    data: Path, tmp_path: Path, other: str, error: type[ElasticTrainError], expected: list[str]
) -> None:
    """The error names its folder, not the first source's."""
    if other == "few":
        write_rows(tmp_path / "few", 3, num_files=1)
    if other == "copy":
        write_rows(tmp_path / "copy", 60, seed=1)
    if other == "plain":
        write_tokens(tmp_path / "plain")
    with pytest.raises(error) as raised:
        planned(data / "wiki", tmp_path / other)
    assert all(text in str(raised.value) for text in expected), raised.value


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (
            {},
            {"packed": True},
            ["second: the task would read its columns input_ids, document_ids", "pack both or neither"],
        ),
        ({"packed": True}, {}, ["second: the task would read its columns input_ids, and", "pack both or neither"]),
        (
            {},
            {"kind": pa.int16()},
            ["second: column 'input_ids' is list<element: int16>", "first it is list<element: int32>"],
        ),
        (
            {"tokenizer": "t.json", "tokenizer_sha256": "a"},
            {"tokenizer": "t.json", "tokenizer_sha256": "b"},
            ["second: its token ids differ from those of", "first", "one tokenizer.json"],
        ),
    ],
)
def test_sources_that_are_not_read_alike_are_refused(
    tmp_path: Path, first: dict[str, object], second: dict[str, object], expected: list[str]
) -> None:
    """Packed and unpacked rows, other types, other tokenizers: one source would silently be nonsense to the model."""
    places = [
        write_tokens(tmp_path / "first", **first),  # type: ignore[arg-type]
        write_tokens(tmp_path / "second", **{"vocabulary_size": 39, **second}),  # type: ignore[arg-type]
    ]
    with pytest.raises(DataError) as raised:
        planned(*places, task=LANGUAGE)
    assert all(text in str(raised.value) for text in expected), raised.value


def test_a_commit_of_other_sources_is_refused_by_what_changed() -> None:
    """The error names the change: the weights, the list, or one source's data."""
    sources = [Source(name, share, SimpleNamespace(digest=name, url=name)) for name, share in (("a", 7), ("b", 3))]  # type: ignore[arg-type]
    facts = [SourceFacts(each.name, each.share, 9, each.manifest.digest, CoverageSums()) for each in sources]
    config = SimpleNamespace(run=SimpleNamespace(dir="run"))

    def check(*known: SourceFacts) -> None:
        check_same_sources(config, sources, SimpleNamespace(sources=known or None, key="commits/1"))  # type: ignore[arg-type]

    check(*facts)
    with pytest.raises(ConfigError, match=r"commits/1: 3 b : 7 a\): data.mixture must stay"):
        check(*facts[::-1])
    with pytest.raises(ConfigError, match="one training set"):
        check()
    with pytest.raises(
        DataError, match=r"b: the manifest of source 'b' changed since commits/1 \(digest b, then older"
    ):
        check(facts[0], SourceFacts("b", 3, 9, "older", CoverageSums()))
    check_same_sources(config, (), SimpleNamespace(sources=None, key="commits/1"))  # type: ignore[arg-type]
