"""What all sections of a configuration have alike: unknown keys are errors, and values do not change."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

Value = object


class Section(BaseModel):
    """A section of the configuration; the text after each of its keys is the key's meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
