"""The parts of the benchmark, in order of worth, and the time that each may take."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.gpu.job import NUM_LANES, SIZES
from benchmarks.gpu.limits import LOOK_EVERY_S, Limit, OutOfTimeError, nothing_left
from benchmarks.gpu.measure import alone, memory_of_worlds, overlap, plain_peak, saves, shards_overlap, step_times
from benchmarks.gpu.measure import packed as packed_over_mask
from benchmarks.sharding.jobs import MODES
from elastic_train.planning.arithmetic.catalogue import device_named, shipped

GOALS = {
    "mfu_compiled": "≥ 0.5",
    "step_vs_plain_compiled": "≥ 0.97",
    "step_vs_plain": "≥ 0.92",
    "fast_vs_plain": "≥ 0.99",
}
GOALS |= {"peak_memory_vs_plain": "≤ 1.0", "save_stall_ms_per_gb": "≤ 30"}
GOALS |= {"overlap_wait": "≤ 0.3", "first_save_stall_ms_per_gb": "≤ 50", "killed_worker_s": "≤ 0.6"}
GOALS |= {"faults_steps_lost": "0", "worlds_memory_mib": "≤ 64"}
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12}
"""FLOP/s in dense bf16 as stated by the makers, by part of the device's name; the first match applies."""
GENEROSITY = 2.0
"""A part may take this many times its usual share of the time left: what it leaves, later parts have."""
MOST = 0.8
"""Largest fraction of the time left that a part may take if others follow."""
TESTS_END_S = 20.0
"""Seconds before its limit at which the tests are interrupted: then they end what they have begun, and report."""
Figures = Mapping[str, object]


def peak_flops(name: str) -> float | None:
    """Return a device's peak FLOP/s; None if it is not known here, as of a slice, or a variant with a lower one."""
    part = next((part for part in PEAKS if re.search(rf"\b{part}\b", name)), None)
    is_less = part in shipped().devices and device_named(name) is None
    return None if part is None or is_less else PEAKS[part]


@dataclass(frozen=True, slots=True)
class Machine:
    """The subject of a measurement.

    A size for one rank and one for each of two that share the device, "cuda" or "cpu", and quick or full effort.
    """

    size: str
    half_size: str
    device: str
    is_quick: bool

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.device == "cuda" else "this machine's CPU"

    @property
    def num_steps(self) -> int:
        return 8 if self.is_quick else 24

    def beside_plain(self, limit: Limit, end: str, *, compile: bool) -> Figures:
        """Return tokens/s, MFU, and a plain loop's step time over the trainer's."""
        times = limit.run(step_times, self.size, self.device, self.num_steps, "plain", compile=compile)
        tokens_per_s = NUM_LANES * SIZES[self.size].num_tokens / times["ours"]
        peak, flops = peak_flops(self.name), SIZES[self.size].flops_per_token
        return {
            f"tokens_per_s{end}": round(tokens_per_s),
            f"mfu{end}": None if peak is None else round(tokens_per_s * flops / peak, 3),
            f"step_vs_plain{end}": round(times["over plain"], 3),
        }

    def beside_another(
        self, limit: Limit, without: Mapping[str, object], changes: Mapping[str, Mapping[str, object]]
    ) -> Iterator[Figures]:
        """Yield step time and peak memory of a job with each of the changes, by name, over those of `without`."""
        first: Mapping[str, float] = {}
        for number, (name, keys) in enumerate({"": without, **changes}.items()):
            own = limit.first(1 / (1 + len(changes) - number))
            found = own.run(alone, self.size, self.device, self.num_steps, **keys)
            if number > 0:
                yield beside(name, first, found)
            else:
                first = found


def compiled(machine: Machine, limit: Limit) -> Iterator[Figures]:
    yield machine.beside_plain(limit, "_compiled", compile=True)


def eager(machine: Machine, limit: Limit) -> Iterator[Figures]:
    yield machine.beside_plain(limit, "", compile=False)


