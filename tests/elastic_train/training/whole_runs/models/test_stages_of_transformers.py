"""Pipeline stages of transformers models, in whole runs: the hash and the exported folder of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.cli.main import main
from elastic_train.inference.exporting import export_folder
from tests import memory_live
from tests.elastic_train.tasks.language_rows import GPT2, LLAMA
from tests.elastic_train.training.jobs import average_of, config, history, result, succeed
from tests.elastic_train.training.whole_runs.compared import LANGUAGE, assert_near, file_of, newest_weights
from tests.memory_job import Loss, start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]  # one process imports transformers

UNTIED = {"tie_word_embeddings": False}
SIZES = {"vocab_size": 64, "num_hidden_layers": 4, "attention_dropout": 0.1}
QWEN3 = {**LLAMA, **SIZES, **UNTIED, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8}


def stages(num: int, *, kind: str = "1f1b") -> list[str]:
    return ["--parallel.pipeline", str(num), "--parallel.schedule", kind]


@pytest.fixture(scope="module", autouse=True)
def transformers() -> Any:
    """Skip where transformers is not installed."""
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder_of_gpt2(tmp_path_factory: pytest.TempPathFactory, transformers: Any) -> Path:
    """A folder whose output layer is tied to its embedding, as in most models of this type."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(3)
    made = transformers.AutoConfig.for_model(**{**GPT2, "vocab_size": 64, "n_layer": 3})
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    return folder


def job(folder: Path, rows: Path, hf: dict[str, Any]) -> str:
    params = {"hf": hf, "max_tokens": 16}
    return config(folder, rows, LANGUAGE, task={"path": "elastic_train.tasks.causal_lm:CausalLM", "params": params})


@pytest.fixture(scope="module")
def of_gpt2(tmp_path_factory: pytest.TempPathFactory, fewer_rows: Path, folder_of_gpt2: Path) -> Path:
    """A run of one process on that folder, untied."""
    folder = tmp_path_factory.mktemp("one")
    succeed(start([job(folder, fewer_rows, {"path": str(folder_of_gpt2), "config": UNTIED})]))
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [
        (4, [*stages(2, kind="gpipe"), "--parallel.bucket_mb", "0.001"]),
        (4, [*stages(2), "--parallel.shards", "gradients", "--parallel.copies", "1"]),
        (3, [*stages(3), "--parallel.recompute", "units"]),
    ],
)
def test_stages_of_a_folders_model_have_the_bits_of_one_process(
    tmp_path: Path, fewer_rows: Path, folder_of_gpt2: Path, of_gpt2: Path, num_ranks: int, how: list[str]
) -> None:
    """The model has dropout before and in its layers; its output layer starts as a copy of the embedding."""
    run = job(tmp_path, fewer_rows, {"path": str(folder_of_gpt2), "config": UNTIED})
    succeed(start([run, *how], num_ranks=num_ranks))
    for what in ("weights_sha256", "metrics", "num_samples"):
        assert result(tmp_path)[what] == result(of_gpt2)[what]
    assert average_of(tmp_path) == average_of(of_gpt2)


def test_a_tied_model_of_a_folder_has_one_hash_at_any_number_of_stages(
    tmp_path: Path, fewer_rows: Path, folder_of_gpt2: Path
) -> None:
    """It differs from one process by the order of an addition."""
    cases = [(1, stages(1)), (2, stages(2)), (3, stages(3)), (4, [*stages(2), "--parallel.shards", "gradients"])]
    for number, (num_ranks, how) in enumerate(cases):
        run = job(tmp_path / str(number), fewer_rows, {"path": str(folder_of_gpt2)})
        succeed(start([run, *how], num_ranks=num_ranks))
    one, *others = (result(tmp_path / str(number))["weights_sha256"] for number in range(len(cases)))
    assert one != others[0] and others == others[:1] * 3
    assert_near(tmp_path / "1", tmp_path / "0")


def test_a_stage_that_is_lost_costs_no_applied_step(
    tmp_path: Path, fewer_rows: Path, folder_of_gpt2: Path, of_gpt2: Path
) -> None:
    """A newcomer has no weights until its peer in the other cell sends it those of its stage."""
    run = job(tmp_path, fewer_rows, {"path": str(folder_of_gpt2), "config": UNTIED})
    done = memory_live.start([run, *stages(2)], num_ranks=4, losses=[Loss(3, 4, "backward")])
    assert sorted(done.codes) == [-9, 0, 0, 0, 0], done.output
    restored = [line for line in history(tmp_path, "restore") if int(str(line["term"])) > 1]
    assert restored and all(int(str(line["step"])) > 0 for line in restored)
    assert result(tmp_path)["weights_sha256"] == result(of_gpt2)["weights_sha256"]


