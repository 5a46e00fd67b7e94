"""What exchanging beside the backward pass saves on a slow wire.

The wire is a model: a rank's sends leave one after another at 0.25 GB/s, and a wait for one ends when it has left. It
takes no processor time, as a network card takes none.
"""

from __future__ import annotations

import statistics
import threading
import time

from torch import Tensor

from benchmarks.figures import Effort
from benchmarks.sharding.jobs import SMALL, Job, Mode
from benchmarks.sharding.ranks import Meeting, run
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import PointToPoint, Work

WIRE_BYTES_PER_S = 0.25e9
BUCKETS_MB = (0.5, 1.0, 2.0, 5.0, 25.0)
MODES: tuple[Mode, ...] = ("none", "optimizer")


class Wire:
    """When what a rank has sent has left, if bytes leave one after another, and have come `alpha_s` later."""

    def __init__(self, bytes_per_s: float = WIRE_BYTES_PER_S, alpha_s: float = 0.0) -> None:
        self.bytes_per_s, self.alpha_s = bytes_per_s, alpha_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def leaves_at(self, num_bytes: float) -> float:
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + num_bytes / self.bytes_per_s
            return self._free_at + self.alpha_s


class OnWire:
    """A send that has not ended before it has left the wire."""

    def __init__(self, work: Work, leaves_at: float) -> None:
        self._work, self._leaves_at = work, leaves_at

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._leaves_at - time.perf_counter()))


def put_on_wire(bytes_per_s: float = WIRE_BYTES_PER_S, alpha_s: float = 0.0) -> None:
    """Let all sends of this process leave on one wire; what all ranks add up has a ring's volume, and two rounds."""
    wire, send, all_reduce = Wire(bytes_per_s, alpha_s), PointToPoint.send, Group.all_reduce

    def send_on_wire(self: PointToPoint, rank: int, tensor: Tensor) -> OnWire:
        return OnWire(send(self, rank, tensor), wire.leaves_at(tensor.nbytes))

    def all_reduce_on_wire(self: Group, tensor: Tensor) -> None:
        leaves_at = wire.leaves_at(2 * tensor.nbytes * (self.size - 1) / self.size)
        all_reduce(self, tensor)
        time.sleep(max(0.0, leaves_at + alpha_s - time.perf_counter()))

    PointToPoint.send, Group.all_reduce = send_on_wire, all_reduce_on_wire  # type: ignore[method-assign]


def wait_ratio(effort: Effort) -> dict[str, object]:
    """Return how long ranks wait for the gradient with buckets beside the backward pass, over what they do without."""
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
    """A job whose waits at the ends of its steps are known, in seconds."""

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
