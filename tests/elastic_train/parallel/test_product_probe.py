"""The probe of float8 products: it sees a model's calls, and finds other bits and wrong numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elastic_train.job.units.float8 import scale_linear_layers
from elastic_train.parallel import product_probe
from elastic_train.parallel.devices.repeats import NotRepeatableError
from elastic_train.parallel.linear_products import scaled_product
from elastic_train.parallel.product_probe import Call, Recorder, check_products
from elastic_train.tasks.decoder.model import Decoder, DecoderShape
from tests.float8 import needs_float8

pytestmark = needs_float8
CPU, CALLS = torch.device("cpu"), [Call(20, 32, 16), Call(7, 16, 48)]


def test_a_models_calls_are_seen_as_autocast_computes_them() -> None:
    model = Decoder(DecoderShape(vocabulary=32, dim=32, depth=2, heads=4, kv_heads=2, hidden=64))
    scale_linear_layers(model)
    with torch.no_grad(), Recorder() as seen, torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(2, 6, dtype=torch.long))
    assert sorted(seen.calls) == [(12, 32, 16), (12, 32, 32), (12, 32, 64), (12, 64, 32)]


@pytest.mark.parametrize(("how", "reason"), [("drifts", "two runs gave different"), ("wrong", "plain arithmetic")])
def test_other_bits_and_wrong_numbers_are_found(how: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list[None]()

    def product(rows: Tensor, others: Tensor) -> Tensor:
        runs.append(None)
        return scaled_product(rows, others) * (1.0 + 0.004 * len(runs) if how == "drifts" else 1.5)

    monkeypatch.setattr(product_probe, "scaled_product", product)
    with pytest.raises(NotRepeatableError, match=reason):
        check_products(CALLS, CPU)


@pytest.mark.slow
def test_another_process_has_to_agree_and_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_products(CALLS, CPU)
    check_products(CALLS[::-1], CPU)
    path = tmp_path / "elastic-train/float8.json"
    kept = json.loads(path.read_text())
    assert len(kept) == 1
    path.write_text(json.dumps(dict.fromkeys(kept, "other")))
    with pytest.raises(NotRepeatableError, match="another process gave different bits"):
        check_products(CALLS, CPU)


def test_no_call_needs_no_probe() -> None:
    check_products([], CPU)
