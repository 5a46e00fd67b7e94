"""Adapters by peft, such as LoRA (Hu et al. 2021): the base stays as in its folder, and only adapters are state.

A model's `state_dict` is what commits hold, ranks exchange and the weights' hash covers. An adapted model's has the
base's digest, in a buffer's name, instead of its weights: so a commit or rank with another base is detected like one
with another model.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from elastic_train.config.combinations import Found
from elastic_train.errors import ConfigError
from elastic_train.system.extras import needed_for
from elastic_train.system.wording import did_you_mean, nearest
from elastic_train.tasks.models.hugging_face import DRAWN, Source, head_of
from elastic_train.tasks.task import ParameterGroup

BASE = "base_blake3_"
"""Prefix of the buffer that holds the whole digest; 16 hexadecimal digits follow."""
PROMPTS: Mapping[str, str] = {"prompt_tuning": "PromptTuningConfig", "p_tuning": "PromptEncoderConfig"}
_IN_LAYERS: Mapping[str, str] = {
    "lora": "LoraConfig",
    "ia3": "IA3Config",
    "loha": "LoHaConfig",
    "lokr": "LoKrConfig",
    "ln_tuning": "LNTuningConfig",
}
_IN_PARTS = ("lora", "ln_tuning")
"""Types that tensor ranks can share."""
_UNFIT: Mapping[str, str] = {
    "adalora": "it moves ranks between layers after an update, by what it has seen of gradients, outside of the step "
    "that ranks agree on and commits hold",
    "prefix_tuning": "its keys and values go through the model's cache, which a pass that is recomputed fills twice",
}
_NO_PROMPTS = "with a prompt a model sees embeddings, and not where a row ends: it is for CausalLM alone"
_HEADS = ("classifier", "score")
"""Modules that peft trains whole in a classifier of sequences."""
_INITIAL = (True, False, "gaussian", "orthogonal")
"""Values of init_lora_weights that leave the base unchanged; with others an adapter does not fit its folder."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A model's adapters: their type, their values in peft's configuration, and the key that gives them."""

    key: str
    kind: str
    values: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        source: Source | None,
        lora: Mapping[str, Any] | None,
        adapter: Mapping[str, Any] | None,
        *,
        takes_prompts: bool = False,
    ) -> Adapter | None:
        """Validate the keys `lora` and `adapter` of a task's params; raise ValueError or TypeError."""
        if lora is not None and adapter is not None:
            raise ValueError("give lora, or adapter, of which LoRA is one type, not both")
        given = lora if adapter is None else adapter
        if given is None:
            return None
        key = "lora" if adapter is None else "adapter"
        if not isinstance(given, Mapping):
            raise TypeError(f"{key} must be a mapping, such as {{r: 8}} or for adapter {{type: ia3}}, not {given!r}")
        if source is None or source.path is None:
            raise ValueError(
                f"{key} needs hf.path: the base is not saved with the adapter, and has to come from its folder"
            )
        kind = "lora" if adapter is None else adapter.get("type")
        kinds = [*_IN_LAYERS, *(PROMPTS if takes_prompts else ())]
        if kind not in kinds:
            why = {**_UNFIT, **dict.fromkeys(PROMPTS, _NO_PROMPTS)}.get(str(kind))
            raise ValueError(
                f"adapter.type must be one of {', '.join(kinds)}, not {kind!r}{f', since {why}' if why else ''}"
            )
        num_tokens = given.get("num_virtual_tokens")
        if kind in PROMPTS and (type(num_tokens) is not int or num_tokens < 1):
            raise ValueError(f"{kind} needs num_virtual_tokens, a whole number of at least 1, not {num_tokens!r}")
        return cls(key, str(kind), {name: value for name, value in given.items() if name != "type" or key == "lora"})

    def found(self) -> Iterator[Found]:
        """Yield the traits of these adapters; LoRA variants that need whole matrices cannot be split."""
        kind, is_dora = f"the type {self.kind} of task.params.{self.key}", bool(self.values.get("use_dora"))
        if self.kind not in _IN_PARTS or is_dora:
            what = f"use_dora of task.params.{self.key}" if is_dora else kind
            yield Found("adapters but LoRA and `ln_tuning`", what)
        if self.kind in PROMPTS:
            yield Found("prompts", kind)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that it puts before a row's own."""
        return int(self.values["num_virtual_tokens"]) if self.kind in PROMPTS else 0

    def config(self, **others: Any) -> Any:
        """Return peft's configuration, with `others` as defaults; raise ConfigError for an unsupported value.

        `modules_to_save` are taken from both.
        """
        with needed_for(f"task.params.{self.key}"):
            import peft
        kind = getattr(peft, {**_IN_LAYERS, **PROMPTS}[self.kind])
        known = [each.name for each in fields(kind)]
        if unknown := [name for name in self.values if name not in known]:
            where = f"task.params.{self.key}: peft's {kind.__name__}"
            raise ConfigError(*(f"{where} has no '{name}'{did_you_mean(nearest(name, known))}" for name in unknown))
        start = self.values.get("init_lora_weights", True)
        if start not in _INITIAL or self.values.get("loftq_config"):
            raise ConfigError(
                f"task.params.{self.key}: init_lora_weights: {start} changes the base's own weights, which stay in "
                f"their folder: use {', '.join(map(str, _INITIAL))}, and no loftq_config"
            )
        tokenizer = self.values.get("tokenizer_name_or_path")
        if self.values.get("prompt_tuning_init") == "TEXT" and not Path(str(tokenizer)).is_dir():
            raise ConfigError(
                f"task.params.{self.key}: prompt_tuning_init: TEXT needs tokenizer_name_or_path, a local folder with a "
                f"tokenizer, and {tokenizer!r} is not one"
            )
        values = {**others, **self.values}
        if "modules_to_save" in others:
            values["modules_to_save"] = [*others["modules_to_save"], *self._own_modules()]
        try:
            return kind(**values)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"task.params.{self.key}: peft cannot use {dict(self.values)}: {error}") from error

    def _own_modules(self) -> Sequence[str]:
        named = self.values.get("modules_to_save") or []
        if not isinstance(named, list | tuple):
            raise ConfigError(f"task.params.{self.key}: modules_to_save must be a list of modules, not {named!r}")
        return named

    def attach(self, model: nn.Module, **others: Any) -> nn.Module:
        """Return a transformers model with adapters, everything else frozen; raise ConfigError if peft cannot do it.

        `others` are values of peft's configuration that the key does not give, such as the task's type. Modules that
        the base's folder lacks are trained whole: they would be drawn anew wherever the adapter is loaded.
        """
        if drawn := _drawn_modules(model, others):
            others["modules_to_save"] = [*others.get("modules_to_save", ()), *drawn]
        config = self.config(**others)
        import peft

        moving = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
        if moving:
            raise ConfigError(
                f"task.params.{self.key}: the base has BatchNorm ('{moving[0]}'), whose statistics move while adapters "
                "are trained, and are in no adapter: train the whole model, or take one without, such as a ViT"
            )
        try:
            with warnings.catch_warnings(action="ignore", category=FutureWarning):
                adapted: nn.Module = peft.get_peft_model(model, config)
        except (ValueError, TypeError, KeyError, AttributeError, OSError, NotImplementedError) as error:
            raise ConfigError(f"task.params.{self.key}: peft cannot use {dict(self.values)}: {error}") from error
        return adapted


