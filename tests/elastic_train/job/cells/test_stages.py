"""A model in pipeline stages: each place holds its own, together they compute the whole; misfits are refused."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_train.config.parallel import ParallelConfig
from elastic_train.core.mesh import Mesh
from elastic_train.errors import ConfigError
from elastic_train.job.cells.cell_plan import cell_plan_of
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.job.cells.stage import Stage, stage_of
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.parallel.cells.pipeline import Passes, run_program
from elastic_train.program.schedules import Pass, Pipeline
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Decoder, drawn_weights
from elastic_train.tasks.decoder.shape import DecoderShape
from elastic_train.tasks.placements import Degrees, Piece, Placements, run_piece
from elastic_train.tasks.task import Batch, LaneLoss
from elastic_train.tasks.witness import Witness
from tests.elastic_train.program.test_schedules import lanes_alive
from tests.elastic_train.tasks.language_rows import chunks_of
from tests.memory_machine import in_memory
from tests.memory_world import group_of

SHAPE = DecoderShape(vocabulary=11, dim=16, depth=5, heads=4, tied=False, dropout=0.3)
TASK = CausalLM(model={"dim": 16, "depth": 5, "heads": 4, "tied": False})
WIDTHS = (7, 4, 7, 0, 5, 4)
"""Row widths of the lanes; the fourth lane has no samples."""


@pytest.fixture(autouse=True)
def _in_chunks() -> Iterator[None]:
    """Compute losses in chunks of a few rows, as for a large vocabulary."""
    with chunks_of(4):
        yield


@dataclass(frozen=True)
class Subject:
    """The model to run in stages: the whole model, and its weights if they are loaded one by one."""

    task: CausalLM
    build: Callable[[], nn.Module]
    weights: Callable[[], Iterable[tuple[str, Tensor]] | None] = lambda: None


def decoder() -> Subject:
    return Subject(TASK, lambda: Decoder(SHAPE), lambda: drawn_weights(SHAPE))


def begun(subject: Subject) -> nn.Module:
    torch.manual_seed(3)
    return subject.build().train()


def batch_of(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 11, (3, WIDTHS[number]), generator=generator)
    places = torch.arange(tokens.numel() - 1)
    return {"tokens": tokens, "places": places, "targets": tokens.flatten()[1:]}


def losses_of_whole(task: CausalLM, model: nn.Module) -> list[float]:
    """Accumulate the gradients of all lanes, reseeding the generator for each."""
    losses = []
    for number, width in enumerate(WIDTHS):
        if width:
            torch.manual_seed(number)
            loss = task.loss(model, batch_of(number)).total
            loss.backward()
            losses.append(float(loss.detach()))
    return losses


class Lanes(Passes):
    """The passes of a stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.losses = stage, list[float]()

    def key(self, number: int) -> Hashable | None:
        return WIDTHS[number] or None

    def forward(self, one: Pass, given: Tensor | None) -> Tensor | None:
        if not WIDTHS[one.number]:
            assert given is None, "nothing comes of a lane without samples"
            return None
        if given is None:
            torch.manual_seed(one.number)
        made = self.stage.run(one.chunk, batch_of(one.number), given)
        if isinstance(made, Tensor):
            return made
        self.losses.append(float(made.total.detach()))
        return made.total

    def backward(self, one: Pass, made: Tensor | None, gradient: Tensor | None) -> None:
        if made is not None:
            torch.autograd.backward(made, gradient)


def of_rank(rank: int, size: int, kind: str, make: Callable[[], Subject] = decoder, name: str = "world") -> None:
    subject = make()
    whole = begun(subject)
    losses = losses_of_whole(subject.task, whole)
    parallel = ParallelConfig.model_validate({"pipeline": size, "schedule": kind})
    model = begun(subject)
    plan = cell_plan_of(subject.task, model, parallel)
    assert plan is not None
    links, group = CellLinks(), group_of(name, rank, size)
    cut = CutModel(model, plan, parallel.cell, links)
    mesh = Mesh(rank, size, parallel.cell)
    cut.bind(mesh, group)
    torch.manual_seed(3)
    cut.take_place(rank, subject.weights())
    own = {name for name, one in model.named_parameters() if one.numel()}
    pieces = plan.pieces[rank :: plan.num_stages]
    assert len(pieces) == plan.num_chunks == (2 if kind == "interleaved" else 1)
    named = tuple(f"{name}." for piece in pieces for name in piece)
    assert own == {name for name, _ in model.named_parameters() if name.startswith(named)}
    stage = stage_of(subject.task, model, plan, parallel.schedule, mesh, group)
    lanes = Lanes(stage)
    most = run_program(stage.actions(len(WIDTHS)), stage.links, lanes)
    assert lanes.losses == (losses if rank == size - 1 else [])
    for name, one in model.named_parameters():
        expected = whole.get_parameter(name)
        assert torch.equal(cut.whole(name, one), expected)
        assert name not in own or (one.grad is not None and torch.equal(one.grad, expected.grad))
    assert most <= lanes_alive(Pipeline(parallel.schedule, size, len(WIDTHS), plan.num_chunks), rank)
    cut.become_whole()
    assert all(torch.equal(one, whole.get_parameter(name)) for name, one in model.named_parameters())
    group.close()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kind"), [(2, "1f1b"), (2, "gpipe"), (4, "1f1b"), (2, "interleaved")])
@pytest.mark.parametrize("on_devices", [False, True])
def test_stages_compute_the_bits_of_the_whole(size: int, kind: str, on_devices: bool) -> None:
    """Losses and gradients, with dropout, lanes of several shapes, and one without samples."""
    in_memory(of_rank, size, kind, on_devices=on_devices)


def with_experts() -> Subject:
    sizes = {"dim": 16, "depth": 5, "heads": 4, "tied": False, "experts": 3, "expert_hidden": 6, "dropout": 0.3}
    shape = DecoderShape(vocabulary=11, **sizes)  # type: ignore[arg-type]
    task = CausalLM(model=sizes, balance_loss=0.1, router_z_loss=0.01)
    return Subject(task, lambda: Decoder(shape), lambda: drawn_weights(shape))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kind"), [(3, "1f1b"), (2, "interleaved")])
def test_the_routers_of_all_stages_add_to_the_loss(size: int, kind: str) -> None:
    """Router losses of earlier stages pass through all later stages, and their gradients come back."""
    in_memory(of_rank, size, kind, with_experts)


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
        ([["a"], ["b", "tied"]], {}, "has 'a.weight' in the stages 0, 1: its gradient would be added in another order"),
        ([["a", "tied"], ["b", "c"]], {"c": Scale()}, "'c.scale' is a number, which cannot be left out of a stage"),
        (
            [["a", "tied"], ["b", "c"]],
            {"c": nn.BatchNorm1d(2)},
            "parallel.pipeline: 2 does not work with the buffer 'c.runn",
        ),
    ],
)
def test_stages_that_do_not_fit_their_model_are_refused(
    plan: list[list[str]], extra: dict[str, nn.Module], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cell_plan_of(Staged(*plan), Layers(**extra), ParallelConfig(pipeline=2))


def test_all_that_keeps_a_decoder_from_stages_is_said_at_once() -> None:
    shape = DecoderShape(vocabulary=11, dim=16, depth=2)
    with pytest.raises(ConfigError) as caught:
        cell_plan_of(TASK, Decoder(shape), ParallelConfig(pipeline=3))
    assert "task.params.model.depth: 2 in 3 stages" in str(caught.value)
    assert "task.params.model.tied: true, since the first and the last stage would train one matrix" in str(
        caught.value
    )


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
