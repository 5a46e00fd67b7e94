"""Machines that round differently train and commit one model together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import elastic_train as et
from tests.conftest import ROOT, begin, places_of
from tests.elastic_train.training.live.test_live import write_config

pytestmark = pytest.mark.process
STEPS = 12


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU has no vector instructions")
def test_ranks_on_machines_that_round_differently_train_to_the_end(tmp_path: Path, rows: Path) -> None:
    """Their weights drift apart in the last bits, which must not end the job at a commit; the result names steps."""
    config = write_config(tmp_path, rows, STEPS, lane_ms=0.0)
    command = [sys.executable, "-m", "elastic_train", config, "--checkpoint.every", "5 steps"]
    places, logs = places_of(2), [tmp_path / "0.log", tmp_path / "1.log"]
    forked = begin(command, logs[0], places[0])
    with logs[1].open("w") as log:  # torch detects the CPU when it is loaded, so this cannot be a fork
        environ = {**os.environ, **places[1], "ATEN_CPU_CAPABILITY": "default"}
        other = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
    try:
        codes = [forked.wait(240), other.wait(240)]
    finally:
        forked.close(signal.SIGKILL)
        other.kill()
    said = [log.read_text() for log in logs]
    assert codes == [0, 0], said
    assert "`reduction: fast` is used in this world: rank 1 has device DEFAULT, not" in said[0]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["step"], result["fast_steps"]) == (STEPS, [[0, STEPS]])
    head = et.discover(et.open_store(str(tmp_path / "run"))).head
    assert head is not None and (head.step, head.fast_steps) == (STEPS, ((0, STEPS),))
