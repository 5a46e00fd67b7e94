"""Data movement after losing one of four ranks, compared with a bare exchange of as many bytes and ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.figures import Effort
from benchmarks.ranks import Meeting, run
from benchmarks.sharding.jobs import MODES, WIDE, Job, Mode
from elastic_train.job.peer_states import PeerState, gather_peer_states, roll_forward
from elastic_train.job.reshard import take_state
from elastic_train.parallel.group import Group


def move(effort: Effort) -> dict[str, object]:
    """Return the rate at which three survivors, with two copies, take over the lost rank's shards."""
    rates = dict[str, float]()
    for shards in MODES:
        found = run(_move, 4, shards, 3 if effort.is_quick else 9)[0]
        rates |= {f"{shards}_{name}": round(value, 3) for name, value in found.items()}
        effort.say(f"{shards}: {found['gb_per_s']:.2f} GB/s, {found['vs_bare']:.2f} of a bare exchange")
    return {"move_gb_per_s": rates}


def _move(meeting: Meeting, shards: Mode, rounds: int) -> dict[str, float]:
    """Let three of four ranks take over the fourth's shards repeatedly; time it against a bare exchange."""
    rates, bare, group = list[float](), list[float](), meeting.group
    for turn in range(rounds):
        job = Job(group, WIDE, shards, 2)
        job.step()
        if group.rank < 3:
            rate, other = _moved(meeting.again(f"left-{turn}", 3), job)
            rates.append(rate)
            bare.append(other)
        group.barrier()
    if group.rank == 3:
        return {}
    return {"gb_per_s": statistics.median(rates), "vs_bare": statistics.median(rates) / statistics.median(bare)}


def _moved(left: Group, job: Job) -> tuple[float, float]:
    """Return the GB/s of taking seats, and of exchanging as many bytes in a ring."""
    left.barrier()
    started = time.perf_counter()
    brought: Sequence[PeerState] = gather_peer_states(left, job.state, ("", str(left.rank)))
    brought = roll_forward(left, job.state, brought)
    before = left.num_bytes
    lost = take_state(left, job.state, brought).lost
    seconds = time.perf_counter() - started
    num_bytes = int(left.all_gather(torch.tensor(left.num_bytes - before)).max()) // 2
    assert not lost.size, "three ranks hold everything"
    return num_bytes / seconds / 1e9, num_bytes / _bare_seconds(left, num_bytes) / 1e9


def _bare_seconds(group: Group, num_bytes: int) -> float:
    """Return the seconds in which every rank sends `num_bytes` to the next one, in a ring."""
    given, got = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    group.barrier()
    began = time.perf_counter()
    group.exchange([((group.rank + 1) % group.size, given)], [((group.rank - 1) % group.size, got)])
    return time.perf_counter() - began
