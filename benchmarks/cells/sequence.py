"""Activation memory of the blocks on two tensor ranks, with and without sequence parallelism."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from benchmarks.figures import Effort
from elastic_train.config.parallel import ParallelConfig
from elastic_train.core.mesh import Mesh
from elastic_train.job.cells.cell_plan import cell_plan_of
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.parallel.group import Group
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Decoder
from elastic_train.tasks.decoder.shape import DecoderShape

SIZES = {"dim": 256, "depth": 6, "heads": 8, "kv_heads": 4}
SHAPE = DecoderShape(vocabulary=512, **SIZES)  # type: ignore[arg-type]
DEGREE, TOKENS, TIMEOUT_S = 2, 512, 120.0


def kept_ratio(effort: Effort) -> dict[str, object]:
    """Compare tensor ranks with a rank that holds the whole model."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(folder,), nprocs=DEGREE)  # type: ignore[no-untyped-call]
        whole, plain, shared = json.loads((Path(folder) / "0.json").read_text())
    effort.say(
        f"{TOKENS} tokens: {whole / 2**20:.1f} MiB kept of all blocks by one rank, {plain / 2**20:.1f} MiB by one of "
        f"{DEGREE} tensor ranks, {shared / 2**20:.1f} MiB where they share out tokens"
    )
    return {"sp2_kept_ratio": round(shared / whole, 3), "tp2_kept_ratio": round(plain / whole, 3)}


def _rank(rank: int, folder: str) -> None:
    group = Group(rank, DEGREE, FileStore(f"{folder}/store", DEGREE), TIMEOUT_S)
    found = [_kept_bytes(_model(None, group), TOKENS)]
    found.append(_kept_bytes(_model(False, group), TOKENS))
    found.append(_kept_bytes(_model(True, group), TOKENS // DEGREE))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    group.close()


def _model(sequence: bool | None, group: Group) -> Decoder:
    """Return a model that is sharded with or without sequence parallelism; the whole model for None."""
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    if sequence is not None:
        parallel = ParallelConfig(tensor=DEGREE, sequence=sequence)
        plan = cell_plan_of(CausalLM(model=SIZES), model, parallel)
        assert plan is not None, "the decoder can be cut"
        cut = CutModel(model, plan, parallel.cell, CellLinks())
        cut.bind(Mesh(group.rank, DEGREE, parallel.cell), group)
        cut.take_place(group.rank)
    return model


def _kept_bytes(model: Decoder, num_own: int) -> int:
    """Return the bytes that the blocks keep, without the model's own, for a row with `num_own` tokens on this rank."""
    own, kept = {one.untyped_storage().data_ptr() for one in model.parameters()}, dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, blocks = torch.zeros(1, TOKENS, dtype=torch.int64), [name for name in model.parts if "blocks" in name]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = model.run(blocks, tokens, None, None, torch.randn(1, num_own, SHAPE.dim))
        total = sum(kept.values())
    assert made.requires_grad, "there is a backward pass"
    return total
