"""Invariants of published commits: one chain, growing terms, and no published commit lost.

Histories name every commit with its digest and its parent's, so the chain extends past what retention deleted; the
remaining records must agree.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

from chaos.judge.evidence.applied import formed_at, lineage_of, restored_at, result_of, shape_of
from chaos.judge.evidence.run_files import Commit, Evidence, Line, items, number, once, whole
from chaos.judge.findings import Violated
from chaos.judge.invariants.written.records import is_disturbed
from chaos.scenario.kinds import kind_of

COMMITS = "commits/"


def lineage(run: Evidence) -> str:
    """The commits are one chain of digests from end to start, and its intervals tile [0, end)."""
    published = _published(run)
    _check_records(run, published)
    _check_parents(run, published)
    chain = list(_chain(run, published))
    steps = [whole(commit, "step") for commit in chain]
    if any(later <= earlier for later, earlier in pairwise(steps)):
        raise Violated(f"the chain's steps do not grow: {steps[::-1]}")
    for commit in run.commits:
        _check_tiling(run, commit)
    return f"{len(chain)} of {len(published)} commits are one chain, intervals tile [0, {steps[0]})"


def _published(run: Evidence) -> dict[str, Line]:
    """Return all commits by digest: recorded in histories, or found only as records because their publisher died."""
    published = {str(line["digest"]): line for line in run.of("commit")}
    published_keys = {line["key"] for line in published.values()}
    for commit in run.commits:
        if commit.fields is not None and commit.key not in published_keys:
            published[commit.digest] = {**commit.fields, "key": commit.key, "digest": commit.digest}
    if not published:
        raise Violated("there is no commit")
    return published


def _check_records(run: Evidence, published: dict[str, Line]) -> None:
    """The records on disk are intact and match the histories."""
    keys = {str(line["key"]): digest for digest, line in published.items()}
    for commit in run.commits:
        if commit.fields is None:
            raise Violated(f"{commit.key} is damaged: it cannot be read")
        if not commit.is_sealed:
            raise Violated(f"{commit.key} is damaged: it does not have the SHA-256 that its seal says")
        if commit.key in keys and keys[commit.key] != commit.digest:
            raise Violated(f"{commit.key} has digest {commit.digest[:12]}, it was published as {keys[commit.key][:12]}")
        if _place(commit.key) != (commit.fields["term"], commit.fields["step"]):
            held = f"term {commit.fields['term']}, step {commit.fields['step']}"
            raise Violated(f"{commit.key} holds the record of {held}")
        if published[commit.digest]["parent"] != commit.fields["parent"]:
            raise Violated(f"{commit.key} names another parent than the history does")


def _check_parents(run: Evidence, published: dict[str, Line]) -> None:
    """A term's first commit continues the restored one, each further commit the one before."""
    digest_of = {line["key"]: digest for digest, line in published.items()}
    recorded = {str(line["digest"]) for line in run.of("commit")}
    restored = restored_at(run)
    heads = {term: {digest_of.get(line["commit"])} for term, line in restored.items()}
    unseen = {term for term, line in restored.items() if line["commit"] and heads[term] == {None}}
    for digest, line in sorted(published.items(), key=lambda item: _place(str(item[1]["key"]))):
        term = whole(line, "term")
        # A term that no world restored is that of a process that committed alone before leaving.
        if term in unseen:  # its parent is in no history, and retention has deleted it
            unseen.remove(term)
            if line["parent"] in published:
                named, begun = published[str(line["parent"])]["key"], restored[term]["commit"]
                raise Violated(f"{line['key']} names the parent {named}, but its term continued from {begun}")
        elif line["parent"] not in heads.get(term, {line["parent"]}) and not _is_forgotten(run, published, line):
            names = f"{str(line['parent'])[:12]}, but its term continued from {_shown(heads[term])}"
            raise Violated(f"{line['key']} names the parent {names}")
        # A record given up as lost may still appear: the next commit continues it, or the one before.
        heads[term] = {digest} if digest in recorded else {digest, *heads.get(term, set())}


def _shown(digests: set[str | None]) -> str:
    return " or ".join(sorted(str(digest)[:12] for digest in digests))


