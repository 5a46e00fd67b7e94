"""YAML 1.2 (core schema): true and false alone are booleans, 0o17 and 1e3 are numbers, dates are text.

PyYAML implements YAML 1.1, in which `yes` is true, `010` is 8 and `1:30` is 90. `misread` names what the two versions
read as different values, so that nobody gets another number than was meant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from pydantic_core import to_jsonable_python
from yaml.constructor import ConstructorError

NOT_YAML = (yaml.YAMLError, ValueError)
"""ValueError: a number that Python cannot hold."""

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
"""A number in both versions of YAML, and not the same: left to `misread`."""
_ONE_LINE = 1 << 30
_KINDS = {"null": _NULL, "bool": _BOOL, "int": _INT, "float": _FLOAT}
_FIRST = {
    "null": ["~", "n", "N", ""],
    "bool": list("tTfF"),
    "int": list("-+0123456789"),
    "float": list("-+.0123456789"),
}


def _constructed(loader: Any, node: yaml.Node) -> object:
    text = str(loader.construct_scalar(node))
    if _LEADING_ZERO.fullmatch(text) or not _KINDS[node.tag.removeprefix(_TAG)].fullmatch(text):
        raise ConstructorError(None, None, f"{text!r} is no {node.tag.removeprefix(_TAG)}", node.start_mark)
    return _value(node.tag.removeprefix(_TAG), text)


def _value(kind: str, text: str) -> object:
    if kind == "int":
        return int(text, 0 if text.startswith(("0o", "0x")) else 10)
    if kind == "float":
        number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if math.isinf(number) and "inf" not in text.lower():
            raise ValueError(f"{text} is more than a number can be")
        return number
    return None if kind == "null" else text.lower() == "true"


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2, and says what is wrong with the line."""


class _QuickLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same by libyaml, in a tenth of the time, where PyYAML was built with it: every rank reads a configuration."""


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes what either version of YAML would not read as text."""


for _class in (_Loader, _QuickLoader):
    _class.yaml_implicit_resolvers = {}
    of_collections = {f"{_TAG}{name}" for name in ("str", "seq", "map")}
    kept = {tag: make for tag, make in _class.yaml_constructors.items() if tag is None or tag in of_collections}
    _class.yaml_constructors = kept | dict.fromkeys((f"{_TAG}{kind}" for kind in _KINDS), _constructed)
for _class in (_Loader, _QuickLoader, _Dumper):
    for _kind, _pattern in _KINDS.items():
        _class.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(f"(?:{_pattern.pattern})$"), _FIRST[_kind])


def parse(text: str) -> object:
    """Return the value of a YAML text; raises one of NOT_YAML."""
    value: object = _read(yaml.load, text)
    return value


def compose(text: str) -> yaml.Node | None:
    """Return the syntax tree of a YAML text, with line numbers; raises one of NOT_YAML, also if it holds itself."""
    node: yaml.Node | None = _read(yaml.compose, text)
    _refuse_cycles(node, [], set())
    return node


def scalar(text: str) -> object:
    """Return null, a boolean or a number if a text is one, else the text itself: without comments, quotes, anchors."""
    found = next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(text)), None)
    return text if found is None else _value(found, text)


def misread(text: str) -> str | None:
    """Return what to write instead of a plain text that YAML 1.1 and 1.2 read differently; None for other texts."""
    if _LEADING_ZERO.fullmatch(text):
        is_octal = text.isdecimal() and not set(text) & set("89")
        octal = f", or 0o{text.lstrip('0')} for {int(text, 8)}" if is_octal and int(text) else ""
        return f"a leading zero means octal in YAML 1.1 and nothing in YAML 1.2: write {int(text)}{octal}"
    if scalar(text) != text:
        return None
    old = _in_yaml11(text)
    return None if old is None else f"YAML 1.1 reads {old}, and YAML 1.2 a text: write {old}"


def _in_yaml11(text: str) -> str | None:
    """Return the boolean or number that YAML 1.1 makes of a text, as YAML; None if it is a text there, too."""
    try:
        value = yaml.safe_load(text) if "\n" not in text and "#" not in text else text
    except NOT_YAML:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _refuse_cycles(node: yaml.Node | None, above: list[yaml.Node], seen: set[int]) -> None:
    if node is None or isinstance(node, yaml.ScalarNode):
        return
    if any(node is each for each in above):
        raise ConstructorError(None, None, "an alias that is within its own anchor", node.start_mark)
    if id(node) in seen:
        return
    seen.add(id(node))
    below = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
    for each in below:
        _refuse_cycles(each, [*above, node], seen)


def _read(read: Callable[..., Any], text: str) -> Any:
    """Read with libyaml; PyYAML itself says what is wrong, since it also shows the line."""
    try:
        return read(text, Loader=_QuickLoader)
    except yaml.YAMLError:
        return read(text, Loader=_Loader)


def write(tree: Mapping[str, object]) -> str:
    """Return YAML that `parse`, and any other reader, reads back to the same values."""
    text: str = yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False)
    return text


def write_flow(value: object) -> str:
    """Return a value as YAML in one line, as it can be given on a command line."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=_ONE_LINE)
    return text.removesuffix("\n").removesuffix("\n...")


def plain(value: object) -> object:
    """Return a value of a program, or of a file, as YAML can hold it."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return to_jsonable_python(value, inf_nan_mode="constants")
