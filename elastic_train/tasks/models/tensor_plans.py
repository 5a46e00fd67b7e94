"""How ranks share a model of transformers: by the plan for tensor parallelism that it brings.

Column and row layers are cut as the plan says, and norms of single heads get their gradients from all ranks. What the
plan gathers at once, and embeddings, stay whole, as in the package's own decoder: the results are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.tasks.task import TensorPlan, TensorUse

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_USES: Mapping[str, TensorUse] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "partial",
}
_WHOLE = ("colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "embedding_colwise", "replicate")
_INSTEAD = "set it to 1, or use parallel.shards to hold less on each rank"
_HEADS = ("num_attention_heads", "num_key_value_heads")
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob")


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


def check_no_adapters(lora: Mapping[str, Any] | None, key: str) -> None:
    """Refuse adapters, of which no plan says how ranks share them."""
    if lora is not None:
        raise ConfigError(
            f"{key} does not go together with task.params.lora: set it to 1; adapters and their "
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
