"""Machines that round differently train one model together, and commit it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import elastic_train as et
from tests.conftest import ROOT, _places
from tests.elastic_train.training.test_live import write_config

pytestmark = pytest.mark.slow
STEPS = 12


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU has no vector instructions")
def test_ranks_on_machines_that_round_differently_train_to_the_end(tmp_path: Path, rows: Path) -> None:
    """They drift apart in the last bits, and once ended at the first commit; the result names the steps."""
    config = write_config(tmp_path, rows, STEPS, lane_ms=0.0)
    command = [sys.executable, "-m", "elastic_train", config, "--checkpoint.every_steps", "5"]
    kinds: list[dict[str, str]] = [{}, {"ATEN_CPU_CAPABILITY": "default"}]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **place, **kind},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for place, kind in zip(_places(2), kinds, strict=True)
    ]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "`reduction: fast` is used in this world: rank 1 has device DEFAULT, not" in said[0]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["step"], result["fast_steps"]) == (STEPS, [[0, STEPS]])
    head = et.discover(et.open_store(str(tmp_path / "run"))).head
    assert head is not None and (head.step, head.fast_steps) == (STEPS, ((0, STEPS),))
