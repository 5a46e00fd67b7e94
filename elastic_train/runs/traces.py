"""Merge ranks' traces on one clock, and summarize the traffic between ranks: bytes, calls, bandwidth.

Each rank's trace uses its own machine's clock. All ranks leave the gather of a step's rows within a message's latency
of each other, unless they wait for a core. The earliest rank of each machine therefore marks that moment, and the
median difference between these moments is the offset between two machines' clocks.
"""

from __future__ import annotations

import gzip
import json
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_train.errors import ConfigError
from elastic_train.insight.tracing import FACTS, FOLDER
from elastic_train.system.files import draft_of
from elastic_train.system.wording import first_line, size
from elastic_train.tracking.run_folder import existing_folder

MERGED = "merged.trace.json.gz"
_PIDS = 100_000
"""Distance between the process numbers of consecutive ranks, which keeps them distinct."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Operations of one kind and size class up to `up_to` bytes; `seconds` is the sum of their durations.

    A duration includes waiting for late peers; it is unknown for operations on a device.
    """

    kind: str
    up_to: int
    calls: int
    num_bytes: int
    seconds: float | None

    @property
    def bytes_per_s(self) -> float | None:
        return self.num_bytes / self.seconds if self.seconds else None


@dataclass(frozen=True, slots=True)
class Merged:
    """The merged trace of a step: the file with all ranks, and the findings of the merge."""

    step: int
    term: int
    path: Path
    ranks: Sequence[int]
    offsets_ms: Mapping[str, float]
    """Milliseconds by which each host's clock is ahead of the first rank's host."""
    spread_ms: float
    """Largest remaining difference between machines at the end of a gather, in milliseconds."""
    traffic: Sequence[Traffic]
    num_left_out: int

    def as_json(self) -> dict[str, object]:
        traffic = [{**asdict(one), "bytes_per_s": one.bytes_per_s} for one in self.traffic]
        return {**asdict(self), "path": str(self.path), "traffic": traffic}


def merge_all(run: str | Path) -> list[Merged]:
    """Merge a run's traces step by step; raises ConfigError if it has none or one cannot be read."""
    folder = existing_folder(run) / FOLDER
    found: dict[tuple[Path, int], list[Path]] = {}
    for path in sorted(folder.glob("step-*/[0-9]*-[0-9]*.trace.json.gz")):
        found.setdefault((path.parent, int(path.name.partition("-")[0])), []).append(path)
    if not found:
        raise ConfigError(
            f"{run} has no traces in {FOLDER}/: set profile.at_steps, such as --profile.at-steps '[10]', and train"
        )
    newest = dict(sorted(found))  # the latest term of each step
    return [_merge(step, term, found[step, term]) for step, term in newest.items()]


def _merge(folder: Path, term: int, paths: Sequence[Path]) -> Merged:
    trees = {_rank(path): _read(path) for path in paths}
    facts = {rank: tree[FACTS] for rank, tree in trees.items()}
    first = min(trees)
    offsets, spread_ns = clock_offsets([(facts[rank]["host"], facts[rank]["gathered_ns"]) for rank in sorted(facts)])
    events: list[dict[str, object]] = []
    for rank, tree in trees.items():
        shift_us = (
            tree["baseTimeNanoseconds"] - trees[first]["baseTimeNanoseconds"] - offsets[facts[rank]["host"]]
        ) / 1000
        events += _moved(tree["traceEvents"], rank, facts[rank]["host"], shift_us)
    whole = {**{key: value for key, value in trees[first].items() if key != FACTS}, "traceEvents": events}
    path = folder / MERGED
    draft = draft_of(path)
    try:
        with gzip.open(draft, "wt", compresslevel=3) as file:
            json.dump(whole, file)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {first_line(error)}; make room, or copy the run") from error
    return Merged(
        step=int(facts[first]["first_step"]),
        term=term,
        path=path,
        ranks=sorted(trees),
        offsets_ms={host: offset / 1e6 for host, offset in offsets.items()},
        spread_ms=spread_ns / 1e6,
        traffic=_traffic([operation for fact in facts.values() for operation in fact["operations"]]),
        num_left_out=sum(fact["operations_left_out"] for fact in facts.values()),
    )


def clock_offsets(ranks: Sequence[tuple[str, Mapping[str, int]]]) -> tuple[dict[str, float], float]:
    """Return the nanoseconds by which each host's clock is ahead of the first's, and the largest residual.

    `ranks` has, for each rank, its host and the times at which it had gathered each step's rows.
    """
    earliest: dict[str, dict[str, int]] = {}
    for host, moments in ranks:
        of_host = earliest.setdefault(host, {})
        for step, at in moments.items():
            of_host[step] = min(at, of_host.get(step, at))
    first = earliest[ranks[0][0]]
    offsets, left = dict[str, float](), [0.0]
    for host, steps in earliest.items():
        differences = [at - first[step] for step, at in steps.items() if step in first]
        offsets[host] = statistics.median(differences) if differences else 0.0
        left += [abs(difference - offsets[host]) for difference in differences]
    return offsets, max(left)


def _moved(events: Sequence[dict[str, Any]], rank: int, host: str, shift_us: float) -> list[dict[str, object]]:
    """Return a rank's events on the first rank's clock, with process names and numbers of its own."""
    numbers: dict[object, int] = {}
    moved: list[dict[str, object]] = []
    for event in events:
        pid = numbers.setdefault(event.get("pid"), rank * _PIDS + len(numbers) + 1)
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_labels", "process_sort_index"):
            continue
        times = {"ts": event["ts"] + shift_us} if "ts" in event else {}
        ids = {"id": f"{rank}-{event['id']}"} if "id" in event else {}
        moved.append({**event, **times, **ids, "pid": pid})
    for number, (pid_before, pid) in enumerate(numbers.items()):
        shown = f"rank {rank} on {host}" + ("" if number == 0 else f", {pid_before}")
        moved.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": shown}})
        moved.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
    return moved


def _traffic(operations: Sequence[Sequence[Any]]) -> list[Traffic]:
    """Sum operations by kind and size class; classes are powers of ten."""
    together: dict[tuple[str, int], list[tuple[int, float | None]]] = {}
    for kind, num_bytes, seconds in operations:
        together.setdefault((kind, 10 ** len(str(max(0, num_bytes - 1)))), []).append((num_bytes, seconds))
    return [
        Traffic(
            kind,
            up_to,
            len(ones),
            sum(num_bytes for num_bytes, _ in ones),
            None if any(s is None for _, s in ones) else sum(s for _, s in ones if s is not None),
        )
        for (kind, up_to), ones in sorted(together.items())
    ]


def _rank(path: Path) -> int:
    return int(path.name.partition(".")[0].partition("-")[2])


def _read(path: Path) -> dict[str, Any]:
    try:
        with gzip.open(path, "rt") as file:
            tree = json.load(file)
        if not {FACTS, "traceEvents", "baseTimeNanoseconds"} <= set(tree):
            raise ValueError("it is not one of a run's traces")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}; delete it to merge the others") from error
    found: dict[str, Any] = tree
    return found


def rows_of(traffic: Sequence[Traffic]) -> list[tuple[str, ...]]:
    return [
        (
            one.kind,
            f"up to {size(one.up_to)}",
            str(one.calls),
            size(one.num_bytes),
            "-" if one.seconds is None else f"{1e3 * one.seconds:.1f} ms",
            "-" if one.bytes_per_s is None else f"{size(one.bytes_per_s)}/s",
        )
        for one in traffic
    ]
