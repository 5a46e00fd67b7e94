"""Direct preference optimization: the loss is the paper's, and whole runs have one hash at any world size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.errors import DataError
from elastic_train.inference.exporting import export_folder
from elastic_train.tasks.preferences import Preferences
from tests.elastic_train.tasks.language_rows import LLAMA, VOCABULARY, described, lists
from tests.elastic_train.training.jobs import config, result, succeed
from tests.memory_job import AT_SECOND_COMMIT, start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]  # one process imports transformers

BETA = 0.3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama that has attention dropout, which the reference must not apply."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("base")
    made = transformers.AutoConfig.for_model(**LLAMA, attention_dropout=0.1)
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of a prompt and two answers: one counts up, the other down."""
    folder, rng = tmp_path_factory.mktemp("rows") / "rows", np.random.default_rng(0)
    columns: dict[str, list[list[int]]] = {f"{side}_{kind}": [] for side in SIDES for kind in ("ids", "labels")}
    for _ in range(60):
        prompt = rng.integers(2, VOCABULARY, rng.integers(1, 6)).tolist()
        for side, sign in SIDES.items():
            answer = [(prompt[-1] + sign * place) % VOCABULARY for place in range(1, 2 + int(rng.integers(1, 6)))]
            columns[f"{side}_ids"].append([*prompt, *answer])
            columns[f"{side}_labels"].append([-100] * len(prompt) + answer)
    described(folder, {name: lists(*values) for name, values in columns.items()})
    return folder


SIDES = {"chosen": 1, "rejected": -1}


def task_of(base: Path, rows: Path, **params: Any) -> Preferences:
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
    task = Preferences(hf={"path": str(base)}, lora=lora, max_tokens=16, beta=BETA, **params)
    task.prepare(load_manifest(str(rows)))
    return task


def likelihoods(model: Any, ids: list[int], labels: list[int]) -> Tensor:
    """Return the log-likelihood of one chat's labels, computed directly."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    targets = torch.tensor(labels[1:])
    return logits[targets >= 0].gather(-1, targets[targets >= 0, None]).sum()


def test_the_loss_is_the_papers(base: Path, rows: Path) -> None:
    """Against the base alone, in a micro-batch of rows of several lengths; before training it is log 2 per pair."""
    import transformers

    task = task_of(base, rows)
    model: Any = task.build_model().eval()
    table = pq.read_table(rows / "a.parquet").slice(0, 5)
    batch = task.collate(table, np.arange(5))
    assert task.loss(model, batch).total.item() == pytest.approx(5 * math.log(2), rel=1e-6)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    reference = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    expected, margins = torch.zeros(()), []
    for row in table.to_pylist():
        ratios = [
            likelihoods(model, row[f"{side}_ids"], row[f"{side}_labels"])
            - likelihoods(reference, row[f"{side}_ids"], row[f"{side}_labels"])
            for side in SIDES
        ]
        margins.append(ratios[0] - ratios[1])
        expected = expected - F.logsigmoid(BETA * margins[-1])
    loss = task.loss(model, batch)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-4) and loss.weight == 5.0
    assert loss.predictions is not None and loss.targets is not None
    torch.testing.assert_close(loss.predictions, torch.stack(margins), rtol=1e-3, atol=1e-4)
    kinds = [pa.list_(pa.field("element", pa.uint16())), *[pa.large_list(pa.int64())] * 3]
    other = task.collate(table.cast(pa.schema(zip(table.column_names, kinds, strict=True))), np.arange(5))
    assert all(other[name].equal(values) for name, values in batch.items())
    assert loss.targets.tolist() == [margin > 0 for margin in margins]


def test_the_reference_has_no_dropout_and_leaves_the_model_as_it_was(base: Path, rows: Path) -> None:
    """Adapters are enabled again in training mode, and receive the entire gradient."""
    task = task_of(base, rows)
    model: Any = task.build_model().train()
    batch = task.collate(pq.read_table(rows / "a.parquet").slice(0, 4), np.arange(4))
    modes = [module.training for module in model.modules()]
    task.loss(model, batch).total.backward()
    assert [module.training for module in model.modules()] == modes
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert model.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight.grad.abs().sum() > 0


def test_what_does_not_fit_is_refused(tmp_path: Path, base: Path, rows: Path) -> None:
    for params, why in (
        ({}, "give lora, or adapter: the reference is the base without it"),
        ({"lora": {"r": 4}, "beta": 0.0}, "beta must be greater than 0"),
        ({"adapter": {"type": "p_tuning", "num_virtual_tokens": 2}}, "not 'p_tuning'"),
        ({"lora": {"r": 4, "bias": "all"}}, "lora trains biases of the base, which is the reference: leave bias out"),
    ):
        with pytest.raises(ValueError, match=why):
            Preferences(hf={"path": str(base)}, **params)
    with pytest.raises(DataError, match="no column 'chosen_ids'; it has input_ids"):
        task_of(base, Path(described(tmp_path / "other", {"input_ids": lists([1, 2], [3])}).url))
    table = pq.read_table(rows / "a.parquet").slice(0, 3)
    wrong = table.set_column(3, "rejected_labels", pa.array([[1]] * 3, pa.list_(pa.int32())))
    [found, *_] = task_of(base, rows).unfit_rows(wrong)
    assert found[0] == 0 and "1 values in column 'rejected_labels'" in found[1]


def job(folder: Path, rows: Path, base: Path) -> str:
    params = {"max_tokens": 16, "beta": BETA, "hf": {"path": str(base)}, "lora": {"r": 4, "lora_dropout": 0.1}}
    settings: dict[str, object] = {
        "batch": {"global_batch": 24, "micro_batch": 6},
        "optimizer": {"lr": 0.01, "warmup_steps": 3},
        "max_steps": 6,
        "checkpoint": {"every": "3 steps", "keep_last": 3},
        "validation": {"every": "3 steps"},
    }
    task = {"path": "elastic_train.tasks.preferences:Preferences", "params": params}
    return config(folder, rows, settings, task=task, data={"train": str(rows), "validation": str(rows)})


def test_preferences_have_one_hash_at_any_world(tmp_path: Path, rows: Path, base: Path) -> None:
    """This includes shards, recomputation and a lost rank; the chosen answers become likelier."""
    succeed(start([job(tmp_path / "alone", rows, base)]))
    alone = result(tmp_path / "alone")
    assert alone["metrics"]["accuracy"] > 0.8 and alone["metrics"]["loss"] < math.log(2)  # type: ignore[index]
    how = ["--parallel.shards", "gradients", "--parallel.recompute", "units"]
    succeed(start([job(tmp_path / "three", rows, base), *how], num_ranks=3))
    for key in ("weights_sha256", "metrics"):
        assert result(tmp_path / "three")[key] == alone[key]
    path = job(tmp_path / "lost", rows, base)
    assert start([path], num_ranks=2, lose=AT_SECOND_COMMIT).code != 0
    succeed(start([path], num_ranks=3))
    assert result(tmp_path / "lost")["weights_sha256"] == alone["weights_sha256"]
    for how in (["--parallel.tensor", "2"], ["--parallel.shards", "parameters"]):
        refused = start([job(tmp_path / how[0], rows, base), *how], num_ranks=2)
        assert refused.code == 2 and how[0].removeprefix("--") in refused.output
    export_folder(str(tmp_path / "alone" / "run"), tmp_path / "exported")
    assert (tmp_path / "exported" / "adapter_model.safetensors").is_file()
