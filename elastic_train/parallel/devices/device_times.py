"""Measure a GPU's time per phase.

A host's clock would measure only the enqueueing, and one wait at the end of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import torch


class DeviceTimes:
    """Records points in the device queue of the thread that creates it, and the time between them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._noted: deque[tuple[str, torch.cuda.Event]] = deque()

    def note(self, phase: str) -> None:
        """Attribute the device work since the last call to a phase; returns at once."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._noted.append((phase, event))

    def take(self, phases: Collection[str]) -> dict[str, float]:
        """Return the seconds per phase since the last call, as far as the device has come; does not wait.

        A step whose lanes have no samples reads nothing from the device, which may still run the last update.
        """
        spent = dict.fromkeys(phases, 0.0)
        while len(self._noted) > 1 and self._noted[1][1].query():  # type: ignore[no-untyped-call]
            _, before = self._noted.popleft()
            phase, now = self._noted[0]
            if phase in spent:
                spent[phase] += 1e-3 * before.elapsed_time(now)
        return spent


def device_times_of(device: torch.device) -> DeviceTimes | None:
    """Return the timer of a device; None for a CPU, whose calls are synchronous."""
    return DeviceTimes(device) if device.type == "cuda" else None
