"""A decoder of a hundred billion parameters on 64 devices, built without memory: what each holds and sends is planned.

Every place has what training cuts for it, on torch's meta device, and a stage's passes run there, hooks and all; what
they exchange goes to a group that counts bytes and has no peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.sources import load_config
from elastic_train.core.mesh import Mesh
from elastic_train.job.cells.cell_plan import CellPlan, cell_plan_of
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.job.cells.stage import Stage
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.parallel.cells.pipeline import StageLinks
from elastic_train.planning.arithmetic.catalogue import Cluster, Link, parse_cluster
from elastic_train.planning.arithmetic.memory import memory_of
from elastic_train.planning.arithmetic.step_time import step_time
from elastic_train.planning.reading import Read, read_config
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Decoder
from elastic_train.tasks.decoder.shape import DecoderShape
from tests.elastic_train.training.jobs import config

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("hundred billion")]  # one model is read
SIZES = {"vocabulary": 32_000, "dim": 20_480, "depth": 24, "heads": 160, "kv_heads": 8, "hidden": 55_296, "tied": False}
PARALLEL = ParallelConfig(tensor=8, pipeline=8)
LANES, STAGE_BLOCKS = 16, 3


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Read:
    """Return what a plan has read of it."""
    task = {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": {"max_tokens": 16, "model": SIZES}}
    tree = {"task": task, "batch": {"global_batch": LANES, "micro_batch": 1}}
    path = config(tmp_path_factory.mktemp("hundred-billion"), rows, tree)
    return read_config(load_config(path, {"parallel.tensor": 8, "parallel.pipeline": 8}))


def cut_for(place: int) -> tuple[CutModel, CellPlan]:
    """Return the model that a place has, as training cuts it."""
    with torch.device("meta"):
        model = Decoder(DecoderShape(**SIZES))  # type: ignore[arg-type]
    plan = cell_plan_of(CausalLM(model=SIZES), model, PARALLEL)
    assert plan is not None, "the decoder has cells"
    cut = CutModel(model, plan, PARALLEL.cell, CellLinks())
    cut.take_place(place, list(model.state_dict().items()))
    return cut, plan


class Counting:
    """One of eight tensor ranks: what it sends is counted, and what it is to receive is there."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size, self.sent_bytes = rank, 8, 0

    def is_on_device(self, tensor: Tensor) -> bool:
        return False

    def send(self, rank: int, tensor: Tensor) -> None:
        self.sent_bytes += tensor.nbytes

    def receive(self, rank: int, tensor: Tensor) -> None: ...

    def wait(self, works: Sequence[None]) -> None: ...


def test_every_device_holds_what_is_planned(read: Read) -> None:
    """Weights, gradients and moments: the fullest place as the plan says, and all places together all of the model."""
    planned = memory_of(read.facts, read.layout, read.batch, parse_cluster("8x8xH100"))
    cut, _ = cut_for(0)
    places, model = range(PARALLEL.cell.size), cut.model
    held = [sum(4 * one.part_shape(place).numel() for one in cut.cuts.values()) for place in places]
    assert set(cut.cuts) == {name for name, _ in model.named_parameters()}, "all are cut"
    assert held[0] == sum(one.nbytes for one in model.parameters()), "and this one has its parts"
    assert read.facts.elements > 100e9 and len(held) == 64
    assert max(held) == pytest.approx(planned.weights, rel=0.01)
    whole = 4 * read.facts.elements
    on_all = 4 * 7 * read.facts.rest.elements  # embedding and output layer are whole on the eight ranks of their stages
    assert sum(held) == pytest.approx(whole + on_all, rel=1e-3)
    optimizer = torch.optim.AdamW(model.parameters())
    for one in model.parameters():
        one.grad = torch.empty_like(one)
    optimizer.step()
    assert sum(one.grad.nbytes for one in model.parameters() if one.grad is not None) == pytest.approx(
        planned.gradients, rel=0.01
    )
    moments = [one.nbytes for kept in optimizer.state.values() for one in kept.values() if one.dim()]
    assert sum(moments) == pytest.approx(planned.optimizer, rel=0.01)


def test_a_stage_sends_what_is_planned(read: Read) -> None:
    """Forward and backward of a lane in the middle of the pipeline: sums over tensor ranks, and what goes on to others.

    A plan has seconds; on links that have no latency and carry a gigabyte a second they are bytes.
    """
    mesh = Mesh(3 * 8 + 5, 64, PARALLEL.cell)
    cut, plan = cut_for(mesh.place)
    group = Counting(mesh.coordinates.tensor)
    cut.links.bind(group)  # type: ignore[arg-type]
    tokens = torch.empty(1, read.facts.tokens, dtype=torch.int64, device="meta")
    given = torch.empty(1, read.facts.tokens, SIZES["dim"], device="meta", requires_grad=True)
    links = StageLinks(group, None, None, torch.device("cpu"))  # type: ignore[arg-type]
    stage = Stage(CausalLM(model=SIZES), cut.model, plan, mesh.coordinates.stage, "1f1b", links)
    made = stage.run(0, {"tokens": tokens}, given)
    assert isinstance(made, Tensor) and made.shape == given.shape
    torch.autograd.backward(made, torch.empty_like(made))
    assert given.grad is not None
    at_once = Link("at once", 1.0, 0.0)
    cluster = parse_cluster("8x8xH100")
    plain = Cluster(cluster.device, at_once, at_once, 8, 8)
    step = step_time(read.facts, read.layout, read.batch, plain)
    planned = 1e9 * step.tensor_s / LANES / read.facts.blocks[0].output_bytes  # rows have unlike lengths
    assert (group.sent_bytes + made.nbytes + given.grad.nbytes) / made.nbytes == pytest.approx(planned, rel=1e-6)
    assert group.sent_bytes == STAGE_BLOCKS * 4 * 2 * 7 * made.nbytes // 8
