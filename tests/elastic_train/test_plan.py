"""A plan goes on only from commits whose order and data are its own; each refusal says what differs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elastic_train.checkpoint import CommitRecord
from elastic_train.errors import ConfigError, DataError, ElasticTrainError
from elastic_train.order import VERSION
from elastic_train.plan import Plan


def commit_of(**fields: object) -> CommitRecord:
    """A commit with nothing but what a plan compares."""
    record = object.__new__(CommitRecord)
    told = {"config_digest": "one", "manifest_digest": "two", "order": {"version": VERSION, "lengths": 0}, **fields}
    for name, value in {"term": 1, "step": 9, **told}.items():
        object.__setattr__(record, name, value)
    return record


@pytest.mark.parametrize(
    ("fields", "error", "told"),
    [
        ({"config_digest": "other"}, ConfigError, "another configuration"),
        ({"manifest_digest": "other"}, DataError, "manifest changed"),
        ({"order": {"version": VERSION, "lengths": 7}}, DataError, "another column"),
        ({"order": {"version": VERSION - 1, "lengths": 0}}, ConfigError, "order of another version"),
        ({"order": {"lengths": 0}}, ConfigError, "order of another version"),
        ({"order": None}, ConfigError, "order of another version"),
    ],
)
def test_a_commit_of_another_run_is_refused(
    fields: dict[str, object], error: type[ElasticTrainError], told: str
) -> None:
    """To go on would repeat samples and leave others out."""
    config = SimpleNamespace(run=SimpleNamespace(dir="run"), identity=lambda: "one")
    manifest = SimpleNamespace(digest="two", url="rows")
    plan = SimpleNamespace(config=config, manifest=manifest, order=SimpleNamespace(arrangement=None))
    Plan.check_continues(plan, commit_of())  # type: ignore[arg-type]
    with pytest.raises(error, match=told):
        Plan.check_continues(plan, commit_of(**fields))  # type: ignore[arg-type]