def test_commits_of_stages_go_on_at_other_degrees_and_export_to_the_same_folder(
    tmp_path: Path, fewer_rows: Path, folder_of_gpt2: Path, of_gpt2: Path, transformers: Any
) -> None:
    """Each stage writes its own tensors; torch's reader, one process and transformers find whole tensors."""
    run = job(tmp_path, fewer_rows, {"path": str(folder_of_gpt2), "config": UNTIED})
    for until, num_stages in [(1, 2), (2, 3)]:
        succeed(start([run, *stages(num_stages), "--max_steps", str(until)], num_ranks=num_stages))
        if until == 1:
            first, last = ("transformer.wpe", "transformer.h.0.ln_1"), ("transformer.h.1.ln_1", "lm_head")
            for number, names in enumerate((first, last)):
                assert {file_of(tmp_path, f"model.{name}.weight") for name in names} == {f"__{number}_0.distcp"}
    newest_weights(tmp_path)
    succeed(start([run]))
    assert result(tmp_path)["weights_sha256"] == result(of_gpt2)["weights_sha256"]
    weights = newest_weights(tmp_path)
    exported = []
    for name, folder in (("mine", tmp_path), ("theirs", of_gpt2)):
        export_folder(str(folder / "run"), tmp_path / name)
        exported.append((tmp_path / name / "model.safetensors").read_bytes())
    assert exported[0] == exported[1]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine").state_dict()
    assert loaded.keys() == weights.keys() and all(loaded[name].equal(tensor) for name, tensor in weights.items())


@pytest.mark.hunt
def test_chunks_and_tensor_ranks_of_drawn_weights(tmp_path: Path, fewer_rows: Path) -> None:
    """The pipeline, its schedule and the number of cells change no bit: neither relative to one process, in bf16, nor
    to tensor ranks alone, with or without sequence parallelism, and through a lost rank; attention has dropout."""
    found, bf16, tensor = {}, ["--precision", "bf16"], ["--parallel.tensor", "2"]
    tokens = [*tensor, "--parallel.sequence", "true"]
    for name, num_ranks, how in (
        ("one", None, bf16),
        ("chunks", 2, [*bf16, *stages(2, kind="interleaved")]),
        ("tensor", 2, tensor),
        ("tensor in stages", 4, [*tensor, *stages(2)]),
        ("tokens", 2, tokens),
        ("tokens in stages", 4, [*tokens, *stages(2), "--parallel.recompute", "units"]),
        ("tokens in two cells", 4, tokens),
        ("tensor with a lost rank", 6, tensor),
    ):
        folder = tmp_path / name
        run = job(folder, fewer_rows, {"config": QWEN3})
        if "lost" in name:
            done = memory_live.start(
                [run, *how, "--max_steps", "2"], num_ranks=num_ranks, losses=[Loss(3, 2, "backward")]
            )
            assert sorted(done.codes) == [-9, *[0] * 6], done.output
        else:
            succeed(start([run, *how, "--max_steps", "2"], num_ranks=num_ranks))
        found[name] = result(folder)["weights_sha256"], result(folder)["metrics"], average_of(folder)
    assert found["chunks"] == found["one"]
    assert found["tensor in stages"] == found["tensor with a lost rank"] == found["tensor"]
    assert found["tokens in stages"] == found["tokens in two cells"] == found["tokens"]
    weights = [newest_weights(tmp_path / name) for name in ("tensor", "tokens")]
    for name, one in weights[0].items():
        torch.testing.assert_close(weights[1][name], one, rtol=0, atol=2e-5)


def test_validate_says_what_keeps_a_model_of_transformers_from_stages(
    tmp_path: Path, fewer_rows: Path, folder_of_gpt2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["validate", job(tmp_path, fewer_rows, {"path": str(folder_of_gpt2)}), *stages(4)])
    said = " ".join("".join(capsys.readouterr()).split())
    assert ended.value.code == 2
    assert "pipeline: 4 does not work with the 3 layers of GPT2LMHeadModel in 4 stages, since" in said
