"""A language model on one GPU: how fast the trainer is there, and what its promises cost.

    python -m benchmarks.gpu [--only PART,...] [--within S] [--json] [--quick] [--write docs/benchmarks.md]

A decoder trains in bf16 (autocast, fp32 weights, AdamW, clipping), four lanes of one row a step, beside a plain loop of
the same model, step by step in one process. Figures that end in `_compiled` are those with `compile: true`, and the
plain loop's blocks compiled, too. The parts, in order of worth; each figure is written as soon as it is known:

compiled, eager   tokens_per_s    tokens a second
                  mfu             model FLOPs utilisation: tokens a second x (6 x parameters + 12 x depth x width x
                                  tokens of a row) over the device's peak in dense bf16 (PaLM, appendix B)
                  step_vs_plain   a plain loop's time of a step over the trainer's; the loop asks for nothing, and gets
                                  kernels that give other bits each time
saves             peak_memory_vs_plain    the most memory of the device over the plain loop's
                  save_stall_ms_per_gb    what a save in the background costs the training beside it until it has
                                          ended, for each GB of state: the median of several, and the first
tests             tests_passed, tests_failed    of tests/gpu: jobs, faults and NCCL on this device
kill              killed_worker_s    from the end of one of two ranks that share the device to the next applied step;
                                     kill_hash_equal: whether the weights are those without a fault
overlap           overlap_wait    how long two ranks that share the device wait for the gradient after the backward
                                  pass, over that with `parallel.bucket_mb: null`; `…_gradients`, `…_parameters`: what
                                  exchanges of these shards add to a step, over what they add if nothing is computed
                                  meanwhile
packed            packed_vs_mask    the time of passes of a row of 32 documents over that with a mask
fast              fast_vs_plain    as step_vs_plain, with `reduction: fast`: any algorithm and any order of sums
fp8               fp8_step    the time of a step with `precision: fp8` over that with bf16, both compiled; and memory
deterministic     step_vs_deterministic    as step_vs_plain, the loop in torch's deterministic mode
memory            recompute_step    the time of a step with `parallel.recompute: units` over that without, and the most
                                    memory; `offload_…`: the same with `parallel.offload: optimizer`

The model is the largest of 1 B, 0.3 B and 0.1 B parameters for which the device has memory, on rows of 4,096 tokens
(2,048 for the last). A part that does not begin within --within seconds is named, and so is one that fails; the exit
code is then 1. The last line is JSON. --device cpu --size tiny tries the program out where there is no GPU; its figures
mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.beside import in_process
from benchmarks.figures import rewrite
from benchmarks.gpu.job import NUM_LANES, SIZES, size_for
from benchmarks.gpu.measure import alone, overlap, plain_peak, saves, shards_overlap, step_times
from benchmarks.packed import packed_over_mask
from benchmarks.sharding.jobs import MODES

GOALS = {
    "mfu_compiled": "≥ 0.5",
    "step_vs_plain_compiled": "≥ 0.97",
    "step_vs_plain": "≥ 0.92",
    "fast_vs_plain": "≥ 0.99",
}
GOALS |= {"peak_memory_vs_plain": "≤ 1.0", "save_stall_ms_per_gb": "≤ 30"}
GOALS |= {"overlap_wait": "≤ 0.3", "first_save_stall_ms_per_gb": "≤ 50", "killed_worker_s": "≤ 0.6"}
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12}
"""FLOP/s in dense bf16 as stated by the makers, by part of the device's name; the first match applies."""
BEGIN, END = "<!-- gpu -->", "<!-- end of gpu -->"


def peak_flops(name: str) -> float | None:
    """Return a device's peak FLOP/s; None if it is not known here."""
    return next((peak for part, peak in PEAKS.items() if re.search(rf"\b{part}\b", name)), None)


@dataclass(frozen=True, slots=True)
class Machine:
    """The subject of a measurement: the name of a size, "cuda" or "cpu", and quick or full effort."""

    size: str
    device: str
    is_quick: bool

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.device == "cuda" else "this machine's CPU"

    @property
    def num_steps(self) -> int:
        return 8 if self.is_quick else 24

    def beside_plain(self, end: str, **how: object) -> dict[str, object]:
        """Return tokens/s, MFU, and a plain loop's step time over the trainer's."""
        times = in_process(step_times, self.size, self.device, self.num_steps, "plain", **how)  # type: ignore[arg-type]
        tokens_per_s = NUM_LANES * SIZES[self.size].num_tokens / times["ours"]
        peak, flops = peak_flops(self.name), SIZES[self.size].flops_per_token
        return {
            f"tokens_per_s{end}": round(tokens_per_s),
            f"mfu{end}": None if peak is None else round(tokens_per_s * flops / peak, 3),
            f"step_vs_plain{end}": round(times["over plain"], 3),
        }


def compiled(machine: Machine) -> dict[str, object]:
    return machine.beside_plain("_compiled", compile=True)


