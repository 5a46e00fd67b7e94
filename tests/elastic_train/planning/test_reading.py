"""A model's facts from its real code: parameters, operations and memory, without memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.sources import load_config
from elastic_train.core.mesh import Cell
from elastic_train.errors import ConfigError
from elastic_train.job import plan as job_plan
from elastic_train.job.cells.cell_plan import cell_plan_of
from elastic_train.job.cells.cut_model import cuts_of
from elastic_train.planning import reading
from elastic_train.planning.arithmetic.catalogue import parse_cluster
from elastic_train.planning.arithmetic.layouts import place_elements
from elastic_train.planning.arithmetic.model import Sizes, Work
from elastic_train.planning.arithmetic.step_time import seconds_of_work
from elastic_train.planning.reading import Read, read_config
from elastic_train.planning.search import Job, work_out
from elastic_train.planning.tracing import REST, Trace
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Decoder, DecoderShape
from elastic_train.tasks.task import Batch, LaneLoss, ParameterGroup
from elastic_train.tasks.text_classifier import TextClassifier
from elastic_train.tracking.destinations import event_files, weights_and_biases
from tests.elastic_train.tasks.language_rows import LLAMA

SHAPE = DecoderShape(vocabulary=512, dim=64, depth=3, heads=4, kv_heads=2, hidden=128)
ROWS, TOKENS = 2, 48
BLOCK = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128


def traced(fakes: FakeTensorMode | None) -> Trace:
    def run() -> Trace:
        model = Decoder(SHAPE)
        tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
        trace = Trace(model, [f"blocks.{n}" for n in range(3)], [*model.parameters(), tokens])
        with trace.watching():
            total = model(tokens).sum()
            trace.end_forward()
            torch.autograd.backward(total)
        return trace

    if fakes is None:
        return run()
    with fakes:
        return run()


@pytest.mark.heavy
def test_operations_are_those_of_the_matrices_and_of_attention() -> None:
    """Attention is counted on a CPU, too, where torch's own counter leaves it out; its backward pass is 5/2 of it."""
    trace = traced(FakeTensorMode())
    tokens, attention = ROWS * TOKENS, 4 * ROWS * TOKENS * TOKENS * 64
    for number in range(3):
        unit = trace.units[f"blocks.{number}"]
        assert unit.forward.flops == 2 * BLOCK * tokens + attention
        assert unit.backward.flops == 4 * BLOCK * tokens + 2.5 * attention
    assert trace.units[REST].forward.flops == 2 * tokens * 64 * 512
    assert trace.units[REST].backward.flops == 4 * tokens * 64 * 512


@pytest.mark.heavy
def test_fakes_take_the_memory_that_tensors_take() -> None:
    fake, real = traced(FakeTensorMode()), traced(None)
    assert fake.peak_bytes == real.peak_bytes
    assert {name: unit.saved_bytes for name, unit in fake.units.items()} == {
        name: unit.saved_bytes for name, unit in real.units.items()
    }
    assert fake.units["blocks.1"].output_bytes == ROWS * TOKENS * 64 * 4


class AsksForAValue(TextClassifier):
    """Its loss depends on a value, so it cannot be followed on fakes."""

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        found = super().loss(model, batch)
        return LaneLoss(found.total, float(found.total.detach().abs() > -1) * found.weight)


class FrozenByGroup(TextClassifier):
    """Trains its head alone, by its groups of parameters."""

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        names = [name for name, _ in model.named_parameters() if not name.startswith("head.")]
        return [ParameterGroup(names, is_frozen=True)]


class FrozenWhenBuilt(TextClassifier):
    """The same, by its model."""

    trained = "head."

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(self.trained))
        return model


class FrozenWhole(FrozenWhenBuilt):
    trained = "nothing"


