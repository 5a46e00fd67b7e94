"""A rank's memory: its peak, and the parts of it that are known to the byte.

Parts are named as by `elastic-train plan`, and are held from step to step. The rest of the peak are activations,
temporary memory of a step, and what the allocator keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FOLDER = "memory"
"""Folder of memory snapshots below a run's folder, written when a rank runs out of memory."""
PARTS = ("weights", "gradients", "optimizer", "sums", "exchange", "buffers", "staging")
REST = "rest"
"""Name of the rest of a peak."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """One rank's memory, in bytes.

    `peak` is of its device: on a GPU the most memory of tensors, and `reserved` of torch's allocator; on a CPU the most
    resident bytes of the process, which had `program` before it built its model. `parts` are on the device; `host` is
    host memory held next to a GPU, and `host_peak` the process's most resident bytes there.
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
        """Peak without the parts, including parts released before the measurement."""
        return max(0, self.peak - self.program - sum(self.parts.values()))

    def as_fields(self) -> dict[str, object]:
        """Return the fields for a history's line or a snapshot."""
        of_cpu: dict[str, object] = {"program": self.program} if self.reserved is None else {}
        of_gpu = {"reserved": self.reserved, "host": self.host, "host_peak": self.host_peak}
        return {"device": self.device, "peak": self.peak, **(of_cpu or of_gpu), "parts": dict(self.parts)}


def facts_of(fields: Mapping[str, object]) -> MemoryFacts | None:
    """Parse the output of `as_fields`; None if it is something else."""
    parts, peak = fields.get("parts"), fields.get("peak")
    numbers = {key: fields.get(key) for key in ("program", "reserved", "host", "host_peak")}
    known = {key: value for key, value in numbers.items() if value is not None}
    if not isinstance(parts, dict) or not all(map(_is_size, (peak, *known.values(), *parts.values()))):
        return None
    return MemoryFacts(str(fields.get("device")), peak, parts, **known)  # type: ignore[arg-type]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
