"""Invariant of commit records: each agrees with histories, configuration and logged values.

A record's seal covers only itself, so a forger can recompute it. But its facts are known from elsewhere: its
publisher's line, the job's other records, the terms that applied its steps, and the validation whose metrics it has.
"""

from __future__ import annotations

import hashlib
import json
import math
import re

from chaos.judge.evidence.applied import branch_of, formed_at, lineage_of, restored_at, shape_of
from chaos.judge.evidence.recovery_cost import seats_of
from chaos.judge.evidence.run_files import Commit, Evidence, Line, number, once, part, whole
from chaos.judge.evidence.spells import spells_of
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants.exactly_once.agreement import differ
from chaos.judge.invariants.written.recomputed import check_improvement, check_metrics, check_place, check_ranges
from chaos.judge.job_shape import MixedShape
from chaos.scenario.kinds import ends_processes, spares_others

_OF_THE_LINE = ("term", "step", "parent", "weights_sha256")
_OF_THE_JOB = ("format", "config_digest", "manifest_digest", "rng", "order", "int_keyed", "empty")
"""Fields that are equal in all records of a job."""
_NOT_YET = {"skipped_steps", "fast_steps", "improvement"}
"""Fields that are omitted if empty."""
_KEY = re.compile(r"commits/[0-9]{8,}-[0-9]{12,}\.json")
_STAMPS_S = 1.0
_CUT = "train/truncated"


def records(run: Evidence) -> str:
    """Every commit record agrees with its line, other records, configuration and logged values."""
    found = sorted((commit for commit in run.commits if commit.fields is not None), key=lambda commit: commit.key)
    if not found:
        raise Unknown("there is no commit record that can be read")
    lines = {str(line["key"]): line for line in run.of("commit")}
    digests = {str(key): line["digest"] for key, line in lines.items()} | {x.key: x.digest for x in found}
    for commit in found:
        fields = commit.fields or {}
        _check_kin(commit, found[0], fields, found[0].fields or {})
        if commit.key in lines:
            _check_line(commit.key, fields, lines[commit.key])
        elif not may_lack_a_line(run, whole(fields, "term"), number(fields, "created_at")):
            raise Violated(f"{commit.key} is there, its publisher lived on, and no line says that it was published")
        _check_parent(commit, fields, digests)
        _check_job(run, commit.key, fields)
        _check_terms(run, commit.key, fields)
        _check_cut(run, commit.key, fields)
        check_place(run, commit.key, fields)
        check_improvement(run, commit.key, fields)
    num_validated = sum(check_metrics(run, commit.key, commit.fields or {}) for commit in found)
    validated = f", {num_validated} have the metrics of a logged validation" if num_validated else ""
    with_lines = sum(commit.key in lines for commit in found)
    return f"{len(found)} records are of one job and say what its histories say, {with_lines} with lines{validated}"


def _check_kin(commit: Commit, first: Commit, fields: Line, others: Line) -> None:
    """Records of one format have the same fields, and records of one job the same digests, numbers and order."""
    if fields.get("format") == others.get("format") and (odd := sorted((fields.keys() ^ others.keys()) - _NOT_YET)):
        who, whom = (commit, first) if odd[0] in fields else (first, commit)
        raise Violated(f"{who.key} says {odd[0]}, {whom.key} does not")
    for name in _OF_THE_JOB[1:]:
        if name in fields and name in others and differ(fields[name], others[name]):
            raise Violated(f"{commit.key} says {name} {fields[name]}, {first.key} says {others[name]}")


def _check_line(key: str, fields: Line, line: Line) -> None:
    for name in _OF_THE_LINE:
        if name in fields and name in line and differ(fields[name], line[name]):
            raise Violated(f"{key} says {name} {fields[name]}, the line of its publication says {line[name]}")
    at = number(line, "t")
    least, most = at - number({"seconds": math.inf, **line}, "seconds") - _STAMPS_S, at + _STAMPS_S
    if "created_at" in line:
        least, most = (number(line, "created_at") + sign * _STAMPS_S for sign in (-1, 1))
    if not least <= number(fields, "created_at") <= most:
        raise Violated(f"{key} says created_at {fields['created_at']}, by its line it is {least:.1f} to {most:.1f}")


def _check_parent(commit: Commit, fields: Line, digests: dict[str, object]) -> None:
    """The parent key belongs to the commit with the parent digest; both or neither are set."""
    if "parent_key" not in fields:
        return
    parent, key = fields["parent"], fields["parent_key"]
    known = next((other for other, digest in digests.items() if digest == parent), key)
    is_odd = (parent is None) != (key is None) or known != key or digests.get(str(key), parent) != parent
    if is_odd or (key is not None and not _is_before(str(key), commit.key)):
        raise Violated(f"{commit.key} names the parent {str(parent)[:12]} as {key}")


