"""Models of transformers cut by their own plans compute the same as whole ones, up to rounding."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_train.config.parallel import ParallelConfig
from elastic_train.core.mesh import Cell
from elastic_train.errors import ConfigError, PeerLostError
from elastic_train.job.cells.cell_plan import cell_plan_of
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.job.units.blocks import recompute_blocks
from elastic_train.parallel.cells.links import CellLinks, LoneGroup
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.sequence_classifier import SequenceClassifier
from tests.elastic_train.job.cells.test_context import of_tensor_rank
from tests.elastic_train.job.cells.test_cut_model import compare, run_once
from tests.elastic_train.job.cells.test_sequence import compare_tokens, cut_of
from tests.elastic_train.job.cells.test_sequence import run_once as run_tokens
from tests.elastic_train.tasks.language_rows import WITH_TRANSFORMERS, built
from tests.memory_machine import in_memory
from tests.memory_world import group_of

pytestmark = WITH_TRANSFORMERS
SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "granite",
    "cohere",
    "phi",
    "starcoder2",
    "olmo2",
)

"""Model types of transformers, including per-head norms, biases of row layers, and attention that is not cut."""


def model_of_transformers(kind: str) -> nn.Module:
    model = built({"model_type": kind, **SIZES}).double()
    for one in model.parameters():  # including biases and norms, which are initialised to zeros and ones
        torch.nn.init.normal_(one, std=0.3)
    return model


def of_rank_with_transformers(rank: int, size: int) -> None:
    group = group_of("world", rank, size)
    for kind in FAMILIES:
        task = CausalLM(hf={"config": {"model_type": kind, **SIZES}})
        compare(partial(model_of_transformers, kind), group, 0.95, tolerance=1e-4, task=task)
    group.close()


def test_parts_of_models_of_transformers_compute_what_the_whole_does() -> None:
    in_memory(of_rank_with_transformers, 4)


WITH_SOME_TOKENS = ("llama", "qwen3", "gemma3_text", "cohere", "phi", "starcoder2", "olmo2")
"""Those whose norms, biases or blocks differ; attention of olmo2 is not cut, and gets all tokens."""


def with_dropout(kind: str) -> nn.Module:
    """Return the model type with dropout, if its dropout is a module."""
    model = model_of_transformers(kind)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return model


def of_rank_with_some_tokens(rank: int, size: int) -> None:
    group = group_of("world", rank, size)
    for kind in WITH_SOME_TOKENS:
        task = CausalLM(hf={"config": {"model_type": kind, **SIZES}}, max_tokens=16)
        share = 0.6 if kind == "llama" else 1.0  # other kinds have comparatively wide heads
        rounded = ("model.embed_tokens.weight",) if kind == "olmo2" else ()
        compare_tokens(partial(with_dropout, kind), task, group, share=share, tolerance=1e-4, rounded=rounded)
    group.close()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_parts_of_rows_are_shared_out_between_ranks_of_models_of_transformers(kind: str) -> None:
    task = CausalLM(hf={"config": {"model_type": kind, **SIZES}}, max_tokens=16)
    in_memory(of_tensor_rank, 4, 2, task, lambda: model_of_transformers(kind).float())


def test_ranks_with_some_tokens_of_models_of_transformers_compute_what_those_with_all_do() -> None:
    """Outputs and gradients have the bits of tensor ranks alone, except gradients of norms and row layers' biases."""
    in_memory(of_rank_with_some_tokens, 4)


