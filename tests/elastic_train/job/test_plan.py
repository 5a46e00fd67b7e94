"""A plan refuses commits of another run and unsatisfiable settings before training, with the reason."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.retention_policies import Best
from elastic_train.config import yaml12
from elastic_train.config.schema import Config, TaskConfig
from elastic_train.core.order import VERSION
from elastic_train.errors import ConfigError, DataError, ElasticTrainError
from elastic_train.job import plan as plan_module
from elastic_train.job.model_layout import make_gradients_dense
from elastic_train.job.plan import Plan, check_can_be_in_cells, make_plan
from elastic_train.job.plan_facts import describe_rate, describe_tests
from elastic_train.tasks.task import load_task

in_one_process = pytest.mark.xdist_group("torchmetrics")  # the task's metrics import it, which takes two seconds

DAMPED = {"name": "sgd", "options": {"momentum": 0.9, "dampening": 0.5}}
"""Momentum that starts with a gradient, not with zeros."""


def commit_of(**fields: object) -> CommitRecord:
    """Return a commit with only the fields that a plan compares."""
    record = object.__new__(CommitRecord)
    facts = {"config_digest": "one", "manifest_digest": "two", "order": {"version": VERSION, "lengths": 0}, **fields}
    for name, value in {"term": 1, "step": 9, **facts}.items():
        object.__setattr__(record, name, value)
    return record


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"config_digest": "other"}, ConfigError, "another configuration"),
        ({"manifest_digest": "other"}, DataError, "manifest changed"),
        ({"order": {"version": VERSION, "lengths": 7}}, DataError, "a different column"),
        ({"order": {"version": VERSION - 1, "lengths": 0}}, ConfigError, "order of another version"),
        ({"order": {"lengths": 0}}, ConfigError, "order of another version"),
        ({"order": None}, ConfigError, "order of another version"),
    ],
)
def test_a_commit_of_another_run_is_refused(
    fields: dict[str, object], error: type[ElasticTrainError], message: str
) -> None:
    """Continuing would repeat samples and skip others."""
    config = SimpleNamespace(
        run=SimpleNamespace(dir="run"), checkpoint_url="run", identity=lambda: "one", changed_since=lambda before: {}
    )
    manifest = SimpleNamespace(digest="two", url="rows")
    plan = SimpleNamespace(config=config, manifest=manifest, order=SimpleNamespace(arrangement=None), sources=())
    Plan.check_continues(plan, commit_of())  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        Plan.check_continues(plan, commit_of(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_beside_the_commits", [False, True])
def test_a_refused_resume_names_the_keys_that_differ_with_both_values(
    tmp_path: Path, is_beside_the_commits: bool
) -> None:
    """It names the keys that determine the order and the state, and no other changed key."""
    folder = tmp_path / "run"
    tree = {"data": {"train": "rows"}, "run": {"dir": str(folder)}, "checkpoint": {"url": str(tmp_path / "commits")}}
    before = Config.model_validate({**tree, "batch": {"global_batch": 64}, "task": {"params": {"dim": 8}}, "epochs": 2})
    stored = tmp_path / "commits/configs/00000001.yaml" if is_beside_the_commits else folder / "config.yaml"
    stored.parent.mkdir(parents=True)
    stored.write_text(before.to_yaml())
    now = Config.model_validate({**tree, "batch": {"global_batch": 32}, "task": {"params": {"depth": 2}}, "epochs": 3})
    plan = SimpleNamespace(config=now, manifest=SimpleNamespace(digest="two", url="rows"), sources=())
    with pytest.raises(ConfigError) as refused:
        Plan.check_continues(plan, commit_of())  # type: ignore[arg-type]
    said = str(refused.value)
    assert "batch.global_batch was 64 and is 32 now" in said
    assert "task.params.dim was 8 and is None now; task.params.depth was None and is 2 now" in said
    assert not any(key in said for key in ("epochs", "seed", "block_row_groups", "micro_batch"))


def planned(rows: Path, **changes: object) -> Plan:
    """Plan a run of the built-in task over the small dataset."""
    data = {"train": str(rows / "train"), "validation": str(rows / "validation")}
    tree = {"data": data, "task": {"params": {"vocabulary": 64}}, "device": "cpu", **changes}
    return make_plan(Config.model_validate(tree))


@in_one_process
@pytest.mark.parametrize("best", ["min loss", "max samples", "max macro_f1"])
def test_a_keep_best_by_a_validation_metric_is_accepted(rows: Path, best: str) -> None:
    """Metrics of every task, and those of this one."""
    assert planned(rows, checkpoint={"keep_best": best}).retention.policies[-1] == Best.parse(best)


@in_one_process
@pytest.mark.parametrize(
    ("best", "validation", "message"),
    [
        ("max macrof1", True, "has no 'macrof1'; did you mean 'macro_f1'"),
        ("min zzzz", True, "has no 'zzzz'; it has loss, samples, "),
        ("min loss", False, "no data.validation"),
    ],
)
def test_a_keep_best_that_no_commit_could_satisfy_is_refused(
    rows: Path, best: str, validation: bool, message: str
) -> None:
    """It would keep nothing, and nobody would notice until the commit is gone."""
    data = {"train": str(rows / "train"), "validation": str(rows / "validation") if validation else None}
    with pytest.raises(ConfigError, match=rf"checkpoint\.keep_best '{best}'.*{message}"):
        planned(rows, data=data, checkpoint={"keep_best": best})


@in_one_process
def test_early_stopping_keeps_the_best_and_is_refused_where_there_is_none(rows: Path) -> None:
    """Early stopping follows the rules of `keep_best`. With both, each metric's best commit is kept."""
    stopping = {"early_stopping": {"metric": "max macro_f1"}}
    assert planned(rows, validation=stopping).retention.policies[-1] == Best.parse("max macro_f1")
    kept = planned(rows, validation=stopping, checkpoint={"keep_best": "min loss"})
    assert kept.retention.policies[-2:] == (Best.parse("min loss"), Best.parse("max macro_f1"))
    with pytest.raises(ConfigError, match=r"validation\.early_stopping 'max macrof1'.*did you mean 'macro_f1'"):
        planned(rows, validation={"early_stopping": {"metric": "max macrof1"}})
    for wrong, message in (
        ({"early_stopping": {"metric": "loss"}}, "does not say which commit is best"),
        ({"early_stopping": {}, "every": None}, "needs validations to judge by"),
        ({"weights": "ema"}, "validation.weights: ema needs an average"),
        ({"every": "9 steps, 1 epoch"}, "'9 steps, 1 epoch' is two periods: write '100 steps', '2 epochs'"),
    ):
        with pytest.raises(ValidationError, match=message):
            planned(rows, validation=wrong)


