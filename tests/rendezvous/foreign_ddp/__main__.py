"""A minimal DDP script of a user that does not know this package.

Arguments: a log, and a file whose existence ends the script.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

log, stop = sys.argv[1:]


def say(**fields: object) -> None:
    with open(log, "a") as file:  # noqa: PTH123
        file.write(json.dumps({"t": time.time(), "pid": os.getpid(), **fields}) + "\n")


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
context = json.loads(os.environ.get("ELASTIC_RENDEZVOUS", "{}"))
steps, is_last = 0, torch.zeros(1)
while not is_last.item():
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    steps += 1
    if steps == 3:
        weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        say(op="trains", rank=rank, world=world, restarts=restarts, context=context, weights=weights)
    is_last[0] = os.path.exists(stop)  # noqa: PTH110
    dist.all_reduce(is_last)
    time.sleep(0.01)
dist.barrier()
say(op="done", rank=rank, steps=steps)
