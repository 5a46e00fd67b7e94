"""Packages: installed versions, those that need an optional extra, how to install one, and imports by `module:name`.

The base installation trains, reads data and sends metrics. Other code imports its packages within `needed_for`, so that
importing this project, and `--help`, need no extra.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from elastic_train.errors import ConfigError

_EXTRA_OF = {
    "greenlet": "chaos",
    "tokenizers": "corpora",
    "transformers": "hf",
    "peft": "hf",
    "PIL": "images",
    "sklearn": "images",
    "s3fs": "s3",
    "aiobotocore": "s3",
    "botocore": "s3",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "ray": "ray",
}


@functools.cache
def version_of(package: str) -> str | None:
    """Return a package's version, None if it is not installed; slow, as its whole description is parsed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Import what `purpose` needs; raise ConfigError with the install command for an extra's missing package."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (command := install_command(error)) is None:
            raise
        raise ConfigError(f"{purpose} needs '{error.name}', which is not installed: {command}") from error


def install_command(error: BaseException | None) -> str | None:
    """Return the install command for the package missing in an import error, or its cause; None if unknown."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            extra = _EXTRA_OF.get(error.name.partition(".")[0])
            return f"pip install 'elastic-train[{extra}]'" if extra else None
        error = error.__cause__
    return None


def import_named(key: str, path: str, form: str = "module:name") -> object:
    """Return the object named by `module:name`, the value of `key`; `form` is how it should be written.

    Raises ConfigError if it cannot be imported; it names the module's file, which may be another than was meant.
    """
    module, _, name = path.partition(":")
    try:
        found: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        file = getattr(sys.modules.get(module), "__file__", None) if isinstance(error, AttributeError) else None
        where = f"; it was imported from {file}" if file else ""
        raise ConfigError(
            f"{key}: '{path}' cannot be imported ({error}{where}); write {form} of a module in the working folder or "
            "on PYTHONPATH"
        ) from error
    return found
