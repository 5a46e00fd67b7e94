"""The judge hashes the contents of commits as the trainer does."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from chaos.judge.evidence.stored_weights import digest_of, load_weights
from elastic_train.checkpoint.format.dcp import weights_digest
from elastic_train.placement.grains import GRAIN
from tests.conftest import ROOT

FOLDERS = ("checkpoint/format/stored_format_3", "training/whole_runs/stored_run/run")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_stored_commit_of_format_3_has_the_hash_of_its_record(folder: str) -> None:
    """The first one has a bfloat16 scalar and an empty tensor."""
    run = ROOT / "tests" / "elastic_train" / folder
    (path,) = (run / "commits").iterdir()
    fields = json.loads(path.read_text())
    tensors = load_weights(run, fields)
    assert digest_of(tensors, fields) == fields["weights_sha256"]


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
