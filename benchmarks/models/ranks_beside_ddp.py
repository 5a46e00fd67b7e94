"""A rank of a job and of a DDP loop that takes turns with it on the same tensors; a program of `slow_wire`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models.beside import as_by_default, train_beside
from benchmarks.models.plain import PlainLoop
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.training.session import Session


class RanksInTurn:
    """Lets DDP repeat every few steps of the trainer's ranks; all ranks begin a turn together."""

    def __init__(self, name: str, steps_a_turn: int, port: str) -> None:
        self._name, self._steps_a_turn, self._port = name, steps_a_turn, port
        self.ours_s: list[float] = []
        self.ddp_s: list[float] = []
        self.num_bytes = 0
        self.ddp: PlainLoop | None = None

    def between(self, session: Session, steps: Iterator[Sequence[LaneBatch]]) -> Iterator[Sequence[LaneBatch]]:
        """Yield the trainer's steps, and let DDP repeat them, except the last one, which ends the job."""
        with as_by_default():
            ddp = self.ddp = self._ddp(session)
        taken, began = list[Sequence[LaneBatch]](), self._now()
        for lanes in steps:
            taken.append(lanes)
            yield lanes
            if len(taken) < self._steps_a_turn:
                continue
            self.ours_s.append(time.perf_counter() - began)
            began = self._now()
            with as_by_default():
                for each in taken:
                    ddp.step([batch.tensors for batch in each if batch.tensors is not None])
            self.ddp_s.append(time.perf_counter() - began)
            taken.clear()
            began = self._now()

    def _ddp(self, session: Session) -> PlainLoop:
        rank, size = session.world.group.rank, session.world.group.size
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{self._port}", rank=rank, world_size=size)
        model = session.plan.task.build_model()
        model.load_state_dict(session.state.model.state_dict())
        self.num_bytes = sum(one.nbytes for one in model.parameters())
        options = session.plan.config.optimizer.model_dump()
        return PlainLoop(self._name, DistributedDataParallel(model.train()), options)

    @staticmethod
    def _now() -> float:
        dist.barrier()
        return time.perf_counter()


def main() -> None:
    """Take part in a job, and write the seconds of all turns to a file."""
    _, name, path, out, steps_a_turn, port, overrides = sys.argv
    turns = RanksInTurn(name, int(steps_a_turn), port)
    train_beside(path, turns, json.loads(overrides))
    if os.environ["RANK"] == "0":
        found = {"ours_s": turns.ours_s, "ddp_s": turns.ddp_s, "num_bytes": turns.num_bytes}
        Path(out).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # threads of two process groups need not end in order


if __name__ == "__main__":
    main()
