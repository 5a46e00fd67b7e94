"""How ranks share a model of transformers, and the tokens of its rows: by the plans that it brings.

Column and row layers are cut as the plan says, and norms of single heads get their gradients from all ranks. What the
plan gathers at once, and embeddings, stay whole, as in the package's own decoder: the results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.tasks.models.adapters import Adapter
from elastic_train.tasks.models.stage_plans import planned
from elastic_train.tasks.task import SequencePlan, SequenceUse, TensorPlan, TensorUse

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_USES: Mapping[str, TensorUse] = {
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


def tensor_plan_of(model: nn.Module, degree: int) -> TensorPlan:
    """Return how so many ranks share a model that is one of transformers, or has one as a module.

    Raises ConfigError if it brings no plan, if the plan has a style that is not supported, or if the degree does not
    divide what is cut.
    """
    prefix, inner = _model_of_transformers(model)
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
    return {f"{prefix}{name}": _USES[style] for name, style in styles.items() if style in _USES}


def sequence_plan_of(model: nn.Module, degree: int) -> SequencePlan:
    """Return how so many tensor ranks share out a model's tokens; ConfigError if they cannot.

    Masks and positions are made of all tokens before the first layer, so tokens are split where that begins. Attention
    asks what it is given for its number of tokens, so what has column layers in it gets all of them.
    """
    kind, parts, cut = type(model).__name__, planned(model), tensor_plan_of(model, degree)
    if parts is None:
        raise ConfigError(
            f"parallel.sequence: true needs models of transformers that name their layers (base_model_pp_plan), and "
            f"{kind} does not: {_ALL_TOKENS}"
        )
    _check_no_dropouts(model)
    uses: dict[str, SequenceUse] = {parts.layers[0]: "enter", parts.after[0]: "join"}
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


def _uses_in(layer: nn.Module, cut: Mapping[str, TensorUse]) -> Iterator[tuple[str, SequenceUse | None]]:
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


def check_no_adapters(adapter: Adapter | None, key: str) -> None:
    """Refuse adapters, of which no plan says how ranks share them."""
    if adapter is not None:
        raise ConfigError(
            f"{key} does not go together with task.params.{adapter.key}: set it to 1; adapters and their "
            "optimizer take little memory, and parallel.shards spreads the weights"
        )


def _model_of_transformers(model: nn.Module) -> tuple[str, PreTrainedModel]:
    """Return the outermost model of transformers, and what its modules' names begin with."""
    from transformers import PreTrainedModel

    name, found = next((name, one) for name, one in model.named_modules() if isinstance(one, PreTrainedModel))
    return f"{name}." if name else "", found


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
