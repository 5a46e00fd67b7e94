"""Encoded images on their way into a dataset: unwrapped, and decoded once, so that a run meets no broken one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from elastic_train.data.dataset.encoded_images import MOST_MEGAPIXELS, why_undecodable, with_remedy
from elastic_train.data.tables.files import Chunk
from elastic_train.errors import ConfigError

COLUMN = pa.field("image", pa.binary(), nullable=False)
_WRAPPED = {"bytes", "path"}
_MOST_NAMED = 50
_REMEDY = "replace it by a whole PNG or JPEG, or leave it out (--skip-corrupt leaves out all such images)"


@dataclass(slots=True)
class UnfitRows:
    """Lines about unusable rows; with `skips` the rows are left out.

    `remedy` ends a rejection whose lines have none of their own.
    """

    noun: ClassVar[str] = "row"
    remedy: ClassVar[str | None] = None
    skips: bool = False
    wrong: list[str] = field(default_factory=list)

    def finish(self) -> None:
        """Raise ConfigError with all unusable rows, unless they are left out."""
        if self.wrong and not self.skips:
            more = len(self.wrong) - _MOST_NAMED
            rest = [f"and {more:,} {self.noun}s more"] if more > 0 else []
            raise ConfigError(*self.wrong[:_MOST_NAMED], *rest, *([self.remedy] if self.remedy else []))


@dataclass(slots=True)
class ImageCheck(UnfitRows):
    """Decodes images to their last byte, and records those that fail; with `skips` they are left out."""

    noun: ClassVar[str] = "image"
    most_megapixels: float = MOST_MEGAPIXELS

    @property
    def choices(self) -> dict[str, object]:
        """Non-default options by name, for the origin of an import."""
        chosen: dict[str, object] = {"skip_corrupt": True} if self.skips else {}
        return chosen if self.most_megapixels == MOST_MEGAPIXELS else {**chosen, "max_megapixels": self.most_megapixels}

    def are_whole(self, contents: Sequence[bytes | None], place_of: Callable[[int], str]) -> list[bool]:
        """Return for each image whether it decodes; `place_of` describes an image by its number."""
        found = [why_undecodable(content, self.most_megapixels) for content in contents]
        self.wrong += [
            f"{place_of(row)}: {why if self.skips else with_remedy(why, _REMEDY)}"
            for row, why in enumerate(found)
            if why is not None
        ]
        return [why is None for why in found]


def is_wrapped(kind: pa.DataType) -> bool:
    """Return True if a column has Hugging Face's images, {bytes, path}."""
    return pa.types.is_struct(kind) and {each.name for each in kind} == _WRAPPED


def unwrap_images(chunk: Chunk, name: str) -> pa.Array:
    """Return a column; for Hugging Face's images, {bytes, path}, the bytes."""
    column = chunk.rows.column(name)
    if not is_wrapped(column.type):
        return column
    images = column.field(0) if column.type.field(0).name == "bytes" else column.field(1)
    return images.cast(pa.binary())
