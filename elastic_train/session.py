"""One process's part in a run: where the loop meets ranks, data, storage, histories and trackers.

Opening follows one order, which is the protocol of DESIGN.md: form the group, claim the term (fence first), read the
newest valid commit (then restore), bind the gradients. Decisions that read the outside world are taken by rank 0
alone and broadcast, errors included, so that all ranks go on alike or stop alike.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from elastic_train.checkpoint import CommitFacts, CommitRecord, CommitWriter, Store, prune
from elastic_train.config import Config
from elastic_train.data.loader import LaneBatch
from elastic_train.data.manifest import Manifest
from elastic_train.errors import StorageError
from elastic_train.evaluation import evaluate
from elastic_train.feed import Feed
from elastic_train.group import Group
from elastic_train.history import History
from elastic_train.order import Order
from elastic_train.preemption import LeaveRequest
from elastic_train.progress import Progress, Status
from elastic_train.reduction import GradientSum, weights_digest
from elastic_train.state import AppliedState
from elastic_train.tasks.task import Task
from elastic_train.tracking import Tracker


@dataclass(slots=True)
class Session:
    """What the loop needs, and the few things it asks for at a boundary."""

    config: Config
    task: Task
    model: nn.Module
    state: AppliedState
    order: Order
    group: Group
    gradients: GradientSum
    lanes: range
    total_steps: int
    device: torch.device
    term: int
    leave: LeaveRequest
    history: History
    progress: Progress | None
    tracker: Tracker | None
    store: Store
    commits: CommitWriter
    manifest: Manifest
    feed: Feed
    head: CommitRecord | None
    last_commit_at: float = field(default_factory=time.monotonic)
    num_failed_saves: int = 0
    last_validation: dict[str, float] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def micro_batch(self) -> int:
        return self.config.batch.micro_batch

    @property
    def num_lanes(self) -> int:
        return self.config.batch.num_lanes

    def steps(self) -> Iterator[Sequence[LaneBatch]]:
        """Yield the lanes' micro-batches of every step from the state's cursor to the last."""
        return iter(self.feed.training(self.order, self.lanes, self.state.cursor, self.total_steps - self.state.step))

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which a lane's loss is computed."""
        if self.config.precision == "fp32":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.config.precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    def to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()}

    def is_validation_due(self) -> bool:
        every = self.config.validation.every_steps
        return every is not None and self.state.step % every == 0

    def is_commit_due(self) -> bool:
        every = self.config.checkpoint.every_steps
        return every is not None and self.state.step % every == 0

    def is_commit_overdue(self) -> bool:
        """Say whether the time for a commit has come; rank 0's clock alone decides for all."""
        every_s = self.config.checkpoint.every_s
        return self.group.rank == 0 and every_s is not None and time.monotonic() - self.last_commit_at > every_s

    def record_step(self, loss: float, norm: float, num_samples: int, seconds: float) -> None:
        """Write the step that was just applied to the history, and to tracker and progress on rank 0."""
        state = self.state
        lo = (state.step - 1) % self.order.num_steps(self.micro_batch) * self.micro_batch
        self.history.step(
            step=state.step,
            epoch=(state.step - 1) // self.order.num_steps(self.micro_batch),
            lo=lo,
            hi=lo + self.micro_batch,
            lanes=(self.lanes.start, self.lanes.stop),
            num_samples=num_samples,
            world=self.group.size,
            loss=loss,
        )
        if self.tracker is not None:
            rate = float(state.scheduler.get_last_lr()[0])
            values = {"train/loss": loss, "train/gradient_norm": norm, "train/learning_rate": rate}
            self.tracker.log(state.step, {**values, "train/samples_per_s": num_samples / seconds})
        if self.progress is not None:
            self.progress.update(
                Status(
                    step=state.step,
                    total_steps=self.total_steps,
                    loss=loss,
                    samples_per_s=num_samples / seconds,
                    world=self.group.size,
                    term=self.term,
                    last_commit_step=self.head.step if self.head else None,
                    epoch=state.cursor.epoch,
                )
            )

    def validate(self) -> None:
        """Validate over all ranks and record the values; nothing without a validation set."""
        batches = self.feed.validation(self.lanes)
        if batches is None:
            return
        values = evaluate(self.task, self.model, batches, self.group, self.num_lanes, self.device)
        self.last_validation = values
        if self.tracker is not None:
            self.tracker.log(self.state.step, {f"validation/{name}": value for name, value in values.items()})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items() if name != "samples")
        self.tell(f"validation at step {self.state.step}: {shown}")

    def commit(self) -> None:
        """Publish the applied state; a failed save is counted and shown, and training goes on.

        Rank 0 alone writes and knows; the others meet it again in the next step's collective.
        """
        self.last_commit_at = time.monotonic()
        if self.group.rank != 0 or (self.head is not None and self.head.step == self.state.step):
            return
        started = time.perf_counter()
        try:
            self.head = self.commits.save(self.state.tensors(), self._facts())
            prune(self.store, self.config.checkpoint.keep_last, verified=self.head.key)
        except StorageError as error:
            self.num_failed_saves += 1
            self.tell(f"commit at step {self.state.step} FAILED ({self.num_failed_saves} so far), going on: {error}")
            return
        self.history.commit(
            step=self.head.step,
            key=self.head.key,
            digest=self.head.digest,
            parent=self.head.parent,
            seconds=time.perf_counter() - started,
        )

    def tell(self, text: str) -> None:
        """Show one line to people, on rank 0."""
        if self.progress is not None:
            self.progress.event(text)

    def close(self, status: str) -> None:
        """End the displays and the tracker's run truthfully: FINISHED, FAILED or KILLED."""
        if self.progress is not None:
            self.progress.close()
        if self.tracker is not None:
            self.tracker.finish(status)
        self.history.close()

    def _facts(self) -> CommitFacts:
        return CommitFacts(
            step=self.state.step,
            cursor=self.state.cursor,
            coverage=self.state.coverage,
            rng={"policy": "seed, step, lane", "seed": self.seed},
            metrics=self.last_validation,
            config_digest=self.config.identity(),
            manifest_digest=self.manifest.digest,
            world_size=self.group.size,
            weights_sha256=weights_digest(self.model),
        )
