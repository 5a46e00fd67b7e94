"""Figures of GPUs on a node's page: under the exporter's names, in its units, and only those that a GPU has."""

from __future__ import annotations

import ctypes
import sys
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_train.insight.page import Facts, Page
from tests.conftest import PATIENCE_S

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


def driver(patch: pytest.MonkeyPatch, *devices: Device) -> None:
    """Let pynvml find a library of a machine with these GPUs."""
    patch.setattr(pynvml, "nvmlLib", NvmlLibrary([*devices]))
    patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


def gpus_on_page() -> dict[tuple[str, str], float]:
    """Return what a scrape of a new page says of GPUs, by name without its prefix and by the GPU's number."""
    page = Page(Facts(), "words", "n1")
    page.open("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
    finally:
        page.close()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert any(sample.name == "elastic_train_step" for sample in samples), "all else is there"
    found = [sample for sample in samples if sample.name.startswith("DCGM_")]
    for sample in found:
        number = sample.labels["gpu"]
        known = {"run": "words", "node": "n1", "gpu": number, "UUID": f"GPU-{number}"}
        assert sample.labels == {**known, "modelName": "NVIDIA H100 80GB HBM3"}
    return {(sample.name.removeprefix("DCGM_FI_DEV_"), sample.labels["gpu"]): sample.value for sample in found}


def test_each_gpu_has_its_figures_in_the_exporters_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory in MiB and power in watts, of every GPU of the node."""
    driver(monkeypatch, Device(), Device(busy=(3, 1), temperature=40, num_errors=2))
    first = {"GPU_UTIL": 97, "MEM_COPY_UTIL": 41, "FB_FREE": 20480, "FB_USED": 61440, "GPU_TEMP": 61}
    first |= {"POWER_USAGE": 654.321, "SM_CLOCK": 1980, "ECC_DBE_VOL_TOTAL": 0}
    second = {**first, "GPU_UTIL": 3, "MEM_COPY_UTIL": 1, "GPU_TEMP": 40, "ECC_DBE_VOL_TOTAL": 2}
    both = {"0": first, "1": second}
    assert gpus_on_page() == {(name, gpu): value for gpu, one in both.items() for name, value in one.items()}


def test_what_a_gpu_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has no count of errors, and others have fallen off the bus: the page has the rest."""
    driver(monkeypatch, Device(is_away=True), Device(num_errors=None), Device(is_lost=True))
    found = gpus_on_page()
    assert len(found) == 7 and {gpu for _, gpu in found} == {"1"}
    assert ("ECC_DBE_VOL_TOTAL", "1") not in found


@pytest.mark.parametrize("lacks", ["package", "driver"])
def test_a_machine_without_gpus_has_none_on_its_page(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said that an operator would have to look at."""
    if lacks == "package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        driver(monkeypatch)
        monkeypatch.delattr(pynvml.nvmlLib, "nvmlInitWithFlags")
    assert gpus_on_page() == {}
