"""Models of transformers, and the package's own decoder beside Llama: the same losses, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from elastic_train.errors import ConfigError
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.as_transformers import llama_name
from elastic_train.tasks.decoder.model import Decoder, DecoderShape
from elastic_train.tasks.models.folder_weights import open_folder
from elastic_train.tasks.models.hugging_face import Kind, Source, head_of
from tests.elastic_train.tasks.language_rows import (
    BERT,
    GPT2,
    LLAMA,
    WITH_TRANSFORMERS,
    counting_rows,
    described,
    lists,
    prepared,
)

pytestmark = WITH_TRANSFORMERS


def saved(folder: Path, config: dict[str, Any], **options: Any) -> Path:
    """Write the folder of a model with drawn weights."""
    import transformers

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    model.save_pretrained(folder, **options)
    return folder


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("is_saved", [False, True])
def test_the_first_loss_is_that_of_transformers(tmp_path: Path, config: dict[str, Any], is_saved: bool) -> None:
    """Of rows of any length, by transformers' own sum over labels; also of a folder in several files."""
    columns = {"input_ids": counting_rows(6)}
    hf: dict[str, Any] = {"config": config}
    if is_saved:
        hf = {"path": str(saved(tmp_path / "model", config, max_shard_size="4KB"))}
        assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    task = prepared(described(tmp_path / "rows", columns), hf=hf)
    torch.manual_seed(1)
    model = task.build_model().eval()
    batch = task.collate(pa.table(columns), np.arange(6))
    loss = task.loss(model, batch)
    lengths = torch.tensor([len(row) for row in columns["input_ids"].to_pylist()])
    is_real = torch.arange(batch["tokens"].shape[1]) < lengths[:, None]
    theirs = model(
        input_ids=batch["tokens"], attention_mask=is_real, labels=batch["tokens"].masked_fill(~is_real, -100)
    )
    assert loss.total.item() / loss.weight == pytest.approx(theirs.loss.item(), rel=1e-6)
    if is_saved:
        import transformers

        own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert all(own.state_dict()[name].equal(tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_documents_of_a_row_are_computed_as_if_each_were_alone(tmp_path: Path, config: dict[str, Any]) -> None:
    packed = {"input_ids": lists([5, 6, 7, 8, 9, 1, 2]), "document_ids": lists([3, 3, 3, 7, 7, 8, 8])}
    alone = {"input_ids": lists([5, 6, 7], [8, 9], [1, 2])}
    found = []
    for name, columns in (("packed", packed), ("alone", alone)):
        task = prepared(described(tmp_path / name, columns), hf={"config": config})
        torch.manual_seed(1)
        loss = task.loss(task.build_model().eval(), task.collate(pa.table(columns), np.arange(3)))
        found.append(loss.predictions)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_the_own_decoder_computes_what_llama_does() -> None:
    """With grouped queries, an MLP of any width, and weights under Llama's names."""
    import transformers

    torch.manual_seed(1)
    shape = DecoderShape(vocabulary=40, dim=32, depth=2, heads=4, kv_heads=2, hidden=40, tied=False, rope_base=5000.0)
    own = Decoder(shape)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    theirs = transformers.LlamaForCausalLM(config)
    theirs.load_state_dict({llama_name(name): tensor for name, tensor in own.state_dict().items()})
    tokens = torch.randint(40, (3, 19))
    torch.testing.assert_close(own(tokens), theirs(input_ids=tokens).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({"path": "{folder}/none"}, "none has no config.json; give a model's local folder"),
        ({"path": "{folder}/model", "config": {"n_layr": 1}}, "GPT2Config has no 'n_layr'; did you mean 'n_layer'"),
        ({"path": "{folder}/model", "config": {"n_layer": 3}}, "lacks 12 of the weights of a GPT2LMHeadModel"),
        ({"path": "{folder}/model", "config": {"n_embd": 8}}, "lacks 28 of the weights .* in other shapes"),
        ({"config": {"model_type": "gpt0"}}, "transformers cannot use it: .*gpt0"),
        ({"config": {**GPT2, "n_positions": 16}}, r"max_tokens: 20, but the model \(GPT2Config\) has 16 positions"),
        ({"config": {**GPT2, "n_head": 3}}, "transformers cannot use it: .*divisible"),
        (
            {"config": BERT},
            "BertLMHeadModel sees the tokens that it is to predict; set is_decoder",
        ),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path, hf: dict[str, Any], message: str) -> None:
    saved(tmp_path / "model", GPT2)
    if "path" in hf:
        hf = {**hf, "path": hf["path"].format(folder=tmp_path)}
    task = CausalLM(hf=hf, max_tokens=20)
    with pytest.raises(ConfigError, match=message):
        task.prepare(described(tmp_path / "rows", {"input_ids": lists([1, 2])}))
        task.build_model()


def test_weights_are_fp32_unless_another_type_is_asked_for(tmp_path: Path) -> None:
    """Whatever the folder has them in."""
    path = str(saved(tmp_path / "model", {**GPT2, "dtype": "bfloat16"}))
    for values, dtype in (({}, torch.float32), ({"dtype": "bfloat16"}, torch.bfloat16)):
        source = Source.of({"path": path, **values})
        model = source.build(Kind("AutoModelForCausalLM", source.load_config()))
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert model.config._attn_implementation == "sdpa"


SMALL: dict[str, Any] = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "intermediate_size": 8}
SMALL |= {"num_hidden_layers": 1, "num_attention_heads": 2}
CLASSIFIERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "vit": (SMALL, {"classifier.weight", "classifier.bias"}),
    "clip": (
        {"vision_config": SMALL, "text_config": {**SMALL, "vocab_size": 40}},
        {"classifier.weight", "classifier.bias"},
    ),
    "perceiver": (
        {"num_latents": 2, "d_latents": 8, "d_model": 8, "num_blocks": 1, "num_self_attends_per_block": 1}
        | {"num_cross_attention_heads": 1, "num_self_attention_heads": 1, "image_size": 8}
        | {"architectures": ["PerceiverForImageClassificationLearned"]},
        {"perceiver.decoder.decoder.final_layer.weight", "perceiver.decoder.decoder.final_layer.bias"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_the_head_is_drawn_where_a_folder_has_other_classes(tmp_path: Path, kind: str) -> None:
    """Wherever a model keeps it: beside a body of transformers' name for it, beside another one, or within."""
    folder, theirs = classifier(tmp_path / "model", kind)
    model = Source.of({"path": str(folder)}).build(images(folder, 5))
    mine = dict(model.named_parameters())
    assert {name for name, tensor in theirs.items() if not tensor.equal(mine[name])} == CLASSIFIERS[kind][1]
    assert {len(mine[name]) for name in CLASSIFIERS[kind][1]} == {5}


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_folder_that_lacks_a_weight_of_the_body_is_refused(tmp_path: Path, kind: str) -> None:
    folder, theirs = classifier(tmp_path / "model", kind)
    lost = min(set(theirs) - CLASSIFIERS[kind][1])
    keep = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name != lost}
    save_file(keep, folder / "model.safetensors", {"format": "pt"})
    source = Source.of({"path": str(folder)})
    for num_classes in (3, 5):
        assert open_folder(source, images(folder, num_classes)) is None
        with pytest.raises(ConfigError, match=f"lacks 1 of the weights of a .*, first '{re.escape(lost)}'"):
            source.build(images(folder, num_classes))


def test_a_model_that_is_not_built_without_memory_says_that_its_head_is_not_known() -> None:
    import transformers

    class Measured(transformers.ViTForImageClassification):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = float(self.classifier.weight.mean())

    model = Measured(transformers.AutoConfig.for_model("vit", **SMALL, num_labels=3))
    with pytest.raises(
        ConfigError, match=r"which weights of Measured change with .*cannot be built on the meta device"
    ):
        head_of(model)


def classifier(folder: Path, kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write the folder of a classifier of images in three classes with drawn weights; return these, too."""
    import transformers

    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, num_labels=3, **CLASSIFIERS[kind][0])
    model = transformers.AutoModelForImageClassification.from_config(config)
    model.save_pretrained(folder)
    return folder, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def images(folder: Path, num_classes: int) -> Kind:
    """Return the model that a task for images makes of a folder, with this number of classes."""
    names = {number: str(number) for number in range(num_classes)}
    config = Source.of({"path": str(folder)}).load_config(id2label=names, label2id={})
    return Kind("AutoModelForImageClassification", config, draws_head=True, attention=None)
