"""YAML as people write it: 1e-3 is a number, as in YAML 1.2; PyYAML implements 1.1, where it is a string."""

from __future__ import annotations

import re
from collections.abc import Mapping

import yaml

# For text that looks like a date or a number but is not valid, the parser raises Python's own ValueError.
NOT_YAML = (yaml.YAMLError, ValueError)

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """Reads such numbers as floats."""


class _Dumper(yaml.SafeDumper):
    """Quotes strings that look like such numbers."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse(text: str) -> object:
    """Return the value of a YAML text; raises one of NOT_YAML."""
    return yaml.load(text, Loader=_Loader)


def compose(text: str) -> yaml.Node | None:
    """Return the syntax tree of a YAML text, with line numbers; raises one of NOT_YAML."""
    node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    return node


def write(tree: Mapping[str, object]) -> str:
    """Return YAML that `parse`, and any other reader, reads back to the same values."""
    text: str = yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False)
    return text
