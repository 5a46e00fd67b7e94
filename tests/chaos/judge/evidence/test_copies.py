"""A shard is lost only if all nodes that hold it are; then a world begins with the newest commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.judge.evidence.copies import is_begun_anew
from chaos.judge.evidence.run_files import Evidence, Line
from chaos.judge.findings import Violated
from chaos.judge.invariants.rollbacks import copies, is_sharded
from chaos.judge.invariants.whole_run import check_kept

NODES = {7: 0, 8: 0, 9: 1, 10: 1, 11: 2, 12: 2}
"""Three nodes of two processes each."""


def a_world(t: float, term: int, pids: list[int], step: int, *, size: int = 0, **said: object) -> list[Line]:
    """Return the lines of a world whose members have all restored a step, and applied another one."""
    lines: list[Line] = []
    for rank, pid in enumerate(pids):
        place: Line = {"term": term, "rank": rank}
        lines += [
            {"op": "form", "t": t, "pid": pid, "world": size or len(pids), **place},
            {"op": "restore", "t": t + 0.1, "step": step, **place, **said},
            {"op": "step", "t": t + 0.2, "step": step + 1, **place},
        ]
    return lines


def evidence_of(*lines: list[Line], num_copies: int | None = 2, cell: int = 1, context: int = 1) -> Evidence:
    nodes = [{"op": "node", "t": 0.0, "node": node, "pids": [pid]} for pid, node in NODES.items()]
    parallel = {"shards": "none" if num_copies is None else "optimizer", "copies": num_copies or 2}
    parallel |= {"tensor": cell, "context": context}
    return Evidence(
        Path("drawn"), [[*nodes, *(x for some in lines for x in some)]], [], {"parallel": parallel}, None, None
    )


ALL = list(NODES)


def test_it_takes_as_many_nodes_as_there_are_copies() -> None:
    """Two processes of one node are one loss; of two nodes, two."""
    first = a_world(1.0, 1, ALL, 0)
    lawful = evidence_of(first, a_world(2.0, 2, [9, 11, 12], 0, lost=3))
    assert copies(lawful).startswith("2 copies; 1 worlds had lost shards")
    check_kept(lawful)
    unlawful = evidence_of(first, a_world(2.0, 2, [9, 10, 11, 12], 0, lost=3))
    with pytest.raises(Violated, match=r"1 nodes had left .* with 2 copies it takes 2"):
        copies(unlawful)
    copies(evidence_of(first, a_world(2.0, 2, [9, 10, 11, 12], 0, lost=3), num_copies=1))


def test_a_loss_may_be_told_again_until_a_step_is_applied() -> None:
    """A member that was away returns with a part of the abandoned state: an old loss. After a step it is a new one."""
    first, lost = a_world(1.0, 1, ALL, 0), a_world(2.0, 2, [9, 10], 0, lost=3)
    again = a_world(3.0, 3, [9, 10, 11, 12], 0, lost=2)
    without_steps = [line for line in lost if line["op"] != "step"]
    assert copies(evidence_of(first, without_steps, again)).startswith("2 copies; 2 worlds had lost shards")
    with pytest.raises(Violated, match="term 3 found 2 shards of the state lost, and 0 nodes"):
        copies(evidence_of(first, lost, again))


def test_what_is_given_up_without_a_loss_stays_a_violation() -> None:
    """The number of lost processes does not matter: a world that reports no loss began at the wrong step."""
    run = evidence_of(a_world(1.0, 1, ALL, 0), a_world(2.0, 2, [9], 0))
    with pytest.raises(Violated, match="step 1 was applied in term 1, of which process 9 lives on"):
        check_kept(run)


def test_losses_count_from_the_last_world_that_trained() -> None:
    """In a world that never began members receive no new state, and their deaths count as well."""
    broken = [line for line in a_world(2.0, 2, [9, 10, 11, 12], 1) if line["op"] == "form"]
    copies(evidence_of(a_world(1.0, 1, ALL, 0), broken, a_world(3.0, 3, [11, 12], 0, lost=1)))
    trained = a_world(2.0, 2, [9, 10, 11, 12], 1)
    with pytest.raises(Violated, match="1 nodes had left"):
        copies(evidence_of(a_world(1.0, 1, ALL, 0), trained, a_world(3.0, 3, [11, 12], 0, lost=1)))
    unrecorded = a_world(2.0, 2, [9, 10, 11, 12], 1, size=5)
    copies(evidence_of(a_world(1.0, 1, ALL, 0), unrecorded, a_world(3.0, 3, [11, 12], 0, lost=1)))


def test_whoever_leaves_when_asked_explains_no_loss() -> None:
    """It has committed the shards that only it held; with another loss it counts, as both may have held a shard."""
    first, after = a_world(1.0, 1, ALL, 0), a_world(2.0, 2, [9, 10, 11, 12], 0, lost=3)
    left: list[Line] = [{"op": "leave", "t": 1.5, "term": 1, "rank": rank, "step": 1} for rank in (0, 1)]
    copies(evidence_of(first, left[:1], after, num_copies=1))
    with pytest.raises(Violated, match="term 2 found 3 shards of the state lost, and 0 nodes had left"):
        copies(evidence_of(first, left, after, num_copies=1))
    later = [{**line, "t": 2.5, "term": 2} for line in left]
    assert copies(evidence_of(first, a_world(2.0, 2, [9, 11], 0, lost=3), later)), "it left after the loss"


@pytest.mark.parametrize("step", [0, 1])
def test_whoever_leaves_before_the_first_step_takes_its_share_along(step: int) -> None:
    """There is nothing to commit yet, so all others start again."""
    first = [line for line in a_world(1.0, 1, ALL, 0) if line["op"] != "step"]
    left: list[Line] = [{"op": "leave", "t": 1.5, "term": 1, "rank": rank, "step": step} for rank in (0, 1)]
    ends = [line for line in a_world(2.0, 2, [9, 10, 11, 12], 0) if line["op"] == "form"]
    assert is_begun_anew(evidence_of(first, left, ends, num_copies=1), 2) == (step == 0)


def test_who_holds_nothing_is_no_holder() -> None:
    """If only the ranks of one node can write, they hold all copies."""
    lines = a_world(1.0, 1, ALL, 0)
    for line in lines:
        if line["op"] == "restore" and line["rank"] > 1:
            line["holds_nothing"] = True
    after = a_world(2.0, 2, [9, 10, 11, 12], 0, lost=6)
    copies(evidence_of(lines, after))
    with pytest.raises(Violated, match="1 nodes had left"):  # all nodes held something
        copies(evidence_of(a_world(1.0, 1, ALL, 0), after))


def test_a_world_without_any_commit_ends_as_a_whole() -> None:
    """All of its processes restart; fewer losses than copies do not explain that."""
    ends = [line for line in a_world(2.0, 2, [11, 12], 0) if line["op"] == "form"]
    assert is_begun_anew(evidence_of(a_world(1.0, 1, ALL, 0), ends), 2)
    commit: Line = {"op": "commit", "t": 1.5, "term": 1, "rank": 0, "step": 1}
    assert not is_begun_anew(evidence_of(a_world(1.0, 1, ALL, 0), [commit], ends), 2)
    assert not is_begun_anew(evidence_of(a_world(1.0, 1, [9, 10, 11, 12], 0), ends), 2)
    assert not is_begun_anew(evidence_of(a_world(1.0, 1, ALL, 0), ends, num_copies=None), 2)
    again = a_world(3.0, 3, [10, 11, 12], 0)
    check_kept(evidence_of(a_world(1.0, 1, ALL, 0), ends, again))
    with pytest.raises(Violated, match=r"step 1 was applied in term 1, of which process 1[012] lives on"):
        check_kept(evidence_of(a_world(1.0, 1, ALL, 0), again))


def test_a_job_whose_state_is_whole_is_not_put_to_the_test() -> None:
    assert is_sharded(evidence_of()) and not is_sharded(evidence_of(num_copies=None))


@pytest.mark.parametrize(
    ("left", "is_lawful"),
    [([8, 10, 12], True), ([7, 8], False), ([8, 9, 11], False), ([7, 10, 12], False)],
    ids=["place 0 of all", "a cell lives", "a place 0 lives on in another cell", "place 1, too, is held"],
)
def test_a_part_is_lost_once_every_cell_has_lost_its_place(left: list[int], is_lawful: bool) -> None:
    """The number of lost processes does not matter: ranks of one place hold the same part, in any cell."""
    run = evidence_of(a_world(1.0, 1, ALL, 0), a_world(2.0, 2, [*left, 90], 0, lost=1), num_copies=None, cell=2)
    assert is_sharded(run)
    if is_lawful:
        assert copies(run).startswith("cells of 2 ranks; 1 worlds")
    else:
        with pytest.raises(Violated, match=r"at most [12] of 3 holders of one part were gone"):
            copies(run)


@pytest.mark.parametrize(
    ("left", "num_copies", "is_lawful"),
    [
        ([8, 10, 11, 12], 2, True),
        ([8, 9, 10, 11, 12], 2, False),
        ([8, 9, 10, 11, 12], 1, True),
        ([8, 9, 11, 12], 2, False),
    ],
    ids=["two of place 0", "one of two holders", "the only holder", "one of each place"],
)
def test_a_share_of_a_part_is_lost_with_as_many_of_its_place_as_there_are_copies(
    left: list[int], num_copies: int, is_lawful: bool
) -> None:
    """Ranks of one place hold shards of one part: the others of a cell hold none of it."""
    after = a_world(2.0, 2, [*left, 90], 0, lost=1)
    run = evidence_of(a_world(1.0, 1, ALL, 0), after, num_copies=num_copies, cell=2)
    if is_lawful:
        assert copies(run).startswith(f"cells of 2 ranks with {num_copies} copies; 1 worlds")
    else:
        with pytest.raises(Violated, match="at most 1 of 2 holders of one part were gone"):
            copies(run)


@pytest.mark.parametrize(
    ("num_cells", "dead", "is_lawful"),
    [(2, [0, 5], True), (2, [0, 1], False), (2, [0, 6], False), (1, [2, 3], True), (1, [2], False)],
    ids=["of two cells", "of one of two cells", "of two parts", "both of the only cell", "one of the only cell"],
)
def test_copies_among_ranks_with_other_tokens_are_of_different_cells(
    num_cells: int, dead: list[int], is_lawful: bool
) -> None:
    """This needs several cells: of two tensor ranks per cell, two hold each part."""
    pids = list(range(100, 100 + 4 * num_cells))
    left = [pid for rank, pid in enumerate(pids) if rank not in dead]
    run = evidence_of(a_world(1.0, 1, pids, 0), a_world(2.0, 2, left, 0, lost=1), cell=2, context=2)
    if is_lawful:
        assert copies(run).startswith("cells of 4 ranks with 2 copies; 1 worlds")
    else:
        with pytest.raises(Violated, match="at most 1 of 2 holders of one part were gone"):
            copies(run)


def test_who_held_nothing_yet_is_no_holder_of_a_part() -> None:
    """A member whose world broke while it waited for its part continues without it."""
    world = [line for line in a_world(1.0, 1, [7, 8, 9, 10], 0) if not (line["op"] != "form" and line["rank"] == 2)]
    found = copies(evidence_of(world, a_world(2.0, 2, [8, 9], 0, lost=1), num_copies=None, cell=2))
    assert found.startswith("cells of 2 ranks; 1 worlds")
