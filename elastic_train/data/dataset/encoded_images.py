"""Check that encoded images decode: all of a dataset's for `data verify`, and some before a run's first step.

An image is decoded to its last byte, so truncation is detected; a JPEG at an eighth of its size, which takes half the
time and fails on the same files.
"""

from __future__ import annotations

import io
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from elastic_train.data.arrow.numbers import plain_name
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.row_groups import RowGroups, num_decoders
from elastic_train.data.dataset.verify import Verdict
from elastic_train.errors import ConfigError, DataError
from elastic_train.system.extras import needed_for
from elastic_train.system.progress_bar import Track, silent

if TYPE_CHECKING:
    from PIL.Image import Image

_IMAGES_AT_ONCE = 16
MOST_MEGAPIXELS = 178.0
"""Default limit in megapixels: Pillow treats larger images as an attempt to exhaust memory."""
_BINARY = ("binary", "large_binary")


def decoding_errors() -> tuple[type[Exception], ...]:
    """Return Pillow's exceptions for incomplete images; RuntimeError is for a damaged AVIF."""
    with needed_for("decoding images"):
        from PIL.Image import DecompressionBombError
    return OSError, ValueError, SyntaxError, RuntimeError, DecompressionBombError


def reason(error: Exception) -> str:
    """Return the reason in one of `decoding_errors`; Pillow's own text may name an object in memory."""
    with needed_for("decoding images"):
        from PIL import UnidentifiedImageError
    return "it is in no format that Pillow knows" if isinstance(error, UnidentifiedImageError) else str(error)


class TooLargeError(ValueError):
    """Raised for an image with too many pixels, which may be intact."""


def open_image(content: bytes, most_megapixels: float = MOST_MEGAPIXELS) -> Image:
    """Open an image without decoding it; raise TooLargeError or one of `decoding_errors`."""
    with needed_for("decoding images"):
        from PIL import Image
    most = round(most_megapixels * 1e6)
    if Image.MAX_IMAGE_PIXELS is not None and most > Image.MAX_IMAGE_PIXELS:  # Pillow's own limit would refuse more
        Image.MAX_IMAGE_PIXELS = most
    try:
        image = Image.open(io.BytesIO(content))
    except Image.DecompressionBombError as error:
        raise TooLargeError(_too_large(str(error), most_megapixels)) from error
    if (pixels := image.width * image.height) > most:
        raise TooLargeError(_too_large(f"{pixels / 1e6:.1f} megapixels", most_megapixels))
    return image


def in_mode(image: Image, mode: str) -> Image:
    """Return an image turned upright, in grey ("L") or "RGB"; raise one of `decoding_errors`.

    Of 16-bit values the upper eight bits are kept: Pillow would turn everything above 255 of 65,535 white.
    """
    with needed_for("decoding images"):
        from PIL import Image, ImageOps
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floating-point numbers"
        raise ValueError(f"its pixels are {kind}, whose black and white nothing tells; convert it to 8 or 16 bits")
    return image.convert(mode)


def _too_large(found: str, most_megapixels: float) -> str:
    return (
        f"is too large ({found}; at most {most_megapixels:g} megapixels are decoded): make it smaller, or raise the "
        "limit (--max-megapixels, task.params.max_megapixels)"
    )


def with_remedy(why: str, remedy: str) -> str:
    """Return a reason with the remedy; an image that is only too large need not be replaced."""
    return why if why.startswith("is too large") else f"{why}; {remedy}"


def why_undecodable(content: bytes | None, most_megapixels: float = MOST_MEGAPIXELS) -> str | None:
    if not content:
        return "holds no image"
    try:
        image = open_image(content, most_megapixels)
        image.draft("RGB", (1, 1))
        in_mode(image, "RGB")
    except TooLargeError as error:
        return str(error)
    except decoding_errors() as error:
        return f"is not an image that can be decoded: {reason(error)}"
    return None


def undecodable(column: pa.ChunkedArray, most_megapixels: float = MOST_MEGAPIXELS) -> list[tuple[int, str]]:
    """Return (row, reason) of images that cannot be decoded, in order."""
    found = ((row, why_undecodable(content.as_py(), most_megapixels)) for row, content in enumerate(column))
    return [(row, why) for row, why in found if why is not None]


def check_images(manifest: Manifest, column: str) -> None:
    """Raise ConfigError, naming the possible columns, if one is missing or cannot hold encoded images."""
    binary = [name for name, kind in manifest.columns.items() if plain_name(kind) in _BINARY]
    if column in binary:
        return
    found = f"is {manifest.columns[column]}, not binary" if column in manifest.columns else "is not there"
    has = f"columns that can hold encoded images: {', '.join(binary)}" if binary else "no column holds encoded images"
    raise ConfigError(f"{manifest.url}: column '{column}' {found}; {has}")


def verify_images(
    manifest: Manifest,
    column: str,
    *,
    leaving_out: Container[str] = (),
    most_megapixels: float = MOST_MEGAPIXELS,
    track: Track = silent,
) -> list[Verdict]:
    """Decode every image of a column; return a verdict for each undecodable image and unreadable row group.

    Files in `leaving_out` are not read.
    """
    verdicts, groups = list[Verdict](), RowGroups(manifest, [column])
    numbers = track(range(len(manifest.group_rows)), "decoding images", len(manifest.group_rows), "row groups")
    with ThreadPoolExecutor(num_decoders(), "decode-images") as pool:
        for group in numbers:
            number, within = manifest.place_of_group(group)
            path = manifest.files[number].path
            if path in leaving_out:
                continue
            try:
                images = groups.decode(group).column(column)
            except DataError as error:
                verdicts.append(Verdict(path, str(error).removeprefix(f"{manifest.url.rstrip('/')}/{path}: ")))
                continue
            begins = range(0, len(images), _IMAGES_AT_ONCE)
            parts = [images.slice(lo, _IMAGES_AT_ONCE) for lo in begins]
            verdicts += [
                Verdict(path, f"row group {within}, row {lo + row}: column '{column}' {why}")
                for lo, found in zip(
                    begins, pool.map(lambda part: undecodable(part, most_megapixels), parts), strict=True
                )
                for row, why in found
            ]
    return verdicts
