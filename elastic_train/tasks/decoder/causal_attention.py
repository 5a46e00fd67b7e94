"""Causal attention by one kernel, where a block is compiled for a GPU: the fastest that has the same bits every time.

In deterministic mode torch leaves cuDNN's attention out and lets FlashAttention's backward pass take its turns: forward
and backward take 2.9 times what cuDNN's take without it. FlexAttention (Dong et al. 2024) adds nothing up by several
blocks at once, so it is deterministic as it is, at 1.6 times. It has to be compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 128
"""Queries, and keys, of a block of the mask: what FlexAttention takes by default."""
_LEAST_HEAD = 16
"""FlexAttention refuses heads that are narrower."""


def is_compiled_for(query: Tensor) -> bool:
    """Say whether a block is being compiled for a GPU, to have the same bits every time, and its heads are wide enough
    for that kernel."""
    if not (torch.compiler.is_compiling() and query.is_cuda and query.shape[-1] >= _LEAST_HEAD):
        return False
    return torch.are_deterministic_algorithms_enabled()


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, is_grouped: bool) -> Tensor:
    """Return causal attention, each of shape (batch, heads, tokens, head_dim); keys and values may have fewer heads."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    num_tokens = query.shape[2]
    number = torch.arange(-(-num_tokens // _BLOCK), dtype=torch.int32, device=query.device)
    others = number.repeat(len(number), 1)
    mask = BlockMask.from_kv_blocks(
        torch.ones_like(number)[None, None],  # of each row of blocks, the diagonal one is partly visible
        ((number[:, None] + others) % len(number))[None, None],
        number[None, None],  # and all before it wholly
        others[None, None],
        BLOCK_SIZE=_BLOCK,
        mask_mod=_is_visible,
        seq_lengths=(num_tokens, num_tokens),
    )
    attended = flex_attention(query, key, value, block_mask=mask, enable_gqa=is_grouped)
    assert isinstance(attended, Tensor)
    return attended


def _is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
