"""Imports of a node's standby process for particular jobs, chosen by the workers' arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elastic_train import preload

pytestmark = pytest.mark.xdist_group("torchmetrics")  # one process imports it
OWN, TEXT = "elastic_train.tasks.causal_lm:CausalLM", "elastic_train.tasks.text_classifier:TextClassifier"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Holds a value for each time that transformers would have been imported."""
    times: list[bool] = []
    monkeypatch.setattr(preload, "import_common_models", lambda: times.append(True))
    return times


@pytest.mark.parametrize(
    ("path", "overrides", "num"),
    [
        (OWN, ("--task.params.hf.path", "/models/gpt2"), 1),
        (OWN, (), 0),
        (TEXT, (), 0),
        ("own_models:Task", (), 1),
        (TEXT, ("--no-such-key", "1"), 0),
    ],
    ids=["a model of transformers", "one of ours", "a text classifier", "a users task that imports it", "refused"],
)
def test_transformers_is_imported_where_the_job_uses_it(
    tmp_path: Path,
    asked: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    overrides: tuple[str, ...],
    num: int,
) -> None:
    (tmp_path / "own_models.py").write_text("import transformers")
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / "config.yaml"
    tree = {"run": {"dir": str(tmp_path / "run")}, "task": {"path": path}, "data": {"train": "nowhere"}}
    config.write_text(yaml.safe_dump(tree))
    preload.prepare([str(config), *overrides])
    assert len(asked) == num


def test_arguments_that_name_no_configuration_are_the_workers_to_report(asked: list[bool]) -> None:
    preload.prepare([])
    preload.prepare(["/no/such/file.yaml"])
    assert asked == []
