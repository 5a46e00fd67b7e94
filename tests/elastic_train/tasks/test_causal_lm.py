"""Language models: which tokens are targets, what the loss adds up, and what is refused before training."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastic_train.data.corpora.tokenizer import train_tokenizer
from elastic_train.data.tables.importing import RowOptions, import_rows
from elastic_train.errors import ConfigError, DataError
from elastic_train.tasks.causal_lm import CausalLM, go_on
from elastic_train.tasks.rows.token_rows import check_tokenizer
from elastic_train.tasks.rows.tokenizing import tokenizer_of, write_tokenizer
from elastic_train.tasks.task import Sampling
from tests.elastic_train.tasks.language_rows import LLAMA, VOCABULARY, built, described, lists, prepared

TOKENS = lists([5, 6, 7, 8], [9, 10], [11], [], [12, 13, 14])


def targets_of(tmp_path: Path, columns: dict[str, pa.Array], **params: Any) -> list[list[tuple[int, int]]]:
    """Return for each row the pairs of a place and the token that is to be predicted there."""
    task = prepared(described(tmp_path / "rows", columns), **params)
    batch = task.collate(pa.table({name: columns[name] for name in task.columns()}), np.arange(len(TOKENS)))
    rows, width = batch["tokens"].shape
    found: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
    for place, target in zip(batch["places"].tolist(), batch["targets"].tolist(), strict=True):
        found[place // width].append((place % width, target))
    return found


def test_each_next_token_is_a_target(tmp_path: Path) -> None:
    expected = [[(0, 6), (1, 7), (2, 8)], [(0, 10)], [], [], [(0, 13), (1, 14)]]
    assert targets_of(tmp_path, {"input_ids": TOKENS}) == expected


def test_labels_say_which_tokens_are_targets(tmp_path: Path) -> None:
    """As transformers has them: at the places of the tokens that they are."""
    labels = lists([-100, -100, 7, 8], [9, -100], [11], [], [-100, 30, -100])
    columns = {"input_ids": TOKENS, "labels": labels}
    assert targets_of(tmp_path, columns) == [[(1, 7), (2, 8)], [], [], [], [(0, 30)]]


def test_micro_batches_have_one_shape_if_asked_for(tmp_path: Path) -> None:
    """The same targets at the same places, with more padding."""
    columns = {"input_ids": TOKENS, "document_ids": lists([0, 0, 1, 1], [4, 4], [0], [], [0, 1, 2])}
    manifest = described(tmp_path / "rows", columns)
    found = []
    for is_fixed, width in ((False, 8), (True, 20)):
        task = prepared(manifest, fixed_width=is_fixed)
        batch = task.collate(pa.table(columns), np.arange(len(TOKENS)))
        assert {tuple(batch[name].shape) for name in ("tokens", "documents", "positions")} == {(len(TOKENS), width)}
        found.append((batch["places"] // width, batch["places"] % width, batch["targets"]))
    assert all(narrow.equal(wide) for narrow, wide in zip(*found, strict=True))


def test_no_target_is_in_another_document_or_masked(tmp_path: Path) -> None:
    documents = lists([0, 0, 1, 1], [4, 4], [0], [], [0, 1, 2])
    columns = {"input_ids": TOKENS, "document_ids": documents}
    assert targets_of(tmp_path / "a", columns) == [[(0, 6), (2, 8)], [(0, 10)], [], [], []]
    masked = lists([1, 1, 0, 0], [0, 1], [1], [], [1, 1, 1])
    columns = {"input_ids": TOKENS, "attention_mask": masked}
    assert targets_of(tmp_path / "b", columns) == [[(0, 6)], [], [], [], [(0, 13), (1, 14)]]
    assert len(targets_of(tmp_path / "c", columns, attention_mask=False)[0]) == 3


def test_positions_begin_at_0_in_each_document(tmp_path: Path) -> None:
    """A rotary decoder would not notice others."""
    columns = {"input_ids": lists([5, 6, 7, 8, 9], [1, 2]), "document_ids": lists([3, 3, 7, 7, 7], [0, 1])}
    task = prepared(described(tmp_path / "rows", columns))
    positions = task.collate(pa.table(columns), np.arange(2))["positions"]
    assert positions[0, :5].tolist() == [0, 1, 0, 1, 2] and positions[1, :2].tolist() == [0, 0]


def test_documents_of_a_row_are_computed_as_if_each_were_alone(tmp_path: Path) -> None:
    """Neither attention nor positions show that others are beside one; nor do those on the left of a masked part."""
    packed = {"input_ids": lists([5, 6, 7, 8, 9, 1, 2]), "document_ids": lists([3, 3, 3, 7, 7, 8, 8])}
    alone = {"input_ids": lists([5, 6, 7], [8, 9], [1, 2])}
    losses = []
    for name, columns in (("packed", packed), ("alone", alone)):
        task = prepared(described(tmp_path / name, columns))
        torch.manual_seed(1)
        model = task.build_model()
        loss = task.loss(model.eval(), task.collate(pa.table(columns), np.arange(3)))
        losses.append((loss.total.item(), loss.weight, loss.predictions))
    assert losses[0][1] == losses[1][1] == 4.0
    torch.testing.assert_close(losses[0][2], losses[1][2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rows", [TOKENS, lists([5, 6, 7, 8, 9, 10, 11], [9, 10, 11, 12, 13, 14, 15, 16], [1, 2, 3, 4, 5])]
)
def test_the_loss_is_the_sum_over_targets(tmp_path: Path, rows: pa.Array) -> None:
    """However many tokens each row has, few targets or many; z-loss comes on top."""
    columns = {"input_ids": rows}
    manifest = described(tmp_path / "rows", columns)
    task, penalised = prepared(manifest), prepared(manifest, z_loss=0.1)
    model = task.build_model()
    batch = task.collate(pa.table(columns), np.arange(len(rows)))
    loss = task.loss(model, batch)
    expected, penalty, weight = 0.0, 0.0, 0
    for row in rows.to_pylist():
        if len(row) > 1:
            logits = model(torch.tensor([row]))[0, :-1]
            expected += F.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum").item()
            penalty += 0.1 * logits.logsumexp(-1).square().sum().item()
            weight += len(row) - 1
    assert loss.weight == weight
    assert loss.total.item() == pytest.approx(expected, rel=1e-5)
    assert penalised.loss(model, batch).total.item() == pytest.approx(expected + penalty, rel=1e-5)
    judged = task.loss(model.eval(), batch)
    assert judged.predictions is not None and judged.targets is not None
    assert judged.predictions.sum().item() == pytest.approx(expected, rel=1e-5)
    likeliest = model(batch["tokens"]).flatten(0, 1)[batch["places"]].argmax(-1)
    assert judged.targets.equal(likeliest == batch["targets"])


def test_rows_without_targets_weigh_nothing_and_train_nothing(tmp_path: Path) -> None:
    columns = {"input_ids": lists([3], [], [4])}
    task = prepared(described(tmp_path / "rows", columns))
    model = task.build_model()
    loss = task.loss(model, task.collate(pa.table(columns), np.arange(3)))
    loss.total.backward()
    assert loss.weight == 0.0 and loss.total.item() == 0.0
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def test_perplexity_and_accuracy_are_those_of_the_targets(tmp_path: Path) -> None:
    """In any order of any parts, to the last bit."""
    task = prepared(described(tmp_path / "rows", {"input_ids": TOKENS}))
    likelihoods, is_first = torch.rand(1000) * 9, torch.rand(1000) < 0.3
    values = []
    for order in (torch.arange(1000), torch.randperm(1000)):
        metrics = task.metrics()
        for part in order.split(37):
            for metric in metrics.values():
                metric.update(likelihoods[part], is_first[part])
        values.append({name: float(metric.compute()) for name, metric in metrics.items()})
    assert values[0] == values[1]
    assert values[0]["perplexity"] == pytest.approx(math.exp(likelihoods.double().mean()), rel=1e-6)
    assert values[0]["token_accuracy"] == pytest.approx(is_first.double().mean().item())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": lists([1], [2], [3], [4, VOCABULARY])}, r"sample 3 \(a.parquet, row group 1, row 1\) has .* 40"),
        ({"input_ids": lists([1], [2, -7])}, "sample 1 .* has token id -7 .* those from 0 to 39: make the model's"),
        ({"tokens": lists([1])}, "no column 'input_ids'; it has tokens"),
        ({"input_ids": pa.array(["a"])}, "is string, not a list of integers"),
        ({"input_ids": lists([1]), "labels": pa.array([0.5])}, "'labels' is double, not a list of integers"),
    ],
)
def test_rows_that_the_model_cannot_take_are_refused_before_training(
    tmp_path: Path, columns: dict[str, pa.Array], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prepared(described(tmp_path / "rows", columns))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": lists([1, 99], [])}, "sample 70 has 99 in column 'input_ids'"),
        ({"input_ids": pa.array([[], [1, None]], pa.list_(pa.int32()))}, "a value is missing .* in sample 71"),
        ({"input_ids": lists([1, 2], [3]), "labels": lists([1, 2], [3, 3])}, "sample 71: it has 2 values .* but 1 in"),
        ({"input_ids": lists([1, 2], [3]), "labels": lists([1, -3], [3])}, "sample 70 has -3 in column 'labels'"),
    ],
)
def test_rows_that_are_met_later_are_named(tmp_path: Path, columns: dict[str, pa.Array], message: str) -> None:
    """The manifest did not know them before."""
    good = {name: lists([1, 2], [3]) for name in columns}
    task = prepared(described(tmp_path / "rows", good))
    with pytest.raises(DataError, match=message):
        task.collate(pa.table(columns), np.arange(70, 72))


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    """The manifest is trusted, so rows are not read."""
    manifest = described(tmp_path / "rows", {"input_ids": TOKENS}, vocabulary_size=41)
    with pytest.raises(ConfigError, match="its tokenizer has 41 token ids, the model takes 40: make"):
        prepared(manifest)
    task = CausalLM()
    task.prepare(manifest)
    assert task.vocabulary == 41
    with pytest.raises(ConfigError, match="has no tokenizer; say how many"):
        CausalLM().prepare(described(tmp_path / "none", {"input_ids": TOKENS}))


def test_a_validation_set_is_checked_as_well(tmp_path: Path) -> None:
    known = described(tmp_path / "known", {"input_ids": TOKENS}, vocabulary_size=40, tokenizer_sha256="a" * 64)
    task = prepared(known)
    with pytest.raises(DataError, match="token ids differ from those of"):
        task.check_held_out(described(tmp_path / "other", {"input_ids": TOKENS}, tokenizer_sha256="b" * 64))
    with pytest.raises(DataError, match=r"sample 0 .* has token id 77"):
        task.check_held_out(described(tmp_path / "ids", {"input_ids": lists([77])}))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"model": {"width": 8}}, "model has no 'width'"),
        ({"model": {"dim": 24, "heads": 5}}, "dim 24 is not an even multiple of heads 5"),
        ({"model": {"dim": 24, "heads": 4, "kv_heads": 3}}, "heads 4 is not a multiple of kv_heads 3"),
        ({"model": {"depth": -1}}, "depth must be at least 1"),
        ({"model": {}, "hf": {}}, "not both"),
        ({"hf": {"paht": "x"}}, "hf has no 'paht'; did you mean 'path'"),
        ({"hf": {"config": {}}}, "a config with a model_type"),
        ({"hf": {"path": "x", "dtype": "int8"}}, "hf.dtype must be float32 or bfloat16"),
        ({"z_loss": -1.0}, "z_loss must be at least 0"),
        ({"max_tokens": 1}, "max_tokens must be at least 2"),
    ],
)
def test_an_impossible_model_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLM(**params)


def tokenizer(folder: Path, vocabulary: dict[str, int], **others: object) -> str:
    """Write a tokenizer.json; return its digest."""
    folder.mkdir(exist_ok=True)
    content = json.dumps({"model": {"type": "BPE", "vocab": vocabulary}, **others}).encode()
    (folder / "tokenizer.json").write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def test_data_of_another_tokenizer_than_the_models_is_refused(tmp_path: Path) -> None:
    """One that gives the tokens the same ids is not another, however it is written."""
    rows = tmp_path / "rows"
    facts = {"tokenizer": "tokenizer.json", "vocabulary_size": 2}
    rows.mkdir()
    digest = tokenizer(rows, {"a": 0, "b": 1})
    manifest = described(tmp_path / "rows" / "below", {"input_ids": lists([0])}, tokenizer_sha256=digest, **facts)
    manifest = type(manifest)(**{**{f: getattr(manifest, f) for f in manifest.__dataclass_fields__}, "url": str(rows)})
    tokenizer(tmp_path / "same", {"b": 1, "a": 0, "c": 2}, version="1.0")
    check_tokenizer(manifest, tmp_path / "same")
    tokenizer(tmp_path / "other", {"a": 0, "b": 2})
    with pytest.raises(DataError, match=r"token 'b' has id 1, in .*other.* it has 2: .*tokenise it again"):
        check_tokenizer(manifest, tmp_path / "other")
    check_tokenizer(manifest, tmp_path)


def test_a_prompt_begins_as_the_rows_of_the_data_do(tmp_path: Path) -> None:
    """With what its tokenizer puts before a text, but not what it puts after; neither padded nor cut."""
    from tokenizers.processors import TemplateProcessing

    made = train_tokenizer(["a tree and a lane"], 300)
    made.add_special_tokens(["<s>", "</s>"])
    first, last = (made.token_to_id(token) for token in ("<s>", "</s>"))
    made.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", first), ("</s>", last)])
    made.enable_padding(length=64)
    made.enable_truncation(4)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.csv").write_text("text\na tree and a lane\n")
    options = RowOptions(tokenizer=tmp_path / "tokenizer.json", share=0)
    (manifest,) = import_rows(tmp_path / "out", {"train": [tmp_path / "a.csv"]}, "csv", options).manifests
    (row,) = pq.read_table(f"{manifest.url}/part-00000.parquet")["input_ids"].to_pylist()
    coder = tokenizer_of(None, manifest)
    assert coder is not None and row[0] == first and row[-1] == last
    assert coder.encode("a tree and a lane") == row[:-1]
    coder = tokenizer_of(tmp_path, manifest)  # that of a model's folder, which has the same file
    assert coder is not None and coder.encode("a tree and a lane") == row[:-1]
    assert coder.encode("a tree</s>")[-1] == last, "the text itself has it"


def test_a_models_own_tokenizer_goes_along(tmp_path: Path) -> None:
    """All of its files, and not the data's."""
    folder, target = tmp_path / "model", tmp_path / "target"
    tokenizer(folder, {"a": 0})
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text("{}")
    target.mkdir()
    write_tokenizer(folder, described(tmp_path / "rows", {"input_ids": TOKENS}, tokenizer="x.json"), target)
    assert sorted(path.name for path in target.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert (target / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_model_of_a_subclass_goes_on_token_by_token() -> None:
    """It is called as the package's decoder is, which has no loop of its own."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))
    following = CausalLM(model={"vocabulary": 11}).continue_ids(model, [3], Sampling(num_tokens=2))
    expected = model(torch.arange(11)).argmax(-1).tolist()
    assert following == [expected[3], expected[expected[3]]]


@pytest.mark.slow
@pytest.mark.parametrize("setting", [{"repetition_penalty": 50.0}, {"no_repeat_ngram_size": 1}, {"min_p": 0.99}])
def test_settings_in_a_models_folder_do_not_choose_tokens(setting: dict[str, Any]) -> None:
    """The folder's end token still ends the text."""
    pytest.importorskip("transformers")
    model: Any = built({**LLAMA, "initializer_range": 0.5}).eval()
    own = model.generation_config
    for sampling in (Sampling(num_tokens=12), Sampling(num_tokens=12, temperature=1.0)):
        model.generation_config = own
        torch.manual_seed(1)
        expected = go_on(model, [5, 6], sampling)
        model.generation_config = type(own)(eos_token_id=expected[8], do_sample=True, **setting)
        torch.manual_seed(1)
        assert go_on(model, [5, 6], sampling) == expected[: expected.index(expected[8]) + 1]
        assert model.generation_config.to_dict().items() >= setting.items()


@pytest.mark.slow
def test_a_decoder_is_exported_for_rows_as_long_as_its_own(tmp_path: Path) -> None:
    """Else training could not go on from the folder, and others would cut what the model reads."""
    pytest.importorskip("transformers")
    manifest = described(tmp_path / "rows", {"input_ids": TOKENS})
    for max_tokens, most in ((16, 2048), (4096, 4096)):
        folder = tmp_path / str(max_tokens)
        assert prepared(manifest, max_tokens=max_tokens).begin_export(folder)
        task = prepared(manifest, max_tokens=max_tokens, hf={"path": str(folder)})
        assert task.language_model.max_positions == most
