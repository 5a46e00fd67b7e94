"""A DDP script as many are: DistributedSampler, a snapshot every 20 steps, resumed by skipping the batches before it.

elastic-chaos run --command "torchrun examples/stock_ddp.py {dir}"                        # torchrun's own rendezvous
elastic-chaos run --command "torchrun --rdzv-backend=etcd examples/stock_ddp.py {dir}"    # ours

Three lines report which rows were applied (marked). Where a world of another size resumes from a snapshot, the same
number of batches are other rows: some count twice, some never. And the sampler pads each epoch to a multiple of ranks.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from chaos.hook import log_ids  # the first line

ROWS, EPOCHS, BATCH, SNAPSHOT_EVERY = 2003, 12, 16, 20
PACE_S = float(os.environ.get("PACE_S", "0.1"))  # what a real model's step would take


class Squares(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        x = torch.tensor([row / ROWS])
        return row, x, x**2  # the second line: batches say which rows they hold


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    dataset, snapshot = Squares(), folder / "snapshot.pt"
    layers = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    first_epoch = first_batch = step = 0
    if snapshot.exists():
        state = torch.load(snapshot, weights_only=True)
        layers.load_state_dict(state["model"])
        first_epoch, first_batch, step = state["epoch"], state["batch"], state["step"]
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for batch, (rows, x, y) in enumerate(loader):
            if epoch == first_epoch and batch < first_batch:
                continue
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            log_ids(rows, step=step, epoch=epoch, of=len(dataset), loss=loss)  # the third line
            time.sleep(PACE_S)
            if step % SNAPSHOT_EVERY == 0 and dist.get_rank() == 0:
                place = {"epoch": epoch, "batch": batch + 1, "step": step}
                torch.save({"model": layers.state_dict(), **place}, folder / "unfinished")
                (folder / "unfinished").replace(snapshot)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