def _is_forgotten(run: Evidence, published: dict[str, Line], commit: Line) -> bool:
    """Return True if a commit's parent is in no history and was deleted by retention.

    Retention deletes the oldest first, except pinned ones, so nothing older than the parent may be left. A parent of
    the commit's own term was made by a process that lived on, and lacks a line only if an answer was lost.
    """
    place, made_at = _place(str(commit["key"])), _made_at(run)
    at = made_at[str(commit["key"])]
    restore = restored_at(run).get(place[0])
    restored = restore and restore.get("commit")
    if not _may_be_unrecorded(published, commit, restore) and not is_disturbed(run, _before(made_at, place), at):
        return False
    if restored is not None and restored not in {line["key"] for line in published.values()}:
        place = _place(str(restored))
    elif named := next((c.fields.get("parent_key") for c in run.commits if c.fields and c.key == commit["key"]), None):
        place = _place(str(named))
    left = {record.key for record in run.commits} - _pinned(run)
    is_oldest = not any(_place(key) < place and made_at.get(key, at) < at for key in left)
    return str(commit["parent"]) not in published and is_oldest


def _may_be_unrecorded(published: dict[str, Line], commit: Line, restore: Line | None) -> bool:
    """Return True if another process may have made a commit's parent, which no history has."""
    if restore is None:
        return True
    term, step = _place(str(commit["key"]))
    keys = {str(line["key"]) for line in published.values()}
    is_first = not any(_place(key)[0] == term and _place(key)[1] < step for key in keys)
    return is_first and restore["commit"] is not None and restore["commit"] not in keys


def _before(made_at: dict[str, float], place: tuple[int, int]) -> float:
    """Return when the newest commit before (term, step) was made; 0 if there is none."""
    return max((at for key, at in made_at.items() if _place(key) < place), default=0.0)


@once
def _pinned(run: Evidence) -> set[str]:
    """Return the commits that were newest when a step was not finite: retention keeps those.

    That step's own commit is made later.
    """
    steps = [(whole(line, "term"), whole(line, "step")) for line in run.of("nonfinite")]
    before = [[record.key for record in run.commits if _place(record.key) < step] for step in steps]
    return {max(keys, key=_place) for keys in before if keys}


def _chain(run: Evidence, published: dict[str, Line]) -> Iterator[Line]:
    """Yield the newest commit by (term, step) and its ancestors; a parent that was never published breaks the chain.

    Across a deleted and unrecorded parent the chain continues with the commit before it.
    """
    commit = max(published.values(), key=lambda line: _place(str(line["key"])))
    for _ in published:
        yield commit
        if commit["parent"] is None:
            return
        parent = published.get(str(commit["parent"]))
        if parent is None and _is_forgotten(run, published, commit):
            parent = _before_forgotten(run, published, str(commit["key"]))
            if parent is None:
                return
        if parent is None:
            raise Violated(f"{commit['key']} names a parent {str(commit['parent'])[:12]} that was never published")
        if whole(parent, "term") > whole(commit, "term"):
            raise Violated(f"{commit['key']} of term {commit['term']} continues {parent['key']}, of a newer term")
        commit = parent
    raise Violated("the chain of parents is a circle")


def _before_forgotten(run: Evidence, published: dict[str, Line], key: str) -> Line | None:
    """Return the newest known ancestor of a commit whose parent is unknown; None if all are unknown.

    It is of the same term, or the commit that the term restored; if that is unknown too, the one that it continues. If
    no world restored the term (a process committed alone), it is the newest commit before it.
    """
    by_key = {str(line["key"]): line for line in published.values()}
    while True:
        (term, step), restore = _place(key), restored_at(run).get(_place(key)[0])
        if mine := [other for other in by_key if _place(other)[0] == term and _place(other)[1] < step]:
            return by_key[max(mine, key=_place)]
        if restore is None:
            older = [other for other in by_key if _place(other)[0] < term and _place(other)[1] < step]
            return by_key[max(older, key=_place)] if older else None
        if restore["commit"] is None:
            return None
        key = str(restore["commit"])
        if key in by_key:
            return by_key[key]
        if _place(key)[0] >= term:
            raise Violated(f"term {term} continued from {key}, which is not of an older term")


def _check_tiling(run: Evidence, commit: Commit) -> None:
    """A record's intervals tile [0, step) in growing terms; the last record's match the histories."""
    assert commit.fields is not None, "checked before"
    place = before = 0
    for interval in items(commit.fields, "intervals"):
        assert isinstance(interval, dict), "an interval is a mapping"
        lo, hi, term = whole(interval, "lo"), whole(interval, "hi"), whole(interval, "term")
        if lo != place or hi <= lo:
            kind = "gap" if lo > place else "overlap"
            raise Violated(f"{commit.key}: {kind} between step {place} and step {lo} of term {term}")
        if term < before:
            raise Violated(f"{commit.key}: steps of term {term} follow those of term {before}")
        place, before = hi, term
    step = whole(commit.fields, "step")
    if place != step:
        raise Violated(f"{commit.key}: its intervals end at step {place}, it is of step {step}")
    if step == shape_of(run).total_steps and _place(commit.key) == max(_place(other.key) for other in run.commits):
        _check_same_terms(run, commit)  # a late record of an older term is not part of the final lineage


