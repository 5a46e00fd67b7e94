"""Whether encoded images decode: all of a dataset's for `data verify`, and some of them before a run's first step.

An image is decoded to its last byte, so one that is cut off is found too; a JPEG at an eighth of its size, which takes
half of the time and fails on the same files.
"""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.row_groups import RowGroups, num_decoders
from elastic_train.data.dataset.verify import Verdict
from elastic_train.errors import UnreadableError
from elastic_train.system.extras import needed_for
from elastic_train.system.progress_bar import Track, silent

_IMAGES_AT_ONCE = 16


def why_undecodable(content: bytes | None) -> str | None:
    """Return why an image cannot be decoded; None if it can."""
    with needed_for("decoding images"):
        from PIL import Image, ImageOps
    if not content:
        return "holds no image"
    try:
        image = Image.open(io.BytesIO(content))
        image.draft("RGB", (1, 1))
        ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return f"is not an image that can be decoded: {error}"
    return None


def undecodable(column: pa.ChunkedArray) -> list[tuple[int, str]]:
    """Return the rows whose images cannot be decoded, in their order, and why."""
    found = ((row, why_undecodable(content.as_py())) for row, content in enumerate(column))
    return [(row, why) for row, why in found if why is not None]


def verify_images(manifest: Manifest, column: str, *, track: Track = silent) -> list[Verdict]:
    """Decode every image of a column; a verdict for each that cannot be, and for each row group that cannot be read."""
    verdicts, groups = list[Verdict](), RowGroups(manifest, [column])
    numbers = track(range(len(manifest.group_rows)), "decoding images", len(manifest.group_rows))
    with ThreadPoolExecutor(num_decoders(), "decode-images") as pool:
        for group in numbers:
            number, within = manifest.place_of_group(group)
            path = manifest.files[number].path
            try:
                images = groups.decode(group).column(column)
            except UnreadableError as error:
                verdicts.append(Verdict(path, str(error)))
                continue
            begins = range(0, len(images), _IMAGES_AT_ONCE)
            parts = [images.slice(lo, _IMAGES_AT_ONCE) for lo in begins]
            verdicts += [
                Verdict(path, f"row group {within}, row {lo + row}: column '{column}' {why}")
                for lo, found in zip(begins, pool.map(undecodable, parts), strict=True)
                for row, why in found
            ]
    return verdicts
