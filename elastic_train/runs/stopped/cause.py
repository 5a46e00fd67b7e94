"""Find why a run stopped: cause, rank and host, and remedy, from the files that its processes left.

A process that fails records its end in the run's folder (`note_failed`); for a killed process, its agent does
(`note_end_in`). Ends before the last step were survived: they are shown with the cause. Of several ends after it, the
first that another start would meet again is the cause, else the first, unless it followed from another: a lost peer,
state that was lost with it, or nodes that did not join. A process without a recorded end is the cause if others report
it as lost. On the machine of its processes, a run that is still going is recognized as such. Slurm knows more of a job
that it ended or will start again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from elastic_train.errors import HungError, NoProgressError, PeerLostError, UnfitError
from elastic_train.runs.lines import Line, at, number, text, whole
from elastic_train.runs.stopped.advice import CODES, RESUME, Do, advice, only_follows
from elastic_train.runs.stopped.slurm import SlurmJob, ask_slurm, by_slurm
from elastic_train.runs.stopped.traces import End, Traces, has_restarted_here, is_of_this_machine, read_traces, who
from rendezvous.process_table import is_alive, is_stopped

AT_ONCE_S = 2.0
"""Seconds by which an end may be recorded before another rank's last step that it followed, as clocks differ."""
LEAVES_WITHIN_S = 600.0
"""Seconds after a worker's unreplaced end within which its node's departure is attributed to it."""
SILENT_S = 120.0
"""Least seconds without a line after which a run counts as stopped."""
SILENT_STEPS = 5
"""Silence in steps, as long as the longest of the last ones, after which a run counts as stopped."""
MOST_SHOWN = 4
"""Number of evidence files to show."""
MOST_PIDS = 16
"""Number of running processes to show."""
CLOCKS_DIFFER_S = 5.0
"""Seconds after an end by which a process on another machine must have started to count as a restart after it."""
_KILLED = "was killed"


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
    survived: str | None = None
    """Earlier ends, which the run survived."""

    @property
    def exit_code(self) -> int:
        return CODES[self.do]


def cause_of(run: str | Path, now: float | None = None, slurm: Callable[[str], SlurmJob | None] = ask_slurm) -> Cause:
    """Return why the run in this folder stopped, from the files in the folder and from Slurm, if it ran there."""
    traces, now = read_traces(Path(run)), time.time() if now is None else now
    members, failures = traces.members(), traces.failures()
    ends = _ends_after(failures, traces, members)
    silent = traces.silent(ends)
    if running := [member for member in silent if is_of_this_machine(member) and _is_running(member)]:
        return _still_runs(running, traces, now)
    cause = _cause_of(traces, members, failures, ends, now)
    if cause.at is not None and ends:
        cause = _with_survived(cause, traces, failures, ends)
    number_of_job = next((job for member in members if (job := text(member, "slurm_job"))), None)
    known = None if number_of_job is None else slurm(number_of_job)
    said = None if known is None else by_slurm(known, cause.do, cause.sentence, now - traces.last_sign())
    return cause if said is None else replace(cause, do=said[0], sentence=said[1], advice=said[2])


def _cause_of(
    traces: Traces, members: Sequence[Line], failures: Sequence[End], ends: Sequence[End], now: float
) -> Cause:
    left = traces.left()
    last = max((at(line) + (LEAVES_WITHIN_S if line.get("node_leaves") else 0.0) for _, line in ends), default=0.0)
    are_consequences = all(only_follows(line) for _, line in ends)
    if left is not None and (at(left[1]) > last or are_consequences):
        return _of_leaving(left)
    unformed = traces.last_note("unformed")
    if unformed is not None and at(unformed[1]) > traces.since and are_consequences:
        return _of_no_world(unformed, traces.step)
    if ends:
        return _of_ends(failures, ends, traces)
    if traces.applied is None:
        return _before_a_step(traces)
    return _without_a_word(traces, members, now)


def _of_ends(failures: Sequence[End], ends: Sequence[End], traces: Traces) -> Cause:
    """Choose the end that is the cause, and describe it."""
    silent, step = traces.silent(ends), traces.step
    has_lost = any(text(line, "kind") == PeerLostError.__name__ for _, line in ends)
    for_good = next((end for end in reversed(ends) if end[1].get("node_leaves")), None)
    causes = _of_last_attempt([end for end in ends if not only_follows(end[1])])
    given_up = next((end for end in causes if text(end[1], "kind") == NoProgressError.__name__), None)
    if given_up is not None:
        behind = [end for end in failures if at(end[1]) >= traces.since - AT_ONCE_S and _ended_a_world(end[1])]
        return _of_giving_up(given_up, max(behind, key=lambda end: at(end[1]), default=None), ends, step)
    if for_good is None and not causes and silent and has_lost:
        return _of_lost_peers(silent, ends, step)
    lasting = [end for end in causes if _advice_of(end[1])[0] != "start" and _is_after(end[1], traces)]
    if for_good is not None and (not lasting or for_good in lasting):
        return _of_an_end(for_good, ends, step)
    return _of_an_end((lasting or causes or ends)[0], ends, step)


