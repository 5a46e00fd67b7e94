"""Scikit-learn's handwritten digits (UCI, Alpaydin and Kaynak 1998): a real image set without a download.

1,797 grey images of 8 x 8 pixels in ten classes, stored losslessly as PNG.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa

from elastic_train.data.corpora import origin
from elastic_train.data.dataset.manifest import TRAIN
from elastic_train.data.tables.files import Chunk
from elastic_train.data.tables.images import COLUMN
from elastic_train.data.tables.importing import Table, Written, load_parts, write_table
from elastic_train.data.tables.labels import COLUMN as LABEL
from elastic_train.system.extras import needed_for

LABELS = tuple(str(digit) for digit in range(10))
_BRIGHTEST = 16
_ROWS_PER_GROUP = 64


def import_digits(out: Path, *, share: float, seed: int, replace: bool = False) -> Written:
    """Make a dataset of the digits; raise ConfigError without scikit-learn or Pillow."""
    with needed_for("importing digits"):
        import PIL
        import sklearn  # noqa: F401 - the set is a file of it
    made_from = {
        "source": "digits",
        "validation_share": share,
        "seed": seed,
        "scikit-learn": version("scikit-learn"),
        "pillow": PIL.__version__,
        "pyarrow": pa.__version__,
    }
    if origin.is_finished(out, made_from, replace=replace):
        return load_parts(out)
    table = Table({TRAIN: _chunks()}, {"label_column": LABEL.name, "labels": LABELS}, COLUMN.name)
    return write_table(out, table, made_from, share, seed, _ROWS_PER_GROUP)


def _chunks() -> Iterator[Chunk]:
    from PIL import Image
    from sklearn.datasets import load_digits

    found = load_digits()
    images = []
    for pixels in np.rint(found.images * (255 / _BRIGHTEST)).astype(np.uint8):
        encoded = io.BytesIO()
        Image.fromarray(pixels).save(encoded, "png")
        images.append(encoded.getvalue())
    columns = [pa.array(images, COLUMN.type), pa.array(found.target, LABEL.type)]
    yield Chunk(Path("digits"), 0, pa.RecordBatch.from_arrays(columns, schema=pa.schema([COLUMN, LABEL])), 1.0)
