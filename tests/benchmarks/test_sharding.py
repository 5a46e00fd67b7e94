"""The benchmark of sharded state: its peers do the same work, and what it says of jobs is what they did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.ranks import Meeting, run
from benchmarks.recovery.kills import num_restarted
from benchmarks.recovery.watched_tasks import WatchedClassifier, num_models
from benchmarks.sharding import __main__ as sharding
from benchmarks.sharding.commits import rows_of
from benchmarks.sharding.jobs import MODES, SMALL, Job
from benchmarks.sharding.peers import Peer, mesh_of
from benchmarks.sharding.steps import most_sums
from chaos.judge.evidence.run_files import Evidence, Line
from elastic_train.tasks.task import LaneLoss
from elastic_train.tasks.text_classifier import TextClassifier

WORK = replace(SMALL, shape=replace(SMALL.shape, vocabulary=512, dim=32, depth=2), num_lanes=4, micro_batch=2)
with_ranks = pytest.mark.xdist_group("measuring ranks")  # one process imports what they are forked from


def test_every_figure_is_explained() -> None:
    """The output of --help has a paragraph for each figure, and for nothing else."""
    explained = [line.split()[0] for line in (sharding.__doc__ or "").splitlines() if line[:1].islower()]
    assert explained == list(sharding.FIGURES)


@pytest.mark.slow
@with_ranks
def test_the_peer_takes_the_same_steps() -> None:
    """`fully_shard` is timed on the same training: two steps give the same weights up to rounding."""
    for apart, moved in run(weights_apart, 2):
        assert moved > 0 and apart < 0.01 * moved


def weights_apart(meeting: Meeting) -> tuple[float, float]:
    """Return how far apart the weights of both sides are after two steps, and how far ours have come."""
    job, peer, before = Job(meeting.group, WORK, "optimizer"), Peer(mesh_of(meeting), WORK), WORK.build()
    for _ in range(2):
        job.step()
        peer.step()
    ours, theirs, first = (flattened(model) for model in (job.state.model, peer.model, before))
    return float((ours - theirs).norm()), float((ours - first).norm())


def flattened(model: nn.Module) -> Tensor:
    """Return all weights of a model in one vector, those in shards gathered."""
    weights = (one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters())
    return torch.cat([weight.detach().flatten() for weight in weights])


@pytest.mark.slow
@with_ranks
def test_sums_put_aside_are_counted() -> None:
    """One rank that runs all lanes has at most three of them put aside after any of eight lanes: 4, 2 and 1."""
    assert run(most_sums, 1, MODES[-1], 1, 8) == [3]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_ranks_hold_the_rows_that_torch_gives_them(size: int) -> None:
    """Both readers fill the same shards, also where there are fewer rows than ranks."""
    for shape in ((5, 3), (7,), (2, 2, 2)):
        chunks = [*torch.arange(torch.Size(shape).numel()).view(shape).chunk(size), *[torch.zeros(0)] * size]
        for rank in range(size):
            held = rows_of(torch.zeros(shape), rank, size).held
            assert [n for lo, hi in held for n in range(lo, hi)] == chunks[rank].flatten().tolist()
            assert all(len(memory) == hi - lo for (lo, hi), memory in held.items())


def test_a_process_says_how_many_models_it_has_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is built again is another one, whichever task trains it; one that is trained again is not."""
    monkeypatch.setattr(TextClassifier, "loss", lambda *_: LaneLoss(torch.zeros(()), 1.0))
    seen, models = tmp_path / "seen", [nn.Linear(1, 1), nn.Linear(1, 1)]
    found = []
    for turn in (0, 0, 1, 0):
        WatchedClassifier(str(seen)).loss(models[turn], {})
        found += num_models(seen).values()
    assert found == [1, 1, 2, 2]


def test_who_leaves_a_world_without_having_been_killed_has_restarted(tmp_path: Path) -> None:
    """Of the processes of one world that are not in the next; the end of the job, when all leave, does not count."""
    worlds = {1: (10, 11, 12), 2: (10, 11, 13), 3: (11, 13, 14), 4: (11,)}
    lines: list[Line] = [{"op": "form", "t": term, "term": term, "pid": pid} for term in worlds for pid in worlds[term]]
    lines += [{"op": "fault", "t": 1.5, "kind": "kill", "pids": [12]}]
    lines += [{"op": "fault", "t": 3.5, "kind": "stop_node", "pids": [13, 14]}]
    assert num_restarted(Evidence(tmp_path, [lines], [], {}, None, None)) == 1
