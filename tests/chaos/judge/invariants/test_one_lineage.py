"""The chain of commits is followed past commits that retention deleted or that no history records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.judge.evidence.applied import branch_of, lineage_of
from chaos.judge.evidence.run_files import Commit, Evidence, Line
from chaos.judge.findings import Violated
from chaos.judge.invariants.one_lineage import _is_forgotten, _published, atomicity, durability, heads, lineage


def key(term: int, step: int) -> str:
    return f"commits/{term:08d}-{step:012d}.json"


def restored(term: int, step: int, commit: str | None) -> Line:
    return {"op": "restore", "t": 10.0 * term, "term": term, "rank": 0, "step": step, "commit": commit}


def committed(term: int, step: int, digest: str, parent: str | None) -> Line:
    where = {"term": term, "rank": 0, "step": step, "key": key(term, step)}
    return {"op": "commit", "t": 10.0 * term + step / 100, **where, "digest": digest, "parent": parent}


def test_before_a_deleted_commit_the_chain_continues_with_what_its_term_restored() -> None:
    """The newest commit before it does not count: it was damaged and skipped, and the steps would not grow.

    The publisher of step 20 died before recording it in its history; two terms continued from there, the second because
    the first one's commit was damaged; retention has since deleted the records.
    """
    lines = [
        restored(1, 0, None),
        committed(1, 10, "a", None),
        restored(2, 20, key(1, 20)),
        committed(2, 30, "c", "b"),
        committed(2, 40, "d", "c"),
        restored(3, 20, key(1, 20)),
        committed(3, 30, "e", "b"),
    ]
    verdict = lineage(Evidence(Path("drawn"), [lines], [], {}, None, None))
    assert verdict == "2 of 4 commits are one chain, intervals tile [0, 30)"


def test_an_unrecorded_commit_belongs_to_the_term_that_reached_its_step() -> None:
    """A process of term 1 committed alone, under term 3, and died; retention has since deleted the record.

    Term 2, which had started again before, applied nothing: the commit that term 4 reads is not term 2's.
    """

    def applied(term: int, step: int) -> Line:
        return {"op": "step", "t": 10.0 * term + step, "term": term, "rank": 0, "step": step}

    def formed(term: int, pid: int) -> Line:
        return {"op": "form", "t": 10.0 * term, "term": term, "rank": 0, "pid": pid}

    lines = [
        *(formed(1, 11), restored(1, 0, None), applied(1, 1)),
        *(formed(2, 12), restored(2, 0, None)),
        *(formed(4, 13), restored(4, 1, key(3, 1)), applied(4, 2)),
    ]
    run = Evidence(Path("drawn"), [lines], [], {}, {"step": 2}, None)
    assert [(step.step, step.term) for step in lineage_of(run)] == [(1, 1), (2, 4)]


def test_commits_before_a_damaged_one_are_passed_over_once() -> None:
    """The next term's members hold the resulting state, read no commit, and so record none."""
    late, why = key(2, 3), f"is no ancestor of {key(3, 3)}: a late record"
    first = restored(4, 1, key(1, 1)) | {"skipped": [[key(3, 3), "a file is missing"], [late, why]]}
    lines: list[Line] = [
        *(committed(1, 1, "a", None), committed(2, 3, "b", "a"), committed(3, 3, "c", "a")),
        *({"op": "form", "t": 10.0 * term + 5, "term": term, "rank": 0, "pid": term} for term in (4, 5)),
        *(first, restored(5, 2, key(1, 1)) | {"skipped": []}),
    ]
    assert durability(Evidence(Path("drawn"), [lines], [], {}, None, None)) == "3 commits published, none lost"
    first["skipped"] = [[key(3, 3), "a file is missing"]]
    with pytest.raises(Violated, match="term 4 continued from"):
        durability(Evidence(Path("drawn"), [lines], [], {}, None, None))


@pytest.mark.parametrize("law", [durability, atomicity, heads])
def test_a_named_head_may_be_missing_only_if_a_fault_deleted_it(law: Callable[[Evidence], str]) -> None:
    """A world that finds no record of the commit that etcd names has looked in the wrong place."""
    why = "the fence names it as head, but its record is not in the store"
    lines: list[Line] = [
        *(committed(1, 1, "a", None), committed(1, 3, "b", "a"), committed(2, 4, "c", "a")),
        *({"op": "form", "t": 10.0 * term, "term": term, "rank": 0, "pid": term} for term in (1, 2)),
        *(restored(1, 0, None) | {"skipped": []}, restored(2, 1, key(1, 1)) | {"skipped": [[key(1, 3), why]]}),
    ]
    with pytest.raises(Violated):
        law(Evidence(Path("drawn"), [lines], [], {}, None, None))
    deleted: Line = {"op": "fault", "t": 15.0, "kind": "delete_file", "commit": key(1, 3).removeprefix("commits/")}
    law(Evidence(Path("drawn"), [[*lines, deleted]], [], {}, None, None))


