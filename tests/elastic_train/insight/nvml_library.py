"""A library that answers as NVIDIA's driver does, through its C interface: pynvml calls it as it calls the real one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

SUCCESS, NOT_SUPPORTED, GPU_IS_LOST = 0, 3, 15


@dataclass(slots=True)
class Device:
    """A GPU's figures, in NVML's units: percent, bytes, degrees, milliwatts, MHz."""

    name: bytes = b"NVIDIA H100 80GB HBM3"
    busy: tuple[int, int] = (97, 41)
    memory: tuple[int, int, int] = (80 << 30, 20 << 30, 60 << 30)
    temperature: int = 61
    milliwatts: int = 654_321
    sm_clock: int = 1980
    num_errors: int | None = 0
    """None where it keeps no count of errors."""
    is_lost: bool = False
    """True if it has fallen off the bus since it was found."""
    is_away: bool = False
    """True if it had fallen off the bus before that."""


@dataclass
class NvmlLibrary:
    """Stand-in for libnvidia-ml.so.1 on a machine with some GPUs; a handle is the GPU's number plus one."""

    devices: list[Device]
    _kept: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nvmlInitWithFlags = self._function([ctypes.c_uint], lambda flags: SUCCESS)
        self.nvmlDeviceGetCount_v2 = self._function([ctypes.c_void_p], self._count)
        self.nvmlDeviceGetHandleByIndex_v2 = self._function([ctypes.c_uint, ctypes.c_void_p], self._handle)
        self.nvmlDeviceGetUUID = self._text(lambda number, device: f"GPU-{number}".encode())
        self.nvmlDeviceGetName = self._text(lambda number, device: device.name)
        self.nvmlDeviceGetUtilizationRates = self._figures(ctypes.c_uint, lambda device: device.busy)
        self.nvmlDeviceGetMemoryInfo = self._figures(ctypes.c_ulonglong, lambda device: device.memory)
        self.nvmlDeviceGetPowerUsage = self._figures(ctypes.c_uint, lambda device: [device.milliwatts])
        self.nvmlDeviceGetTemperature = self._figures(ctypes.c_uint, lambda device: [device.temperature], num_kinds=1)
        self.nvmlDeviceGetClockInfo = self._figures(ctypes.c_uint, lambda device: [device.sm_clock], num_kinds=1)
        self.nvmlDeviceGetTotalEccErrors = self._figures(
            ctypes.c_ulonglong, lambda device: None if device.num_errors is None else [device.num_errors], num_kinds=2
        )

    def _function(self, kinds: Iterable[Any], answer: Callable[..., int]) -> Any:
        made = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(answer)
        self._kept.append(made)
        return made

    def _count(self, place: int) -> int:
        ctypes.c_uint.from_address(place).value = len(self.devices)
        return SUCCESS

    def _handle(self, number: int, place: int) -> int:
        if self.devices[number].is_away:
            return GPU_IS_LOST
        ctypes.c_void_p.from_address(place).value = number + 1
        return SUCCESS

    def _text(self, text_of: Callable[[int, Device], bytes]) -> Any:
        def answer(handle: int, place: int, size: int) -> int:
            text = text_of(handle - 1, self.devices[handle - 1]) + b"\0"
            assert len(text) <= size
            ctypes.memmove(place, text, len(text))
            return SUCCESS

        return self._function([ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint], answer)

    def _figures(self, kind: Any, figures_of: Callable[[Device], Iterable[int] | None], *, num_kinds: int = 0) -> Any:
        def answer(handle: int, *rest: int) -> int:
            device = self.devices[handle - 1]
            if device.is_lost:
                return GPU_IS_LOST
            found = figures_of(device)
            if found is None:
                return NOT_SUPPORTED
            for number, value in enumerate(found):
                kind.from_address(rest[-1] + number * ctypes.sizeof(kind)).value = value
            return SUCCESS

        return self._function([ctypes.c_void_p, *[ctypes.c_uint] * num_kinds, ctypes.c_void_p], answer)
