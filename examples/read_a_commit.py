"""Read the newest commit of a run with torch and a BLAKE3 alone, as docs/formats.md describes it.

python examples/read_a_commit.py RUN      # a local folder that holds commits/
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import sys
from pathlib import Path

import torch
from blake3 import blake3

FORMATS = (3, 4)


def newest_record(run: Path) -> dict:
    """Return the newest sealed record: order is (term, step), never time."""
    records = [path for path in (run / "commits").iterdir() if re.fullmatch(r"\d{8,}-\d{12,}\.json", path.name)]
    for path in sorted(records, key=lambda path: tuple(map(int, path.stem.split("-"))), reverse=True):
        try:
            record = dict(json.loads(path.read_bytes()))
        except (ValueError, TypeError):
            record = {}
        if record == {"void": True}:
            continue  # a place that a sweep has taken: no commit
        seal = record.pop("seal", None)
        canonical = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        if seal == hashlib.sha256(canonical).hexdigest() and record["format"] in FORMATS:
            return record
        sys.stderr.write(f"passing over {path.name}: damaged, or of another format\n")
    raise SystemExit(f"{run}: no commit that can be read")


def read_commit(run: Path) -> dict[tuple, object]:
    """Return every tensor and plain value of the newest commit by its path in the state."""
    record = newest_record(run)
    files = {}
    for name, facts in record["files"].items():
        files[name] = (run / record["attempt"] / name).read_bytes()
        if len(files[name]) != facts["size"] or blake3(files[name]).hexdigest() != facts["blake3"]:
            raise SystemExit(f"{record['attempt']}/{name} does not match its record")
    metadata = pickle.loads(files[".metadata"])  # a pickle: only opened now that its digest has cleared it
    leaves: dict[tuple, object] = {}
    for index, place in metadata.storage_data.items():
        piece = io.BytesIO(files[place.relative_path][place.offset : place.offset + place.length])
        value = torch.load(piece, weights_only=True)
        path = tuple(metadata.planner_data[index.fqn])
        if index.offset is None:  # a plain value
            leaves[path] = value
            continue
        stored = metadata.state_dict_metadata[index.fqn]
        whole = leaves.setdefault(path, torch.empty(stored.size, dtype=stored.properties.dtype))
        whole[tuple(slice(lo, lo + num) for lo, num in zip(index.offset, value.shape, strict=True))] = value
    return leaves


if __name__ == "__main__":
    for path, value in read_commit(Path(sys.argv[1])).items():
        shown = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
        sys.stdout.write(f"{'.'.join(map(str, path))} {shown}\n")
