"""The judge: pure functions from evidence to findings, one invariant each, importing nothing from the trainer.

A finding is true, false with a witness in words, or unknown. Unknown is what an invariant is that nothing put to the
test: a run without a fault proves no recovery, a death that no fault explains proves nothing, a check that throws has
not checked. A run is valid when every finding is true.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from chaos.evidence import Evidence, Line, number, whole

Truth = Literal["true", "false", "unknown"]
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Finding:
    """What one invariant came to, and why in words."""

    invariant: str
    truth: Truth
    why: str


@dataclass(frozen=True, slots=True)
class Applied:
    """One lineage's steps: which term applied each, and every rank's line of it."""

    step: int
    term: int
    lines: tuple[Line, ...]


class Violated(Exception):  # noqa: N818 - a finding, not a failure of the checker
    """An invariant is false; the message is its witness."""


class Unknown(Exception):  # noqa: N818 - as above
    """An invariant was not put to the test."""


def judge(run: Evidence, reference: Evidence | None = None) -> list[Finding]:
    """Return every invariant's finding on a run, against the run of the same job without faults if there is one."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("finished", lambda: finished(run)),
        ("faults", lambda: faults_explain_terms(run)),
        ("agreement", lambda: agreement(run)),
        ("partition", lambda: partition(run)),
        ("coverage", lambda: coverage(run)),
        ("lineage", lambda: lineage(run)),
        ("fencing", lambda: fencing(run)),
        ("durability", lambda: durability(run)),
        ("cleanliness", lambda: cleanliness(run)),
    ]
    if run.witness is not None:
        checks.append(("witness", lambda: witness(run)))
    if reference is not None:
        checks.append(("hash", lambda: same_weights(run, reference)))
        checks.append(("metrics", lambda: same_metrics(run, reference)))
    return [_find(name, check) for name, check in checks]


def _find(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, "true", check())
    except Violated as violation:
        return Finding(name, "false", str(violation))
    except Unknown as unknown:
        return Finding(name, "unknown", str(unknown))
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        return Finding(name, "unknown", f"the check could not be made: {type(error).__name__}: {error}")


