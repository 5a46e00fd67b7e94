"""Resources of processes: a small growth with every world is a leak, but resources that are freed again are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import Evidence, Line
from chaos.judge.findings import Violated
from chaos.judge.invariants.bounded import LEAST_WORLDS, bounded, is_put_to_the_test

MIB = 1 << 20


def run(*fds: int, threads: int = 9, rss: int = 500 * MIB, each: int = 0) -> Evidence:
    """Return a run of one process in several worlds, each of which adds `each` to threads, and MiB to memory."""
    lines: list[Line] = [
        {
            "op": "form",
            "t": float(term),
            "term": term,
            "rank": 0,
            "world": 3,
            "pid": 7,
            "holds": {"fds": num, "threads": threads + each * term, "rss": rss + each * term * MIB},
        }
        for term, num in enumerate(fds)
    ]
    return Evidence(Path(), [lines], [], {}, None, None)


def test_a_connection_that_every_world_leaves_open_is_caught() -> None:
    with pytest.raises(Violated, match="process 7 held 42 open files at the beginning and 117 after 77 more worlds"):
        bounded(run(*range(40, 120)))


def test_threads_that_every_world_leaves_are_caught() -> None:
    with pytest.raises(Violated, match="threads"):
        bounded(run(*[40] * 60, each=1))


def test_what_a_given_up_world_holds_for_a_while_is_no_leak() -> None:
    """Resources that the first worlds open permanently are no leak either."""
    assert bounded(run(20, 80, *[90] * 20, *[400] * 5, *[90] * 3)).startswith("1 processes, in up to 30 worlds")


def test_stores_of_worlds_that_ended_seconds_ago_are_no_leak() -> None:
    """A rank that becomes rank 0 in a storm of faults has the stores of several worlds; the figures are real."""
    held = 19, 25, 21, 26, 21, 23, 32, 42, 52, 50, 58, 60, 58, 60, 73, 60
    assert bounded(run(*held)).startswith("1 processes")


def test_a_few_worlds_say_nothing() -> None:
    assert not is_put_to_the_test(run(*range(40, 40 + LEAST_WORLDS - 1)))
