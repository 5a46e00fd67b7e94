"""How long a GPU takes for what it is asked for; a host's clock sees the asking, and waits at the end of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import torch


class DeviceTimes:
    """Notes moments in a device's order of work, of the thread that makes this, and says what lay between them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._noted: deque[tuple[str, torch.cuda.Event]] = deque()

    def note(self, phase: str) -> None:
        """Say that what the device has been asked for since the last moment is of a phase; returns at once."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._noted.append((phase, event))

    def take(self, phases: Collection[str]) -> dict[str, float]:
        """Return the seconds of some phases since the last time, as far as the device has come; it does not wait.

        A step whose lanes have no samples reads nothing from the device, which may be busy with the last update.
        """
        spent = dict.fromkeys(phases, 0.0)
        while len(self._noted) > 1 and self._noted[1][1].query():  # type: ignore[no-untyped-call]
            _, before = self._noted.popleft()
            phase, now = self._noted[0]
            if phase in spent:
                spent[phase] += 1e-3 * before.elapsed_time(now)
        return spent


def device_times_of(device: torch.device) -> DeviceTimes | None:
    """Return what measures a device's work; None for a CPU, which has done it when the calls return."""
    return DeviceTimes(device) if device.type == "cuda" else None
