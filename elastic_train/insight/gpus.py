"""GPU figures of a node, read from NVIDIA's library (NVML) at each scrape, named as by NVIDIA's DCGM exporter.

So dashboards for that exporter work on nodes without it. Units are the exporter's: percent, MiB, degrees Celsius,
watts, MHz.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

log = logging.getLogger(__name__)
MIB = 1 << 20


class Figure(NamedTuple):
    """A GPU figure; `ask` takes NVML's module and the GPU's handle."""

    name: str
    meaning: str
    ask: Callable[[Any, Any], float]


FIGURES = (
    Figure(
        "DCGM_FI_DEV_GPU_UTIL",
        "Share of the time in which a kernel ran, in percent.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    ),
    Figure(
        "DCGM_FI_DEV_MEM_COPY_UTIL",
        "Share of the time in which memory was read or written, in percent.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).memory,
    ),
    Figure(
        "DCGM_FI_DEV_FB_USED",
        "Memory in use, in MiB.",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / MIB,
    ),
    Figure(
        "DCGM_FI_DEV_FB_FREE",
        "Free memory, in MiB.",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).free / MIB,
    ),
    Figure(
        "DCGM_FI_DEV_GPU_TEMP",
        "Temperature, in degrees Celsius.",
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    ),
    Figure(
        "DCGM_FI_DEV_POWER_USAGE",
        "Power, in watts.",
        lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    ),
    Figure(
        "DCGM_FI_DEV_SM_CLOCK",
        "Clock of the multiprocessors, in MHz.",
        lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    ),
    Figure(
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
        "Errors of memory that could not be corrected, since the driver was loaded.",
        lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(
            gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
    ),
)


class Gpu(NamedTuple):
    """One of a node's GPUs; `labels` are the exporter's `gpu` (its number), `UUID` and `modelName`."""

    labels: tuple[str, str, str]
    handle: Any


class Gpus:
    """The node's GPUs as NVML numbers them; none without a driver or the Python package."""

    def __init__(self) -> None:
        self._nvml, self._gpus = _open()

    def read(self) -> Iterator[tuple[Figure, list[tuple[Gpu, float]]]]:
        """Yield each figure with the values of the GPUs that have it; a lost GPU has none."""
        for figure in FIGURES:
            found = [(gpu, value) for gpu in self._gpus if (value := self._ask(figure, gpu)) is not None]
            if found:
                yield figure, found

    def _ask(self, figure: Figure, gpu: Gpu) -> float | None:
        try:
            return float(figure.ask(self._nvml, gpu.handle))
        except self._nvml.NVMLError:
            return None


def _open() -> tuple[Any, list[Gpu]]:
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        found = [_gpu_at(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        log.info("the page has no figures of GPUs: %s", error)
        return pynvml, []
    return pynvml, [gpu for gpu in found if gpu is not None]


def _gpu_at(nvml: Any, number: int) -> Gpu | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        return Gpu((str(number), nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)), handle)
    except nvml.NVMLError as error:
        log.warning("the page has no figures of GPU %d of this node: %s", number, error)
        return None
