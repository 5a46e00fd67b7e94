"""Passes of a decoder on a packed row: documents computed by themselves, and the same with a mask, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import torch

from benchmarks.beside import WARM_TURNS, never, now_of
from elastic_train.parallel.attention.kernels import trying_documents
from elastic_train.parallel.devices.repeats import begin_as_a_trainer
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import DecoderShape
from elastic_train.tasks.rows.token_rows import ENDS, TokenColumns
from elastic_train.tasks.task import on_device


def packed_over_mask(
    shape: DecoderShape,
    num_tokens: int,
    num_documents: int,
    device: str,
    num_passes: int,
    is_over: Callable[[], bool] = never,
) -> float:
    """Return the median time of forward and backward passes without a mask over that with one.

    Once `is_over`, the passes timed so far are enough if there is one.
    """
    torch.set_num_threads(1)
    begin_as_a_trainer()
    where, is_gpu = torch.device(device), device == "cuda"
    sizes = {name: getattr(shape, name) for name in ("dim", "depth", "heads", "vocabulary")}
    task = CausalLM(model=sizes, max_tokens=num_tokens)
    model = task.build_model().train().to(where)
    row = np.arange(num_tokens) % shape.vocabulary
    documents = np.arange(num_tokens) * num_documents // num_tokens
    rows = pa.table({"tokens": [row.tolist()], "documents": [documents.tolist()]})
    columns = TokenColumns("tokens", documents="documents")
    batch = on_device(columns.collate(rows, np.arange(1), num_tokens, shape.vocabulary), where)
    masked = {name: tensor for name, tensor in batch.items() if name != ENDS}
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARM_TURNS + num_passes):
        for given, times in zip((batch, masked), seconds, strict=True):
            began = now_of(where)
            with trying_documents(), torch.autocast(device, torch.bfloat16, enabled=is_gpu):
                torch.autograd.backward(task.loss(model, given).total)
            times.append(now_of(where) - began)
            model.zero_grad()
        if len(seconds[0]) > WARM_TURNS and is_over():
            break
    without, with_mask = (statistics.median(times[WARM_TURNS:]) for times in seconds)
    return without / with_mask
