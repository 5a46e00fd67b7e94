"""Damage the results of a good recorded run: a job that ended too early, a last commit with false contents."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import yaml

from chaos.judge.evidence.run_files import MANIFEST, Line, collect, part, record_files
from chaos.judge.evidence.stored_weights import digest_of
from chaos.planted.edits import edit, edit_json, edit_result, forge


def ended_early(folder: Path) -> None:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "epochs": 600, "max_steps": None}))


def fewer_rows(folder: Path) -> None:
    files = json.loads((folder / MANIFEST).read_text())["files"]
    edit_json(folder / MANIFEST, files=[*files, {"row_groups": [12]}])


def _last(folder: Path) -> Line:
    fields = collect(folder).commits[-1].fields
    assert fields is not None, "a good run"
    return fields


def missing_file(folder: Path) -> None:
    last = _last(folder)
    (folder / str(last["attempt"]) / min(part(last, "files"))).unlink()


def flipped_byte(folder: Path) -> None:
    last = _last(folder)
    path = folder / str(last["attempt"]) / max(part(last, "files"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def other_step_delivered(folder: Path) -> None:
    *_, before, _ = [commit.fields for commit in collect(folder).commits]
    assert before is not None, "a good run"
    stored = {key: before[key] for key in ("attempt", "files", "weights_sha256")}
    _change_last(folder, stored)


def other_claim(folder: Path) -> None:
    digest = "ab" * 32
    _change_last(folder, {"weights_sha256": digest})
    edit_result(folder, weights_sha256=digest)
    edit(folder, lambda line: {**line, "weights_sha256": digest} if line["op"] == "end" else line)


def nan_weights(folder: Path) -> None:
    import torch

    run = collect(folder)
    assert run.load is not None, "it was collected from files"
    weights = {name: torch.full_like(tensor, float("nan")) for name, tensor in run.load(_last(folder)).items()}
    digest = digest_of(weights, {"format": 4})
    _change_last(folder, {"format": 4, **_saved(folder, {"model": weights}), "weights_sha256": digest})
    edit_result(folder, weights_sha256=digest)
    edit(folder, lambda line: {**line, "weights_sha256": digest} if line["op"] == "end" else line)


def other_state(folder: Path) -> None:
    import torch

    run = collect(folder)
    *_, before, _ = [commit.fields for commit in run.commits]
    assert run.load is not None and before is not None, "a good run"
    changed = _saved(folder, {"model": dict(run.load(before)), "optimizer": {"moment": torch.full((3,), 0.5)}})
    forge(folder, lambda record: {**record, **changed} if record["step"] == before["step"] else record)


def _saved(folder: Path, state: dict[str, Any]) -> Line:
    """Save a state below data/, and return the record's fields for its files."""
    from blake3 import blake3
    from torch.distributed.checkpoint.state_dict_saver import save

    attempt = "data/another"
    save(state, checkpoint_id=folder / attempt, no_dist=True)
    held = {path.name: path.read_bytes() for path in (folder / attempt).iterdir()}
    files = {
        name: {"size": len(content), "blake3": blake3(content).hexdigest(), "blocks": [zlib.crc32(content)]}
        for name, content in held.items()
    }
    return {"attempt": attempt, "files": files}


def _change_last(folder: Path, fields: Line) -> None:
    """Change the newest commit's record."""
    key = json.loads(record_files(folder)[-1].read_text())
    place = key["term"], key["step"]
    forge(folder, lambda record: {**record, **fields} if (record["term"], record["step"]) == place else record)
