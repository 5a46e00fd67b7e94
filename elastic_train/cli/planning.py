"""`elastic-train plan`: what a run will need, on which devices, and which layouts are the best for it."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from elastic_train.cli.output import Flag, Json, cell, console, narrow_table, print_json, print_text
from elastic_train.config import sources
from elastic_train.errors import ConfigError
from elastic_train.system.files import write_atomically
from elastic_train.system.wording import counted, duration, rate, size

if TYPE_CHECKING:
    from elastic_train.planning.report import Report
    from elastic_train.planning.search import Outcome, ScalingRow

app = App(name="plan", help="Predict memory, time, cost and the price of faults.")

MOST_NAMED = 3
"""Of layouts that one reason is against; --json has all."""
Overrides = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]


@app.default
def plan(
    config: Path,
    *overrides: Overrides,
    on: str = "CPU",
    by: str = "throughput",
    price: float = 0.0,
    mtbf_h: float = 6300.0,
    recovery: Literal["live", "restart"] = "live",
    spares: int = 0,
    cells: Flag = False,
    json_: Json = False,
) -> int:
    """Work out what CONFIG needs, from its real model and its data, and which layouts serve it best.

    The model is built without memory for its weights, so any size can be planned anywhere. Any key of CONFIG can
    follow, such as --parallel.shards gradients.

    Parameters
    ----------
    on
        The devices: A100, H100, H200, B200, L4 or CPU (one core), as 8xH100, or NODESxDEVICESxDEVICE@LINK such as
        4x8xH100@IB-NDR; or a YAML file, as `elastic-train plan calibrate` writes it.
    by
        What the best layouts are chosen by: throughput, mfu, step, memory, communication, goodput, days or cost.
    price
        Of a device for an hour, in any currency.
    mtbf_h
        Hours between faults of one node.
    recovery
        live (survivors go on) or restart.
    spares
        Nodes that wait to take a lost one's place; they cost what others do.
    cells
        Compare cells, too: ranks that tensor, pipeline and expert parallelism make one replica.
    """
    from elastic_train.planning.arithmetic.catalogue import parse_cluster
    from elastic_train.planning.arithmetic.goodput import Reliability
    from elastic_train.planning.report import make_report
    from elastic_train.planning.search import Job, wrong_figure

    cluster = parse_cluster(on)
    given = {"spares": spares, "price": price}
    wrong = [f"--{name} must be at least 0, not {value}" for name, value in given.items() if not 0 <= value < math.inf]
    wrong += [] if 0 < mtbf_h < math.inf else [f"--mtbf-h must be more than 0, and a number of hours, not {mtbf_h}"]
    if wrong := [*wrong, *wrong_figure(by)]:
        raise ConfigError(*wrong)
    resolved = sources.load(config, environ=os.environ, arguments=overrides)
    from elastic_train.planning.reading import read_config  # torch: once all that needs no model is known to be right

    read = read_config(resolved)
    reliability = Reliability(mtbf_h=mtbf_h, recovery=recovery, spares=spares)
    threads = resolved.threads_per_rank
    job = Job(read.facts, read.batch, cluster, read.num_steps, price, threads, reliability)
    report = make_report(job, read.layout, by, with_cells=cells or read.layout.cell > 1)
    if json_:
        return print_json({**report.as_json(), "trainer_refuses": list(read.refused)})
    show(report)
    for reason in read.refused:
        print_text(f"The trainer refuses this: {reason}")
    return 0


@app.command
def calibrate(
    config: Path | None = None, *overrides: Overrides, out: Path | None = None, rounds: int = 5, json_: Json = False
) -> int:
    """Measure the speed of this machine and its network.

    FLOP/s, memory bandwidth, and alpha and beta of the links are measured. With CONFIG the passes of its own model are
    timed, too. Under torchrun ranks 0 and 1 measure what is between them; alone, this starts two processes. The machine
    should have nothing else to do.

    Parameters
    ----------
    out
        Write a file for `elastic-train plan --on` here.
    rounds
        How often each is measured.
    """
    if rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, not {rounds}")
    from elastic_train.planning import calibrating
    from elastic_train.planning.reading import read_config

    found = calibrating.calibrate(rounds)
    if config is not None:
        read = read_config(sources.load(config, environ=os.environ, arguments=overrides))
        found = replace(found, device=calibrating.measure_pace(read, found.device, rounds))
    if os.environ.get("RANK", "0") != "0":
        return 0
    if out is not None:
        write_atomically(out, found.as_yaml())
    device, link = found.device, found.link
    if json_:
        return print_json(
            {
                "device": device.name,
                "tflops_fp32": device.tflops_fp32,
                "tflops_bf16": device.tflops_bf16,
                "tflops_fp8": device.tflops_fp8,
                "memory_gb_per_s": device.memory_gb_per_s,
                "call_s": device.call_s,
                "pace": device.pace,
                "alpha_s": link.alpha_s,
                "gb_per_s": link.gb_per_s,
            }
        )
    return print_text(
        f"{device.name}: {device.tflops_fp32:.4g} TFLOP/s in fp32, {device.tflops_bf16:.4g} in bf16, memory "
        f"{device.memory_gb_per_s:.3g} GB/s, {device.call_s * 1e6:.1f} µs a call, pace {device.pace:.2f}\n"
        f"network: alpha {link.alpha_s * 1e6:.0f} µs, beta {link.gb_per_s:.3g} GB/s each way"
        + (f"\nwritten to {out}; plan with --on {out}" if out is not None else "")
    )


def show(report: Report) -> None:
    terminal = console()
    for line in report.lines():
        terminal.print(line)
    own = report.own
    if own.memory is not None:
        table = narrow_table("memory of a device", "bytes")
        for name, num_bytes in (*own.memory.parts.items(), ("total", own.memory.total)):
            table.add_row(name, size(num_bytes))
        if own.memory.host_bytes:
            table.add_row("(in its machine's memory)", size(own.memory.host_bytes))
        terminal.print(table)
    for title, rows in (("the run's global batch", report.strong), ("as many lanes a device", report.weak)):
        terminal.print(_scaling(title, rows, report.job.model.amount))
    if report.best:
        terminal.print(f"The best by {report.by}:")
        for number, one in enumerate(report.best, 1):
            terminal.print(f"  {number}  {one.layout.name}", soft_wrap=True)  # whole, to be copied
        terminal.print(_outcomes(report.best, report.job.model.amount))
    else:
        terminal.print("No layout can be used on these devices.")
    if report.refused:
        terminal.print("Out of the question are:")
        for why, names in report.refused_by_reason().items():
            terminal.print(f"  {counted(len(names), 'layout')}: {why} ({_some(names)})", soft_wrap=True)


def _some(names: list[str]) -> str:
    return "; ".join(names[:MOST_NAMED]) + ("; ..." if len(names) > MOST_NAMED else "")


def _scaling(title: str, rows: list[ScalingRow], amount: str) -> object:
    table = narrow_table("devices", "step", f"{amount}/s", "speed-up", "efficiency", "waits", "MFU", "fits")
    table.title = f"Scaling with {title}"
    for row in rows:
        step = row.outcome.step
        assert step is not None, "a row of scaling was worked out"
        values = (duration(step.total_s), rate(row.outcome.per_s), f"{row.speedup:.2f}", f"{row.efficiency:.1%}")
        shares = (f"{step.communication_share:.1%}", f"{row.outcome.mfu:.1%}")
        if row.outcome.problems:
            table.add_row(str(row.devices), *("-" for _ in (*values, *shares)), "no")
        else:
            table.add_row(str(row.devices), *values, *shares, "yes")
    return table


def _outcomes(outcomes: list[Outcome], amount: str) -> object:
    names = ("", "memory", "step", f"{amount}/s", "MFU", "waits", "goodput", "run", "cost", "runs today")
    table = narrow_table(*names)
    for number, one in enumerate(outcomes, 1):
        assert one.memory and one.step and one.goodput, "what fits was worked out"
        values = (size(one.memory.total), duration(one.step.total_s), rate(one.per_s), f"{one.mfu:.1%}")
        shares = (f"{one.step.communication_share:.1%}", f"{one.goodput.share:.2%}")
        runs = "yes" if one.layout.runs_today else "no"
        table.add_row(str(number), *values, *shares, duration(86400 * one.days), cell(one.cost or None), runs)
    return table
