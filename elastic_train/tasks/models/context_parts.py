"""Context parallelism for transformers models: ranks compute some tokens of each row, through our own attention.

Our attention (`own_attention`) gathers keys and values of all parts, then does what torch's (`sdpa`) does, with the
mask of this part's tokens.

A trial before training checks that a model computes the same: with rows in parts, each of which gets the other tokens'
tensors from a pass of whole rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from elastic_train.config.combinations import Found
from elastic_train.tasks.models.hugging_face import model_of_transformers
from elastic_train.tasks.models.own_attention import GATHER, Gather, attend_by_ours
from elastic_train.tasks.models.packed_rows import Run, depends_on_length, most_rounding, restricted, tried
from elastic_train.tasks.rows.token_rows import bias_of, tokens_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
_RUNS = 3
"""Tokens in a run of each part in the trial."""


def logits_of_part(model: nn.Module, mine: Mapping[str, Tensor], gather: Gather) -> Tensor:
    """Return logits of a part of rows, given its tokens, positions and mask (`part_of`)."""
    _, model = model_of_transformers(model)
    attend_by_ours(model, restricted)
    tokens, weights = mine["tokens"], next(model.parameters())
    positions = mine["positions"].expand(tokens.shape)
    named = {"attention_mask": bias_of(mine["mask"], weights.dtype), "position_ids": positions, GATHER: gather}
    found: Tensor = model(input_ids=tokens, use_cache=False, **named).logits
    return found


def try_parts_of_rows(model: nn.Module, count: int, max_tokens: int) -> Iterator[Found]:
    """Yield why ranks cannot compute rows of up to this many tokens of a model together.

    A model of fake tensors, without values, is not tried.
    """
    _, inner = model_of_transformers(model)  # its layers include the adapters, if any
    kind, config = type(inner).__name__, inner.config.get_text_config()
    wrong = _depends_on_length(config, max_tokens)
    if not wrong:
        seen = tried(inner, f"{count} parts", lambda run: _difference(inner, run, count, config.vocab_size))
        wrong = seen.difference or (seen.error and f"fails on rows in parts ({seen.error})")
    if wrong:
        yield Found("tokens mixed outside attention", f"{kind}, which {wrong}")


def _depends_on_length(config: PretrainedConfig, max_tokens: int) -> str:
    """Return in what a model treats rows of this many tokens differently from short ones; "" if in nothing."""
    for name in _WINDOWS:
        size = getattr(config, name, None)
        if isinstance(size, int) and size < max_tokens:
            return f"attends within windows ({name}: {size}) that are shorter than its rows ({max_tokens} tokens)"
    return depends_on_length(config, max_tokens)


def _difference(model: nn.Module, run: Run, count: int, vocabulary: int) -> str:
    """Return how parts of rows differ from the model's own pass of whole rows; "" if they do not."""
    is_same = all(_compared(model, run, count, vocabulary))
    return "" if is_same else "gives other results for rows in parts than for whole ones"


def _compared(model: nn.Module, run: Run, count: int, vocabulary: int) -> Iterator[bool]:
    """Yield whether a pass of whole rows with our attention, and each part's, equal the model's own."""
    width = 2 * count * _RUNS
    tokens = torch.arange(2 * width).view(2, width) * 7 % vocabulary

    def part(places: Tensor, order: Tensor, gather: Gather) -> Tensor:
        mask = bias_of((order <= places[:, None])[None, None], torch.float32)
        mine = tokens[:, places]
        named = {"position_ids": places.expand(mine.shape), "attention_mask": mask, GATHER: gather}
        return run(input_ids=mine, **named)

    own = run(input_ids=tokens)
    attend_by_ours(model, restricted)
    gathered, places = list[Tensor](), torch.arange(width)
    yield _is_like(part(places, places, lambda tensor: gathered.append(tensor) or tensor), own)  # type: ignore[func-returns-value]
    yield bool(gathered)
    by_part = [tokens_of(width, number, count) for number in range(count)]
    for mine in by_part:
        left, same = iter(gathered), list[bool]()
        logits = part(mine, torch.cat(by_part), lambda tensor: _all_of(tensor, next(left), mine, by_part, same))  # noqa: B023 - called at once
        yield _is_like(logits, own[:, mine]) and all(same) and next(left, None) is None


def _all_of(tensor: Tensor, whole: Tensor, mine: Tensor, by_part: list[Tensor], same: list[bool]) -> Tensor:
    """Return what a pass of whole rows gathered, in part order; record whether this part's own is equal."""
    same.append(_is_like(tensor, whole[..., mine, :]))
    return whole[..., torch.cat(by_part), :]


def _is_like(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are equal up to rounding."""
    return one.shape == other.shape and bool(((one - other).abs() <= most_rounding(other)).all())
