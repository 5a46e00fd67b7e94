"""Classifiers of transformers: what they see of a row, metadata beside it, and their metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from elastic_train.errors import ConfigError, DataError
from elastic_train.tasks.classification_metrics import CalibrationError
from elastic_train.tasks.sequence_classifier import SequenceClassifier, WithMetadata
from tests.elastic_train.tasks.language_rows import BERT, GPT2, WITH_TRANSFORMERS, described, lists

pytestmark = WITH_TRANSFORMERS

COLUMNS = {
    "input_ids": lists([5, 6, 7, 8, 9, 10, 11, 12, 13], [9, 10], [], [12, 13, 14]),
    "label": pa.array([0, 2, 1, 2]),
    "size": pa.array([1.0, None, 3.0, 1e9]),
    "kind": pa.array(["a", None, "b", "a"]),
}


def prepared(folder: Path, columns: dict[str, pa.Array] = COLUMNS, **params: Any) -> SequenceClassifier:
    manifest = described(folder, columns, label_column="label")
    task = SequenceClassifier(**{"hf": {"config": BERT}, "max_tokens": 16, **params})
    task.prepare(manifest)
    return task


def logits_of(task: SequenceClassifier, model: torch.nn.Module, rows: pa.Table) -> Tensor:
    """Return the log-probabilities of each row's classes."""
    loss = task.loss(model.eval(), task.collate(rows, np.arange(len(rows))))
    assert loss.predictions is not None
    return loss.predictions.log()


