"""Find why a run stopped: cause, rank and host, and remedy, from the files that its processes left.

A process that fails records its end in the run's folder (`note_failed`); for a killed process, its agent does
(`note_end_in`). Ends before the last step were survived. Of several ends after it, the first is the cause, unless it
followed from another: a lost peer, state that was lost with it, or nodes that did not join. A process without a
recorded end is the cause if others report it as lost. On the machine of its processes, a run that is still going is
recognized as such.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from elastic_train.errors import HungError, NoProgressError, PeerLostError, UnfitError
from elastic_train.runs.lines import Line, at, number, read_lines, text, whole
from elastic_train.runs.stopped.advice import CODES, RESUME, Do, advice, only_follows
from elastic_train.system.process_identity import process_identity
from elastic_train.system.wording import counted
from elastic_train.tracking.history_files import FOLDER, last_step_lines, term_of
from rendezvous.process_table import is_alive

AT_ONCE_S = 2.0
"""Seconds by which an end may be recorded before another rank's last step that it followed, as clocks differ."""
LEAVES_WITHIN_S = 600.0
"""Seconds after a worker's unreplaced end within which its node's departure is attributed to it."""
SILENT_S = 120.0
"""Seconds without a line after which a run counts as stopped; a step or a save rarely takes longer."""
TERMS_BEFORE = 3
"""Number of terms before the last step in which to look up processes that may have recorded an end near its time."""
MOST_SHOWN = 4
"""Number of evidence files to show."""
CLOCKS_DIFFER_S = 5.0
"""Seconds after an end by which a process on another machine must have started to count as a restart after it."""
_KILLED = "was killed"
_LEFT = ("preempted", "left")
End = tuple[Path, Line]
"""The line that records a process's end, and its file."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of a stop, and the remedy; `evidence` has the paths of the files that show it."""

    sentence: str
    do: Do
    advice: str
    host: str | None = None
    rank: int | None = None
    step: int | None = None
    """The last step applied before the stop."""
    at: float | None = None
    """Unix seconds."""
    ended_with: int | None = None
    """Exit code of the process; negative for a signal."""
    evidence: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        return CODES[self.do]


def cause_of(run: str | Path, now: float | None = None) -> Cause:
    """Return why the run in this folder stopped, from the files in the folder."""
    folder = Path(run) / FOLDER
    applied = _last_step(Path(run))
    step, since = (whole(applied, "step"), at(applied)) if applied else (None, 0.0)
    members = _members(Path(run))
    failures = _failures(Path(run), applied)
    ends = _ends_after(failures, applied, members)
    silent = _silent(Path(run), ends)
    if running := [member for member in silent if _is_of_this_machine(member) and _is_running(member)]:
        return _still_runs(running, step, since)
    left = max((end for path in _newest(Path(run)) for end in _left(path)), key=lambda end: at(end[1]), default=None)
    last = max((at(line) + (LEAVES_WITHIN_S if line.get("node_leaves") else 0.0) for _, line in ends), default=0.0)
    if left is not None and (at(left[1]) > last or all(only_follows(line) for _, line in ends)):
        path, line = left
        return Cause(
            f"the job was asked to leave, and left after step {whole(line, 'step')}",
            "start",
            "start it again: it resumes from there",
            step=whole(line, "step"),
            at=at(line),
            evidence=(str(path),),
        )
    if ends:
        return _of_ends(failures, ends, silent, step, since)
    unformed = max(_noted(folder, "unformed"), key=lambda each: at(each[1]), default=None)
    if unformed is not None and at(unformed[1]) > since:
        path, line = unformed
        return Cause(
            f"no world formed after step {step or 0}: {text(line, 'why')}",
            "start",
            "start it again once the nodes that it names can reach one another",
            text(line, "host"),
            whole(line, "rank"),
            step,
            at(line),
            evidence=(str(path),),
        )
    if applied is None:
        return _before_a_step(Path(run))
    silent_s = SILENT_S if _are_of_this_machine(members) else (time.time() if now is None else now) - since
    return _without_a_word(Path(run), applied, silent_s)


def _of_ends(
    failures: Sequence[End], ends: Sequence[End], silent: Sequence[Line], step: int | None, since: float
) -> Cause:
    """Choose the end that is the cause, and describe it."""
    has_lost = any(text(line, "kind") == PeerLostError.__name__ for _, line in ends)
    for_good = next((end for end in reversed(ends) if end[1].get("node_leaves")), None)
    causes = _of_last_attempt([end for end in ends if not only_follows(end[1])])
    given_up = next((end for end in causes if text(end[1], "kind") == NoProgressError.__name__), None)
    if given_up is not None:
        behind = [end for end in failures if at(end[1]) >= since - AT_ONCE_S and _ended_a_world(end[1])]
        return _of_giving_up(given_up, max(behind, key=lambda end: at(end[1]), default=None), ends, step)
    if for_good is None and not causes and silent and has_lost:
        return _of_lost_peers(silent, ends, step)
    return _of_an_end(for_good or (causes or ends)[0], ends, step)