def test_validations_are_due_after_steps_or_after_whole_epochs(rows: Path) -> None:
    """Epochs replace the default in steps, also after the configuration was written and read back."""
    by_epoch = planned(rows, validation={"every": "2 epochs", "early_stopping": {}}, epochs=3)
    assert by_epoch.validates_every == 2 * by_epoch.total_steps // 3
    assert Config.model_validate(yaml12.parse(by_epoch.config.to_yaml())).validation == by_epoch.config.validation
    assert planned(rows).validates_every == 100 and planned(rows, validation={"every": None}).validates_every is None


@pytest.mark.parametrize("below", ["", "/below/it"])
def test_a_file_in_the_place_of_a_folder_is_refused_before_anything_is_computed(rows: Path, below: str) -> None:
    """It took the time of ten worlds, and ended as a store that cannot be written to."""
    file = rows / "train" / "manifest.json"
    places: list[dict[str, Any]] = [{"run": {"dir": f"{file}{below}"}}]
    places += [{"checkpoint": {"url": f"{scheme}{file}{below}"}} for scheme in ("", "file://")]
    for place in places:
        with pytest.raises(ConfigError, match=rf"(run.dir|checkpoint.url) .*: {file} is a file, not a folder"):
            make_plan(Config.model_validate({"data": {"train": str(rows)}, **place}))
    planned(rows, run={"dir": f"{file}{below}"}, checkpoint={"url": str(rows / "commits")})  # costs this node's history


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"name": "sgd", "options": {"nesterov": True}}}, "'sgd' refuses them: Nesterov"),
        ({"optimizer": {"schedule": "nowhere:factor"}}, r"optimizer\.schedule: 'nowhere:factor' cannot be imported"),
        ({"optimizer": DAMPED, "parallel": {"shards": "gradients"}}, "set parallel.shards to none"),
        ({"parallel": {"tensor": 2}}, "parallel.tensor: 2 does not work with TextClassifier, which does not say how"),
        (
            {"parallel": {"shards": "optimizer"}, "optimizer": DAMPED},
            "parallel.pipeline to 1 and parallel.expert to 1, or optimizer.name to adamw",
        ),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(rows: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(rows, **changes)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"heads": 0}, "heads must be at least 1, not 0"),
        ({"heads": -4}, "heads must be at least 1, not -4"),
        ({"category_buckets": 1}, "category_buckets must be at least 2, not 1"),
    ],
)
def test_a_task_that_cannot_be_built_is_refused(params: dict[str, object], message: str) -> None:
    """A divisor of zero is refused by its name, not by a ZeroDivisionError."""
    with pytest.raises(ConfigError, match=message):
        load_task(TaskConfig(params=params))


