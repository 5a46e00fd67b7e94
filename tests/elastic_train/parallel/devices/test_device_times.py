"""Device times, measured with events that the test marks as reached."""

from __future__ import annotations

import pytest
import torch

from elastic_train.parallel.devices.device import DeviceTimes, device_times_of

PHASES = ("forward", "backward")


class FakeEvent:
    """An event of a device that takes a second between events, and has reached the first few."""

    num_made = num_passed = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.number, FakeEvent.num_made = FakeEvent.num_made, FakeEvent.num_made + 1

    def query(self) -> bool:
        return self.number < FakeEvent.num_passed

    def elapsed_time(self, later: FakeEvent) -> float:
        """Return milliseconds; as in torch, an event that the device has not reached raises an error."""
        if not (self.query() and later.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1000.0 * (later.number - self.number)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> DeviceTimes:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    FakeEvent.num_made = FakeEvent.num_passed = 0
    made = device_times_of(torch.device("cuda"))
    assert made is not None
    return made


def test_time_between_two_moments_is_of_the_phase_that_the_second_names(times: DeviceTimes) -> None:
    for phase in ("rest", "forward", "backward", "rest", "forward", "backward", "backward"):
        times.note(phase)
    FakeEvent.num_passed = FakeEvent.num_made
    assert times.take(PHASES) == {"forward": 2.0, "backward": 3.0}
    times.note("backward")
    FakeEvent.num_passed = FakeEvent.num_made
    assert times.take(PHASES) == {"forward": 0.0, "backward": 1.0}, "nothing counts twice, or gets lost between"


def test_what_the_device_has_not_done_counts_the_next_time(times: DeviceTimes) -> None:
    """After a step without samples nothing is read, so the device may still be busy with the update before."""
    assert times.take(PHASES) == {"forward": 0.0, "backward": 0.0}
    for phase in ("optimizer", "forward", "backward"):
        times.note(phase)
    for num_passed, expected in [(0, (0.0, 0.0)), (2, (1.0, 0.0)), (2, (0.0, 0.0)), (3, (0.0, 1.0))]:
        FakeEvent.num_passed = num_passed
        assert tuple(times.take(PHASES).values()) == expected


def test_a_cpu_is_measured_by_the_hosts_clock() -> None:
    assert device_times_of(torch.device("cpu")) is None
