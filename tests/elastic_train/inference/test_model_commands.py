"""`elastic-train export`, `generate` and `evaluate`: the model of a run, outside of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_train.checkpoint.commits.reader import discover, read_state
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.cli.main import app
from elastic_train.data.dataset.manifest import build_manifest, load_manifest
from elastic_train.data.tables.importing import RowOptions, import_rows
from elastic_train.data.tables.texts import Options, import_text
from elastic_train.errors import ConfigError, DataError
from elastic_train.tasks.decoder.as_transformers import llama_name
from tests.elastic_train.training.jobs import CLASSIFIER, WITNESS, config, result, succeed
from tests.memory_job import start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("model commands")]  # one run is trained

TEXTS = [f"the answer to {first} and {second} is {first + second}" for first in range(9) for second in range(9)]
LANGUAGE: dict[str, object] = {
    "task": {
        "path": "elastic_train.tasks.causal_lm:CausalLM",
        "params": {"model": {"dim": 32, "depth": 2, "heads": 2, "kv_heads": 1}, "max_tokens": 40},
    },
    "batch": {"global_batch": 24, "micro_batch": 6},
    "optimizer": {"lr": 0.01, "warmup_steps": 3, "schedule": "constant"},
    "max_steps": 40,
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of sums in words, with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"text": text, "label": str(number % 2)} for number, text in enumerate(TEXTS)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    import_text(folder / "rows", {"train": [folder / "rows.jsonl"]}, Options(vocabulary=512))
    return folder / "rows"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    """A finished run of a language model on three ranks, with weights in shares."""
    folder = tmp_path_factory.mktemp("language")
    sharded = ["--parallel.shards", "parameters", "--parallel.recompute", "units"]
    done = start([config(folder, texts, LANGUAGE), *sharded], num_ranks=3)
    succeed(done)
    assert "training: 0 of 40 steps, 0%, " in done.output and "training: 40 of 40 steps, 100%, " in done.output
    return folder / "run"


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Undo what makes kernels repeatable."""
    yield
    torch.set_deterministic_debug_mode("default")


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    """Run a command with --json, and return what it printed."""
    capsys.readouterr()
    assert app([*map(str, arguments), "--json"], result_action="return_value", exit_on_error=False) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def call(*arguments: object) -> None:
    app(list(map(str, arguments)), result_action="return_value", exit_on_error=False)


