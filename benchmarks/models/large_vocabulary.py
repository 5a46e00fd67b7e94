"""The loss of a large vocabulary in chunks of tokens, compared with the logits of all tokens at once."""

from __future__ import annotations

import time
from unittest import mock

import torch

from benchmarks.models.beside import resident
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.language import chunked_loss

VOCABULARY, DIM, NUM_PASSES = 50_304, 512, 3


def passes_of(num_tokens: int, *, in_chunks: bool) -> tuple[int, float]:
    """Return the peak bytes of a row's passes above weights and gradients, and the fewest CPU seconds of one pass."""
    torch.set_num_threads(1)
    task = CausalLM(model={"dim": DIM, "depth": 2, "heads": 8, "vocabulary": VOCABULARY}, max_tokens=num_tokens)
    model = task.build_model().train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(0, VOCABULARY, (1, num_tokens))
    batch = {"tokens": tokens, "places": torch.arange(num_tokens - 1), "targets": tokens[0, 1:]}
    base, seconds = resident("VmRSS"), list[float]()
    with mock.patch.object(chunked_loss, "FEWEST_ROWS", chunked_loss.FEWEST_ROWS if in_chunks else num_tokens):
        for _ in range(NUM_PASSES):
            began = time.process_time()
            torch.autograd.backward(task.loss(model, batch).total)
            seconds.append(time.process_time() - began)
    return resident("VmHWM") - base, min(seconds)
