"""Commands that have another name today, or that other trainers have, and what to type for them."""

from __future__ import annotations

from collections.abc import Sequence

RENAMED = {
    "why": "status RUN --why",
    "resume": "train CONFIG, the same line again",
    "checkpoint": "ckpt ls RUN",
    "ckpt show": "ckpt ls RUN COMMIT",
    "ckpt list": "ckpt ls RUN",
    "ckpt verify": "ckpt ls RUN --verify",
    "ckpt unpin": "ckpt pin RUN COMMIT --remove",
    "ckpt export": "export RUN --to safetensors",
    "job top": "top JOB --etcd HOST:2379",
    "job ls": "top --etcd HOST:2379",
    "job show": "top JOB --etcd HOST:2379 --once",
    "job leave": "leave JOB NODE --etcd HOST:2379",
    "job stop": "leave JOB --all --etcd HOST:2379",
    "job": "top --etcd HOST:2379, or leave JOB NODE --etcd HOST:2379",
    "data lengths": "data verify DATA --add-lengths COLUMN",
    "data checksum": "data verify DATA --add-checksums",
    "data import digits": "data import images OUT --digits",
    "data import jsonl": "data import rows OUT FILE.jsonl",
    "data import csv": "data import rows OUT FILE.csv",
    "data import chats": "data import rows OUT FILE.jsonl --tokenizer MODEL_FOLDER",
    "data import hf": "data import hf-folder OUT FOLDER",
    "import": "data import",
}
"""The successor of each, as it is typed after `elastic-train`; the longest that fits the arguments counts."""


def successor(arguments: Sequence[str]) -> str | None:
    """Return what to say of arguments whose command has another name today; None if they name a command."""
    for length in (3, 2, 1):
        if (today := RENAMED.get(" ".join(arguments[:length]))) is not None and len(arguments) >= length:
            return f"`{' '.join(arguments[:length])}` is now `{today}`"
    return None
