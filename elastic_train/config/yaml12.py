"""YAML as people write it: 1e-3 is a number, as in YAML 1.2; PyYAML implements 1.1, where it is a string."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

# For text that looks like a date or a number but is not valid, the parser raises Python's own ValueError.
NOT_YAML = (yaml.YAMLError, ValueError)

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """Reads such numbers as floats."""


class _QuickLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same by libyaml, in a tenth of the time, where PyYAML was built with it: every rank reads a configuration."""


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes strings that look like such numbers."""


for _kind in (_Loader, _QuickLoader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse(text: str) -> object:
    """Return the value of a YAML text; raises one of NOT_YAML."""
    value: object = _read(yaml.load, text)
    return value


def compose(text: str) -> yaml.Node | None:
    """Return the syntax tree of a YAML text, with line numbers; raises one of NOT_YAML."""
    node: yaml.Node | None = _read(yaml.compose, text)
    return node


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
