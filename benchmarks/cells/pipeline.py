"""Pipelining compared with torch's: the same decoder in two stages, the same micro-batches and schedule.

The peer is a loop of `torch.distributed.pipelining` on gloo: a `PipelineStage` of the same modules for each chunk, with
`Schedule1F1B`, `ScheduleGPipe` and `ScheduleInterleaved1F1B`. Both sides run in the same processes, in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from benchmarks.figures import Effort
from benchmarks.ranks import Meeting, Sides, compared, run
from elastic_train.config.parallel import ParallelConfig
from elastic_train.core.mesh import Mesh
from elastic_train.job.cells.cell_plan import CellPlan, cell_plan_of
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.job.cells.stage import Stage, stage_of
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.parallel.cells.pipeline import Passes, run_program
from elastic_train.parallel.group import Group
from elastic_train.program.schedules import Kind, Pass
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Decoder, DecoderShape
from elastic_train.tasks.task import Batch

SIZES = {"dim": 256, "depth": 4, "heads": 8, "kv_heads": 4, "tied": False}
SHAPE = DecoderShape(vocabulary=512, **SIZES)  # type: ignore[arg-type]
TASK = CausalLM(model=SIZES)
ROWS, TOKENS, LANES, STAGES = 2, 256, 8, 2
PEERS: Mapping[Kind, type] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B}
NAMES = ("pp2_vs_torch", "pp2_cpu_vs_torch")
UNTIMED = 1


def beside_torch(effort: Effort) -> dict[str, object]:
    """Run both sides in turn, in two processes, with each schedule."""
    figures: dict[str, dict[str, float]] = {name: {} for name in NAMES}
    peaks: dict[str, int] = {}
    for kind in PEERS:
        found = run(in_turn, STAGES, kind, 6 if effort.is_quick else 30)
        for name, ratio in compared(effort, NAMES, [sides for sides, _ in found], kind).items():
            figures[name][kind] = ratio
        if kind == "1f1b":
            peaks = {f"stage {rank} of {STAGES}": peak for rank, (_, peak) in enumerate(found)}
    return {**figures, "pp_1f1b_peak_lanes": peaks}


def in_turn(
    meeting: Meeting, kind: Kind, rounds: int, tokens: int = TOKENS, untimed: int = UNTIMED
) -> tuple[Sides, int]:
    """Run one stage of both sides in turn; return the times, and the most lanes that our stage had alive.

    Raises AssertionError if gradients differ.
    """
    meeting.join_torch(any_algorithm=True)
    batches = [_batch(number, tokens) for number in range(LANES)]
    lanes = _Lanes(_our_stage(meeting.group, kind), batches)
    theirs, model = _torch_step(meeting.group.rank, batches, PEERS[kind], lanes.stage.plan)

    def forget() -> None:
        for one in (*lanes.stage.model.parameters(), *model.parameters()):
            one.grad = None

    lanes.step()
    theirs()
    _check_same(lanes.stage.model, model)
    forget()
    return meeting.in_turn([lanes.step, theirs], rounds, untimed, forget), lanes.peak


def _batch(number: int, num_tokens: int) -> Batch:
    drawn = torch.Generator().manual_seed(number)
    return _batch_of(torch.randint(0, SHAPE.vocabulary, (ROWS, num_tokens), generator=drawn))


def _batch_of(tokens: Tensor) -> Batch:
    places = torch.arange(tokens.numel()).view(tokens.shape)[:, :-1].flatten()
    return {"tokens": tokens, "places": places, "targets": tokens[:, 1:].flatten()}


def _our_stage(group: Group, kind: Kind) -> Stage:
    model, links = _whole(), CellLinks()
    parallel = ParallelConfig.model_validate({"pipeline": STAGES, "schedule": kind})
    plan = cell_plan_of(TASK, model, parallel)
    assert plan is not None, "the decoder has stages"
    CutModel(model, plan, parallel.cell, links).take_place(group.rank)
    return stage_of(TASK, model, plan, kind, Mesh(group.rank, STAGES, parallel.cell), group)


class _Lanes(Passes):
    """The passes of our stage, without the rest of training."""

    def __init__(self, stage: Stage, batches: list[Batch]) -> None:
        self.stage, self._batches, self.peak = stage, batches, 0

    def step(self) -> None:
        self.peak = run_program(self.stage.actions(LANES), self.stage.links, self)

    def key(self, number: int) -> Hashable | None:
        return tuple(tensor.shape for tensor in self._batches[number].values())

    def forward(self, one: Pass, given: Tensor | None) -> Tensor:
        made = self.stage.run(one.chunk, self._batches[one.number], given)
        return made if isinstance(made, Tensor) else made.total

    def backward(self, one: Pass, made: Tensor | None, gradient: Tensor | None) -> None:
        assert made is not None, "all lanes have samples"
        torch.autograd.backward(made, gradient)


class _Part(nn.Module):
    """A module of a stage's own layers, as torch's documentation recommends."""

    def __init__(self, model: Decoder, names: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(model.get_submodule(name) for name in names)
        self._run, self._names = [model.run], names

    def forward(self, given: Tensor) -> Tensor:
        if self._names[0] == "embed":
            return self._run[0](self._names, given, None, None)
        tokens = given.new_empty(given.shape[:2], dtype=torch.int64)
        return self._run[0](self._names, tokens, None, None, given)


def _torch_step(rank: int, batches: list[Batch], peer: type, plan: CellPlan) -> tuple[Callable[[], None], nn.Module]:
    whole, count = _whole(), len(plan.pieces)
    parts = [_Part(whole, list(plan.pieces[piece])) for piece in range(rank, count, STAGES)]
    stages = [
        PipelineStage(part, piece, count, torch.device("cpu"))
        for part, piece in zip(parts, range(rank, count, STAGES), strict=True)
    ]
    schedule = peer(stages if plan.num_chunks > 1 else stages[0], LANES, loss_fn=_loss, scale_grads=False)
    tokens = torch.cat([batch["tokens"] for batch in batches])

    def step() -> None:
        schedule.step(tokens) if rank == 0 else schedule.step(target=tokens)

    return step, nn.ModuleList(parts)


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return TASK._loss_of(logits, _batch_of(tokens), is_training=True).total


def _check_same(ours: nn.Module, theirs: nn.Module) -> None:
    """Check that both sides computed bit-identical gradients."""
    mine, others = ([one.grad for one in model.parameters() if one.numel()] for model in (ours, theirs))
    for one, other in zip(mine, others, strict=True):
        assert one is not None and other is not None and one.equal(other), "torch's schedule makes another gradient"


def _whole() -> Decoder:
    torch.manual_seed(0)
    return Decoder(SHAPE)
