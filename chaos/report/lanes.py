"""Training times of processes: one lane per node, with a span for each process in each term's world.

The node of a process is recorded by the executor (`node` lines) or by a fault that hit it. Processes without a known
node share slots: each gets the first slot that is free at its start.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from chaos.judge.evidence.run_files import whole
from chaos.report.reading import Reader, is_number, is_whole, pids_of, time_of

_ON_ITS_NODE = ("_worker", "_node")


@dataclass(frozen=True, slots=True)
class Span:
    """A process's time in one term's world, in seconds, from its formation to the process's last line."""

    lo: float
    hi: float
    term: int
    rank: int
    pid: int
    cause: str


@dataclass(frozen=True, slots=True)
class Lane:
    """The processes of one node or slot; each of `tracks` has spans that do not overlap."""

    name: str
    node: int | None
    tracks: list[list[Span]] = field(repr=False)

    @property
    def spans(self) -> list[Span]:
        return [span for track in self.tracks for span in track]


def lanes_of(reader: Reader) -> list[Lane]:
    """Return the lanes: nodes by number, then slots."""
    nodes, last = _nodes(reader), _last_seen(reader)
    per_node: dict[int, list[Span]] = defaultdict(list)
    elsewhere: list[Span] = []
    for line in reader.of("form", "term", "rank", "pid"):
        pid, term, rank, lo = whole(line, "pid"), whole(line, "term"), whole(line, "rank"), reader.at(line)
        hi = max(lo, last.get((term, rank, pid), reader.began) - reader.began)
        spans = per_node[nodes[pid]] if pid in nodes else elsewhere
        spans.append(Span(lo, hi, term, rank, pid, str(line.get("cause"))))
    placed = [Lane(f"node {node}", node, _pack(spans)) for node, spans in sorted(per_node.items())]
    return [*placed, *(Lane(f"slot {place}", None, [track]) for place, track in enumerate(_pack(elsewhere)))]


def _pack(spans: list[Span]) -> list[list[Span]]:
    """Assign each process to the first track that is free at its start, so that successive processes share one."""
    per_pid: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        per_pid[span.pid].append(span)
    tracks: list[list[Span]] = []
    for own in sorted(per_pid.values(), key=lambda own: (own[0].lo, own[0].rank)):
        free = next((track for track in tracks if track[-1].hi <= own[0].lo), None)
        if free is None:
            tracks.append(list(own))
        else:
            free.extend(own)
    return tracks


def _nodes(reader: Reader) -> dict[int, int]:
    hits = [line for line in reader.of("fault") if str(line.get("kind")).endswith(_ON_ITS_NODE)]
    placed = [*(line for line in hits if is_whole(line.get("node"))), *reader.of("node", "node")]
    return {pid: whole(line, "node") for line in placed for pid in pids_of(line)}


def _last_seen(reader: Reader) -> dict[tuple[int, int, int], float]:
    """Return the last time of each (term, rank, process id); lines after a `form` line belong to its process."""
    seen: dict[tuple[int, int, int], float] = {}
    for process in reader.run.processes:
        pid = -1
        for line in process:
            if line["op"] == "form" and is_whole(line.get("pid")):
                pid = whole(line, "pid")
            if is_number(line.get("t")) and is_whole(line.get("term")) and is_whole(line.get("rank")):
                key = (whole(line, "term"), whole(line, "rank"), pid)
                seen[key] = max(time_of(line), seen.get(key, 0.0))
    return seen