@pytest.mark.parametrize("config", [BERT, GPT2], ids=["bert", "gpt2"])
def test_padding_does_not_show(tmp_path: Path, config: dict[str, Any]) -> None:
    """A row is classified as if it were alone, whichever others are in its micro-batch."""
    task = prepared(tmp_path / "rows", hf={"config": {**config, "initializer_range": 0.5}})
    torch.manual_seed(1)
    model, rows = task.build_model(), pa.table(COLUMNS)
    together = logits_of(task, model, rows)
    for number in (0, 1, 3):
        alone = logits_of(task, model, rows.slice(number, 1))
        torch.testing.assert_close(together[number], alone[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding", [None, 0, 7])
def test_a_decoder_classifies_by_a_rows_own_last_token(tmp_path: Path, padding: int | None) -> None:
    """Whatever its id is, that of the padding included; without a padding in the configuration, id 0 is learned."""
    columns = {
        "input_ids": lists([5, 6, 0, 0], [9, 10, 11, 12, 13, 7], [0], [0, 7, 0]),
        "label": pa.array([0, 1, 2, 1]),
    }
    llama = {"model_type": "llama", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1}
    llama |= {"num_attention_heads": 2, "intermediate_size": 16, "pad_token_id": padding, "initializer_range": 0.5}
    llama |= {"eos_token_id": None, "bos_token_id": None}
    task = prepared(tmp_path / "rows", columns, hf={"config": llama})
    torch.manual_seed(1)
    model: Any = task.build_model()
    found = logits_of(task, model, pa.table(columns))
    assert padding == 0 or model.model.embed_tokens.weight[0].any()
    for row, logits in zip(columns["input_ids"].to_pylist(), found, strict=True):
        last = model.score(model.model(input_ids=torch.tensor([row])).last_hidden_state)[0, -1]
        torch.testing.assert_close(logits, last.log_softmax(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ids", [{"pad_token_id": -1}, {"eos_token_id": 50256}, {"eos_token_id": []}])
def test_a_padding_that_is_no_token_of_the_model_is_not_read(tmp_path: Path, ids: dict[str, Any]) -> None:
    """Llama's first folders say -1, and a GPT-2 of few tokens has the end of one of many."""
    task = prepared(tmp_path / "rows", hf={"config": {**GPT2, "eos_token_id": None, **ids}})
    rows = pa.table(COLUMNS)
    assert task.padding == 0 and logits_of(task, task.build_model(), rows).isfinite().all()


def test_metadata_with_missing_values_is_learned(tmp_path: Path) -> None:
    """By a head of its own, which changes nothing at first."""
    task = prepared(tmp_path / "rows", numeric=["size"], categorical=["kind"])
    torch.manual_seed(1)
    model, rows = task.build_model(), pa.table(COLUMNS)
    assert isinstance(model, WithMetadata)
    others = rows.set_column(2, "size", pa.array([None, 7.0, None, 2.0])).set_column(3, "kind", pa.array(["c"] * 4))
    torch.testing.assert_close(logits_of(task, model, rows), logits_of(task, model, others))
    task.loss(model, task.collate(rows, np.arange(4))).total.backward()
    with torch.no_grad():
        for parameter in model.head.parameters():
            assert parameter.grad is not None
            parameter -= parameter.grad
    assert not torch.allclose(logits_of(task, model, rows), logits_of(task, model, others))


def test_classes_weigh_as_they_are_asked_to(tmp_path: Path) -> None:
    rows = pa.table(COLUMNS)
    weighed = {
        name: prepared(tmp_path / str(name), class_weights=weights)
        for name, weights in ((0, None), (1, "balanced"), (2, [1.0, 0.0, 3.0]))
    }
    torch.manual_seed(1)
    model = weighed[0].build_model().eval()
    losses = [task.loss(model, task.collate(rows, np.arange(4))) for task in weighed.values()]
    probabilities = logits_of(weighed[0], model, rows).double()
    each = -probabilities[torch.arange(4), torch.tensor([0, 2, 1, 2])]
    for loss, weights in zip(losses, ([1, 1, 1], [4 / 3, 4 / 3, 4 / 6], [1, 0, 3]), strict=True):
        of_rows = torch.tensor([weights[label] for label in (0, 2, 1, 2)])
        assert loss.weight == pytest.approx(float(of_rows.sum()))
        assert loss.total.item() == pytest.approx(float((of_rows * each).sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("params", "columns", "error", "message"),
    [
        ({"class_weights": [1.0, 2.0]}, {}, ConfigError, "give 3 numbers of at least 0, one for each class"),
        ({"max_tokens": 33}, {}, ConfigError, r"max_tokens: 33, but the model \(BertConfig\) has 32 positions"),
        ({}, {"input_ids": lists([1], [2], [40], [3])}, DataError, r"sample 2 \(.*row 0\) has token id 40"),
        ({"numeric": ["height"]}, {}, DataError, "no column 'height'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    tmp_path: Path, params: dict[str, Any], columns: dict[str, pa.Array], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        prepared(tmp_path / "rows", {**COLUMNS, **columns}, **params)


def test_positions_that_begin_after_the_paddings_are_counted(tmp_path: Path) -> None:
    hf = {"config": {**BERT, "model_type": "roberta", "max_position_embeddings": 34, "pad_token_id": 1}}
    assert prepared(tmp_path / "fits", hf=hf, max_tokens=32).build_model()
    with pytest.raises(ConfigError, match="positions begin at 2, so it takes 32"):
        prepared(tmp_path / "too-long", hf=hf, max_tokens=33).build_model()


def test_the_head_knows_the_names_of_the_classes(tmp_path: Path) -> None:
    manifest = described(tmp_path / "rows", COLUMNS, label_column="label", labels=("bad", "fair", "good"))
    task = SequenceClassifier(hf={"config": BERT}, max_tokens=16)
    task.prepare(manifest)
    assert task.config.id2label == {0: "bad", 1: "fair", 2: "good"} and task.config.num_labels == 3
    assert set(task.metrics()) == {"accuracy", "macro_f1", "auc", "calibration_error"}


def test_a_classifier_is_exported_to_the_last_bit_unless_it_reads_metadata(tmp_path: Path) -> None:
    """With adapters it is merged, which rounds."""
    import transformers

    task = prepared(tmp_path / "rows")
    torch.manual_seed(1)
    model, rows = task.build_model(), pa.table(COLUMNS)
    (tmp_path / "whole").mkdir()
    task.export(model, tmp_path / "whole", is_merged=False)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole")
    assert logits_of(task, loaded, rows).equal(logits_of(task, model, rows))
    adapted = SequenceClassifier(hf={"path": str(tmp_path / "whole")}, lora={"r": 2}, max_tokens=16)
    adapted.prepare(task.rows.known)
    model = adapted.build_model()
    assert {name for name, p in model.named_parameters() if p.requires_grad and "classifier" in name}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * parameter.requires_grad)
    expected = logits_of(adapted, model, rows)
    (tmp_path / "merged").mkdir()
    adapted.export(model, tmp_path / "merged", is_merged=True)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(task, loaded, rows), expected, rtol=1e-4, atol=1e-5)
    why = prepared(tmp_path / "others", numeric=["size"]).why_not_exported()
    assert why is not None and "reads size as well as the tokens" in why and task.why_not_exported() is None


def test_what_an_adapters_base_lacks_is_trained_and_exported_with_it(tmp_path: Path) -> None:
    """BERT's pooler is in no folder of a masked language model, and whoever loads the adapter would draw it anew."""
    import transformers

    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForMaskedLM.from_config(transformers.AutoConfig.for_model(**BERT))
    base.save_pretrained(tmp_path / "base")
    task = prepared(tmp_path / "rows", hf={"path": str(tmp_path / "base")}, lora={"r": 2})
    model, rows = task.build_model(), pa.table(COLUMNS)
    (tmp_path / "alone").mkdir()
    task.export(model, tmp_path / "alone", is_merged=False)
    loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "alone", num_labels=3)
    assert logits_of(task, loaded, rows).equal(logits_of(task, model, rows))
    trained = {name.split(".modules_to_save")[0] for name in model.state_dict() if "modules_to_save" in name}
    assert trained == {"base_model.model.bert.pooler.dense", "base_model.model.classifier"}


def test_the_calibration_error_is_that_of_its_definition() -> None:
    """By the parts of the data in any order, to the last bit."""
    torch.manual_seed(1)
    probabilities, target = (torch.randn(500, 3) * 2).softmax(-1), torch.randint(3, (500,))
    confidence, likeliest = probabilities.max(-1)
    expected = 0.0
    for number in range(15):
        within = (confidence > number / 15) & (confidence <= (number + 1) / 15)
        if within.any():
            gap = (likeliest[within] == target[within]).double().mean() - confidence[within].double().mean()
            expected += abs(gap.item()) * within.double().mean().item()
    values = []
    for order in (torch.arange(500), torch.randperm(500)):
        metric = CalibrationError()
        for part in order.split(37):
            metric.update(probabilities[part], target[part])
        values.append(metric.compute().item())
    assert values[0] == values[1] == pytest.approx(expected, abs=1e-6)