@pytest.mark.parametrize(
    ("changes", "degree", "sequence", "message"),
    [
        ({"model_type": "gpt2"}, 2, False, "tensor: 2 .* GPT2LMHeadModel, which brings no base_model_tp_plan"),
        ({"model_type": "gpt2"}, 2, True, "tensor: 2 .* GPT2LMHeadModel, which brings no base_model_tp_plan"),
        (
            {"model_type": "mixtral"},
            2,
            False,
            "the plan of MixtralForCausalLM, which cuts 'model.layers.*experts.gate_up_proj' as packed_colwise",
        ),
        ({"model_type": "llama"}, 3, False, "3 does not work with task.params.hf.config.num_attention_heads: 8"),
        (
            {"model_type": "llama", "num_key_value_heads": 2},
            4,
            False,
            "4 does not work with task.params.hf.config.num_key_value_heads: 2",
        ),
        (
            {"model_type": "llama", "intermediate_size": 18},
            4,
            False,
            "4 does not work with the 18 columns of 'model.layers.0.mlp",
        ),
        ({"model_type": "doge"}, 2, True, "of DogeForCausalLM, which says nothing of 'model.layers.0.input_residual'"),
    ],
)
def test_what_cannot_be_cut_of_transformers_is_refused(
    changes: dict[str, Any], degree: int, sequence: bool, message: str
) -> None:
    config = {**SIZES, **changes}
    with torch.device("meta"):
        model = built(config)
    with pytest.raises(ConfigError, match=message):
        cell_plan_of(CausalLM(hf={"config": config}), model, ParallelConfig(tensor=degree, sequence=sequence))


def test_a_model_that_has_one_of_transformers_is_cut_there() -> None:
    """Examples are classifiers, including one that reads metadata."""
    plan = cell_plan_of(
        SequenceClassifier(hf={"config": {"model_type": "llama"}}),
        nn.ModuleDict({"body": model_of_transformers("llama")}),
        ParallelConfig(tensor=2),
    )
    assert plan is not None and plan.tensor["body.model.layers.1.mlp.down_proj"] == "row"


PROMPT = {"type": "prompt_tuning", "num_virtual_tokens": 2}


