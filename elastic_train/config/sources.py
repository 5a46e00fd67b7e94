"""Where a configuration's values come from, and every mistake in them reported at once, with its place.

Later over earlier: the YAML file, the environment (`ELASTIC_TRAIN__BATCH__MICRO_BATCH=8`), the command line
(`--batch.micro-batch 8`), or a program's own values. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError

from elastic_train.config import yaml12
from elastic_train.config.schema import Config, nearest_key
from elastic_train.config.section import Value
from elastic_train.config.yaml12 import NOT_YAML
from elastic_train.errors import ConfigError
from elastic_train.system.wording import did_you_mean

Tree = dict[str, Value]
ENV_PREFIX = "ELASTIC_TRAIN__"


def variable_of(key: str) -> str:
    """Return the environment variable that sets a dotted key."""
    return ENV_PREFIX + key.upper().replace(".", "__")


def load_config(path: str | Path, overrides: Mapping[str, Value] | None = None) -> Config:
    """Read and check a configuration as the command does.

    Over the YAML file at `path` come the environment's ELASTIC_TRAIN__* variables, and over these `overrides`: values
    by dotted key, such as {"batch.micro_batch": 8}. Raises ConfigError with every problem found, each with its place.
    """
    return load(path, environ=os.environ, overrides=overrides)


def load(
    path: str | Path,
    *,
    environ: Mapping[str, str],
    arguments: Sequence[str] = (),
    overrides: Mapping[str, Value] | None = None,
) -> Config:
    """Read, overlay and check a configuration; raise ConfigError with every problem found."""
    problems: list[str] = []
    tree, lines = _read_yaml(Path(path), problems)
    sources = dict.fromkeys(_leaves(tree), str(path))
    later = [*_from_environment(environ, problems), *_from_arguments(arguments, problems), *_from_values(overrides)]
    for source, key, value in later:
        _put(tree, key, value)
        sources = {name: of for name, of in sources.items() if not name.startswith(f"{key}.")} | {key: source}
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += [_explain(item, sources, lines, str(path)) for item in error.errors()]
    if problems:
        raise ConfigError(*problems)
    return config


def _read_yaml(path: Path, problems: list[str]) -> tuple[Tree, dict[str, int]]:
    try:
        text = path.read_text(encoding="utf-8")
        node, tree = yaml12.compose(text), yaml12.parse(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not valid UTF-8 ({error.reason}); save the file as UTF-8") from error
    except NOT_YAML as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping with keys such as 'run:', 'data:' and 'batch:'")
    lines: dict[str, int] = {}
    _note_lines(node, "", lines, str(path), problems)
    return tree, lines


def _note_lines(node: yaml.Node | None, prefix: str, lines: dict[str, int], path: str, problems: list[str]) -> None:
    """Note the line of every key; a duplicate is a problem, since YAML's parser would silently drop the first."""
    for number, element in enumerate(node.value) if isinstance(node, yaml.SequenceNode) else ():
        lines[f"{prefix}{number}"] = element.start_mark.line + 1
        _note_lines(element, f"{prefix}{number}.", lines, path, problems)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in lines:
            problems.append(f"{path}:{line}: duplicate key '{name}' (first on line {lines[name]}); merge the two")
        lines[name] = line
        _note_lines(value, f"{name}.", lines, path, problems)


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> Iterator[tuple[str, str, Value]]:
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX):
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            try:
                value = yaml12.parse(environ[name])
            except NOT_YAML as error:
                problems.append(_not_yaml(f"environment {name}", environ[name], error))
            else:
                yield f"environment {name}", key, value


def _from_arguments(arguments: Sequence[str], problems: list[str]) -> Iterator[tuple[str, str, Value]]:
    """Read `--a.b-c value` and `--a.b-c=value`; values are YAML, such as null, true, 1e-3 and [1, 2]."""
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        name, has_value, text = token.partition("=")
        if not name.startswith("--"):
            problems.append(f"command line: '{token}' is not an option; write --section.key value")
            continue
        if not has_value:
            if not rest or rest[0].startswith("--"):
                problems.append(f"command line: {name} needs a value")
                continue
            text = rest.pop(0)
        try:
            value = yaml12.parse(text)
        except NOT_YAML as error:
            problems.append(_not_yaml(f"command line {name}", text, error))
        else:
            yield f"command line {name}", name[2:].replace("-", "_"), value


def _from_values(overrides: Mapping[str, Value] | None) -> Iterator[tuple[str, str, Value]]:
    """Take values as they are, paths as text."""
    for key, value in (overrides or {}).items():
        yield "overrides", key, os.fspath(value) if isinstance(value, os.PathLike) else value


def _not_yaml(source: str, text: str, error: Exception) -> str:
    why = getattr(error, "problem", None) or str(error)
    return f"{source}: {text!r} is not valid YAML ({why}); to pass it as a string, quote it: \"'{text}'\""


def _put(tree: Tree, key: str, value: Value) -> None:
    """Set a value; where there is a list, a key's next part is the number of one of its elements, if it has that."""
    first, _, rest = key.partition(".")
    if not rest:
        tree[first] = value
        return
    below = tree.get(first)
    number = rest.partition(".")[0]
    if isinstance(below, list) and number.isdecimal() and int(number) < len(below):
        elements: Tree = {number: below[int(number)]}
        _put(elements, rest, value)
        tree[first] = [*below[: int(number)], elements[number], *below[int(number) + 1 :]]
        return
    if not isinstance(below, dict):
        below = tree[first] = {}
    _put(below, rest, value)


def _leaves(tree: Value, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all values, of sections, and of lists' elements by their numbers."""
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield f"{prefix}{name}"
        yield from _leaves(value, f"{prefix}{name}.")


_WANT_MAPPING = ("dict_type", "model_type", "model_attributes_type")
_WANT_LIST = ("tuple_type", "list_type")


def _explain(item: Mapping[str, object], sources: Mapping[str, str], lines: Mapping[str, int], path: str) -> str:
    """Turn one pydantic error into a line: where, which key, what is wrong, what to do."""
    location = item["loc"]
    assert isinstance(location, tuple)
    location = tuple(part for part in location if "[" not in str(part))  # which of several types was tried
    key = ".".join(str(part) for part in location)
    above = (".".join(map(str, location[:end])) for end in range(len(location), 0, -1))
    where = next((sources[name] for name in above if name in sources), path)
    if where == path and key in lines:
        where = f"{path}:{lines[key]}"
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key '{key}'{did_you_mean(nearest_key(key))}"
    if item["type"] == "missing":
        return f"{where}: '{key}' is missing; it has no default"
    if item["type"] in _WANT_MAPPING:
        return (
            f"{where}: '{key}' has keys of its own: write {{KEY: VALUE}} or --{key}.KEY VALUE, given {item['input']!r}"
        )
    if item["type"] in _WANT_LIST:
        return f"{where}: '{key}' takes a list: write [A, B], given {item['input']!r}"
    message = str(item["msg"]).removeprefix("Value error, ")
    given = "" if isinstance(item["input"], dict | BaseModel) else f", given {item['input']!r}"
    return f"{where}: '{key}': {message}{given}" if key else f"{where}: {message}"
