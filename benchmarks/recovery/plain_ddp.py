"""A minimal DDP script without this package, which the benchmarks run under every rendezvous.

Arguments: a file to which every rank appends a line of JSON for every step.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(log: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with open(log, "a", buffering=1) as file:  # noqa: PTH123
        while True:
            optimizer.zero_grad()
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            line = {"op": "step", "t": time.time(), "pid": os.getpid(), "rank": rank, "world": world}
            file.write(json.dumps(line) + "\n")
            time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1])
