"""Warming up changes nothing that training sees, and leaves nothing to import to the first step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from elastic_train.config import sources
from elastic_train.core.order import Cursor
from elastic_train.errors import DataError
from elastic_train.job.plan import Plan, make_plan
from elastic_train.job.state import AppliedState
from elastic_train.job.units.compiled import CompiledBlocks
from elastic_train.job.warm_up import warm_up
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
    """A model that trains on a real micro-batch keeps weights, buffers, random numbers, and has no gradients."""
    plan, _ = planned(config(tmp_path, rows, CLASSIFIER))
    build = plan.task.build_model
    monkeypatch.setattr(plan.task, "build_model", lambda: Counts(build()))
    state = plan.build_state()
    passes: list[int] = []
    state.model.register_forward_hook(lambda model, _, __: passes.append(int(model.num_batches)))
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    random = torch.get_rng_state()
    warm_up(plan, state)
    assert passes == [1, 1]  # the second from the buffers that the first began with
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in state.model.parameters())
    assert state.cursor == Cursor()
    assert not state.optimizer.state


def test_warming_up_tolerates_unreadable_data(tmp_path: Path) -> None:
    """Warming up reads a sample of one lane; an unreadable one does not keep a rank from joining.

    Unless blocks are compiled for its shape: a rank without them would round otherwise than the others.
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
    """What training uses is imported by what a node's standby process loads: no package comes with the first steps.

    Nor does that process import what torchmetrics only names, or what this task does not use: that takes seconds.
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
