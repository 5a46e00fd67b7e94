"""Models of transformers in whole runs: one hash at any world size, and adapters whose base is not saved."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from elastic_train.checkpoint.commits.reader import discover, load, read_state
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.data.tables.digits import import_digits
from elastic_train.errors import ConfigError, StateLostError
from elastic_train.inference.exporting import export_folder
from elastic_train.inference.opening import open_trained
from elastic_train.job.build import build_state
from elastic_train.job.peer_states import PeerState
from elastic_train.job.reshard import take_first_seat
from elastic_train.job.sharded.zero1_share import Zero1Share
from elastic_train.job.state import AppliedState, TrainProgress
from elastic_train.job.state_shards import Place
from elastic_train.parallel.group import Group
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.world.equal_weights import digest_of_all
from tests import memory_live
from tests.elastic_train.tasks.language_rows import BERT, LLAMA
from tests.elastic_train.training.jobs import config, result, succeed
from tests.memory_job import AT_SECOND_COMMIT, Loss, start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]  # one process imports transformers

JOB: dict[str, object] = {
    "batch": {"global_batch": 24, "micro_batch": 6},
    "optimizer": {"lr": 0.01, "warmup_steps": 3},
    "max_steps": 3,
    "checkpoint": {"every": "1 steps", "keep_last": 3},
}


@pytest.fixture(scope="module", autouse=True)
def transformers() -> object:
    """Skip where transformers is not installed."""
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def rows(few_rows: Path) -> Path:
    return few_rows


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, transformers: object) -> Path:
    """A folder with a small Llama of 64 tokens."""
    return drawn(tmp_path_factory.mktemp("base"), transformers, seed=3)


def drawn(folder: Path, transformers: object, seed: int, **sizes: int) -> Path:
    torch.manual_seed(seed)
    made = transformers.AutoConfig.for_model(**{**LLAMA, "vocab_size": 64, **sizes})  # type: ignore[attr-defined]
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
    ("num_ranks", "how"),
    [
        (3, ["--parallel.shards", "parameters", "--parallel.recompute", "units"]),
        (2, ["--parallel.shards", "parameters", "--parallel.offload", "all", "--parallel.copies", "1"]),
        (4, ["--parallel.pipeline", "2", "--parallel.shards", "optimizer"]),
    ],
)
def test_adapters_have_one_hash_at_any_world(
    tmp_path: Path, rows: Path, base: Path, alone: Path, num_ranks: int, how: list[str]
) -> None:
    succeed(start([adapted(tmp_path, rows, base), *how], num_ranks=num_ranks))
    for key in ("weights_sha256", "metrics"):
        assert result(tmp_path)[key] == result(alone)[key]


@pytest.mark.parametrize("degree", ["tensor", "context", pytest.param("sequence", marks=pytest.mark.hunt)])
def test_ranks_share_layers_with_adapters_or_their_tokens(
    tmp_path: Path, rows: Path, transformers: object, degree: str
) -> None:
    """One hash for any number of cells and any sharding, and scores close to one rank's."""
    modules, found = ["q_proj", "o_proj", "down_proj"], {}
    base = drawn(tmp_path / "base", transformers, seed=3, num_key_value_heads=2)
    params = {"max_tokens": 16, "hf": {"path": str(base)}, "lora": {"r": 4, "target_modules": modules}}
    task = {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": params}
    two = {"sequence": ["--parallel.tensor", "2", "--parallel.sequence", "true"]}
    degrees = two.get(degree, [f"--parallel.{degree}", "2"])
    for name, num_ranks, how in (
        ("whole", 1, []),
        ("one", 2, degrees),
        ("shared", 4, [*degrees, "--parallel.shards", "parameters"]),
    ):
        succeed(start([config(tmp_path / name, rows, JOB, task=task), *how], num_ranks=num_ranks))
        found[name] = result(tmp_path / name)
    assert found["one"]["weights_sha256"] == found["shared"]["weights_sha256"]
    for key, value in found["whole"]["metrics"].items():  # type: ignore[attr-defined]
        assert found["one"]["metrics"][key] == pytest.approx(value, rel=1e-4)  # type: ignore[index]


def test_a_killed_run_of_adapters_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, rows: Path, base: Path, alone: Path
) -> None:
    """Killed at its second commit, and resumed from the first (which has only adapters) with other numbers of ranks."""
    path = adapted(tmp_path, rows, base)
    assert start([path], num_ranks=2, lose=AT_SECOND_COMMIT).code != 0
    done = succeed(start([path, "--parallel.shards", "parameters"], num_ranks=4))
    assert "Resuming from step" in done.output
    assert result(tmp_path)["weights_sha256"] == result(alone)["weights_sha256"]


