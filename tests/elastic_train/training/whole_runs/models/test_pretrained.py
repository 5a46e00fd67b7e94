"""Models of transformers in whole runs: one hash at any world size, and adapters whose base is not saved."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from elastic_train.checkpoint import discover, load, open_store
from elastic_train.checkpoint.commits.reader import read_state
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.errors import ConfigError
from elastic_train.job.state import AppliedState, Reached, build_state
from elastic_train.system.failpoints import VARIABLE, arm
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.trained.exporting import export_folder
from elastic_train.trained.opening import open_trained
from tests.conftest import standby_with, start
from tests.elastic_train.tasks.language_rows import BERT, LLAMA
from tests.elastic_train.training.jobs import config, result, succeed

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]  # one process imports transformers

JOB: dict[str, object] = {
    "batch": {"global_batch": 24, "micro_batch": 6},
    "optimizer": {"lr": 0.01, "warmup_steps": 3},
    "max_steps": 6,
    "checkpoint": {"every_steps": 3, "keep_last": 3},
}


@pytest.fixture(scope="module", autouse=True)
def transformers() -> object:
    """Have trainers forked from a process that has imported transformers."""
    found = pytest.importorskip("transformers")
    standby_with("tests.preload_transformers")
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, transformers: object) -> Path:
    """The folder of a small Llama of 64 tokens."""
    return drawn(tmp_path_factory.mktemp("base"), transformers, seed=3)


def drawn(folder: Path, transformers: object, seed: int) -> Path:
    torch.manual_seed(seed)
    made = transformers.AutoConfig.for_model(**{**LLAMA, "vocab_size": 64})  # type: ignore[attr-defined]
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)  # type: ignore[attr-defined]
    return folder


def adapted(folder: Path, rows: Path, base: Path, **changes: object) -> str:
    """Write the configuration of a job that trains adapters."""
    params = {"max_tokens": 16, "hf": {"path": str(base)}, "lora": {"r": 4, "lora_dropout": 0.1}}
    task = {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": params}
    return config(folder, rows, JOB, task=task, **changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, rows: Path, base: Path) -> Path:
    """A finished run of adapters on one process."""
    folder = tmp_path_factory.mktemp("adapted")
    succeed(start([adapted(folder, rows, base)]))
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "how"), [(2, ["--parallel.shards", "gradients", "--parallel.recompute", "units"]), (3, [])]
)
def test_adapters_have_one_hash_at_any_world(
    tmp_path: Path, rows: Path, base: Path, alone: Path, num_ranks: int, how: list[str]
) -> None:
    succeed(start([adapted(tmp_path, rows, base), *how], num_ranks=num_ranks))
    for key in ("weights_sha256", "metrics"):
        assert result(tmp_path)[key] == result(alone)[key]


def test_a_killed_run_of_adapters_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, rows: Path, base: Path, alone: Path
) -> None:
    """Killed at its second commit, and resumed from the first, of the adapters alone, by another number of ranks."""
    points = tmp_path / "points"
    points.mkdir()
    arm(points, "record", "kill", nth=2)
    path = adapted(tmp_path, rows, base)
    assert start([path], num_ranks=2, environ={VARIABLE: str(points)}).code != 0
    done = succeed(start([path, "--parallel.shards", "optimizer"], num_ranks=4))
    assert "resumed from commits/" in done.output
    assert result(tmp_path)["weights_sha256"] == result(alone)["weights_sha256"]


def test_a_commit_of_adapters_has_no_weights_of_the_base_but_its_digest(
    tmp_path: Path, alone: Path, base: Path, transformers: object
) -> None:
    """With another base it is not continued."""
    store = open_store(str(alone / "run"))
    head = discover(store).head
    assert head is not None and head.weights_sha256 == result(alone)["weights_sha256"]
    model = read_state(store, head)["model"]
    assert isinstance(model, dict)
    (digest,) = [name for name in model if "lora_" not in name]
    assert digest.startswith("base_blake3_") and len(model) > 4
    built(base, "none").restore(lambda held: load(store, head, held), Reached())
    other = built(drawn(tmp_path / "other", transformers, seed=4), "none")
    with pytest.raises(ConfigError, match=r"state 'model.base_blake3_.* the commit holds nothing; was the model"):
        other.restore(lambda held: load(store, head, held), Reached())


def built(base: Path, shards: Literal["none", "parameters"]) -> AppliedState:
    """Return the state that a process with adapters on a base begins with."""
    task = CausalLM(hf={"path": str(base)}, lora={"r": 4}, max_tokens=16)
    task.config = task.source.load_config()  # type: ignore[union-attr]
    model, config = task.build_model(), OptimizerConfig()
    groups = task.parameter_groups(model)
    return build_state(model, config, 10, "cpu", is_fp16=False, groups=groups, parallel=ParallelConfig(shards=shards))


def test_adapters_alone_are_handed_over(base: Path) -> None:
    """What a newcomer on the same base gets makes its model the giver's."""
    torch.manual_seed(1)
    giver = built(base, "none")
    with torch.no_grad():
        for parameter in giver.model.parameters():
            parameter.add_(parameter.requires_grad * torch.randn_like(parameter))
    taker = built(base, "none")
    given = giver.shards.held()
    assert not any("embed_tokens" in name for name in given["model"])  # type: ignore[attr-defined]
    taker.restore(lambda held: held.update(given), Reached())
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        found = [state.model.eval()(input_ids=tokens).logits for state in (giver, taker)]
    assert found[0].equal(found[1])
    assert giver.shards.digest_alone() == taker.shards.digest_alone()


