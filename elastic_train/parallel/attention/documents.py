"""Causal attention within the documents of packed rows, without a mask: its work is that of each document alone.

One operator, which also compiled blocks call, computes it. The numbers and lengths of documents, which vary, are values
of tensors of fixed shapes, so a micro-batch of fixed width is one call for a compiler. The operator reads them from a
tensor of the host: no device is waited for.

On a GPU it is torch's FlashAttention for sequences of varying lengths, or the FA3 or FA4 that replaces it. In torch's
deterministic mode all three add in a fixed order (`_flash_attention_backward` passes the mode on). On a CPU the
documents are computed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

_ATEN = torch.ops.aten
WIDEST_HEAD = 256
"""Widest head that FlashAttention takes."""
_HALF = (torch.bfloat16, torch.float16)


class Documents(NamedTuple):
    """The runs of tokens that attend to each other, in rows as one sequence; none extends over two rows.

    Both tensors have 0, the end of every run, and then only the number of tokens, as often as they have room: shape
    (rows * width + 1,) of int32. `ends` is on the model's device.
    """

    ends: Tensor
    on_host: Tensor

    @classmethod
    def of(cls, on_host: Tensor, device: torch.device) -> Documents:
        return cls(on_host.to(device, non_blocking=True), on_host)


def documents_of(lengths: Sequence[int], device: torch.device) -> Documents:
    """Return runs of these lengths."""
    total = sum(lengths)
    ends = torch.full((total + 1,), total, dtype=torch.int32)
    ends[0] = 0
    ends[1 : 1 + len(lengths)] = torch.tensor(lengths).cumsum(0)
    return Documents.of(ends, device)


def lengths_of(on_host: Tensor) -> list[int]:
    """Return the lengths of the runs."""
    num_runs = int(torch.searchsorted(on_host, on_host[-1:]))  # a loop over all tokens would keep a GPU waiting
    lengths: list[int] = on_host[: num_runs + 1].diff().tolist()
    return lengths


def mask_of(documents: Documents, rows: int, width: int) -> Tensor:
    """Return which tokens each token sees; shape (rows, 1, width, width) of bool."""
    ends = documents.ends
    number = torch.searchsorted(ends[1:], torch.arange(rows * width, device=ends.device, dtype=torch.int32), right=True)
    number = number.view(rows, 1, width)
    causal = torch.ones(width, width, dtype=torch.bool, device=ends.device).tril()
    return (number[..., :, None] == number[..., None, :]) & causal


def attend_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Return attention of each token to those of its document up to itself; shapes as in `causal_attention`.

    Calls that the operator does not take are computed with a mask.
    """
    if has_torch_function((query, key, value)):
        return handle_torch_function(
            attend_documents, (query, key, value), query, key, value, documents, scale, dropout
        )
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if dropout or not takes(query, value):
        return by_mask(query, key, value, documents, scale, dropout)
    attended: Tensor = ATTEND(query, key, value, *documents, scale)[0]
    return attended


def takes(query: Tensor, value: Tensor) -> bool:
    """Return True if the operator takes such queries and values."""
    if query.shape[-1] != value.shape[-1]:
        return False
    return not query.is_cuda or (query.dtype in _HALF and query.shape[-1] <= WIDEST_HEAD)


def by_mask(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Compute the same with a mask."""
    mask = mask_of(documents, query.shape[0], query.shape[2])
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale, enable_gqa=is_grouped)


@torch.library.custom_op("elastic_train::attend_documents", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, on_host: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return attention, of the query's shape, and its log-sum-exp, of shape (heads, rows * width)."""
    if query.is_cuda:
        return _flash(query, key, value, ends, on_host, scale)
    attended, lengths = _like(query), lengths_of(on_host)
    made = [
        _ATEN._scaled_dot_product_flash_attention_for_cpu(*given, is_causal=True, scale=scale)
        for given in zip(*(torch.split(_in_one_row(each), lengths, 2) for each in (query, key, value)), strict=True)
    ]
    torch.cat([part for part, _ in made], 2, out=_in_one_row(attended))
    return attended, torch.cat([part for _, part in made], 2)[0]


@_attend.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, on_host: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    rows, heads, width, _ = query.shape
    return _like(query), query.new_empty(heads, rows * width, dtype=_sum_dtype(query))


@torch.library.custom_op("elastic_train::attend_documents_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    rest: Tensor,
    ends: Tensor,
    on_host: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    if query.is_cuda:
        return _flash_backward(gradient, query, key, value, attended, rest, ends, on_host, scale)
    whole = [*map(_in_one_row, (gradient, query, key, value, attended)), rest[None]]
    found, lengths = (_like(query), _like(key), _like(value)), lengths_of(on_host)
    made = [
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, True, scale=scale)
        for given in zip(*(torch.split(each, lengths, 2) for each in whole), strict=True)
    ]
    for one, parts in zip(found, zip(*made, strict=True), strict=True):
        torch.cat(parts, 2, out=_in_one_row(one))
    return found


@_attend_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    rest: Tensor,
    ends: Tensor,
    on_host: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(query), _like(key), _like(value)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale = inputs
    query, key, value, ends, on_host = tensors
    ctx.save_for_backward(query, key, value, *output, ends, on_host)  # type: ignore[arg-type]
    ctx.scale = scale  # type: ignore[attr-defined]
    ctx.set_materialize_grads(True)


def _back(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved, scale = ctx.saved_tensors, ctx.scale  # type: ignore[attr-defined]
    return *ATTEND_BACKWARD(gradient, *saved, scale), None, None, None


_attend.register_autograd(_back, setup_context=_keep)
ATTEND, ATTEND_BACKWARD = (getattr(torch.ops.elastic_train, f"attend_documents{which}") for which in ("", "_backward"))


def _like(tensor: Tensor) -> Tensor:
    """Return an empty tensor of the same shape, (rows, heads, width, size), whose tokens are contiguous."""
    return torch.empty_like(tensor.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _sum_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _in_one_row(tensor: Tensor) -> Tensor:
    """Return shape (1, heads, rows * width, size): a view of what `_like` returns."""
    return _flat(tensor).transpose(0, 1)[None]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, on_host: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    bounds, longest = _sequences(ends, on_host)
    found = _ATEN._flash_attention_forward(
        *map(_flat, (query, key, value)), bounds, bounds, longest, longest, 0.0, True, False, scale=scale
    )
    return _in_rows(found[0], query), found[1]


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    rest: Tensor,
    ends: Tensor,
    on_host: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    bounds, longest = _sequences(ends, on_host)
    given = map(_flat, (gradient, query, key, value, attended))
    drawn = torch.zeros(2, dtype=torch.int64, device=ends.device).view(torch.uint64)  # a copy would wait for the device
    found = _ATEN._flash_attention_backward(
        *given, rest, bounds, bounds, longest, longest, 0.0, True, drawn, ends.new_empty(0), scale=scale
    )
    of_query, of_key, of_value = (_in_rows(flat, like) for flat, like in zip(found, (query, key, value), strict=True))
    return of_query, of_key, of_value


def _sequences(ends: Tensor, on_host: Tensor) -> tuple[Tensor, int]:
    """Return the bounds of the runs on the device, and the length of the longest."""
    lengths = lengths_of(on_host)
    return ends[: len(lengths) + 1], max(lengths)


def _flat(tensor: Tensor) -> Tensor:
    """Return shape (rows * width, heads, size) for (rows, heads, width, size)."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _in_rows(flat: Tensor, like: Tensor) -> Tensor:
    rows, _, width, _ = like.shape
    return flat.view(rows, width, *flat.shape[1:]).transpose(1, 2)