def test_a_commit_of_adapters_has_no_weights_of_the_base_but_its_digest(
    tmp_path: Path, alone: Path, base: Path, transformers: object
) -> None:
    """With another base the commit is refused."""
    store = open_store(str(alone / "run"))
    head = discover(store).head
    assert head is not None and head.weights_sha256 == result(alone)["weights_sha256"]
    model = read_state(store, head)["model"]
    assert isinstance(model, dict)
    (digest,) = [name for name in model if "lora_" not in name]
    assert digest.startswith("base_blake3_") and len(model) > 4
    built(base, "none").restore(lambda held: load(store, head, held), TrainProgress())
    other = built(drawn(tmp_path / "other", transformers, seed=4), "none")
    with pytest.raises(ConfigError, match=r"state 'model.base_blake3_.* the commit holds nothing; was the model"):
        other.restore(lambda held: load(store, head, held), TrainProgress())


def built(base: Path, shards: Literal["none", "parameters"]) -> AppliedState:
    """Return the initial state of a process with adapters on a base."""
    task = CausalLM(hf={"path": str(base)}, lora={"r": 4}, max_tokens=16)
    torch.manual_seed(1)
    model, config = task.build_model(), OptimizerConfig()
    groups = task.parameter_groups(model)
    return build_state(model, config, 10, "cpu", is_fp16=False, groups=groups, parallel=ParallelConfig(shards=shards))


def test_adapters_alone_are_handed_over(base: Path) -> None:
    """A newcomer on the same base that receives the adapters has the sender's model."""
    torch.manual_seed(1)
    giver = built(base, "none")
    with torch.no_grad():
        for parameter in giver.model.parameters():
            parameter.add_(parameter.requires_grad * torch.randn_like(parameter))
    taker = built(base, "none")
    given = giver.shards.share.held()
    assert not any("embed_tokens" in name for name in given["model"])  # type: ignore[attr-defined]
    taker.restore(lambda held: held.update(given), TrainProgress())
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        found = [state.model.eval()(input_ids=tokens).logits for state in (giver, taker)]
    assert found[0].equal(found[1])
    assert digest_of_all(giver.shards) == digest_of_all(taker.shards)


def test_a_frozen_base_in_shares_is_what_a_process_begins_with(base: Path) -> None:
    """A commit does not hold it, so a process that has only its shard left restarts before it loads a commit."""
    group, whole, state = Group(0, 1, None, 60), built(base, "none"), built(base, "parameters")
    assert isinstance(state.shards.share, Zero1Share)
    nobody = [PeerState(Place(0, 0), None, ("", "0"))]
    take_first_seat(group, state.shards, nobody)  # as before a commit is read
    assert digest_of_all(state.shards, group) == digest_of_all(whole.shards)
    assert not any("embed_tokens" in name for name in state.shards.share.held()["model"])  # type: ignore[attr-defined]
    with pytest.raises(StateLostError, match="do not hold the frozen weights"):
        take_first_seat(group, state.shards, nobody)


