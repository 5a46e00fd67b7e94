"""Rows are inspected before the first step, with the same outcome on all ranks, whatever any of them finds."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_train.config.sources import load_config
from elastic_train.data.dataset.manifest import build_manifest, load_manifest
from elastic_train.data.dataset.row_lengths import make_lengths
from elastic_train.errors import DataError, ElasticTrainError, StorageError
from elastic_train.job.plan import make_plan
from elastic_train.training.opening.inspection import MOST_NAMED, inspect_alone, inspect_rows


class Inspects:
    """A task whose rows are valid, invalid or impossible to inspect."""

    def __init__(self, error: Exception | None = None, unfit: int | None = None) -> None:
        self.error, self.unfit, self.num_rows = error, unfit, 0

    def inspected_columns(self) -> list[str]:
        return ["label"]

    def unfit_rows(self, rows: pa.Table) -> list[tuple[int, str]]:
        self.num_rows += len(rows)
        if self.error is not None:
            raise self.error
        return [] if self.unfit is None else [(self.unfit, "is not what it should be")]


CLASSIFIER = "elastic_train.tasks.text_classifier:TextClassifier"


def job_on(folder: Path, task: str, params: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return an empty configuration file, and the keys of a job on the datasets below a folder."""
    (folder / "config.yaml").write_text("{}")
    places = {"data.train": "train", "data.validation": "validation", "run.dir": "run"}
    tree = {
        "task.path": task,
        "task.params": params,
        **{key: str(folder / name) for key, name in places.items()},
        "batch": {"global_batch": 4, "micro_batch": 2},
    }
    return folder / "config.yaml", tree


def inspected(task: Inspects, rows: Path, other: object, process: Any = None) -> tuple[list[str], Any]:
    """Have rank 0 of two inspect its rows, while the other rank reports `other`."""
    manifest = load_manifest(str(rows / "train"))
    said = list[str]()
    group = SimpleNamespace(rank=0, size=2, all_gather_objects=lambda mine: json.loads(json.dumps([mine, other])))
    config = SimpleNamespace(peer_timeout_s=1e6)
    plan = SimpleNamespace(task=task, config=config, feed=SimpleNamespace(manifests=[manifest]))
    process = process or SimpleNamespace(
        plan=plan, inspected=[], watchdog=SimpleNamespace(resting=contextlib.nullcontext)
    )
    inspect_rows(process, SimpleNamespace(group=group, announce=said.append))  # type: ignore[arg-type]
    return said, process


def test_all_rows_of_both_ranks_are_said_and_a_process_does_it_once(rows: Path) -> None:
    task = Inspects()
    (line,), process = inspected(task, rows, [100_000, None, None])
    total = load_manifest(str(rows / "train")).num_rows
    assert line.startswith(f"{total:,} of {total:,} rows were inspected") and 0 < task.num_rows < total
    before = task.num_rows
    inspected(task, rows, [5, None, None], process)
    assert task.num_rows == before


@pytest.mark.parametrize("error", [DataError("a file has changed"), StorageError("the store hangs")])
def test_what_one_rank_cannot_look_at_ends_all_of_them_alike(rows: Path, error: ElasticTrainError) -> None:
    """The rank that has the error and a rank that only learns of it raise the same error."""
    for task, other in (
        (Inspects(error), [9, None, None]),
        (Inspects(), [0, None, [type(error).__name__, str(error)]]),
    ):
        with pytest.raises(type(error), match=str(error)):
            inspected(task, rows, other)


def test_of_unfit_rows_all_ranks_name_the_first(rows: Path) -> None:
    with pytest.raises(DataError, match=r"sample 0 .*: is of the other rank"):
        inspected(Inspects(unfit=3), rows, [1, [0, 0, "is of the other rank"], None])


