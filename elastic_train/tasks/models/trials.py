"""Trials of a transformers model before training: small fp32 passes, of a large model only the first layers.

Results are cached: each model and configuration is tried once per question.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from elastic_train.system.wording import first_line
from elastic_train.tasks.models.folder_weights import stand_ins, weights_to_try
from elastic_train.tasks.models.hugging_face import FAILURES

Run = Callable[..., Tensor]
"""Returns the logits for named inputs."""
_LARGE = 50_000_000


class Found(NamedTuple):
    """The difference found by a trial, or the error that ended it; both empty if nothing is wrong."""

    difference: str = ""
    error: str = ""


_found = dict[tuple[type, str, int, str], Found]()


def tried(model: nn.Module, question: str, look: Callable[[Run], str]) -> Found:
    """Return what `look` finds by passes of a model; nothing for a model of fake tensors.

    Generator and training mode are preserved.
    """
    inner: Any = model
    if any(isinstance(one, FakeTensor) for one in model.parameters()):
        return Found()
    num_hooks = sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())
    key = type(model), inner.config.to_json_string(use_diff=False), num_hooks, question
    if key not in _found:
        with torch.random.fork_rng([]):
            _found[key] = _try(model, look)
    return _found[key]


@torch.no_grad()
def _try(model: nn.Module, look: Callable[[Run], str]) -> Found:
    was_training = model.training
    model.eval()
    try:
        with _first_of_each_kind(model):
            weights = _weights(model)

            def run(**inputs: Any) -> Tensor:
                return torch.func.functional_call(model, weights, (), {"use_cache": False, **inputs}).logits  # type: ignore[no-any-return]

            return Found(look(run))
    except FAILURES as error:
        return Found(error=f"{type(error).__name__}: {first_line(error)}")
    finally:
        model.train(was_training)


def most_rounding(other: Tensor) -> float:
    """Return the most by which rounding may change results of passes as deep as usual models."""
    most: float = torch.finfo(other.dtype).eps ** (2 / 3) * float(other.abs().max())
    return most


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return fp32 weights to try: the model's own, or stand-ins."""
    buffers = {name: one.float() for name, one in model.named_buffers() if one.is_floating_point()}
    if all(one.dtype == torch.float32 for one in model.parameters()):
        return {**weights_to_try(model), **buffers}
    return {**stand_ins(model, torch.float32), **buffers}


@contextlib.contextmanager
def _first_of_each_kind(model: nn.Module) -> Iterator[None]:
    """Keep a large model's first layer of each kind (by modules and settings), and no output layer."""
    from elastic_train.tasks.models.stage_plans import planned

    inner: Any = model
    if sum(one.numel() for one in model.parameters()) <= _LARGE:
        yield
        return
    parts, listed = planned(model), inner.config.get_text_config().to_dict().values()
    others = dict[tuple[nn.Module, str], nn.Module]()
    for owner, leaf, child in _children(model):
        if child is inner.get_output_embeddings():
            others[owner, leaf] = nn.Identity()
        elif (
            parts is not None
            and isinstance(child, nn.ModuleList)
            and len(child)
            and child[0] is model.get_submodule(parts.layers[0])
        ):
            by_layer = [value for value in listed if isinstance(value, list) and len(value) == len(child)]
            kinds = [(_settings(layer), *(str(values[n]) for values in by_layer)) for n, layer in enumerate(child)]
            others[owner, leaf] = child[: 1 + max(kinds.index(kind) for kind in kinds)]
    own = {place: getattr(*place) for place in others}
    try:
        for (owner, leaf), other in others.items():
            setattr(owner, leaf, other)
        yield
    finally:
        for (owner, leaf), module in own.items():
            setattr(owner, leaf, module)


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [(owner, name, child) for owner in model.modules() for name, child in owner.named_children()]


def _settings(layer: nn.Module) -> str:
    """Return a layer's modules with their plain attributes, without its number."""
    plain = (bool, int, float, str, list, tuple, type(None))
    return repr(layer) + repr(
        [
            (
                name,
                sorted(
                    (key, repr(value))
                    for key, value in vars(module).items()
                    if isinstance(value, plain) and not key.endswith(("_idx", "_id", "layer_number"))
                ),
            )
            for name, module in layer.named_modules()
        ]
    )