def test_a_classifier_has_one_hash_at_any_world_and_in_every_mode(tmp_path: Path, rows: Path) -> None:
    """An encoder with dropout, metadata inputs and class weights."""
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
    """Separate adapters are bit-exact; merged ones round differently. All can be read by others."""
    trained = open_trained(str(alone / "run"))
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected = trained.model.eval()(input_ids=tokens).logits
    export_folder(str(alone / "run"), tmp_path / "folder", is_merged=is_merged)
    assert (tmp_path / "folder" / "adapter_config.json").exists() is not is_merged
    described = tmp_path / "folder" / ("config.json" if is_merged else "adapter_config.json")
    assert {path.stat().st_mode for path in described.parent.glob("*.*")} == {described.stat().st_mode}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")  # type: ignore[attr-defined]
    with torch.no_grad():
        found = loaded.eval()(input_ids=tokens).logits
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)(input_ids=tokens).logits  # type: ignore[attr-defined]
    assert not torch.allclose(plain, expected)
    if is_merged:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    else:
        assert found.equal(expected)


LAYERS = ["q_proj", "v_proj"]
OTHERS: dict[str, dict[str, object]] = {
    "dora": {"type": "lora", "r": 4, "use_dora": True, "use_rslora": True, "lora_dropout": 0.1},
    "ia3": {"type": "ia3"},
    "loha": {"type": "loha", "r": 4, "target_modules": LAYERS},
    "lokr": {"type": "lokr", "r": 4, "target_modules": LAYERS},
    "ln_tuning": {"type": "ln_tuning", "target_modules": ["input_layernorm", "post_attention_layernorm"]},
    "prompt_tuning": {"type": "prompt_tuning", "num_virtual_tokens": 3},
    "p_tuning": {"type": "p_tuning", "num_virtual_tokens": 3, "encoder_hidden_size": 16, "encoder_dropout": 0.1},
}


def trained_on_three_ranks(folder: Path, rows: Path, task: dict[str, object]) -> Path:
    """Train in one process, and on three ranks, to the same bits; return the second run's folder."""
    short: dict[str, object] = {"task": task, "max_steps": 2}
    succeed(start([config(folder / "alone", rows, JOB, **short)]))
    how = ["--parallel.shards", "gradients", "--parallel.recompute", "units"]
    succeed(start([config(folder / "many", rows, JOB, **short), *how], num_ranks=3))
    assert result(folder / "many")["weights_sha256"] == result(folder / "alone")["weights_sha256"]
    return folder / "many"