def test_all_unfit_rows_are_named_at_once(tmp_path: Path) -> None:
    """The errors of both datasets and all ranks are listed, up to a limit, whether or not the lengths are known."""
    for part, long in (("train", (3, 55, 333)), ("validation", (7, *range(100, 140)))):
        lists = [[1] * (9 if number in long else 4) for number in range(400)]
        (tmp_path / part).mkdir()
        table = pa.table({"input_ids": pa.array(lists, pa.list_(pa.int32())), "label": [0, 1] * 200})
        pq.write_table(table, tmp_path / part / "rows.parquet", row_group_size=50)
        build_manifest(str(tmp_path / part), label_column="label")
    tree = {
        "task.params": {"max_tokens": 8, "vocabulary": 9, "dim": 8, "heads": 1, "depth": 0},
        "data.train": str(tmp_path / "train"),
        "data.validation": str(tmp_path / "validation"),
        "run.dir": str(tmp_path / "run"),
    }
    path = tmp_path / "config.yaml"
    path.write_text("{}")
    plan = make_plan(load_config(path, tree))
    for knows_lengths in (False, True):
        if knows_lengths:
            for part in ("train", "validation"):
                assert make_lengths(load_manifest(str(tmp_path / part)), "input_ids").longest == 9
        with pytest.raises(DataError) as raised:
            inspect_alone(plan)
        lines = str(raised.value).splitlines()
        if knows_lengths:
            assert [line.split(": ")[1].split(" ")[1] for line in lines[:4]] == ["3", "55", "333", "7"]
        assert len(lines) == MOST_NAMED + 1 and "more" in lines[-1]
        assert all("it has 9 values in column 'input_ids', the task takes 8" in line for line in lines[:-1])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("place", "row", "why"),
    [
        (
            "train",
            list(range(9)),
            r"it has 9 values in column 'input_ids', the task takes 8: .*data.too_long: truncate",
        ),
        ("validation", list(range(9)), r"it has 9 values in column 'input_ids', the task takes 8"),
        ("train", [1, None, 3], r"a value within the list of column 'input_ids' is missing \(null\)"),
        ("validation", [None], r"a value within the list of column 'input_ids' is missing \(null\)"),
    ],
)
@pytest.mark.parametrize("has_lengths", [False, True])
def test_one_unfit_list_among_many_is_named_before_training(
    tmp_path: Path, place: str, row: list[int | None], why: str, has_lengths: bool
) -> None:
    """The error names dataset, file, row group and row; lists that are truncated may have any length."""
    for part in ("train", "validation"):
        lists: list[list[int | None]] = [[number % 7] * (number % 9) for number in range(400)]
        if part == place:
            lists[333] = row
        (tmp_path / part).mkdir()
        table = pa.table({"input_ids": pa.array(lists, pa.list_(pa.int32())), "label": [0, 1] * 200})
        pq.write_table(table, tmp_path / part / "rows.parquet", row_group_size=50)
        manifest = build_manifest(str(tmp_path / part), label_column="label")
        if has_lengths:
            make_lengths(manifest, "input_ids")
    sizes = {"max_tokens": 8, "vocabulary": 9, "dim": 8, "heads": 1, "depth": 0}
    path, tree = job_on(tmp_path, CLASSIFIER, sizes)
    with pytest.raises(DataError, match=rf"{place}: sample 333 \(rows.parquet, row group 6, row 33\): {why}"):
        inspect_alone(make_plan(load_config(path, tree)))
    cut = make_plan(load_config(path, {**tree, "data.too_long": "truncate"}))
    if None in row:
        with pytest.raises(DataError, match="row group 6, row 33"):
            inspect_alone(cut)
    else:
        said = "and are fit for the task; rows that are longer than it takes, and will be cut (data.too_long): 1"
        assert inspect_alone(cut) == f"800 of 800 rows were inspected before the first step, {said}"


GOOD: dict[str, list[Any]] = {
    "input_ids": [[number % 7, 1, 2] for number in range(400)],
    "labels": [[1, -100, 3] for _ in range(400)],
    "label": [0, 1] * 200,
}
TYPES = {"input_ids": pa.list_(pa.int64()), "labels": pa.list_(pa.int64()), "label": pa.int64()}
LANGUAGE = "elastic_train.tasks.causal_lm:CausalLM"


@pytest.mark.heavy
@pytest.mark.parametrize("has_statistics", [False, True])
@pytest.mark.parametrize(
    ("path", "place", "column", "row", "why"),
    [
        (CLASSIFIER, "train", "input_ids", [1, 9, 3], "9 in column 'input_ids', the model takes .* to 8"),
        (CLASSIFIER, "validation", "input_ids", [-1, 0, 0], "-1 in column 'input_ids', the model takes .* to 8"),
        (CLASSIFIER, "validation", "label", 2, "label 2 in column 'label', .* has the classes 0 to 1"),
        (CLASSIFIER, "validation", "label", -100, "label -100 in column 'label'"),
        (CLASSIFIER, "validation", "label", None, r"label in column 'label' is missing \(null\)"),
        (LANGUAGE, "train", "labels", [1, 9, 3], "9 in column 'labels', the model takes token ids from 0 to 8"),
        (LANGUAGE, "validation", "labels", [1, -7, 3], "-7 in column 'labels'"),
        (LANGUAGE, "validation", "labels", [1, 2], "2 values in column 'labels', but 3 in 'input_ids'"),
        (LANGUAGE, "train", "labels", None, "0 values in column 'labels', but 3 in 'input_ids'"),
    ],
)
def test_one_unfit_value_among_many_is_named_before_training(
    tmp_path: Path, path: str, place: str, column: str, row: Any, why: str, has_statistics: bool
) -> None:
    """A value of tokens, targets or classes, also in a validation set with unknown class counts."""
    for part in ("train", "validation"):
        values = {name: list(each) for name, each in GOOD.items()}
        if part == place:
            values[column][333] = row
        (tmp_path / part).mkdir()
        table = pa.table({name: pa.array(each, TYPES[name]) for name, each in values.items()})
        pq.write_table(table, tmp_path / part / "rows.parquet", row_group_size=50, write_statistics=has_statistics)
        build_manifest(str(tmp_path / part), label_column="label" if part == "train" else None)
    sizes = {"vocabulary": 9, "dim": 8, "heads": 1, "depth": 1}
    params = {"max_tokens": 8, **(sizes if path == CLASSIFIER else {"model": sizes})}
    config, tree = job_on(tmp_path, path, params)
    with pytest.raises(DataError, match=rf"{place}: sample 333 \(rows.parquet, row group 6, row 33\):? .*{why}"):
        inspect_alone(make_plan(load_config(config, tree)))


def test_slices_of_a_table_grow_while_their_inspection_is_quick(rows: Path) -> None:
    """A task whose rows are quick to inspect is called far less often than once per 16 rows."""
    sizes = list[int]()

    class Counts(Inspects):
        def unfit_rows(self, rows: pa.Table) -> list[tuple[int, str]]:
            sizes.append(len(rows))
            return super().unfit_rows(rows)

    inspected(Counts(), rows, [0, None, None])
    assert sizes[0] == 16 and max(sizes) > 16
