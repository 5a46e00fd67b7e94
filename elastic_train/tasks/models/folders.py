"""Trained models as folders that the auto classes of transformers load, to the last bit."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.system.extras import needed_for
from elastic_train.tasks.models.decoder import Decoder, DecoderShape, llama_name


def save_folder(model: nn.Module, folder: Path, *, is_merged: bool) -> None:
    """Write a model of transformers, a decoder of ours as a Llama, or adapters: alone, or added to their base.

    Raises ConfigError for a prompt, which cannot be added to weights.
    """
    found: Any = as_llama(model) if isinstance(model, Decoder) else model
    _import().utils.logging.disable_progress_bar()
    if is_merged and hasattr(found, "peft_config"):
        if not hasattr(found, "merge_and_unload"):
            raise ConfigError(
                "--merge adds adapters to their base's weights, and a prompt is no part of them: leave it out"
            )
        found = found.merge_and_unload()
    found.save_pretrained(folder)


def begin_llama(shape: DecoderShape, folder: Path) -> dict[str, str]:
    """Write the configuration of a decoder as a Llama; return what its weights are called there, by ours."""
    with torch.device("meta"):
        llama = _llama(shape)
        ours = {llama_name(name): name for name in Decoder(shape).state_dict()}
    llama.config.dtype, llama.config.architectures = "float32", [type(llama).__name__]
    llama.config.save_pretrained(folder)
    llama.generation_config.save_pretrained(folder)
    tied = {"lm_head.weight"} if shape.tied else set()
    return {ours[name]: name for name in llama.state_dict() if name not in tied}


def as_llama(decoder: Decoder) -> nn.Module:
    """Return a LlamaForCausalLM with the weights of a decoder, without its dropout."""
    llama: nn.Module = _llama(decoder.shape)
    llama.load_state_dict({llama_name(name): tensor for name, tensor in decoder.state_dict().items()})
    return llama


def _llama(shape: DecoderShape) -> Any:
    """Return a LlamaForCausalLM of a decoder's sizes; ConfigError if there is none."""
    if shape.experts:
        raise ConfigError(
            f"--to hf: no Llama has experts, and task.params.model.experts is {shape.experts}: use --to "
            "safetensors or torch, which write the weights of any model"
        )
    transformers = _import()
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def _import() -> ModuleType:
    with needed_for("a folder of Hugging Face"):
        import transformers
    found: ModuleType = transformers
    return found
