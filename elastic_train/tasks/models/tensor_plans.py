"""How ranks share a model of transformers, and the tokens of its rows: by the plans that it brings.

Column and row layers are cut as the plan says, and norms of single heads get their gradients from all ranks. What the
plan gathers at once, and embeddings, stay whole, as in the package's own decoder: the results are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.tasks.models.adapters import IN_PARTS, Adapter
from elastic_train.tasks.models.hugging_face import model_of_transformers
from elastic_train.tasks.models.stage_plans import planned
from elastic_train.tasks.placements import CutUse, TokenUse, Use

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_USES: Mapping[str, CutUse] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "partial",
}
_WHOLE = ("colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "embedding_colwise", "replicate")
_INSTEAD = "set it to 1, or use parallel.shards to hold less on each rank"
_ALL_TOKENS = "set it to false, or use parallel.recompute to keep less of each row"
_HEADS = ("num_attention_heads", "num_key_value_heads")
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob")
_DROPOUT_MODULES = ("embd_pdrop", "resid_pdrop")
"""What comes before the layers, or is a module of each."""


def uses_of(model: nn.Module, degree: int, adapter: Adapter | None, *, sequence: bool = False) -> Mapping[str, Use]:
    """Return how so many tensor ranks share a model that is one of transformers, or has one as a module.

    Raises ConfigError if they cannot; a degree of 1 shares nothing of a model that no degree can cut.
    """
    try:
        cut = _cut_uses(model, degree, adapter)
    except ConfigError:
        if degree > 1:
            raise
        return {}
    return {**cut, **_token_uses(model, cut, adapter)} if sequence else cut


def _cut_uses(model: nn.Module, degree: int, adapter: Adapter | None) -> Mapping[str, CutUse]:
    """Return how a model is cut.

    LoRA's two matrices are cut as the layer that they are added to: of one that is cut by columns the second, of one
    that is cut by rows the first. Between them is a number for each of few ranks of LoRA's, which all ranks have.

    Raises ConfigError if it brings no plan, if the plan has a style that is not supported, or if the degree does not
    divide what is cut.
    """
    if adapter is not None:
        adapter.check_is_in(IN_PARTS, f"parallel.tensor: {degree}")
    prefix, inner = model_of_transformers(model)
    kind, styles = type(inner).__name__, inner.tp_plan or {}
    if not any(style in _USES for style in styles.values()):
        raise ConfigError(
            f"parallel.tensor: {degree} cuts models of transformers that bring a plan (base_model_tp_plan), and "
            f"{kind} has none: {_INSTEAD}"
        )
    for name, style in styles.items():
        if style not in _USES and style not in _WHOLE:
            raise ConfigError(
                f"parallel.tensor: {degree}: the plan of {kind} cuts '{name}' as {style}, which is not supported: "
                f"{_INSTEAD}"
            )
    _check_attention(inner.config.get_text_config(), degree)
    planned_uses = {f"{prefix}{name}": _USES[style] for name, style in styles.items() if style in _USES}
    return planned_uses if inner is model else dict(_with_lora(model, planned_uses, degree))


def _with_lora(model: nn.Module, plan: Mapping[str, CutUse], degree: int) -> Iterator[tuple[str, CutUse]]:
    """Yield what becomes of the modules of a model with LoRA's layers around some of those that a plan names."""
    for pattern, use in plan.items():
        fits = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        for name, module in model.named_modules():
            if fits.fullmatch(name) is None:
                continue
            if not hasattr(module, "lora_A"):
                yield name, use
                continue
            if use == "row" and any(isinstance(one, nn.Dropout) and one.p for one in module.modules()):
                raise ConfigError(
                    f"parallel.tensor: {degree}: ranks have a part each of what '{name}' is given, and lora_dropout "
                    "would leave out the same of each: set it to 0, or leave that layer out of target_modules"
                )
            yield f"{name}.base_layer", use
            yield f"{name}.{'lora_B' if use == 'column' else 'lora_A'}.*", use


def _token_uses(model: nn.Module, cut: Mapping[str, CutUse], adapter: Adapter | None) -> Mapping[str, TokenUse]:
    """Return how tensor ranks share out the tokens of a model that is cut; ConfigError if they cannot.

    Masks and positions are made of all tokens before the first layer, so tokens are split where that begins. Attention
    asks what it is given for its number of tokens, so what has column layers in it gets all of them.
    """
    if adapter is not None:
        adapter.check_is_in((), "parallel.sequence: true")
    kind, parts = type(model).__name__, planned(model)
    if parts is None:
        raise ConfigError(
            f"parallel.sequence: true needs models of transformers that name their layers (base_model_pp_plan), and "
            f"{kind} does not: {_ALL_TOKENS}"
        )
    _check_no_dropouts(model)
    uses: dict[str, TokenUse] = {parts.layers[0]: "enter", parts.after[0]: "join"}
    inside = f"{parts.layers[0].rpartition('.')[0]}.*."
    cut = {name.removeprefix(inside): use for name, use in cut.items() if name.startswith(inside)}
    for layer in parts.layers:
        for name, use in _uses_in(model.get_submodule(layer), cut):
            if use is None:
                raise ConfigError(
                    f"parallel.sequence: true: '{layer}.{name}' of {kind} is not cut, and cannot run on some tokens: "
                    f"{_ALL_TOKENS}"
                )
            uses[f"{inside}{name}"] = use
    return uses


def _uses_in(layer: nn.Module, cut: Mapping[str, CutUse]) -> Iterator[tuple[str, TokenUse | None]]:
    """Yield what becomes of the modules of a layer, None for one that needs all tokens; what is cut is named as in it.

    One that has parameters and no modules is a norm.
    """
    for name, child in layer.named_children():
        columns = [one for one, use in cut.items() if use == "column" and one.startswith(f"{name}.")]
        if columns:
            for parent in dict.fromkeys(one.rpartition(".")[0] for one in columns):
                yield parent, "gather"
        elif isinstance(child, nn.Dropout):
            yield name, "dropout"
        elif any(True for _ in child.parameters()):
            yield name, None if any(True for _ in child.children()) else "tokens"


def _check_no_dropouts(model: nn.Module) -> None:
    """Refuse dropout within what is cut, which would leave out the same of each rank's tokens."""
    config: Any = model.config
    for name, share in config.get_text_config().to_dict().items():
        if "drop" in name and name not in _DROPOUT_MODULES and isinstance(share, float) and share:
            raise ConfigError(
                f"parallel.sequence: true shares out tokens, and task.params.hf.config.{name} is {share}: all ranks "
                "would leave out the same of theirs; set it to 0, or parallel.sequence to false"
            )


def _check_attention(config: PretrainedConfig, degree: int) -> None:
    """Refuse heads that cannot be dealt out evenly, and random numbers that are drawn for each head."""
    for name in _HEADS:
        size = getattr(config, name, None)
        if size is not None and size % degree:
            raise ConfigError(
                f"parallel.tensor: {degree} does not divide {name} of the model, which is {size}: choose a degree that "
                "does"
            )
    for name in _DROPOUTS:
        if getattr(config, name, 0):
            raise ConfigError(
                f"parallel.tensor: {degree} shares out attention, and task.params.hf.config.{name} is "
                f"{getattr(config, name)}: all ranks would leave out the same of their heads; set it to 0"
            )
