"""The package's public interface, and the cost of importing it."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import rendezvous


def test_public_names() -> None:
    """The package exports exactly these names."""
    assert sorted(rendezvous.__all__) == [
        "EtcdFence", "EtcdOptions", "EtcdServer", "EtcdStore", "FencedError", "Head", "MemoryStore",
        "OptionError", "RendezvousContext", "RendezvousError", "ServerError", "Store", "StoreError",
        "StoreRefusedError", "StoreUnavailableError", "TooFewNodesError", "context", "die_with_parent",
        "etcd_options", "open_fence",
    ]  # fmt: skip


@pytest.mark.parametrize("name", rendezvous.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    documented = getattr(rendezvous, name)
    assert inspect.getdoc(documented)
    assert documented.__doc__ and not documented.__doc__.startswith(f"{name}("), "its own docstring"


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'EtcdStor'"):
        importlib.import_module("rendezvous").EtcdStor  # noqa: B018


@pytest.mark.slow
def test_importing_the_package_imports_neither_torch_nor_etcds_client() -> None:
    source = "import sys, rendezvous; assert not {'grpc', 'pyetcd', 'torch'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", source], check=True)
    source = "import sys; from rendezvous import EtcdStore; assert EtcdStore.get and 'grpc' in sys.modules"
    subprocess.run([sys.executable, "-c", source], check=True)
