"""Read a configuration's values from their sources, and report every mistake at once, with its place.

Later over earlier: the YAML file, the environment (`ELASTIC_TRAIN__BATCH__MICRO_BATCH=8`), the command line
(`--batch.micro-batch 8`; the last of a key's values counts, and that is said), or a program's own values. An unknown
key is an error that names the nearest known one.

A file is YAML 1.2. In the environment and on the command line a key of type text takes its text to the letter, except
that `null` clears a key that may be null. Other keys take YAML. Where the type is left open (`task.params`), a text
that is no number, boolean, null, quoted text, list or mapping is taken to the letter.
"""

from __future__ import annotations

import functools
import os
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from elastic_train.config import yaml12
from elastic_train.config.schema import Config, keys
from elastic_train.config.section import Value, alternatives, below, scalars_of
from elastic_train.config.yaml12 import NOT_YAML
from elastic_train.errors import ConfigError
from elastic_train.system.wording import did_you_mean, nearest

Tree = dict[str, Value]
ENV_PREFIX = "ELASTIC_TRAIN__"
_TWICE = "duplicate key"


def variable_of(key: str) -> str:
    """Return the environment variable that sets a dotted key."""
    return ENV_PREFIX + key.upper().replace(".", "__")


def variables_in(path: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the keys that the environment sets over a file, and their texts."""
    try:
        tree = _read_yaml(path, [])[0]
    except ConfigError:
        return {}  # `load` says it
    return {key_of_variable(name, tree): environ[name] for name in sorted(environ) if name.startswith(ENV_PREFIX)}


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
    later = [
        *_from_environment(environ, tree, problems),
        *_from_arguments(arguments, problems),
        *_from_values(overrides),
    ]
    for source, key, value in later:
        _put(tree, key, value)
        sources = {name: of for name, of in sources.items() if not name.startswith(f"{key}.")} | {key: source}
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += [_explain(item, sources, lines, str(path)) for item in _by_key(error.errors())]
    if problems:
        raise ConfigError(*problems)
    return config


def as_argument(key: str, value: Value) -> str:
    """Return the argument, `--key=value`, from which `load` reads this value; ConfigError if none says it."""
    kind = _kind_of(key)
    if value == "null" and _may_be_null(kind):
        raise ConfigError(f"'{key}': the text null can be given in a file alone, in quotes")
    return f"--{key}={value if isinstance(value, str) and _is_text(kind) else yaml12.write_flow(value)}"


def _read_yaml(path: Path, problems: list[str]) -> tuple[Tree, dict[str, int]]:
    try:
        text = path.read_text(encoding="utf-8")
        node, tree = yaml12.compose(text), yaml12.parse(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{_remedy(path)}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not valid UTF-8 ({error.reason}); save the file as UTF-8") from error
    except NOT_YAML as error:
        why = str(error).replace('"<unicode string>"', path.name)
        raise ConfigError(f"{path}: not valid YAML: {why}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping with keys such as 'run:', 'data:' and 'batch:'")
    lines: dict[str, int] = {}
    for key, line, problem in _walk(node, "", Config):
        if problem is not None:
            first = f" (first on line {lines[key]}); merge the two" if problem.startswith(_TWICE) else ""
            problems.append(f"{path}:{line}: {problem}{first}")
        lines[key] = line
    return tree, lines


def _remedy(path: Path) -> str:
    """Return what to do about a configuration that cannot be read, with a separator before it."""
    if path.is_dir():
        near = sorted(path.glob("*.yaml"))
        return f"; name a file in it{f', such as {near[0]}' if near else ''}"
    if path.exists():
        return "; let this user read it"
    beside = sorted(each.name for each in path.absolute().parent.glob("*.yaml"))
    meant = nearest(path.name, beside)
    known = f"; did you mean {meant}?" if meant else f"; there are {', '.join(beside[:5])}" if beside else ""
    where = f" in {path.absolute().parent}" if path.absolute().parent.is_dir() else ""
    return f"{where}{known or '; `elastic-train init text FOLDER` writes a configuration'}"


def _walk(node: yaml.Node | None, key: str, kind: object) -> Iterator[tuple[str, int, str | None]]:
    """Yield key and line of everything in a tree, and what is wrong with it if it might be misread.

    Of two equal keys a parser would drop the first in silence.
    """
    if isinstance(node, yaml.ScalarNode):
        why = yaml12.misread(node.value) if not node.style and not _is_text(kind) else None
        if why is not None:
            said = f"{why}; for a text, write it in quotes, given {node.value!r}"
            yield key, node.start_mark.line + 1, f"'{key}': {said}" if key else said
        return
    prefix, seen = f"{key}." if key else "", set[str]()
    for number, element in enumerate(node.value) if isinstance(node, yaml.SequenceNode) else ():
        yield f"{prefix}{number}", element.start_mark.line + 1, None
        yield from _walk(element, f"{prefix}{number}", below(kind, f"{number}"))
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        each = f"{prefix}{name.value}"
        problem: str | None = None
        if name.value in seen:
            problem = f"{_TWICE} '{each}'"
        elif not name.style and name.value == "<<":
            problem = f"'{each}': YAML 1.2 has no merge keys; write out what it brings"
        seen.add(name.value)
        yield each, name.start_mark.line + 1, problem
        yield from _walk(value, each, below(kind, name.value))


def _from_environment(environ: Mapping[str, str], tree: Tree, problems: list[str]) -> Iterator[tuple[str, str, Value]]:
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX):
            key = key_of_variable(name, tree)
            yield from _read_value(f"environment {name}", key, environ[name], problems)


def key_of_variable(name: str, tree: Value = None) -> str:
    """Return the key that a variable sets; below `task.params` it is spelled as in the tree, or else as the variable.

    What is of capitals alone, as variables are, is a key of small letters unless the tree has another.
    """
    parts, kind = name.removeprefix(ENV_PREFIX).split("__"), cast(object, Config)
    for number, part in enumerate(parts):
        is_free = kind is object or get_origin(kind) is dict
        known = [f"{each}" for each in tree if f"{each}".lower() == part.lower()] if isinstance(tree, dict) else []
        spelled = part.lower() if part == part.upper() or not is_free else part
        parts[number] = known[0] if is_free and len(known) == 1 else spelled
        kind = below(kind, parts[number])
        tree = tree.get(parts[number]) if isinstance(tree, dict) else None
    return ".".join(parts)


def _from_arguments(arguments: Sequence[str], problems: list[str]) -> Iterator[tuple[str, str, Value]]:
    """Read `--a.b-c value` and `--a.b-c=value`."""
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        name, has_value, text = token.partition("=")
        if not name.startswith("--"):
            problems.append(f"command line: '{token}' is not an option; write --section.key value")
            continue
        if not has_value:
            if not rest or rest[0].startswith("--"):
                problems.append(f"command line: {name} needs a value (one that begins with --: {name}=VALUE)")
                continue
            text = rest.pop(0)
        yield from _read_value(f"command line {name}", _key_of(name[2:]), text, problems)


def given_twice(arguments: Sequence[str]) -> list[str]:
    """Say which values of a command line, as it was read, count no more because a later one sets the same key."""
    given, said = dict[str, Value](), list[str]()
    for _, key, value in _from_arguments(arguments, []):
        for name in [name for name in given if f"{name}.".startswith(f"{key}.")]:
            if given[name] != value:
                said.append(
                    f"command line: '{name}' is given as {given[name]!r}, and then '{key}' as {value!r}, which counts"
                )
            del given[name]
        given[key] = value
    return said


def _key_of(option: str) -> str:
    """Return the key that an option names, '-' for '_'; what is deeper than a name of `task.params` stays as it is."""
    parts, kind = option.split("."), cast(object, Config)
    for number, part in enumerate(parts):
        if kind is object:
            break
        parts[number] = part.replace("-", "_")
        kind = below(kind, parts[number])
    return ".".join(parts)


def _kind_of(key: str) -> object:
    return functools.reduce(below, key.split("."), cast(object, Config))


def _is_text(kind: object) -> bool:
    return scalars_of(kind) == {str} and not _takes_collection(kind)


def _takes_collection(kind: object) -> bool:
    is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
    return is_section or get_origin(kind) in (tuple, dict) or any(map(_takes_collection, alternatives(kind)))


def _may_be_null(kind: object) -> bool:
    return types.NoneType in get_args(kind)


def _read_value(source: str, key: str, text: str, problems: list[str]) -> Iterator[tuple[str, str, Value]]:
    """Yield source, key and value of a text, read by the key's type; add a problem for one that cannot be read so."""
    kind = _kind_of(key)
    if kind is None or _is_text(kind):
        yield source, key, None if text == "null" and _may_be_null(kind) else text
        return
    is_yaml = text.lstrip().startswith(("[", "{", "'", '"')) if kind is object else _takes_collection(kind)
    try:
        yield source, key, _parsed(text, kind) if is_yaml else _plain(text if kind is object else text.strip())
    except NOT_YAML as error:
        why = getattr(error, "problem", None) or str(error)
        quoted = "'" + text.replace("'", "''") + "'"
        hint = f'; to pass it as a text, quote it: "{quoted}"' if kind is object else ""
        problems.append(f"{source}: {text!r} is not valid YAML: {why}{hint}")


def _plain(text: str) -> Value:
    """Return what a text is as a whole: a number, boolean, null, else the text; ValueError if it might be misread."""
    if (why := yaml12.misread(text)) is not None:
        raise ValueError(why)
    return yaml12.scalar(text) if text else text


def _parsed(text: str, kind: object) -> Value:
    """Return the value of a YAML text; ValueError if part of it would be dropped, or might be misread."""
    node = yaml12.compose(text)
    if node is not None and text[node.end_mark.index :].strip():
        raise ValueError(f"{text[node.end_mark.index :].strip()!r} follows its end")
    if (problem := next((problem for _, _, problem in _walk(node, "", kind) if problem), None)) is not None:
        raise ValueError(problem)
    return yaml12.parse(text)


def _from_values(overrides: Mapping[str, Value] | None) -> Iterator[tuple[str, str, Value]]:
    """Take values as they are, paths as text."""
    for key, value in (overrides or {}).items():
        yield "overrides", key, os.fspath(value) if isinstance(value, os.PathLike) else value


def _put(tree: Tree, key: str, value: Value) -> None:
    """Set a value; where there is a list, a key's next part is the number of one of its elements, if it has that."""
    first, _, rest = key.partition(".")
    first = next((name for name in tree if str(name) == first), first)  # a file's mapping may have numbers as keys
    if not rest:
        tree[first] = value
        return
    inner = tree.get(first)
    number = rest.partition(".")[0]
    if isinstance(inner, list) and number.isdecimal() and int(number) < len(inner):
        elements: Tree = {number: inner[int(number)]}
        _put(elements, rest, value)
        tree[first] = [*inner[: int(number)], elements[number], *inner[int(number) + 1 :]]
        return
    if not isinstance(inner, dict):
        inner = tree[first] = {}
    _put(inner, rest, value)


def _leaves(tree: Value, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all values, of sections, and of lists' elements by their numbers."""
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield f"{prefix}{name}"
        yield from _leaves(value, f"{prefix}{name}.")


_TRIED = "Input should be "


def _by_key(items: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield one error of those of a key that takes values of several types."""
    found: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for item in items:
        # without the name of the type that was tried
        location = tuple(part for part in item["loc"] if "[" not in str(part) and "constrained-" not in str(part))
        found.setdefault(location, []).append({**item, "loc": location})
    for first, *others in found.values():
        told = [f"{_TRIED}a list, as [A, B]" if one["type"] in _WANT_LIST else one["msg"] for one in (first, *others)]
        rest = (message.removeprefix(_TRIED) for message in told[1:])
        yield {**first, "type": "union", "msg": ", or ".join([told[0], *rest])} if others else first


_WANT_MAPPING = ("dict_type", "model_type", "model_attributes_type")
_WANT_LIST = ("tuple_type", "list_type")


def _explain(item: Mapping[str, object], sources: Mapping[str, str], lines: Mapping[str, int], path: str) -> str:
    """Turn one pydantic error into a line: where, which key, what is wrong, what to do."""
    location = item["loc"]
    assert isinstance(location, tuple)
    key = ".".join(str(part) for part in location)
    above = (".".join(map(str, location[:end])) for end in range(len(location), 0, -1))
    set_below = (source for name, source in sources.items() if name.startswith(f"{key}."))
    where = next((sources[name] for name in above if name in sources), next(set_below, path))
    if where == path and key in lines:
        where = f"{path}:{lines[key]}"
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key '{key}'{did_you_mean(nearest_key(key), '; `elastic-train keys` lists all')}"
    if item["type"] == "missing":
        return f"{where}: '{key}' is missing; it has no default"
    if item["type"] in _WANT_MAPPING:
        return (
            f"{where}: '{key}' is a section with keys: write {{KEY: VALUE}} or --{key}.KEY VALUE, "
            f"given {item['input']!r}"
        )
    if item["type"] in _WANT_LIST:
        return f"{where}: '{key}' takes a list: write [A, B], given {item['input']!r}"
    message = str(item["msg"]).removeprefix("Value error, ")
    given = "" if isinstance(item["input"], dict | BaseModel) else f", given {item['input']!r}"
    message, meant, name = message.partition("; did you mean ")
    return f"{where}: '{key}': {message}{given}{meant}{name}" if key else f"{where}: {message}{meant}{name}"


_ELSEWHERE = {
    **dict.fromkeys(("lr", "learning_rate", "max_lr", "peak_lr"), "optimizer.lr"),
    **dict.fromkeys(("batch_size", "train_batch_size"), "batch.global_batch"),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size"), "batch.micro_batch"),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val"), "optimizer.clip_norm"),
    "gradient_checkpointing": "parallel.recompute",
    **dict.fromkeys(("num_train_epochs", "num_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("eval_steps", "val_check_interval", "check_val_every_n_epoch"), "validation.every"),
    "save_steps": "checkpoint.every",
}
"""Names that other trainers use for our keys, to suggest ours in errors."""


def nearest_key(name: str) -> str | None:
    """Return the key or section that an unknown one may mean: near in spelling, or with a word of it; else None."""
    known = [*(key for key, *_ in keys()), *Config.model_fields]
    section, _, tail = name.rpartition(".")
    if tail in _ELSEWHERE:
        return _ELSEWHERE[tail]
    tails = Counter(key.rpartition(".")[2] for key in set(known))
    by_tail = {last: key for key in known if tails[last := key.rpartition(".")[2]] == 1 or key == f"{section}.{last}"}
    of_section = [last for last, key in by_tail.items() if section and key == f"{section}.{last}"]
    near = nearest(tail, of_section) or nearest(tail, by_tail, cutoff=0.75)
    near = near or (None if of_section else nearest(name, known, cutoff=0.75))
    near = near or next((last for last in by_tail if set(tail.split("_")) <= set(last.split("_"))), None)
    return by_tail.get(near, near) if near else None
