"""A model in pipeline stages: each place holds its own, together they compute the whole; misfits are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.config.parallel import ParallelConfig
from elastic_train.errors import ConfigError
from elastic_train.job.cells.cell_plan import cell_plan_of
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Decoder, DecoderShape
from elastic_train.tasks.placements import Degrees, Piece, Placements, run_piece
from elastic_train.tasks.task import Batch, LaneLoss
from elastic_train.tasks.witness import Witness

SHAPE = DecoderShape(vocabulary=11, dim=16, depth=5, heads=4, tied=False, dropout=0.3)
TASK = CausalLM(model={"dim": 16, "depth": 5, "heads": 4, "tied": False})


@pytest.mark.parametrize(("num_stages", "num_blocks"), [(2, [2, 3]), (3, [1, 2, 2]), (5, [1] * 5)])
def test_blocks_are_dealt_evenly_and_the_last_stage_has_no_fewer(num_stages: int, num_blocks: list[int]) -> None:
    plan = TASK.placements(Decoder(SHAPE), Degrees(stages=num_stages)).stages
    assert [sum(name.startswith("blocks.") for name in stage) for stage in plan] == num_blocks
    assert [name for stage in plan for name in stage] == Decoder(SHAPE).parts


class Staged(Witness):
    """A task that defines its own stages."""

    def __init__(self, *plan: Sequence[str]) -> None:
        super().__init__()
        self._plan = plan

    def placements(self, model: nn.Module, degrees: Degrees) -> Placements:
        return Placements(stages=self._plan)

    def run(self, model: nn.Module, batch: Batch, piece: Piece) -> LaneLoss:
        return LaneLoss(torch.zeros(()), 0.0)


class Layers(nn.Module):
    """Layers, two with shared weights, and a number."""

    def __init__(self, **extra: Any) -> None:
        super().__init__()
        self.a, self.b, self.tied = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.tied.weight = self.a.weight
        for name, module in extra.items():
            self.add_module(name, module)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("plan", "extra", "message"),
    [
        ([["a", "tied"], ["b"], []], {}, "has 3 stages, not 2"),
        ([["a", "tied"], ["c"]], {}, "names 'c', which the model does not have"),
        (["a", "tied"], {}, "raises TypeError: `stages` has 'a': give a list of modules for each stage"),
        ([["a", "tied", "b"], []], {}, "has no modules in stage 1"),
        ([["a", "tied"], ["c"]], {"c": nn.Linear(2, 2)}, "has 'b.weight' in no stage"),
        ([["a", "tied"], ["b", "c"]], {"c": Scale()}, "'c.scale' is a number, which cannot be left out of a stage"),
    ],
)
def test_stages_that_do_not_fit_their_model_are_refused(
    plan: list[list[str]], extra: dict[str, nn.Module], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cell_plan_of(Staged(*plan), Layers(**extra), ParallelConfig(pipeline=2))


def test_only_the_first_and_the_last_stage_share_a_parameter() -> None:
    for plan, is_refused in (([["a"], ["b"], ["tied"]], False), ([["a"], ["tied"], ["b"]], True)):
        expected = pytest.raises(ConfigError, match=r"has 'a.weight' in the stages 0, 1: only the first and")
        with expected if is_refused else contextlib.nullcontext():
            cell_plan_of(Staged(*plan), Layers(), ParallelConfig(pipeline=3))


def test_a_model_of_fewer_blocks_than_chunks_is_refused() -> None:
    """Two stages with four chunks each need eight pieces."""
    with pytest.raises(ConfigError, match=r"task\.params\.model\.depth: 5 in 8 stages"):
        cell_plan_of(TASK, Decoder(SHAPE), ParallelConfig(pipeline=2, schedule="interleaved:4"))


class Weighted(CausalLM):
    """A user's task that defines `loss` only."""

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        return super().loss(model, batch)


@pytest.mark.parametrize("key", ["pipeline", "context"])
def test_a_task_whose_own_loss_would_not_be_called_is_refused(key: str) -> None:
    task = Weighted(model={"dim": 16, "depth": 5, "heads": 4, "tied": False})
    with pytest.raises(
        ConfigError, match=rf"parallel.{key}: 2 does not work with Weighted, which replaces `loss` and not `run`"
    ):
        cell_plan_of(task, Decoder(SHAPE), ParallelConfig.model_validate({key: 2}))


@pytest.mark.parametrize(
    ("is_last", "message"), [(True, "returns a Tensor for the modules b:"), (False, "returns a LaneLoss for the mod")]
)
def test_a_stage_that_returns_the_wrong_kind_is_refused(is_last: bool, message: str) -> None:
    task = Staged(["a"], ["b"])
    task.run = lambda model, batch, piece: torch.zeros(()) if is_last else LaneLoss(torch.zeros(()), 0.0)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ConfigError, match=message):
        run_piece(task, Layers(), {}, Piece(["b"], is_last=is_last))
