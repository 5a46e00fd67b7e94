"""`data.mixture`: sources with weights, and what is wrong with them, each in its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elastic_train.config import sources
from elastic_train.config.datasets import names_of
from elastic_train.config.schema import Config, keys
from elastic_train.errors import ConfigError

TWO = [{"source": "data/wiki", "weight": 0.7}, {"source": "data/code", "weight": 0.3}]


def load(folder: Path, data: object, *arguments: str) -> Config:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"data": data}))
    return sources.load(path, environ={}, arguments=arguments)


def test_a_mixture_has_sources_and_whole_shares(tmp_path: Path) -> None:
    """In the order in which they are written; what is resolved reads back the same."""
    config = load(tmp_path, {"mixture": TWO})
    assert (config.data.sources, config.data.shares) == (("data/wiki", "data/code"), (7, 3))
    assert load(tmp_path, yaml.safe_load(config.to_yaml())["data"]) == config
    assert load(tmp_path, {"train": "x"}).data.shares is None


def test_an_element_can_be_set_from_the_command_line(tmp_path: Path) -> None:
    """By its number; or all of them in place of one training set."""
    config = load(tmp_path, {"mixture": TWO}, "--data.mixture.1.weight", "2.1", "--data.mixture.0.source=there")
    assert (config.data.sources, config.data.shares) == (("there", "data/code"), (1, 3))
    whole = load(tmp_path, {"train": "x"}, "--data.train", "null", "--data.mixture", "[{source: a, weight: 2}]")
    assert (whole.data.sources, whole.data.shares) == (("a",), (1,))


def test_an_element_that_the_file_does_not_have_cannot_be_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'data\.mixture': must be a list of sources.*an element that the file has"):
        load(tmp_path, {"train": "x"}, "--data.mixture.0.source", "data/wiki")


@pytest.mark.parametrize(
    ("data", "arguments", "expected"),
    [
        ({}, (), ["config.yaml:1", "'data'", "no training set is given", "mixture to several"]),
        ({"train": "x", "mixture": TWO}, (), ["train and mixture are both given"]),
        ({"mixture": []}, (), ["'data.mixture'", "at least 1 item"]),
        (
            {"mixture": [TWO[0], {"source": "b", "weight": 0}]},
            (),
            ["config.yaml:6", "'data.mixture.1.weight'", "given 0"],
        ),
        ({"mixture": [TWO[0], {"source": "b", "weight": -2}]}, (), ["'data.mixture.1.weight'", "greater than 0"]),
        ({"mixture": [TWO[0], {"source": "b", "weight": float("inf")}]}, (), ["'data.mixture.1.weight'", "finite"]),
        ({"mixture": [TWO[0], {"source": "b"}]}, (), ["'data.mixture.1.weight' is missing"]),
        (
            {"mixture": [{**TWO[0], "wieght": 1}]},
            (),
            ["unknown key 'data.mixture.0.wieght'", "'data.mixture[].weight'"],
        ),
        (
            {"mixture": [*TWO, {**TWO[0], "source": "data/./wiki/"}]},
            (),
            ["mixture.0 and mixture.2 are the same dataset"],
        ),
        (
            {"mixture": [{**TWO[0], "name": "a"}, {**TWO[1], "name": "a"}]},
            (),
            ["would be called 'a'", "give them names"],
        ),
        ({"mixture": [{**TWO[0], "name": "loss:x"}]}, (), ["'data.mixture.0.name'", "letters, digits"]),
        ({"mixture": TWO, "length_bucketing": True}, (), ["length_bucketing", "rows of all sources"]),
        (
            {"mixture": TWO},
            ("--data.mixture.1.weight", "0"),
            ["command line --data.mixture.1.weight", "greater than 0"],
        ),
        (
            {"train": "x"},
            ("--data.mixture", "[{source: a}]"),
            ["command line --data.mixture", "'data.mixture.0.weight'"],
        ),
    ],
)
def test_a_mistake_names_its_place(
    tmp_path: Path, data: object, arguments: tuple[str, ...], expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, data, *arguments)
    for text in expected:
        assert text in str(raised.value)


@pytest.mark.parametrize(
    ("places", "names"),
    [
        (["data/wiki", "data/code/"], ("wiki", "code")),
        (["data/wiki/train", "s3://all/code/train"], ("wiki/train", "code/train")),
        (["a/rows", "b/x/rows", {"source": "c/rows", "name": "mine"}], ("a/rows", "x/rows", "mine")),
        (["s3://bücher+mehr"], ("b_cher_mehr",)),
    ],
)
def test_a_source_is_called_by_as_much_of_its_path_as_tells_it_from_others(
    places: list[str | dict[str, str]], names: tuple[str, ...]
) -> None:
    """By what MLflow takes for a metric's name."""
    given = [{"source": place} if isinstance(place, str) else place for place in places]
    config = Config.model_validate({"data": {"mixture": [{**each, "weight": 1} for each in given]}})
    assert config.data.mixture is not None
    assert names_of(config.data.mixture) == names


def test_other_weights_are_another_run_and_other_folders_are_not(tmp_path: Path) -> None:
    """By which path a node reaches data is its own choice; in which shares they are taken decides every step."""
    base = load(tmp_path, {"mixture": TWO}).identity()
    moved = [{**each, "source": f"/mnt/{each['source']}"} for each in TWO]
    assert load(tmp_path, {"mixture": moved}).identity() == base
    assert load(tmp_path, {"mixture": [{**TWO[0], "weight": 70}, {**TWO[1], "weight": 30}]}).identity() == base
    assert load(tmp_path, {"mixture": TWO}, "--data.mixture.0.weight", "0.6").identity() != base
    assert load(tmp_path, {"mixture": TWO[::-1]}).identity() != base
    assert load(tmp_path, {"train": "data/wiki"}).identity() != base


def test_the_keys_of_a_source_are_listed() -> None:
    """With their meanings, as all others."""
    rows = {key: (kind, meaning) for key, kind, _, meaning in keys()}
    assert {"data.mixture", "data.mixture[].source", "data.mixture[].weight", "data.mixture[].name"} <= set(rows)
    assert rows["data.mixture"][0] == "list of section | null" and "share" in rows["data.mixture[].weight"][1]