def _is_before(key: str, other: str) -> bool:
    """Return True if `key` is a commit's, and not after `other`."""
    return _KEY.fullmatch(key) is not None and (len(key), key) <= (len(other), other)


def _check_job(run: Evidence, key: str, fields: Line) -> None:
    """Seed, order, digest and world of a record follow from configuration, manifest and histories."""
    config, shape = run.config, shape_of(run)
    seed = (part(config, "run") if "run" in config else {}).get("seed")
    due: Line = {}
    if "order" in fields and not isinstance(shape, MixedShape):
        due = {"num_samples": shape.rows, "num_lanes": shape.num_lanes, "micro_batch": shape.micro_batch}
        for name, value in due.items():
            if differ(part(fields, "order").get(name), value):
                raise Violated(f"{key}: order.{name} is {part(fields, 'order').get(name)}, the job has {value}")
    if seed is not None and "rng" in fields and differ(part(fields, "rng").get("seed"), seed):
        raise Violated(f"{key}: rng.seed is {part(fields, 'rng').get('seed')}, config.yaml says run.seed {seed}")
    if "config_digest" in fields and (digest := identity_of(config)) not in (None, fields["config_digest"]):
        named = str(fields["config_digest"])[:12]
        raise Violated(f"{key} is of a configuration with digest {named}, config.yaml has {str(digest)[:12]}")
    seats = seats_of(run).get(whole(fields, "term"))
    if seats is not None and "world_size" in fields and fields["world_size"] != seats:
        raise Violated(f"{key} says world_size {fields['world_size']}, the world of its term had {seats}")


def identity_of(config: Line) -> str | None:
    """Return the digest of a job's fixed settings (docs/formats.md, Commits); None if some are missing."""
    run, data = (part(config, name) if isinstance(config.get(name), dict) else {} for name in ("run", "data"))
    if "seed" not in run or "block_row_groups" not in data or data.get("mixture"):
        return None
    fixed = [run["seed"], config.get("task"), config.get("batch"), data["block_row_groups"]]
    fixed += ["length_bucketing"] if data.get("length_bucketing") else []
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def _check_terms(run: Evidence, key: str, fields: Line) -> None:
    """A record of the lineage names for each step the term that applied it by the histories."""
    lineage = lineage_of(run)
    term, step = whole(fields, "term"), whole(fields, "step")
    if not 0 < step <= len(lineage) or lineage[step - 1].term != term or term not in restored_at(run):
        return
    due = [{"term": by, "lo": lo, "hi": hi} for by, lo, hi in branch_of(run, term, step)]
    check_ranges(run, key, fields)
    if differ(fields["intervals"], due):
        raise Violated(f"{key} credits its steps as {fields['intervals']}, by the histories it is {due}")


def _check_cut(run: Evidence, key: str, fields: Line) -> None:
    """The truncated rows at a record's step equal its term's logged value."""
    if "account" not in fields:
        return
    for line in (run.metrics or {}).get(whole(fields, "term"), ()):
        values = part(line, "values") if "values" in line else {}
        if line.get("step") == fields["step"] and values.get(_CUT, cut := part(fields, "account")["truncated"]) != cut:
            raise Violated(f"{key} says that {cut} rows were cut, {values[_CUT]} were logged")


def may_lack_a_line(run: Evidence, term: int, at: float) -> bool:
    """Return True if a term may have published a commit at this time without a line of it.

    A publisher that lives on, in an hour with no faults but kills, has written a line for every commit that it
    made.
    """
    return term not in formed_at(run) or _last_of_rank_0(run).get(term, at) <= at or is_disturbed(run, at, at)


def is_disturbed(run: Evidence, since: float, until: float) -> bool:
    """Return True if a fault in an interval did more than end processes or affect one node: answers may be lost."""
    spells = spells_of(run)
    lines: list[Line] = [
        line
        for line, begin, end in zip(spells.lines, spells.begins, spells.ends, strict=True)
        if begin <= until and end >= since
    ]
    return any(not ends_processes(line["kind"]) and not spares_others(line["kind"]) for line in lines)


@once
def _last_of_rank_0(run: Evidence) -> dict[int, float]:
    """Return when each term's rank 0 last wrote a line that follows those of all earlier commits."""
    last: dict[int, float] = {}
    for line in [*run.of("commit"), *run.of("leave"), *run.of("end")]:
        if line.get("rank") == 0:
            last[whole(line, "term")] = max(last.get(whole(line, "term"), 0.0), number(line, "t"))
    return last
