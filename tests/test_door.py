"""The packages' public names: which exist, that each is documented, and the cost of importing them."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from types import ModuleType

import pytest

import chaos
import elastic_train
import rendezvous
from tests.conftest import ROOT

NAMES = """
Order Cursor owned_lanes CoverageSums Manifest load_manifest build_manifest Reader LaneLoader LaneBatch
Task LaneLoss ParameterGroup Config load_config train TrainResult CommitRecord open_store discover read_state holding
ElasticTrainer ElasticTrainError ConfigError DataError StorageError Preempted ResultError
"""
OF_RENDEZVOUS = """
EtcdFence EtcdOptions EtcdServer EtcdStore FencedError Head MemoryStore OptionError RendezvousContext RendezvousError
ServerError Store StoreError StoreRefusedError StoreUnavailableError TooFewNodesError context die_with_parent
etcd_options open_fence
"""


def test_the_public_names_are_these() -> None:
    assert elastic_train.__all__ == sorted(NAMES.split())
    assert chaos.__all__ == ["ChaosError", "Verdict", "examine", "log_ids"]
    assert sorted(rendezvous.__all__) == OF_RENDEZVOUS.split()


@pytest.mark.parametrize("package", [elastic_train, chaos, rendezvous], ids=lambda package: package.__name__)
def test_every_public_name_is_there_and_documented(package: ModuleType) -> None:
    """A dataclass without a docstring would show its signature."""
    for name in package.__all__:
        found = getattr(package, name)
        assert name in dir(package)
        assert found.__doc__ and not found.__doc__.startswith(f"{name}("), f"{package.__name__}.{name}"


@pytest.mark.parametrize("package", [elastic_train, chaos], ids=lambda package: package.__name__)
def test_type_checkers_see_the_same_names_in_the_same_modules(package: ModuleType) -> None:
    """The imports for type checkers are the names that are loaded on first use."""
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(package))) if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert {name: seen[name] for name in package.__all__} == package._MODULE_OF


def test_the_api_page_shows_every_public_name() -> None:
    shown = re.findall(r"^::: elastic_train\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    assert sorted(shown) == elastic_train.__all__


@pytest.mark.parametrize("package", [elastic_train, chaos, rendezvous], ids=lambda package: package.__name__)
def test_an_unknown_name_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Ordre'"):
        package.Ordre  # noqa: B018 - the access is what is tested


@pytest.mark.slow
@pytest.mark.parametrize("module", ["elastic_train", "chaos", "chaos.hook", "rendezvous"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    """A store loads etcd's client on first use."""
    heavy = {"torch", "numpy", "pyarrow", "pydantic", "grpc", "pyetcd"}
    program = f"import sys, {module}; print(*{heavy} & set(sys.modules))"
    if module == "rendezvous":
        program += "; from rendezvous import EtcdStore; assert EtcdStore.get and 'grpc' in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


@pytest.mark.slow
def test_no_submodule_takes_the_place_of_a_public_name() -> None:
    """Importing a submodule sets an attribute of its package, which must not replace a public name."""
    for package in (elastic_train, chaos):
        before = {name: getattr(package, name) for name in package.__all__}
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(("__main__", "squares_kernel")):  # Triton is only in torch's GPU builds
                importlib.import_module(module.name)
        assert {name: getattr(package, name) for name in package.__all__} == before
        assert not {module.name for module in pkgutil.iter_modules(package.__path__)} & set(package.__all__)
