"""A training set of a run's own, of which row groups can be damaged as a bad disk does it: their pages are garbage."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pyarrow.parquet as pq

from elastic_train.data.dataset.manifest import load_manifest


class OwnData:
    """A copy of the training set `train`, in `folder`."""

    def __init__(self, train: str, folder: Path) -> None:
        shutil.copytree(train, folder)
        self.folder = folder
        self._whole = [
            (file.path, group) for file in load_manifest(str(folder)).files for group in range(len(file.row_groups))
        ]

    def spoil(self, draws: random.Random) -> dict[str, object] | None:
        """Overwrite the pages of a row group, in place, and return which; None if but one is whole."""
        if len(self._whole) < 2:
            return None
        name, group = self._whole.pop(draws.randrange(len(self._whole)))
        path = self.folder / name
        metadata = pq.read_metadata(path).row_group(group)
        with path.open("r+b") as file:
            for number in range(metadata.num_columns):
                chunk = metadata.column(number)
                file.seek(min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset))))
                file.write(b"\xff" * chunk.total_compressed_size)
        return {"file": name, "row_group": group}
