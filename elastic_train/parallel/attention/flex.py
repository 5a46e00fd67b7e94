"""Causal attention by FlexAttention (Dong et al. 2024), where a block is compiled for a GPU.

It adds nothing up by several blocks at once, so it has the same bits every time: at 1.6 times the time of cuDNN's
attention, where torch's deterministic mode takes 2.9 times. It has to be compiled.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

LEAST_HEAD = 16
"""FlexAttention refuses heads that are narrower."""
_BLOCK = 128
"""Queries, and keys, of a block of the mask: what FlexAttention takes by default."""
_KEYS = (
    *("fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_stages", "fwd_num_warps"),
    *("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2", "bwd_num_stages", "bwd_num_warps"),
)
_OPTIONS: Mapping[tuple[int, int], Mapping[int, tuple[int, ...]]] = {
    (8, 0): {64: (128, 64, 3, 4, 64, 64, 64, 64, 2, 4), 128: (128, 64, 3, 8, 64, 64, 64, 64, 2, 4)},
    (9, 0): {64: (128, 128, 3, 4, 64, 128, 128, 64, 3, 8), 128: (128, 64, 3, 8, 64, 128, 128, 64, 3, 8)},
    (10, 0): {64: (128, 128, 3, 4, 64, 128, 128, 64, 3, 4), 128: (128, 64, 3, 8, 64, 128, 128, 64, 3, 4)},
}
"""By compute capability and width of a head, in bf16 and fp16: the kernels are these in every version of torch. Torch
2.13 takes the same by itself; no others were tried."""


def options_for(capability: tuple[int, int], width: int, dtype: torch.dtype) -> dict[str, int]:
    """Return FlexAttention's options for a device; none where torch's own choice, which a version fixes, remains."""
    found = _OPTIONS.get(capability, {}).get(width) if dtype.itemsize == 2 else None
    return {} if found is None else dict(zip(_KEYS, found, strict=True))


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_grouped: bool, options: Mapping[str, int] | None = None
) -> Tensor:
    """Return causal attention, each of shape (batch, heads, tokens, head_dim); keys and values may have fewer heads.

    `options` take the place of the table's.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    if options is None:
        capability = torch.cuda.get_device_capability(query.device)
        options = options_for(capability, query.shape[-1], query.dtype)
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
    attended = flex_attention(
        query,
        key,
        value,
        block_mask=mask,
        enable_gqa=is_grouped,
        kernel_options=dict(options) or None,  # type: ignore[arg-type]
    )
    assert isinstance(attended, Tensor)
    return attended


def _is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
