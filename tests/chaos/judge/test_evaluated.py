"""The judge's own evaluation of the last commit gives the trainer's metrics, for synthetic weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from chaos.judge.delivery.evaluated import TOLERANCES, _agrees, validation
from chaos.judge.evidence.run_files import Evidence, Line, collect
from chaos.judge.findings import Unknown, Violated
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Decoder, DecoderShape
from elastic_train.tasks.rows.token_rows import TokenColumns
from tests.chaos.recorded import STEPS, record

OTHERS = ("labels", "attention_mask", "document_ids")
SIZES = {"vocabulary": 50, "dim": 32, "depth": 2, "heads": 4, "rope_base": 500.0}
NUM_ROWS, MAX_TOKENS = 24, 16


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    return collect(record(tmp_path_factory.mktemp("evaluated") / "run") / "faulted")


def rows_of(columns: tuple[str, ...]) -> pa.Table:
    draws = np.random.default_rng(0)
    lists = [draws.integers(0, 50, length).tolist() for length in draws.integers(1, 20, NUM_ROWS)]
    others = {
        "labels": [[token if draws.random() < 0.6 else -100 for token in tokens] for tokens in lists],
        "attention_mask": [[int(draws.random() < 0.8) for _ in tokens] for tokens in lists],
        "document_ids": [sorted(draws.integers(0, 3, len(tokens)).tolist()) for tokens in lists],
    }
    return pa.table({"input_ids": lists, **{name: others[name] for name in columns}})


def evaluated_by_the_trainer(
    sizes: Mapping[str, object], rows: pa.Table, z_loss: float
) -> tuple[Mapping[str, Tensor], dict[str, float]]:
    """Return the weights of a decoder, and its metrics on rows."""
    torch.manual_seed(1)
    model = Decoder(DecoderShape(**sizes)).eval()  # type: ignore[arg-type]
    task = CausalLM(model=sizes, max_tokens=MAX_TOKENS, z_loss=z_loss)
    task.rows = TokenColumns("input_ids", *(name if name in rows.column_names else None for name in OTHERS))
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(10.0 if one.ndim > 1 else 1.0).add_(torch.randn_like(one) * 0.05)
        loss = task.loss(model, task.collate(rows, np.arange(NUM_ROWS)))
    found = {"loss": float(loss.total) / float(loss.weight), "samples": float(NUM_ROWS)}
    for name, metric in task.metrics().items():
        metric.update(loss.predictions, loss.targets)
        found[name] = float(metric.compute())
    return model.state_dict(), found


def claim(healthy: Evidence, claimed: Line, config: Line, **given: object) -> Evidence:
    return replace(
        healthy,
        config={**healthy.config, **config},
        result={**(healthy.result or {}), "metrics": claimed},
        **given,  # type: ignore[arg-type]
    )


@pytest.mark.heavy
@pytest.mark.parametrize("columns", [(), *((name,) for name in OTHERS), OTHERS])
@pytest.mark.parametrize(
    ("shape", "z_loss"),
    [
        ({"tied": True, "kv_heads": 4}, 0.0),
        ({"tied": False, "kv_heads": 2}, 0.01),
        ({"experts": 4, "expert_hidden": 24, "shared_hidden": 16}, 0.0),
        ({"experts": 3, "experts_per_token": 1}, 0.0),
    ],
)
def test_a_language_model_is_evaluated_as_the_trainer_does(
    healthy: Evidence, tmp_path: Path, columns: tuple[str, ...], shape: Mapping[str, object], z_loss: float
) -> None:
    """Grouped queries, tied or untied weights, experts, masks, labels, packed documents; invented metrics are found.

    The same weights as averages are evaluated in place of the trained ones.
    """
    rows, sizes = rows_of(columns), {**SIZES, **shape}
    weights, metrics = evaluated_by_the_trainer(sizes, rows, z_loss)
    pq.write_table(rows, tmp_path / "part.parquet")
    manifest = {"files": [{"path": "part.parquet"}], "columns": dict.fromkeys(rows.column_names, "list")}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    params = {"model": sizes, "max_tokens": MAX_TOKENS, "z_loss": z_loss}
    config: Line = {
        "task": {"path": "chaos.tasks.paced_language:PacedLanguage", "params": params},
        "data": {"train": str(tmp_path), "validation": str(tmp_path)},
    }
    given = {"load": lambda record: weights}
    assert "evaluated on 24 rows" in validation(claim(healthy, metrics, config, **given))
    for name, value in metrics.items():
        invented = {**metrics, name: value * 1.01 + (name == "token_accuracy")}
        with pytest.raises(Violated, match=f"says {name} "):
            validation(claim(healthy, invented, config, **given))
    config = {**config, "validation": {"weights": "ema"}}
    trained: Mapping[str, Mapping[str, Tensor]] = {"weights": {name: one + 1 for name, one in weights.items()}}
    for averages, said in ((weights, "evaluated on 24 rows"), ({}, "was not evaluated")):
        run = claim(healthy, metrics, config, load=lambda _: trained["weights"], averages=lambda _, of=averages: of)
        if averages:
            assert said in validation(run)
        else:
            with pytest.raises(Unknown, match=said):
                validation(run)


def test_an_area_may_be_off_by_a_thousandth_and_not_by_a_hundredth() -> None:
    """It is exact except for pairs of scores that rounding swaps."""
    for off, is_believed in ((0.0, True), (9e-4, True), (-9e-4, True), (0.01, False), (-0.01, False)):
        assert _agrees("auc", 0.9 + off, 0.9, 0.0, TOLERANCES["fp32"]) == is_believed


def test_a_task_that_is_not_known_here_is_judged_by_what_was_logged(healthy: Evidence) -> None:
    """The verdict says that the judge did not evaluate it; if the last validation was not logged it is unknown."""
    metrics, config = {"loss": 0.5, "area": None}, {"task": {"path": "mine:Mine", "params": {}}}
    with pytest.raises(Unknown, match="metrics/ has loss"):
        validation(claim(healthy, metrics, config))
    term = (healthy.result or {})["term"]
    for value in (0.5, 0.25):
        lines = [{"t": 0.0, "step": STEPS, "values": {"validation/loss": value}}]
        run = claim(healthy, metrics, config, metrics={term: lines})
        if value == 0.5:
            assert "not evaluated here" in validation(run)
        else:
            with pytest.raises(Violated, match=r"jsonl has 0\.25"):
                validation(run)
