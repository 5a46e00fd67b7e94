"""YAML as people write it: 1e-3 is a number, as in version 1.2 of the format; PyYAML's 1.1 takes it for text."""

from __future__ import annotations

import re
from collections.abc import Mapping

import yaml

# Of what looks like a date or a number, and is none, the parser raises the ValueError of Python's own.
NOT_YAML = (yaml.YAMLError, ValueError)

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """What is read."""


class _Dumper(yaml.SafeDumper):
    """What is written: text that looks like such a number is quoted."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse(text: str) -> object:
    """Return the value that a text stands for; raises one of NOT_YAML."""
    return yaml.load(text, Loader=_Loader)


def compose(text: str) -> yaml.Node | None:
    """Return the nodes of a text, which know their lines; raises one of NOT_YAML."""
    node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    return node


def write(tree: Mapping[str, object]) -> str:
    """Return a text that `parse` reads back to the same values, and so does any other reader of YAML."""
    text: str = yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False)
    return text
