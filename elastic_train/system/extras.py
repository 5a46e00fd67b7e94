"""Packages: installed versions, those that need an optional extra, and the command that installs a missing one.

The base installation trains, reads data and sends metrics. Other code imports its packages within `needed_for`, so that
importing this project, and `--help`, need no extra.
"""

from __future__ import annotations

import functools
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