def eager(machine: Machine) -> dict[str, object]:
    return machine.beside_plain("", compile=False)


def saving(machine: Machine) -> dict[str, object]:
    ours = in_process(saves, machine.size, machine.device, 2 if machine.is_quick else 3)
    plain = in_process(plain_peak, machine.size, machine.device)
    return {
        "peak_memory_vs_plain": round(ours["peak"] / plain, 3) if plain else None,
        "peak_memory_gib": round(ours["peak"] / (1 << 30), 2),
        "save_stall_ms_per_gb": round(ours["median"], 1),
        "first_save_stall_ms_per_gb": round(ours["first"], 1),
        "steps_beside_a_save": ours["steps during"],
    }


def tests(machine: Machine) -> dict[str, object]:
    """Run tests/gpu; their output goes to standard error as it comes."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(min(4, os.cpu_count() or 1)), "--dist", "loadgroup"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command += [f"--junitxml={report}", "tests/gpu"]
        env = os.environ | {"ELASTIC_TRAIN_GPU_TESTS": machine.device, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=env, check=False, stdout=sys.stderr)
        text = report.read_text() if report.exists() else ""
    counts = {name: int(number) for name, number in re.findall(r'(tests|errors|failures|skipped)="(\d+)"', text)}
    if not counts.get("tests"):
        raise RuntimeError(f"pytest ran no test: {' '.join(command)}")
    num_failed = counts["errors"] + counts["failures"]
    return {"tests_passed": counts["tests"] - num_failed - counts["skipped"], "tests_failed": num_failed}


def kill(machine: Machine) -> dict[str, object]:
    # not earlier: an environment without etcd can still measure the rest
    from benchmarks.recovery.jobs import write_live_job
    from benchmarks.recovery.live import LEAVE, repeat, run_job
    from chaos.judge.evidence.recovery_cost import recoveries
    from chaos.scenario.schedule import Due

    due = [Due("kill_worker", 1, None, 8.0) for _ in range(2 if machine.is_quick else 5)]
    with tempfile.TemporaryDirectory() as folder:
        sharing: dict[str, object] = {"device": machine.device, "parallel": {"transport": "gloo"}}
        config = write_live_job(Path(folder) / "job", 2, sharing)
        run = run_job(Path(folder) / "faulted", config, due, ranks=1, leave_after_s=8.0, timeout_s=300.0)
        again = repeat(Path(folder) / "reference", config, run)
    costs = [cost for cost in recoveries(run) if cost.kind != LEAVE]
    assert run.result is not None, "every run leaves one"
    return {
        "killed_worker_s": round(statistics.median(cost.rto_s for cost in costs), 2),
        "kill_steps_lost": max(cost.rpo_steps for cost in costs),
        "kill_hash_equal": run.result["weights_sha256"] == again["weights_sha256"],
    }


def overlapping(machine: Machine) -> dict[str, object]:
    whole = in_process(overlap, machine.size, machine.device, machine.num_steps)
    found: dict[str, object] = {"overlap_wait": round(whole, 3)}
    for shards in MODES[1:]:
        exposed = in_process(shards_overlap, machine.size, machine.device, machine.num_steps // 3, shards)
        found[f"overlap_wait_{shards}"] = round(exposed, 3)
    return found


def packed(machine: Machine) -> dict[str, object]:
    size = SIZES[machine.size]
    ratio = in_process(packed_over_mask, size.shape, size.num_tokens, 32, machine.device, machine.num_steps)
    return {"packed_vs_mask": round(ratio, 3)}


def fast(machine: Machine) -> dict[str, object]:
    times = in_process(step_times, machine.size, machine.device, machine.num_steps, "plain", reduction="fast")
    return {"fast_vs_plain": round(times["over plain"], 3)}


def fp8(machine: Machine) -> dict[str, object]:
    without, found = (
        in_process(alone, machine.size, machine.device, machine.num_steps, compile=True, precision=precision)
        for precision in ("bf16", "fp8")
    )
    return beside("fp8", without, found)


def deterministic(machine: Machine) -> dict[str, object]:
    times = in_process(step_times, machine.size, machine.device, machine.num_steps, "deterministic")
    return {"step_vs_deterministic": round(times["over deterministic"], 3)}


def memory(machine: Machine) -> dict[str, object]:
    without = in_process(alone, machine.size, machine.device, machine.num_steps)
    keys = {"recompute": "units", **({"offload": "optimizer"} if machine.device == "cuda" else {})}
    found: dict[str, object] = {}
    for key, value in keys.items():
        found |= beside(
            key, without, in_process(alone, machine.size, machine.device, machine.num_steps, parallel={key: value})
        )
    return found


PARTS: Mapping[str, Callable[[Machine], dict[str, object]]] = {
    "compiled": compiled,
    "eager": eager,
    "saves": saving,
    "tests": tests,
    "kill": kill,
    "overlap": overlapping,
    "packed": packed,
    "fast": fast,
    "fp8": fp8,
    "deterministic": deterministic,
    "memory": memory,
}
"""In order of importance."""


def measure(
    machine: Machine, names: list[str], within_s: float, console: Console, note: Callable[[dict[str, object]], None]
) -> list[str]:
    """Measure these parts, pass each part's figures to `note` at once, and return the failed parts with the reasons."""
    began, missing = time.monotonic(), []
    for name in names:
        took_s = time.monotonic() - began
        if took_s > within_s:
            missing.append(f"{name}: not begun within {within_s:.0f} s")
            continue
        console.print(f"{took_s:4.0f} s: {name}")
        try:
            found = PARTS[name](machine)
        except Exception as error:  # noqa: BLE001 - the other parts are measured all the same
            traceback.print_exc()
            missing.append(f"{name}: {type(error).__name__}: {error}")
            continue
        for figure, value in found.items():
            goal = f"  (goal {GOALS[figure]})" if figure in GOALS else ""
            console.print(f"        {figure} {value}{goal}")
        note(found)
    console.print(f"{time.monotonic() - began:4.0f} s: done")
    return missing


