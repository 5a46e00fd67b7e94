"""Models of folders whose weights come one by one: the bits of the whole model, and no more memory than a share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.errors import ConfigError
from elastic_train.job.build import build_state
from elastic_train.job.cells.cell_plan import cell_plan_of
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.job.reshard import take_first_seat
from elastic_train.job.sharded.zero3_share import without_memory
from elastic_train.job.state_shards import StateShards
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.parallel.group import Group
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.models.folder_weights import FolderWeights, open_folder, runs_as_listed, stand_ins
from elastic_train.tasks.models.hugging_face import Kind, Source, check_causal
from tests.elastic_train.job.sharded.test_held_state import newcomers
from tests.elastic_train.tasks.language_rows import BERT, GPT2, LLAMA, WITH_TRANSFORMERS
from tests.fake_memory import DeviceBytes

pytestmark = WITH_TRANSFORMERS

VIT = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
VIT |= {"intermediate_size": 24, "patch_size": 8}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
LM, ROWS, IMAGES = (f"AutoModelFor{name}" for name in ("CausalLM", "SequenceClassification", "ImageClassification"))


def saved(folder: Path, auto: str, config: dict[str, Any], **options: Any) -> Path:
    """Write the folder of a model with drawn weights, and BatchNorm's buffers as training leaves them."""
    import transformers

    torch.manual_seed(3)
    model = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(**config))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.uniform_()
    model.save_pretrained(folder, **options)
    return folder


def opened(source: Source, kind: Kind) -> tuple[Any, dict[str, Tensor]]:
    """Return a folder's model without weights, and its weights."""
    found = open_folder(source, kind)
    assert found is not None, "this folder's weights are tensors of its files"
    torch.manual_seed(5)
    return found[0], dict(found[1])


@pytest.mark.parametrize(
    ("saved_as", "config", "opened_as", "options"),
    [
        (LM, GPT2, LM, {}),
        (LM, LLAMA, LM, {"max_shard_size": "4KB"}),
        ("AutoModel", BERT, ROWS, {}),
        (ROWS, {**LLAMA, "num_labels": 5, "pad_token_id": 0}, ROWS, {}),
        (IMAGES, VIT, IMAGES, {}),
        ("AutoModel", RESNET, IMAGES, {}),
    ],
    ids=["tied", "in-several-files", "without-a-head", "of-other-classes", "images", "with-buffers"],
)
def test_weights_that_come_one_by_one_have_the_bits_of_the_whole_model(
    tmp_path: Path, saved_as: str, config: dict[str, Any], opened_as: str, options: dict[str, Any]
) -> None:
    """Also of a head that is drawn, and of buffers, in files or not."""
    source = Source(saved(tmp_path / "model", saved_as, config, **options))
    heads: dict[str, Any] = {} if opened_as == LM else {"num_labels": 3}
    kind = Kind(opened_as, source.load_config(**heads), draws_head=opened_as != LM, attention=None)
    torch.manual_seed(5)
    whole = source.build(kind)
    sketch, weights = opened(source, kind)
    assert all(parameter.is_meta for parameter in sketch.parameters())
    assert list(dict(sketch.named_parameters())) == [name for name, _ in whole.named_parameters()]
    assert weights.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        assert weights[name].equal(parameter) and weights[name].dtype == parameter.dtype, name
    buffers = dict(sketch.named_buffers())
    assert buffers.keys() == dict(whole.named_buffers()).keys()
    assert all(buffers[name].equal(buffer) for name, buffer in whole.named_buffers())