def test_a_world_continues_from_the_term_that_its_restore_names() -> None:
    """Two processes of an abandoned world bring its step back; all holders of the newer step died: the restore says so.

    They had been in a world that broke while the newer step was handed over, so no other process knew (storm 1937).
    """

    def lines_of(term: int, pids: list[int], step: int, applied_by: int | None, applied: list[int]) -> list[Line]:
        at = 10.0 * term
        return [
            *({"op": "form", "t": at, "term": term, "rank": rank, "pid": pid, "world": len(pids)}
              for rank, pid in enumerate(pids)),
            {"op": "restore", "t": at + 1, "term": term, "rank": 0, "step": step, "commit": None, "given_by": None,
             "applied_by": applied_by},
            *({"op": "step", "t": at + 1 + number, "term": term, "rank": 0, "step": number} for number in applied),
        ]  # fmt: skip

    lines = [
        *lines_of(57, [1, 2, 3], 0, None, [1]),
        *lines_of(59, [3, 4], 0, None, [1, 2]),
        *lines_of(61, [4, 1], 1, 59, []),
    ]
    for applied_by, branch in ((57, [(57, 0, 1)]), (59, [(59, 0, 1)])):
        last = lines_of(66, [1, 2], 1, applied_by, [2, 3])
        run = Evidence(Path("drawn"), [[*lines, *last]], [], {}, None, None)
        assert branch_of(run, 66, 3) == [*branch, (66, 1, 3)]


def test_a_deleted_parent_may_have_two_children() -> None:
    """Two processes committed alone from a commit that retention has deleted: both are newer than that."""

    def made(term: int, step: int, parent: str, parent_key: str, at: float) -> Commit:
        fields: Line = {"term": term, "step": step, "parent": parent, "parent_key": parent_key, "created_at": at}
        return Commit(f"commits/{term:08d}-{step:012d}.json", f"digest-{term}-{step}", fields)

    parent_key = "commits/00000011-000000000003.json"
    children = [made(69, 4, "p", parent_key, 551.0), made(70, 4, "p", parent_key, 551.1)]
    run = Evidence(Path("drawn"), [[]], children, {}, None, None)
    published = _published(run)
    assert all(_is_forgotten(run, published, line) for line in published.values())
    older = replace(run, commits=[made(5, 2, "q", "commits/00000004-000000000001.json", 48.0), *children])
    assert not _is_forgotten(older, _published(older), published["digest-70-4"])


@pytest.mark.parametrize(("step", "pins"), [(5, True), (6, False)])
def test_a_step_that_is_not_finite_pins_what_was_committed_before_it(step: int, pins: bool) -> None:
    """Retention keeps the pinned commit and may have deleted a younger parent; a step's own commit comes after it."""

    def made(step: int, parent: str, parent_key: str | None) -> Commit:
        fields: Line = {"term": 3, "step": step, "parent": parent, "parent_key": parent_key, "created_at": 10.0 + step}
        return Commit(key(3, step), f"digest-{step}", fields)

    left = [made(3, "", None), made(5, "digest-3", key(3, 3)), made(18, "digest-15", key(3, 15))]
    lines: list[Line] = [{"op": "nonfinite", "t": 14.0, "term": 3, "rank": 0, "step": at} for at in (step, 10)]
    run = Evidence(Path("drawn"), [lines], left, {}, None, None)
    published = _published(run)
    assert _is_forgotten(run, published, published["digest-18"]) is pins


@pytest.mark.parametrize(("applied_by", "restored_in", "is_fine"), [(1, 3, True), (9, 3, False), (1, 2, False)])
def test_a_later_world_may_go_on_from_either_of_two_commits_of_a_step(
    applied_by: int, restored_in: int, is_fine: bool
) -> None:
    """It may use rank 0's if the rank that committed alone knew of neither etcd's head nor the newest names.

    The other one is then the newest; it is not of another world's step, and the continuing world is newer than both.
    """
    alone: Line = {"term": 2, "step": 6, "parent": "a", "intervals": [{"lo": 0, "hi": 6, "term": applied_by}]}
    lines = [
        {"op": "form", "t": 10.0, "term": 1, "rank": 0},
        restored(1, 0, None),
        committed(1, 3, "a", None),
        committed(1, 6, "b", "a"),
        {"op": "form", "t": 30.0, "term": 3, "rank": 0},
        {**restored(restored_in, 6, key(1, 6)), "applied_by": 1},
    ]
    run = Evidence(Path("drawn"), [lines], [Commit(key(2, 6), "c", {**alone, "created_at": 20.0})], {}, None, None)
    if is_fine:
        assert heads(run).startswith("2 commits lead to the end")
        return
    with pytest.raises(Violated, match=f"{key(1, 6)} was published, no fault has damaged it"):
        heads(run)


@pytest.mark.parametrize(("applied_by", "others"), [(1, []), (9, []), (1, [2])])
def test_a_step_may_be_committed_twice_by_one_world(applied_by: int, others: list[int]) -> None:
    """Rank 0 commits it, and a rank that leaves meanwhile; a later world may not, nor one for another world's step."""
    formed: list[Line] = [{"op": "form", "t": 10.0 * term, "term": term, "rank": 0} for term in (1, *others, 3)]
    lines = [
        *formed,
        restored(1, 0, None),
        committed(1, 3, "a", None),
        {**restored(3, 3, key(2, 3)), "applied_by": applied_by},
        committed(3, 6, "c", "b"),
    ]
    run = Evidence(Path("drawn"), [lines], [], {}, None, None)
    if applied_by == 1 and not others:
        assert heads(run).startswith("1 commits lead to the end")
        return
    with pytest.raises(Violated, match=f"{key(1, 3)} was published, no fault has damaged it"):
        heads(run)