def test_evaluate_gives_the_bits_of_the_runs_own_validation(
    run: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By one process, of what three had trained; on the first samples only, other numbers."""
    found = said(capsys, "evaluate", run)
    assert found["metrics"] == result(run.parent)["metrics"] and found["step"] == 40
    part = said(capsys, "evaluate", run, "--data", texts / "validation", "--max-samples", "3")["metrics"]
    assert isinstance(part, dict) and part["samples"] == 3.0
    call("evaluate", run, "--data", texts / "train")
    assert "of" in (printed := capsys.readouterr().out) and "perplexity" in printed


def test_predict_gives_the_loss_of_every_row(
    run: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order of ids, whatever the batch; weighted by their targets, they make the loss of the set."""
    first, second = tmp_path / "out" / "first.parquet", tmp_path / "second.parquet"
    done = said(capsys, "predict", run, "--data", texts / "train", "--out", first)
    call("predict", run, "--data", texts / "train", "--out", second, "--batch", "7")
    assert "first.parquet" not in capsys.readouterr().out
    rows, others = pq.read_table(first), pq.read_table(second)
    assert rows["id"].to_pylist() == list(range(int(str(done["rows"])))) == others["id"].to_pylist()
    loss, targets, other = (
        np.array(table[name]) for table, name in ((rows, "loss"), (rows, "targets"), (others, "loss"))
    )
    assert loss == pytest.approx(other, rel=1e-4)
    metrics = said(capsys, "evaluate", run, "--data", texts / "train")["metrics"]
    assert isinstance(metrics, dict) and (loss * targets).sum() / targets.sum() == pytest.approx(
        metrics["loss"], rel=1e-4
    )
    with pytest.raises(ConfigError, match=r"first.parquet: exists already"):
        call("predict", run, "--data", texts / "train", "--out", first)
    assert not list(tmp_path.rglob(".*"))


def test_predict_gives_classes_without_labels(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Rows whose labels were never known get the classes of those that have some; absent metadata is missing."""
    rows = [{"text": text, "label": str(number % 2), "size": len(text)} for number, text in enumerate(TEXTS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = RowOptions(tokenizer=texts / "train", numeric=("size",))
    texts = tmp_path / "sized"
    import_rows(texts, {"train": [tmp_path / "rows.jsonl"]}, "jsonl", options)
    task = {"path": "elastic_train.tasks.text_classifier:TextClassifier", "params": {"dim": 16, "depth": 1, "heads": 2}}
    succeed(start([config(tmp_path, texts, {**CLASSIFIER, "task": task, "max_steps": 4})]))
    bare = pq.ParquetDataset(sorted((texts / "train").glob("*.parquet"))).read().drop_columns("label")
    absent = bare.drop_columns("size")
    tables = {"bare": bare, "absent": absent}
    tables["missing"] = absent.append_column("size", pa.nulls(len(bare), pa.int64()))
    for name, table in tables.items():
        (tmp_path / name).mkdir()
        pq.write_table(table, tmp_path / name / "rows.parquet")
        build_manifest(str(tmp_path / name))
    found = {}
    for name, data in (("with", texts / "train"), *((name, tmp_path / name) for name in tables)):
        out = tmp_path / f"{name}.parquet"
        assert said(capsys, "predict", tmp_path / "run", "--data", data, "--out", out)["rows"] == len(bare)
        found[name] = pq.read_table(out)
    assert found["with"].equals(found["bare"]) and found["absent"].equals(found["missing"])
    assert "lacks size, which the model was trained with" in caplog.text
    row = found["with"].to_pylist()[0]
    labels = load_manifest(str(texts / "train")).labels
    assert labels is not None and row["prediction"] == labels[int(np.argmax(row["probabilities"]))]
    field = found["with"].schema.field("probabilities")
    assert json.loads(field.metadata[b"classes"]) == list(labels), "their order"
    assert row["probability"] == max(row["probabilities"]) and sum(row["probabilities"]) == pytest.approx(1)
    scores = said(capsys, "evaluate", tmp_path / "run", "--data", texts / "train")
    metrics, confusion = scores["metrics"], np.array(scores["confusion"])
    assert scores["classes"] == list(labels) and isinstance(metrics, dict)
    assert metrics["accuracy"] == pytest.approx(confusion.trace() / len(bare))
    one = confusion[labels.index("1")]
    assert metrics["recall/1"] == pytest.approx(one[labels.index("1")] / one.sum())
    call("evaluate", tmp_path / "run", "--data", texts / "train")
    assert "precision" in (printed := capsys.readouterr().out) and "recall/1" not in printed
    logged = (tmp_path / "run" / "metrics").glob("*.jsonl")
    assert any('"validation/precision/1"' in path.read_text() for path in logged)
    html = tmp_path / "report.html"
    call("report", tmp_path / "run", "--html", html)
    assert "classes of the last validation" in html.read_text() and "validation/precision" not in html.read_text()


def test_export_gives_a_folder_that_transformers_loads_to_the_last_bit(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The own decoder as a Llama, which computes the same, with the tokenizer of the data; by default in the run."""
    transformers = pytest.importorskip("transformers")
    found = said(capsys, "export", run)
    assert found["target"] == str(run / "hf-40")
    llama = transformers.AutoModelForCausalLM.from_pretrained(run / "hf-40")
    store = open_store(str(run))
    head = discover(store).head
    assert head is not None
    weights = read_state(store, head)["model"]
    assert isinstance(weights, dict) and set(map(llama_name, weights)) == set(llama.state_dict())
    assert all(tensor.equal(llama.state_dict()[llama_name(name)]) for name, tensor in weights.items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "hf-40")
    ids = tokenizer("the answer to 3 and 4 is")["input_ids"]
    theirs = llama.generate(input_ids=torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    ours = said(capsys, "generate", run, "--prompt", "the answer to 3 and 4 is", "--tokens", "8")
    assert ours["ids"] == theirs[0, len(ids) :].tolist()
    assert ours["text"] == tokenizer.decode(ours["ids"])
    with pytest.raises(ConfigError, match="hf-40: exists already"):
        call("export", run)
    assert said(capsys, "export", run, "--merge")["target"] == str(run / "hf-40-merged")
    call("export", run, tmp_path / "weights", "--to", "safetensors")
    out, err = capsys.readouterr()
    assert out.startswith("Done: ") and "writing weights: 0 of " in err and err.endswith(" tensors, 100%\n")
    assert sorted(path.name for path in run.glob("*hf*")) == ["hf-40", "hf-40-merged"]


def test_generate_draws_by_its_seed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "the answer", "--tokens", "12", "--temperature", "1.5", "--top-k", "40")
    first, again, other = (said(capsys, "generate", run, *options, "--seed", seed)["ids"] for seed in (1, 1, 2))
    assert first == again != other
    call("generate", run, "--prompt", "the answer", "--tokens", "5")
    assert capsys.readouterr().out.startswith("the answer to")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "{run}"), "give one of --prompt and --ids"),
        (("generate", "{run}", "--ids", "5,x"), "write token ids, such as 5,6,7"),
        (("generate", "{run}", "--ids", "5,9999"), "the prompt has token id 9999"),
        (("generate", "{run}", "--prompt", ""), "the prompt has no tokens"),
        (("generate", "{run}", "--prompt", "a", "--temperature", "-1"), "--temperature and --top-k at least 0"),
        (("generate", "{run}", "--prompt", "a", "--seed", str(1 << 64)), "--seed must fit into 64 bits"),
        (("generate", "s3://bucket/run", "--prompt", "a"), "give the run's folder"),
        (("export", "s3://bucket/run"), "name a TARGET"),
        (("export", "{run}", "--commit", "7"), "no commit is called '7'"),
        (("export", "{run}", "--train", "{run}/none"), "no manifest.json there"),
        (("evaluate", "{run}", "--data", "{run}/none"), "no manifest.json there"),
    ],
)
def test_what_cannot_be_done_is_refused(run: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        call(*(argument.format(run=run) for argument in arguments))


def test_a_run_without_validation_data_is_evaluated_on_a_named_dataset(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: {train: data/train}")
    with pytest.raises(ConfigError, match=r"was trained without validation data: name a dataset .* --data DATA"):
        call("evaluate", tmp_path)


def test_other_tasks_are_evaluated_and_say_what_they_do_not_do(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    succeed(start([config(tmp_path, rows, WITNESS, epochs=1)]))
    assert said(capsys, "evaluate", tmp_path / "run", "--data", rows / "train")["metrics"]
    with pytest.raises(ConfigError, match="has no model of transformers; use --to safetensors"):
        call("export", tmp_path / "run")
    with pytest.raises(ConfigError, match="does not generate: it is no language model"):
        call("generate", tmp_path / "run", "--ids", "1")
