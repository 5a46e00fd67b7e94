"""Trained models as folders that the auto classes of transformers load, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.system.extras import needed_for
from elastic_train.tasks.models.decoder import Decoder, llama_name


def save_folder(model: nn.Module, folder: Path, *, is_merged: bool) -> None:
    """Write a model of transformers, a decoder of ours as a Llama, or adapters: alone, or added to their base."""
    if isinstance(model, Decoder) and model.shape.experts:
        raise ConfigError(
            f"--to hf: no Llama has experts, and task.params.model.experts is {model.shape.experts}: use --to "
            "safetensors or torch, which write the weights of any model"
        )
    with needed_for("a folder of Hugging Face"):
        import transformers
    transformers.utils.logging.disable_progress_bar()
    found: Any = as_llama(model) if isinstance(model, Decoder) else model
    if is_merged and hasattr(found, "merge_and_unload"):
        found = found.merge_and_unload()
    found.save_pretrained(folder)


def as_llama(decoder: Decoder) -> nn.Module:
    """Return a LlamaForCausalLM with the weights of a decoder, without its dropout."""
    import transformers

    shape = decoder.shape
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
    llama: nn.Module = transformers.LlamaForCausalLM(config)
    llama.load_state_dict({llama_name(name): tensor for name, tensor in decoder.state_dict().items()})
    return llama
