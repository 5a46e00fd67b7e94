"""Classify a model's parameters by shape, type, name and module."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def norms_and_biases(model: nn.Module) -> set[int]:
    """Return the ids of parameters without weight decay by default: biases, norms, and 1-D parameters."""
    named = model.named_parameters(remove_duplicate=False)
    found = {id(one) for name, one in named if one.ndim < 2 or name.rpartition(".")[2] == "bias"}
    return found | {
        id(one) for module in model.modules() if isinstance(module, _NORMS) for one in module.parameters(recurse=False)
    }


def muons_parameters(model: nn.Module, adamw_names: Sequence[str]) -> set[int]:
    """Return the ids of the parameters that Muon updates.

    These are matrices, except norms, embeddings, the output layer of a transformers model, and names that match a shell
    pattern of `adamw_names`.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    others = {id(one) for name, one in named if any(fnmatch.fnmatchcase(name, pattern) for pattern in adamw_names)}
    layers: list[nn.Module] = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    layers += [head for one in model.modules() if isinstance(head := _output_layer(one), nn.Module)]
    others |= {id(one) for layer in layers for one in layer.parameters(recurse=False)} | norms_and_biases(model)
    return {id(one) for _, one in named if one.ndim == 2} - others


def _output_layer(module: nn.Module) -> object:
    """Return the output layer of a transformers model, None for other modules."""
    ask = getattr(module, "get_output_embeddings", None)
    return ask() if callable(ask) else None


_PER_TENSOR = 4096
_MANY = 0.5
_STEP_OF_LR = ("adam", "adamw", "nadam", "radam", "lion")
"""Optimizers that change each weight by about the learning rate."""


def precision_hazard(parameters: Iterable[Tensor], optimizer: str, lr: float) -> str:
    """Return a warning if updates of size `lr` are below the precision of most 16-bit weights; else ""."""
    if re.split(r"[:.]", optimizer)[-1].lower() not in _STEP_OF_LR:
        return ""
    lost = num = 0
    kinds = set[str]()
    for parameter in parameters:
        if parameter.dtype not in (torch.bfloat16, torch.float16) or not parameter.requires_grad or parameter.is_meta:
            continue
        flat = parameter.detach().flatten()
        weights = flat[:: max(1, len(flat) // _PER_TENSOR)].cpu()
        lost += int(((weights.float() + lr).to(weights.dtype) == weights).sum())
        num += len(weights)
        kinds.add(str(parameter.dtype).removeprefix("torch."))
    if not num or lost < _MANY * num:
        return ""
    return (
        f"weights are {' and '.join(sorted(kinds))}, and an update of optimizer.lr, {lr:g}, rounds to nothing for "
        f"{lost / num:.0%} of them: train fp32 weights (task.params.hf.dtype: float32, with precision: bf16), or "
        "set lr higher"
    )