def lineage_of(run: Evidence) -> list[Applied]:
    """Return the steps that the final weights are made of: every term's, from where it restored to the next restore."""
    result = _result(run)
    restored = {whole(line, "term"): whole(line, "step") for line in run.of("restore")}
    by_term: dict[int, dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in run.of("step"):
        by_term[whole(line, "term")][whole(line, "step")].append(line)
    steps: list[Applied] = []
    until = whole(result, "step")
    for term in sorted(restored, reverse=True):
        if restored[term] < until:
            steps += [
                Applied(step, term, tuple(by_term[term].get(step, ()))) for step in range(until, restored[term], -1)
            ]
            until = restored[term]
    return steps[::-1]


def finished(run: Evidence) -> str:
    """The job came to its end and said so."""
    result = _result(run)
    if result["status"] != "done":
        raise Violated(f"the job ended as {result['status']} at step {result['step']}")
    return f"done at step {result['step']} in term {result['term']}"


def faults_explain_terms(run: Evidence) -> str:
    """Every new term has a fault that explains it; without a fault, nothing was put to the test."""
    faults = run.of("fault")
    if not faults:
        raise Unknown("no fault was injected, so recovery was not put to the test")
    formed = _formed_at(run)
    for before, after in zip(list(formed)[:-1], list(formed)[1:], strict=True):
        if not any(formed[before] <= number(fault, "t") <= formed[after] for fault in faults):
            raise Unknown(f"term {after} was formed, but no fault between its forming and term {before}'s explains it")
    if len(formed) < 2:
        raise Unknown(f"{len(faults)} faults were injected, but the world never changed")
    return f"{len(faults)} faults, {len(formed)} terms, each new one explained by a fault"


def agreement(run: Evidence) -> str:
    """All ranks of a term apply the same samples in a step, and every rank applies every step before the next."""
    seen: dict[tuple[int, int], Line] = {}
    last: dict[tuple[int, int], int] = {}
    for line in run.of("step"):
        term, step, rank = whole(line, "term"), whole(line, "step"), whole(line, "rank")
        first = seen.setdefault((term, step), line)
        for key in ("epoch", "lo", "hi", "num_samples", "world", "loss"):
            if first.get(key) != line.get(key):
                where = f"term {term}, step {step}"
                raise Violated(f"{where}: rank {rank} has {key} {line.get(key)}, another {first.get(key)}")
        before = last.get((term, rank))
        if before is not None and step != before + 1:
            raise Violated(f"term {term}: rank {rank} applied step {step} after step {before}")
        last[term, rank] = step
    if not seen:
        raise Unknown("no step was recorded")
    return f"{len(seen)} steps, all ranks agree on each"


def partition(run: Evidence) -> str:
    """In every applied step, every lane belongs to exactly one rank of the world."""
    steps: dict[tuple[int, int], list[Line]] = defaultdict(list)
    for line in run.of("step"):
        steps[whole(line, "term"), whole(line, "step")].append(line)
    num_lanes = max(_lanes(line)[1] for lines in steps.values() for line in lines)
    newest = {term: max(step for other, step in steps if other == term) for term, _ in steps}
    for (term, step), lines in steps.items():
        counts = Counter(lane for line in lines for lane in range(*_lanes(line)))
        wrong = [lane for lane in range(num_lanes) if counts[lane] != 1]
        # A rank that was killed before it wrote its last line leaves a hole at its term's newest step only.
        is_torn = step == newest[term] and all(counts[lane] == 0 for lane in wrong) and len(newest) > 1
        if wrong and not is_torn:
            raise Violated(f"term {term}, step {step}: lane {wrong[0]} was computed {counts[wrong[0]]} times")
    return f"{len(steps)} applied steps, {num_lanes} lanes, each lane once in each"


def coverage(run: Evidence) -> str:
    """Every sample of every epoch is in the final weights exactly once: by intervals, by counts, and by sums."""
    result = _result(run)
    least, most = coverage_counts(run)
    if (least, most) != (1, 1):
        raise Violated(f"a sample was applied {least if least != 1 else most} times in one epoch; {_where(run)}")
    rows, epochs = whole(result, "num_samples"), whole(result, "epochs")
    total = sum(whole(applied.lines[0], "num_samples") for applied in lineage_of(run))
    sums = result["coverage"]
    if not isinstance(sums, dict):
        raise TypeError("the result holds no coverage sums")
    if total != whole(sums, "count"):
        raise Violated(f"the histories count {total} applied samples, the coverage sums {sums['count']}")
    if epochs == 0 or total != rows * epochs:
        raise Unknown(f"{total} samples were applied, the job did not end at an epoch's end ({rows} rows)")
    expected = closed_form(rows, epochs)
    if (sums["sum_a"], sums["sum_b"]) != expected:
        raise Violated(f"the coverage sums after {epochs} epochs of {rows} rows are not the closed form's")
    return f"{rows} samples, {epochs} epochs, each exactly once"


def coverage_counts(run: Evidence) -> tuple[int, int]:
    """Return how often samples were applied in an epoch, at least and at most: by the witness, or by the lineage."""
    result = _result(run)
    if run.witness is not None:
        epochs = max(1, whole(result, "epochs"))
        least, most = int(run.witness.min()), int(run.witness.max())
        return (1, 1) if least == most == epochs else (least // epochs, -(-most // epochs))
    counts = _counts(run)
    return min(int(count.min()) for count in counts.values()), max(int(count.max()) for count in counts.values())


def lineage(run: Evidence) -> str:
    """The commits are one chain: each names its parent's digest, and the terms' intervals tile [0, step)."""
    known = {digest: record for _, digest, record in run.commits}
    if not known:
        raise Violated("there is no commit")
    oldest = min(whole(record, "step") for record in known.values())
    for key, _, record in run.commits:
        parent = record["parent"]
        if parent is None and whole(record, "step") > 0 and _first_lo(record) != 0:
            raise Violated(f"{key} has no parent, but does not begin at step 0")
        if (
            parent is not None
            and parent not in known
            and whole(record, "step") != oldest
            and not _is_pruned(record, oldest)
        ):
            raise Violated(f"{key} names a parent {str(parent)[:12]} that no commit has")
        place = 0
        for interval in _intervals(record):
            if whole(interval, "lo") != place:
                kind = "gap" if whole(interval, "lo") > place else "overlap"
                raise Violated(f"{key}: {kind} between step {place} and step {interval['lo']}")
            place = whole(interval, "hi")
        if place != whole(record, "step"):
            raise Violated(f"{key}: its intervals end at step {place}, it is of step {record['step']}")
    return f"{len(known)} commits, one chain, intervals tile [0, {max(whole(r, 'step') for r in known.values())})"


def fencing(run: Evidence) -> str:
    """No commit continues one of a higher term, no two worlds publish in one term, and terms grow."""
    by_digest = {digest: record for _, digest, record in run.commits}
    for key, _, record in run.commits:
        parent = by_digest.get(str(record["parent"]))
        if parent is not None and whole(parent, "term") > whole(record, "term"):
            raise Violated(f"{key} of term {record['term']} continues a commit of term {parent['term']}")
    formed = _formed_at(run)
    terms = list(formed)
    if terms != sorted(terms):
        raise Violated(f"worlds were formed in the order of terms {terms}")
    for commit in run.of("commit"):
        later = [term for term in terms if term > whole(commit, "term") and formed[term] < number(commit, "t")]
        restored = [line for line in run.of("restore") if whole(line, "term") in later]
        if any(line["commit"] == commit["key"] for line in restored):
            raise Violated(f"{commit['key']} was published after term {later[0]} had formed, and that term restored it")
    return f"terms {terms[0]} to {terms[-1]}, none extended by an older one"


def durability(run: Evidence) -> str:
    """Every new term goes on from the newest commit that was published before it formed."""
    formed = _formed_at(run)
    commits = run.of("commit")
    for line in run.of("restore"):
        term = whole(line, "term")
        before = [commit for commit in commits if number(commit, "t") < formed[term] and whole(commit, "term") < term]
        newest = max((whole(commit, "step") for commit in before), default=0)
        if whole(line, "step") < newest:
            raise Violated(f"term {term} went on from step {line['step']}, but step {newest} was committed before")
    return f"{len(commits)} commits published, none lost"


def cleanliness(run: Evidence) -> str:
    """No process of the job outlived it."""
    ends = run.of("clean")
    if not ends:
        raise Unknown("nobody looked for processes that outlived the job")
    orphans = ends[-1]["orphans"]
    if orphans:
        raise Violated(f"processes {orphans} outlived the job")
    return "no process outlived the job"


def witness(run: Evidence) -> str:
    """The trained weights of the witness count every sample once an epoch."""
    assert run.witness is not None, "only called with a witness"
    epochs = whole(_result(run), "epochs")
    wrong = np.flatnonzero(run.witness != epochs)
    if wrong.size:
        sample = int(wrong[0])
        raise Violated(
            f"sample {sample} was applied {int(run.witness[sample])} times in {epochs} epochs, and so were "
            f"{wrong.size - 1} others not {epochs} times"
        )
    return f"{run.witness.size} weights, each exactly {epochs}"


def same_weights(run: Evidence, reference: Evidence) -> str:
    """The final weights have the bits of the run without faults."""
    _check_reference(run, reference)
    ours, theirs = _result(run)["weights_sha256"], _result(reference)["weights_sha256"]
    if ours != theirs:
        raise Violated(f"the weights' SHA-256 is {str(ours)[:16]}, without faults it is {str(theirs)[:16]}")
    return f"sha256 {str(ours)[:16]} in both runs"


def same_metrics(run: Evidence, reference: Evidence) -> str:
    """The last validation gave the same numbers as in the run without faults."""
    ours, theirs = _result(run)["metrics"], _result(reference)["metrics"]
    if ours != theirs:
        raise Violated(f"validation gave {ours}, without faults {theirs}")
    return "validation metrics equal in both runs"


def closed_form(rows: int, epochs: int) -> tuple[int, int]:
    """Return the two coverage sums of `epochs` whole epochs, computed here from their definition (docs/formats.md)."""
    ids = np.arange(rows, dtype=np.uint64)
    salt_a, salt_b = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
    sum_a = int(_mix(ids + salt_a).sum(dtype=np.uint64))
    sum_b = int(_mix(_mix(ids ^ salt_b) + salt_b).sum(dtype=np.uint64))
    return sum_a * epochs & _MASK, sum_b * epochs & _MASK


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _counts(run: Evidence) -> dict[int, npt.NDArray[np.int64]]:
    """Count, for every epoch, how often each (offset, lane) is in the lineage; shape (offsets, lanes)."""
    steps = lineage_of(run)
    lines = [line for applied in steps for line in applied.lines]
    num_lanes = max(_lanes(line)[1] for line in lines)
    length = max(whole(line, "hi") for line in lines)
    last = max((whole(line, "epoch"), whole(line, "hi")) for line in lines)
    counts: dict[int, npt.NDArray[np.int64]] = {}
    for applied in steps:
        if not applied.lines:
            raise Violated(f"step {applied.step} was restored over, but no rank of term {applied.term} applied it")
        for line in _complete(applied.lines, num_lanes):
            size = last[1] if whole(line, "epoch") == last[0] else length
            count = counts.setdefault(whole(line, "epoch"), np.zeros((size, num_lanes), dtype=np.int64))
            count[whole(line, "lo") : whole(line, "hi"), slice(*_lanes(line))] += 1
    return counts


def _complete(lines: tuple[Line, ...], num_lanes: int) -> Iterator[Line]:
    """Yield a step's lines, and one more for lanes of ranks that died before they could write theirs.

    A rank that has applied a step proves that the reduction of all lanes was complete.
    """
    yield from lines
    held = sorted(_lanes(line) for line in lines)
    place = 0
    for lo, hi in [*held, (num_lanes, num_lanes)]:
        if lo > place and whole(lines[0], "world") > len(lines):
            yield {**lines[0], "lanes": [place, lo]}
        place = max(place, hi)


def _where(run: Evidence) -> str:
    if run.witness is not None:
        wrong = np.flatnonzero(run.witness != max(1, whole(_result(run), "epochs")))
        return f"sample {int(wrong[0])}" if wrong.size else "the witness"
    for epoch, count in _counts(run).items():
        places = np.argwhere(count != 1)
        if places.size:
            offset, lane = (int(place) for place in places[0])
            return f"epoch {epoch}, lane {lane}, offset {offset}: {int(count[offset, lane])} times"
    return "nowhere"


def _check_reference(run: Evidence, reference: Evidence) -> None:
    if reference.of("fault") or not reference.of("form"):
        raise Unknown("the reference had faults itself, or no history of its own")
    if reference.folder.resolve() == run.folder.resolve():
        raise Unknown("the reference is the run itself")


def _formed_at(run: Evidence) -> dict[int, float]:
    """Return when each term's world had formed (its first rank's line), in the order of time."""
    formed: dict[int, float] = {}
    for line in run.of("form"):
        formed.setdefault(whole(line, "term"), number(line, "t"))
    if not formed:
        raise Unknown("no world was formed")
    return formed


def _lanes(line: Line) -> tuple[int, int]:
    lanes = line["lanes"]
    if not isinstance(lanes, list):
        raise TypeError(f"no lanes in {line}")
    return int(lanes[0]), int(lanes[1])


def _intervals(record: Line) -> list[Line]:
    intervals = record["intervals"]
    if not isinstance(intervals, list):
        raise TypeError("a record without intervals")
    return intervals


def _first_lo(record: Line) -> int:
    return whole(_intervals(record)[0], "lo")


def _is_pruned(record: Line, oldest: int) -> bool:
    """Say whether a missing parent may have been deleted by retention: it would be older than all that are kept."""
    key = record["parent_key"]
    return isinstance(key, str) and int(key.removesuffix(".json").rpartition("-")[2]) < oldest


def _result(run: Evidence) -> Line:
    if run.result is None:
        raise Violated("the job left no result.json: it did not come to its end")
    return run.result
