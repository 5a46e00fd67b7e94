"""Arcs: a group's members share the circle evenly, and a change of members moves little."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.placement.arcs import Arc, arcs_of, kept_part, length, overlap


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[int | None], int]:
    """Draw a group that has lost and gained members, and the number of its bases."""
    num_base = draw(st.integers(1, 12))
    bases: list[int | None] = sorted(draw(st.sets(st.integers(0, num_base - 1))))  # type: ignore[assignment]
    extra = draw(st.integers(0 if bases else 1, 12))
    return [*bases, *[None] * extra], num_base


def check_shares(found: list[tuple[Arc, ...]]) -> None:
    """Check that members' arcs tile the circle in equal shares; those of one member are disjoint and ascend."""
    assert all(length(arcs) == Fraction(1, len(found)) for arcs in found)
    assert all(a[1] < b[0] for arcs in found for a, b in itertools.pairwise(arcs))
    everything = sorted(arc for arcs in found for arc in arcs)
    assert [lo for lo, _ in everything] == [0, *(hi for _, hi in everything[:-1])] and everything[-1][1] == 1


@given(groups())
def test_members_share_the_circle_evenly(group: tuple[list[int | None], int]) -> None:
    """This holds for any free bases and any number of members without one."""
    bases, num_base = group
    found = arcs_of(bases, num_base)
    check_shares(found)
    assert kept_part(bases, num_base) <= sum(
        overlap(arcs, [(Fraction(base, num_base), Fraction(base + 1, num_base))])
        for base, arcs in zip(bases, found, strict=True)
        if base is not None
    )


@pytest.mark.parametrize("size", range(2, 10))
def test_the_first_loss_moves_what_was_lost_and_nothing_else(size: int) -> None:
    """The lost share goes in equal parts to all remaining members."""
    before = arcs_of(range(size), size)
    for lost in range(size):
        bases = [base for base in range(size) if base != lost]
        for base, arcs in zip(bases, arcs_of(bases, size), strict=True):
            assert length(arcs) - overlap(arcs, before[base]) == Fraction(1, size * (size - 1))


@pytest.mark.parametrize("size", range(1, 10))
def test_a_new_member_gets_its_share_and_nothing_else_moves(size: int) -> None:
    """Every member gives up an equal part; if the new member leaves again, each gets its part back."""
    before, after = arcs_of(range(size), size), arcs_of([*range(size), None], size)
    for base in range(size):
        assert overlap(after[base], before[base]) == length(after[base])


@given(groups(), st.data())
def test_a_change_moves_what_it_must_and_a_part_of_the_line(
    group: tuple[list[int | None], int], data: st.DataObject
) -> None:
    """After a loss, the others get at most the lost share plus as much as the line had."""
    bases, num_base = group
    if len(bases) == 1:
        return
    before = arcs_of(bases, num_base)
    lost = data.draw(st.integers(0, len(bases) - 1))
    left = [base for member, base in enumerate(bases) if member != lost]
    old = [arcs for member, arcs in enumerate(before) if member != lost]
    moved = sum(length(b) - overlap(a, b) for a, b in zip(old, arcs_of(left, num_base), strict=True))
    assert moved <= Fraction(1, len(bases)) + (1 - kept_part(bases, num_base))


def test_two_members_of_one_base_are_refused() -> None:
    with pytest.raises(AssertionError, match="two members of one base"):
        arcs_of([0, 0], 2)
