"""The benchmark of cells: its figures are explained, its peers compute the same, and hashes can differ."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.cells import __main__ as cells
from benchmarks.cells import experts, hashes, pipeline, tensor
from benchmarks.figures import Effort
from tests.conftest import run_ranks


def test_every_figure_is_explained() -> None:
    """The output of --help names each figure."""
    explained = set(re.findall(r"`([a-z0-9_.]+)`", cells.__doc__ or ""))
    assert set(cells.figures()) <= explained


@pytest.mark.slow
def test_torchs_schedules_make_the_same_gradients(tmp_path: Path) -> None:
    """GPipe, 1F1B and interleaved, of two stages on eight lanes, to the last bit."""
    run_ranks(computes_both, pipeline.STAGES, str(tmp_path))
    assert len(list(tmp_path.glob("*.json"))) == pipeline.STAGES


def computes_both(rank: int, size: int, folder: str) -> None:
    pipeline.in_turn(rank, 0, folder, 16, 1)


@pytest.mark.slow
@pytest.mark.parametrize("sides", [tensor, experts], ids=["tensor", "experts"])
def test_loops_of_torchs_own_parts_compute_the_same(tmp_path: Path, sides: ModuleType) -> None:
    """Either side is checked against the other before it is timed, here on short rows."""
    run_ranks(takes_a_turn, sides.DEGREE, sides.in_turn, str(tmp_path))
    times = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert times and all(len(turns) == 1 for each in times for turns in each)


def takes_a_turn(rank: int, size: int, in_turn: Callable[..., None], folder: str) -> None:
    in_turn(rank, 1, folder, 16, 1)


@pytest.mark.long
def test_a_job_with_other_bits_is_seen() -> None:
    """One whose gradients are rounded on the wire."""
    cases = {"two ranks": (2, ()), "rounded": (2, ("shards", "gradients", "wire", "bf16"))}
    found = hashes.compared(Effort(True, print), cases, {})
    assert found == {"two ranks": True, "rounded": False}
