"""Read what a run's processes left in its folder: worlds, steps, and the ends that they or their agents recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from elastic_train.runs.lines import Line, at, number, read_lines, text, whole
from elastic_train.system.process_identity import process_identity
from elastic_train.tracking.history_files import FOLDER, last_step_lines, lines_of, tail_of, term_of

TERMS_BEFORE = 3
"""Number of terms before the last step in which to look up processes that may have recorded an end near its time."""
_PACE_STEPS = 20
_LEFT, _PARTED = ("preempted", "left"), ("end", "leave")
End = tuple[Path, Line]
"""The line that records a process's end, and its file."""


@dataclass(frozen=True, slots=True)
class Traces:
    """The histories of a run's folder, by term, with the line of the last step that any rank applied."""

    run: Path
    worlds: Sequence[Sequence[Path]]
    applied: Line | None

    @property
    def step(self) -> int | None:
        """The last step applied; None before the first one."""
        return None if self.applied is None else whole(self.applied, "step")

    @property
    def term(self) -> int:
        return 0 if self.applied is None else whole(self.applied, "term") or 0

    @property
    def since(self) -> float:
        """When the last step was applied (unix seconds)."""
        return 0.0 if self.applied is None else at(self.applied)

    @property
    def newest(self) -> Sequence[Path]:
        return self.worlds[-1] if self.worlds else ()

    def members(self) -> list[Line]:
        """Return the first lines of the newest world's processes."""
        return [line for path in self.newest if (line := _form_of(path))]

    def silent(self, ends: Sequence[End]) -> list[Line]:
        """Return the first lines of the newest world's processes without a recorded end."""
        ended = {who(line) for _, line in ends}
        going = [path for path in self.newest if _last_line(path).get("op") != "end"]
        return [line for path in going if (line := _form_of(path)) and who(line) not in ended]

    def failures(self) -> list[End]:
        """Return all recorded ends, with the term and the rank of the process's last world if known.

        A process that records its own end does not know its rank: a live process has another rank in each world.
        """
        worlds = self._last_worlds()
        return [
            (path, line if "of_term" in line else {**line, **worlds.get(who(line), {})})
            for path, line in self.noted("failed")
        ]

    def _last_worlds(self) -> dict[tuple[object, ...], Line]:
        """Return each process's last term and its rank there, from TERMS_BEFORE terms before the last step's on."""
        before = [parts for parts in self.worlds if term_of(parts[0]) < self.term][-TERMS_BEFORE:]
        later = [parts for parts in self.worlds if term_of(parts[0]) >= self.term]
        forms = [line for parts in (*before, *later) for path in parts if (line := _form_of(path))]
        return {who(line): {"of_term": line.get("term"), "of_rank": line.get("rank")} for line in forms}

    def lost_hosts(self, ended: Collection[tuple[object, ...]]) -> list[End]:
        """Return the last line of each machine that left the world without a word, with its first line's fields.

        It has a process in one of the last worlds, which is not in the newest and not among the `ended` ones.
        """
        present = {line.get("host") for line in self.members()}
        lost: dict[object, End] = {}
        for path in (path for parts in self.worlds[-TERMS_BEFORE - 1 : -1] for path in parts):
            form, last = _form_of(path), _last_line(path)
            if form and form.get("host") not in present and last.get("op") not in _PARTED and who(form) not in ended:
                lost[form.get("host")] = (path, {**form, "t": last["t"]})
        return list(lost.values())

    def left(self) -> End | None:
        """Return the last line of a process of the newest world that left on request; None if there is none."""
        lasts = [(path, line) for path in self.newest if text(line := _last_line(path), "status") in _LEFT]
        return max(lasts, key=lambda end: at(end[1]), default=None)

    def noted(self, what: str) -> Iterator[End]:
        """Yield the notes of processes outside any world, with their files."""
        for path in sorted((self.run / FOLDER).glob(f"{what}-*.jsonl")):
            for line in read_lines(path):
                yield path, line

    def last_note(self, what: str) -> End | None:
        """Return the newest note of processes outside any world."""
        return max(self.noted(what), key=lambda end: at(end[1]), default=None)

    def last_sign(self) -> float:
        """Return when the newest world's processes last wrote a line (unix seconds): a step, a save, a validation."""
        return max((at(line) for path in self.newest if (line := _last_line(path))), default=0.0)

    def pace_s(self) -> float:
        """Return the longest time between two of the last steps."""
        times = [at(line) for path in self.newest[:1] for line in last_step_lines(path)[-_PACE_STEPS:]]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def read_traces(run: Path) -> Traces:
    files: dict[int, list[Path]] = {}
    for path in sorted((run / FOLDER).glob("[0-9]*-*-*.jsonl")):
        files.setdefault(term_of(path), []).append(path)
    worlds = [files[term] for term in sorted(files)]
    return Traces(run, worlds, _last_step(worlds))


def _last_step(worlds: Sequence[Sequence[Path]]) -> Line | None:
    """Return the line of the last step that any rank of the newest worlds applied."""
    for parts in reversed(worlds):
        lines = [line for path in parts for line in last_step_lines(path)]
        if lines:
            return max(lines, key=lambda line: float(str(line["t"])))
    return None


def _form_of(path: Path) -> Line:
    """Return the line with the time and place of a history's process start; empty if it is torn."""
    return next((line for line in read_lines(path) if line["op"] == "form" and number(line, "started_at")), {})


def _last_line(path: Path) -> Line:
    """Return the last line of a history; empty if it has none."""
    lines = [line for line in lines_of(tail_of(path)) if number(line, "t") is not None]
    return lines[-1] if lines else {}


def who(line: Line) -> tuple[object, ...]:
    """Return what identifies a process across machines and time."""
    return tuple(line.get(name) for name in ("host", "boot", "pid", "born"))


def is_of_this_machine(member: Line) -> bool:
    """Return True if a process is of this machine's present boot, and its pid means the same here (containers)."""
    here = process_identity()
    is_near = (member.get("host"), member.get("boot")) == (here["host"], here["boot"])
    return is_near and member.get("space", here.get("space")) == here.get("space")


def has_restarted_here(member: Line) -> bool:
    """Return True if a process is of an earlier boot of this machine."""
    here = process_identity()
    return member.get("host") == here["host"] and member.get("boot") != here["boot"]
