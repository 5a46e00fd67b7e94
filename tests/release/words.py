"""Refuse phrases that readers have to decode: `python -m tests.release.words`, part of `make check`.

Messages (all text in the code except docstrings) have stricter rules than docstrings, comments and pages. Each phrase
has a replacement. Tests are not checked.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("elastic_train", "rendezvous", "chaos", "benchmarks", "tests/release")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs")
EVERYWHERE = {
    r"\bbef(?:all|alls|ell|allen)\b": "happens to, affects, hits",
    r"\blet in\b": "admitted; not let in: rejected",
    r"\bmended\b": "fixed",
    r"\b(?:has|have|had) theirs\b": "the noun: have their shards",
}
IN_MESSAGES = {
    r"\bbeside\b": "in addition to, during, overlapping, next to",
    r"\balike\b": "the same, equal",
    r"\bgo(?:es|ing)? on\b": "continue, resume, run",
    r"\bstands? in\b": "is in, is stored in",
    r"\bwhoever\b": "the noun: every process that, the user who",
    r"\ball that\b": "all, everything, or the noun",
    r"\b(?:is|are|was|were) given up\b": "lost, rolled back, abandoned",
    r"\b(?:is|are|was|were) told\b": "reported, is shown",
    r"\bc(?:ome|omes|ame) to (?:its|their) end\b": "finish",
    r"\bas far as\b": "up to, until, if",
}
"""Replacements, by the regular expression of a phrase."""


def main() -> None:
    """Print every phrase with its location and replacement; exit with 1 if there are any."""
    found = list[str]()
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        found += in_code(path.read_text(), path.relative_to(ROOT))
    for page in (page for name in PAGES for page in sorted((ROOT / name).rglob("*.md")) or [ROOT / name]):
        found += in_text(page.read_text(), page.relative_to(ROOT), 1, EVERYWHERE)
    sys.stdout.writelines(f"{line}\n" for line in found)
    sys.exit(bool(found))


def in_code(source: str, path: Path) -> Iterator[str]:
    """Yield the phrases in a module's comments and docstrings, and those in its messages."""
    if path == Path(__file__).relative_to(ROOT):
        return
    yield from in_text(source, path, 1, EVERYWHERE)
    if not _IN_MESSAGES.search(source):
        return
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            text = node.value if isinstance(node.value, str) else ""
            yield from in_text(text if " " in text else "", path, node.lineno, IN_MESSAGES)


def in_text(text: str, path: Path, first: int, phrases: Mapping[str, str]) -> Iterator[str]:
    """Yield the phrases in a text that starts at line `first` of a file."""
    for phrase, better in phrases.items():
        for found in re.finditer(phrase, text, re.IGNORECASE):
            line = first + text.count("\n", 0, found.start())
            yield f"{path}:{line}: '{found[0]}': write {better}"


_IN_MESSAGES = re.compile("|".join(IN_MESSAGES), re.IGNORECASE)

if __name__ == "__main__":
    main()
