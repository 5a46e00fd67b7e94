"""The duration of a worker's health check before it joins: on an idle machine and on a busy one."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

from benchmarks.figures import Effort
from elastic_train.config.schema import Config
from elastic_train.health.precheck import planned
from elastic_train.health.result import examine_all
from rendezvous import EtcdServer
from rendezvous.context import LiveContext

BUSY_PER_CORE = 4
_SPIN = "while True: pass"


def examination(effort: Effort) -> dict[str, object]:
    """Return wall and CPU seconds of a complete check, the median of rounds, and the longest on a busy machine."""
    torch.set_num_threads(1)
    rounds = 3 if effort.is_quick else 15
    with EtcdServer() as etcd, tempfile.TemporaryDirectory() as folder:
        context = LiveContext((etcd.endpoint,), "job", "n", "host", "127.0.0.1", "", 1, 2, 3.0, 1.0, 60.0)
        config = Config.model_validate({"data": {"train": folder}, "run": {"dir": folder}})
        alone = [_examined(config, context) for _ in range(rounds)]
        with _busy():
            beside = [_examined(config, context)[0] for _ in range(rounds)]
    wall_s, cpu_s = (statistics.median(column) for column in zip(*alone, strict=True))
    seconds = {"alone": wall_s, "CPU": cpu_s, "all cores busy": statistics.median(beside), "longest": max(beside)}
    return {"health_check_s": {case: round(value, 3) for case, value in seconds.items()}}


def _examined(config: Config, context: LiveContext) -> tuple[float, float]:
    began, began_cpu = time.perf_counter(), time.process_time()
    findings = examine_all(planned(config, torch.device("cpu"), context))
    took = time.perf_counter() - began, time.process_time() - began_cpu
    assert {finding.level for finding in findings} == {"ok"}, findings
    return took


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """Keep every core busy with several processes."""
    number = BUSY_PER_CORE * len(os.sched_getaffinity(0))
    processes = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
