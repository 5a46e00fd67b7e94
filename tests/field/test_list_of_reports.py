"""The list of reports: every row names a test that exists, and every test here is in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.conftest import ROOT

HERE = Path(__file__).parent
ROW = re.compile(
    r"^\| \[[^]]+\]\((?P<address>https://github\.com/[^)]+)\) \| [^|]+ \| `(?P<file>[^`:]+)::(?P<test>\w+)` \|$"
)
TABLE = (HERE / "README.md").read_text().partition("|---|---|---|\n")[2].splitlines()
LINES = [line for line in TABLE if not line.startswith("| **")]
ROWS = [found.groupdict() for line in LINES if (found := ROW.match(line))]
OWN = re.compile(r"https://github\.com/[\w./-]+/(?:issues|pull)/\d+")


def docstrings_of(file: Path) -> dict[str, str]:
    """Return the tests of a file with their docstrings."""
    found = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_docstring(node) or "" for node in found}


def test_every_line_of_the_list_is_a_row_and_no_report_is_there_twice() -> None:
    assert len(ROWS) == len(LINES)
    addresses = [row["address"] for row in ROWS]
    assert sorted(set(addresses)) == sorted(addresses)


def test_every_row_names_a_test_that_exists() -> None:
    assert [row for row in ROWS if row["test"] not in docstrings_of(ROOT / row["file"])] == []


def test_reports_that_are_tested_here_are_listed_with_their_tests() -> None:
    """A docstring has the address, and the list has it with this test."""
    files = [file for file in HERE.glob("test_*.py") if file != Path(__file__)]
    written = {
        (address, name) for file in files for name, text in docstrings_of(file).items() for address in OWN.findall(text)
    }
    listed = {(row["address"], row["test"]) for row in ROWS if row["file"].startswith("tests/field/")}
    assert written == listed