def _ends_after(failures: Sequence[End], applied: Line | None, members: Sequence[Line]) -> list[End]:
    """Return the ends of processes since the last step, the oldest first.

    Compares terms where they are known, because the clocks of machines differ.
    """
    term, since = (whole(applied, "term") or 0, at(applied)) if applied else (0, 0.0)
    began = min((float(str(form["started_at"])) for form in members), default=0.0)

    def counts(line: Line) -> bool:
        if line.get("node_leaves") is True and began <= at(line):
            return True
        of_term = whole(line, "of_term")
        return at(line) >= since - AT_ONCE_S if of_term is None else of_term >= term

    return sorted((end for end in failures if counts(end[1])), key=lambda end: at(end[1]))


def _failures(run: Path, applied: Line | None) -> list[End]:
    """Return all recorded ends, with the term and the rank of the process's last world if known.

    A process that records its own end does not know its rank: a live process has another rank in each world.
    """
    worlds = _last_worlds(run, 0 if applied is None else whole(applied, "term") or 0)
    return [
        (path, line if "of_term" in line else {**line, **worlds.get(_who(line), {})})
        for path, line in _noted(run / FOLDER, "failed")
    ]


def _last_worlds(run: Path, term: int) -> dict[tuple[object, ...], Line]:
    """Return each process's last term and its rank there, for worlds from TERMS_BEFORE terms before `term` on."""
    terms = _terms(run)
    before = [parts for parts in terms if term_of(parts[0]) < term][-TERMS_BEFORE:]
    later = [parts for parts in terms if term_of(parts[0]) >= term]
    forms = [form for parts in (*before, *later) for path in parts if (form := _form(path))]
    return {_who(form): {"of_term": form.get("term"), "of_rank": form.get("rank")} for form in forms}


def _of_last_attempt(ends: Sequence[End]) -> list[End]:
    """Drop ends that precede the start of a process that ended later: the job was restarted in between."""

    def is_superseded(line: Line) -> bool:
        for _, other in ends:
            began, is_near = number(other, "started_at"), text(other, "host") == text(line, "host")
            if began is not None and began > at(line) + (0.0 if is_near else CLOCKS_DIFFER_S):
                return True
        return False

    return [end for end in ends if not is_superseded(end[1])]


def _ended_a_world(line: Line) -> bool:
    return not only_follows(line) and text(line, "kind") != NoProgressError.__name__


def _silent(run: Path, ends: Sequence[End]) -> list[Line]:
    """Return the first lines of the newest world's processes without a recorded end."""
    ended = {_who(line) for _, line in ends}
    going = [path for path in _newest(run) if "end" not in {line["op"] for line in list(read_lines(path))[-1:]}]
    return [form for path in going if (form := _form(path)) and _who(form) not in ended]


def _members(run: Path) -> list[Line]:
    """Return the first lines of the newest world's processes."""
    return [form for path in _newest(run) if (form := _form(path))]


def _who(line: Line) -> tuple[object, ...]:
    return tuple(line.get(name) for name in ("host", "boot", "pid", "born"))


def _is_of_this_machine(member: Line) -> bool:
    here = process_identity()
    return (member.get("host"), member.get("boot")) == (here["host"], here["boot"])


def _are_of_this_machine(members: Sequence[Line]) -> bool:
    return bool(members) and all(_is_of_this_machine(member) for member in members)


def _is_running(member: Line) -> bool:
    pid = whole(member, "pid")
    return pid is not None and is_alive(pid, whole(member, "born"))


def _still_runs(running: Sequence[Line], step: int | None, since: float) -> Cause:
    of = ", ".join(f"{whole(member, 'pid')} (rank {whole(member, 'rank')})" for member in running[:MOST_SHOWN])
    what = f"it is running: process {of} of {text(running[0], 'host')} is there, and the last step is {step or 0}"
    return Cause(what, "nothing", "wait", step=step, at=since)


def _without_a_word(run: Path, applied: Line, silent_s: float) -> Cause:
    step, since = whole(applied, "step"), at(applied)
    if silent_s < SILENT_S:
        going = f"it seems to be running: step {step} was applied {silent_s:.0f} s ago"
        return Cause(going, "nothing", "wait", step=step, at=since)
    hosts = sorted({host for path in _newest(run) if (host := text(_form(path), "host"))})
    return Cause(
        f"all of its processes ended without a word after step {step}, and so did their launchers: "
        f"{counted(len(hosts), 'machine')} ({', '.join(hosts)}) lost power, or all was killed at once",
        "start",
        RESUME,
        hosts[0] if len(hosts) == 1 else None,
        step=step,
        at=since,
        evidence=tuple(str(path) for path in _newest(run)),
    )


