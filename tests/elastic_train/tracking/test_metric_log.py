"""The local file of metrics, and the run's folder that it is in."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.lineage import Interval, cut, extend
from elastic_train.errors import ConfigError
from elastic_train.tracking.metric_log import LineageReader, MetricsWriter, Values, metrics_path, read_metrics
from elastic_train.tracking.run_folder import Link, RunFolder
from tests.elastic_train.tracking.unqueued import Unqueued

Branch = tuple[Interval, ...]


def train(run_dir: Path, term: int, begun: Branch, num_steps: int) -> Branch:
    """Let a term continue a branch: log what it finds there, and each step's loss, which names the term."""
    lo = begun[-1].hi if begun else 0
    writer = MetricsWriter(Unqueued().lines(metrics_path(run_dir, term)), term)
    writer.begin(begun)
    writer.values(lo, {"validation/loss": term}, {})
    for step in range(lo + 1, lo + num_steps + 1):
        writer.values(step, {"train/loss": term}, {})
    writer.close()
    return extend(begun, term, lo, lo + num_steps) if num_steps else begun


def values_of(run_dir: Path, name: str = "train/loss") -> list[tuple[int, float]]:
    lines = [line for line in read_metrics(run_dir) if isinstance(line, Values)]
    return [(line.step, line.by_name[name]) for line in lines if name in line.by_name]


@given(st.data())
def test_metrics_are_those_of_the_newest_terms_lineage(data: st.DataObject) -> None:
    """Terms continue from any older one's steps, as frozen processes make them; each step is the lineage's, in order.

    What a term validated at the step that it began at holds if it began on the lineage, where that has no later steps
    of older terms, which validated themselves.
    """
    with TemporaryDirectory() as folder:
        branches: list[Branch] = [()]
        begun: list[Branch] = [()]
        for term in range(1, data.draw(st.integers(1, 6)) + 1):
            whole = data.draw(st.sampled_from(branches))
            begun.append(cut(whole, data.draw(st.integers(0, whole[-1].hi if whole else 0))))
            branches.append(train(Path(folder), term, begun[-1], data.draw(st.integers(0, 4))))
        lineage = branches[-1]
        assert values_of(Path(folder)) == [(step, i.term) for i in lineage for step in range(i.lo + 1, i.hi + 1)]
        validated = [(branch[-1].hi if branch else 0, term) for term, branch in enumerate(begun) if term]
        holds = [
            (step, term)
            for step, term in validated
            if begun[term] == cut(lineage, step) and all(i.term >= term for i in lineage if i.hi > step)
        ]
        assert sorted(values_of(Path(folder), "validation/loss")) == sorted(holds)
        steps = [line.step for line in read_metrics(Path(folder))]
        assert all(a <= b for a, b in pairwise(steps))


def test_settled_lines_are_read_incrementally_while_the_term_runs(tmp_path: Path) -> None:
    """A reader gives up to the settled step what holds, and the rest of the newest term's as it is written.

    Who reads in the newest term's process knows how it began, also where the disk was full.
    """
    begun = train(tmp_path, 2, train(tmp_path, 1, (), 5), 3)
    train(tmp_path, 3, cut(begun, 4), 2)
    writer = MetricsWriter(Unqueued().lines(metrics_path(tmp_path, 4)), 4)
    reader = LineageReader(tmp_path, (4, begun))
    seen = []
    for settled in (3, 7, math.inf):
        while lines := reader.read(settled):
            seen += [line.step for line in lines if isinstance(line, Values) and "train/loss" in line.by_name]
        assert seen == list(range(1, min(settled, 8) + 1))  # type: ignore[arg-type]
    writer.values(9, {"train/loss": 4.0}, {})
    assert [line.step for line in reader.read()] == [9]
    writer.close()


def test_a_line_of_very_many_values_does_not_hide_the_lines_after_it(tmp_path: Path) -> None:
    """No tracker and no report had anything that came after a line of more than a mebibyte."""
    writer = MetricsWriter(Unqueued().lines(metrics_path(tmp_path, 1)), 1)
    writer.values(1, {f"validation/recall/{number}": 0.5 for number in range(50_000)}, {})
    writer.values(2, {"train/loss": 1.0}, {})
    writer.close()
    assert values_of(tmp_path) == [(2, 1.0)] and len(values_of(tmp_path, "validation/recall/49999")) == 1


def test_without_a_recorded_lineage_the_newest_term_overrides_older_ones(tmp_path: Path) -> None:
    """A beginning that did not fit on the disk, or was written by an older version, names no terms."""
    train(tmp_path, 1, (), 5)
    metrics_path(tmp_path, 2).write_text('{"t": 1.0, "term": 2, "begins_at": 4}\n{"t": 1.0, "te')
    metrics_path(tmp_path, 3).write_text('{"t": 2.0, "term": 3, "step": 4, "values": {"train/loss": 3}}\n')
    metrics_path(tmp_path, 4).touch()
    assert values_of(tmp_path) == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 3.0)]


def test_a_running_jobs_folder_has_a_configuration_and_no_result(tmp_path: Path) -> None:
    """Settings are text, None where they are unset or null; result and link are None until they are written."""
    (tmp_path / "config.yaml").write_text("data: {train: rows}\ntracking: {mlflow_uri: null}\nepochs: 1\n")
    run = RunFolder(tmp_path)
    assert run.config()["epochs"] == 1
    assert run.setting("data", "train") == "rows"
    assert [run.setting(*key) for key in (("tracking", "mlflow_uri"), ("run", "name"), ("epochs", "x"))] == [None] * 3
    assert run.result() is None
    assert run.link() is None


def test_a_link_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """The job's name, its run and its tracker survive a restart."""
    link = Link("job", "run", "sqlite:///mlflow.db")
    RunFolder(tmp_path).write_link(link)
    assert RunFolder(tmp_path).link() == link


def test_a_folder_that_is_not_a_run_is_named(tmp_path: Path) -> None:
    """No config.yaml: the configuration is refused with the folder's name, and no setting is known."""
    with pytest.raises(ConfigError, match=rf"{tmp_path} is not a run's folder: it has no config\.yaml"):
        RunFolder(tmp_path).config()
    assert RunFolder(tmp_path).setting("data", "train") is None


@pytest.mark.parametrize("content", ["", "[1]", "a: [", "\x00"])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    """Content that no run writes is refused with its path, never taken for an absent file."""
    (tmp_path / "config.yaml").write_text(content)
    (tmp_path / "result.json").write_text(content)
    for read, name in ((RunFolder(tmp_path).config, "config.yaml"), (RunFolder(tmp_path).result, "result.json")):
        with pytest.raises(ConfigError, match=rf"^{tmp_path}/{name} (cannot be read|has no keys)"):
            read()