def saving(machine: Machine, limit: Limit) -> Iterator[Figures]:
    ours = limit.first(0.75).run(saves, machine.size, machine.device, 2 if machine.is_quick else 3)
    yield {
        "save_stall_ms_per_gb": round(ours["median"], 1),
        "first_save_stall_ms_per_gb": round(ours["first"], 1),
        "steps_beside_a_save": ours["steps during"],
        "peak_memory_gib": round(ours["peak"] / (1 << 30), 2),
    }
    plain = limit.run(plain_peak, machine.size, machine.device)
    yield {"peak_memory_vs_plain": round(ours["peak"] / plain, 3) if plain else None}


def tests(machine: Machine, limit: Limit) -> Iterator[Figures]:
    """Run tests/gpu; their output goes to standard error as it comes."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(min(4, os.cpu_count() or 1)), "--dist", "loadgroup"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command += [f"--junitxml={report}", "tests/gpu"]
        env = os.environ | {"ELASTIC_TRAIN_GPU_TESTS": machine.device, "OMP_NUM_THREADS": "1"}
        yield from run_tests(command, env, report, limit)


def run_tests(command: Sequence[str], env: Mapping[str, str], report: Path, limit: Limit) -> Iterator[Figures]:
    """Run pytest, and yield its counts; raise OutOfTimeError if it was interrupted some time before the limit."""
    running = subprocess.Popen(command, env=env, stdout=sys.stderr)
    _await(running, lambda: limit.left_s < TESTS_END_S)
    is_interrupted = running.poll() is None
    if is_interrupted:
        running.send_signal(signal.SIGINT)
        _await(running, limit.is_near)
    text = report.read_text() if report.exists() else ""
    counts = {name: int(number) for name, number in re.findall(r'(tests|errors|failures|skipped)="(\d+)"', text)}
    if not counts.get("tests"):
        raise RuntimeError(f"pytest ran no test: {' '.join(command)}")
    num_failed = counts["errors"] + counts["failures"]
    yield {"tests_passed": counts["tests"] - num_failed - counts["skipped"], "tests_failed": num_failed}
    if is_interrupted:
        raise OutOfTimeError("pytest was interrupted at its limit; tests that had ended by then are counted")


def _await(process: subprocess.Popen[bytes], is_over: Callable[[], bool]) -> None:
    """Wait for a process until time is over."""
    while not is_over():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_EVERY_S)
            return


def faulted(machine: Machine, limit: Limit) -> Iterator[Figures]:
    # not earlier: an environment without etcd can still measure the rest
    from benchmarks.gpu.faults import faults

    return faults(limit, machine.device, 2 if machine.is_quick else 20)


def worlds(machine: Machine, limit: Limit) -> Iterator[Figures]:
    grown = limit.run(memory_of_worlds, machine.device, 8 if machine.is_quick else 50)
    yield {"worlds": grown["worlds"], "worlds_memory_mib": round(grown["bytes"] / (1 << 20), 1)}


def overlapping(machine: Machine, limit: Limit) -> Iterator[Figures]:
    whole = limit.first(1 / 3).run(overlap, machine.half_size, machine.device, machine.num_steps)
    yield {"overlap_wait": round(whole, 3)}
    for number, shards in enumerate(MODES[1:]):
        own = limit.first(1 / (len(MODES) - 1 - number))
        exposed = own.run(shards_overlap, machine.half_size, machine.device, machine.num_steps // 3, shards)
        yield {f"overlap_wait_{shards}": round(exposed, 3)}


def packed(machine: Machine, limit: Limit) -> Iterator[Figures]:
    ratio = limit.run(packed_over_mask, machine.size, machine.device, machine.num_steps)
    yield {"packed_vs_mask": round(ratio, 3)}


def fast(machine: Machine, limit: Limit) -> Iterator[Figures]:
    times = limit.run(step_times, machine.size, machine.device, machine.num_steps, "plain", reduction="fast")
    yield {"fast_vs_plain": round(times["over plain"], 3)}


def fp8(machine: Machine, limit: Limit) -> Iterator[Figures]:
    without, found = ({"compile": True, "precision": precision} for precision in ("bf16", "fp8"))
    return machine.beside_another(limit, without, {"fp8": found})


def deterministic(machine: Machine, limit: Limit) -> Iterator[Figures]:
    times = limit.run(step_times, machine.size, machine.device, machine.num_steps, "deterministic")
    yield {"step_vs_deterministic": round(times["over deterministic"], 3)}


def memory(machine: Machine, limit: Limit) -> Iterator[Figures]:
    keys = {"recompute": "units", **({"offload": "optimizer"} if machine.device == "cuda" else {})}
    return machine.beside_another(limit, {}, {key: {"parallel": {key: value}} for key, value in keys.items()})


@dataclass(frozen=True, slots=True)
class Part:
    """A measurement that yields figures as they come, and the seconds that it usually takes."""

    measure: Callable[[Machine, Limit], Iterator[Figures]]
    usual_s: float


PARTS: dict[str, Part] = {
    "compiled": Part(compiled, 90.0),
    "eager": Part(eager, 45.0),
    "saves": Part(saving, 45.0),
    "tests": Part(tests, 130.0),
    "faults": Part(faulted, 90.0),
    "worlds": Part(worlds, 30.0),
    "overlap": Part(overlapping, 50.0),
    "packed": Part(packed, 20.0),
    "fast": Part(fast, 25.0),
    "fp8": Part(fp8, 60.0),
    "deterministic": Part(deterministic, 25.0),
    "memory": Part(memory, 60.0),
}
"""In order of importance; the seconds are estimates, no device has been timed."""


def measure(
    machine: Machine,
    names: Sequence[str],
    within_s: float,
    console: Console,
    note: Callable[[Figures], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Measure these parts, pass figures to `note` at once, and return the parts that lack some, with the reasons."""
    began, missing = clock(), []
    whole = Limit(began + within_s, clock)
    for number, name in enumerate(names):
        if whole.left_s == 0.0:
            missing.append(f"{name}: not begun within {within_s:.0f} s")
            continue
        limit = whole.first(share(names[number:]))
        console.print(f"{clock() - began:4.0f} s: {name}, at most {limit.left_s:.0f} s")
        failure = _measure(PARTS[name], machine, limit, console, note)
        if failure is not None:
            missing.append(f"{name}: {failure}")
        elif limit.is_near():
            missing.append(f"{name}: ended at its limit, with what it had")
    console.print(f"{clock() - began:4.0f} s: done")
    return missing


def share(names: Sequence[str]) -> float:
    """Return the fraction of the time left that the first of these parts may take."""
    if len(names) == 1:
        return 1.0
    return min(MOST, GENEROSITY * PARTS[names[0]].usual_s / sum(PARTS[name].usual_s for name in names))


def _measure(
    part: Part, machine: Machine, limit: Limit, console: Console, note: Callable[[Figures], None]
) -> str | None:
    """Measure a part; return why it lacks figures, if it does."""
    with nothing_left():
        try:
            for found in part.measure(machine, limit):
                for figure, value in found.items():
                    goal = f"  (goal {GOALS[figure]})" if figure in GOALS else ""
                    console.print(f"        {figure} {value}{goal}")
                note(found)
        except OutOfTimeError as error:
            return str(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the other parts are measured all the same
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
    return None


def beside(key: str, without: Mapping[str, float], found: Mapping[str, float]) -> Figures:
    """Return step time and peak memory with a key over those without it."""
    step, peak = found["seconds"] / without["seconds"], found["peak"] / without["peak"] if without["peak"] else None
    return {f"{key}_step": round(step, 3), f"{key}_peak_memory": None if peak is None else round(peak, 3)}