def in_words(cause: Cause) -> str:
    """Return a cause as text: the sentence, the remedy, and the files that show it."""
    lines = [f"why: {cause.sentence}", f"do:  {cause.advice}"]
    if cause.evidence:
        lines += [f"see: {path}" for path in cause.evidence[:MOST_SHOWN]]
    return "\n".join(lines)


def _of_giving_up(given_up: End, behind: End | None, ends: Sequence[End], step: int | None) -> Cause:
    """Return the cause if the job gave up for lack of progress: the end of the last world, if known."""
    if behind is None:
        return _of_an_end(given_up, ends, step)
    found, gave_up = _of_an_end(behind, [behind, *ends], step), _of_an_end(given_up, ends, step)
    sentence = f"{found.sentence}; {text(given_up[1], 'why')}"
    return replace(found, sentence=sentence, do="fix", advice=(found if found.do == "fix" else gave_up).advice)


def _of_lost_peers(lost: Sequence[Line], ends: Sequence[End], step: int | None) -> Cause:
    """Name members without a recorded end as the cause, as the others ended because they lost them."""
    who = ", ".join(f"rank {whole(each, 'rank')} on {text(each, 'host')}" for each in lost[:MOST_SHOWN])
    hosts = {text(each, "host") for each in lost}
    host = hosts.pop() if len(hosts) == 1 else None
    others = "another process ended" if len(ends) == 1 else f"{len(ends)} other processes ended"
    return Cause(
        f"{who} ended without a word after step {step or 0}: {host or 'the machines'} lost power or the network, or "
        f"processes and launcher were killed at once; {others} because of it",
        "start",
        RESUME if host is None else f"{RESUME}; if it is always {host}, leave that machine out",
        host,
        whole(lost[0], "rank") if len(lost) == 1 else None,
        step,
        at(ends[0][1]),
        evidence=tuple(dict.fromkeys(str(path) for path, _ in ends)),
    )


def _of_an_end(end: End, ends: Sequence[End], step: int | None) -> Cause:
    line = end[1]
    why, code = text(line, "why") or "it does not say why", whole(line, "exit_code")
    rank, host = whole(line, "of_rank"), text(line, "host")
    do, what_to_do = advice(code, why, text(line, "kind"), host)
    if code == HungError.exit_code:
        why = f"{why}: it hung, and took no step in the time that hang_timeout_s allows"
    told = why if why.startswith((_KILLED, "ended", "exited")) else f"ended with an error: {why}"
    when = datetime.fromtimestamp(at(line), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    others = len({(text(each, "host"), whole(each, "pid")) for _, each in ends}) - 1
    more = f"; {others} more of its processes ended" if others else ""
    known = step if step is not None else whole(line, "step")
    return Cause(
        f"{'a process' if rank is None else f'rank {rank}'} on {host} {told} (after step {known or 0}, {when}{more})",
        do,
        what_to_do,
        host,
        rank,
        known,
        at(line),
        code,
        tuple(dict.fromkeys(str(path) for path, _ in (end, *ends))),
    )


def _before_a_step(run: Path) -> Cause:
    unfit = max(_noted(run / FOLDER, "unfit"), key=lambda each: at(each[1]), default=None)
    if unfit is not None:
        path, line = unfit
        host = text(line, "host")
        return Cause(
            f"{host} failed its health check, and no other machine took a step: {text(line, 'why')}",
            *advice(UnfitError.exit_code, "", None, host),
            host=host,
            at=at(line),
            evidence=(str(path),),
        )
    return Cause(
        "it has not taken a step, and no process has said why: it may have ended before it could write to its folder",
        "start",
        "read the log of its launcher",
    )


def _last_step(run: Path) -> Line | None:
    """Return the line of the last step that any rank of the newest worlds applied."""
    for parts in reversed(_terms(run)):
        lines = [line for path in parts for line in last_step_lines(path)]
        if lines:
            return max(lines, key=lambda line: float(str(line["t"])))
    return None


def _terms(run: Path) -> list[list[Path]]:
    """Return the history files by term, the oldest first."""
    files: dict[int, list[Path]] = {}
    for path in sorted((run / FOLDER).glob("[0-9]*-*-*.jsonl")):
        files.setdefault(term_of(path), []).append(path)
    return [files[term] for term in sorted(files)]


def _newest(run: Path) -> list[Path]:
    return (_terms(run) or [[]])[-1]


def _left(path: Path) -> list[End]:
    """Return the line of a process that left on request; empty if it did not."""
    last = list(read_lines(path))[-1:]
    return [(path, line) for line in last if text(line, "status") in _LEFT]


def _form(path: Path) -> Line:
    """Return the line with the time and place of a history's process start; empty if it is torn."""
    return next((line for line in read_lines(path) if line["op"] == "form" and number(line, "started_at")), {})


def _noted(folder: Path, what: str) -> Iterator[End]:
    """Yield the notes of processes outside any world, with their files."""
    for path in sorted(folder.glob(f"{what}-*.jsonl")):
        for line in read_lines(path):
            yield path, line