def _ends_after(failures: Sequence[End], traces: Traces, members: Sequence[Line]) -> list[End]:
    """Return the ends of processes since the last step, and those after which a node left, the oldest first."""
    began = min((float(str(form["started_at"])) for form in members), default=0.0)
    counted_ends = [
        end
        for end in failures
        if (end[1].get("node_leaves") is True and began <= at(end[1])) or _is_after(end[1], traces)
    ]
    if not any(_is_after(line, traces) for _, line in counted_ends) and len(traces.silent(counted_ends)) == len(
        members
    ):
        return []  # the others continued without the node that left, and ended without a message
    return sorted(counted_ends, key=lambda end: at(end[1]))


def _is_after(line: Line, traces: Traces) -> bool:
    """Return True if an end came after the last step, by terms where they are known: machines' clocks differ."""
    of_term = whole(line, "of_term")
    return at(line) >= traces.since - AT_ONCE_S if of_term is None else of_term >= traces.term


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


def _is_running(member: Line) -> bool:
    pid = whole(member, "pid")
    return pid is not None and is_alive(pid, whole(member, "born"))


def _still_runs(running: Sequence[Line], traces: Traces, now: float) -> Cause:
    of = ", ".join(f"{whole(member, 'pid')} (rank {whole(member, 'rank')})" for member in running[:MOST_PIDS])
    what = (
        f"it is running: process {of} of {text(running[0], 'host')} is there, and the last step is {traces.step or 0}"
    )
    stopped = [pid for member in running if (pid := whole(member, "pid")) is not None and is_stopped(pid)]
    if stopped:
        pids = " ".join(map(str, stopped))
        return Cause(
            f"{what}; {pids} is stopped by a signal",
            "nothing",
            f"kill -CONT {pids} lets it continue",
            step=traces.step,
            at=traces.since,
        )
    if (silent_s := now - traces.last_sign()) > _patience_s(traces):
        what = f"{what}, {silent_s:.0f} s ago: it waits for other nodes, for storage, or for a long step"
    return Cause(what, "nothing", "wait", step=traces.step, at=traces.since)


def _patience_s(traces: Traces) -> float:
    """Return the silence that does not prove a stop: steps of large models take minutes."""
    return max(SILENT_S, SILENT_STEPS * traces.pace_s())


def _without_a_word(traces: Traces, members: Sequence[Line], now: float) -> Cause:
    step, silent_s = traces.step, now - traces.last_sign()
    if not all(map(is_of_this_machine, members)) and silent_s < _patience_s(traces):
        going = f"it seems to be running: step {step} was applied {now - traces.since:.0f} s ago"
        return Cause(going, "nothing", "wait", step=step, at=traces.since)
    hosts = sorted({host for each in members if (host := text(each, "host"))})
    (subject, others), how = _silent_end(members, hosts)
    if restarted := [text(each, "host") for each in members if has_restarted_here(each)]:
        how = f"{restarted[0]} has been restarted since"
    return Cause(
        f"{subject} ended without a word after step {step}{others}: {how}",
        "start",
        RESUME,
        hosts[0] if len(hosts) == 1 else None,
        step=step,
        at=traces.since,
        evidence=tuple(map(str, traces.newest)),
    )


def _silent_end(members: Sequence[Line], hosts: Sequence[str]) -> tuple[tuple[str, str], str]:
    """Return who ended (subject, and the rest of the clause) and how, if no process has left a word."""
    has_power = all(map(is_of_this_machine, members))
    if len(members) == 1:
        how = "it was killed (perhaps by the kernel for lack of memory, or by a second Ctrl-C)"
        return ("its only process", ""), how if has_power else f"{how}, or {', '.join(hosts)} lost power"
    place = hosts[0] if len(hosts) == 1 else f"{len(hosts)} machines ({', '.join(hosts)})"
    how = f"everything on {place} was killed at once" if has_power else f"{place} lost power, or all was killed at once"
    return ("all of its processes", ", and so did their launchers"), how


def in_words(cause: Cause) -> str:
    """Return a cause as text: the sentence, the remedy, what the run survived before, and the files that show it."""
    lines = [f"why: {cause.sentence}", f"do:  {cause.advice}"]
    if cause.survived:
        lines.append(f"before: {cause.survived}")
    if cause.evidence:
        lines += [f"see: {path}" for path in cause.evidence[:MOST_SHOWN]]
    return "\n".join(lines)


