"""The commands of other programs on the pages about places, which tests run, or have the program itself parse."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import takewhile

from tests.conftest import ROOT

PAGES = ("slurm.md", "kubernetes.md", "skypilot.md", "ray.md", "containers.md")
_BLOCK = re.compile(r"^```(?:sh)?\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"[A-Z]+=")


def commands(page: str) -> Iterator[str]:
    """Yield the command lines of a page's blocks."""
    for block in _BLOCK.findall((ROOT / "docs" / page).read_text()):
        yield from block.splitlines()


def command(page: str, begins: str, filled: Mapping[str, str] | None = None) -> tuple[dict[str, str], list[str]]:
    """Return variables and words of a page's only command that begins so, some of its words replaced.

    Every word that is to be replaced has to be there.
    """
    (line,) = (line for line in commands(page) if line.startswith(begins))
    words, replaced = shlex.split(line), dict(filled or {})
    assert set(replaced) <= {word for each in words for word in (each, each.partition("=")[2])}, line
    pairs = list(takewhile(_VARIABLE.match, words))
    variables = {name: replaced.get(value, value) for name, _, value in (pair.partition("=") for pair in pairs)}
    return variables, [replaced.get(word, word) for word in words[len(variables) :]]
