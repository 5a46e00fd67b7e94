"""Encoded images on their way into a dataset: unwrapped, and decoded once, so that a run meets none that it cannot."""

from __future__ import annotations

import warnings

import pyarrow as pa

from elastic_train.data.dataset.encoded_images import why_undecodable
from elastic_train.data.tables.files import Chunk
from elastic_train.errors import ConfigError
from elastic_train.system.extras import needed_for

COLUMN = pa.field("image", pa.binary(), nullable=False)
_WRAPPED = {"bytes", "path"}


def unwrap_images(chunk: Chunk, name: str) -> pa.Array:
    """Return a column; of Hugging Face's images, which are {bytes, path}, the bytes, each of them decoded once."""
    column = chunk.rows.column(name)
    if not pa.types.is_struct(column.type) or {field.name for field in column.type} != _WRAPPED:
        return column
    images = column.field(0) if column.type.field(0).name == "bytes" else column.field(1)
    for row, image in enumerate(images.to_pylist()):
        check_image(image, chunk.place_of(row))
    return images.cast(pa.binary())


def check_image(content: bytes | None, place: str) -> None:
    """Decode an image to its last byte; ConfigError, which names the place, if that cannot be done."""
    with needed_for("importing images"):
        from PIL import Image
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            why = why_undecodable(content)
        except Image.DecompressionBombWarning as error:
            why = f"is not an image that can be decoded: {error}"
    if why is not None:
        raise ConfigError(f"{place}: {why}; replace it by a whole PNG or JPEG, or leave it out")
