"""Count the mutants that the quick tests kill: `python -m release.mutants [NUM] [AREA …]`.

A mutant is the product with one operator, constant, condition or statement changed. Each one is compiled in a fork of a
process that has imported torch and pytest, so no file is written, and each costs only its area's tests. Survivors are
printed: lines that no quick test of their area needs.
"""

from __future__ import annotations

import ast
import os
import random
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch  # noqa: F401 (imported once, for all mutants)

AREAS = {
    "placement": ("elastic_train/placement/*.py", "tests/elastic_train/placement"),
    "program": ("elastic_train/program/*.py", "tests/elastic_train/program"),
    "exchange": ("elastic_train/parallel/*.py", "tests/elastic_train/parallel"),
    "commits": ("elastic_train/checkpoint/commits/*.py", "tests/elastic_train/checkpoint/commits"),
    "membership": ("rendezvous/membership/**/*.py", "tests/rendezvous/membership"),
}
QUICK = "not slow and not long and not deploy and not alone and not hunt and not monitoring"
AT_MOST_S = 180
"""Seconds after which a mutant counts as hanging; in CI a timeout would kill it."""
SWAPPED: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip


class Mutant(NamedTuple):
    """The `nth` change of the module at `path`."""

    area: str
    path: Path
    nth: int
    line: int
    what: str


def changes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Apply one change to the tree after another; yield each one's line and description while it is in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
            before, node.ops[0] = node.ops[0], SWAPPED[type(node.ops[0])]()
            yield node.lineno, f"{_name(before)} -> {_name(node.ops[0])}"
            node.ops[0] = before
        elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPPED:
            operator, node.op = node.op, SWAPPED[type(node.op)]()
            yield node.lineno, f"{_name(operator)} -> {_name(node.op)}"
            node.op = operator
        elif isinstance(node, ast.If | ast.IfExp):
            before_test, node.test = node.test, ast.UnaryOp(ast.Not(), node.test)
            yield node.lineno, "condition negated"
            node.test = before_test
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            node.value += 1
            yield node.lineno, f"{node.value - 1} -> {node.value}"
            node.value -= 1
        elif isinstance(node, ast.FunctionDef):
            for index, statement in enumerate(node.body):
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                    node.body[index] = ast.Pass()
                    yield statement.lineno, f"without {ast.unparse(statement)}"
                    node.body[index] = statement


def _name(node: ast.AST) -> str:
    return type(node).__name__


def mutants_of(area: str) -> list[Mutant]:
    """Return all mutants of an area's modules."""
    return [
        Mutant(area, path, nth, line, what)
        for path in sorted(Path().glob(AREAS[area][0]))
        for nth, (line, what) in enumerate(changes(ast.parse(path.read_text())))
    ]


def compiled(mutant: Mutant) -> CodeType:
    """Return the code of a mutant's module."""
    tree = ast.parse(mutant.path.read_text())
    places = changes(tree)
    for _ in range(mutant.nth + 1):  # the tree holds the change while the generator waits
        next(places, None)
    return compile(ast.fix_missing_locations(tree), mutant.path.resolve(), "exec", dont_inherit=True)


def passes(area: str, place: Path, code: CodeType | None) -> bool:
    """Run an area's quick tests, up to the first failure, in a fork where the module at `place` has this code."""
    if not (child := os.fork()):
        os.setsid()
        signal.alarm(AT_MOST_S)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        get_code, mutated = SourceFileLoader.get_code, str(place.resolve())

        def instead(loader: SourceFileLoader, name: str) -> CodeType | None:
            return code if code is not None and loader.path == mutated else get_code(loader, name)

        with mock.patch.object(SourceFileLoader, "get_code", instead):
            os._exit(pytest.main(["-x", "-q", "-p", "no:xdist", "-m", QUICK, AREAS[area][1]]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main(num: int, areas: list[str]) -> None:
    """Draw `num` mutants of the areas, the same ones each time; print the survivors and the share killed."""
    for area in areas:
        if not passes(area, Path(), None):
            sys.exit(f"mutants: the quick tests of {AREAS[area][1]} fail without a mutant")
        drawn = random.Random(area).sample(mutants_of(area), num // len(areas))
        survivors = [each for each in drawn if passes(area, each.path, compiled(each))]
        for each in survivors:
            sys.stdout.write(f"{each.path}:{each.line}: {each.what}: survives\n")
        sys.stdout.write(f"{area}: {len(drawn) - len(survivors)} of {len(drawn)} killed\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int((sys.argv[1:] or ["200"])[0]), sys.argv[2:] or list(AREAS))
