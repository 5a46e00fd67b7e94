"""The hook's numbers: what the watcher could not read is refused in the script that gives it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chaos.hook import VARIABLE, log_ids
from chaos.judge.evidence.run_files import collect
from chaos.script.watch import Watcher, Worker
from chaos.services.torchrun_node import Node


@pytest.mark.parametrize(
    "wrong", [{"step": 3.5}, {"step": 3.0}, {"epoch": None}, {"of": "8"}, {"ids": torch.tensor(1)}, {"ids": [[1]]}]
)
def test_numbers_of_another_kind_are_refused(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end the script, whose log says why, and not the run that watches it."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    given: dict[str, Any] = {"ids": [1], "step": 3, "epoch": 0, "of": 8, **wrong}
    with pytest.raises(TypeError):
        log_ids(given.pop("ids"), **given)
    assert list(tmp_path.iterdir()) == []


def test_whole_numbers_of_arrays_and_tensors_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is counted in a tensor, or rows in an array, become a line of the run's history."""
    watcher = Watcher(tmp_path, [Node(0, ["true"], tmp_path / "log", {})], "true")
    watcher._place(Worker(os.getpid(), 0, 0, 1, "here:1", 1.0))
    (tmp_path / "ids").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "ids"))
    log_ids(torch.tensor([2, 1]), step=torch.tensor(1), epoch=np.int64(0), of=np.int32(8))  # type: ignore[arg-type]
    watcher._take_lines()
    (step,) = collect(tmp_path).of("step")
    assert (step["step"], step["epoch"], step["ids"], step["of"]) == (1, 0, [2, 1], 8)
    assert json.loads((tmp_path / "ids" / f"{os.getpid()}.jsonl").read_text())["step"] == 1
