"""Every pair of features: the schema takes it or refuses it as the table says, and so do plans."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.combinations import FEATURES, RULES, Feature, refusals
from elastic_train.config.schema import Config
from elastic_train.planning.arithmetic.layouts import Layout
from tests.conftest import ROOT

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
    "reduction: fast": {"reduction": "fast"},
    "audit_lanes": {"run.audit_lanes": 4},
    "recompute: selective": {"parallel.recompute": "selective"},
}
"""How each is set, with what it needs."""


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


@pytest.mark.parametrize(("one", "other"), [pair for pair in combinations(FEATURES, 2) if settings(*pair)])
def test_the_schema_and_plans_take_a_pair_as_the_table_says(one: Feature, other: Feature) -> None:
    keys = settings(one, other)
    assert keys is not None
    found = refusals(features_of(keys))
    if found:
        with pytest.raises(ValueError, match=r"yet, since .*: set one back") as error:
            config_of(keys)
        assert all(refusal.why in str(error.value) for refusal in found)
    else:
        assert set(config_of(keys).features) == set(features_of(keys))
    if all(key.startswith("parallel.") for key in keys):
        layout = layout_of(keys)
        assert layout.runs_today == (not found and not (layout.sequence and layout.expert > 1))


def test_refusals_only_become_fewer() -> None:
    """Each is a promise that is not kept yet: whoever adds one has to say so here."""
    pairs = [pair for pair in combinations(FEATURES, 2) if refusals(pair)]
    assert len(pairs) <= 9


def test_the_page_of_limits_has_every_rule() -> None:
    page = (ROOT / "docs" / "limits.md").read_text()
    named = [[" or ".join(f"`{feature}`" for feature in features) for features in rule[:2]] for rule in RULES]
    table = "\n".join(f"| {ones} | {others} | {rule.why} |" for (ones, others), rule in zip(named, RULES, strict=True))
    assert table in page, f"docs/limits.md: replace the rows of the table of features by\n{table}"


def test_a_pair_is_named_once_whatever_comes_with_it(tmp_path: Path) -> None:
    """By key and value, with the reason."""
    keys = {"parallel.expert": 2, "parallel.context": 2, "parallel.shards": "optimizer"}
    with pytest.raises(ValueError, match=r"parallel.expert: 2 does not work with parallel.context: 2 yet") as error:
        config_of(keys)
    assert str(error.value).count("does not work with") == 1
