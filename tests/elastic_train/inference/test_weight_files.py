"""A decoder's folder of transformers, from the commit's files: the one that transformers itself would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from elastic_train.checkpoint.commits.lookup import find
from elastic_train.checkpoint.commits.weights import CommitWeights, Kind, Weights
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError, StorageError
from elastic_train.inference.exporting import export_folder, split
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.as_transformers import as_transformers
from elastic_train.tasks.decoder.model import Decoder, DecoderShape
from tests.conftest import run_source
from tests.elastic_train.checkpoint.commit_samples import facts, writer

SIZES: dict[str, Any] = {"vocabulary": 64, "dim": 16, "depth": 3, "heads": 2, "kv_heads": 1}
LARGE: dict[str, Any] = {"vocabulary": 16384, "dim": 512, "depth": 12, "heads": 8}
"""55 M parameters, of which the largest tensor has 8.4 M."""


def write_run(
    folder: Path,
    rows: Path,
    sizes: dict[str, Any],
    model: nn.Module | None = None,
    *,
    spread: float = 0.0,
    **others: Any,
) -> nn.Module:
    """Write a run of one commit, with a moment and an average of every weight; return its model, a decoder if none is
    given.

    Its weights are moved from where they are drawn by normal random numbers, `spread` wide.
    """
    params = {"model": sizes, "max_tokens": 16}
    task = {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": params}
    config = Config.model_validate({"run": {"dir": str(folder)}, "task": task, "data": {"train": str(rows / "train")}})
    folder.mkdir()
    (folder / "config.yaml").write_text(config.to_yaml())
    model = model or Decoder(DecoderShape(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    moments = {name: {"exp_avg": one, "ema": one * 2} for name, one in named(model).items()}
    state: dict[str, object] = {"model": model.state_dict(), "optimizer": {"state": moments}}
    writer(open_store(str(folder))).save(state | others, facts(3))
    return model


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in model.named_parameters()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("weights", ["trained", "ema"])
@pytest.mark.parametrize("most_bytes", [10**9, 5000, 1])
def test_the_folder_is_what_transformers_writes(
    tmp_path: Path, rows: Path, is_tied: bool, weights: Weights, most_bytes: int
) -> None:
    """To the last byte of every file, whether weights fit one or have one each; and it reads them back."""
    transformers: Any = pytest.importorskip("transformers")
    model = write_run(tmp_path / "run", rows, {**SIZES, "tied": is_tied})
    if weights == "ema":
        for parameter in model.parameters():
            parameter.data.mul_(2)
    llama: Any = as_transformers(model)
    llama.save_pretrained(tmp_path / "theirs", max_shard_size=most_bytes)
    num_bytes = export_folder(str(tmp_path / "run"), tmp_path / "mine", weights=weights, most_bytes=most_bytes)
    mine, theirs = files_of(tmp_path / "mine"), files_of(tmp_path / "theirs")
    assert mine == theirs and num_bytes == sum(map(len, mine.values()))
    assert (len(mine) > 4) == (most_bytes < 10**9)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine").state_dict()
    assert all(loaded[name].equal(one) for name, one in llama.state_dict().items())


EXPERTS: dict[str, Any] = {**SIZES, "heads": 4, "kv_heads": 2, "experts": 5, "expert_hidden": 24}


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ({"experts_per_token": 2}, "MixtralForCausalLM"),
        ({"experts_per_token": 1}, "Qwen2MoeForCausalLM"),
        ({"experts_per_token": 3, "shared_hidden": 20}, "Qwen2MoeForCausalLM"),
        ({"experts_per_token": 1, "shared_hidden": 20}, "Qwen2MoeForCausalLM"),
    ],
)
def test_a_decoder_with_experts_is_a_model_of_transformers(
    tmp_path: Path, rows: Path, sizes: dict[str, Any], kind: str, is_tied: bool
) -> None:
    """It is loaded whole, and computes the same logits but for rounding: its experts are added in another order."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(5)
    model = write_run(tmp_path / "run", rows, {**EXPERTS, **sizes, "tied": is_tied}, spread=0.2)
    export_folder(str(tmp_path / "run"), tmp_path / "mine")
    loaded, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine", output_loading_info=True)
    assert type(loaded).__name__ == kind and not found["missing_keys"] and not found["unexpected_keys"]
    tokens = torch.arange(33).reshape(3, 11)
    with torch.no_grad():
        expected = model.eval()(tokens)
        torch.testing.assert_close(loaded.eval()(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.5, "experts decide"


def test_tensors_are_dealt_to_files_as_hugging_face_does(tmp_path: Path) -> None:
    hub: Any = pytest.importorskip("huggingface_hub")
    generator = torch.Generator().manual_seed(3)
    for most in (1, 40, 100, 1000, 10**6):
        sizes = torch.randint(1, 60, (30,), generator=generator).tolist()
        tensors = {str(place): torch.empty(size) for place, size in enumerate(sizes)}
        theirs = hub.split_torch_state_dict_into_shards(tensors, max_shard_size=most)
        found = split({name: Kind(one.dtype, one.shape) for name, one in tensors.items()}, most)
        assert found == list(theirs.filename_to_tensors.values())


class Longer(Decoder):
    """A decoder with a layer that no model of transformers has."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__(shape)
        self.extra = nn.Linear(2, 2)


class OwnModel(CausalLM):
    """A task whose user builds another model."""

    built: type[nn.Module] = Longer

    def build_model(self) -> nn.Module:
        return Longer(DecoderShape(**SIZES)) if self.built is Longer else nn.Linear(2, 3)


class Unlike(OwnModel):
    built = nn.Linear


class UnlikeWithExperts(Unlike):
    """Its parameters are those of a decoder that has to be built."""


@pytest.mark.heavy
@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize(
    ("task", "sizes", "message"),
    [
        (OwnModel, SIZES, "builds a model that transformers cannot load, since it has 'extra.weight': use --to safe"),
        (Unlike, SIZES, "builds a model that transformers cannot load, since it lacks 'embed.weight': use --to safe"),
        (UnlikeWithExperts, {**SIZES, "experts": 2}, "builds a Linear, which transformers cannot load: use --to safe"),
    ],
)
def test_a_model_that_a_subclass_builds_is_refused(
    tmp_path: Path, rows: Path, task: type[OwnModel], sizes: dict[str, Any], message: str
) -> None:
    """By what it has that transformers does not know, and nothing is left."""
    pytest.importorskip("transformers")
    write_run(tmp_path / "run", rows, sizes, task(model=sizes).build_model())
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("elastic_train.tasks.causal_lm:CausalLM", f"{__name__}:{task.__name__}"))
    with pytest.raises(ConfigError, match=message):
        export_folder(str(tmp_path / "run"), tmp_path / "mine")
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


class Unsaved(CausalLM):
    """A model that saves itself, as adapters do, where nothing can be written."""

    def begin_export(self, folder: Path) -> None:
        return None

    def export(self, model: nn.Module, folder: Path, *, is_merged: bool = False) -> None:
        save_file({"a": torch.zeros(1)}, folder / "absent" / "model.safetensors")


@pytest.mark.heavy
def test_a_model_that_cannot_save_itself_is_a_failure_of_the_storage(tmp_path: Path, rows: Path) -> None:
    """Safetensors has an exception of its own for a disk that is full."""
    write_run(tmp_path / "run", rows, SIZES)
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("elastic_train.tasks.causal_lm:CausalLM", f"{__name__}:Unsaved"))
    with pytest.raises(StorageError, match=r"mine: cannot write: .*No such file"):
        export_folder(str(tmp_path / "run"), tmp_path / "mine")
    assert [one.name for one in tmp_path.iterdir()] == ["run"], "nothing is left"


@pytest.mark.heavy
def test_a_model_that_is_not_the_commits_is_refused(tmp_path: Path, rows: Path) -> None:
    write_run(tmp_path / "run", rows, SIZES)
    path = tmp_path / "run" / "config.yaml"
    for change, message in (
        (("dim: 16", "dim: 32"), r"embed.weight is of shape \(64, 32\) here, and of shape \(64, 16\) in the commit"),
        (("depth: 3", "depth: 2"), r"blocks.2.norm_attention.weight is none here, and of shape \(16,\) in the commit"),
    ):
        before = path.read_text()
        path.write_text(before.replace(*change))
        with pytest.raises(ConfigError, match=rf"does not fit the model that its task builds here.*{message}"):
            export_folder(str(tmp_path / "run"), tmp_path / "mine")
        path.write_text(before)
        assert [one.name for one in tmp_path.iterdir()] == ["run"], "nothing is left"


def test_a_tied_weight_has_the_average_of_its_first_name(tmp_path: Path, rows: Path) -> None:
    model = write_run(tmp_path / "run", rows, SIZES)
    store = open_store(str(tmp_path / "run"))
    found = CommitWeights.of(store, find(store, None), "ema")
    averages = dict(zip(found.kinds, found.read(list(found.kinds)), strict=True))
    expected = {name: 2 * one for name, one in model.state_dict().items()}
    assert {"embed.weight", "head.weight"} <= expected.keys()
    assert list(averages) == list(expected) and all(averages[name].equal(one) for name, one in expected.items())


EXPORTS = """
import sys, torch, transformers, safetensors
from pathlib import Path
from elastic_train.checkpoint.commits.weights import export
from elastic_train.checkpoint.commits.lookup import find, open_run
from elastic_train.inference.exporting import export_folder

def peak_bytes():
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM")]
    return 1024 * int(line.split()[1])

def write(run):
    store = open_run(run)
    record = find(store, None)
    export_folder(run, Path(run) / "hf", commit=record.key)
    export(store, record, Path(run) / "safetensors", "safetensors", "ema")
    export(store, record, Path(run) / "torch", "torch")

write(sys.argv[1])  # imports what is needed, and begins threads
before = peak_bytes()
write(sys.argv[2])
print(peak_bytes() - before)
"""


@pytest.mark.slow
def test_no_export_takes_more_memory_than_the_largest_tensor_and_some_small_ones(tmp_path: Path, rows: Path) -> None:
    """Of 220 MB of weights, and 440 MB of moments and averages; files are larger than that memory."""
    pytest.importorskip("transformers")
    write_run(tmp_path / "small", rows, SIZES)
    model = write_run(tmp_path / "large", rows, {**LARGE, "tied": False})
    sizes = [one.nbytes for one in model.parameters()]
    done = run_source(EXPORTS, str(tmp_path / "small"), str(tmp_path / "large"))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < max(sizes) + 64e6 < sum(sizes) / 2
    for name in ("hf/model.safetensors", "safetensors", "torch"):
        assert (tmp_path / "large" / name).stat().st_size > sum(sizes)
