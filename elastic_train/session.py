"""One process's part in a run: what the loop needs, and the few things it asks for at a step boundary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from elastic_train.checkpoint import CommitFacts, CommitRecord, CommitWriter, prune
from elastic_train.data.loader import LaneBatch
from elastic_train.errors import StorageError
from elastic_train.evaluation import evaluate
from elastic_train.failpoints import reach
from elastic_train.plan import Plan
from elastic_train.preemption import LeaveRequest
from elastic_train.progress import Status
from elastic_train.reduction import GradientSum, weights_digest
from elastic_train.state import AppliedState
from elastic_train.tracking import Tracker
from elastic_train.watchdog import Watchdog
from elastic_train.world import World, agree
from elastic_train.worlds import Worlds

LAST_COMMIT_TRIES = 3
LAST_COMMIT_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Process:
    """What a process keeps over all of its worlds."""

    plan: Plan
    state: AppliedState
    worlds: Worlds
    leave: LeaveRequest
    watchdog: Watchdog
    started_at: float


@dataclass(slots=True)
class Session:
    """A process in a world."""

    plan: Plan
    world: World
    state: AppliedState
    gradients: GradientSum
    lanes: range
    leave: LeaveRequest
    worlds: Worlds
    watchdog: Watchdog
    commits: CommitWriter
    tracker: Tracker | None
    head: CommitRecord | None
    last_commit_at: float = field(default_factory=time.monotonic)
    num_failed_saves: int = 0

    def steps(self) -> Iterator[Sequence[LaneBatch]]:
        """Yield the lanes' micro-batches of every step from the state's cursor to the last."""
        plan, state = self.plan, self.state
        steps = plan.feed.training(plan.order, self.lanes, state.cursor, plan.total_steps - state.step)
        return self.watchdog.beating(steps)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which a lane's loss is computed."""
        if self.plan.config.precision == "fp32":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.plan.config.precision == "bf16" else torch.float16
        return torch.autocast(self.plan.device.type, dtype=dtype)

    def to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.plan.device, non_blocking=True) for name, tensor in tensors.items()}

    def is_validation_due(self) -> bool:
        every = self.plan.config.validation.every_steps
        return every is not None and self.state.step % every == 0

    def is_commit_due(self) -> bool:
        every = self.plan.config.checkpoint.every_steps
        return every is not None and self.state.step % every == 0

    def is_commit_overdue(self) -> bool:
        """Say whether the time for a commit has come; rank 0's clock alone decides for all."""
        every_s = self.plan.config.checkpoint.every_s
        return self.world.is_leader and every_s is not None and time.monotonic() - self.last_commit_at > every_s

    def record_step(self, loss: float, norm: float, num_samples: int, seconds: float) -> None:
        """Write the step that was just applied to the history, and to tracker and progress on rank 0."""
        state = self.state
        lo = (state.step - 1) % self.plan.order.num_steps(self.plan.micro_batch) * self.plan.micro_batch
        self.world.history.step(
            step=state.step,
            epoch=(state.step - 1) // self.plan.order.num_steps(self.plan.micro_batch),
            lo=lo,
            hi=lo + self.plan.micro_batch,
            lanes=(self.lanes.start, self.lanes.stop),
            num_samples=num_samples,
            world=self.world.group.size,
            loss=loss,
        )
        if self.tracker is not None:
            rate = float(state.scheduler.get_last_lr()[0])
            values = {"train/loss": loss, "train/gradient_norm": norm, "train/learning_rate": rate}
            self.tracker.log(state.step, {**values, "train/samples_per_s": num_samples / seconds})
        if self.world.progress is not None:
            self.world.progress.update(
                Status(
                    step=state.step,
                    total_steps=self.plan.total_steps,
                    loss=loss,
                    samples_per_s=num_samples / seconds,
                    world=self.world.group.size,
                    term=self.world.term,
                    last_commit_step=self.head.step if self.head else None,
                    epoch=state.cursor.epoch,
                )
            )

    def validate(self) -> None:
        """Validate over all ranks and record the values; nothing without a validation set."""
        reach("validate")
        batches = self.plan.feed.validation(self.lanes)
        if batches is None:
            return
        values = evaluate(
            self.plan.task,
            self.state.model,
            self.watchdog.beating(batches),
            self.world.group,
            self.plan.num_lanes,
            self.plan.device,
        )
        self.state.reached = replace(self.state.reached, validation=values)
        if self.tracker is not None:
            better = {name: metric.higher_is_better for name, metric in self.plan.task.metrics().items()}
            self.tracker.log(
                self.state.step,
                {f"validation/{name}": value for name, value in values.items()},
                {f"validation/{name}": is_so for name, is_so in {"loss": False, **better}.items() if is_so is not None},
            )
        shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items() if name != "samples")
        self.world.tell(f"validation at step {self.state.step}: {shown}")

    def commit(self) -> None:
        """Publish the applied state; a failed save is counted and shown, and training goes on.

        Rank 0 alone writes and knows; the others meet it again in the next step's collective.
        """
        self.last_commit_at = time.monotonic()
        if not self.world.is_leader or (self.head is not None and self.head.step == self.state.step):
            return
        reach("commit")
        with self.watchdog.resting():  # a store has deadlines of its own
            self._publish()

    def _publish(self) -> None:
        started = time.perf_counter()
        facts = describe_commit(self.plan, self.state, self.world.group.size)
        try:
            self.head = self.commits.save(self.state.tensors(), facts, self.state.reached.intervals)
        except StorageError as error:
            self.num_failed_saves += 1
            self.world.tell(
                f"commit at step {self.state.step} FAILED ({self.num_failed_saves} so far), going on: {error}"
            )
            return
        self.world.history.commit(
            step=self.head.step,
            key=self.head.key,
            digest=self.head.digest,
            parent=self.head.parent,
            seconds=time.perf_counter() - started,
        )
        if self.tracker is not None:
            self.tracker.commit(self.head.step, self.head.key)
        try:
            prune(self.world.store, self.plan.config.checkpoint.keep_last, verified=self.head.key)
        except StorageError as error:
            self.world.tell(f"old commits could not be deleted: {error}")

    def commit_or_fail(self) -> None:
        """Commit what a job ends with: tries again for a while, and raises StorageError on every rank if it fails."""
        agree(self.world.group, self._insist)

    def _insist(self) -> None:
        for attempt in range(LAST_COMMIT_TRIES):
            if attempt:
                time.sleep(LAST_COMMIT_PAUSE_S)
            self.commit()
            if self.head is not None and self.head.step == self.state.step:
                return
        raise StorageError(
            f"step {self.state.step} could not be committed in {LAST_COMMIT_TRIES} tries: make room in "
            f"{self.world.store.url} and start again, to go on from step {self.head.step if self.head else 0}"
        )

    def pause(self) -> None:
        """End this world's displays and records; the tracker's run goes on with the next world's."""
        if self.tracker is not None:
            self.tracker.pause()
        self.world.close()

    def close(self, status: str) -> None:
        """End the displays and the tracker's run truthfully: FINISHED, FAILED or KILLED."""
        if self.tracker is not None:
            self.tracker.finish(status)
        self.world.close()


def describe_commit(plan: Plan, state: AppliedState, world_size: int) -> CommitFacts:
    """Return what a commit of the state says of it."""
    return CommitFacts(
        step=state.step,
        cursor=state.cursor,
        coverage=state.coverage,
        rng={"policy": "seed, step, lane", "seed": plan.config.run.seed},
        metrics=state.reached.validation,
        config_digest=plan.config.identity(),
        manifest_digest=plan.manifest.digest,
        world_size=world_size,
        weights_sha256=weights_digest(state.model),
    )
