"""Which features work together: the one table that the schema, `plan`, advice and the limits page ask.

A feature is a setting other than its default, such as `tensor` for `parallel.tensor` above 1. What a feature *needs*
(`wire: bf16` needs gradients in shards) is said where its key is defined; here is what it does not work with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import combinations
from typing import Literal, NamedTuple, get_args

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
    "reduction: fast",
    "audit_lanes",
    "recompute: selective",
]
FEATURES: tuple[Feature, ...] = get_args(Feature)
_SHARDS: tuple[Feature, ...] = ("shards: optimizer", "shards: gradients", "shards: parameters")
_OFFLOAD: tuple[Feature, ...] = ("offload: optimizer", "offload: all")
_WIRE: tuple[Feature, ...] = ("wire: bf16",)


class Rule(NamedTuple):
    """No feature of `ones` works with any of `others`."""

    ones: tuple[Feature, ...]
    others: tuple[Feature, ...]
    why: str


RULES = (
    Rule(("expert",), ("context",), "a router weighs whole rows"),
    Rule(
        ("reduction: fast",),
        (*_SHARDS, *_OFFLOAD, *_WIRE, "audit_lanes"),
        "copies need the same bits, which it does not give",
    ),
    Rule(("recompute: selective",), ("compile",), "it chooses among operations, and a compiled block is one"),
)
_WHY: Mapping[frozenset[Feature], str] = {
    frozenset((one, other)): rule.why for rule in RULES for one in rule.ones for other in rule.others
}


class Refusal(NamedTuple):
    """Two features that do not work together, in the order of FEATURES."""

    one: Feature
    other: Feature
    why: str


def refusals(features: Collection[Feature]) -> list[Refusal]:
    """Return which of a configuration's features do not work together; none if it can run."""
    ordered = [feature for feature in FEATURES if feature in features]
    pairs = ((one, other, _WHY.get(frozenset((one, other)))) for one, other in combinations(ordered, 2))
    return [Refusal(one, other, why) for one, other, why in pairs if why is not None]


def sentences(found: Iterable[Refusal], as_set: Mapping[Feature, str]) -> list[str]:
    """Return a sentence for each refusal; `as_set` has the key and value that set each feature.

    A feature that comes with another (virtual stages with a pipeline) is not named twice for the same reason.
    """
    by_text = {(as_set[one], as_set[other]): why for one, other, why in found}
    return [f"{one} does not work with {other} yet, since {why}: set one back" for (one, other), why in by_text.items()]