@pytest.mark.parametrize(("num_workers", "is_fit"), [(3, True), (1, False)])
def test_a_live_node_may_have_workers_beyond_its_cells(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, is_fit: bool
) -> None:
    """They are standby ranks. Other launchers form one world of all ranks, so there are none."""
    config = Config.model_validate({"data": {"train": "rows"}, "parallel": {"tensor": 2}})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_workers))
    with pytest.raises(ConfigError, match="start a multiple of 2 on each"):
        check_can_be_in_cells(config)
    monkeypatch.setattr(plan_module, "live_context", lambda: SimpleNamespace(max_nodes=2))
    with nullcontext() if is_fit else pytest.raises(ConfigError, match="start at least 2"):
        check_can_be_in_cells(config)


@pytest.mark.parametrize(
    ("num_workers", "max_nodes", "message"),
    [
        (2, 2, ""),
        (3, 1, "needs 4 workers, and this node, the only one, has 3: start at least 4"),
        (1, 4, "needs 2 workers of one node for each stage, and this node has 1: start at least 2"),
        (2, None, ""),
        (3, None, "needs workers of one node for each stage, and this node has 3: start a multiple of 2"),
    ],
)
def test_a_node_has_room_for_a_stage(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, max_nodes: int | None, message: str
) -> None:
    """The stages may be on different nodes, the tensor ranks of a stage may not."""
    config = Config.model_validate({"data": {"train": "rows"}, "parallel": {"tensor": 2, "pipeline": 2}})
    live = None if max_nodes is None else SimpleNamespace(max_nodes=max_nodes)
    monkeypatch.setattr(plan_module, "live_context", lambda: live)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_workers))
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_can_be_in_cells(config)


class Looked(nn.Module):
    """Looks up rows with sparse gradients, through torch's function or its module."""

    def __init__(self, *, is_module: bool) -> None:
        super().__init__()
        self.rows, self.is_module = nn.Embedding(5, 3, sparse=True), is_module

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids) if self.is_module else nn.functional.embedding(ids, self.rows.weight, sparse=True)


def test_sparse_gradients_are_dense_or_refused_in_the_first_backward_pass() -> None:
    """Adding rows to a sum of lanes one by one rounds differently than a leaf: the bits would depend on the ranks."""
    ids = torch.tensor([1, 1, 4])
    for is_module in (True, False):
        model = Looked(is_module=is_module)
        make_gradients_dense(model)
        if is_module:
            model(ids).sum().backward()
            assert model.rows.weight.grad is not None and not model.rows.weight.grad.is_sparse
        else:
            with pytest.raises(ConfigError, match=r"a sparse gradient of 'rows.weight'.*without sparse=True"):
                model(ids).sum().backward()
        assert not model.rows.weight._backward_hooks


