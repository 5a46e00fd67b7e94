"""Write a small Parquet dataset with a schema of its own, and the manifest that makes it trainable."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import elastic_train as et


def main(folder: Path, num_rows: int = 2000, num_files: int = 2) -> None:
    """Write `num_files` files of `num_rows` rows in all, then build manifest.json beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    area, rooms = rng.uniform(20, 200, num_rows) / 100, rng.integers(1, 7, num_rows)
    price = (3 * area + 0.2 * rooms + rng.normal(0, 0.05, num_rows)).astype(np.float32)
    table = pa.table({"area": area, "rooms": rooms.astype(np.int32), "price": price})
    share = -(-num_rows // num_files)
    for number in range(num_files):
        rows = table.slice(number * share, share)
        pq.write_table(rows, folder / f"part-{number}.parquet", row_group_size=128)
    et.build_manifest(str(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data/prices"))
