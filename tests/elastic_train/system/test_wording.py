"""Durations, sizes, errors and mistyped names, as people read them."""

from __future__ import annotations

import pytest

from elastic_train.system.wording import (
    counted,
    did_you_mean,
    duration,
    durations,
    first_line,
    nearest,
    rate,
    size,
    sizes,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0312, "0.031 s"), (90, "90 s"), (150, "2.5 min"), (7199, "120.0 min"), (7200, "2.0 h"), (259200, "3.0 d")],
)
def test_a_duration_is_in_the_largest_unit_of_which_there_are_two(seconds: float, text: str) -> None:
    """Two digits below ten seconds, whole seconds up to two minutes, one decimal from there on."""
    assert duration(seconds) == text


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2e15, "2000.0 TB")])
def test_a_size_is_in_decimal_units(num_bytes: float, text: str) -> None:
    """Three digits, thousands apart; terabytes are the largest unit."""
    assert size(num_bytes) == text


def test_one_thing_is_not_counted_as_several() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


def test_an_error_is_shown_as_its_first_line_or_its_class() -> None:
    """A traceback's worth of text becomes one line, and an empty message the error's class."""
    assert first_line(ValueError("no\nat all")) == "no"
    assert first_line(ValueError()) == "ValueError"
    assert len(first_line(ValueError("x" * 1000))) == 300


def test_a_mistyped_name_suggests_the_nearest() -> None:
    """A typo suggests the known name; a name unlike any of them gets the alternative text."""
    assert did_you_mean(nearest("micro_bach", ["micro_batch", "global_batch"])) == "; did you mean 'micro_batch'?"
    assert did_you_mean(nearest("zzz", ["micro_batch"]), "; there is micro_batch") == "; there is micro_batch"


def test_a_column_has_one_unit() -> None:
    """All values of a column are in the unit of the largest; what is not known is a dash."""
    assert durations([0.0091, 0.33, None]) == ["0.0091 s", "0.33 s", "–"]
    assert durations([30.0, 600.0]) == ["0.5 min", "10.0 min"]
    assert sizes([9_440, 38e6, 0]) == ["0.00944 MB", "38 MB", "0 MB"]
    assert durations([]) == sizes([]) == []


def test_a_rate_has_no_exponent() -> None:
    assert [rate(38_560.4), rate(3.723e7), rate(7.312)] == ["38,560", "37,230,000", "7.312"]
