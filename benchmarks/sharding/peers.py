"""Comparison with torch's `fully_shard` (FSDP2): step time and peak memory with the same model and lanes."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.beside import resident
from benchmarks.figures import Effort
from benchmarks.ranks import Meeting, run
from benchmarks.sharding.jobs import CLIP_NORM, MODES, OPTIMIZER, SMALL, TOTAL_STEPS, WIDE, Job, Work
from elastic_train.core.lanes import owned_lanes
from elastic_train.job.optimizers.schedule import rate_factor

MEMORY_STEPS = 4


class Peer:
    """An expert user's `fully_shard` loop: every block and the root sharded, gradients reduced with the last lane.

    With `is_lean`, gradients are reduced after each lane, so that none are whole in between.
    """

    def __init__(self, mesh: DeviceMesh, work: Work, *, is_lean: bool = False) -> None:
        self.work, self.is_lean, self.num_steps = work, is_lean, 0
        self.model = work.build()
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        self.root = fully_shard(self.model, mesh=mesh)
        matrices: dict[str, Any] = {"params": [one for one in self.model.parameters() if one.ndim > 1]}
        vectors = {"params": [one for one in self.model.parameters() if one.ndim < 2], "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW(
            [matrices, vectors],
            lr=OPTIMIZER.lr,
            weight_decay=OPTIMIZER.weight_decay,
        )
        self.scheduler = LambdaLR(self.optimizer, lambda step: rate_factor(step, OPTIMIZER, TOTAL_STEPS))
        self.lanes = owned_lanes(mesh.get_local_rank(), mesh.size(), work.num_lanes)
        self.scale = mesh.size() / work.num_samples  # gradients are averaged over the ranks

    def step(self) -> None:
        """Take one step."""
        for lane in self.lanes:
            self.root.set_requires_gradient_sync(self.is_lean or lane == self.lanes[-1])
            torch.autograd.backward(self.work.loss(self.model, self.num_steps, lane) * self.scale)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.num_steps += 1


def mesh_of(meeting: Meeting) -> DeviceMesh:
    """Form torch's own world from a rank's."""
    meeting.join_torch()
    return init_device_mesh("cpu", (meeting.group.size,))


def step_times(effort: Effort) -> dict[str, object]:
    """Return the step time over that of `fully_shard`, for the mode that shards the most."""
    found: dict[str, object] = {"mode": MODES[-1]}
    for size in (2, 4):
        times = run(_in_turn, size, 8 if effort.is_quick else 24)
        ours, theirs = (statistics.median(one[side] for one in times) for side in ("ours", "theirs"))
        found[f"w{size}"] = round(statistics.median(one["ours"] / one["theirs"] for one in times), 3)
        effort.say(f"{size} ranks: {1e3 * ours:.0f} ms, fully_shard {1e3 * theirs:.0f} ms")
    return {"step_vs_fsdp2": found}


def _in_turn(meeting: Meeting, rounds: int) -> dict[str, float]:
    """Time steps of ours and of the peer in turn; the first two warm up."""
    job, peer = Job(meeting.group, SMALL, MODES[-1]), Peer(mesh_of(meeting), SMALL)
    ours, theirs = (statistics.median(s for s, _ in side) for side in meeting.in_turn([job.step, peer.step], rounds))
    return {"ours": ours, "theirs": theirs}


def peak_memory(effort: Effort) -> dict[str, object]:
    """Return the peak memory of one of four ranks over that with `fully_shard`."""
    peaks = {side: max(run(_peak, 4, side)) for side in ("ours", "peer", "lean peer")}
    for side, peak in peaks.items():
        effort.say(f"{side}: {peak / 1e6:.0f} MB above the base")
    ratios = {"w4": peaks["ours"] / peaks["peer"], "w4_lean": peaks["ours"] / peaks["lean peer"]}
    return {"peak_rss_vs_fsdp2": {"mode": MODES[-1], **{name: round(ratio, 3) for name, ratio in ratios.items()}}}


def _peak(meeting: Meeting, side: str) -> int:
    """Return the peak bytes of one side's process above those before the model was built."""
    mesh = None if side == "ours" else mesh_of(meeting)
    base = resident("VmRSS")
    job = Job(meeting.group, WIDE, MODES[-1]) if mesh is None else Peer(mesh, WIDE, is_lean=side == "lean peer")
    for _ in range(MEMORY_STEPS):
        job.step()
    return resident("VmHWM") - base
