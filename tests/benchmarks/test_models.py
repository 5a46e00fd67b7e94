"""The benchmark of models: the plain loop does the trainer's work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.beside import WARM_TURNS, Lanes, Watch, plainly, train_while
from benchmarks.models import __main__ as models
from benchmarks.models.jobs import JOBS, write_job
from benchmarks.models.measure import plain_loop
from chaos.judge.evidence.run_files import collect, number
from elastic_train.config.sources import load_config
from elastic_train.job.plan import make_plan
from elastic_train.training.session import Session
from tests.conftest import run_ranks

SMALL = replace(
    JOBS["lm"],
    params={"max_tokens": 128, "model": {"dim": 16, "depth": 1, "heads": 2, "vocabulary": 2048}},
    micro_batch=2,
)
NUM_STEPS = WARM_TURNS + 2


def test_every_figure_is_explained() -> None:
    """The output of --help has a paragraph for each figure, and for nothing else."""
    paragraph = (models.__doc__ or "").split("\n\n")[1]
    assert [line.split()[0] for line in paragraph.splitlines() if line[:1] != " "] == list(models.FIGURES)


@pytest.mark.slow
def test_the_plain_loop_takes_the_trainers_steps(tmp_path: Path) -> None:
    run_ranks(takes_the_same_steps, 1, str(tmp_path))


def takes_the_same_steps(rank: int, size: int, folder: str) -> None:
    """Both sides' losses are equal, but for rounding, in every step, and every step of both is timed."""
    config = write_job(Path(folder), SMALL)
    plan = make_plan(load_config(config, {"optimizer.lr": 0.03}))
    loop = plain_loop(SMALL, plan)
    watch = Watch(plan.device, {"plain": plainly(loop)}, NUM_STEPS - WARM_TURNS)

    def between(session: Session, steps: Iterator[Lanes]) -> Iterator[Lanes]:
        loop.model.load_state_dict(session.state.model.state_dict())
        return watch.between(session, steps)

    train_while(config, between, {"optimizer.lr": 0.03})
    ours = [number(line, "loss") for line in collect(Path(folder) / "run").of("step")][:NUM_STEPS]
    assert len(ours) == len(set(ours)) == NUM_STEPS
    torch.testing.assert_close(torch.tensor(loop.losses), torch.tensor(ours), rtol=1e-6, atol=0)
    assert all(len(seconds) == NUM_STEPS and min(seconds) > 0 for seconds in watch.times.values())
