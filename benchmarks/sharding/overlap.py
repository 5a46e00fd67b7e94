"""Savings by overlapping exchange and backward pass on a slow wire.

The wire is a model: a rank's sends leave one after another at 0.25 GB/s, and the wait for a send ends when it has left.
Like a network card, it uses no CPU time.
"""

from __future__ import annotations

import statistics
import threading
import time

from torch import Tensor

from benchmarks.figures import Effort
from benchmarks.ranks import Meeting, run
from benchmarks.sharding.jobs import SMALL, Job, Mode
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import PointToPoint, Work

WIRE_BYTES_PER_S = 0.25e9
BUCKETS_MB = (0.5, 1.0, 2.0, 5.0, 25.0)
MODES: tuple[Mode, ...] = ("none", "optimizer")


class Wire:
    """Computes when a rank's sends have arrived: bytes leave one after another, and arrive `alpha_s` later."""

    def __init__(self, bytes_per_s: float = WIRE_BYTES_PER_S, alpha_s: float = 0.0) -> None:
        self.bytes_per_s, self.alpha_s = bytes_per_s, alpha_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def leaves_at(self, num_bytes: float) -> float:
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + num_bytes / self.bytes_per_s
            return self._free_at + self.alpha_s


class OnWire:
    """A send whose wait lasts until it has left the wire."""

    def __init__(self, work: Work, leaves_at: float) -> None:
        self._work, self._leaves_at = work, leaves_at

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._leaves_at - time.perf_counter()))


def put_on_wire(bytes_per_s: float = WIRE_BYTES_PER_S, alpha_s: float = 0.0) -> None:
    """Put all sends of this process on one wire; an all-reduce has the volume of a ring and two rounds."""
    wire, send, all_reduce = Wire(bytes_per_s, alpha_s), PointToPoint.send, Group.all_reduce

    def send_on_wire(self: PointToPoint, rank: int, tensor: Tensor) -> OnWire:
        return OnWire(send(self, rank, tensor), wire.leaves_at(tensor.nbytes))

    def all_reduce_on_wire(self: Group, tensor: Tensor) -> None:
        leaves_at = wire.leaves_at(2 * tensor.nbytes * (self.size - 1) / self.size)
        all_reduce(self, tensor)
        time.sleep(max(0.0, leaves_at + alpha_s - time.perf_counter()))

    PointToPoint.send, Group.all_reduce = send_on_wire, all_reduce_on_wire  # type: ignore[method-assign]


def wait_ratio(effort: Effort) -> dict[str, object]:
    """Return the ratio of ranks' waits for the gradient with buckets during the backward pass to those without."""
    rounds = 6 if effort.is_quick else 20
    found: dict[str, float] = {}
    for shards in MODES:
        for megabytes in BUCKETS_MB:
            name = f"{shards}_w2_{megabytes:g}mb"
            found[name] = round(statistics.median(run(_waits, 2, shards, megabytes, rounds)), 3)
            effort.say(f"{name}: waits {found[name]} of the time that it would after the pass")
    return {"overlap_wait_ratio": found}


def _waits(meeting: Meeting, shards: Mode, bucket_mb: float, rounds: int) -> float:
    """Time the ends of steps with and without buckets, in turn."""
    put_on_wire()
    beside, after = (Timed(Job(meeting.group, SMALL, shards, 1, megabytes)) for megabytes in (bucket_mb, None))
    for _ in range(rounds + 1):
        for job in (beside, after):
            meeting.group.barrier()
            job.step()
    return statistics.median(beside.waits[1:]) / statistics.median(after.waits[1:])


class Timed:
    """A job that records its waits at the ends of steps, in seconds."""

    def __init__(self, job: Job) -> None:
        self._job, self._finish = job, job.gradients.finish
        self.waits: list[float] = []
        job.gradients.finish = self._timed  # type: ignore[method-assign]

    def step(self) -> None:
        self._job.step()

    def _timed(self, divisor: float) -> None:
        started = time.perf_counter()
        self._finish(divisor)
        self.waits.append(time.perf_counter() - started)
