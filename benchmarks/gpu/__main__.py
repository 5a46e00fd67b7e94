"""A language model on one GPU: how fast the trainer is there, and what its promises cost.

    python -m benchmarks.gpu [--json] [--quick] [--write docs/benchmarks.md]

tokens_per_s          tokens a second of a decoder in bf16 (autocast, fp32 weights, AdamW, clipping), four lanes a step
mfu                   model FLOPs utilisation: tokens a second x (6 x parameters + 12 x depth x width x tokens of a row)
                      over the device's peak in dense bf16 (PaLM, appendix B; goal: at least 0.45)
step_vs_plain         a plain loop's time of a step over the trainer's, of the same model, step by step in one process
                      (goal: at least 0.97)
fast_vs_canonical     tokens a second with `reduction: fast`, any algorithm and any order of sums, over those with equal
                      bits
peak_memory_vs_plain  the most memory of the device over the plain loop's
save_stall_ms_per_gb  what a save in the background costs the training beside it, for each GB of state (goal: 50)

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
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.job import SIZES, size_for
from benchmarks.gpu.measure import in_process, peak_of_ours, peak_of_plain, save_stall, step_times

GOALS = {"mfu": "≥ 0.45", "step_vs_plain": "≥ 0.97", "save_stall_ms_per_gb": "≤ 50"}
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12}
"""FLOP a second in dense bf16, as makers state them, by a part of the device's name; the first that fits."""
BEGIN, END = "<!-- gpu -->", "<!-- end of gpu -->"


def peak_flops(name: str) -> float | None:
    """Return a device's peak, None of one that is not known here."""
    return next((peak for part, peak in PEAKS.items() if re.search(rf"\b{part}\b", name)), None)


def measure(size: str, device: str, *, is_quick: bool, console: Console) -> dict[str, object]:
    """Measure everything; print what is being measured."""
    num_steps, num_saves = (8, 2) if is_quick else (30, 5)
    name = torch.cuda.get_device_name() if device == "cuda" else "this machine's CPU"
    found: dict[str, object] = {"device": name, "size": size, "parameters": SIZES[size].num_parameters}
    console.print(f"{name}: a decoder of {SIZES[size].num_parameters / 1e6:.0f} M parameters, {num_steps} steps")
    canonical = in_process(step_times, size, device, num_steps)
    found |= {key: round(value, 3) for key, value in canonical.items()}
    peak = peak_flops(name)
    found["mfu"] = None if peak is None else round(canonical["tokens_per_s"] * SIZES[size].flops_per_token / peak, 3)
    console.print("the same in any order of sums")
    fast = in_process(step_times, size, device, num_steps, "fast")
    found["fast_vs_canonical"] = round(fast["tokens_per_s"] / canonical["tokens_per_s"], 3)
    console.print("memory")
    ours, plain = in_process(peak_of_ours, size, device), in_process(peak_of_plain, size, device)
    found["peak_memory_vs_plain"] = round(ours / plain, 3) if plain else None
    found["peak_memory_gib"] = round(ours / (1 << 30), 2)
    console.print("saves")
    found["save_stall_ms_per_gb"] = round(in_process(save_stall, size, device, num_saves), 1)
    return found


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
