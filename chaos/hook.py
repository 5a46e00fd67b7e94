"""Three lines by which any training script logs, for `elastic-chaos run --command`, which samples it has applied.

    from chaos.hook import log_ids
    ids, inputs, targets = batch                                   # the dataset gives out row numbers, too
    log_ids(ids, step=step, epoch=epoch, of=len(dataset))          # right after optimizer.step()

A call appends a line of JSON to a file of its process's own, where the variable ELASTIC_CHAOS_IDS names a folder, and
does nothing elsewhere. It imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from operator import index
from pathlib import Path
from typing import Protocol

VARIABLE = "ELASTIC_CHAOS_IDS"


class HasToList(Protocol):
    """A tensor or an array of row numbers, of one dimension."""

    def tolist(self) -> list[int]: ...


class HasItem(Protocol):
    """A tensor or an array of one number."""

    def item(self) -> float: ...


def log_ids(
    ids: Iterable[int] | HasToList, *, step: int, epoch: int, of: int, loss: HasItem | float | None = None
) -> None:
    """Say that this rank's part of an optimizer step was applied.

    `ids` are the row numbers in this rank's batch; `step` counts the steps applied so far, this one included, as the
    script itself counts them when it continues from a snapshot; `of` is the number of rows in the dataset. `loss`, if
    given, is drawn. Raises TypeError for numbers that are not whole, or rows that are not of one dimension, and OSError
    where the line cannot be written: the run could not be judged.
    """
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return
    rows = [int(row) for row in (ids.tolist() if hasattr(ids, "tolist") else ids)]
    shown = loss if loss is None or isinstance(loss, int | float) else loss.item()
    place = {"step": index(step), "epoch": index(epoch), "of": index(of)}
    line = {"t": time.time(), **place, "loss": shown, "ids": rows}
    content = json.dumps(line).encode() + b"\n"
    file = os.open(Path(folder) / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        num_written = os.write(file, content)
    finally:
        os.close(file)
    if num_written < len(content):
        raise OSError(f"a line of {folder} was cut after {num_written} of {len(content)} bytes; make room on the disk")
