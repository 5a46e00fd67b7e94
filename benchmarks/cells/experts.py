"""Expert parallelism compared with torch's own parts: the same decoder and lanes, steps of two ranks.

The peer is a loop of torch's parts: tokens go to experts and back by `all_to_all_single_autograd`, an expert's product
is over the tokens of both ranks, and DistributedDataParallel sums all other gradients. Both sides run in the same
processes, in turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel

from benchmarks.figures import Effort
from benchmarks.ranks import TIMEOUT_S, Meeting, Sides, compared, run
from elastic_train.config.parallel import ParallelConfig
from elastic_train.core.lanes import lanes_by_cell
from elastic_train.core.mesh import Mesh
from elastic_train.job.cells.cell_plan import cell_plan_of
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.parallel.gradient_sum import TreeSum, tree_of
from elastic_train.parallel.group import Group
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.experts import Experts
from elastic_train.tasks.decoder.model import Decoder, DecoderShape

SIZES = {"dim": 256, "depth": 4, "heads": 8, "kv_heads": 4, "experts": 8, "expert_hidden": 384}
SHAPE = DecoderShape(vocabulary=512, **SIZES)  # type: ignore[arg-type]
ROWS, TOKENS, LANES, DEGREE = 4, 256, 4, 2
BUCKET_BYTES = 2 << 20
NAMES = ("ep2_vs_torch", "ep2_cpu_vs_torch")
Step = Callable[[], None]


def beside_torch(effort: Effort) -> dict[str, object]:
    """Run both sides in turn, in two processes."""
    return dict(compared(effort, NAMES, run(in_turn, DEGREE, 5 if effort.is_quick else 25)))


def in_turn(meeting: Meeting, rounds: int, num_tokens: int = TOKENS, untimed: int = 2) -> Sides:
    """Check that both sides compute the same gradients, and time steps on rows of `num_tokens` tokens."""
    meeting.join_torch(any_algorithm=True)
    (ours, step), (theirs, peer) = _our_step(meeting.group, num_tokens), _torch_step(meeting.group.rank, num_tokens)
    step()
    peer()
    _check_same(ours, theirs)
    return meeting.in_turn([step, peer], rounds, untimed)


def _loss(model: nn.Module, lane: int, num_tokens: int) -> Tensor:
    tokens = torch.randint(0, SHAPE.vocabulary, (ROWS, num_tokens), generator=torch.Generator().manual_seed(lane))
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")


def _our_step(group: Group, num_tokens: int) -> tuple[nn.Module, Step]:
    model, parallel = _whole(), ParallelConfig(expert=DEGREE)
    plan = cell_plan_of(CausalLM(model=SIZES), model, parallel)
    assert plan is not None, "the decoder has experts"
    cut, mesh = CutModel(model, plan, parallel.cell, CellLinks()), Mesh(group.rank, DEGREE, parallel.cell)
    cut.bind(mesh, group)
    cut.take_place(group.rank)
    [links], [(whole, parts)] = cut.experts, cut.by_spread()
    lanes, alone = mesh.assigned(LANES), Group(0, 1, None, TIMEOUT_S)
    [of_cell] = lanes_by_cell(lanes, DEGREE)
    experts = tree_of("canonical", parts, alone, [of_cell])._replace(placed=())
    gradients = TreeSum([tree_of("canonical", whole, group, lanes), experts], BUCKET_BYTES)

    def step() -> None:
        gradients.begin()
        for turn, lane in enumerate(lanes[mesh.owner]):
            with gradients.turn(lane), links.turn(trains=True):
                _loss(model, lane, num_tokens).backward()  # type: ignore[no-untyped-call]
            for one, leaf in zip(of_cell[turn * DEGREE :], links.take_leaves(), strict=False):
                with gradients.turn(one, 1):
                    links.add(leaf)
        gradients.finish(1.0)

    return model, step


class TorchExperts(nn.Module):
    """One rank's share of the experts; their tokens come from all ranks."""

    def __init__(self, whole: Experts, rank: int) -> None:
        super().__init__()
        self.each = whole.num_experts // DEGREE
        mine = slice(rank * self.each, (rank + 1) * self.each)
        self.gate, self.up, self.down = (nn.Parameter(one.detach()[mine].clone()) for one in whole.stacked)

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        world, given = dist.group.WORLD, torch.tensor(counts)
        assert world is not None, "the default group is there"
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given)
        leave, come = given.view(DEGREE, -1).sum(1).tolist(), taken.view(DEGREE, -1).sum(1).tolist()
        arrived = all_to_all_single_autograd(x, come, leave, world)
        # Tokens arrive by rank and expert; the products need them by expert.
        experts = torch.arange(self.each).repeat(DEGREE).repeat_interleave(taken)
        order = experts.argsort(stable=True)
        per_expert = taken.view(DEGREE, -1).sum(0).tolist()
        made = torch.cat(
            [
                F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
                for part, gate, up, down in zip(
                    torch.split(arrived[order], per_expert), self.gate.unbind(), self.up.unbind(), self.down.unbind(),
                    strict=True,
                )
            ]
        )  # fmt: skip
        back = torch.empty_like(made).index_copy(0, order, made)
        return all_to_all_single_autograd(back, leave, come, world)


def _torch_step(rank: int, num_tokens: int) -> tuple[nn.Module, Step]:
    model = _whole()
    for block in model.blocks:
        block.mlp.experts = TorchExperts(block.mlp.experts, rank)  # type: ignore[union-attr, arg-type]
    experts = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)  # type: ignore[no-untyped-call]
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    lanes = range(rank, LANES, DEGREE)

    def step() -> None:
        wrapped.zero_grad()
        for lane in lanes:
            with wrapped.no_sync() if lane != lanes[-1] else contextlib.nullcontext():
                _loss(wrapped, lane, num_tokens).backward()  # type: ignore[no-untyped-call]

    return model, step


def _check_same(ours: nn.Module, theirs: nn.Module) -> None:
    """Check that both gradients are equal up to rounding; DistributedDataParallel averages over the ranks."""
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, name
        times = 1 if ".experts." in name else DEGREE
        torch.testing.assert_close(one.grad, times * other.grad, rtol=1e-3, atol=1e-3)


def _whole() -> Decoder:
    torch.manual_seed(0)
    return Decoder(SHAPE)
