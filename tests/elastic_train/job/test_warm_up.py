"""Warming up has no effect on training, and leaves nothing to import for the first step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from elastic_train.config import sources
from elastic_train.core.order import Cursor
from elastic_train.errors import ConfigError, DataError
from elastic_train.job import warm_up as warm_up_module
from elastic_train.job.plan import Plan, make_plan
from elastic_train.job.state import AppliedState
from elastic_train.job.units.compiled import CompiledBlocks
from elastic_train.job.warm_up import FirstLoss, choose_attention, warm_up
from elastic_train.parallel import product_probe
from elastic_train.parallel.attention import choice, kernels, probe
from elastic_train.parallel.attention.kernels import Machine
from elastic_train.parallel.buffer_mean import BufferMean
from elastic_train.parallel.gradient_sum import make_sum
from elastic_train.parallel.group import Group
from elastic_train.tasks.task import Batch, LaneLoss
from tests.conftest import ROOT, write_rows
from tests.elastic_train.training.jobs import CLASSIFIER, config

pytestmark = pytest.mark.slow


def planned(path: str) -> tuple[Plan, AppliedState]:
    plan = make_plan(sources.load(Path(path), environ={}, arguments=[]))
    return plan, plan.build_state()


class Counts(nn.Module):
    """Counts its forward passes in a buffer, as batch norm does."""

    num_batches: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("num_batches", torch.zeros(1, dtype=torch.int64))

    def forward(self, *inputs: Tensor) -> Tensor:
        self.num_batches += 1
        return self.inner(*inputs)  # type: ignore[no-any-return]


def test_warming_up_changes_nothing(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model trained on a real micro-batch keeps weights, buffers and random state, and has no gradients."""
    plan, _ = planned(config(tmp_path, rows, CLASSIFIER))
    build = plan.task.build_model
    monkeypatch.setattr(plan.task, "build_model", lambda: Counts(build()))
    state = plan.build_state()
    passes: list[int] = []
    state.model.register_forward_hook(lambda model, _, __: passes.append(int(model.num_batches)))
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    random = torch.get_rng_state()
    warm_up(plan, state)
    assert passes == [1, 1]  # the second pass starts from the buffers of the first
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in state.model.parameters())
    assert state.reached.cursor == Cursor()
    assert not state.optimizer.state


def test_a_first_loss_that_is_computed_twice_changes_no_buffer_that_its_pass_leaves() -> None:
    """What is written counts as changed: such buffers were averaged at each step, and complex ones were refused."""
    model, group = nn.Linear(2, 1), Group(0, 1, None, 60)
    model.register_buffer("phases", torch.ones(2, dtype=torch.complex64))
    mean = BufferMean(model, (), group, lambda flats: make_sum("canonical", flats, group, (range(1),)))
    config_of = SimpleNamespace(data=SimpleNamespace(validation=None))
    first = FirstLoss(cast(Plan, SimpleNamespace(task=SimpleNamespace(), config=config_of)), model, tries_metrics=False)

    def loss() -> LaneLoss:
        return LaneLoss(model(torch.ones(1, 2)).sum(), 1.0)

    mean.begin()
    with mean.lane(0, is_empty=False):
        with first.watching():
            found = loss()
        first.check(found, loss)
    assert not mean.has_changed


def test_a_kernel_of_attention_is_chosen_by_the_runs_first_micro_batch(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choosing pass leaves no trace; here it uses the CPU's kernels, and no other processes must agree."""
    plan, state = planned(config(tmp_path, rows, CLASSIFIER))
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    monkeypatch.setattr(warm_up_module, "machine_of", lambda device, *, compiles: Machine(device, (9, 0), compiles))
    monkeypatch.setattr(probe, "_of_another_process", lambda kernel, call, device, mine, *, compiles: mine)
    monkeypatch.setattr(choice, "_current", None)
    loss, heads = plan.task.loss, torch.ones(1, 2, 4, 8)

    def attending(model: nn.Module, batch: Batch) -> LaneLoss:
        scaled_dot_product_attention(heads, heads, heads)
        return loss(model, batch)

    monkeypatch.setattr(plan.task, "loss", attending)
    [[batch]] = plan.feed.training(plan.order, range(1), Cursor(), num_steps=1)
    choose_attention(plan, state, batch)
    found = choice.current()
    assert found is not None and found.name == "torch" and [one.name for one in found.admitted] == ["torch"]
    assert list(found.refused) == ["FA4", "FA3"], "no call is for a decoder's kernel"
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())


