"""A node with flipped bits in its copy of the data exits and says where they are; the others continue without it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import yaml

from chaos.services.private_dataset import OwnData
from rendezvous import EtcdServer
from tests.conftest import PATIENCE_S, start
from tests.elastic_train.training.live.test_live import (
    etcd,
    history,
    launch_alone,
    nothing_left,
    until_whole,
    write_config,
)

pytestmark = pytest.mark.slow
__all__ = ["etcd", "nothing_left"]  # fixtures
STEPS = 500


@pytest.mark.long
@pytest.mark.parametrize("unreadable", ["fail", "quarantine"])
def test_one_bad_copy_costs_the_others_one_regroup(
    tmp_path: Path, rows: Path, etcd: EtcdServer, unreadable: str
) -> None:
    """The node exits with 65 and is not restarted; the other ends with the bits of an undisturbed job.

    This also holds if unreadable samples are to be skipped: the other node can read them.
    """
    config = write_config(tmp_path, rows, STEPS)
    tree = yaml.safe_load(Path(config).read_text())
    tree["data"]["unreadable"] = unreadable
    Path(config).write_text(yaml.safe_dump(tree))
    whole, bad = tmp_path / "whole", OwnData(str(rows / "train"), tmp_path / "bad")
    shutil.copytree(rows / "train", whole)
    draws = random.Random(1)
    damaged = [bad.flip(draws) for _ in range(6)]
    first = launch_alone(tmp_path, etcd, config, "whole", "--data.train", str(whole))
    until_whole(tmp_path / "run", 1)
    second = launch_alone(tmp_path, etcd, config, "bad", "--data.train", str(bad.folder))
    assert second.wait(PATIENCE_S) == 65, (tmp_path / "bad.log").read_text()[-2000:]
    said = (tmp_path / "bad.log").read_text()
    assert any(f"{part['file']}: row group {part['row_group']} is damaged: bytes [" in said for part in damaged if part)
    assert first.wait(240) == 0, (tmp_path / "whole.log").read_text()[-2000:]
    forms = {line["term"]: line["world"] for line in history(tmp_path / "run") if line["op"] == "form"}
    assert [forms[term] for term in sorted(forms)] == [1, 2, 1], "in, and out once"
    assert not [line for line in history(tmp_path / "run") if line["op"] == "rollback"]
    alone = start([write_config(tmp_path / "alone", rows, STEPS)])
    assert alone.code == 0, alone.output
    results = [json.loads((folder / "run" / "result.json").read_text()) for folder in (tmp_path, tmp_path / "alone")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["holes"] == []