@pytest.mark.parametrize(
    "name", [name if name in ("ia3", "p_tuning") else pytest.param(name, marks=pytest.mark.hunt) for name in OTHERS]
)
def test_other_adapters_have_one_hash_and_are_exported(
    tmp_path: Path, rows: Path, base: Path, transformers: object, name: str
) -> None:
    """A commit has only the adapters and the base's digest; peft loads the export bit-exactly."""
    peft = pytest.importorskip("peft")
    params = {"max_tokens": 16, "hf": {"path": str(base)}, "adapter": OTHERS[name]}
    task = {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": params}
    folder = trained_on_three_ranks(tmp_path, rows, task)
    if name in ("prompt_tuning", "p_tuning"):
        how = ["--parallel.pipeline", "2", "--parallel.shards", "optimizer"]
        job = [config(tmp_path / "stages", rows, JOB, task=task, max_steps=2), *how]
        done = memory_live.start(job, num_ranks=4, losses=[Loss(3, 4, "backward")])
        assert sorted(done.codes) == [-9, 0, 0, 0, 0], done.output
        assert result(tmp_path / "stages")["weights_sha256"] == result(folder)["weights_sha256"]
    trained = open_trained(str(folder / "run"))
    assert not any(one.startswith("base_model") and ".default" not in one for one in trained.model.state_dict())
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected = trained.model.eval()(input_ids=tokens).logits
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)  # type: ignore[attr-defined]
        assert not torch.allclose(plain(input_ids=tokens).logits, expected[:, -6:])
        export_folder(str(folder / "run"), tmp_path / "folder")
        loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "folder").eval()
        assert loaded(input_ids=tokens).logits.equal(expected)
    if name in ("prompt_tuning", "p_tuning"):
        with pytest.raises(ConfigError, match="a prompt is not part of them"):
            export_folder(str(folder / "run"), tmp_path / "merged", is_merged=True)
        return
    export_folder(str(folder / "run"), tmp_path / "merged", is_merged=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")  # type: ignore[attr-defined]
    torch.testing.assert_close(merged.eval()(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-6)


def test_adapters_of_a_classifier_have_one_hash(tmp_path: Path, rows: Path, transformers: object) -> None:
    """The classifier has a head and reads metadata."""
    torch.manual_seed(3)
    made = transformers.AutoConfig.for_model(**{**BERT, "vocab_size": 64})  # type: ignore[attr-defined]
    transformers.AutoModel.from_config(made).save_pretrained(tmp_path / "bert")  # type: ignore[attr-defined]
    params = {"max_tokens": 16, "hf": {"path": str(tmp_path / "bert")}, "adapter": {"type": "ia3"}}
    params |= {"numeric": ["size"], "categorical": ["kind"]}
    task = {"path": "elastic_train.tasks.sequence_classifier:SequenceClassifier", "params": params}
    trained_on_three_ranks(tmp_path, rows, task)


VIT = {"model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16}
VIT |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def test_adapters_of_a_vision_transformer_have_one_hash(tmp_path: Path, transformers: object) -> None:
    """The newly initialised head is trained in full; the merged folder gives the same classifications."""
    torch.manual_seed(3)
    made = transformers.AutoConfig.for_model(**VIT)  # type: ignore[attr-defined]
    transformers.AutoModelForImageClassification.from_config(made).save_pretrained(tmp_path / "vit")  # type: ignore[attr-defined]
    import_digits(tmp_path / "rows", share=0.1, seed=7)
    adapter = {"type": "lora", "r": 4, "target_modules": "all-linear"}
    params = {"size": 8, "channels": 1, "flip": False, "hf": {"path": str(tmp_path / "vit")}}
    task = {"path": "elastic_train.tasks.image_classifier:ImageClassifier"}
    folder = trained_on_three_ranks(tmp_path, tmp_path / "rows", {**task, "params": {**params, "adapter": adapter}})
    trained = open_trained(str(folder / "run"))
    kept = [name for name in trained.model.state_dict() if "classifier" in name]
    assert kept and all("modules_to_save" in name for name in kept)
    export_folder(str(folder / "run"), tmp_path / "merged", is_merged=True)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "merged")  # type: ignore[attr-defined]
    pixels = torch.rand(2, 1, 8, 8)
    with torch.no_grad():
        expected = trained.model.eval()(pixel_values=pixels).logits
        torch.testing.assert_close(loaded.eval()(pixel_values=pixels).logits, expected, rtol=1e-4, atol=1e-6)


def test_a_model_that_is_cut_by_its_own_plan_has_one_hash_at_any_number_of_cells(tmp_path: Path, rows: Path) -> None:
    """Its commits have whole tensors: one process continues from them, with different rounding."""
    sizes = {"model_type": "qwen3", "vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    params = {"max_tokens": 16, "hf": {"config": {**LLAMA, **sizes}}}
    task = {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": params}
    found = []
    shards = ["--parallel.shards", "parameters", "--parallel.copies", "1"]
    for num_ranks, how in ((2, []), (6, shards)):
        run = config(tmp_path / str(num_ranks), rows, JOB, task=task)
        succeed(start([run, "--parallel.tensor", "2", *how], num_ranks=num_ranks))
        found.append(result(tmp_path / str(num_ranks))["weights_sha256"])
    assert found[0] == found[1]
    run = config(tmp_path / "1", rows, JOB, task=task)
    succeed(start([run, "--parallel.tensor", "2", "--max_steps", "2"], num_ranks=2))
    succeed(start([run]))
    cells, mixed = (open_trained(str(tmp_path / name / "run")).model.state_dict() for name in "21")
    for name, tensor in cells.items():
        torch.testing.assert_close(mixed[name], tensor, rtol=0, atol=1e-3, msg=name)
