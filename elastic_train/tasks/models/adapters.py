"""Low-rank adapters (LoRA, Hu et al. 2021) by peft: the base stays as its folder has it, and only adapters are state.

A model's `state_dict` is what commits hold, what ranks hand over and what the weights' hash is of. An adapted model's
has no weights of the base but its digest, in a buffer's name: so a commit, or a rank, with another base is told apart
as one with another model is.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from elastic_train.errors import ConfigError
from elastic_train.system.extras import needed_for
from elastic_train.system.wording import did_you_mean, nearest
from elastic_train.tasks.models.hugging_face import Source
from elastic_train.tasks.task import ParameterGroup

BASE = "base_blake3_"
"""A buffer of this name, and 16 hexadecimal digits, holds the whole digest."""


def check_base(source: Source | None, lora: Mapping[str, Any] | None) -> None:
    """Refuse adapters of a model that is in no folder; ValueError."""
    if lora is not None and (source is None or source.path is None):
        raise ValueError("lora needs hf.path: the base is not saved with the adapter, and has to come from its folder")


def attach(model: nn.Module, lora: Mapping[str, Any], task_type: str) -> nn.Module:
    """Return a model of transformers with adapters, everything else frozen; ConfigError if peft cannot do it.

    `lora` are values of peft's LoraConfig: r, lora_alpha, lora_dropout, target_modules, …
    """
    with needed_for("task.params.lora"):
        import peft
    known = [each.name for each in fields(peft.LoraConfig)]
    if unknown := [name for name in lora if name not in known]:
        raise ConfigError(
            *(f"task.params.lora: peft's LoraConfig has no '{n}'{did_you_mean(nearest(n, known))}" for n in unknown)
        )
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**{"task_type": task_type, **lora}))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"task.params.lora: peft cannot use {dict(lora)}: {error}") from error
    return adapted


def leave_base_out(model: nn.Module) -> None:
    """Take frozen weights out of the model's `state_dict`, and put their digest in; `load_state_dict` keeps them."""
    named = dict(model.named_parameters(remove_duplicate=False))
    base = frozenset(name for name, parameter in named.items() if not parameter.requires_grad)
    digest = _digest({name: named[name] for name in sorted(base)})
    model.register_buffer(f"{BASE}{digest.hex()[:16]}", torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    model.register_state_dict_post_hook(functools.partial(_drop, base))  # type: ignore[no-untyped-call]
    model.register_load_state_dict_post_hook(functools.partial(_do_not_miss, base))  # type: ignore[no-untyped-call]


def _digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the BLAKE3 of names, dtypes, shapes and bytes."""
    found = blake3()
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


def _drop(names: Set[str], model: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for name in names:
        state.pop(f"{prefix}{name}", None)


def _do_not_miss(names: Set[str], model: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [name for name in keys.missing_keys if name not in names]


def frozen_groups(model: nn.Module) -> Sequence[ParameterGroup]:
    """Return what is frozen in the model, such as the base of adapters, as a group; none if nothing is."""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return [ParameterGroup(frozen, is_frozen=True)] if frozen else []
