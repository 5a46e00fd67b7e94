"""Models of Hugging Face's transformers, from a local folder or a configuration.

Nothing is downloaded. Weights are fp32 unless a model's dtype is configured: autocast (`precision: bf16`) rounds
computations, not trained weights. Attention is torch's (SDPA) if the model supports it. Needs the extra `[hf]`.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from elastic_train.errors import ConfigError
from elastic_train.system.extras import needed_for
from elastic_train.system.wording import did_you_mean, first_line, nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)
_KEYS = ("path", "config", "dtype", "attention")
_ATTENTIONS = {"sdpa": "sdpa", "eager": "eager", "flex": "flex_attention"}
FAILURES = (Exception,)
"""Errors of transformers for an unusable configuration: of any class, some with no other base."""
DRAWN = "_drawn_weights"
"""Attribute of a folder's model: names of the weights that the folder lacks, which are initialised randomly."""
CHANGED = "_changed_keys"
"""Attribute of a folder's model: keys that `hf.config` overrides, except dropouts, which act in training only."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of model to build: `name` is an auto class of transformers.

    With `draws_head`, weights outside the model's body are initialised randomly if the folder lacks them. `attention`
    names the implementation; None lets transformers choose, also for models without attention.
    """

    name: str
    config: PretrainedConfig
    draws_head: bool = False
    attention: str | None = "sdpa"


