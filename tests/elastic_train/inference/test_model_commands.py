"""`elastic-train export`, `generate` and `evaluate`: the model of a run, outside of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic_train.checkpoint import discover, open_store
from elastic_train.checkpoint.commits.reader import read_state
from elastic_train.cli.main import app
from elastic_train.data.corpora.text import Options, import_text
from elastic_train.errors import ConfigError, DataError
from elastic_train.tasks.decoder.as_transformers import llama_name
from tests.elastic_train.training.jobs import WITNESS, config, result, succeed
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
    import_text(folder / "rows", [folder / "rows.jsonl"], Options(vocabulary=512))
    return folder / "rows"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    """A finished run of a language model on three ranks, with weights in shares."""
    folder = tmp_path_factory.mktemp("language")
    sharded = ["--parallel.shards", "parameters", "--parallel.recompute", "units"]
    succeed(start([config(folder, texts, LANGUAGE), *sharded], num_ranks=3))
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
    found = said(capsys, "evaluate", run, "--data", texts / "validation")
    assert found["metrics"] == result(run.parent)["metrics"] and found["step"] == 40
    part = said(capsys, "evaluate", run, "--data", texts / "validation", "--max-samples", "3")["metrics"]
    assert isinstance(part, dict) and part["samples"] == 3.0
    call("evaluate", run, "--data", texts / "train")
    assert "of" in (printed := capsys.readouterr().out) and "perplexity" in printed


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
    assert said(capsys, "export", run, tmp_path / "weights", "--to", "safetensors")["bytes"]
    assert sorted(path.name for path in run.glob("*hf*")) == ["hf-40"]


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


def test_other_tasks_are_evaluated_and_say_what_they_do_not_do(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    succeed(start([config(tmp_path, rows, WITNESS, epochs=1)]))
    assert said(capsys, "evaluate", tmp_path / "run", "--data", rows / "train")["metrics"]
    with pytest.raises(ConfigError, match="has no model of transformers; use --to safetensors"):
        call("export", tmp_path / "run")
    with pytest.raises(ConfigError, match="does not generate: it is no language model"):
        call("generate", tmp_path / "run", "--ids", "1")