def _drawn_modules(model: nn.Module, others: Mapping[str, Any]) -> list[str]:
    """Return the modules with random weights, except those in a head that is trained already; peft matches endings."""
    heads = (*others.get("modules_to_save", ()), *(_HEADS if others.get("task_type") == "SEQ_CLS" else ()))
    drawn = dict.fromkeys(name.rpartition(".")[0] for name in vars(model).get(DRAWN, ()))

    def is_in_head(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[: end + 1]).endswith(heads) for end in range(len(parts)))

    return [name for name in drawn if name and not is_in_head(name)]


def leave_base_out(model: nn.Module) -> None:
    """Replace frozen weights in the model's `state_dict` by their digest; `load_state_dict` keeps the weights."""
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


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Make a model compute as its base, in eval mode and without gradients, within the context."""
    adapted: list[Any] = [each for each in model.modules() if getattr(each, "_disable_adapters", None) is False]
    assert adapted, "the model has adapters"
    training = [each for each in model.modules() if each.training]
    for each in adapted:
        each._disable_adapters = True  # peft's own switch would also freeze their weights
    for each in training:
        each.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for each in adapted:
            each._disable_adapters = False
        for each in training:
            each.training = True


def heads_of(model: nn.Module) -> list[str]:
    """Return the head of a transformers classifier: modules whose weights change shape with the number of classes.

    They are trained whole. Raise ConfigError if there is none, or if peft, which matches name endings, would select
    others.
    """
    heads = list(dict.fromkeys(name.rpartition(".")[0] for name in head_of(model)))
    remedy = "train the whole model, without an adapter, or take another one, such as a ViT"
    if not heads:
        raise ConfigError(
            f"task.params.hf: no weights of {type(model).__name__} change with the number of classes, so the "
            f"ones to train in addition to adapters are unknown: {remedy}"
        )
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name not in heads]
    if others := [name for name in modules if name.endswith(tuple(heads))]:
        raise ConfigError(
            f"task.params.hf: the head of {type(model).__name__} is {', '.join(map(repr, heads))}, and peft takes "
            f"'{others[0]}' for it, too: {remedy}"
        )
    return heads


def frozen_groups(model: nn.Module) -> Sequence[ParameterGroup]:
    """Return the model's frozen parameters, such as an adapter's base, as a group; empty if there are none."""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return [ParameterGroup(frozen, is_frozen=True)] if frozen else []
