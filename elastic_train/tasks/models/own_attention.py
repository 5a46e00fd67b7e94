"""The attention of transformers models in which ranks compute parts of rows, or documents are computed without a mask.

Transformers calls attention by name (`AttentionInterface`), and passes additional forward arguments to that function,
layer by layer. Ours gathers keys and values of all parts, or attends within documents where a layer's mask is left out.
Otherwise it is torch's (`sdpa`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from elastic_train.parallel.attention.documents import Documents, attend_documents

ATTENTION = "elastic_train"
GATHER = "gather_keys_and_values"
DOCUMENTS = "documents_without_mask"
Gather = Callable[[Tensor], Tensor]


def attend_by_ours(model: nn.Module, restricted: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Make a transformers model use our attention from now on, with masks of torch's as `restricted` returns them."""
    inner: Any = model
    if inner.config._attn_implementation == ATTENTION:
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, restricted(sdpa_mask))
    inner.set_attn_implementation(ATTENTION)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    gather: Gather | None = named.pop(GATHER, None)
    documents: Documents | None = named.pop(DOCUMENTS, None)
    if gather is not None:
        key, value = _gathered(gather, key, value)
    if documents is not None and attention_mask is None:
        scale, dropout = named.get("scaling"), named.get("dropout", 0.0)
        return attend_documents(query, key, value, documents, scale, dropout).transpose(1, 2), None
    made: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    return made


def _gathered(gather: Gather, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    if key.shape != value.shape:
        return gather(key), gather(value)
    both = gather(torch.stack((key, value)))
    return both[0], both[1]
