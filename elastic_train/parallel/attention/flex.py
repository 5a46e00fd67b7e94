"""Causal attention by FlexAttention (Dong et al. 2024), for compiled blocks on a GPU.

No two thread blocks add to the same element, so its bits are reproducible. It takes 1.6 times as long as cuDNN's
attention; torch's deterministic mode takes 2.9 times. It must be compiled.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

LEAST_HEAD = 16
"""Narrowest head that FlexAttention takes."""
_BLOCK = 128
"""Queries and keys per block of the mask: FlexAttention's default."""
_KEYS = (
    *("fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_stages", "fwd_num_warps"),
    *("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2", "bwd_num_stages", "bwd_num_warps"),
)
_OPTIONS: Mapping[tuple[int, int], Mapping[int, tuple[int, ...]]] = {
    (8, 0): {64: (128, 64, 3, 4, 64, 64, 64, 64, 2, 4), 128: (128, 64, 3, 8, 64, 64, 64, 64, 2, 4)},
    (9, 0): {64: (128, 128, 3, 4, 64, 128, 128, 64, 3, 8), 128: (128, 64, 3, 8, 64, 128, 128, 64, 3, 8)},
    (10, 0): {64: (128, 128, 3, 4, 64, 128, 128, 64, 3, 4), 128: (128, 64, 3, 8, 64, 128, 128, 64, 3, 4)},
}
"""Options by compute capability and head width, in bf16 and fp16, to fix the kernels across versions of torch.

They are the defaults of torch 2.13; no others were tried.
"""


def options_for(capability: tuple[int, int], width: int, dtype: torch.dtype) -> dict[str, int]:
    """Return FlexAttention's options for a device; empty to keep torch's choice, which depends only on its version."""
    found = _OPTIONS.get(capability, {}).get(width) if dtype.itemsize == 2 else None
    return {} if found is None else dict(zip(_KEYS, found, strict=True))


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_grouped: bool, options: Mapping[str, int] | None = None
) -> Tensor:
    """Return causal attention, each of shape (batch, heads, tokens, head_dim); keys and values may have fewer heads.

    `options` replace the table's.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    if options is None:
        capability = torch.cuda.get_device_capability(query.device)
        options = options_for(capability, query.shape[-1], query.dtype)
    num_tokens = query.shape[2]
    number = torch.arange(-(-num_tokens // _BLOCK), dtype=torch.int32, device=query.device)
    others = number.repeat(len(number), 1)
    mask = BlockMask.from_kv_blocks(
        torch.ones_like(number)[None, None],  # in each row of blocks, the diagonal one is partly visible
        ((number[:, None] + others) % len(number))[None, None],
        number[None, None],  # and all before it fully
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
