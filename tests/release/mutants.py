"""Count the mutants of the product's core that tests kill: `python -m tests.release.mutants --count 200 --seed 0`.

A mutant is a function with one operator, constant, condition, call or result changed; texts and types stay. A stage
runs its checks once without a mutant and records which statements each executes. Then a fork for each mutant replaces
code in memory (no file is written) and runs the checks that execute the changed statement until one fails. Stages are
the quick tests of the area, simulated jobs, and wider quick tests. A run with the same file of results continues it.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import functools
import gc
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

AREAS = {
    "rendezvous/membership": "fence.py own_record.py participant.py records.py rules/[!w]*.py",
    "elastic_train/checkpoint/commits": "*.py",
    "elastic_train/world": "fencing.py claims.py agreement.py forming.py",
    "elastic_train/parallel": "exchange.py gradient_sum.py reduce_scatter_sum.py buckets.py devices/squares.py",
    "elastic_train/job": "state.py state_shards.py peer_states.py reshard.py",
    "elastic_train/program": "*.py",
    "elastic_train/placement": "*.py",
}
WIDER = tuple(f"tests/elastic_train/{name}" for name in ("job", "world", "checkpoint", "parallel"))
SEEDS = range(12)
QUICK = "not slow and not process and not long and not deploy and not hunt and not monitoring"
OPTIONS = ("-qq", "-s", "-p", "no:xdist", "--hypothesis-profile", "inner-loop", "--hypothesis-seed", "0", "-m", QUICK)
TEXTS_AND_TYPES = {"annotation", "returns", "decorator_list", "msg"}
SWAPPED: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
Check = tuple[str, Callable[[], bool]]
"""The name of a test or simulated job, and the function that runs it."""
Tell = Callable[[dict[str, Any]], None]


class Mutant(NamedTuple):
    """The `nth` change of the module at `path`; `line` is that of the changed statement."""

    path: str
    nth: int
    line: int
    what: str


def executed_nodes(node: ast.AST, line: int = 0) -> Iterator[tuple[ast.AST, int]]:
    """Yield the nodes that functions execute, each with the line of its statement."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_logged = isinstance(child, ast.Expr) and ast.unparse(child).startswith(("log.", "_log.", "_LOG."))
            is_strict = isinstance(child, ast.keyword) and child.arg == "strict"
            is_text = field in TEXTS_AND_TYPES or isinstance(child, ast.Raise | ast.JoinedStr | ast.arguments)
            if isinstance(child, ast.AST) and not (is_logged or is_strict or is_text):
                is_own = isinstance(child, ast.FunctionDef) or (isinstance(child, ast.stmt) and line)
                at = child.lineno if is_own else line  # type: ignore[attr-defined]
                yield from [(child, at)] if at else []
                yield from executed_nodes(child, at)


def changes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Apply one change to the tree after another; yield its line and description while it is in place."""
    for node, line in executed_nodes(tree):
        for field, changed in _changed_fields(node):
            before, old = getattr(node, field), ast.unparse(node)
            setattr(node, field, changed)
            if (new := ast.unparse(node)) != old:
                yield line, f"{old.splitlines()[0]} -> {new.splitlines()[0]}"
            setattr(node, field, before)


def _changed_fields(node: ast.AST) -> Iterator[tuple[str, object]]:
    match node:
        case ast.Compare() if type(node.ops[0]) in SWAPPED:
            yield "ops", [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        case ast.BoolOp() | ast.BinOp() if type(node.op) in SWAPPED:
            yield "op", SWAPPED[type(node.op)]()
        case ast.If() | ast.IfExp():
            yield "test", ast.UnaryOp(ast.Not(), node.test)
        case ast.Constant(value=bool()):
            yield "value", not node.value
        case ast.Constant(value=int(number)):
            yield from [("value", number + 1), ("value", 0)][: 2 if number == 1 else 1]
        case ast.Name(id="min" | "max"):
            yield "id", "max" if node.id == "min" else "min"
        case ast.Expr(value=ast.Call()) | ast.Return(value=ast.expr()):
            yield "value", ast.Constant(None)


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return all mutants of a module."""
    return [Mutant(path, nth, line, what) for nth, (line, what) in enumerate(changes(ast.parse(source)))]


