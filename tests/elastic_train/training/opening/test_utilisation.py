"""The FLOPs per sample that a process counts at its start, and the MFU computed from them."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from elastic_train import train
from elastic_train.config.sources import load_config
from elastic_train.core.order import Cursor
from elastic_train.insight.phases import FILE, read_utilisation
from elastic_train.job.plan import make_plan
from elastic_train.planning.arithmetic.catalogue import device_named
from elastic_train.planning.reading import read_config
from elastic_train.runs.glance import look
from elastic_train.runs.report import report_on
from elastic_train.tracking.metric_log import Values, read_metrics
from elastic_train.training.opening import resources
from elastic_train.training.opening.resources import count, peak_of
from tests.elastic_train.training.jobs import CLASSIFIER, config

LANGUAGE: dict[str, object] = {
    **CLASSIFIER,
    "task": {
        "path": "elastic_train.tasks.causal_lm:CausalLM",
        "params": {"max_tokens": 16, "model": {"dim": 16, "depth": 2, "heads": 2, "kv_heads": 1, "vocabulary": 64}},
    },
}


def counted(path: str, **settings: object) -> tuple[float, float]:
    """Return the FLOPs of a sample, and those that recomputation adds."""
    plan = make_plan(load_config(path, settings))
    [[batch]] = plan.feed.training(plan.order, range(1), Cursor(), num_steps=1)
    found = count(plan, plan.build_state(may_defer=True), batch, 1e12)
    assert found is not None
    return found.flops_per_sample, found.recomputed_flops_per_sample


@pytest.mark.heavy
@pytest.mark.parametrize("tree", [CLASSIFIER, LANGUAGE], ids=["classifier", "language"])
def test_the_flops_of_a_sample_are_those_that_a_plan_works_out(
    tree: dict[str, object], tmp_path: Path, rows: Path
) -> None:
    """A plan includes the scores that attention recomputes in the backward pass; they are a small part here."""
    one_lane = {"batch": {"global_batch": 6, "micro_batch": 6}}  # a plan averages over several lanes
    path = config(tmp_path, rows, {**tree, **one_lane})
    facts = read_config(load_config(path)).facts
    flops, again = counted(path)
    assert flops == pytest.approx(facts.flops / facts.samples, rel=0.1) and again == 0
    forward = facts.forward.flops / facts.samples
    assert counted(path, **{"parallel.recompute": "units"})[1] == pytest.approx(
        forward - facts.rest.forward.flops / facts.samples
    )


@pytest.mark.heavy
def test_weights_that_are_not_in_memory_yet_are_counted_as_well(tmp_path: Path, rows: Path) -> None:
    path = config(tmp_path, rows, LANGUAGE)
    plan = make_plan(load_config(path, {"parallel.shards": "parameters"}))
    assert not plan.build_state(may_defer=True).shards.cut.has_weights
    assert counted(path, **{"parallel.shards": "parameters"}) == counted(path)


def test_a_model_that_cannot_be_counted_has_no_mfu(tmp_path: Path, rows: Path) -> None:
    plan = make_plan(load_config(config(tmp_path, rows, CLASSIFIER)))
    [[batch]] = plan.feed.training(plan.order, range(1), Cursor(), num_steps=1)
    state = plan.build_state()
    assert count(plan, state, batch, None) is None
    with mock.patch.object(plan.task, "loss", side_effect=RuntimeError("not here")):
        assert count(plan, state, batch, 1e12) is None


@pytest.mark.parametrize(
    ("reported", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GH200 480GB", None),
        ("CPU", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_name(reported: str, known: str | None) -> None:
    """Variants with a lower peak must not match the catalogue's entries."""
    found = device_named(reported)
    assert (found and found.name) == known


@pytest.mark.slow
def test_a_run_notes_its_mfu_where_the_peak_is_known(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No peak is known for a CPU; here one is."""
    path = config(tmp_path, rows, CLASSIFIER, max_steps=3, device="cpu")
    assert peak_of(make_plan(load_config(path))) is None
    monkeypatch.setattr(resources, "peak_of", lambda plan: 5e11)
    train(load_config(path))
    folder = tmp_path / "run"
    known = read_utilisation(folder)
    assert known is not None and known.peak_flops == 5e11
    assert known.flops_per_sample == counted(path)[0]
    by_step = [line.by_name for line in read_metrics(folder) if isinstance(line, Values)]
    for values in by_step:
        if "train/samples_per_s" in values:
            assert values["train/mfu"] == pytest.approx(known.mfu(values["train/samples_per_s"], 1))
    assert any("train/mfu" in values for values in by_step)
    report = report_on(str(folder))
    assert report.mfu is not None and 0 < report.mfu < 1 and (look(folder).mfu or 0) > 0
    (folder / FILE).write_text(json.dumps({"flops_per_sample": "torn"}))
    assert read_utilisation(folder) is None
