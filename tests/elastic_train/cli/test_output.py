"""Tables on terminals of any width, in files and in pipes: no number, name or word is cut."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from elastic_train.cli.output import narrow_table, print_table

WORDS = st.lists(st.text("abcdef0123", min_size=1, max_size=9), min_size=1, max_size=4).map(" ".join)
TABLES = st.integers(1, 8).flatmap(
    lambda num: st.tuples(
        st.lists(WORDS, min_size=num, max_size=num),
        st.lists(st.lists(WORDS, min_size=num, max_size=num), min_size=1, max_size=4),
    )
)


def drawn(head: list[str], rows: list[list[str]], width: int) -> list[str]:
    """Return the lines that a terminal of some width shows of a table."""
    table, shown = narrow_table(*head), io.StringIO()
    for row in rows:
        table.add_row(*row)
    Console(file=shown, width=width, force_terminal=True, color_system=None, markup=False).print(table)
    return shown.getvalue().splitlines()


@pytest.mark.heavy
@given(TABLES, st.integers(24, 200))
def test_no_word_is_cut_at_any_width(table: tuple[list[str], list[list[str]]], width: int) -> None:
    """Columns without room follow below the others, each part with the first column; no line is too long."""
    head, rows = table
    lines = drawn(head, rows, width)
    shown = " ".join(lines).split()
    missing = {word for row in (head, *rows) for cell in row for word in cell.split()} - set(shown)
    assert not missing, "\n".join(lines)
    assert max(map(len, lines)) <= width


def test_a_word_longer_than_a_line_cuts_no_other() -> None:
    """A long path is folded; the labels beside it stay whole, and no line is too long."""
    path = "/scratch/" + 20 * "a-run-" + "end"
    lines = drawn(["", path], [["samples/s, all of the time", "49.78"], ["goodput", "77.5%"]], 60)
    assert "".join(line.strip() for line in lines[: lines.index(next(one for one in lines if "\u2500" in one))]) == path
    assert {tuple(line.split()) for line in lines} >= {
        ("samples/s,", "all", "of", "the", "time", "49.78"),
        ("goodput", "77.5%"),
    }
    assert max(map(len, lines)) <= 60


def test_a_table_that_fits_is_one_and_text_is_broken_before_a_column_is_moved() -> None:
    head, row = ["step", "why"], ["4000", "the file part-1 is missing"]
    assert drawn(head, [row], 80)[3].split() == [row[0], *row[1].split()]
    assert sum("step" in line for line in drawn(head, [row], 20)) == 1
    parts = [line for line in drawn(["rank", "forward", "backward"], [["0", "1.2 ms", "3.4 ms"]], 18) if "rank" in line]
    assert [part.split() for part in parts] == [["rank", "forward"], ["rank", "backward"]]


def test_a_pipe_has_room_for_any_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless COLUMNS says how many columns there are."""
    monkeypatch.delenv("COLUMNS", raising=False)
    head, row = [f"column {number}" for number in range(30)], [f"value {number}" for number in range(30)]
    print_table(head, [row])
    assert [len(line.split()) for line in capsys.readouterr().out.splitlines() if "value" in line] == [60]
    monkeypatch.setenv("COLUMNS", "60")
    print_table(head, [row])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
