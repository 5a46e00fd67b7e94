"""Attention within documents: each is computed as it is alone. A stand-in takes the place of a GPU's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_train.parallel.attention import documents as documents_module
from elastic_train.parallel.attention.documents import (
    _attend_backward,
    _flash,
    _flash_backward,
    attend_documents,
    by_mask,
    documents_of,
    lengths_of,
    mask_of,
)

CPU = torch.device("cpu")
ROWS, WIDTH = 2, 40
LENGTHS = [10, 30, 1, 2, 37]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def drawn(dtype: torch.dtype, heads: int, size: int = 16) -> Tensor:
    """Return a tensor of shape (rows, heads, width, size), laid out as layers return it."""
    return torch.randn(ROWS, WIDTH, heads, size).to(dtype).transpose(1, 2)


def passes(attend: Attend, query: Tensor, key: Tensor, value: Tensor, back: Tensor) -> list[Tensor]:
    """Return what a function computes, and the gradients of its inputs."""
    given = [each.detach().clone().requires_grad_() for each in (query, key, value)]
    attended = attend(*given)
    return [attended, *torch.autograd.grad(attended, given, back)]


def alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend by torch's function, called for each document."""
    attended, lo = torch.zeros_like(query), 0
    for length in LENGTHS:
        row, start = divmod(lo, WIDTH)
        place = slice(row, row + 1), slice(None), slice(start, start + length)
        one = F.scaled_dot_product_attention(query[place], key[place], value[place], is_causal=True, enable_gqa=True)
        attended = attended.index_put((torch.tensor(row), *_grid(query.shape[1], start, length)), one[0])
        lo += length
    return attended


def _grid(heads: int, start: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.arange(heads)[:, None], torch.arange(start, start + length)[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_document_has_the_bits_that_it_has_alone(dtype: torch.dtype, kv_heads: int) -> None:
    """With one-token documents, grouped heads, and several documents in some rows; a mask gives the same numbers."""
    torch.manual_seed(1)
    given = drawn(dtype, 4), drawn(dtype, kv_heads), drawn(dtype, kv_heads), drawn(dtype, 4)
    documents = documents_of(LENGTHS, CPU)
    found = passes(lambda q, k, v: attend_documents(q, k, v, documents), *given)
    assert all(map(torch.equal, found, passes(alone, *given)))
    masked = passes(lambda q, k, v: by_mask(q, k, v, documents), *given)
    tolerance = {torch.bfloat16: 0.05}.get(dtype, 2e-6)
    for one, other in zip(found, masked, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_the_mask_lets_tokens_see_their_document_up_to_themselves() -> None:
    mask = mask_of(documents_of([2, 2, 1, 3], CPU), 2, 4)
    assert mask.int()[:, 0].tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]],
    ]


@pytest.fixture
def compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_code_takes_other_documents_of_the_same_width_as_they_are(compiler: None) -> None:
    """One code for all, with the bits of uncompiled code."""
    given, back = (drawn(torch.float32, 4), drawn(torch.float32, 2), drawn(torch.float32, 2)), drawn(torch.float32, 4)
    compiled = torch.compile(attend_documents, dynamic=False)
    for lengths in (LENGTHS, [40, 1, 39], [40, 40]):
        documents = documents_of(lengths, CPU)
        with torch.compiler.set_stance("default" if lengths is LENGTHS else "fail_on_recompile"):
            found = passes(lambda q, k, v: compiled(q, k, v, documents), *given, back)  # noqa: B023 - called at once
        plain = passes(lambda q, k, v: attend_documents(q, k, v, documents), *given, back)  # noqa: B023
        assert all(map(torch.equal, found, plain))


def test_calls_that_the_operator_does_not_take_have_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout, and values of another width; on a GPU also fp32."""
    masked = []
    monkeypatch.setattr(documents_module, "by_mask", lambda *given: masked.append(given[4:]) or given[0])
    query, documents = drawn(torch.float32, 4), documents_of(LENGTHS, CPU)
    attend_documents(query, query, query, documents, 0.5, 0.1)
    attend_documents(query, query, drawn(torch.float32, 4, 8), documents)
    assert masked == [(0.5, 0.1), (None, 0.0)]
    call = SimpleNamespace(is_cuda=True, shape=query.shape, dtype=torch.float32)
    assert not documents_module.takes(call, call)  # type: ignore[arg-type]
    call.dtype = torch.bfloat16
    assert documents_module.takes(call, call)  # type: ignore[arg-type]


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, same: Tensor, longest: int, *rest: object, scale: object
) -> tuple[Tensor, Tensor]:
    """Attend as a GPU's kernel does: (tokens, heads, size), with bounds of sequences on the device."""
    assert same is bounds and rest == (longest, 0.0, True, False) and bounds.dtype == torch.int32
    assert longest == int(bounds.diff().max())
    attended, sums = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for lo, hi in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        one = [each[lo:hi].transpose(0, 1)[None] for each in (query, key, value)]
        made, sums[None, :, lo:hi] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *one, is_causal=True, scale=scale
        )
        attended[lo:hi] = made[0].transpose(0, 1)
    return attended, sums


def flash_backward(
    back: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    sums: Tensor,
    bounds: Tensor,
    same: Tensor,
    longest: int,
    *rest: object,
    scale: object,
) -> list[Tensor]:
    assert same is bounds and rest[:3] == (longest, 0.0, True) and len(rest) == 5
    found = [torch.empty_like(each) for each in (query, key, value)]
    for lo, hi in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        one = [each[lo:hi].transpose(0, 1)[None] for each in (back, query, key, value, attended)]
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *one, sums[None, :, lo:hi], 0.0, True, scale=scale
        )
        for whole, part in zip(found, parts, strict=True):
            whole[lo:hi] = part[0].transpose(0, 1)
    return found


def test_a_gpus_kernels_get_the_documents_as_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bounds without the filling, and the longest one's length, which the host knows."""
    query, key, value = drawn(torch.float32, 4), drawn(torch.float32, 2), drawn(torch.float32, 2)
    back, documents = drawn(torch.float32, 4), documents_of(LENGTHS, CPU)
    attended, *sums = torch.ops.elastic_train.attend_documents(query, key, value, *documents, 0.3)
    expected = _attend_backward(back, query, key, value, attended, *sums, *documents, 0.3)
    kernels = SimpleNamespace(_flash_attention_forward=flash_forward, _flash_attention_backward=flash_backward)
    monkeypatch.setattr(documents_module, "_ATEN", kernels)
    found = _flash(query, key, value, *documents, 0.3)
    assert torch.equal(found[0], attended) and torch.equal(found[1], *sums)
    gradients = _flash_backward(back, query, key, value, *found, *documents, 0.3)
    assert all(map(torch.equal, gradients, expected))
    assert lengths_of(documents.on_host) == LENGTHS