class SparseGradients(TextClassifier):
    """Its embeddings ask for sparse gradients, which training makes dense."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.sparse = True
        return model


def written(rows: Path, folder: Path, **changes: object) -> Path:
    tree = {
        "run": {"dir": str(folder / "run")},
        "task": {
            "path": "elastic_train.tasks.text_classifier:TextClassifier",
            "params": {"max_tokens": 32, "dim": 16, "depth": 2, "heads": 2, "vocabulary": 64},
        },
        "data": {"train": str(rows / "train")},
        "batch": {"global_batch": 16, "micro_batch": 4},
        "device": "cpu",
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**tree, **changes}))
    return path


def read(rows: Path, folder: Path, **changes: object) -> Read:
    return read_config(load_config(written(rows, folder, **changes)))


def test_a_configuration_is_read_with_its_model_data_and_layout(rows: Path, tmp_path: Path) -> None:
    found = read(rows, tmp_path, parallel={"shards": "gradients"}, optimizer={"ema_decay": 0.9})
    facts, state = found.facts, found.plan.build_state()
    parameters = list(state.model.parameters())
    assert facts.elements == sum(-(-one.numel() // 64) * 64 for one in parameters)
    assert [unit.name for unit in facts.blocks] == ["blocks.0", "blocks.1"] and facts.samples == 4
    assert (facts.sizes.weight, facts.sizes.state) == (4, 8 + 4)  # two moments and the average
    assert (found.layout.shards, found.layout.copies, found.batch.num_lanes) == ("gradients", 2, 4)
    assert found.num_steps == -(-331 // 16)


@pytest.mark.heavy
def test_rows_that_do_not_fill_a_step_are_not_counted_as_more(rows: Path, tmp_path: Path) -> None:
    """331 rows in 8 lanes of 64: each has 41 of them, or 42."""
    found = read(rows, tmp_path, batch={"global_batch": 512, "micro_batch": 64})
    assert (found.batch.num_lanes, found.facts.samples) == (8, 331 / 8)


def test_products_in_float8_are_counted_and_timed_as_such(rows: Path, tmp_path: Path) -> None:
    """They are as many as in bf16: those of the blocks' linear layers, forward and twice backward."""
    in_float8, in_bf16 = (read(rows, tmp_path, precision=precision).facts for precision in ("fp8", "bf16"))
    assert in_float8.flops == in_bf16.flops and in_bf16.forward.float8_flops == 0
    for one in in_float8.blocks:
        assert 0 < one.forward.float8_flops < one.forward.flops
        assert one.backward.float8_flops == 2 * one.forward.float8_flops
    assert in_float8.rest.forward.float8_flops == in_float8.rest.backward.float8_flops == 0
    half = Work(2e12, 0.0, 1, 1e12)
    h100, a100 = (parse_cluster(name).device for name in ("H100", "A100"))
    assert seconds_of_work(half, h100, "fp8") == pytest.approx(
        0.75 * seconds_of_work(Work(2e12), h100, "bf16"), rel=1e-3
    )
    with pytest.raises(ConfigError, match="precision does not work with --on A100, which has no tflops_fp8"):
        seconds_of_work(half, a100, "fp8")


