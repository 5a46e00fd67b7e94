"""Why a run stopped: its cause in one sentence, who it was, and what to do, from what its processes left behind.

A process that ends with an error says so in its run's folder (`note_failed`); of one that is killed, its agent does
(`note_end_in`). What came before the last step was survived. Of several ends after it the first is the cause, unless
it only followed from another: a peer that was lost, a state that went with it, nodes that did not come.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from elastic_train.errors import (
    ConfigError,
    CorruptError,
    HungError,
    NoProgressError,
    PeerLostError,
    Preempted,
    ResultError,
    StateLostError,
    TooFewNodesError,
    UnfitError,
)
from elastic_train.runs.lines import Line, at, number, read_lines, text, whole
from elastic_train.system.wording import counted
from elastic_train.tracking.history_files import FOLDER, last_step_lines, term_of

Do = Literal["nothing", "start", "leave out", "fix"]
CODES: dict[Do, int] = {
    "nothing": 0,
    "start": Preempted.exit_code,
    "leave out": UnfitError.exit_code,
    "fix": CorruptError.exit_code,
}
"""The exit code of `status --why` by what is to be done: for schedulers."""
AT_ONCE_S = 2.0
"""What ends processes of a world may be noted so long before another's last step: clocks of machines differ."""
LEAVES_WITHIN_S = 600.0
"""How long after a worker's end that no other replaces, the rest of its node is taken to leave because of it."""
SILENT_S = 120.0
"""After so long without a line, a run has stopped: a step, or a save, rarely takes longer."""
MOST_SHOWN = 4
"""Files of evidence that people are shown."""
_KILLED = "was killed"
_BY_A_LIBRARY = ("SIGSEGV", "SIGILL", "SIGBUS", "SIGABRT", "SIGFPE")
_LEFT = ("preempted", "left")
_FOLLOWS = (StateLostError.exit_code, TooFewNodesError.exit_code)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a run stopped, and what to do; `evidence` are paths of the files that say so."""

    sentence: str
    do: Do
    advice: str
    host: str | None = None
    rank: int | None = None
    step: int | None = None
    """The last step that was applied before."""
    at: float | None = None
    """In unix seconds."""
    ended_with: int | None = None
    """The exit code of the process that it was, a signal negated."""
    evidence: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        return CODES[self.do]


def cause_of(run: str | Path, now: float | None = None) -> Cause:
    """Return why the run in this folder stopped, as far as its folder tells."""
    folder = Path(run) / FOLDER
    applied = _last_step(Path(run))
    step, since = (whole(applied, "step"), at(applied)) if applied else (None, 0.0)
    ends = _ends_after(Path(run), since)
    left = max((end for path in _newest(Path(run)) for end in _left(path)), key=lambda end: at(end[1]), default=None)
    last = max((at(line) + (LEAVES_WITHIN_S if line.get("node_leaves") else 0.0) for _, line in ends), default=0.0)
    if left is not None and at(left[1]) > last:
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
        for_good = (end for end in reversed(ends) if end[1].get("node_leaves"))
        first = next(for_good, None) or next((end for end in ends if not _only_follows(end[1])), ends[0])
        return _of_an_end(first, ends, step)
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
    return _without_a_word(Path(run), applied, (time.time() if now is None else now) - since)


def _ends_after(run: Path, since: float) -> list[tuple[Path, Line]]:
    """Return the ends of processes that the last step did not survive, the oldest first."""
    term = term_of(_newest(run)[0]) if _newest(run) else 0
    began = min((float(str(form["started_at"])) for path in _newest(run) if (form := _form(path))), default=0.0)
    ends = [
        (path, line)
        for path, line in _noted(run / FOLDER, "failed")
        if (at(line) >= since - AT_ONCE_S and (whole(line, "of_term") or term) >= term)
        or (line.get("node_leaves") is True and began <= at(line))
    ]
    return sorted(ends, key=lambda end: at(end[1]))


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
        "start it again: it resumes from the newest commit",
        hosts[0] if len(hosts) == 1 else None,
        step=step,
        at=since,
        evidence=tuple(str(path) for path in _newest(run)),
    )


def in_words(cause: Cause) -> str:
    """Return a cause as people read it: the sentence, what to do, and where it is written."""
    lines = [f"why: {cause.sentence}", f"do:  {cause.advice}"]
    if cause.evidence:
        lines += [f"see: {path}" for path in cause.evidence[:MOST_SHOWN]]
    return "\n".join(lines)


def _of_an_end(end: tuple[Path, Line], ends: Sequence[tuple[Path, Line]], step: int | None) -> Cause:
    line = end[1]
    why, code = text(line, "why") or "it does not say why", whole(line, "exit_code")
    rank, host = whole(line, "of_rank"), text(line, "host")
    do, advice = _advice(code, why, text(line, "kind"), host)
    if code == HungError.exit_code:
        why = f"{why}: it hung, and took no step in the time that hang_timeout_s allows"
    told = why if why.startswith((_KILLED, "ended", "exited")) else f"ended with an error: {why}"
    when = datetime.fromtimestamp(at(line), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    others = len({(text(each, "host"), whole(each, "pid")) for _, each in ends}) - 1
    more = f"; {others} more of its processes ended" if others else ""
    known = step if step is not None else whole(line, "step")
    return Cause(
        f"rank {rank} on {host} {told} (after step {known or 0}, {when}{more})",
        do,
        advice,
        host,
        rank,
        known,
        at(line),
        code,
        tuple(dict.fromkeys(str(path) for path, _ in (end, *ends))),
    )


def _advice(code: int | None, why: str, kind: str | None, host: str | None) -> tuple[Do, str]:
    """Return what to do about the end of a process."""
    if why.startswith(f"{_KILLED} for memory"):
        less = "batch.micro_batch, parallel.recompute, data.num_workers"
        return "fix", f"let it need less memory ({less}), or give it more; then start it again"
    if why.startswith(_KILLED):
        if any(name in why for name in _BY_A_LIBRARY):
            return (
                "fix",
                f"look in the log for the library that crashed; if it is always on {host}, leave that machine out",
            )
        return "start", "start it again: it resumes from the newest commit"
    match code:
        case ConfigError.exit_code:
            return "fix", "change what it names, then start it again"
        case CorruptError.exit_code:
            return "fix", "repair or replace what it names; another start would meet it again"
        case UnfitError.exit_code:
            return "leave out", f"leave {host} out, have it examined (elastic-train doctor), and start again without it"
        case NoProgressError.exit_code:
            return "fix", "do not start it again before what it names is changed: it would stop at the same step"
        case HungError.exit_code:
            return (
                "start",
                f"start it again; if it hangs again on {host}, leave that machine out (the log has all stacks)",
            )
        case TooFewNodesError.exit_code:
            return "start", "start it again once enough nodes are there"
        case ResultError.exit_code:
            return "start", "start it again where the result can be written: no step is trained twice"
        case 1 if kind is None or not kind.endswith("LostError"):
            return "fix", "mend the code or the place that it names, then start it again"
    return "start", "start it again: it resumes from the newest commit"


def _only_follows(line: Line) -> bool:
    return whole(line, "exit_code") in _FOLLOWS or text(line, "kind") == PeerLostError.__name__


def _before_a_step(run: Path) -> Cause:
    unfit = max(_noted(run / FOLDER, "unfit"), key=lambda each: at(each[1]), default=None)
    if unfit is not None:
        path, line = unfit
        host = text(line, "host")
        return Cause(
            f"{host} failed its health check, and no other machine took a step: {text(line, 'why')}",
            *_advice(UnfitError.exit_code, "", None, host),
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
    """Return the histories' files by term, the oldest first."""
    files: dict[int, list[Path]] = {}
    for path in sorted((run / FOLDER).glob("[0-9]*-*-*.jsonl")):
        files.setdefault(term_of(path), []).append(path)
    return [files[term] for term in sorted(files)]


def _newest(run: Path) -> list[Path]:
    return (_terms(run) or [[]])[-1]


def _left(path: Path) -> list[tuple[Path, Line]]:
    """Return the line with which a process left that was asked to, if it did."""
    last = list(read_lines(path))[-1:]
    return [(path, line) for line in last if text(line, "status") in _LEFT]


def _form(path: Path) -> Line:
    """Return the line that says when and where a history's process began; empty if it is torn."""
    return next((line for line in read_lines(path) if line["op"] == "form" and number(line, "started_at")), {})


def _noted(folder: Path, what: str) -> Iterator[tuple[Path, Line]]:
    """Yield what processes outside of any world have noted, with the files that have it."""
    for path in sorted(folder.glob(f"{what}-*.jsonl")):
        for line in read_lines(path):
            yield path, line