@pytest.mark.parametrize(
    ("parallel", "device", "said"),
    [
        ({"tensor": 2, "context": 2}, "cuda:0", "parallel.tensor: 2 and parallel.context: 2 on GPUs was run with a st"),
        ({"pipeline": 2}, "cpu", None),
        ({"shards": "parameters"}, "cuda:0", None),
    ],
)
def test_a_start_says_which_degrees_no_gpu_has_seen(parallel: dict[str, object], device: str, said: str | None) -> None:
    config = Config.model_validate({"data": {"train": "rows"}, "parallel": parallel})
    found = describe_tests(config, torch.device(device))
    assert found == said if said is None else (found or "").startswith(said)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("changes", "num_casts"),
    [({}, 2), ({"parallel": {"shards": "parameters"}}, 6), ({"parallel": {"recompute": "units"}}, 6)],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_lanes_share_the_casts_of_weights_and_have_the_bits_of_their_own(
    rows: Path, changes: dict[str, object], num_casts: int, *, recompute: bool
) -> None:
    """Each weight is cast once per step of three lanes, and again after an update; not in memory-saving modes."""
    plan = replace(planned(rows, precision="bf16", **changes), device=torch.device("cuda"))  # the device is never used
    torch.manual_seed(0)
    first, second = nn.Linear(16, 32), nn.Linear(32, 4)
    weights, kinds = [*first.parameters(), *second.parameters()], {first.weight.shape, second.weight.shape}
    lanes = torch.randn(3, 5, 16)

    def step() -> None:
        for lane in lanes:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = first(lane).relu()
                made = checkpoint(second, hidden, use_reentrant=False) if recompute else second(hidden)
            made.float().square().sum().backward()

    def gradients() -> list[torch.Tensor]:
        found = [weight.grad.clone() for weight in weights if weight.grad is not None]
        for weight in weights:
            weight.grad = None
        return found

    for _ in range(2):
        step()
        expected = gradients()
        with Casts(kinds) as casts, plan.keep_casts(len(lanes)):
            step()
        assert casts.count == num_casts + (3 if recompute and changes else 0), "what is recomputed is cast again"
        found = gradients()
        assert len(found) == 4 and all(one.equal(other) for one, other in zip(found, expected, strict=True))
        with torch.no_grad():
            for weight in weights:
                weight.mul_(1.5)
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0


class Casts(TorchDispatchMode):
    """Counts casts to bf16 of tensors with some shapes."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self._shapes, self.count = shapes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16
        self.count += is_cast and args[0].shape in self._shapes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("params", "usual"),
    [
        ({}, "weights from scratch"),
        ({"hf": {"config": {"model_type": "gpt2"}}}, "weights from scratch"),
        ({"hf": {"path": "base"}}, "fine-tuning all weights"),
        ({"hf": {"path": "base"}, "lora": {"r": 8}}, "adapters"),
    ],
)
def test_a_rate_is_shown_with_those_that_are_usual_for_what_is_trained(params: dict[str, object], usual: str) -> None:
    tree = {"data": {"train": "rows"}, "task": {"params": params}}
    assert describe_rate(Config.model_validate(tree)).startswith(f"0.001 at most; usual for {usual}: ")
    sgd = Config.model_validate({**tree, "optimizer": {"name": "sgd"}})
    assert describe_rate(sgd) == "0.001 at most"


@pytest.mark.heavy
def test_a_model_that_a_subclass_builds_begins_with_its_own_weights(rows: Path) -> None:
    """Also where ranks make only their own: the inherited sketch is of another model."""
    params = {"max_tokens": 8, "model": {"dim": 8, "depth": 2, "heads": 2, "vocabulary": 64}}
    task = {"path": "tests.tasks:OwnLanguageModel", "params": params}
    built, drawn = (
        dict(planned(rows, task=task, parallel={"shards": shards}).first_weights()) for shards in ("none", "parameters")
    )
    assert built.keys() == drawn.keys() >= {"factor", "offset"}
    assert all(torch.equal(one, drawn[name]) for name, one in built.items())
