"""Float8 on a device: products that repeat their bits, and one hash in every world."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_train.parallel.linear_products import quantise, scaled_product
from tests.gpu.conftest import DEVICE
from tests.gpu.test_training import hash_of

NO_KERNEL = DEVICE == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NO_KERNEL, reason="the device has no float8")]


@pytest.mark.parametrize(("num_rows", "inputs", "outputs"), [(48, 64, 16), (300, 512, 2048), (4096, 1024, 1024)])
def test_products_are_those_of_the_rounded_matrices_every_time(num_rows: int, inputs: int, outputs: int) -> None:
    draw = torch.Generator(DEVICE).manual_seed(1)
    rows = torch.randn(num_rows, inputs, device=DEVICE, generator=draw)
    others = torch.randn(outputs, inputs, device=DEVICE, generator=draw)
    found = scaled_product(rows, others)
    left, right = (values.float() * scales for values, scales in map(quantise, (rows, others)))
    expected = left @ right.t()
    torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=float(expected.abs().max()) * 0.005)
    for _ in range(5):
        assert torch.equal(scaled_product(rows, others), found)


@pytest.mark.parametrize("compiles", [False, True])
def test_worlds_that_share_a_device_have_one_hash(tmp_path: Path, rows: Path, device: str, compiles: bool) -> None:
    task = {
        "path": "elastic_train.tasks.causal_lm:CausalLM",
        "params": {"max_tokens": 16, "model": {"dim": 32, "depth": 2, "heads": 4, "kv_heads": 2, "vocabulary": 64}},
    }
    data = {"train": str(rows / "train"), "validation": str(rows / "validation"), "too_long": "truncate"}
    keys: dict[str, object] = {"task": task, "data": data, "compile": compiles, "precision": "fp8"}
    worlds = (None, 2) if compiles else (None, 2, 3)  # compiling takes long
    found = {num: hash_of(tmp_path / str(num), rows, device, num, **keys) for num in worlds}
    assert len(set(found.values())) == 1, found
