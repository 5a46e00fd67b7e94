"""The judge hashes the contents of commits, each by the rule of its record's format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from chaos.judge.evidence.run_files import collect
from chaos.judge.evidence.stored_weights import digest_of, load_weights
from chaos.judge.invariants.deliverable import deliverable
from chaos.planted.edits import edit_result, forge
from elastic_train.checkpoint.format.dcp import weights_digest
from elastic_train.placement.grains import GRAIN
from tests.chaos.recorded import STEPS, model_at, record
from tests.conftest import ROOT

FOLDERS = ("checkpoint/format/stored_format_2", "training/whole_runs/stored_run/run")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_stored_commit_of_format_2_has_the_hash_of_its_record(folder: str) -> None:
    """The first one has a bfloat16 scalar and an empty tensor."""
    run = ROOT / "tests" / "elastic_train" / folder
    (path,) = (run / "commits").iterdir()
    fields = json.loads(path.read_text())
    tensors = load_weights(run, fields)
    assert digest_of(tensors, fields) == fields["weights_sha256"]
    assert digest_of(tensors, {"format": 4}) != fields["weights_sha256"]


def test_the_judge_and_the_trainer_hash_alike() -> None:
    """A tensor of several grains, an empty one, a scalar, a two-byte type, and two that may be cut."""
    model = nn.Module()
    for number, (shape, dtype) in enumerate(
        [((2, GRAIN + 5), torch.float32), ((0, 3), torch.float32), ((), torch.int64), ((7,), torch.bfloat16)]
    ):
        model.register_buffer(f"b{number}", torch.full(shape, number + 1, dtype=dtype))
    for name in ("columns", "rows"):
        model.register_buffer(name, torch.arange(96.0 * 900).view(96, 900))
    model.register_buffer("parts of one element", torch.arange(7.0).view(1, 7))
    for dims in ({}, {"columns": 0, "rows": 1, "b3": 0, "parts of one element": 1}):
        found = digest_of(model.state_dict(), {"format": 4, "cut_dims": dims})
        assert found == weights_digest(model, dims)


def test_a_job_that_an_older_version_ended_is_judged_by_the_rules_of_both(tmp_path: Path) -> None:
    """Started again, it only rewrites its result by the present rule; its last commit is unchanged."""
    run = record(tmp_path / "run") / "faulted"
    before = digest_of(model_at(STEPS), {"format": 2})
    place = {"step": STEPS, "format": 4}

    def aged(fields: dict[str, object]) -> dict[str, object]:
        is_last = {key: fields[key] for key in place} == place
        return {**fields, "format": 2, "weights_sha256": before} if is_last else fields

    forge(run, aged)
    assert "the result" in deliverable(collect(run), None)
    edit_result(run, weights_sha256=before)
    with pytest.raises(Exception, match="the result says"):
        deliverable(collect(run), None)