@pytest.mark.heavy
@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cuda"},
        {"device": "auto", "parallel": {"shards": "parameters", "offload": "all", "wire": "bf16"}},
        {"parallel": {"context": 4}},
        {"compile": True},
        {"precision": "fp8"},
        {"tracking": {"tensorboard": True, "wandb": "online"}},
    ],
    ids=str,
)
def test_what_another_machine_has_is_planned_for_on_any(
    changes: dict[str, object], rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here is neither a GPU, nor a compiler, nor a tracker's package."""

    def missing(*_: object) -> None:
        raise ConfigError("not here")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for tracker in (event_files, weights_and_biases):
        monkeypatch.setattr(tracker, "check_installed", missing)
    for check in ("check_can_compile", "check_multiplies"):
        monkeypatch.setattr(job_plan, check, missing)
    found, plain = read(rows, tmp_path, **changes), read(rows, tmp_path)
    assert found.facts.elements == plain.facts.elements and found.num_steps == plain.num_steps
    asked = changes.get("parallel", {})
    assert isinstance(asked, dict) and all(getattr(found.layout, name) == value for name, value in asked.items())


@pytest.mark.heavy
def test_tied_weights_count_in_both_stages_that_have_them(rows: Path, tmp_path: Path) -> None:
    model = {"dim": 64, "depth": 2, "heads": 2, "vocabulary": 512}
    task = {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": {"max_tokens": 16, "model": model}}
    data, parallel = {"train": str(rows / "train"), "too_long": "truncate"}, {"pipeline": 2}
    found = read(rows, tmp_path, task=task, data=data, parallel=parallel)
    built = found.plan.task.build_model()
    cells = cell_plan_of(found.plan.task, built, ParallelConfig.model_validate(parallel))
    assert cells is not None
    cuts = cuts_of(built, cells, Cell(stage=2))
    held = [sum(cuts[name].part_shape(place).numel() for name, _ in built.named_parameters()) for place in (0, 1)]
    assert place_elements(found.facts, found.layout, trained=True) == pytest.approx(max(held), rel=0.01)


@pytest.mark.heavy
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize(
    ("schedule", "expected"), [("1f1b", ("1f1b", 1)), ("gpipe", ("gpipe", 1)), ("interleaved:3", ("1f1b", 3))]
)
def test_a_schedule_is_read_also_for_stages_that_only_the_plan_has(
    schedule: str, expected: tuple[str, int], pipeline: int, rows: Path, tmp_path: Path
) -> None:
    parallel = {"pipeline": pipeline, "schedule": schedule}
    found = read(rows, tmp_path, parallel=parallel)
    layout = found.layout
    assert bool(found.refused) == (pipeline > 1), found.refused
    assert (layout.schedule, layout.interleave) == expected
    assert layout.pipeline == pipeline


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.xdist_group("transformers")  # one process imports it
@pytest.mark.slow
def test_a_model_of_transformers_is_read_without_memory_and_its_layers_are_dealt_to_stages(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_REAL_BYTES", 0)  # nor would it be run for real
    params = {"hf": {"config": {**LLAMA, "vocab_size": 64, "tie_word_embeddings": False}}, "max_tokens": 16}
    task = {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": params}
    found = read(rows, tmp_path, task=task, data={"train": str(rows / "train"), "too_long": "truncate"})
    facts = found.facts
    assert [unit.name for unit in facts.blocks] == ["model.layers.0", "model.layers.1"]
    one, two = (place_elements(facts, replace(found.layout, pipeline=num), trained=True) for num in (1, 2))
    assert two == facts.blocks[0].elements + facts.rest.elements / 2 and one == 2 * two
    job = Job(facts, found.batch, parse_cluster("2xH100"), found.num_steps)
    outcome = work_out(job, replace(found.layout, pipeline=2))
    assert outcome.memory is not None and outcome.step is not None and not outcome.problems
    assert outcome.memory.parts["weights"] == 4 * two and outcome.layout.runs_today


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "state"), [("adamw", 8), ("sgd", 0), ("muon", 4)])
def test_what_an_optimizer_keeps_is_tried(name: str, state: float, rows: Path, tmp_path: Path) -> None:
    assert read(rows, tmp_path, optimizer={"name": name}).facts.sizes.state == state


@pytest.mark.heavy
def test_a_model_that_asks_for_values_is_run_for_real(rows: Path, tmp_path: Path) -> None:
    plain, real = read(rows, tmp_path).facts, read_task("AsksForAValue", rows, tmp_path).facts
    assert real.blocks == plain.blocks


class HalfPrecision(CausalLM):
    """A model with trained weights in bf16 and frozen weights in fp32."""

    def build_model(self) -> nn.Module:
        model = super().build_model().to(torch.bfloat16)
        model.table = nn.Parameter(torch.zeros(sum(one.numel() for one in model.parameters())), requires_grad=False)
        return model


@pytest.mark.heavy
def test_gradients_and_moments_have_the_type_of_what_is_trained(rows: Path, tmp_path: Path) -> None:
    model = {"dim": 64, "depth": 2, "heads": 2, "vocabulary": 512}
    task = {"path": f"{__name__}:HalfPrecision", "params": {"max_tokens": 16, "model": model}}
    data = {"train": str(rows / "train"), "too_long": "truncate"}
    sizes = read(rows, tmp_path, task=task, data=data, optimizer={"ema_decay": 0.9}).facts.sizes
    assert sizes == Sizes(weight=(2 + 4) / 2, gradient=2, state=2 * 2 + 2)


class FrozenExperts(CausalLM):
    """Its experts stay as they were."""

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        return [ParameterGroup([name for name, _ in model.named_parameters() if ".experts." in name], is_frozen=True)]


@pytest.mark.heavy
@pytest.mark.parametrize("shards", ["none", "gradients"])
def test_frozen_experts_take_no_gradients_away_from_what_is_trained(shards: str, rows: Path, tmp_path: Path) -> None:
    model = {"dim": 64, "depth": 2, "heads": 2, "vocabulary": 512, "experts": 4, "expert_hidden": 64}
    task = {"path": f"{__name__}:FrozenExperts", "params": {"max_tokens": 16, "model": model}}
    data, parallel = (
        {"train": str(rows / "train"), "too_long": "truncate"},
        {"expert": 2, "shards": shards, "copies": 1},
    )
    found = read(rows, tmp_path, task=task, data=data, parallel=parallel)
    assert place_elements(found.facts, found.layout, trained=True) == found.facts.trained
    memory = work_out(Job(found.facts, found.batch, parse_cluster("2xH100"), 1), found.layout).memory
    assert memory is not None and memory.gradients >= 4 * found.facts.trained


def read_task(name: str, rows: Path, folder: Path) -> Read:
    params = {"max_tokens": 32, "dim": 16, "depth": 2, "heads": 2, "vocabulary": 64}
    return read(rows, folder, task={"path": f"{__name__}:{name}", "params": params})


@pytest.mark.heavy
def test_a_model_is_read_as_training_makes_it_ready(rows: Path, tmp_path: Path) -> None:
    """With the weights frozen that its task wants frozen, with dense gradients, and with something to train."""
    by_group, when_built, sparse = (
        read_task(name, rows, tmp_path).facts for name in ("FrozenByGroup", "FrozenWhenBuilt", "SparseGradients")
    )
    assert by_group.units == when_built.units and by_group.trained < by_group.elements
    assert not any(block.backward.flops for block in by_group.blocks)
    assert (by_group.largest_tensor, by_group.num_tensors) == (4 * 16, 2), "the head's weight and bias"
    assert sparse.trained == sparse.elements
    with pytest.raises(ConfigError, match="empty parameter list"):
        read_task("FrozenWhole", rows, tmp_path)
