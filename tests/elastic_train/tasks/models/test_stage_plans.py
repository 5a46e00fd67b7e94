"""Models of transformers, part by part: the bits of the whole pass, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_train.config.parallel import ParallelConfig
from elastic_train.errors import ConfigError
from elastic_train.job.cells.cell_plan import cell_plan_of
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.models.folder_weights import hollow
from elastic_train.tasks.models.hugging_face import Kind, Source
from elastic_train.tasks.models.stage_plans import planned, run_parts, try_in_parts, unfit_for_stages
from elastic_train.tasks.rows.token_rows import causal_within
from tests.elastic_train.job.cells.test_cut_transformers import FAMILIES, SIZES
from tests.elastic_train.tasks.language_rows import GPT2, LLAMA, WITH_TRANSFORMERS, built

pytestmark = WITH_TRANSFORMERS
UNTIED = {**SIZES, "num_hidden_layers": 3, "tie_word_embeddings": False}


@pytest.mark.parametrize("kind", [*FAMILIES, "gpt2", "gpt_neox", "mixtral"])
def test_parts_make_the_bits_of_the_whole_pass(kind: str) -> None:
    """With documents in a row and with dropout: outputs, gradients, and where torch's generator is in the end.

    Rotations draw, too: what other models draw before their layers.
    """
    model: Any = built({"model_type": kind, **UNTIED})
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    if hasattr(model.base_model, "rotary_emb"):
        model.base_model.rotary_emb.register_forward_hook(lambda *_: torch.rand(1) and None)
    parts = planned(model)
    assert parts is not None and not [*unfit_for_stages(model, parts, 3), *try_in_parts(model, parts)]
    tokens = torch.randint(0, SIZES["vocab_size"], (3, 7))
    named = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 3)}
    named["attention_mask"] = causal_within(torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 3))

    def run() -> Tensor:
        return model(input_ids=tokens, use_cache=False, **named).logits  # type: ignore[no-any-return]

    torch.manual_seed(5)
    whole = run()
    whole.logsumexp(-1).sum().backward()
    state = torch.get_rng_state()
    expected = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    torch.manual_seed(5)
    passed: list[tuple[Tensor | None, Tensor]] = []
    for modules in parts.dealt(3):
        given = passed[-1][1].detach().requires_grad_() if passed else None
        passed.append((given, run_parts(model, parts, modules, given, run)))
    assert passed[-1][1].equal(whole) and torch.get_rng_state().equal(state)
    gradient: Tensor | None = torch.autograd.grad(passed[-1][1].logsumexp(-1).sum(), passed[-1][1], retain_graph=True)[
        0
    ]
    for given, made in reversed(passed):
        made.backward(gradient)  # type: ignore[no-untyped-call]
        gradient = None if given is None else given.grad
    for name, one in model.named_parameters():
        assert (one.grad is None) == (expected[name] is None), name
        assert one.grad is None or one.grad.equal(expected[name]), name
    assert not any("forward" in vars(module) for module in model.modules()), "the model is as it was"


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_model_without_weights_is_tried_with_others(config: dict[str, Any]) -> None:
    source = Source.of({"config": {**config, "tie_word_embeddings": False}})
    model = hollow(source, Kind("AutoModelForCausalLM", source.load_config()))
    assert all(one.is_meta for one in model.parameters())
    parts = planned(model)
    assert parts is not None and not list(try_in_parts(model, parts))


@pytest.mark.parametrize(
    ("changes", "num_stages", "message"),
    [
        ({"model_type": "opt"}, 2, "pipeline: 2 does not work with OPTForCausalLM, which brings no base_model_pp_plan"),
        ({"model_type": "llama"}, 4, "pipeline: 4 does not work with the 3 layers of LlamaForCausalLM in 4 stages"),
    ],
)
def test_what_cannot_run_in_stages_is_refused(changes: dict[str, Any], num_stages: int, message: str) -> None:
    config = {**UNTIED, **changes}
    with pytest.raises(ConfigError, match=message):
        cell_plan_of(CausalLM(hf={"config": config}), built(config), ParallelConfig(pipeline=num_stages))


def test_a_model_whose_layers_need_more_than_a_stage_has_is_refused() -> None:
    """A layer that reads a weight of another, one that adds what was embedded, in training alone, and a weight that no
    part has."""
    model: Any = built({"model_type": "llama", **UNTIED}).eval()
    parts = planned(model)
    assert parts is not None
    layers = model.model.layers
    hook = layers[2].register_forward_hook(lambda *_: _[2] * layers[0].mlp.up_proj.weight[0, 0])
    [found] = try_in_parts(model, parts)
    assert found.what.startswith("'model.layers.2' of LlamaForCausalLM, which fails on a stage (too many indices")
    hook.remove()
    embedded: list[Tensor] = []
    hooks = [
        model.model.embed_tokens.register_forward_hook(lambda *_: embedded.append(_[2])),
        layers[2].register_forward_hook(lambda *_: _[2] + model.training * embedded[-1]),
    ]
    [found] = try_in_parts(model, parts)
    assert "run one by one, give a different result from the whole model" in found.what
    for one in hooks:
        one.remove()
    assert not list(try_in_parts(model, parts))
    model.model.extra = nn.Linear(2, 2)
    [found] = unfit_for_stages(model, parts, 3)
    assert found.what == "the plan of LlamaForCausalLM, which leaves out 'model.extra.weight'"
