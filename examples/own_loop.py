"""Our data in a loop of your own: any Arrow schema, your own collate, resumed on another number of ranks.

python examples/own_loop.py data/prices 4 60 state.json      # 4 ranks for 60 steps (here one after the other)
python examples/own_loop.py data/prices 3 1000 state.json    # 3 ranks resume with exactly the rest of the epoch
"""

import itertools
import json
import sys
from pathlib import Path

import torch

import elastic_train as et

NUM_LANES, MICRO_BATCH = 12, 2  # a step is 24 rows, whatever the number of ranks


def main(folder: str, world_size: int, max_steps: int, kept: Path) -> None:
    manifest = et.load_manifest(folder)
    order = et.Order(manifest.group_rows, num_lanes=NUM_LANES, seed=1)
    num_steps = order.num_steps(MICRO_BATCH)  # one epoch
    for rank in range(world_size):
        lanes = et.owned_lanes(rank, world_size, NUM_LANES)
        place = {"lanes": lanes, "micro_batch": MICRO_BATCH, "cursor": et.Cursor(), "num_steps": num_steps}
        loader = et.LaneLoader(et.Reader(manifest, ["price"]), order, collate, **place)
        if kept.exists():
            loader.load_state_dict(json.loads(kept.read_text()))  # refused if it is of another order or dataset
        for step in itertools.islice(loader, max_steps):
            for batch in step:
                if batch.tensors is None:  # at an epoch's end some lanes have no sample left
                    continue
                print(*batch.ids)  # batch.tensors["price"] is what you train on
        state = loader.state_dict()  # the same on every rank: epoch, offset, and the fingerprint of the order
    kept.write_text(json.dumps(state))


def collate(rows, ids):
    return {"price": torch.from_numpy(rows.column("price").to_numpy().copy())}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
