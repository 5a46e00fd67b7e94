"""Measure the parameters of a plan on this machine: FLOP/s, memory bandwidth, call overhead, alpha and beta.

With a configuration, its model's passes are timed as well: `pace` is the ratio of measured to estimated time. The
network is measured between the ranks of the job that this runs in, or between two local processes.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

from elastic_train.core.order import Cursor
from elastic_train.errors import ConfigError
from elastic_train.job.units.float8 import check_multiplies
from elastic_train.job.warm_up import run_once
from elastic_train.parallel.group import Group
from elastic_train.parallel.linear_products import multiply, quantise
from elastic_train.planning.arithmetic.catalogue import Cluster, Device, Link, shipped
from elastic_train.planning.arithmetic.layouts import Layout
from elastic_train.planning.arithmetic.model import MOST_LANES
from elastic_train.planning.arithmetic.step_time import passes_of
from elastic_train.planning.reading import Read

SIDE, VECTOR, CALLS = 768, 1 << 23, 2000
SMALL, LARGE = 16, 1 << 21
"""Elements of the messages that alpha and beta are fitted to."""
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The measurements; the link's name says which endpoints were measured."""

    device: Device
    link: Link

    def as_yaml(self) -> str:
        """Return the contents of a file for `--on`."""
        on = {"device": self.device.name, "nodes": 1, "per_node": 1, "inside": self.link.name}
        tree = {
            "cluster": {**on, "between": self.link.name},
            "devices": {self.device.name: _values(self.device)},
            "links": {self.link.name: _values(self.link)},
        }
        return yaml.safe_dump(tree, sort_keys=False)

    def cluster(self, num_devices: int) -> Cluster:
        return Cluster(self.device, self.link, self.link, 1, num_devices)


def calibrate(rounds: int = 5) -> Calibrated:
    """Measure this machine and the network of the job that this process is a rank of."""
    device = measure_device(rounds)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        rank = int(os.environ["RANK"])
        link = measure_link(Group(rank, world, _job_store(rank, world), TIMEOUT_S), "measured", rounds)
    else:
        link = _between_processes(rounds)
    return Calibrated(device, link)


def measure_device(rounds: int) -> Device:
    """Return this machine's device: its GPU, or a CPU core as measured with one thread."""
    torch.set_num_threads(1)
    has_gpu = torch.cuda.is_available()
    where = torch.device("cuda") if has_gpu else torch.device("cpu")
    fp32 = _flops(where, torch.float32, rounds) / 1e12
    bf16 = _flops(where, torch.bfloat16, rounds) / 1e12 if has_gpu else fp32
    vector = torch.ones(VECTOR, device=where)
    moved = 2 * vector.nbytes / _shortest(where, rounds, lambda: vector.add_(1.0))
    few = torch.ones(8, device=where)
    call_s = _shortest(where, rounds, lambda: [few.add_(1.0) for _ in range(CALLS)]) / CALLS
    memory = torch.cuda.get_device_properties(where).total_memory if has_gpu else _memory_bytes() / _cores()
    base = shipped().device("H100" if has_gpu else "CPU")
    return dataclasses.replace(
        base,
        name=torch.cuda.get_device_name(where).replace(" ", "-") if has_gpu else "this-CPU",
        tflops_fp32=fp32,
        tflops_bf16=bf16,
        tflops_fp8=_float8_flops(where, rounds) / 1e12,
        memory_gb=memory / 1e9,
        memory_gb_per_s=moved / 1e9,
        matmul_share=1.0,
        memory_share=1.0,
        call_s=call_s,
        node=torch.cuda.device_count() if has_gpu else _cores(),
        link="measured",
    )


def measure_link(group: Group, name: str, rounds: int) -> Link:
    """Return alpha and beta between ranks 0 and 1, both ways at once; other ranks only participate."""
    seconds = {}
    for numel in (SMALL, LARGE):
        sent, received, took = torch.ones(numel), torch.empty(numel), list[float]()
        for _ in range(rounds + 1):
            group.barrier()
            began = time.perf_counter()
            if group.rank < 2:
                other = 1 - group.rank
                group.exchange([(other, sent)], [(other, received)])
            took.append(time.perf_counter() - began)
        seconds[numel] = statistics.median(took[1:])
    alpha_s = seconds[SMALL]
    bytes_per_s = 4 * LARGE / max(1e-9, seconds[LARGE] - alpha_s)
    return Link(name, bytes_per_s / 1e9, alpha_s)


def measure_pace(read: Read, device: Device, rounds: int = 5) -> Device:
    """Return the device with its `pace` for a model's passes, the median of several rounds."""
    seconds = lane_seconds(read, rounds)
    facts = read.facts
    expected = passes_of(facts, Layout(recompute=read.layout.recompute), dataclasses.replace(device, pace=1.0))
    return dataclasses.replace(device, pace=seconds / (expected.forward_s + expected.backward_s + expected.again_s))


def lane_seconds(read: Read, rounds: int) -> float:
    """Return the median seconds of the passes of the run's first lanes that have samples, on this machine."""
    plan = read.plan
    torch.set_num_threads(plan.config.threads_per_rank)
    state = plan.build_state()
    lanes = range(min(plan.num_lanes, MOST_LANES))
    [step] = plan.feed.training(plan.order, lanes, Cursor(), num_steps=1)
    batches, took = [batch for batch in step if batch.tensors], []
    for number in range(len(batches) * rounds + 1):
        batch = batches[number % len(batches)]
        _synchronise(plan.device)
        began = time.perf_counter()
        run_once(plan, state.model, batch, step=0)
        _synchronise(plan.device)
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


def _flops(where: torch.device, dtype: torch.dtype, rounds: int) -> float:
    side = 8192 if where.type == "cuda" else SIDE
    left, right = (torch.ones(side, side, dtype=dtype, device=where) for _ in range(2))
    return 2 * side**3 / _shortest(where, rounds, lambda: left @ right)


def _float8_flops(where: torch.device, rounds: int) -> float:
    """Return the FLOP/s of products of matrices in float8; 0 if this machine has none."""
    try:
        check_multiplies(where)
    except ConfigError:
        return 0.0
    side = 8192 if where.type == "cuda" else SIDE
    matrix, scales = quantise(torch.ones(side, side, device=where))
    return 2 * side**3 / _shortest(where, rounds, lambda: multiply(matrix, scales, matrix, scales))


def _shortest(where: torch.device, rounds: int, act: Callable[[], object]) -> float:
    """Return the shortest of several times, since disturbances only lengthen a measurement."""
    took = []
    for _ in range(rounds + 1):
        _synchronise(where)
        began = time.perf_counter()
        act()
        _synchronise(where)
        took.append(time.perf_counter() - began)
    return min(took[1:])


def _synchronise(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _job_store(rank: int, world: int) -> Store:
    """Return the store through which torchrun's workers rendezvous."""
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, world, is_master=rank == 0 and not is_hosted)


def _between_processes(rounds: int) -> Link:
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_measure_here, (folder, rounds), 2, start_method="spawn")  # type: ignore[no-untyped-call]
        return Link(**yaml.safe_load((Path(folder) / "link.yaml").read_text()))


def _measure_here(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    link = measure_link(Group(rank, 2, FileStore(f"{folder}/store", 2), TIMEOUT_S), "measured", rounds)
    if rank == 0:
        (Path(folder) / "link.yaml").write_text(yaml.safe_dump(dataclasses.asdict(link)))
    os._exit(0)


def _values(one: Device | Link) -> dict[str, object]:
    return {name: value for name, value in dataclasses.asdict(one).items() if name != "name"}
