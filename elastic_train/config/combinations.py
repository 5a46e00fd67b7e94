"""The one table of combinations that cannot run, and the one function that answers whether one can.

A *feature* is a setting other than its default, such as `tensor` for `parallel.tensor` above 1. A *trait* is a fact
about the configuration, task, model, optimizer or device that some features do not work with. The schema asks with what
the configuration says, plan and start add the traits that they find; `tests.release.limits` writes docs/limits.md.
A trait that only a trial or a first step finds is refused where it is found, in the same words (`refused`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, get_args

from elastic_train.errors import ConfigError

Feature = Literal[
    "tensor",
    "sequence",
    "pipeline",
    "interleaved",
    "expert",
    "context",
    "shards: optimizer",
    "shards: gradients",
    "shards: parameters",
    "offload: optimizer",
    "offload: all",
    "wire: bf16",
    "compile",
    "fp8",
    "reduction: fast",
    "audit_lanes",
    "recompute: units",
    "recompute: selective",
]
FEATURES: tuple[Feature, ...] = get_args(Feature)
_SHARDS: tuple[Feature, ...] = ("shards: optimizer", "shards: gradients", "shards: parameters")
_OFFLOAD: tuple[Feature, ...] = ("offload: optimizer", "offload: all")
_RECOMPUTE: tuple[Feature, ...] = ("recompute: units", "recompute: selective")
_WIRE: tuple[Feature, ...] = ("wire: bf16",)
_PLACED: tuple[Feature, ...] = ("tensor", "sequence", "pipeline", "context")
_OFF: Mapping[Feature, str] = {
    "sequence": "parallel.sequence to false",
    "interleaved": "parallel.schedule to 1f1b",
    **dict.fromkeys(("tensor", "pipeline", "expert", "context"), "parallel.{} to 1"),
    **dict.fromkeys(_SHARDS, "parallel.shards to none"),
    **dict.fromkeys(_OFFLOAD, "parallel.offload to none"),
    **dict.fromkeys(_RECOMPUTE, "parallel.recompute to none"),
    "wire: bf16": "parallel.wire to exact",
    "compile": "compile to false on all nodes",
    "fp8": "precision to bf16",
    "reduction: fast": "reduction to canonical",
    "audit_lanes": "run.audit_lanes to null",
}
"""Settings that turn a feature off."""
_SAVING: Mapping[Feature, str] = {
    **dict.fromkeys(("tensor", "pipeline"), "parallel.shards"),
    **dict.fromkeys(("sequence", "context"), "parallel.recompute"),
}
"""The other key that saves the memory a feature is asked for."""

Trait = Literal[
    # of the configuration
    "`device: cpu`",
    "weights that stay on the GPU",
    "gradients that are exchanged as sums",
    "one tensor rank",
    "fewer lanes than stages",
    "fewer lanes than expert ranks",
    "more parts than a dimension has",
    # of the task, and sizes of its model
    "a task that does not place its modules so",
    "a task that replaces `loss` and not `run`",
    "a size that it does not divide",
    "fewer blocks than stages",
    "a model without experts",
    "a model without blocks",
    # of the model
    "experts outside `MixtureOfExperts`",
    "buffers that change",
    "models of transformers without a plan for it",
    "adapters but LoRA and `ln_tuning`",
    "prompts",
    "layers that depend on more than the last",
    "tokens mixed outside attention",
    "blocks with other results when computed again",
    "experts called outside their block",
    "blocks that do not run once each, in one order",
    "weights outside `state_dict`",
    "parameters on several devices",
    "unfit linear layers",
    # of the optimizer
    "optimizers that need whole parameters",
    # of the machine
    "no compiler for the model",
    "no float8 kernel",
]
TRAITS: tuple[Trait, ...] = get_args(Trait)


class Rule(NamedTuple):
    """No feature of `features` works with any of `others`, which are features or one trait.

    `way_out` is what ends the refusal other than doing without the features.
    """

    features: tuple[Feature, ...]
    others: tuple[Feature, ...] | tuple[Trait]
    why: str
    way_out: str = ""


RULES = (
    Rule(("expert",), ("context",), "experts get the tokens of whole lanes"),
    Rule(
        ("reduction: fast",),
        (*_SHARDS, *_OFFLOAD, *_WIRE, "audit_lanes"),
        "these need equal bits on all ranks, which fast sums do not give",
    ),
    Rule(
        ("recompute: selective",),
        ("compile",),
        "selective recomputation needs separate operations, but compile fuses a block into one",
        "parallel.recompute to units",
    ),
    Rule(_OFFLOAD, ("`device: cpu`",), "offload spares a GPU's memory", "device to auto or cuda"),
    Rule(
        ("offload: all",),
        ("weights that stay on the GPU",),
        "weights can be in host memory only if each pass gathers them",
        "parallel.shards to parameters (with as many copies as ranks, each holds everything), or parallel.offload "
        "to optimizer",
    ),
    Rule(
        ("wire: bf16",),
        ("gradients that are exchanged as sums",),
        "the bits would depend on the world; only a lane's own gradient can be rounded",
        "parallel.shards to gradients or parameters",
    ),
    Rule(("sequence",), ("one tensor rank",), "tensor ranks share the tokens", "parallel.tensor to 2 or more"),
    Rule(
        ("pipeline",),
        ("fewer lanes than stages",),
        "stages compute different lanes at a time",
        "make batch.micro_batch smaller, or use fewer stages",
    ),
    Rule(
        ("expert",),
        ("fewer lanes than expert ranks",),
        "each rank computes different lanes",
        "make batch.micro_batch smaller, or spread experts over fewer ranks",
    ),
    Rule(
        ("tensor", "expert"),
        ("more parts than a dimension has",),
        "a dimension is cut at fixed places",
        "to less",
    ),
    Rule(_PLACED, ("a task that does not place its modules so",), "the task has to say which rank computes what"),
    Rule(
        ("pipeline", "context"),
        ("a task that replaces `loss` and not `run`",),
        "`run` is called in place of `loss`",
        "replace `run`, which returns the same for a `Piece()`",
    ),
    Rule(
        ("tensor", "sequence", "expert"),
        ("a size that it does not divide",),
        "all ranks have equal parts",
        "change either number",
    ),
    Rule(
        ("pipeline",),
        ("fewer blocks than stages",),
        "each stage, or each of its chunks, needs a block",
        "use fewer stages, or fewer chunks (parallel.schedule: interleaved:N)",
    ),
    Rule(
        ("expert",),
        ("a model without experts",),
        "there is nothing to spread",
        "give the package's own decoder some (task.params.model.experts)",
    ),
    Rule(_RECOMPUTE, ("a model without blocks",), "blocks, the entries of an nn.ModuleList, are computed again"),
    Rule(
        ("tensor", "expert"),
        ("experts outside `MixtureOfExperts`",),
        "tensor ranks add what a mixture's experts return",
        "put them into a MixtureOfExperts",
    ),
    Rule(
        ("pipeline", "context"),
        ("buffers that change",),
        "ranks that compute a lane together would have different values",
        "register what is a cache with persistent=False",
    ),
    Rule(
        ("tensor", "sequence", "pipeline"),
        ("models of transformers without a plan for it",),
        "the plan says how the model is cut",
    ),
    Rule(("tensor",), ("adapters but LoRA and `ln_tuning`",), "ranks cannot hold parts of others"),
    Rule(("context",), ("prompts",), "they lengthen rows outside the model's layers"),
    Rule(
        ("pipeline",),
        ("layers that depend on more than the last",),
        "stages hand over only what their last layer returns",
    ),
    Rule(("context",), ("tokens mixed outside attention",), "ranks gather keys and values, and nothing else"),
    Rule(
        _RECOMPUTE,
        ("blocks with other results when computed again",),
        "the block changes a parameter, or something outside itself, in its forward pass",
        "keep what changes in buffers, tensors, numbers, lists or dicts of its modules",
    ),
    Rule(_RECOMPUTE, ("experts called outside their block",), "the block is what is computed again", "call the block"),
    Rule(
        ("shards: parameters",),
        ("blocks that do not run once each, in one order",),
        "a rank has a block's weights only while the block runs",
        "to gradients",
    ),
    Rule(
        ("shards: parameters",),
        ("weights outside `state_dict`",),
        "a commit may have the only copy of trained weights",
        "to gradients, or let state_dict return them",
    ),
    Rule((*_SHARDS, *_OFFLOAD), ("parameters on several devices",), "shares are of one device", "put all on one"),
    Rule(
        ("tensor", "expert"),
        ("optimizers that need whole parameters",),
        "each rank has a part of the parameter (parallel.shards and pipeline keep it whole)",
        "optimizer.name to adamw (without fused on CPUs)",
    ),
    Rule(
        ("compile",),
        ("no compiler for the model",),
        "every node compiles the model's blocks before the first step",
        "install g++ (or name a compiler by CXX), and on GPUs Triton",
    ),
    Rule(
        ("fp8",),
        ("unfit linear layers",),
        "float8 is for the `nn.Linear`s of blocks, the entries of an nn.ModuleList, with sizes that 16 divides",
    ),
    Rule(("fp8",), ("no float8 kernel",), "all ranks compute the same products of scaled rows"),
)
SIZES = TRAITS[: TRAITS.index("experts outside `MixtureOfExperts`")]
"""Traits of the configuration and the task, and of numbers in them; those after these are of models and what trains
them."""


class Found(NamedTuple):
    """A trait that was found: `what`, by key or name, has it. `of` is the one feature it was found for, if not all."""

    trait: Trait
    what: str
    of: Feature | None = None


def refusals(asked: Mapping[Feature, str], found: Iterable[Found] = ()) -> list[str]:
    """Return a message for each reason why these features cannot run; none if they can.

    `asked` has the key and value that set each feature, and `found` the traits that are known.
    """
    return list(dict.fromkeys(_refusals(asked, list(found))))


def _refusals(asked: Mapping[Feature, str], found: list[Found]) -> Iterator[str]:
    for rule in RULES:
        features = [feature for feature in rule.features if feature in asked]
        others = [feature for feature in FEATURES if feature in rule.others and feature in asked]
        if features and others:
            yield _message(rule, asked, features, [asked[feature] for feature in others], _without(others))
        for one in found:
            of = [feature for feature in features if one.of in (None, feature)]
            if of and one.trait in rule.others:
                yield _message(rule, asked, of, [one.what])


def check(asked: Mapping[Feature, str], found: Iterable[Found]) -> None:
    """Raise ConfigError, with every reason, if these features cannot run with what was found."""
    if wrong := refusals(asked, found):
        raise ConfigError(*wrong)


def refused(trait: Trait, what: str, of: Feature | None = None) -> ConfigError:
    """Return the error for a trait that a trial, or a first step, has found where a feature needs its absence."""
    keys = {feature: off.format(feature).split()[0] for feature, off in _OFF.items()}
    [rule] = [rule for rule in RULES if trait in rule.others]
    return ConfigError(*refusals({feature: keys[feature] for feature in rule.features}, [Found(trait, what, of)]))


def _message(
    rule: Rule, asked: Mapping[Feature, str], features: list[Feature], others: list[str], or_else: str = ""
) -> str:
    keys = list(dict.fromkeys(asked[feature] for feature in features))
    verb = "does" if len(keys) == 1 else "do"
    text = f"{_listed(keys)} {verb} not work with {_listed(list(dict.fromkeys(others)))}, since {rule.why}: set "
    text += ", or ".join(filter(None, (_without(features), or_else, rule.way_out)))
    saving = dict.fromkeys(_SAVING[feature] for feature in features if feature in _SAVING)
    if not saving or set(rule.features) & {*_SHARDS, *_RECOMPUTE}:
        return text
    return f"{text}. To save memory, use {_listed(list(saving))}"


def _without(features: list[Feature]) -> str:
    return _listed(list(dict.fromkeys(_OFF[feature].format(feature) for feature in features)))


def _listed(words: list[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
