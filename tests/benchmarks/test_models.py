"""The benchmark of models: the plain loop does the trainer's work, and comparisons can fail."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.models import __main__ as models
from benchmarks.models.beside import Turns, train_beside
from benchmarks.models.equal import has_equal_weights
from benchmarks.models.jobs import JOBS, write_job
from benchmarks.models.ranks_beside_ddp import RanksInTurn
from benchmarks.models.tutorials import commands_of
from chaos.judge.evidence.run_files import collect, number
from elastic_train.tasks.decoder.model import Decoder
from elastic_train.tasks.decoder.shape import DecoderShape
from rendezvous.etcd.server import free_ports
from tests.conftest import run_ranks

SMALL = replace(
    JOBS["lm"],
    params={"max_tokens": 128, "model": {"dim": 16, "depth": 1, "heads": 2, "vocabulary": 2048}},
    micro_batch=2,
)
NUM_STEPS = 4


def test_every_figure_is_explained() -> None:
    """The output of --help has a paragraph for each figure, and for nothing else."""
    paragraph = (models.__doc__ or "").split("\n\n")[1]
    assert [line.split()[0] for line in paragraph.splitlines() if line[:1] != " "] == list(models.FIGURES)


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("lm", ["data", "train", "generate", "evaluate", "export"]),
        ("csv", ["python", "data", "init", "cd", "train", "audit", "evaluate", "predict"]),
        ("images", ["init", "cd", "data", "train", "launch", "compare", "audit", "export"]),
    ],
)
def test_a_tutorial_is_followed_to_its_export(name: str, commands: list[str]) -> None:
    words = [command.removeprefix("elastic-train ") for command in commands_of(name)]
    assert [word.split()[0] for word in words] == commands


@pytest.mark.slow
def test_the_plain_loop_takes_the_trainers_steps(tmp_path: Path) -> None:
    run_ranks(takes_the_same_steps, 1, str(tmp_path))


def takes_the_same_steps(rank: int, size: int, folder: str) -> None:
    """Both sides' losses are equal, but for rounding, in every step, and every turn of both is timed."""
    turns = Turns("lm", steps_a_turn=2)
    train_beside(write_job(Path(folder), SMALL, max_steps=NUM_STEPS + 1), turns, {"optimizer.lr": 0.03})
    ours = [number(line, "loss") for line in collect(Path(folder) / "run").of("step")][:NUM_STEPS]
    assert turns.plain is not None and len(ours) == NUM_STEPS
    torch.testing.assert_close(torch.tensor(turns.plain.losses), torch.tensor(ours), rtol=1e-6, atol=0)
    assert len(set(ours)) == NUM_STEPS
    assert [len(turns.ours_s), len(turns.plain_s)] == [2, 2]
    assert all(seconds > 0 for seconds in (*turns.ours_s, *turns.plain_s))


@pytest.mark.slow
def test_ddp_takes_the_trainers_steps(tmp_path: Path) -> None:
    path = write_job(tmp_path, SMALL, num_lanes=2, max_steps=NUM_STEPS + 1)
    run_ranks(takes_the_same_steps_as_ddp, 2, path, *map(str, free_ports(2)))


def takes_the_same_steps_as_ddp(rank: int, size: int, path: str, port: str, ddp_port: str) -> None:
    """The mean of both ranks' losses by DDP is the trainer's loss of the step, but for rounding."""
    os.environ |= {"WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    turns = RanksInTurn("lm", 1, ddp_port)
    train_beside(path, turns, {"optimizer.lr": 0.03})
    by_step = {number(line, "step"): number(line, "loss") for line in collect(Path(path).parent / "run").of("step")}
    ours = [by_step[step + 1] for step in range(NUM_STEPS)]
    assert turns.ddp is not None
    losses = torch.tensor(turns.ddp.losses)
    torch.distributed.all_reduce(losses)
    torch.testing.assert_close(losses / size, torch.tensor(ours), rtol=1e-6, atol=0)
    assert [len(turns.ours_s), len(turns.ddp_s)] == [NUM_STEPS, NUM_STEPS]
    assert turns.num_bytes == 4 * sum(one.numel() for one in turns.ddp.model.parameters())


def test_a_weight_that_differs_in_one_bit_is_seen() -> None:
    model = Decoder(DecoderShape(vocabulary=8, dim=8, heads=2, depth=1))
    other = torch.nn.Linear(4, 4)
    copy = torch.nn.Linear(4, 4)
    copy.load_state_dict(other.state_dict())
    assert has_equal_weights(other, copy)
    with torch.no_grad():
        copy.bias[0] = copy.bias[0].nextafter(torch.tensor(torch.inf))
    assert not has_equal_weights(other, copy)
    with pytest.raises(KeyError, match=r"model\.embed_tokens\.weight"):
        has_equal_weights(model, copy)