def mutated(mutant: Mutant, source: str) -> ast.Module:
    """Return a mutant's module."""
    tree = ast.parse(source)
    places = changes(tree)
    for _ in range(mutant.nth + 1):  # the tree keeps the change if the generator is not resumed
        next(places)
    return tree


def recording(path: str, source: str) -> ast.Module:
    """Return a module that calls `__executed__` with its path and the line of each statement that it executes."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for value in (value for _, value in ast.iter_fields(node) if not isinstance(node, ast.Module)):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                calls = [ast.parse(f"__executed__(({path!r}, {each.lineno}))").body[0] for each in value]
                value[:] = [each for pair in zip(calls, value, strict=True) for each in pair]
    return tree


def replace_functions(path: str, tree: ast.Module) -> None:
    """Give all functions of an imported module the code that they have in the tree."""
    place = str(Path(path).resolve())
    waiting = [compile(ast.fix_missing_locations(tree), place, "exec", dont_inherit=True)]
    codes = dict[tuple[str, int], CodeType]()
    while waiting:
        code = waiting.pop()
        codes[code.co_qualname, code.co_firstlineno] = code
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename == place:
            code = codes[each.__code__.co_qualname, each.__code__.co_firstlineno]
            if code.co_freevars == each.__code__.co_freevars:  # Python replaces no other
                each.__code__ = code


def in_fork(job: Callable[[Path], bool], limit_s: float) -> tuple[str, bytes]:
    """Return "passed", "failed" or "timeout", and what the job has written to its file."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    if not (child := os.fork()):
        signal.alarm(int(limit_s))
        os.dup2(nowhere := os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(nowhere, 2)
        tempfile.tempdir = str(folder)
        try:
            os._exit(not job(folder / "answer"))
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    answer = (folder / "answer").read_bytes() if (folder / "answer").exists() else b""
    shutil.rmtree(folder, ignore_errors=True)
    return {0: "passed", -signal.SIGALRM: "timeout"}.get(code, "failed"), answer


def run_stage(stage: str, mutants: list[Mutant], tell: Tell, checks: list[Check]) -> None:
    """Run the checks of a stage without a mutant, then for each mutant those that execute the changed statement."""
    gc.unfreeze()  # for `replace_functions`
    verdict, answer = in_fork(functools.partial(_record, {each.path for each in mutants}, checks), 3600)
    if verdict != "passed":
        sys.exit(f"mutants: {stage}: {answer.decode()}: {verdict} without a mutant: mend that first")
    recorded = sorted(zip(pickle.loads(answer), checks, strict=True), key=lambda each: each[0][0])
    for mutant in mutants:
        chosen = [(took, check) for (took, lines), check in recorded if (mutant.path, mutant.line) in lines]
        run, begun = functools.partial(_survives, mutant, [check for _, check in chosen]), time.monotonic()
        verdict, answer = in_fork(run, 60 + 5 * sum(took for took, _ in chosen))
        told = {"stage": stage, **mutant._asdict(), "verdict": verdict, "checks": len(chosen)}
        tell({**told, "last": answer.decode(), "took_s": round(time.monotonic() - begun, 1)})


def _record(paths: Iterable[str], checks: list[Check], answer: Path) -> bool:
    executed, by_check = set[tuple[str, int]](), list[tuple[float, set[tuple[str, int]]]]()
    builtins.__dict__["__executed__"] = executed.add
    for path in paths:
        replace_functions(path, recording(path, Path(path).read_text()))
    for name, passes in checks:
        executed.clear()
        answer.write_text(name)
        begun = time.monotonic()
        if not passes():
            return False
        by_check.append((time.monotonic() - begun, set(executed)))
    return bool(answer.write_bytes(pickle.dumps(by_check)))


def _survives(mutant: Mutant, checks: list[Check], answer: Path) -> bool:
    replace_functions(mutant.path, mutated(mutant, Path(mutant.path).read_text()))
    return all(answer.write_text(name) and passes() for name, passes in checks)


class Tests:
    """Run a stage of the collected tests instead of these tests."""

    def __init__(self, run: Callable[[list[Check]], None]) -> None:
        self._run = run

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the stage."""

        def passes(item: pytest.Item) -> bool:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            return not session.testsfailed

        self._run([(item.nodeid, functools.partial(passes, item)) for item in session.items])
        return True


def run_tests(folders: Iterable[str], run: Callable[[list[Check]], None]) -> int:
    """Run a stage of the folders' quick tests."""
    return int(pytest.main([*OPTIONS, *folders], plugins=[Tests(run)]))


def run_simulator(run: Callable[[list[Check]], None]) -> int:
    """Run a stage of simulated jobs."""
    from chaos.sim.campaign.long_runs import Draw
    from chaos.sim.campaign.simulate import simulate

    run([(f"seed {n}", functools.partial(lambda n: not simulate(Draw().case(n)).violations, n)) for n in SEEDS])
    return 0


def main(count: int, seed: int, only: str, results: Path, is_json: bool) -> None:
    """Run all stages for the mutants drawn, which depend on the seed and the sources; print survivors and totals."""
    areas = {
        str(path): area for area, globs in AREAS.items() for glob in globs.split() for path in Path(area).glob(glob)
    }
    every = [
        each for path in sorted(areas) for each in mutants_of(path, Path(path).read_text()) if path.startswith(only)
    ]
    drawn = sorted(random.Random(seed).sample(every, min(count, len(every))))
    results.touch()
    import torch._dynamo  # noqa: F401 (once, not in each fork)

    def tell(told: dict[str, Any]) -> None:
        with results.open("a") as file:
            file.write(json.dumps(told) + "\n")
        sys.stderr.write("{stage}: {path}:{line}: {what}: {verdict} {last} ({took_s} s)\n".format_map(told))

    def left(stage: str = "") -> list[Mutant]:
        told = map(json.loads, results.read_text().splitlines())
        done = {(each["path"], each["nth"]) for each in told if each["stage"] == stage or each["verdict"] != "passed"}
        return [each for each in drawn if (each.path, each.nth) not in done]

    stages: list[tuple[str, str, Callable[[Callable[[list[Check]], None]], int]]] = [
        *(("quick", area, functools.partial(run_tests, [f"tests/{area}"])) for area in AREAS),
        ("sim", "", run_simulator),
        ("wider", "", functools.partial(run_tests, WIDER)),
    ]
    for stage, area, start in stages:
        mutants = [each for each in left(stage) if areas[each.path].startswith(area)]
        if mutants and not (child := os.fork()):  # each stage imports the product anew
            os._exit(start(functools.partial(run_stage, stage, mutants, tell)))
        if mutants and os.waitpid(child, 0)[1]:
            sys.exit(f"mutants: the checks of {stage} {area} could not be run: see above")
    totals = {"of": len(every), "drawn": len(drawn), "survivors": len(left())}
    told = map(json.loads, results.read_text().splitlines())
    totals |= Counter(f"{each['stage']} {each['verdict']}" for each in told if each["verdict"] != "passed")
    sys.stderr.write("".join(f"{each.path}:{each.line}: {each.what}: survives\n" for each in left()))
    sys.stdout.write((json.dumps(totals) if is_json else ", ".join(f"{n} {name}" for name, n in totals.items())) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.release.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--only", default="", help="folder or module of all mutants")
    parser.add_argument(
        "--results", type=Path, default=Path("mutants.jsonl"), help="file of results to write or continue"
    )
    parser.add_argument("--json", action="store_true", dest="is_json", help="print the totals as JSON")
    main(**vars(parser.parse_args()))