@pytest.mark.parametrize("config", [GPT2, {**LLAMA, "tie_word_embeddings": True}], ids=["gpt2", "llama"])
def test_an_output_layer_that_is_untied_begins_as_a_copy_of_the_embedding(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """Only if that is asked for: a folder that just lacks the layer is not whole."""
    folder = saved(tmp_path / "model", LM, config)
    source = Source(folder, {"tie_word_embeddings": False})
    kind = Kind(LM, source.load_config())
    whole = source.build(kind)
    head, embedding = whole.get_output_embeddings().weight, whole.get_input_embeddings().weight
    assert head is not embedding and cast(Tensor, head).equal(cast(Tensor, embedding))
    _, weights = opened(source, kind)
    assert weights.keys() == dict(whole.named_parameters()).keys()
    assert all(weights[name].equal(one) for name, one in whole.named_parameters())
    lacking = Source(folder)
    assert open_folder(lacking, kind) is None
    with pytest.raises(ConfigError, match=r"lacks 1 of the weights .* first 'lm_head.weight'"):
        lacking.build(kind)


class OwnBytes(DeviceBytes):  # type: ignore[no-untyped-call]
    """Leaves files' pages out: what of them is not read is in no memory."""

    def __init__(self) -> None:
        super().__init__()
        self._files: list[tuple[int, int]] = []

    def _note(self, tensors: Iterable[Tensor]) -> None:
        super()._note(tensor for tensor in tensors if not self._is_in_file(tensor))

    def _is_in_file(self, tensor: Tensor) -> bool:
        """Torch can resize memory of its own. The list of mappings is long, and is read for a file's first tensor."""
        storage = tensor.untyped_storage()
        if storage.resizable():
            return False
        if not any(lo <= storage.data_ptr() < hi for lo, hi in self._files):
            lines = Path("/proc/self/maps").read_text().splitlines()
            pages = [line.split()[0].split("-") for line in lines if line.endswith(".safetensors")]
            self._files = [(int(lo, 16), int(hi, 16)) for lo, hi in pages]
        return any(lo <= storage.data_ptr() < hi for lo, hi in self._files)


def test_a_rank_never_has_more_than_its_share_of_a_folders_model(tmp_path: Path) -> None:
    """From the reading of the folder on; its share has the bits of one that is cut out of the whole model."""
    config = {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 301}
    source, group = Source(saved(tmp_path / "model", LM, config)), cast(Group, SimpleNamespace(rank=1, size=4))
    kind, parallel = Kind(LM, source.load_config()), ParallelConfig(shards="parameters", copies=1)

    def built(model: nn.Module, weights: FolderWeights | None) -> StateShards:
        shards = build_state(model, OptimizerConfig(), 50, "cpu", is_fp16=False, parallel=parallel).shards
        if weights is not None:
            shards.share.first_weights = lambda: iter(weights)
        return shards

    model = source.build(kind)
    largest = max(parameter.nbytes for parameter in model.parameters())
    whole = built(model, None)
    take_first_seat(group, whole, newcomers(4), begins=True)
    counted = OwnBytes()
    found = open_folder(source, kind)
    assert found is not None
    apart = built(without_memory(found[0], torch.device("cpu")), found[1])
    with counted:
        assert counted.now() < largest, "what is built has no weights"
        take_first_seat(group, apart, newcomers(4), begins=True)
    assert [one.run for one in apart.share.runs] == [one.run for one in whole.share.runs]
    assert all(one.weights.equal(other.weights) for one, other in zip(apart.share.runs, whole.share.runs, strict=True))
    held = sum(one.weights.nbytes for one in apart.share.runs)
    assert (
        counted.peak
        <= 4 * held + 2 * largest
        < 0.5 * sum(4 * flat.numel for flat in whole.share.layout.flats) + 4 * held
    )


def test_a_folder_whose_tensors_are_joined_is_built_whole(tmp_path: Path) -> None:
    """So is one without safetensors, or one that lacks weights: that is then said as ever."""
    source = Source(saved(tmp_path / "joined", LM, MIXTRAL))
    assert open_folder(source, Kind(LM, source.load_config())) is None
    source = Source(saved(tmp_path / "bare", "AutoModel", BERT))
    assert open_folder(source, Kind(ROWS, source.load_config())) is None
    (source.path or tmp_path).joinpath("model.safetensors").rename(tmp_path / "moved")
    assert open_folder(source, Kind(ROWS, source.load_config(), draws_head=True)) is None


def test_a_model_without_weights_is_tried_with_others(tmp_path: Path) -> None:
    """A model that sees the tokens that it is to predict is refused; so is none that does not."""
    for config, sees in ((GPT2, False), ({**BERT, "is_decoder": True}, False), (BERT, True)):
        source = Source(saved(tmp_path / str(id(config)), LM, config))
        model, _ = opened(source, Kind(LM, source.load_config()))
        if sees:
            with pytest.raises(ConfigError, match="sees the tokens"):
                check_causal(model, stand_ins(model))
        else:
            check_causal(model, stand_ins(model))
        assert runs_as_listed(model, input_ids=torch.tensor([[0, 1]]))


class Backwards(nn.Module):
    """Runs its blocks from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


def test_blocks_that_run_in_another_order_are_seen() -> None:
    assert not runs_as_listed(Backwards(), x=torch.zeros(1, 4))
    assert runs_as_listed(nn.ModuleList([nn.Linear(4, 4)])[0], input=torch.zeros(1, 4))


def pages_of_folders() -> int:
    """Return the number of bytes of weight files that this process has mapped."""
    found, is_weights = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and ":" not in words[0]:
            is_weights = words[-1].endswith(".safetensors")
        elif is_weights and words[0] == "Rss:":
            found += 1024 * int(words[1])
    return found


def test_a_stage_reads_its_own_weights_of_a_folder(tmp_path: Path) -> None:
    """The folder's type may differ from the trained type."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 3}
    config = transformers.AutoConfig.for_model(**{**LLAMA, **sizes, "tie_word_embeddings": False})
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    task, parallel = CausalLM(hf={"path": str(tmp_path)}), ParallelConfig(pipeline=3)
    source = Source.of({"path": str(tmp_path)})
    kind = Kind("AutoModelForCausalLM", source.load_config())
    whole = source.build(kind)
    size = (tmp_path / "model.safetensors").stat().st_size
    for place in range(3):
        opened = open_folder(source, kind)
        assert opened is not None
        model = without_memory(opened[0], torch.device("cpu"))
        plan = cell_plan_of(task, model, parallel)
        assert plan is not None
        most = 0

        def counted(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            nonlocal most
            for one in weights:
                yield one
                most = max(most, pages_of_folders())

        CutModel(model, plan, parallel.cell, CellLinks()).take_place(place, counted(opened[1]))
        own = {name: one for name, one in model.named_parameters() if one.numel()}
        assert all(one.equal(whole.get_parameter(name)) for name, one in own.items())
        assert most < 0.7 * size, "a third is its own, and a page brings some around it"
