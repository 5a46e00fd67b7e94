"""Export trained models as folders for the auto classes of transformers, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.tasks.decoder.as_transformers import as_transformers, import_transformers, llama_name, sketch_of
from elastic_train.tasks.decoder.model import Decoder
from elastic_train.tasks.decoder.shape import DecoderShape


def save_folder(model: nn.Module, folder: Path, *, is_merged: bool) -> None:
    """Write a transformers model, our decoder as one, or adapters: alone, or merged into their base.

    Raise ConfigError for a prompt, which cannot be merged, and for other kinds of models.
    """
    found: Any = as_transformers(model) if isinstance(model, Decoder) else model
    import_transformers().utils.logging.disable_progress_bar()
    if is_merged and hasattr(found, "peft_config"):
        if not hasattr(found, "merge_and_unload"):
            raise ConfigError(
                "--merge adds adapters to their base's weights, and a prompt is not part of them: leave it out"
            )
        found = found.merge_and_unload()
    if not hasattr(found, "save_pretrained"):
        raise ConfigError(
            f"task.path: the task builds a {type(model).__name__}, which transformers cannot load: use --to "
            "safetensors, or replace the task's `export`"
        )
    found.save_pretrained(folder)


def begin_llama(shape: DecoderShape, folder: Path) -> dict[str, str] | None:
    """Write the configuration of a decoder without experts as a Llama; return its weights' names there, by ours.

    For one with experts, whose weights transformers joins and splits, write nothing and return None.
    """
    if shape.experts:
        return None
    with torch.device("meta"):
        llama = sketch_of(shape)
        ours = {llama_name(name): name for name in Decoder(shape).state_dict()}
    llama.config.dtype, llama.config.architectures = "float32", [type(llama).__name__]
    llama.config.save_pretrained(folder)
    llama.generation_config.save_pretrained(folder)
    tied = {"lm_head.weight"} if shape.tied else set()
    return {ours[name]: name for name in llama.state_dict() if name not in tied}
