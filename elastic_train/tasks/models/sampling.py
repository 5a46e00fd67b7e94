"""Generate the following tokens, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elastic_train.errors import ConfigError
from elastic_train.tasks.task import Sampling


def check_prompt(ids: Sequence[int], vocabulary: int, most: int | None, sampling: Sampling) -> None:
    """Reject a prompt that is empty, has invalid ids, or leaves a model of `most` positions no room."""
    if not ids:
        raise ConfigError("the prompt has no tokens: give at least one")
    if wrong := [id_ for id_ in ids if not 0 <= id_ < vocabulary]:
        raise ConfigError(f"the prompt has token id {wrong[0]}, the model takes those from 0 to {vocabulary - 1}")
    if most is not None and len(ids) + sampling.num_tokens > most:
        raise ConfigError(
            f"the prompt's {len(ids)} tokens and {sampling.num_tokens} more are too many for a model of {most} "
            "positions: ask for fewer, or shorten the prompt"
        )


def go_on(model: nn.Module, ids: Sequence[int], sampling: Sampling) -> list[int]:
    """Return the tokens that follow `ids`: by transformers, which caches keys and values, or one by one."""
    device = next(model.parameters()).device
    tokens = torch.tensor([list(ids)], device=device)
    if hasattr(model, "generate"):
        found: Any = model
        how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        if sampling.temperature > 0:
            how = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": None}
        mask = torch.ones_like(tokens)
        tokens = found.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=sampling.num_tokens, **how)
    else:
        for _ in range(sampling.num_tokens):
            tokens = torch.cat((tokens, choose(model(tokens)[:, -1].float(), sampling)), dim=1)
    following: list[int] = tokens[0, len(ids) :].tolist()
    return following


def choose(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return a token for each row of logits, (rows, vocabulary); shape (rows, 1)."""
    if sampling.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits / sampling.temperature).softmax(-1), 1)
