"""What a rank's memory is taken by: the most that it has had, and what of that is known to the byte.

The parts have the names that `elastic-train plan` gives them, and are what a rank holds from step to step. What is left
of the peak are activations, what a step holds for a moment, and what the allocator keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FOLDER = "memory"
"""Below a run's folder: where snapshots are, of ranks whose memory has run out."""
PARTS = ("weights", "gradients", "optimizer", "sums", "exchange", "buffers", "staging")
REST = "rest"
"""What of a peak is of no part."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """One rank's memory, in bytes.

    `peak` is of its device: on a GPU what tensors took of it at most, and `reserved` what torch's allocator did; on a
    CPU the process's most resident bytes, of which it had `program` before it built its model. `parts` are on the
    device; `host` is what the rank holds in host memory beside a GPU, and `host_peak` its process's most resident bytes
    there.
    """

    device: str
    peak: int
    parts: Mapping[str, int]
    program: int = 0
    reserved: int | None = None
    host: int = 0
    host_peak: int | None = None

    @property
    def rest(self) -> int:
        """What of the peak is of no part; parts that were let go of before they were looked at count in it."""
        return max(0, self.peak - self.program - sum(self.parts.values()))

    def as_fields(self) -> dict[str, object]:
        """Return what a history's line and a snapshot say of it."""
        of_cpu: dict[str, object] = {"program": self.program} if self.reserved is None else {}
        of_gpu = {"reserved": self.reserved, "host": self.host, "host_peak": self.host_peak}
        return {"device": self.device, "peak": self.peak, **(of_cpu or of_gpu), "parts": dict(self.parts)}


def facts_of(fields: Mapping[str, object]) -> MemoryFacts | None:
    """Read what `as_fields` wrote; None if it is something else."""
    parts, peak = fields.get("parts"), fields.get("peak")
    numbers = {key: fields.get(key) for key in ("program", "reserved", "host", "host_peak")}
    known = {key: value for key, value in numbers.items() if value is not None}
    if not isinstance(parts, dict) or not all(map(_is_size, (peak, *known.values(), *parts.values()))):
        return None
    return MemoryFacts(str(fields.get("device")), peak, parts, **known)  # type: ignore[arg-type]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
