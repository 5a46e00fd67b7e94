"""Convert the package's own decoder to an equivalent model of transformers.

Without experts it is a Llama. With experts whose probabilities sum to 1, and no shared MLP, it is a Mixtral. All others
are a Qwen2-MoE, which can leave probabilities unnormalised and has a shared MLP, half of whose output it adds if its
gate's weights are 0. So that MLP's last product has twice our weights, which is exact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from elastic_train.system.extras import needed_for
from elastic_train.tasks.decoder.model import Decoder
from elastic_train.tasks.decoder.shape import DecoderShape

_LLAMA = (
    (re.compile(r"^embed\."), "model.embed_tokens."),
    (re.compile(r"^norm\."), "model.norm."),
    (re.compile(r"^head\."), "lm_head."),
    (re.compile(r"^blocks\."), "model.layers."),
    (re.compile(r"\.norm_attention\."), ".input_layernorm."),
    (re.compile(r"\.norm_mlp\."), ".post_attention_layernorm."),
    (re.compile(r"\.attention\.(\w)\."), r".self_attn.\1_proj."),
    (re.compile(r"\.mlp\.shared\.(\w+)\."), r".mlp.shared_expert.\1_proj."),
    (re.compile(r"\.mlp\.(gate|up|down)\.weight"), r".mlp.\1_proj.weight"),
    (re.compile(r"\.mlp\.router\."), ".mlp.gate."),
)
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate|up|down)$")


def llama_name(name: str) -> str:
    """Return the name in transformers' LlamaForCausalLM of a decoder's parameter."""
    for pattern, replacement in _LLAMA:
        name = pattern.sub(replacement, name)
    return name


def as_transformers(decoder: Decoder) -> nn.Module:
    """Return a model of transformers with the weights of a decoder, without its dropout."""
    model: nn.Module = sketch_of(decoder.shape)
    weights = decoder.state_dict()
    if decoder.shape.experts:
        named = _with_experts(weights, model.state_dict())
    else:
        named = {llama_name(name): tensor for name, tensor in weights.items()}
    model.load_state_dict(named)
    return model


def _with_experts(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a decoder with experts by transformers' names; missing ones are 0."""
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items() if ".shared_expert" in name}
    for name, tensor in weights.items():
        if match := _EXPERTS.match(name):
            experts, kind = llama_name(match[1]), match[2]
            if kind == "down":
                found[f"{experts}.down_proj"] = tensor
            elif kind == "gate":
                found[f"{experts}.gate_up_proj"] = torch.cat((tensor, weights[f"{match[1]}.up"]), dim=1)
            continue
        found[llama_name(name)] = 2 * tensor if name.endswith(".shared.down.weight") else tensor
    return found


def sketch_of(shape: DecoderShape) -> Any:
    """Return a model of transformers with a decoder's sizes and random weights."""
    transformers = import_transformers()
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.dim,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base},
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if not shape.experts:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    sizes |= {"num_experts_per_tok": shape.experts_per_token}
    if shape.experts_per_token > 1 and not shape.shared_hidden:
        sizes |= {"num_local_experts": shape.experts, "intermediate_size": shape.expert_hidden, "sliding_window": None}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    sizes |= {
        "num_experts": shape.experts,
        "moe_intermediate_size": shape.expert_hidden,
        "shared_expert_intermediate_size": shape.shared_hidden or 1,
        "norm_topk_prob": shape.experts_per_token > 1,
        "qkv_bias": False,
        "use_sliding_window": False,
    }
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**sizes))


def import_transformers() -> ModuleType:
    """Import transformers; raise ConfigError with the extra that provides it."""
    with needed_for("a folder of Hugging Face"):
        import transformers
    found: ModuleType = transformers
    return found
