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
tests           tests_passed, tests_failed    of tests/gpu: jobs, faults and NCCL on this device
faults          killed_worker_s    from the end of one of two ranks that share the device over NCCL to the next applied
                                   step; `stopped_worker_s`, `worker_out_of_memory_s`: the same of these faults, which
                                   come in turn, twenty of each, in one job; `…_times`: how many cost a world
                faults_steps_lost  the most applied steps that a fault lost; `faults_missed`, that had no effect;
                                   `faults_survivor_kept_its_process`; `faults_hash_equal`: whether the weights are
                                   those without a fault
worlds          worlds_memory_mib  by how much the device's memory in use has grown from the first world of two ranks
                                   to the last of `worlds`, each of which ends in the middle of an operation
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
(2,048 for the last); two ranks have half of it each. All ends within --within seconds: a part may take twice its usual
share of the time left. Near its limit it ends with the steps, faults or tests that it has, and at the limit it is
killed; such a part is named, and so is one that fails; the exit code is then 1. The last line is JSON. --device cpu
--size tiny tries the program out where there is no GPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.figures import rewrite
from benchmarks.gpu.job import SIZES, size_for
from benchmarks.gpu.parts import GOALS, PARTS, Machine, measure

BEGIN, END = "<!-- gpu -->", "<!-- end of gpu -->"
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
    arguments.add_argument("--within", type=float, default=3600.0, metavar="S", help="end by then")
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
    size, half = (chosen.size or size_for(share) for share in (num_bytes, num_bytes // 2))
    machine = Machine(size, half, chosen.device, chosen.quick)
    console = Console(stderr=True, highlight=False)
    parameters = SIZES[machine.size].num_parameters
    console.print(f"{machine.name}: a decoder of {parameters / 1e6:.0f} M parameters, {machine.num_steps} steps")
    found: dict[str, object] = {}

    def note(figures: Mapping[str, object]) -> None:
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