def _check_same_terms(run: Evidence, commit: Commit) -> None:
    """The last commit's intervals name, for every step, the term that applied it by the histories."""
    assert commit.fields is not None, "checked before"
    claimed = {
        step: whole(interval, "term")
        for interval in items(commit.fields, "intervals")
        if isinstance(interval, dict)
        for step in range(whole(interval, "lo") + 1, whole(interval, "hi") + 1)
    }
    for applied in lineage_of(run):
        if claimed[applied.step] != applied.term:
            by = f"applied by term {claimed[applied.step]}, by the histories it was term {applied.term}"
            raise Violated(f"{commit.key}: step {applied.step} is recorded as {by}")


def fencing(run: Evidence) -> str:
    """Terms grow, one world holds a term, and no commit published after a newer term had formed is continued."""
    formed = formed_at(run)
    result_term = whole(result_of(run), "term")
    published = {result_term, *(whole(line, "term") for line in run.of("commit"))}
    # A process frozen between claim and first line may write that late; it counts once it publishes.
    terms = [term for term in formed if term in published]
    if terms != sorted(terms):
        raise Violated(f"worlds were formed in the order of terms {terms}")
    holders: dict[tuple[int, int], object] = {}
    for line in run.of("form"):
        holder = holders.setdefault((whole(line, "term"), whole(line, "rank")), line["pid"])
        if holder != line["pid"]:
            raise Violated(f"term {line['term']} has two ranks {line['rank']}: processes {holder} and {line['pid']}")
    made_at = _made_at(run)
    for line in run.of("commit"):
        at = made_at[str(line["key"])]
        newer = [term for term in formed if term > whole(line, "term") and formed[term] < at]
        newer = [term for term in newer if not _was_before(run, line, term)]
        _check_not_continued(run, line, newer)
    if result_term != max(formed):
        raise Violated(f"the result is of term {result_term}, but term {max(formed)} had formed")
    return f"terms {terms[0]} to {terms[-1]}, none extended by an older one"


def _was_before(run: Evidence, commit: Line, term: int) -> bool:
    """Return True if the commit's publisher later joined a term's world, both by its own clock."""
    publishers = {x["pid"] for x in run.in_term("form", whole(commit, "term")) if x["rank"] == commit["rank"]}
    joined = [number(x, "t") for x in run.in_term("form", term) if x["pid"] in publishers]
    return any(number(commit, "t") <= at for at in joined)


def _check_not_continued(run: Evidence, commit: Line, newer: list[int]) -> None:
    """No commit continues one that was made after a newer term had formed."""
    if not newer:
        return
    children = [line for line in run.of("commit") if line["parent"] == commit["digest"]]
    readers = [line for line in run.of("restore") if line["commit"] == commit["key"]]
    if children or readers:
        by = f"term {(children + readers)[0]['term']}"
        raise Violated(f"{commit['key']} was made after term {newer[0]} had formed, and {by} continues it")


def durability(run: Evidence) -> str:
    """Every term continues from the newest commit published before it formed, unless that was damaged.

    Commits that a term passed over as damaged, or after such a commit, need not be found by later terms: their members
    hold what it continued from. A leader that froze while restoring, and applied nothing, may find commits replaced by
    a newer term's.
    """
    formed, commits, damaged = formed_at(run), run.of("commit"), _damaged_at(run)
    applied = {line["term"] for line in run.of("step")}
    times, keys = [number(commit, "t") for commit in commits], [str(commit["key"]) for commit in commits]
    places = {key: _place(key) for key in keys}
    passed = set[str]()
    for term, line in sorted(restored_at(run).items()):
        skipped = passed = passed | _rightly_skipped(line, damaged)
        before = keys[: bisect_left(times, formed[term])]
        known = (key for key in before if places[key][0] < term and key not in skipped)
        newest = max(known, key=places.__getitem__, default=None)
        is_late = term not in applied and any(t < number(line, "t") for other, t in formed.items() if other > term)
        if (
            newest is not None
            and not is_late
            and (line["commit"] is None or _place(str(line["commit"])) < _place(newest))
        ):
            raise Violated(f"term {term} continued from {line['commit']}, but {newest} was published before")
    return f"{len(commits)} commits published, none lost"


def _skipped(restore: Line) -> dict[str, str]:
    """Return the commits that a restore passed over, with reasons."""
    passed = [item for item in items(restore, "skipped") if isinstance(item, list) and len(item) > 1]
    return {str(item[0]): str(item[1]) for item in passed}


