"""`elastic-train top`: a run as it goes on, drawn again and again from its files; over ssh, too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elastic_train.cli.output import Flag, Json, console, narrow_table, print_json
from elastic_train.cli.places import job
from elastic_train.errors import ConfigError
from elastic_train.runs.glance import Glance, look
from elastic_train.system.wording import duration, size

MOST_RANKS = 16
_SHOWN = ("data", "forward", "backward", "wait", "exchange", "optimizer", "save")
LEAST_EVERY_S, MOST_EVERY_S = 0.2, 86_400.0
QUIET_S = 60.0
"""Seconds without a line after which a run may have been killed."""


def top(
    run: str | None = None, *, etcd: str | None = None, once: Flag = False, every: float = 2.0, json_: Json = False
) -> int:
    """Show RUN while it trains: progress, nodes, phases, events.

    Ctrl-C ends the display. It reads the run's files, so any machine that has them will do. --every: seconds between
    two looks. --once: print one frame, also where the output is not a terminal. --json: one look, for scripts. --etcd
    HOST:PORT[,...] needs no files: RUN is a run id, and the nodes, ranks and newest commit of that job are shown;
    without RUN, all jobs.
    """
    if not LEAST_EVERY_S <= every <= MOST_EVERY_S:
        raise ConfigError(f"--every must be from {LEAST_EVERY_S} to {MOST_EVERY_S:.0f} s, not {every:g}")
    if run is None:
        return job.list_jobs(etcd, is_json=json_)
    if etcd is not None:
        if json_:
            return job.show(run, etcd=etcd, is_json=True)
        return job.watch(run, etcd, is_once=once, every_s=every)
    glance = look(run)
    if json_:
        return print_json(glance.as_json())
    terminal = console()
    if once or not terminal.is_terminal:
        terminal.print(frame(glance, time.time()))
        return 0
    with Live(frame(glance, time.time()), console=terminal, auto_refresh=False) as live:
        try:
            while glance.status != "done":
                time.sleep(every)
                glance = look(run)
                live.update(frame(glance, time.time()), refresh=True)
        except KeyboardInterrupt:
            return 0
    return 0


def frame(glance: Glance, now: float) -> RenderableType:
    """Return what is shown of a moment."""
    state = glance.status or ("no world yet" if glance.term is None else _activity(glance, now))
    parts: list[RenderableType] = [Text(f"{glance.run}: {state}"), _head(glance, now)]
    if glance.waiting is not None:
        parts.append(Text(f"no world forms: {glance.waiting}", style="bold red"))
    if glance.phases is not None:
        parts += [_nodes(glance), _ranks(glance)]
    elif glance.term is not None:
        hosts = ", ".join(dict.fromkeys(glance.hosts.values()))
        parts.append(Text(f"nodes: {hosts or 'not known'}; the phases of steps are not written yet"))
    if glance.recent:
        parts.append(Text("\n".join(f"{_clock(at)} {what}" for at, what in glance.recent), overflow="fold"))
    return Group(*parts)


def _activity(glance: Glance, now: float) -> str:
    quiet_s = 0.0 if glance.last_at is None else now - glance.last_at
    if quiet_s < QUIET_S:
        return "training"
    return f"killed, or in a long step: its last line is from {_ago(quiet_s)} (elastic-train status says which)"


def _head(glance: Glance, now: float) -> Table:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    commit = "-" if glance.commit is None else f"{glance.commit.step}, {_ago(now - glance.commit.at)}"
    facts = {
        "step": shown(glance.step, "d"),
        "loss": shown(glance.loss, ".4f"),
        "samples/s": shown(glance.samples_per_s, ".4g"),
        **({} if glance.mfu is None else {"MFU": f"{glance.mfu:.1%}"}),
        "ranks": f"{glance.size}, term {shown(glance.term, 'd')}",
        "commit": commit,
        "last line": "-" if glance.last_at is None else _ago(now - glance.last_at),
    }
    table = narrow_table(*facts)
    table.add_row(*facts.values())
    return table


def _nodes(glance: Glance) -> Table:
    """Return a row for each node: its ranks, how long they compute, and the slowest of them."""
    ranks = _ranks_of(glance)
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(glance.hosts.get(rank, "not known"), []).append(rank)
    table = narrow_table("node", "ranks", "computes", "waits", "slowest")
    for host, members in by_host.items():
        compute = {rank: _compute(glance, rank) for rank in members}
        waits = statistics.fmean(glance.phase_ms(rank)["wait"] for rank in members)
        slowest = max(compute, key=compute.__getitem__)
        mean = statistics.fmean(compute.values())
        table.add_row(Text(host), _numbers(members), f"{mean:.1f} ms", f"{waits:.1f} ms", f"rank {slowest}")
    return table


def _ranks(glance: Glance) -> Table:
    """Return the ranks' milliseconds of a step by phase; of many those that compute longest."""
    ranks = _ranks_of(glance)
    compute = {rank: _compute(glance, rank) for rank in ranks}
    median = statistics.median(compute.values())
    chosen = sorted(sorted(ranks, key=lambda rank: -compute[rank])[:MOST_RANKS])
    table = narrow_table("rank", *_SHOWN, "to the median", *(["memory"] if glance.memory else []))
    table.caption = "milliseconds of a step"
    if len(chosen) < len(ranks):
        table.caption += f" of the {MOST_RANKS} slowest of {len(ranks)}"
    for rank in chosen:
        by_phase, ratio = glance.phase_ms(rank), compute[rank] / median if median > 0 else 1.0
        style = "bold red" if ratio >= 1.3 else ""
        cells = (f"{by_phase[phase]:.1f}" for phase in _SHOWN)
        memory = [size(glance.memory[rank]) if rank in glance.memory else "-"] if glance.memory else []
        table.add_row(str(rank), *cells, f"{ratio:.2f}x", *memory, style=style)
    return table


def _ranks_of(glance: Glance) -> range:
    return range(len(glance.phases.rows)) if glance.phases is not None else range(0)


def _compute(glance: Glance, rank: int) -> float:
    by_phase = glance.phase_ms(rank)
    return by_phase["forward"] + by_phase["backward"]


def _numbers(ranks: Sequence[int]) -> str:
    is_run = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}–{ranks[-1]}" if is_run else ", ".join(map(str, ranks))


def _ago(seconds: float) -> str:
    return f"{duration(max(0.0, seconds))} ago"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
