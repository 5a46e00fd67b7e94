"""The exit code of a node, from those of its workers."""

from __future__ import annotations

import pytest

from elastic_train.launch.exit_codes import exit_code, outstayed


@pytest.mark.parametrize(
    ("codes", "has_failed", "expected"),
    [
        ([0, 0], False, 0),
        ([75, 0], False, 75),
        ([75, 75], True, 75),
        ([75, -9], True, 1),
        ([1, 65, -15], True, 65),
        ([2, 65], True, 65),
        ([71, -15], True, 71),
        ([71, 76], True, 71),
        ([77, 75], True, 77),
        ([0, 74], True, 74),
        ([], True, 1),
        ([0, 1], True, 1),
    ],
)
def test_more_specific_exit_codes_win(codes: list[int], has_failed: bool, expected: int) -> None:
    """Damage, a bad configuration, a hang, too few nodes, a lost result are passed on; the rest is 0, 75 or 1."""
    assert exit_code(codes, has_failed=has_failed) == expected


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([-15], 75),
        ([-10], 75),
        ([-2, 75], 75),
        ([75, -15], 75),
        ([0, -15], 75),
        ([], 75),
        ([-9], 75),
        ([75, -9], 75),
        ([65, -9], 65),
        ([1, -9], 1),
        ([65, -15], 65),
        ([0], 0),
    ],
)
def test_a_signal_before_the_workers_listen_loses_nothing(codes: list[int], expected: int) -> None:
    """A worker that it killed was still importing; asked at any other time it leaves with its own exit code.

    One that was killed because its grace had ended is requeued as well: its job goes on from a commit.
    """
    assert exit_code(codes, has_failed=False, is_asked=True) == expected


def test_workers_that_outstay_their_grace_are_counted() -> None:
    assert [outstayed(codes) for codes in ([], [75, -15], [75, -9], [-9, -9])] == [0, 0, 1, 2]
