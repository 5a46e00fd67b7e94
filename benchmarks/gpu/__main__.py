"""A language model on one GPU: how fast the trainer is there, and what its promises cost.

    python -m benchmarks.gpu [--json] [--quick] [--write docs/benchmarks.md]

A decoder trains in bf16 (autocast, fp32 weights, AdamW, clipping), four lanes of one row a step, beside a plain loop of
the same model, step by step in one process. Figures that end in `_compiled` are those with `compile: true`, and the
plain loop's blocks compiled, too.

tokens_per_s            tokens a second
mfu                     model FLOPs utilisation: tokens a second x (6 x parameters + 12 x depth x width x tokens of a
                        row) over the device's peak in dense bf16 (PaLM, appendix B; goal: at least 0.45)
step_vs_plain           a plain loop's time of a step over the trainer's; the loop asks for nothing, and gets kernels
                        that give other bits each time (goal: at least 0.97)
step_vs_deterministic   the same, the loop in torch's deterministic mode: what the trainer costs beside the kernels
fast_vs_plain           as step_vs_plain, with `reduction: fast`: any algorithm and any order of sums
recompute_step          the time of a step with `parallel.recompute: units` over that without, and the most memory;
                        `offload_…`: the same with `parallel.offload: optimizer`
peak_memory_vs_plain    the most memory of the device over the plain loop's
save_stall_ms_per_gb    what a save in the background costs the training beside it until it has ended, for each GB of
                        state: the median of several, and the first (goal: 50)

The model is the largest of 1 B, 0.3 B and 0.1 B parameters for which the device has memory, on rows of 4,096 tokens
(2,048 for the last). The last line is JSON. --device cpu --size tiny tries the program out where there is no GPU; its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.job import NUM_LANES, SIZES, size_for
from benchmarks.gpu.measure import alone, in_process, plain_peak, saves, step_times

GOALS = {"mfu": "≥ 0.45", "mfu_compiled": "≥ 0.45", "save_stall_ms_per_gb": "≤ 50"}
GOALS |= {"step_vs_plain": "≥ 0.97", "step_vs_plain_compiled": "≥ 0.97"}
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12}
"""FLOP a second in dense bf16, as makers state them, by a part of the device's name; the first that fits."""
BEGIN, END = "<!-- gpu -->", "<!-- end of gpu -->"


def peak_flops(name: str) -> float | None:
    """Return a device's peak, None of one that is not known here."""
    return next((peak for part, peak in PEAKS.items() if re.search(rf"\b{part}\b", name)), None)


def measure(size: str, device: str, *, is_quick: bool, console: Console) -> dict[str, object]:
    """Measure everything; print what is being measured."""
    num_steps, num_saves = (8, 2) if is_quick else (24, 3)
    name = torch.cuda.get_device_name() if device == "cuda" else "this machine's CPU"
    parameters, flops = SIZES[size].num_parameters, SIZES[size].flops_per_token
    found: dict[str, object] = {"device": name, "size": size, "parameters": parameters}
    peak, began = peak_flops(name), time.monotonic()

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - began:4.0f} s: {what}")

    say(f"{name}: a decoder of {parameters / 1e6:.0f} M parameters, {num_steps} steps beside a plain loop")
    for end, is_compiled in (("", False), ("_compiled", True)):
        if is_compiled:
            say("the same, compiled")
        times = in_process(step_times, size, device, num_steps, "plain", compile=is_compiled)
        tokens_per_s = NUM_LANES * SIZES[size].num_tokens / times["ours"]
        found[f"tokens_per_s{end}"] = round(tokens_per_s)
        found[f"mfu{end}"] = None if peak is None else round(tokens_per_s * flops / peak, 3)
        found[f"step_vs_plain{end}"] = round(times["over plain"], 3)
    say("beside a loop in deterministic mode")
    times = in_process(step_times, size, device, num_steps, "deterministic")
    found["step_vs_deterministic"] = round(times["over deterministic"], 3)
    say("in any order of sums")
    times = in_process(step_times, size, device, num_steps, "plain", reduction="fast")
    found["fast_vs_plain"] = round(times["over plain"], 3)
    say("with state in host memory, and with blocks computed again in the backward pass")
    without = in_process(alone, size, device, num_steps)
    keys = {"recompute": "units", **({"offload": "optimizer"} if device == "cuda" else {})}
    for key, value in keys.items():
        found |= beside(key, without, in_process(alone, size, device, num_steps, parallel={key: value}))
    say("memory and saves")
    ours, plain = in_process(saves, size, device, num_saves), in_process(plain_peak, size, device)
    found["peak_memory_vs_plain"] = round(ours["peak"] / plain, 3) if plain else None
    found["peak_memory_gib"] = round(ours["peak"] / (1 << 30), 2)
    found["save_stall_ms_per_gb"] = round(ours["median"], 1)
    found["first_save_stall_ms_per_gb"] = round(ours["first"], 1)
    found["steps_beside_a_save"] = ours["steps beside"]
    say("done")
    return found


def beside(key: str, without: Mapping[str, float], found: Mapping[str, float]) -> dict[str, object]:
    """Return the time of a step and the most memory with a key over those without."""
    step, peak = found["seconds"] / without["seconds"], found["peak"] / without["peak"] if without["peak"] else None
    return {f"{key}_step": round(step, 3), f"{key}_peak_memory": None if peak is None else round(peak, 3)}


def section(found: dict[str, object]) -> str:
    """Return the figures as the documentation has them."""
    date = datetime.datetime.now(datetime.UTC).date()
    rows = [f"| `{name}` | {value} | {GOALS.get(name, '–')} |" for name, value in found.items() if name != "device"]
    head = f"`make gpu` · {date} · {found['device']} · torch {torch.__version__}"
    return "\n".join([BEGIN, head, "", "| | measured | goal |", "|---|---|---|", *rows, END])


def write(path: Path, found: dict[str, object]) -> None:
    """Put the figures where a document has its marks."""
    text = path.read_text()
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (mark and end):
        raise SystemExit(f"{path}: has no {BEGIN} … {END} to write the figures to")
    path.write_text(before + section(found) + after)


def main() -> None:
    """Measure, print a table and a JSON line, and write the documentation's section if asked to."""
    arguments = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--json", action="store_true", help="print the last line only, and progress to stderr")
    arguments.add_argument("--quick", action="store_true", help="fewer steps and saves, for a look")
    arguments.add_argument("--size", choices=SIZES, help="another model than the largest that fits")
    arguments.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help=argparse.SUPPRESS)
    arguments.add_argument("--write", type=Path, metavar="FILE", help="put the table between the marks of this file")
    chosen = arguments.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU on this machine: nothing was measured")
    memory = torch.cuda.get_device_properties(0).total_memory if chosen.device == "cuda" else 0
    console = Console(stderr=True, highlight=False)
    found = measure(chosen.size or size_for(memory), chosen.device, is_quick=chosen.quick, console=console)
    if chosen.write is not None:
        write(chosen.write, found)
    if not chosen.json:
        table = Table("figure", "value", "goal")
        for name, value in found.items():
            table.add_row(name, str(value), GOALS.get(name, ""))
        Console().print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
