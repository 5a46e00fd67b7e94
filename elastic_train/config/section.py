"""What every section of the configuration is, and how it takes paths."""

from __future__ import annotations

import os

from pydantic import BaseModel, ConfigDict

Value = object


class Section(BaseModel):
    """Frozen, with no other keys than its fields; a field's docstring is its key's meaning."""

    # What pydantic says of a mistake has no values in it, which may be secrets; `sources` says it better in any case.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True)


def folder(value: str | None) -> str | None:
    """Refuse a URL where a local folder is needed."""
    if value is not None and "://" in value:
        raise ValueError("must be a local folder; only datasets and checkpoint.url accept URLs")
    return home(value)


def home(value: str | None) -> str | None:
    """Expand ~, which no shell expands in a file."""
    return None if value is None else os.path.expanduser(value)  # noqa: PTH111 - a Path would change the rest of it
