"""Import what a configuration names by `module:name`."""

from __future__ import annotations

import importlib
import sys

from elastic_train.errors import ConfigError


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
