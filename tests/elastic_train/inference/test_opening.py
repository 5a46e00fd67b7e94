"""A run's model opens on any machine, whatever world trained it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import torch
import yaml

from elastic_train.checkpoint.commits.lookup import find, open_run
from elastic_train.checkpoint.commits.reader import read_state
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError
from elastic_train.inference.opening import open_trained, plan_of
from elastic_train.job import plan as job_plan
from elastic_train.system.file_systems import STARTED_IN
from elastic_train.tracking.destinations import event_files, weights_and_biases
from tests.elastic_train.training.jobs import config, succeed
from tests.memory_job import start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("opening")]  # one run is trained

MODEL = {"vocabulary": 64, "dim": 16, "depth": 1, "heads": 2, "experts": 4, "expert_hidden": 8, "tied": False}
LANGUAGE: dict[str, object] = {
    "task": {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": {"model": MODEL, "max_tokens": 16}},
    "batch": {"global_batch": 24, "micro_batch": 6},
    "max_steps": 1,
}
SECTIONS: list[dict[str, object]] = [
    {"shards": "parameters", "wire": "bf16"},
    {"shards": "gradients", "wire": "bf16", "copies": 3},
    {"shards": "parameters", "offload": "all"},
    {"offload": "optimizer", "transport": "gloo"},
    {"tensor": 2, "sequence": True, "recompute": "selective"},
    {"pipeline": 2, "schedule": "interleaved:3"},
    {"expert": 2},
    {"context": 2},
]
Changed = Callable[[Mapping[str, object]], str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    """A finished run of one process."""
    folder = tmp_path_factory.mktemp("opened")
    succeed(start([config(folder, rows, LANGUAGE)]))
    return folder / "run"


@pytest.fixture
def changed(run: Path) -> Iterator[Changed]:
    """Write other values into the run's configuration, as if it had been trained with them, until the test is over."""
    path = run / "config.yaml"
    before = path.read_text()

    def change(values: Mapping[str, object]) -> str:
        tree = yaml.safe_load(before)
        for name, value in values.items():
            tree[name] = {**tree.get(name, {}), **value} if isinstance(value, Mapping) else value
        path.write_text(yaml.safe_dump(tree))
        return str(run)

    yield change
    path.write_text(before)


def opens(run: str) -> bool:
    """Open the run, and say whether its model has the weights of the commit."""
    trained = open_trained(run)
    assert trained.plan.config.parallel == ParallelConfig()
    store = open_run(run)
    weights: Any = read_state(store, find(store, None))["model"]
    found = trained.model.state_dict()
    return list(found) == list(weights) and all(found[name].equal(tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_a_run_opens_whatever_its_ranks_shared(section: dict[str, object], changed: Changed) -> None:
    run = changed({"parallel": section})
    Config.model_validate(yaml.safe_load((Path(run) / "config.yaml").read_text()))  # it could be trained so
    assert opens(run)


@pytest.mark.filterwarnings("ignore:.*which is a no-op")  # nothing is copied to a device without memory
@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_so_it_does_where_there_is_another_device(
    section: dict[str, object], changed: Changed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells are refused on GPUs, and a process that is alone is in none."""
    monkeypatch.setattr(job_plan, "pick_device", lambda config: torch.device("meta"))
    trained = open_trained(changed({"parallel": section}))
    assert {parameter.device.type for parameter in trained.model.parameters()} == {"meta"}


@pytest.mark.parametrize("key", ParallelConfig.model_fields)
def test_no_key_of_the_section_keeps_a_run_from_being_opened(key: str, changed: Changed) -> None:
    """Not one that is added later, either."""
    field = ParallelConfig.model_fields[key]
    values = [value for value in values_of(field.annotation) if value != field.default]
    assert values, f"another value of {key}"
    for value in values:
        assert opens(changed({"parallel": {key: value}}))


def values_of(kind: object) -> list[object]:
    """Return some values of a key's type."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return [value for part in get_args(kind) for value in values_of(part)]
    if get_origin(kind) is not None:  # Annotated
        return values_of(get_args(kind)[0])
    return {bool: [False, True], int: [3], float: [0.5], str: ["rack-1"], types.NoneType: [None]}[kind]  # type: ignore[index,return-value]


@pytest.mark.parametrize(
    "values",
    [
        {"device": "cuda"},
        {"compile": True, "precision": "fp16"},
        {"run": {"audit_lanes": 2}, "reduction": "fast"},
        {"tracking": {"tensorboard": True, "wandb": "offline"}},
        {"optimizer": {"name": "not.installed:Optimizer", "options": {"beta": 1}, "schedule": "not.installed:rate"}},
        {"validation": {"weights": "ema", "early_stopping": {"metric": "max macro_f1"}}},
        {"checkpoint": {"keep_best": "max macro_f1", "of_a_later_version": 1}, "of_a_later_version": {"a": 1}},
    ],
    ids=str,
)
def test_nor_does_what_only_training_needs(
    values: dict[str, object], changed: Changed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a GPU nor a tracker's package is needed."""

    def missing() -> None:
        raise ConfigError("not installed")

    for tracker in (event_files, weights_and_biases):
        monkeypatch.setattr(tracker, "check_installed", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert opens(changed(values))


def test_what_says_which_model_it_is_must_be_understood(changed: Changed) -> None:
    with pytest.raises(ConfigError, match="is of another version"):
        open_trained(changed({"batch": {"micro_batch": 7}}))


def test_a_run_opens_from_another_folder_than_it_was_started_in(
    run: Path, rows: Path, changed: Changed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its relative paths, and modules of a task, are from there; those that an option names are from here."""
    changed({"data": {"train": "train", "validation": None}})
    path = run / "config.yaml"
    path.write_text(f"{STARTED_IN}{rows}\n{path.read_text()}")
    (tmp_path / "train").symlink_to(rows / "train")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert opens(str(run)) and sys.path[-2:] == [str(rows), str(tmp_path)]
    assert plan_of(str(run)).manifest.url == str(rows / "train")
    assert plan_of(str(run), train=["train"]).manifest.url == str(tmp_path / "train")
