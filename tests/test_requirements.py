"""Every package that the code imports is a named requirement, not a dependency of a dependency."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

PACKAGES = ("elastic_train", "rendezvous", "chaos")
OWN = {*PACKAGES, "tests"}
COMES_WITH = {"triton": "torch"}
"""Modules that come with certain builds of a requirement, and are only used with those builds."""
FOR_TYPES = {"_typeshed"}
SAID = {
    "chaos/services/s3_server.py": {"moto", "werkzeug", "boto3"},
    "elastic_train/parallel/attention/kernels.py": {"cudnn"},
}
"""Imports whose absence a module reports with its own error."""


def imported(path: Path) -> Iterator[str]:
    """Yield the top-level module of each absolute import anywhere in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.partition(".")[0]


@pytest.mark.heavy
def test_every_import_is_of_a_requirement() -> None:
    """Each import belongs to a requirement of the package or of one of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (each for name, each in project["optional-dependencies"].items() if name != "dev")
    required = {canonicalize_name(Requirement(each).name) for each in chain(project["dependencies"], *extras)}
    known, brings = sys.stdlib_module_names | OWN | FOR_TYPES, packages_distributions()
    unknown: dict[str, str] = {}
    for path in chain.from_iterable((ROOT / package).rglob("*.py") for package in PACKAGES):
        name = str(path.relative_to(ROOT))
        for module in set(imported(path)) - known - SAID.get(name, set()):
            names = {COMES_WITH.get(module, each) for each in brings.get(module, [module])}
            if not {canonicalize_name(each) for each in names} & required:
                unknown[module] = name
    assert unknown == {}
