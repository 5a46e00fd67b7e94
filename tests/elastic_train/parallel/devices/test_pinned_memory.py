"""Host memory that a device copies to asynchronously, with a fake driver, since a CPU has none."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from elastic_train.parallel.devices import host_memory
from elastic_train.parallel.devices.host_memory import pinned

DEVICE = torch.device("cuda", 1)


class FakeDriver:
    """Records which memory is registered, and on which device; its calls return `status`."""

    def __init__(self) -> None:
        self.status, self.current = 0, torch.device("cuda", 0)
        self.registered: dict[int, int] = {}
        self.devices: list[torch.device] = []

    def cudaHostRegister(self, start: int, num_bytes: int, flags: int) -> int:
        self.devices.append(self.current)
        self.registered |= {} if self.status else {start: num_bytes}
        return self.status

    def cudaHostUnregister(self, start: int) -> int:
        self.devices.append(self.current)
        del self.registered[start]
        return 0

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", driver.device)
    monkeypatch.setattr(host_memory, "_LEAST_SHARE", 100)
    return driver


@pytest.mark.parametrize("num_bytes", [1, 100, 101, 1001])
def test_memory_is_zeroed_and_pinned_until_nothing_uses_it(driver: FakeDriver, num_bytes: int) -> None:
    """The memory's own device is current: otherwise the thread would allocate memory on another one."""
    memory = pinned(num_bytes, DEVICE)
    assert torch.equal(memory, torch.zeros(num_bytes, dtype=torch.uint8))
    view = memory[:1]
    assert driver.registered == {memory.data_ptr(): num_bytes}
    del memory
    gc.collect()
    assert len(driver.registered) == 1, "a view still uses it"
    del view
    gc.collect()
    assert not driver.registered and driver.devices == [DEVICE, DEVICE]


def test_nothing_is_not_pinned_and_a_refusal_is_a_lack_of_memory(driver: FakeDriver) -> None:
    assert pinned(0, DEVICE).numel() == 0 and not driver.devices
    driver.status = 2
    with pytest.raises(MemoryError, match=r"300 bytes of host memory cannot be pinned \(CUDA's error 2\)"):
        pinned(300, DEVICE)
    gc.collect()
    assert driver.devices == [DEVICE], "what was not registered is not given back"
