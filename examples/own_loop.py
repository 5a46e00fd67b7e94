"""Our data in a loop of your own: any Arrow schema, your own collate, resumed on another number of ranks.

torchrun --nproc-per-node=4 examples/own_loop.py data/prices 60 state.json      # 4 ranks for 60 steps
torchrun --nproc-per-node=3 examples/own_loop.py data/prices 1000 state.json    # 3 resume with exactly the rest

On several nodes: the same on each, with --nnodes and --rdzv-endpoint; the folder and the state are shared.
"""

import itertools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import elastic_train as et

NUM_LANES, MICRO_BATCH = 12, 2  # a step is 24 rows, whatever the number of ranks


def main(folder: str, max_steps: int, kept: Path) -> None:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
    manifest = et.load_manifest(folder)
    order = et.Order(manifest.group_rows, num_lanes=NUM_LANES, seed=1)
    num_steps = order.num_steps(MICRO_BATCH)  # one epoch
    lanes = et.owned_lanes(rank, world_size, NUM_LANES)
    place = {"lanes": lanes, "micro_batch": MICRO_BATCH, "cursor": et.Cursor(), "num_steps": num_steps}
    loader = et.LaneLoader(et.Reader(manifest, ["price"]), order, collate, **place)
    if kept.exists():
        loader.load_state_dict(json.loads(kept.read_text()))  # refused if it is of another order or dataset
    for step in itertools.islice(loader, max_steps):
        for batch in step:
            if batch.tensors is None:  # at an epoch's end some lanes have no sample left
                continue
            print(*batch.ids, flush=True)  # batch.tensors["price"] is what you train on
    if world_size > 1:
        dist.init_process_group("gloo")  # a real loop has one already
        dist.barrier()  # all ranks have read the state before it is replaced
        dist.destroy_process_group()
    if rank == 0:  # the state is the same on every rank: epoch, offset, and the fingerprint of the order
        unfinished = kept.with_suffix(".new")
        unfinished.write_text(json.dumps(loader.state_dict()))
        unfinished.replace(kept)  # a kill leaves the old state or the new one, never half of one


def collate(rows, ids):
    return {"price": torch.from_numpy(rows.column("price").to_numpy().copy())}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
