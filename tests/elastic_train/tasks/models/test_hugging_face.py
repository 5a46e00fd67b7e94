"""Models of transformers, and the package's own decoder beside Llama: the same losses, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from elastic_train.errors import ConfigError
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.as_transformers import llama_name
from elastic_train.tasks.decoder.model import Decoder
from elastic_train.tasks.decoder.shape import DecoderShape
from elastic_train.tasks.models.hugging_face import Kind, Source
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
