"""Comparison with transformers: the loss of a run's first step, and the export after it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.jobs import JOBS, LLAMA, NUM_LANES, NUM_TOKENS, Job, write_job
from benchmarks.models.plain import Loss, classes, images
from chaos.judge.evidence.run_files import collect, number
from elastic_train.config.sources import load_config
from elastic_train.core.lanes import lane_seed
from elastic_train.core.order import Cursor
from elastic_train.inference.exporting import export_folder
from elastic_train.inference.opening import open_trained
from elastic_train.job.plan import Plan, make_plan
from elastic_train.job.units.generators import seed_generators
from elastic_train.tasks.decoder.as_transformers import llama_name
from elastic_train.tasks.decoder.model import Decoder
from elastic_train.tasks.task import Exporting
from elastic_train.training.open_session import make_repeatable
from elastic_train.training.run import train

MOST_APART = 1e-6


def tokens(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return transformers' loss over all tokens."""
    return model(input_ids=batch["tokens"], labels=batch["tokens"]).loss  # type: ignore[no-any-return]


CASES: Mapping[str, tuple[Job, str, Loss]] = {
    "lm": (JOBS["lm"], "AutoModelForCausalLM", tokens),
    "llama": (
        Job(JOBS["lm"].task, {"max_tokens": NUM_TOKENS, "hf": {"config": LLAMA}}, 8),
        "AutoModelForCausalLM",
        tokens,
    ),
    "classifier": (JOBS["classifier"], "AutoModelForSequenceClassification", classes),
    "resnet": (JOBS["resnet"], "AutoModelForImageClassification", images),
}
"""Jobs, the transformers class that loads their models, and its loss. The first is the package's own decoder."""


def beside_transformers(name: str) -> tuple[float, bool]:
    """Take one step; return the difference of its loss from transformers', and if the export equals the weights.

    The transformers model starts from the same weights and draws the same random numbers.
    """
    import transformers

    job, kind, loss = CASES[name]
    auto = getattr(transformers, kind)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = load_config(write_job(folder, job, max_steps=1))
        make_repeatable(config)
        theirs = first_loss(make_plan(config), auto, loss, folder / "first")
        train(config)
        (line,) = collect(folder / "run").of("step")
        trained = open_trained(str(folder / "run"))
        export_folder(str(folder / "run"), folder / "exported")
        loaded = auto.from_pretrained(folder / "exported")
    return abs(number(line, "loss") - theirs), has_equal_weights(trained.model, loaded)


def first_loss(plan: Plan, auto: Any, loss: Loss, folder: Path) -> float:
    """Return transformers' mean loss over the first step's lanes."""
    folder.mkdir()
    task = plan.task
    assert isinstance(task, Exporting), "all of these can be exported"
    task.export(plan.build_state().model, folder, is_merged=False)
    model = auto.from_pretrained(folder).train()
    [lanes] = plan.feed.training(plan.order, range(NUM_LANES), Cursor(), 1)
    losses = []
    for batch in lanes:
        assert batch.tensors is not None
        seed_generators(lane_seed(plan.config.run.seed, 0, batch.lane))
        losses.append(float(loss(model, batch.tensors).detach()))
    return sum(losses) / len(losses)


def has_equal_weights(trained: nn.Module, loaded: nn.Module) -> bool:
    """Return True if all trained weights and buffers are loaded bit-identically."""
    names = llama_name if isinstance(trained, Decoder) else str
    found = loaded.state_dict()
    return all(torch.equal(tensor, found[names(name)]) for name, tensor in trained.state_dict().items())
