"""A node's page for Prometheus: its first process's view of the run, served by a background thread.

Training writes plain numbers into `Facts`; a scrape reads them. If the port is taken, or a package missing, only the
page is lost. The page ends with its process.

GPU figures of a node are read from NVIDIA's library (NVML) at each scrape, and named as by NVIDIA's DCGM exporter, so
dashboards for that exporter work on nodes without it. Units are the exporter's: percent, MiB, degrees Celsius, watts,
MHz.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from elastic_train.insight.detection import MEANINGS
from elastic_train.insight.phases import PHASES, REST, MemoryFacts, RankFacts, Utilisation
from rendezvous.etcd.tally import TALLY, Tally

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger(__name__)
PREFIX = "elastic_train_"
MIB = 1 << 20


@dataclass(slots=True)
class Facts:
    """A process's view of its run; times are unix seconds. Values that only rank 0 knows are None on other nodes."""

    started_at: float = field(default_factory=time.time)
    utilisation: Utilisation | None = None
    """None if the FLOPs of a sample or the device's peak are unknown."""
    step: int = 0
    total_steps: int = 0
    loss: float = 0.0
    gradient_norm: float = 0.0
    samples_per_s: float = 0.0
    step_s: float = 0.0
    last_step_at: float = 0.0
    world_size: int = 0
    term: int = 0
    num_worlds: int = 0
    recovery_s: float = 0.0
    lost_steps: int = 0
    samples_left_out: int = 0
    trained_s: float = 0.0
    phases_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    hidden_s: float = 0.0
    exchanged_bytes: int = 0
    is_leader: bool = False
    last_commit_step: int | None = None
    last_commit_at: float | None = None
    save_stall_s: float | None = None
    num_failed_saves: int | None = None
    num_skipped_saves: int | None = None
    events: Mapping[str, int] = field(default_factory=dict)
    is_recovering: bool = False
    etcd: Tally = TALLY
    memory: MemoryFacts | None = None
    """Memory of the process's rank, once measured."""

    def enter_world(self, term: int, size: int, step: int, total_steps: int, *, is_leader: bool) -> None:
        """Record the start of a world at a step: steps applied beyond it are lost."""
        self.lost_steps += max(0, self.step - step)
        self.term, self.world_size, self.is_leader = term, size, is_leader
        self.step, self.total_steps = step, total_steps
        self.num_worlds += 1
        self.is_recovering = self.last_step_at > 0

    def add_step(self, step: int, loss: float | None, norm: float, seconds: float, num_samples: int) -> None:
        """Record an applied step; the first of a world ends a recovery, unless the process has just started."""
        now = time.time()
        if self.is_recovering:
            self.recovery_s, self.is_recovering = now - self.last_step_at, False
        self.step, self.gradient_norm, self.step_s = step, norm, seconds
        self.loss = math.nan if loss is None else loss
        self.samples_per_s = num_samples / seconds if seconds else 0.0
        self.last_step_at = now

    def add_row(self, row: RankFacts) -> None:
        """Add this process's rank's times."""
        for phase, seconds in zip(PHASES, row, strict=False):
            self.phases_s[phase] += seconds
        self.trained_s += row.total_s
        self.hidden_s += row.hidden_s
        self.exchanged_bytes += row.exchanged_bytes

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of all devices in the last step; None if unknown."""
        if self.utilisation is None or not self.world_size:
            return None
        return self.utilisation.mfu(self.samples_per_s, self.world_size)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation, including recomputed operations; None if unknown."""
        if self.utilisation is None or not self.world_size:
            return None
        return self.utilisation.hfu(self.samples_per_s, self.world_size)

    @property
    def goodput(self) -> float:
        """Share of the process's time spent on steps that count; lost ones are taken at the mean."""
        elapsed_s = max(1e-9, time.time() - self.started_at)
        kept = self.step / (self.step + self.lost_steps) if self.step else 0.0
        return min(1.0, kept * self.trained_s / elapsed_s)


class Server(Protocol):
    def shutdown(self) -> None: ...


