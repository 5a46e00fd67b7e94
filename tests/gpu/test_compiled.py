"""Compiled blocks on a device: one hash in every world, and attention that has the same bits every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from elastic_train.parallel.attention.documents import attend_documents, by_mask, documents_of
from elastic_train.parallel.attention.kernels import causal_attention
from tests.gpu.conftest import DEVICE
from tests.gpu.test_training import hash_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("degrees", [{}, {"tensor": 2}, {"context": 2}], ids=str)
def test_worlds_that_share_a_device_have_one_hash(
    tmp_path: Path, rows: Path, device: str, degrees: dict[str, int]
) -> None:
    task = {
        "path": "elastic_train.tasks.causal_lm:CausalLM",
        "params": {"max_tokens": 16, "model": {"dim": 32, "depth": 2, "heads": 4, "kv_heads": 2, "vocabulary": 64}},
    }
    data = {"train": str(rows / "train"), "validation": str(rows / "validation"), "too_long": "truncate"}
    keys: dict[str, object] = {"task": task, "data": data, "compile": True, "precision": "bf16", "parallel": degrees}
    worlds = (2, 4) if degrees else (None, 2)
    found = {num: hash_of(tmp_path / str(num), rows, device, num, **keys) for num in worlds}
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("is_compiled", [False, True])
def test_packed_rows_have_one_hash_in_every_world(tmp_path: Path, rows: Path, device: str, is_compiled: bool) -> None:
    """Their documents are computed by the kernel that was chosen at start, which is named."""
    task = {
        "path": "elastic_train.tasks.causal_lm:CausalLM",
        "params": {
            "max_tokens": 16,
            "fixed_width": True,
            "document_ids": "input_ids",  # equal neighbours are a document
            "model": {"dim": 64, "depth": 2, "heads": 4, "kv_heads": 2, "vocabulary": 64},
        },
    }
    data = {"train": str(rows / "train"), "validation": str(rows / "validation"), "too_long": "truncate"}
    keys: dict[str, object] = {"task": task, "data": data, "compile": is_compiled, "precision": "bf16"}
    found = {num: hash_of(tmp_path / str(num), rows, device, num, **keys) for num in (None, 2)}
    assert len(set(found.values())) == 1, found


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU has no varlen")
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_within_documents_is_that_with_a_mask_and_repeats_itself(kv_heads: int) -> None:
    draw, lengths = torch.Generator("cuda").manual_seed(1), [300, 1, 211, 512]
    shapes = ((2, 4, 512, 64), (2, kv_heads, 512, 64), (2, kv_heads, 512, 64))
    given = [torch.randn(shape, device="cuda", generator=draw).bfloat16().requires_grad_() for shape in shapes]
    documents = documents_of(lengths, torch.device("cuda"))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for attend in (by_mask, *[attend_documents] * 5):
            attended = attend(given[0], given[1], given[2], documents)
            runs.append([attended, *torch.autograd.grad(attended, given, torch.ones_like(attended))])
    finally:
        torch.use_deterministic_algorithms(before)
    masked, first, *others = runs
    for mine, theirs in zip(first, masked, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0.03, rtol=0.03)
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU has no backward pass of it")
@pytest.mark.parametrize("num_tokens", [64, 300, 512])
def test_compiled_attention_is_causal_and_repeats_itself(num_tokens: int) -> None:
    """Its gradients, too: what torch would take instead has others each time, or takes twice as long."""
    draw = torch.Generator("cuda").manual_seed(1)
    shapes = ((2, 4, num_tokens, 32), (2, 2, num_tokens, 32), (2, 2, num_tokens, 32))
    given = [torch.randn(shape, device="cuda", generator=draw).bfloat16().requires_grad_() for shape in shapes]
    back = torch.randn(shapes[0], device="cuda", generator=draw).bfloat16()

    def outputs(attend: object) -> list[torch.Tensor]:
        attended = attend(*given)  # type: ignore[operator]
        return [attended, *torch.autograd.grad(attended, given, back)]

    compiled = torch.compile(lambda *of: causal_attention(*of, is_grouped=True), dynamic=False)
    first, plain = (
        outputs(compiled),
        outputs(lambda *of: F.scaled_dot_product_attention(*of, is_causal=True, enable_gqa=True)),
    )
    for mine, theirs in zip(first, plain, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0.03, rtol=0.03)
    for _ in range(5):
        assert all(torch.equal(*pair) for pair in zip(first, outputs(compiled), strict=True))