def _rightly_skipped(restore: Line, damaged: dict[str, float]) -> set[str]:
    """Return the commits that a restore may pass over: a late record precedes the damaged one.

    A commit that the fence names is in the store unless a fault deleted it.
    """
    reasons = {key: why for key, why in _skipped(restore).items() if not _is_absent(why) or key in damaged}
    newest_damaged = max((_place(key) for key, why in reasons.items() if _is_damage(why)), default=(0, 0))
    return {key for key, why in reasons.items() if "late record" not in why or _place(key) < newest_damaged}


def atomicity(run: Evidence) -> str:
    """An existing commit is intact: only commits whose files a fault damaged were passed over as damaged."""
    damaged = _damaged_at(run)
    formed, made_at = formed_at(run), _made_at(run)
    restores = run.of("restore")
    for line in restores:
        for item in items(line, "skipped"):
            assert isinstance(item, list), "a pair of key and reason"
            key, why = str(item[0]), str(item[1])
            # Commits of an abandoned world may be swept while they are made.
            was_left_behind = any(t < made_at.get(key, 0.0) for term, t in formed.items() if term > _place(key)[0])
            is_fallen_behind = line["commit"] is None or _place(str(line["commit"])) < _place(key)
            is_found_bad = is_fallen_behind if _is_absent(why) else _is_damage(why)
            if is_found_bad and not was_left_behind and damaged.get(key, math.inf) > number(line, "t"):
                raise Violated(f"term {line['term']} passed over {key}, which no fault had damaged: {why}")
    return f"{len(restores)} restores, no commit was found in part"


def heads(run: Evidence) -> str:
    """Every published commit is an ancestor of the end: only damage lets a job continue from another."""
    published, damaged = _published(run), _damaged_at(run)
    chain = {str(commit["key"]) for commit in _chain(run, published)}
    for line in run.of("commit"):
        if line["key"] not in chain and line["key"] not in damaged and not _is_made_twice(run, line):
            raise Violated(f"{line['key']} was published, no fault has damaged it, and the end does not continue it")
    return f"{len(chain)} commits lead to the end, and every published commit is one of them"


def _is_made_twice(run: Evidence, commit: Line) -> bool:
    """Return True if a leaving rank committed alone a step that rank 0 committed as well.

    Neither could know of the other's commit. A later world continued from either; if from rank 0's, the leaving rank's
    is then the newest commit there is.
    """
    place, worlds = _place(str(commit["key"])), formed_at(run)
    alone = [
        other.key
        for other in run.commits
        if other.fields is not None and _place(other.key)[0] not in worlds and _last_applied(other.fields) == place
    ]
    return any(
        (
            (line.get("applied_by"), line["step"]) == place
            and line["commit"] is not None
            and place < _place(str(line["commit"]))
            and _place(str(line["commit"]))[0] not in worlds
        )
        or (line["commit"] == commit["key"] and any(place < _place(key) < (line["term"], 0) for key in alone))
        for line in run.of("restore")
    )


def _last_applied(record: Line) -> tuple[object, object]:
    """Return the term that applied a commit's last step, and the step."""
    *_, last = items(record, "intervals")
    assert isinstance(last, dict), "an interval is a mapping"
    return last["term"], record["step"]


def _damaged_at(run: Evidence) -> dict[str, float]:
    """Return when faults first damaged commits, by key."""
    damaged: dict[str, float] = {}
    for fault in run.of("fault"):
        if kind_of(fault["kind"]).damages and fault.get("commit"):
            damaged.setdefault(f"{COMMITS}{fault['commit']}", number(fault, "t"))
    return damaged


def _made_at(run: Evidence) -> dict[str, float]:
    """Return when each commit was made: by its record, or by a history, which may be late."""
    recorded_at = {
        str(line["key"]): number({"created_at": line["t"], **line}, "created_at") for line in run.of("commit")
    }
    return recorded_at | {commit.key: number(commit.fields, "created_at") for commit in run.commits if commit.fields}


def _is_damage(why: str) -> bool:
    """Return True if a commit was passed over for its content, not its position."""
    return not any(place in why for place in ("late record", "does not continue", "fence names it"))


def _is_absent(why: str) -> bool:
    """Return True if a commit was passed over because the fence named it but the store lacked it."""
    return "fence names it" in why


def _place(key: str) -> tuple[int, int]:
    """Return the (term, step) in a commit's key, which orders commits."""
    term, step = key.removeprefix(COMMITS).removesuffix(".json").split("-")
    return int(term), int(step)
