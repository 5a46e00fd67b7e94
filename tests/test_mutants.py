"""Mutants of a module: which changes there are, and that functions of an imported module get them in memory."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from tests.release.mutants import mutants_of, mutated, recording, replace_functions

SOURCE = '''"""Text 1."""
LIMIT = 1
def f(x: int = 1) -> bool:
    """Text 2."""
    if x < 3 and not log:
        log.warning("text %d", 4)
        x = min(x, 5)
    send(x)
    if x > 9:
        raise ValueError(f"text {6 + x}")
    return True
'''


def test_changes_leave_texts_types_defaults_and_constants_of_modules() -> None:
    assert [(line, what) for _, _, line, what in mutants_of("m.py", SOURCE)] == [
        (5, "if x < 3 and (not log): -> if not (x < 3 and (not log)):"),
        (5, "x < 3 and (not log) -> x < 3 or not log"),
        (5, "x < 3 -> x <= 3"),
        (5, "3 -> 4"),
        (7, "min -> max"),
        (7, "5 -> 6"),
        (8, "send(x) -> None"),
        (9, "if x > 9: -> if not x > 9:"),
        (9, "x > 9 -> x >= 9"),
        (9, "9 -> 10"),
        (11, "return True -> return None"),
        (11, "True -> False"),
    ]


@pytest.mark.heavy
def test_functions_of_an_imported_module_are_changed_and_tell_their_statements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, source = tmp_path / "m.py", "def f(x):\n    if x > 0:\n        return 1\n    return 2\n"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("m", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    executed: list[tuple[str, int]] = []
    monkeypatch.setattr("builtins.__executed__", executed.append, raising=False)
    replace_functions(str(path), recording(str(path), source))
    assert module.f(0) == 2 and executed == [(str(path), 2), (str(path), 4)]
    [greater] = [each for each in mutants_of(str(path), source) if each.what == "x > 0 -> x >= 0"]
    replace_functions(str(path), mutated(greater, source))
    assert module.f(0) == 1
    assert ast.unparse(mutated(greater, source)) == source.strip().replace(">", ">=")
