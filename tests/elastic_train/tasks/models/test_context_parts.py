"""Models of transformers whose rows ranks compute together: the sums of whole rows, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_train.config.parallel import ParallelConfig
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.errors import ConfigError
from elastic_train.job.cells.cell_plan import cell_plan_of
from elastic_train.job.cells.stage import context_of
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.models.context_parts import try_parts_of_rows
from elastic_train.tasks.models.folder_weights import hollow
from elastic_train.tasks.models.hugging_face import Kind, Source
from tests.elastic_train.job.cells.test_context import batches
from tests.elastic_train.job.cells.test_cut_transformers import FAMILIES, SIZES
from tests.elastic_train.tasks.language_rows import GPT2, LLAMA, WITH_TRANSFORMERS, built
from tests.memory_machine import in_memory
from tests.memory_world import group_of

pytestmark = WITH_TRANSFORMERS


@pytest.mark.parametrize("kind", [*sorted({*FAMILIES} - {"gemma2"}), "gpt2", "gpt_neox", "mixtral"])
def test_parts_compute_what_whole_rows_do(kind: str) -> None:
    """And afterwards the model computes whole rows as before, to the bit."""
    model: Any = built({"model_type": kind, **SIZES}).eval()
    tokens = torch.arange(12)[None] % 11
    before = model(input_ids=tokens, use_cache=False).logits
    assert not list(try_parts_of_rows(model.train(), 3, max_tokens=16))
    assert model.training
    assert torch.equal(model.eval()(input_ids=tokens, use_cache=False).logits, before)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_model_without_weights_is_tried_with_others(config: dict[str, Any]) -> None:
    source = Source.of({"config": config})
    model = hollow(source, Kind("AutoModelForCausalLM", source.load_config()))
    assert all(one.is_meta for one in model.parameters())
    assert not list(try_parts_of_rows(model, 2, max_tokens=16))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "mistral", "sliding_window": 8},
            r"Mistral\w+, which attends within windows \(sliding_window: 8\)",
        ),
        ({"model_type": "gemma2"}, r"Gemma2ForCausalLM, which fails on rows in parts \(\w+: `sdpa` attention does not"),
        ({"model_type": "mamba", "state_size": 4}, r"MambaForCausalLM, which fails on rows in parts "),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            r"Lfm2ForCausalLM, which (fails|gives other)",
        ),
        (
            {
                "model_type": "phi3",
                "original_max_position_embeddings": 8,
                "max_position_embeddings": 32,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0],
                    "long_factor": [2.0],
                },
            },
            r"Phi3ForCausalLM, which turns positions by how long a row is \(longrope, from 8 tokens on\)",
        ),
        (
            {
                "model_type": "llama",
                "hidden_size": 32,
                "max_position_embeddings": 8,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
            },
            r"LlamaForCausalLM, which turns positions by how long a row is \(dynamic, from 8 tokens on\)",
        ),
    ],
    ids=["window", "softcap", "no attention", "convolution", "longrope", "dynamic"],
)
def test_what_is_not_the_same_in_parts_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    task = CausalLM(hf={"config": {**SIZES, **config}}, max_tokens=16)
    with pytest.raises(ConfigError, match=f"context: 2 does not work with {message}.*, use parallel.recompute"):
        cell_plan_of(task, built({**SIZES, **config}), ParallelConfig(context=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_looks_at_other_tokens_by_itself_is_refused(dtype: torch.dtype) -> None:
    """A little, too, in weights whose rounding would hide it; and a model that does not is taken in any type."""
    model: Any = built({"model_type": "llama", **SIZES}).to(dtype)
    assert not list(try_parts_of_rows(model, 2, max_tokens=16))
    model.model.layers[1].mlp.register_forward_hook(lambda *_: _[2] + _[2].cumsum(1) / 100)
    [found] = try_parts_of_rows(model, 2, max_tokens=16)
    assert found.what == "LlamaForCausalLM, which gives other results for rows in parts than for whole ones"


@pytest.mark.parametrize("kind", ["lfm2", "falcon_h1"])
def test_models_that_mix_tokens_outside_of_attention_are_refused_whatever_their_weights_are(kind: str) -> None:
    layers = {"layer_types": ["conv", "full_attention"]} if kind == "lfm2" else {}
    model = built({"model_type": kind, **SIZES, **layers}).bfloat16()
    [found] = try_parts_of_rows(model, 2, max_tokens=16)
    assert "fails on rows in parts" in found.what or "gives other results for rows in parts" in found.what


def of_rank(rank: int, size: int, kind: str) -> None:
    group = group_of("world", rank, size)
    config = {"model_type": kind, **SIZES}
    task = CausalLM(hf={"config": config}, z_loss=0.1)
    whole, model = built(config), built(config)
    context = context_of(task, Mesh(rank, size, Cell(context=size)), group)
    expected, found = [], {}
    for lane, batch in enumerate(batches()):
        loss, mine = task.loss(whole, batch), context.loss(model, batch)
        for one in (loss, mine):
            one.total.backward()  # type: ignore[no-untyped-call]
        expected.append((float(loss.total.detach()), loss.weight))
        found[lane] = float(mine.total.detach()), mine.weight
    added = context.add_up(found)
    for lane, (total, weight) in enumerate(expected):
        assert added[lane] == (pytest.approx(total, rel=1e-6), weight)
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        close(group.all_gather(one.grad).sum(0), other.grad)
    group.close()


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize(("kind", "size"), [("qwen3", 2), ("starcoder2", 3)])
def test_gradients_of_all_parts_are_those_of_whole_rows(kind: str, size: int) -> None:
    """Of padded rows, and of several documents in a row."""
    in_memory(of_rank, size, kind)
