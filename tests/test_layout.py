"""The repository layout: no crowded folder, and every folder documents its purpose."""

from __future__ import annotations

import ast
import re

from tests.conftest import ROOT

MOST_MODULES = 12
PACKAGES = ("elastic_train", "rendezvous", "chaos", "benchmarks")
FOLDERS = sorted({path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")})


def test_a_folder_is_a_package_of_at_most_a_dozen_modules() -> None:
    """A newcomer finds a module by name among a dozen, and reads the folder's purpose in __init__.py."""
    for folder in FOLDERS:
        modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= MOST_MODULES, (folder, sorted(modules))
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_what_runs_a_module_as_a_program_is_its_last_statement() -> None:
    """What is defined below it would not exist yet."""
    guard = '\nif __name__ == "__main__":\n'
    for path in (path for folder in FOLDERS for path in folder.glob("*.py")):
        assert not re.search(r"^\S", path.read_text().partition(guard)[2], re.MULTILINE), path


def test_a_decision_is_in_the_index_with_its_title_and_status() -> None:
    """The index is how readers find a decision and see which ones are superseded."""
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    for decision in sorted((ROOT / "docs" / "decisions").glob("0*.md")):
        number, _, title = decision.read_text().splitlines()[0].removeprefix("# ").partition(": ")
        assert number == decision.name[:4]
        assert "**Status.**" in decision.read_text(), decision
        assert f"| {number} | [{title}]({decision.name}) | " in index
