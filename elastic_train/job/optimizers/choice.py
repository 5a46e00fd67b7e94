"""Find the configured optimizer and its options, and refuse invalid ones before training."""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from elastic_train.config.recipe import OptimizerConfig
from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.rehearsal import MakeOptimizer, rehearse, shows_no_cut
from elastic_train.system.extras import import_named
from elastic_train.system.wording import did_you_mean, nearest

Groups = Sequence[dict[str, Any]]


class MuonWithAdamW(Optimizer):
    """Muon and AdamW in one optimizer; each parameter group's `use_muon` chooses.

    `adamw` and `muon` are their own keyword arguments. Muon's updates are scaled to the size of AdamW's unless `muon`
    says otherwise, so that one learning rate and one weight decay suit both.
    """

    def __init__(
        self, groups: Groups, lr: float, weight_decay: float, *, adamw: dict[str, Any], muon: dict[str, Any]
    ) -> None:
        both: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        parts = {is_muon: [group for group in groups if group["use_muon"] is is_muon] for is_muon in (True, False)}
        self._parts: dict[bool, Optimizer] = {}
        if parts[True]:
            self._parts[True] = torch.optim.Muon(parts[True], **both, **{"adjust_lr_fn": "match_rms_adamw", **muon})
        if parts[False]:
            self._parts[False] = AdamW(parts[False], **both, **adamw)
        super().__init__(groups, {})  # the parts have already filled in these groups' settings

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all groups from their gradients."""
        assert closure is None, "gradients are in place"
        for is_muon, part in self._parts.items():  # restoring a state replaces the groups
            part.param_groups = [group for group in self.param_groups if group["use_muon"] is is_muon]
            part.state = self.state
            part.step()
        return None


SettingsOf = Callable[[nn.Parameter], Mapping[str, object]]
_NAMED = {"adamw": "AdamW", "sgd": "SGD", "adafactor": "Adafactor", "muon": "Muon"}
_FUSED = ("adamw", "sgd", "muon")
"""Optimizers with a fused update (AdamW's part of Muon, too). Not the default on CPUs, where cuts change its bits."""
ADAMW_NAMES = "adamw_names"
_BETAS = (0.9, 0.999)
"""Betas of AdamW, as in torch."""


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """The optimizer of a run, not yet built; `kind` is the class that takes the options."""

    kind: type[Optimizer]
    make: MakeOptimizer
    adamw_names: tuple[str, ...] | None = None
    """Patterns of the parameters that Muon leaves to AdamW; None for other optimizers."""

    def tried(self) -> Optimizer:
        """Return the optimizer of a small matrix, as a test."""
        return self.make([{"params": [nn.Parameter(torch.zeros(2, 2))], "use_muon": self.adamw_names is not None}])

    def rehearse(self, name: str, device: torch.device | str, *, by_columns: bool = False) -> None:
        """Raise ConfigError if the optimizer cannot train or be resumed, tried on a few small parameters.

        With `by_columns`, matrices are stored column-major, as those cut by columns are.
        """
        shapes: list[list[tuple[int, ...]]] = [[(6, 4), (4,)], [(5,)]]
        settings: list[dict[str, Any]] = [{}, {"weight_decay": 0.0}]
        if self.adamw_names is not None:
            shapes, settings = [[(6, 4)], [(4,), (5, 2)]], [{"use_muon": True}, {"use_muon": False}]
        try:
            rehearse(name, self.make, settings, shapes, device, by_columns=by_columns)
        except (ValueError, TypeError, RuntimeError, AssertionError):  # it takes only matrices, or only one group
            rehearse(name, self.make, [{}], [[(6, 4)]], device, by_columns=by_columns)

    def settings_of(self, model: nn.Module) -> SettingsOf:
        """Return a function from a parameter to its group's settings, besides learning rate and weight decay."""
        if self.adamw_names is None:
            return lambda parameter: {}
        chosen = muons_parameters(model, self.adamw_names)
        return lambda parameter: {"use_muon": id(parameter) in chosen}


def choose(config: OptimizerConfig, device: str = "cpu") -> OptimizerChoice:
    """Return the configured optimizer, tried on a small parameter.

    Raises ConfigError if there is no such optimizer or option, or it refuses a value.
    """
    kind = _kind_of(config.name)
    options: dict[str, Any] = dict(config.options)
    if isinstance(betas := options.get("betas"), list):
        options["betas"] = tuple(betas)  # as torch has them in its state
    patterns = options.pop(ADAMW_NAMES, []) if config.name == "muon" else None
    if patterns is not None and not (isinstance(patterns, list) and all(isinstance(one, str) for one in patterns)):
        raise ConfigError(f"optimizer.options.{ADAMW_NAMES}: write a list of patterns, such as ['head.*']")
    _check_options(config.name, kind, options, [ADAMW_NAMES, "betas"] if patterns is not None else [])
    make, names = _maker(config, kind, options, {}), None if patterns is None else tuple(patterns)
    try:
        OptimizerChoice(kind, make, names).tried()
    except Exception as error:  # a user's code may raise anything
        kind_of = "" if isinstance(error, TypeError | ValueError | RuntimeError) else f"{type(error).__name__}: "
        raise ConfigError(f"optimizer.options: '{config.name}' refuses them: {kind_of}{error}") from error
    if config.name in _FUSED and device == "cuda":
        fused = _maker(config, kind, options, {"fused": True})
        make = fused if shows_no_cut(fused, {"use_muon": False}, device) else make
    return OptimizerChoice(kind, make, names)


def _kind_of(name: str) -> type[Optimizer]:
    if name in _NAMED:
        found = getattr(torch.optim, _NAMED[name], None)
        if found is None:
            raise ConfigError(f"optimizer.name: torch {torch.__version__} has no {_NAMED[name]}; update torch")
    else:
        found = import_named("optimizer.name", name)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(f"optimizer.name: '{name}' is no class of torch.optim.Optimizer's kind")
    return found


def _takes(kind: type[Optimizer], name: str) -> bool:
    parameters = inspect.signature(kind).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _check_options(name: str, kind: type[Optimizer], options: Mapping[str, object], others: list[str]) -> None:
    own = {"params", "lr", "weight_decay"}
    known = [*(key for key in inspect.signature(kind).parameters if key not in own), *others]
    unknown = [key for key in options if key not in known and (key in own or not _takes(kind, key))]
    has = f"; it has {', '.join(known)}"
    if unknown:
        raise ConfigError(
            *(f"optimizer.options: '{name}' has no '{key}'{did_you_mean(nearest(key, known), has)}" for key in unknown)
        )


def _maker(
    config: OptimizerConfig, kind: type[Optimizer], options: Mapping[str, Any], fused: Mapping[str, bool]
) -> MakeOptimizer:
    if config.name == "muon":
        muon, rates = dict(options), (config.lr, config.weight_decay)
        adamw = {"betas": muon.pop("betas", _BETAS), **fused}
        return lambda groups: MuonWithAdamW(groups, *rates, adamw=adamw, muon=dict(muon))
    takes_decay = _takes(kind, "weight_decay")
    if config.weight_decay and not takes_decay:
        raise ConfigError(f"optimizer.weight_decay: '{config.name}' takes none; set it to 0")
    both = {"lr": config.lr, **({"weight_decay": config.weight_decay} if takes_decay else {})}
    make: Callable[..., Optimizer] = kind
    return lambda groups: make(groups, **{**both, **fused, **options})


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