@dataclass(frozen=True, slots=True)
class Source:
    """A model's folder with weights, or a configuration with random ones; `config` overrides the folder's values."""

    path: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    attention: str | None = None
    """Attention implementation by its name in transformers; None for SDPA if the model supports it."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Source:
        """Validate the key `hf` of a task's params; raise ValueError or TypeError."""
        if not isinstance(values, Mapping):
            raise TypeError(f"hf must be a mapping, such as {{path: FOLDER}}, not {values!r}")
        for name in values:
            if name not in _KEYS:
                raise ValueError(f"hf has no '{name}'{did_you_mean(nearest(name, _KEYS))}")
        path, config, dtype = values.get("path"), values.get("config") or {}, values.get("dtype", "float32")
        if not isinstance(config, Mapping):
            raise TypeError(f"hf.config must be a mapping, such as {{num_hidden_layers: 6}}, not {config!r}")
        if dtype not in _DTYPES:
            raise ValueError(f"hf.dtype must be {' or '.join(_DTYPES)}, not {dtype!r}")
        attention = values.get("attention")
        if attention is not None and attention not in _ATTENTIONS:
            raise ValueError(f"hf.attention must be {', '.join(_ATTENTIONS)}, not {attention!r}")
        if path is None and "model_type" not in config:
            raise ValueError("hf needs a path, or a config with a model_type, such as {model_type: gpt2, n_layer: 6}")
        folder = None if path is None else Path(os.path.expanduser(path))  # noqa: PTH111 - as other paths are read
        return cls(folder, config, _DTYPES[dtype], None if attention is None else _ATTENTIONS[attention])

    def load_config(self, **others: Any) -> PretrainedConfig:
        """Return the model's configuration, also overridden by `others`; raise ConfigError."""
        with needed_for("a model of Hugging Face"):
            from transformers import AutoConfig
        changes = {**self.config, **others}
        if self.path is None:
            config = self._checked(lambda: AutoConfig.for_model(**changes))
        elif (self.path / "config.json").is_file():
            path = str(self.path)
            config = self._checked(lambda: AutoConfig.from_pretrained(path, local_files_only=True, **changes))
        else:
            raise ConfigError(f"task.params.hf.path: {self.path} has no config.json; give a model's local folder")
        self._checked(config.get_text_config)
        known = {*type(config)().to_dict(), *config.attribute_map}
        if unknown := [name for name in self.config if name not in known]:
            kind = type(config).__name__
            raise ConfigError(
                *(
                    f"task.params.hf.config: {kind} has no '{name}'{did_you_mean(nearest(name, known))}"
                    for name in unknown
                )
            )
        return config

    def check_length(self, config: PretrainedConfig, max_tokens: int) -> None:
        """Raise ConfigError for rows of more tokens than the model has positions."""
        most = getattr(config.get_text_config(), "max_position_embeddings", None)
        if most is not None and max_tokens > most:
            raise ConfigError(
                f"task.params.max_tokens: {max_tokens}, but the model ({type(config).__name__}) has {most} positions: "
                "set it lower, or give the model more by hf.config"
            )

    def build(self, kind: Kind) -> PreTrainedModel:
        """Build the model on the CPU.

        Raise ConfigError if the folder cannot be read, or lacks other weights.
        """
        import transformers

        if self.path is None:
            return self.from_config(kind)
        transformers.utils.logging.disable_progress_bar()
        auto, path = getattr(transformers, kind.name), str(self.path)
        options: dict[str, Any] = {
            "dtype": self.dtype,
            "config": kind.config,
            "local_files_only": True,
            "output_loading_info": True,
        }
        options["ignore_mismatched_sizes"] = True  # to name them here
        model: PreTrainedModel
        model, found = self._attending(
            kind, lambda attention: auto.from_pretrained(path, **options, attn_implementation=attention)
        )
        copies = {name: other for name in found["missing_keys"] if (other := self.copied_from(model, name))}
        for name, other in copies.items():
            model.get_parameter(name).data.copy_(model.get_parameter(other))
        lacking = {*found["missing_keys"], *(wrong[0] for wrong in found["mismatched_keys"])} - copies.keys()
        lacks = sorted(lacking - drawn_of(model, kind, lacking))
        if lacks:
            raise ConfigError(
                f"task.params.hf.path: {self.path} lacks {len(lacks)} of the weights of a {type(model).__name__}, or "
                f"has them in other shapes, first '{lacks[0]}': give the folder of a whole model, or a "
                "config that fits its weights"
            )
        vars(model)[DRAWN], vars(model)[CHANGED] = sorted(lacking), [key for key in self.config if "drop" not in key]
        return model.train()  # it is loaded in eval mode

    def copied_from(self, model: PreTrainedModel, name: str) -> str | None:
        """Return the weight that a missing one copies: it was tied, and `config` unties it."""
        ties = model._tied_weights_keys
        is_untied = self.config.get("tie_word_embeddings") is False
        return ties.get(name) if is_untied and isinstance(ties, dict) else None

    def from_config(self, kind: Kind) -> PreTrainedModel:
        """Build the model of a configuration, with random weights."""
        import transformers

        auto = getattr(transformers, kind.name)
        model: PreTrainedModel = self._attending(
            kind,
            lambda attention: auto.from_config(kind.config, dtype=self.dtype, attn_implementation=attention),
        )
        return model

    def _attending(self, kind: Kind, make: Callable[[str | None], Any]) -> Any:
        """Build a model with the requested attention, else with SDPA, or eager if it has no SDPA."""
        if self.attention == "flex_attention" and not torch.cuda.is_available():
            raise ConfigError("task.params.hf.attention: flex needs a GPU to train: set it to sdpa or eager")
        if self.attention is not None or kind.attention != "sdpa":
            return self._checked(lambda: make(self.attention or kind.attention))
        try:
            return make("sdpa")
        except FAILURES as error:
            lacks_sdpa = "scaled_dot_product_attention" in str(error)
        if lacks_sdpa:
            log.warning("%s has no SDPA attention in transformers: hf.attention is eager", kind.config.model_type)
        return self._checked(lambda: make("eager" if lacks_sdpa else "sdpa"))

    def _checked(self, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except FAILURES as error:
            where = f"task.params.hf.path: {self.path}" if self.path else f"task.params.hf.config: {dict(self.config)}"
            what = str(error).strip() or type(error).__name__
            raise ConfigError(f"{where}: transformers cannot use it: {what}") from error


def drawn_of(model: PreTrainedModel, kind: Kind, lacking: Set[str]) -> Set[str]:
    """Return which of a folder's missing weights may be initialised randomly: the head, and the body's pooler."""
    if not kind.draws_head:
        return frozenset()
    body = model.base_model_prefix
    is_known = bool(body) and isinstance(getattr(model, body, None), nn.Module)
    outside = {name for name in lacking if is_known and (not name.startswith(f"{body}.") or ".pooler." in name)}
    return outside if outside == lacking else outside | {*head_of(model)}


def head_of(model: nn.Module) -> Sequence[str]:
    """Return the weights of a transformers classifier that change shape with the number of classes.

    Raise ConfigError for a model that transformers cannot build without memory, for which this is unknown.
    """
    config: Any = copy.deepcopy(model.config)
    config.num_labels += 1
    try:
        with torch.device("meta"):
            shapes = {name: parameter.shape for name, parameter in type(model)(config).named_parameters()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"task.params.hf: which weights of {type(model).__name__} change with the number of classes is not known, "
            f"since it cannot be built on the meta device: {str(error).strip()}; give the folder of a whole model with "
            "as many classes as the data has, and train it without an adapter"
        ) from error
    return [name for name, parameter in model.named_parameters() if parameter.shape != shapes.get(name)]


def check_positions(model: PreTrainedModel, max_tokens: int) -> None:
    """Reject rows too long for learned positions that start after the padding's, as RoBERTa's."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or module.padding_idx is None or "position" not in name:
            continue
        most = module.num_embeddings - module.padding_idx - 1
        if max_tokens > most:
            raise ConfigError(
                f"task.params.max_tokens: {max_tokens}, but the model's positions begin at {module.padding_idx + 1}, "
                f"so it takes {most}: set it lower"
            )


def check_causal(model: PreTrainedModel, weights: Mapping[str, Tensor] | None = None) -> bool:
    """Reject a model whose prediction for a token depends on later tokens: it would learn to copy them.

    `weights` replace its own, if it has none. A model of fake tensors is not tested. Return True if its logits are
    known to be the unchanged output of a linear layer, `get_output_embeddings()`.
    """
    if any(isinstance(one, FakeTensor) for one in model.parameters()):
        return False
    was_training, head, made = model.training, model.get_output_embeddings(), list[Tensor]()
    hooks = [] if head is None else [head.register_forward_hook(lambda *call: made.append(call[2]))]
    model.eval()
    try:
        with torch.no_grad():
            pair = torch.tensor([[0, 0], [0, 1]]) % model.config.get_text_config().vocab_size
            inputs = {"input_ids": pair, "use_cache": False}
            logits = torch.func.functional_call(model, dict(weights or {}), (), inputs).logits
            first, second = logits[:, 0]
    except FAILURES as error:
        raise ConfigError(
            f"task.params.hf: {type(model).__name__} ({model.config.model_type}) cannot compute a row: "
            f"{first_line(error) or type(error).__name__}"
        ) from error
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    if not first.equal(second):
        raise ConfigError(
            f"task.params.hf: {type(model).__name__} sees the tokens that it is to predict; set is_decoder: true in "
            "hf.config if the model has such a switch, or give a causal model"
        )
    return len(made) == 1 and made[0] is logits


def has_transformers(model: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return any(isinstance(one, PreTrainedModel) for one in model.modules())


def model_of_transformers(model: nn.Module) -> tuple[str, PreTrainedModel]:
    """Return the name prefix and the module of the outermost transformers model, which must exist."""
    from transformers import PreTrainedModel

    return next(
        (f"{name}." if name else "", one) for name, one in model.named_modules() if isinstance(one, PreTrainedModel)
    )
