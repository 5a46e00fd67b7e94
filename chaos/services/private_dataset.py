"""A run's private training set, whose row groups can be damaged in place as by a bad disk: garbage, or flipped bits."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq

from elastic_train.data.dataset.manifest import load_manifest


class OwnData:
    """A copy of the training set `train` in `folder`."""

    def __init__(self, train: str, folder: Path) -> None:
        shutil.copytree(train, folder)
        self.folder = folder
        self._whole = [
            (file.path, group) for file in load_manifest(str(folder)).files for group in range(len(file.row_groups))
        ]

    def spoil(self, draws: random.Random) -> dict[str, object] | None:
        """Overwrite a row group's pages and return which; None if only one intact group is left."""
        return self._damage(draws, lambda content: b"\xff" * len(content))

    def flip(self, draws: random.Random) -> dict[str, object] | None:
        """Flip the last bit of each column of a row group and return which; None if only one intact group is left."""
        return self._damage(draws, lambda content: content[:-1] + bytes([content[-1] ^ 1]))

    def _damage(self, draws: random.Random, change: Callable[[bytes], bytes]) -> dict[str, object] | None:
        if len(self._whole) < 2:
            return None
        name, group = self._whole.pop(draws.randrange(len(self._whole)))
        path = self.folder / name
        metadata = pq.read_metadata(path).row_group(group)
        with path.open("r+b") as file:
            for number in range(metadata.num_columns):
                chunk = metadata.column(number)
                place = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)))
                file.seek(place)
                content = file.read(chunk.total_compressed_size)
                file.seek(place)
                file.write(change(content))
        return {"file": name, "row_group": group}