class Page:
    """Facts at http://host:port/metrics, labelled with the run's and the node's name."""

    def __init__(self, facts: Facts, run: str, node: str) -> None:
        self.facts, self._labels = facts, (run, node)
        self._server: Server | None = None
        self._gpus: Gpus | None = None
        self.port: int | None = None

    def open(self, host: str, port: int) -> None:
        """Serve the page; if that fails, log it once, and training continues."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            log.warning(
                "monitoring.port is %d, and prometheus-client is not installed: no page is served, training continues; "
                "pip install 'elastic-train[monitoring]'",
                port,
            )
            return
        self._gpus = Gpus()
        registry = CollectorRegistry()
        registry.register(self)
        try:
            server, _ = start_http_server(port, host, registry)
        except (OSError, RuntimeError) as error:  # the latter if no thread can be started
            log.warning(
                "no page for Prometheus can be served at %s:%d (%s): training continues without; is it another job's "
                "port? Set monitoring.port to a free one",
                host,
                port,
                error,
            )
            return
        self._server, self.port = server, server.server_port

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server = None

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        facts = self.facts
        for name, meaning, value in _gauges(facts):
            if value is not None:
                family = GaugeMetricFamily(PREFIX + name, meaning, labels=["run", "node"])
                family.add_metric(self._labels, float(value))
                yield family
        for name, meaning, parts in _parts(facts):
            family = GaugeMetricFamily(PREFIX + name, meaning, labels=["run", "node", "part"])
            for part, num_bytes in parts.items():
                family.add_metric((*self._labels, part), num_bytes)
            yield family
        for name, meaning, label, values in _counters(facts):
            counter = CounterMetricFamily(PREFIX + name, meaning, labels=["run", "node", *([label] if label else [])])
            for key, value in values.items():
                counter.add_metric((*self._labels, *([key] if label else [])), float(value))
            yield counter
        for figure, seen in self._gpus.read() if self._gpus is not None else ():
            family = GaugeMetricFamily(figure.name, figure.meaning, labels=["run", "node", "gpu", "UUID", "modelName"])
            for gpu, reading in seen:
                family.add_metric((*self._labels, *gpu.labels), reading)
            yield family


def _parts(facts: Facts) -> Iterator[tuple[str, str, Mapping[str, int]]]:
    if (memory := facts.memory) is not None:
        program = {"program": memory.program} if memory.program else {}
        yield "memory_bytes", "What the peak of memory is made of.", {**memory.parts, **program, REST: memory.rest}


def _gauges(facts: Facts) -> Sequence[tuple[str, str, float | None]]:
    memory = facts.memory
    return (
        ("step", "Steps applied so far.", facts.step),
        ("total_steps", "Steps of the whole job.", facts.total_steps),
        ("loss", "Mean loss of the last step.", facts.loss),
        ("gradient_norm", "Norm of the last step's gradient.", facts.gradient_norm),
        ("samples_per_second", "Samples of the last step over its seconds.", facts.samples_per_s),
        ("step_seconds", "Seconds of the last step.", facts.step_s),
        ("last_step_timestamp_seconds", "When the last step was applied; 0 before the first.", facts.last_step_at),
        ("world_size", "Ranks that train together.", facts.world_size),
        ("term", "Number of the world.", facts.term),
        ("leader", "Whether this process is rank 0.", facts.is_leader),
        ("recovery_seconds", "RTO: from the last step before the last fault to the first after it.", facts.recovery_s),
        ("goodput_ratio", "Share of this process's time in steps that count.", facts.goodput),
        ("mfu_ratio", "Share of all devices' peak that the model's own operations took, if known.", facts.mfu),
        ("hfu_ratio", "The same of all operations, those that were computed again included.", facts.hfu),
        ("memory_peak_bytes", "The most that this process's rank had of its device.", memory.peak if memory else None),
        (
            "memory_reserved_peak_bytes",
            "The most that torch's allocator had of a GPU.",
            memory.reserved if memory else None,
        ),
        (
            "host_memory_peak_bytes",
            "The most resident bytes of this process in host memory.",
            memory.host_peak if memory else None,
        ),
        ("samples_left_out", "Samples in row groups that could not be read.", facts.samples_left_out),
        ("last_commit_step", "Step of the newest commit; rank 0.", facts.last_commit_step),
        ("last_commit_timestamp_seconds", "When the newest commit was made; rank 0.", facts.last_commit_at),
        ("save_stall_seconds", "How long training waited for the last save; rank 0.", facts.save_stall_s),
    )


def _counters(facts: Facts) -> Iterator[tuple[str, str, str | None, Mapping[str, float]]]:
    yield "phase_seconds", "What this process's rank has spent, by phase.", "phase", facts.phases_s
    yield "hidden_exchange_seconds", "Seconds of exchanges that overlapped computation.", None, {"": facts.hidden_s}
    yield "exchanged_bytes", "Bytes given to collectives.", None, {"": facts.exchanged_bytes}
    yield "worlds", "Worlds that this process has entered.", None, {"": facts.num_worlds}
    yield "lost_steps", "Recovery point: applied steps that were lost.", None, {"": facts.lost_steps}
    yield "etcd_answers", "Requests that etcd has answered this process.", None, {"": facts.etcd.num_answers}
    yield "etcd_answer_seconds", "Seconds from request to answer.", None, {"": facts.etcd.answer_s}
    yield "etcd_failures", "Requests of this process that etcd has not answered.", None, {"": facts.etcd.num_failures}
    if facts.num_failed_saves is not None and facts.num_skipped_saves is not None:
        yield "failed_saves", "Commits that failed in this world; rank 0.", None, {"": facts.num_failed_saves}
        yield "skipped_saves", "Commits that were skipped in this world; rank 0.", None, {"": facts.num_skipped_saves}
        events: dict[str, float] = {kind: facts.events.get(kind, 0) for kind in MEANINGS}
        yield "events", "Events in this world, by kind; rank 0.", "kind", events


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