def _with_survived(cause: Cause, traces: Traces, failures: Sequence[End], ends: Sequence[End]) -> Cause:
    """Add the ends and lost machines that the run survived shortly before."""
    assert cause.at is not None, "only called for an end"
    soonest = cause.at - LEAVES_WITHIN_S
    before = [end for end in failures if end not in ends and soonest <= at(end[1]) <= cause.at]
    told = [f"{_name_of(line)} {_told(line)}" for _, line in before if not only_follows(line)]
    lost = [end for end in traces.lost_hosts([who(line) for _, line in failures]) if soonest <= at(end[1])]
    told += [f"{line['host']} was lost without a word in term {line['term']}" for _, line in lost]
    if not told:
        return cause
    evidence = tuple(dict.fromkeys([*cause.evidence, *(str(path) for path, _ in (*before, *lost))]))
    return replace(cause, survived=f"{'; '.join(told[-MOST_SHOWN:])}; the run went on", evidence=evidence)


def _of_leaving(left: End) -> Cause:
    path, line = left
    return Cause(
        f"the job was asked to leave, and left after step {whole(line, 'step')}",
        "start",
        "start it again: it resumes from there",
        step=whole(line, "step"),
        at=at(line),
        evidence=(str(path),),
    )


def _of_no_world(unformed: End, step: int | None) -> Cause:
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


def _of_giving_up(given_up: End, behind: End | None, ends: Sequence[End], step: int | None) -> Cause:
    """Return the cause if the job gave up for lack of progress: the end of the last world, if known."""
    if behind is None:
        return _of_an_end(given_up, ends, step)
    found, gave_up = _of_an_end(behind, [behind, *ends], step), _of_an_end(given_up, ends, step)
    sentence = f"{found.sentence}; {text(given_up[1], 'why')}"
    return replace(found, sentence=sentence, do="fix", advice=(found if found.do == "fix" else gave_up).advice)


def _of_lost_peers(lost: Sequence[Line], ends: Sequence[End], step: int | None) -> Cause:
    """Name members without a recorded end as the cause, as the others ended because they lost them."""
    names = ", ".join(f"rank {whole(each, 'rank')} on {text(each, 'host')}" for each in lost[:MOST_SHOWN])
    hosts = {text(each, "host") for each in lost}
    host = hosts.pop() if len(hosts) == 1 else None
    others = "another process ended" if len(ends) == 1 else f"{len(ends)} other processes ended"
    return Cause(
        f"{names} ended without a word after step {step or 0}: {host or 'the machines'} lost power or the network, or "
        f"processes and launcher were killed at once; {others} because of it",
        "start",
        RESUME if host is None else f"{RESUME}; if it is always {host}, leave that machine out",
        host,
        whole(lost[0], "rank") if len(lost) == 1 else None,
        step,
        at(ends[0][1]),
        evidence=tuple(dict.fromkeys(str(path) for path, _ in ends)),
    )


def _advice_of(line: Line) -> tuple[Do, str]:
    return advice(whole(line, "exit_code"), text(line, "why") or "", text(line, "kind"), text(line, "host"))


def _name_of(line: Line) -> str:
    rank, host = whole(line, "of_rank"), text(line, "host")
    if line.get("launcher") is True:
        return f"the launcher on {host}"
    return f"{'a process' if rank is None else f'rank {rank}'} on {host}"


def _told(line: Line) -> str:
    """Return how a process ended, as the predicate of a sentence."""
    why = text(line, "why") or "it does not say why"
    if whole(line, "exit_code") == HungError.exit_code:
        why = f"{why}: it hung, and took no step in the time that hang_timeout_s allows"
    return why if why.startswith((_KILLED, "ended", "exited")) else f"ended with an error: {why}"


def _of_an_end(end: End, ends: Sequence[End], step: int | None) -> Cause:
    line = end[1]
    do, what_to_do = _advice_of(line)
    when = datetime.fromtimestamp(at(line), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    others = len({(text(each, "host"), whole(each, "pid")) for _, each in ends}) - 1
    more = f"; {others} more of its processes ended" if others else ""
    known = step if step is not None else whole(line, "step")
    return Cause(
        f"{_name_of(line)} {_told(line)} (after step {known or 0}, {when}{more})",
        do,
        what_to_do,
        text(line, "host"),
        whole(line, "of_rank"),
        known,
        at(line),
        whole(line, "exit_code"),
        tuple(dict.fromkeys(str(path) for path, _ in (end, *ends))),
    )


def _before_a_step(traces: Traces) -> Cause:
    unfit = traces.last_note("unfit")
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
        "it has not taken a step, and no process has recorded an error: it was asked to leave before its first step, "
        "or was killed before it could write to its folder",
        "start",
        "start it again; if it ends again, read its log, or that of its launcher",
    )
