"""Convert the package's own decoder to an equivalent model of transformers, and export trained models as its folders.

Without experts it is a Llama. With experts whose probabilities sum to 1, and no shared MLP, it is a Mixtral. All others
are a Qwen2-MoE, which can leave probabilities unnormalised and has a shared MLP, half of whose output it adds if its
gate's weights are 0. So that MLP's last product has twice our weights, which is exact.

Folders are for the auto classes of transformers, and have the model's bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from elastic_train.errors import ConfigError
from elastic_train.system.extras import needed_for
from elastic_train.tasks.decoder.model import Decoder, DecoderShape
from elastic_train.tasks.models.hugging_face import CHANGED

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


def save_folder(model: nn.Module, folder: Path, *, is_merged: bool) -> None:
    """Write a transformers model, our decoder as one, or adapters: alone, or merged into their base.

    Raise ConfigError for a prompt, which cannot be merged, for adapters alone of a base whose configuration is changed,
    and for other kinds of models.
    """
    found: Any = as_transformers(model) if isinstance(model, Decoder) else model
    import_transformers().utils.logging.disable_progress_bar()
    if is_merged and hasattr(found, "peft_config"):
        if not hasattr(found, "merge_and_unload"):
            raise ConfigError(
                "--merge adds adapters to their base's weights, and a prompt is not part of them: leave it out"
            )
        found = found.merge_and_unload()
    elif hasattr(found, "peft_config") and (changed := getattr(found, CHANGED, None)):
        raise ConfigError(
            f"task.params.hf.config: an adapter is loaded onto its base as the folder has it, without {changed[0]}: "
            "export with --merge, or save the base with this configuration in a new folder and train from there"
        )
    if not hasattr(found, "save_pretrained"):
        raise ConfigError(
            f"task.path: the task builds a {type(model).__name__}, which transformers cannot load: use --to "
            "safetensors, or replace the task's `export`"
        )
    found.save_pretrained(folder)


def begin_llama(shape: DecoderShape, folder: Path, max_tokens: int) -> dict[str, str] | None:
    """Write the configuration of a decoder without experts as a Llama; return its weights' names there, by ours.

    It was trained on rows of up to `max_tokens` tokens, which transformers has to take, too.

    For one with experts, whose weights transformers joins and splits, write nothing and return None.
    """
    if shape.experts:
        return None
    with torch.device("meta"):
        llama = sketch_of(shape)
        ours = {llama_name(name): name for name in Decoder(shape).state_dict()}
    llama.config.max_position_embeddings = max(max_tokens, llama.config.max_position_embeddings)
    llama.config.dtype, llama.config.architectures = "float32", [type(llama).__name__]
    llama.config.save_pretrained(folder)
    llama.generation_config.save_pretrained(folder)
    tied = {"lm_head.weight"} if shape.tied else set()
    return {ours[name]: name for name in llama.state_dict() if name not in tied}