def beside(key: str, without: Mapping[str, float], found: Mapping[str, float]) -> dict[str, object]:
    """Return step time and peak memory with a key over those without it."""
    step, peak = found["seconds"] / without["seconds"], found["peak"] / without["peak"] if without["peak"] else None
    return {f"{key}_step": round(step, 3), f"{key}_peak_memory": None if peak is None else round(peak, 3)}


ROW = re.compile(r"\| `(\w+)`(?: \*)? \| (.*?) \| .*? \|(?: (\d{4}-\d\d-\d\d) \|)?$", re.MULTILINE)


def section(found: Mapping[str, object], name: str, before: str = "") -> str:
    """Return the documentation's text of the figures; figures `before` of the same device are kept."""
    date = f"{datetime.datetime.now(datetime.UTC).date()}"
    rows: dict[str, tuple[str, str]] = {}
    if f"· {name} ·" in before:
        head_date = re.search(r"\d{4}-\d\d-\d\d", before)
        rows = {row[1]: (row[2], row[3] or (head_date[0] if head_date else "–")) for row in ROW.finditer(before)}
    rows |= {figure: (f"{value}", date) for figure, value in found.items()}
    lines = [f"| `{figure}` | {value} | {GOALS.get(figure, '–')} | {day} |" for figure, (value, day) in rows.items()]
    head = f"`make gpu` · {date} · {name} · torch {torch.__version__}"
    return "\n".join([head, "", "| | measured | goal | on |", "|---|---|---|---|", *lines])


def write(path: Path, found: Mapping[str, object], name: str) -> None:
    """Write a device's figures between the marks of a document."""
    rewrite(path, BEGIN, END, lambda old: section(found, name, old))


def main() -> None:
    """Measure; print a table and a JSON line, and write the documentation's section if asked to."""
    arguments = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--only", default="", metavar="PART,...", help=f"of {', '.join(PARTS)}")
    arguments.add_argument("--within", type=float, default=float("inf"), metavar="S", help="begin no part later")
    arguments.add_argument("--json", action="store_true", help="print the last line only, and progress to stderr")
    arguments.add_argument("--quick", action="store_true", help="fewer steps, saves and faults, for a first look")
    arguments.add_argument("--size", choices=SIZES, help="another model than the largest that fits")
    arguments.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help=argparse.SUPPRESS)
    arguments.add_argument("--write", type=Path, metavar="FILE", help="keep the table between the marks of this file")
    chosen = arguments.parse_args()
    names = [name for name in re.split(r"[ ,]+", chosen.only) if name] or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        arguments.error(f"--only: there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU on this machine: nothing was measured")
    num_bytes = torch.cuda.get_device_properties(0).total_memory if chosen.device == "cuda" else 0
    machine = Machine(chosen.size or size_for(num_bytes), chosen.device, chosen.quick)
    console = Console(stderr=True, highlight=False)
    parameters = SIZES[machine.size].num_parameters
    console.print(f"{machine.name}: a decoder of {parameters / 1e6:.0f} M parameters, {machine.num_steps} steps")
    found: dict[str, object] = {}

    def note(figures: dict[str, object]) -> None:
        found.update(figures)
        if chosen.write is not None:
            write(chosen.write, found, machine.name)

    missing = measure(machine, names, chosen.within, console, note)
    if not chosen.json:
        table = Table("figure", "value", "goal")
        for figure, value in found.items():
            table.add_row(figure, str(value), GOALS.get(figure, ""))
        Console().print(table)
    for line in missing:
        console.print(f"not measured: {line}")
    print(json.dumps({"device": machine.name, "size": machine.size, "parameters": parameters, **found}))
    sys.exit(1 if missing or found.get("tests_failed") else 0)


if __name__ == "__main__":
    main()