def test_what_is_not_in_commits_cannot_be_held_in_shares_alone(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs all weights in commits, .* set it to gradients"):
        built(base, "parameters")


def test_a_classifier_has_one_hash_at_any_world_and_in_every_mode(tmp_path: Path, rows: Path) -> None:
    """An encoder with dropout, metadata beside it, and weights for its classes."""
    params = {"hf": {"config": {**BERT, "vocab_size": 64}}, "max_tokens": 16, "class_weights": "balanced"}
    params |= {"numeric": ["size"], "categorical": ["kind"]}
    task = {"path": "elastic_train.tasks.sequence_classifier:SequenceClassifier", "params": params}
    found = []
    for num_ranks, how in ((None, []), (3, ["--parallel.shards", "parameters", "--parallel.recompute", "units"])):
        folder = tmp_path / str(num_ranks)
        succeed(start([config(folder, rows, JOB, task=task), *how], num_ranks=num_ranks))
        found.append({key: result(folder)[key] for key in ("weights_sha256", "metrics")})
    assert found[0] == found[1]
    assert set(found[0]["metrics"]) >= {"macro_f1", "auc", "calibration_error"}  # type: ignore[call-overload]


@pytest.mark.parametrize("is_merged", [False, True])
def test_adapters_are_exported_beside_their_base_or_merged_with_it(
    tmp_path: Path, alone: Path, base: Path, transformers: object, is_merged: bool
) -> None:
    """Alone to the last bit; merged, they round otherwise."""
    trained = open_trained(str(alone / "run"))
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected = trained.model.eval()(input_ids=tokens).logits
    export_folder(str(alone / "run"), tmp_path / "folder", is_merged=is_merged)
    assert (tmp_path / "folder" / "adapter_config.json").exists() is not is_merged
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")  # type: ignore[attr-defined]
    with torch.no_grad():
        found = loaded.eval()(input_ids=tokens).logits
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)(input_ids=tokens).logits  # type: ignore[attr-defined]
    assert not torch.allclose(plain, expected)
    if is_merged:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    else:
        assert found.equal(expected)


def test_a_model_that_is_cut_by_its_own_plan_has_one_hash_at_any_number_of_cells(tmp_path: Path, rows: Path) -> None:
    """Its commits have whole tensors: one process goes on from them, and rounds otherwise."""
    sizes = {"model_type": "qwen3", "vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    params = {"max_tokens": 16, "hf": {"config": {**LLAMA, **sizes}}}
    task = {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": params}
    found = []
    for num_ranks in (2, 4):
        run = config(tmp_path / str(num_ranks), rows, JOB, task=task)
        succeed(start([run, "--parallel.tensor", "2"], num_ranks=num_ranks))
        found.append(result(tmp_path / str(num_ranks)))
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    run = config(tmp_path / "1", rows, JOB, task=task)
    succeed(start([run, "--parallel.tensor", "2", "--max_steps", "4"], num_ranks=2))
    succeed(start([run]))
    cells, mixed = (open_trained(str(tmp_path / name / "run")).model.state_dict() for name in "21")
    for name, tensor in cells.items():
        torch.testing.assert_close(mixed[name], tensor, rtol=0, atol=1e-3, msg=name)