@pytest.mark.parametrize(
    ("adapter", "parallel", "message"),
    [
        ({"type": "ia3"}, {"tensor": 2}, "parallel.tensor: 2 does not work with the type ia3 of task.params.adapter"),
        ({"type": "lora", "use_dora": True}, {"tensor": 2}, "with use_dora of task.params.adapter"),
        (PROMPT, {"context": 2}, "context: 2 does not work with the type prompt_tuning"),
        (PROMPT, {"tensor": 2, "sequence": True}, "tensor: 2 does not work with the type prompt_tuning"),
    ],
)
def test_adapters_that_are_more_than_layers_of_their_own_are_refused(
    tmp_path: Path, adapter: dict[str, object], parallel: dict[str, int], message: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    task = CausalLM(hf={"path": str(tmp_path)}, adapter=adapter)
    with pytest.raises(ConfigError, match=message):
        cell_plan_of(task, model_of_transformers("llama"), ParallelConfig(**parallel))  # type: ignore[arg-type]


def with_lora(dropout: float = 0.0, **shares: float) -> nn.Module:
    """Return a model with LoRA in some layers; all weights are drawn and trained."""
    from peft import LoraConfig, get_peft_model

    modules = ["q_proj", "k_proj", "o_proj", "down_proj"]
    config = LoraConfig(r=3, target_modules=modules, layers_to_transform=[1], lora_dropout=dropout)
    model: nn.Module = get_peft_model(dropping("llama", **shares), config)  # type: ignore[arg-type]
    for name, one in model.named_parameters():
        one.requires_grad_()
        if "lora_" in name:
            torch.nn.init.normal_(one, std=0.3)
    return model.double()


def of_rank_with_lora(rank: int, size: int) -> None:
    group, task = (
        group_of("world", rank, size),
        CausalLM(hf={"config": {"model_type": "llama", **SIZES}}, max_tokens=16),
    )
    compare(with_lora, group, 0.95, task=task)
    compare_tokens(with_lora, task, group, share=1.0, tolerance=1e-4)
    group.close()


def test_parts_of_adapters_compute_what_the_whole_does() -> None:
    """LoRA's matrices are cut like the layers that they adapt, which get all tokens if ranks have some."""
    in_memory(of_rank_with_lora, 4)


def dropping(kind: str, **shares: float) -> nn.Module:
    return built({"model_type": kind, **SIZES, **shares, "attn_implementation": "eager"}).double()


def of_rank_that_drops(rank: int, size: int) -> None:
    """Compare all ranks' outputs, shared gradients and random numbers, within attention and after the pass."""
    group = group_of("world", rank, size)
    shares = {"attention_dropout": 0.2, "residual_dropout": 0.2}
    cases = (
        ("llama", partial(dropping, "llama", attention_dropout=0.2)),
        ("starcoder2", partial(dropping, "starcoder2", **shares)),
        ("llama", partial(with_lora, 0.2, attention_dropout=0.2)),
        ("llama", partial(with_lora, 0.2)),
    )
    for number, (kind, make) in enumerate(cases):
        task = CausalLM(hf={"config": {"model_type": kind, **SIZES}}, max_tokens=16)
        for sequence in (False, True):
            model = make()
            cut = cut_of(model, group, task, sequence=sequence)
            within = list[Tensor]()
            [value] = [one for name, one in model.named_modules() if name.endswith("layers.0.self_attn.v_proj")]
            value.register_forward_hook(lambda *_, within=within: within.append(torch.rand(1)))
            found = run_tokens(model)
            state = torch.get_rng_state()
            for one in (found, state):
                assert torch.equal(group.all_gather(one), one.expand(size, *one.shape)), (kind, sequence)
            assert len(group.all_gather(within[0]).unique()) == (1 if number == 3 else size)
            gradients = {name: one.grad for name, one in model.named_parameters()}
            shared = torch.cat([gradients[name].reshape(-1) for name in gradients if name not in cut.cuts])  # type: ignore[union-attr]
            assert torch.equal(group.all_gather(shared), shared.expand(size, -1)), (kind, sequence)
            model.zero_grad()
            recompute_blocks(model, "units")
            assert torch.equal(run_tokens(model), found)
            assert all(torch.equal(one.grad, gradients[name]) for name, one in model.named_parameters())  # type: ignore[arg-type]
            assert torch.equal(torch.get_rng_state(), state)
    group.close()


def test_ranks_drop_their_own_elements_of_their_parts_and_equal_ones_of_what_all_have() -> None:
    """With dropout of attention's weights, of outputs, and of LoRA's inputs; a recomputed block drops the same."""
    in_memory(of_rank_that_drops, 4)


def test_a_peer_lost_within_attention_leaves_the_shared_stream_in_use() -> None:
    """The rank's own one is in use there, and what comes next is drawn alike on all ranks."""
    model, links = dropping("llama", attention_dropout=0.2), CellLinks()
    plan = cell_plan_of(CausalLM(hf={"config": {"model_type": "llama", **SIZES}}), model, ParallelConfig(tensor=2))
    assert plan is not None
    CutModel(model, plan, Cell(tensor=2), links).take_place(0)
    links.bind(LoneGroup(2))
    within = list[Tensor]()

    def lose(*_: object) -> None:
        within.append(torch.rand(1))
        raise PeerLostError("lost")

    model.get_submodule("model.layers.1.self_attn.v_proj").register_forward_hook(lose)
    for _ in range(2):
        with pytest.raises(PeerLostError):
            run_tokens(model)
    assert torch.equal(*within), "the second pass switched to the own stream as the first did"


class Counted(CellLinks):
    """Counts the sums of a cell of one rank."""

    num = 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num += 1
        return tensor.clone()


@pytest.mark.parametrize(("kind", "num_sums"), [("llama", 4), ("phi", 4), ("qwen3", 6), ("olmo2", 2)])
def test_layers_with_one_input_exchange_its_gradient_once(kind: str, num_sums: int) -> None:
    """Sums per block: two outputs, the gradients of two inputs and of per-head norms; a second pass has as many."""
    model, links = model_of_transformers(kind), Counted()
    plan = cell_plan_of(CausalLM(hf={"config": {"model_type": kind, **SIZES}}), model, ParallelConfig(tensor=2))
    assert plan is not None
    CutModel(model, plan, Cell(tensor=1), links).take_place(0)
    for times in (1, 2):
        run_once(model)
        assert links.num == times * num_sums * SIZES["num_hidden_layers"]
