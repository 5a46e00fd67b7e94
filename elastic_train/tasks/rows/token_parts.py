"""Some tokens of each row of a micro-batch, as computed by one of several ranks.

Of twice as many runs of tokens as parts, each part has one from the left and its mirror image from the right, so that
all parts have equal work in causal attention (as in Llama 3, Grattafiori et al. 2024, section 3.3.2).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_train.tasks.placements import ContextPart
from elastic_train.tasks.task import Batch

PADDING = -1
"""Document number of tokens that belong to none."""


def tokens_of(width: int, number: int, count: int) -> Tensor:
    """Return the ascending positions of a part's tokens, in rows of a width that is a multiple of 2 * count."""
    run = width // (2 * count)
    left, right = number * run, (2 * count - 1 - number) * run
    return torch.cat((torch.arange(left, left + run), torch.arange(right, right + run)))


def causal_within(documents: Tensor) -> Tensor:
    """Return which tokens each token sees: those of its document up to itself; (rows, 1, width, width) of bool."""
    width = documents.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as a bias on attention scores: all blocks then share one tensor instead of making their own."""
    if torch.is_autocast_enabled(mask.device.type):
        dtype = torch.get_autocast_dtype(mask.device.type)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def part_of(batch: Batch, part: ContextPart) -> Batch:
    """Return a part of the output of `TokenColumns.collate`.

    It has the part's `tokens` and `positions` (rows, width of the part), `places` in their flat form, and `targets`, as
    a micro-batch does; `mask` (rows or 1, 1, width of the part, width of all) is true where a token of the part sees
    one of all parts', in part order.
    """
    tokens, device = batch["tokens"], batch["tokens"].device
    width = tokens.shape[1]
    missing = -width % (part.count * math.lcm(2, part.multiple))
    by_part = [tokens_of(width + missing, number, part.count).to(device) for number in range(part.count)]
    mine, all_of_them = by_part[part.number], torch.cat(by_part)
    mask = (all_of_them <= mine[:, None])[None, None]
    positions, in_row = batch.get("positions"), mine.clamp(max=width - 1)  # a model may have no positions for padding
    if (documents := batch.get("documents")) is not None:
        padded = F.pad(documents, (0, missing), value=PADDING)
        mask = mask & (padded[:, mine, None] == padded[:, None, all_of_them])[:, None]
    number_of = torch.full((width + missing,), -1, device=device)
    number_of[mine] = torch.arange(len(mine), device=device)
    row, place = batch["places"] // width, number_of[batch["places"] % width]
    is_mine = place >= 0
    return {
        "tokens": F.pad(tokens, (0, missing))[:, mine],
        "positions": in_row[None] if positions is None else F.pad(positions, (0, missing))[:, mine],
        "places": (row * len(mine) + place)[is_mine],
        "targets": batch["targets"][is_mine],
        "mask": mask,
    }