def test_a_kernel_of_packed_rows_is_proven_before_there_are_weights(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, and in a run whose first micro-batch has no documents, packed rows have a mask on a GPU."""
    monkeypatch.setattr(warm_up_module, "machine_of", lambda device, *, compiles: Machine(device, (9, 0), compiles))
    monkeypatch.setattr(probe, "_of_another_process", lambda kernel, call, device, mine, *, compiles: mine)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(choice, "_current", None)
    monkeypatch.setattr(kernels, "_packed", kernels.MASK)
    packed = {"document_ids": "input_ids"}  # equal neighbours are a document
    for columns, chosen in (({}, ""), (packed, "varlen")):
        sizes = {"dim": 16, "depth": 2, "heads": 2, "vocabulary": 64}
        task = {
            "path": "elastic_train.tasks.causal_lm:CausalLM",
            "params": {"max_tokens": 16, "model": sizes, **columns},
        }
        tree = {**CLASSIFIER, "task": task, "precision": "bf16", "parallel": {"shards": "parameters"}}
        plan = make_plan(sources.load(Path(config(tmp_path, rows, tree)), environ={}, arguments=[]))
        state = plan.build_state(may_defer=True)
        [[batch]] = plan.feed.training(plan.order, range(1), Cursor(), num_steps=1)
        assert not state.shards.cut.has_weights
        choose_attention(plan, state, batch)
        found = choice.current()
        assert found is not None and found.packed == chosen
        assert kernels.masks_documents(torch.device("cuda")) == (not chosen)


def test_products_of_the_runs_first_micro_batch_are_tried_in_another_process(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it has other bits. An encoder's block multiplies each token by four matrices."""
    plan, state = planned(config(tmp_path, rows, {**CLASSIFIER, "precision": "fp8"}))
    asked = list[str]()

    def elsewhere(command: object, calls: str, *_: object) -> str:
        asked.append(calls)
        return "other"

    monkeypatch.setattr(product_probe, "digest_elsewhere", elsewhere)
    [[batch]] = plan.feed.training(plan.order, range(1), Cursor(), num_steps=1)
    with pytest.raises(ConfigError, match=r"products in float8 \(another process gave different bits\), since"):
        choose_attention(plan, state, batch)
    assert batch.tensors is not None and len(asked) == 1
    num_tokens = batch.tensors["tokens"].numel()
    assert all(rows == num_tokens for rows, _, _ in json.loads(asked[0])), asked


def test_warming_up_tolerates_unreadable_data(tmp_path: Path) -> None:
    """Warming up reads a sample of one lane; an unreadable one does not keep a rank from joining.

    Unless blocks are compiled for its shape: a rank without them would round differently.
    """
    write_rows(tmp_path / "rows" / "train", 331, seed=1)
    write_rows(tmp_path / "rows" / "validation", 101, seed=2)
    plan, state = planned(config(tmp_path, tmp_path / "rows", CLASSIFIER))
    for path in (tmp_path / "rows" / "train").glob("*.parquet"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError):
        list(plan.feed.training(plan.order, range(1), Cursor(), num_steps=1))
    warm_up(plan, state)
    state.compiled = CompiledBlocks(state.model)
    with pytest.raises(DataError):
        warm_up(plan, state)


def test_a_forked_worker_has_nothing_to_import(tmp_path: Path, rows: Path) -> None:
    """A node's standby process imports all that training uses: the first steps import no package.

    It does not import what torchmetrics only refers to or this task does not use, which would take seconds.
    """
    program = (
        "import runpy, sys, elastic_train.preload\n"
        "before = {name.split('.')[0] for name in sys.modules} | {n for n in sys.modules if n.startswith('pyarrow')}\n"
        "sys.argv[2:] = ['--max_steps', '3']\n"
        "try:\n"
        "    runpy.run_module('elastic_train', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "after = {name.split('.')[0] for name in sys.modules} | {n for n in sys.modules if n.startswith('pyarrow')}\n"
        "unused = ('scipy.signal', 'matplotlib', 'transformers')\n"
        "print('new:', sorted(after - before), [name for name in unused if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", program, config(tmp_path, rows, CLASSIFIER)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "new: [] []"
