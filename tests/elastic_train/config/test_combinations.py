"""The table of combinations: the schema and plans take or refuse every pair as it says, and every trait is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import pytest

from elastic_train.config.combinations import (
    FEATURES,
    RULES,
    SIZES,
    TRAITS,
    Feature,
    Found,
    Trait,
    check,
    refusals,
    refused,
)
from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError
from elastic_train.planning.arithmetic.layouts import Layout
from tests.release import limits

SET: Mapping[Feature, Mapping[str, Any]] = {
    "tensor": {"parallel.tensor": 2},
    "sequence": {"parallel.tensor": 2, "parallel.sequence": True},
    "pipeline": {"parallel.pipeline": 2},
    "interleaved": {"parallel.pipeline": 2, "parallel.schedule": "interleaved"},
    "expert": {"parallel.expert": 2},
    "context": {"parallel.context": 2},
    "shards: optimizer": {"parallel.shards": "optimizer"},
    "shards: gradients": {"parallel.shards": "gradients"},
    "shards: parameters": {"parallel.shards": "parameters"},
    "offload: optimizer": {"parallel.offload": "optimizer"},
    "offload: all": {"parallel.shards": "parameters", "parallel.offload": "all"},
    "wire: bf16": {"parallel.shards": "gradients", "parallel.wire": "bf16"},
    "compile": {"compile": True},
    "fp8": {"precision": "fp8"},
    "reduction: fast": {"reduction": "fast"},
    "audit_lanes": {"run.audit_lanes": 4},
    "recompute: units": {"parallel.recompute": "units"},
    "recompute: selective": {"parallel.recompute": "selective"},
}
"""Keys that set each feature, and those that it needs."""


def settings(*features: Feature) -> Mapping[str, Any] | None:
    """Return what sets some features, None if one key would have two values."""
    found: dict[str, Any] = {}
    for feature in features:
        for key, value in SET[feature].items():
            if found.setdefault(key, value) != value:
                return None
    return found


def config_of(keys: Mapping[str, Any]) -> Config:
    """Return a configuration with those keys, or raise ValueError."""
    content: dict[str, Any] = {"data": {"train": "somewhere"}, "batch": {"global_batch": 64, "micro_batch": 4}}
    for key, value in keys.items():
        *section, name = key.split(".")
        (content.setdefault(section[0], {}) if section else content)[name] = value
    return Config.model_validate(content)


def layout_of(keys: Mapping[str, Any]) -> Layout:
    """Return the layout of a plan with the keys of `parallel`."""
    own = {key.removeprefix("parallel."): value for key, value in keys.items() if key.startswith("parallel.")}
    return Layout(interleave=2 if own.pop("schedule", None) else 1, **own)


def features_of(keys: Mapping[str, Any]) -> list[Feature]:
    """Return the features that keys set."""
    return [feature for feature in FEATURES if SET[feature].items() <= keys.items()]


def named(features: Iterable[Feature]) -> dict[Feature, str]:
    return {feature: feature for feature in features}


@pytest.mark.parametrize("one", FEATURES)
def test_the_schema_and_plans_take_a_pair_as_the_table_says(one: Feature) -> None:
    for other in FEATURES[FEATURES.index(one) + 1 :]:
        if (keys := settings(one, other)) is None:
            continue
        found = refusals(named(features_of(keys)))
        if found:
            with pytest.raises(ValueError, match=r"do(es)? not work with .*, since .*: set .*, or ") as error:
                config_of(keys)
            assert "yet" not in str(error.value)
        else:
            assert set(config_of(keys).features) == set(features_of(keys)), (one, other)
        if all(key.startswith("parallel.") for key in keys):
            layout = layout_of(keys)
            assert layout.runs_today is not bool(found), (one, other)


def test_refusals_only_become_fewer() -> None:
    """Each is a promise that is not kept: whoever adds one has to say so here."""
    pairs = [pair for pair in combinations(FEATURES, 2) if refusals(named(pair))]
    of_models = TRAITS[len(SIZES) : TRAITS.index("optimizers that need whole parameters")]
    by_model = {rule.others: rule for rule in RULES if set(rule.others) & set(of_models)}
    assert len(pairs) <= 9 and len(by_model) <= 13
    assert not [trait for trait in TRAITS if "GPU" in trait and trait not in SIZES]


@pytest.mark.parametrize("trait", TRAITS)
def test_a_trait_is_refused_with_what_has_it_and_the_way_out(trait: Trait) -> None:
    """By one row, for no feature that is not in it."""
    [rule] = [rule for rule in RULES if trait in rule.others]
    others = [feature for feature in FEATURES if feature not in rule.features and not feature.startswith("reduction")]
    assert not any("this one" in message for message in refusals(named(others), [Found(trait, "this one")]))
    message = str(refused(trait, "this one"))
    assert f" not work with this one, since {rule.why}: set " in message and rule.way_out in message
    for feature in rule.features:
        assert refusals({feature: "its key: 2"}, [Found(trait, "this one", feature)])[0].startswith("its key: 2 does ")
        other: Feature = "compile" if feature != "compile" else "tensor"
        assert not refusals({feature: "its key: 2"}, [Found(trait, "this one", other)])


def test_all_reasons_are_given_at_once() -> None:
    found = [
        Found("prompts", "a prompt"),
        Found("layers that depend on more than the last", "a layer"),
        Found("buffers that change", "unasked", "expert"),
    ]
    with pytest.raises(ConfigError) as error:
        check({"context": "parallel.context: 2", "pipeline": "parallel.pipeline: 3"}, found)
    first, second = error.value.problems
    assert first == (
        "parallel.context: 2 does not work with a prompt, since they lengthen rows outside the model's layers: set "
        "parallel.context to 1. To save memory, use parallel.recompute"
    )
    assert second.startswith("parallel.pipeline: 3 does not work with a layer, since")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"parallel.pipeline": 6, "batch.global_batch": 20},
            "pipeline: 6 does not work with 5 lanes (batch.global_batch 20 /",
        ),
        ({"parallel.expert": 2, "batch.global_batch": 4}, "parallel.expert: 2 does not work with 1 lane (batch.global"),
        (
            {"parallel.expert": 2, "parallel.pipeline": 2, "batch.global_batch": 12},
            "parallel.pipeline: 2 does not work with 1 lane for each of 2 expert ranks",
        ),
        (
            {"parallel.offload": "optimizer", "device": "cpu"},
            "parallel.offload: optimizer does not work with device: cpu",
        ),
        ({"parallel.offload": "all"}, "parallel.offload: all does not work with parallel.shards: none, since"),
        ({"parallel.wire": "bf16"}, "parallel.wire: bf16 does not work with parallel.shards: none, since"),
        ({"parallel.sequence": True}, "parallel.sequence: true does not work with parallel.tensor: 1, since"),
    ],
)
def test_a_configuration_says_what_its_own_values_rule_out(keys: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config_of(keys)


def test_the_page_of_limits_has_the_lists_of_the_table() -> None:
    page = limits.PAGE.read_text()
    assert limits.with_lists(page) == page, "run python -m tests.release.limits"
    assert limits.with_lists(page.replace("buffers that change", "")) == page


def test_a_pair_is_named_once_whatever_comes_with_it() -> None:
    """By key and value, with the reason."""
    keys = {"parallel.expert": 2, "parallel.context": 2, "parallel.shards": "optimizer"}
    with pytest.raises(ValueError, match=r"parallel.expert: 2 does not work with parallel.context: 2, since") as error:
        config_of(keys)
    assert str(error.value).count("does not work with") == 1
