"""Rows split over ranks add up to whole rows: losses, weights, gradients, up to rounding; all ranks get equal sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pyarrow as pa
import pytest
import torch
from torch import nn

from elastic_train.config.parallel import ParallelConfig
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.job.cells.cell_plan import cell_plan_of, cut_dims_of
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.job.cells.stage import context_of, lone_part
from elastic_train.job.model_layout import store_in_memory_order
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Decoder, DecoderShape
from elastic_train.tasks.placements import loss_of
from elastic_train.tasks.rows.token_rows import TokenColumns
from elastic_train.tasks.task import Batch, LaneLoss
from tests.elastic_train.tasks.language_rows import chunks_of, lists
from tests.memory_machine import in_memory
from tests.memory_world import group_of

pytestmark = pytest.mark.slow
SHAPE = DecoderShape(vocabulary=11, dim=16, depth=2, heads=8, kv_heads=4, hidden=12)
TASK = CausalLM(model={"dim": 16, "heads": 8, "kv_heads": 4, "hidden": 12}, z_loss=0.1)
LONG = [number * 7 % 11 for number in range(16)]
ROWS = pa.table(
    {
        "input_ids": lists([1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 1, 4], [], [2, 7, 1, 8, 2, 8], LONG),
        "document_ids": lists([0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0], [], [0, 0, 3, 3, 3, 3], [0] * 7 + [1] * 9),
    }
)


@pytest.fixture(autouse=True)
def _in_chunks() -> Iterator[None]:
    """Compute losses in chunks of a few rows, as for a large vocabulary."""
    with chunks_of(4):
        yield


def batches() -> list[Batch]:
    """Whole rows, packed rows, and a row with targets in the first of several parts only."""
    plain, packed = TokenColumns("input_ids"), TokenColumns("input_ids", documents="document_ids")
    ids = torch.arange(len(ROWS)).numpy()
    return [plain.collate(ROWS, ids, 16, 11), packed.collate(ROWS, ids, 16, 11), plain.collate(ROWS[1:2], ids, 16, 11)]


def run(model: nn.Module, compute: Callable[[Batch], LaneLoss]) -> list[tuple[float, float]]:
    """Run forward and backward of all batches; return losses and weights."""
    found = [compute(batch) for batch in batches()]
    for loss in found:
        loss.total.backward()  # type: ignore[no-untyped-call]
    return [(float(loss.total.detach()), loss.weight) for loss in found]


def make_model() -> Decoder:
    torch.manual_seed(3)
    return Decoder(SHAPE)


def of_rank(rank: int, size: int) -> None:
    group = group_of("world", rank, size)
    whole, model = make_model(), make_model()
    expected = run(whole, lambda batch: TASK.loss(whole, batch))
    context = context_of(TASK, Mesh(rank, size, Cell(context=size)), group)
    mine = run(model, lambda batch: context.loss(model, batch))
    added = context.add_up(dict(enumerate(mine)))
    for lane, (loss, weight) in enumerate(expected):
        assert added[lane] == (pytest.approx(loss, rel=1e-6), weight)
    assert mine[2][1] == (2.0 if rank == 0 else 0.0), "of three tokens, all in the first run, two are predicted"
    sums = group.all_gather(torch.tensor(sorted(added.items())[0][1]))
    assert bool((sums == sums[0]).all())
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        total = group.all_gather(one.grad).sum(0)
        torch.testing.assert_close(total, other.grad, rtol=0, atol=1e-5 * float(other.grad.abs().max()))
    group.close()


def of_tensor_rank(
    rank: int, size: int, tensor: int, task: CausalLM = TASK, build: Callable[[], nn.Module] = make_model
) -> None:
    """Compute rows of 8 and 16 tokens as a rank of a cell with sequence parallelism, and of one without."""
    context, whole = size // tensor, build()
    expected = run(whole, lambda batch: task.loss(whole, batch))
    store_in_memory_order(whole, cut_dims_of(task, whole))
    found: dict[bool, tuple[list[tuple[float, float]], dict[str, torch.Tensor]]] = {}
    for sequence in (False, True):
        model, parallel = build(), ParallelConfig(tensor=tensor, context=context, sequence=sequence)
        plan, mesh = cell_plan_of(task, model, parallel), Mesh(rank, size, parallel.cell)
        assert plan is not None
        group, cut = group_of(f"world-{sequence}", rank, size), CutModel(model, plan, parallel.cell, CellLinks())
        cut.bind(mesh, group)
        cut.take_place(rank)
        part = context_of(task, mesh, group, parallel.token_multiple)
        losses = run(model, partial(part.loss, model))
        found[sequence] = losses, {n: one.grad for n, one in model.named_parameters() if one.grad is not None}
        added = part.add_up(dict(enumerate(losses)))
        for lane, (loss, weight) in enumerate(expected):
            assert added[lane] == (pytest.approx(loss, rel=1e-6), weight)
        for name, one in whole.named_parameters():
            total, grad = part.peers.all_gather(found[sequence][1][name]).sum(0), one.grad
            assert grad is not None
            mine = cut.cuts[name].part_of(grad, rank) if name in cut.cuts else grad
            torch.testing.assert_close(total, mine, rtol=0, atol=1e-5 * float(grad.abs().max()))
        group.close()
    (without, gradients), (losses, others) = found[False], found[True]
    if 16 % (tensor * context) == 0:  # otherwise there is more padding, for which kernels may round differently
        assert losses == without
        differing = {name for name in gradients if not torch.equal(gradients[name], others[name])}
        uses = {plan.tensor.get(name.rpartition(".")[0]) for name in differing}
        assert uses == {"tokens"}, "parts of norms' gradients are added"


@pytest.mark.parametrize(("tensor", "context"), [(2, 2), (4, 3)])
def test_parts_are_shared_out_between_tensor_ranks(tensor: int, context: int) -> None:
    """They have the bits of ranks without sequence parallelism, except for norms, if rows need no extra padding."""
    in_memory(of_tensor_rank, tensor * context, tensor)


@pytest.mark.parametrize(("size", "on_devices"), [(2, True), (3, False)])
def test_parts_add_up_to_whole_rows(size: int, on_devices: bool) -> None:
    in_memory(of_rank, size, on_devices=on_devices)


def test_a_lone_part_runs_without_peers() -> None:
    """It uses its own values in place of its peers', for a pass whose results are discarded."""
    model = make_model()
    losses = run(model, lambda batch: loss_of(TASK, model, batch, lone_part(2)))
    assert all(torch.isfinite(torch.tensor(loss)) for loss, _ in losses)
    assert all(bool(one.grad.any()) for one in model.parameters() if one.grad is not None)


def test_every_context_rank_holds_the_whole_model() -> None:
    assert cell_plan_of(TASK, make_model(), ParallelConfig(context=2)) is None
