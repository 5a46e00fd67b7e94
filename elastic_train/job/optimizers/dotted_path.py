"""Import objects that a configuration names by a dotted path; an error names the key."""

from __future__ import annotations

import importlib

from elastic_train.errors import ConfigError


def import_named(key: str, path: str) -> object:
    """Return the object named by `module:name`, the value of `key`.

    Raises ConfigError if it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        found: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key}: '{path}' cannot be imported ({error}); write module:name of a module "
            "in the working folder or on PYTHONPATH"
        ) from error
    return found
