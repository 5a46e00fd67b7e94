"""What is modelled because it would be tensors: the model, its gradient, the samples' bytes and the files of a commit.

The state is a hash that every step folds the applied samples' ids into (in any order, since lanes add up), and the
witness's counts, one for every sample. Equal hashes at the end are equal weights; the counts need no trust in anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from chaos.sim.net import SimGroup
from elastic_train.account import Account, Hole
from elastic_train.checkpoint import Retention, layout
from elastic_train.checkpoint.checksums import FileRecord, open_checked
from elastic_train.checkpoint.format import WrittenPart
from elastic_train.checkpoint.hashing import HashingSink
from elastic_train.checkpoint.layout import AttemptPlan, Leaves, Part, State
from elastic_train.checkpoint.record import CommitRecord
from elastic_train.checkpoint.record import Path as LeafPath
from elastic_train.checkpoint.staging import Buffer, Snapshot
from elastic_train.checkpoint.stores import Store
from elastic_train.config import Config
from elastic_train.coverage import CoverageSums
from elastic_train.data.carrier import LaneSampler
from elastic_train.data.lane_batch import LaneBatch
from elastic_train.failpoints import reach
from elastic_train.mixing import Int64s, derive, mix64
from elastic_train.order import Cursor, Order
from elastic_train.state import Reached
from elastic_train.weights import tensor_digest

_MASK = (1 << 64) - 1


@dataclass
class Weights:
    """The modelled weights, and the gradient that the next step adds."""

    counts: Int64s
    words: Int64s = field(default_factory=lambda: np.zeros(2, np.int64))
    ids: Int64s | None = None
    gradient: int = 0

    @property
    def digest(self) -> int:
        return int(self.words[1]) << 32 | int(self.words[0])

    @digest.setter
    def digest(self, digest: int) -> None:
        self.words[:] = digest & 0xFFFFFFFF, digest >> 32

    def state_dict(self) -> dict[str, object]:
        return {"counts": torch.from_numpy(self.counts), "digest": torch.from_numpy(self.words)}

    def parameters(self) -> Iterator[Weights]:
        yield self


@dataclass
class ModelledState:
    """What `elastic_train.state.AppliedState` is to its users."""

    model: Weights
    reached: Reached = field(default_factory=Reached)

    @property
    def step(self) -> int:
        return self.reached.step

    @property
    def cursor(self) -> Cursor:
        return self.reached.cursor

    @property
    def coverage(self) -> CoverageSums:
        return self.reached.coverage

    def apply(self, cursor: Cursor, coverage: CoverageSums, term: int, account: Account) -> float:
        weights = self.model
        assert weights.ids is not None, "a step has a gradient"
        weights.counts += np.bincount(weights.ids, minlength=len(weights.counts))
        weights.digest = derive(weights.digest, weights.gradient, self.step)
        weights.ids = None
        self.reached = self.reached.advance(cursor, coverage, term, account)
        return 0.0

    def tensors(self) -> State:
        """Return the saved part; its tensors are the live ones."""
        return {"model": self.model.state_dict()}

    def stillness(self) -> Callable[[LeafPath], bool]:
        """Only `apply` changes anything."""
        return lambda path: True

    def restore(self, fill: Callable[[State], None], reached: Reached) -> None:
        tree = self.tensors()
        fill(tree)
        model = tree["model"]
        assert isinstance(model, dict), "as it was saved"
        self.model.words, self.model.counts = model["digest"].numpy().copy(), model["counts"].numpy().copy()
        self.reached = reached


class ModelledSum:
    """What `elastic_train.reduction.GradientSum` is: the lanes' samples, and the commutative sum of their hashes."""

    def __init__(self, weights: Weights, group: SimGroup) -> None:
        self._weights, self._group = weights, group
        self._ids: list[Int64s] = []

    def begin(self, lanes: range) -> None:
        self._ids = []

    def lane(self, lane: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def add(self, ids: Int64s) -> None:
        self._ids.append(ids)

    def finish(self, divisor: float) -> None:
        parts = self._group.exchange_objects(tuple(self._ids))
        ids = [ids for part in parts if isinstance(part, tuple) for ids in part]
        self._weights.ids = np.concatenate(ids) if ids else np.zeros(0, np.int64)
        self._weights.gradient = sum(_hash_of(tuple(some.tolist())) for some in ids) & _MASK


@lru_cache(1 << 16)
def _hash_of(ids: tuple[int, ...]) -> int:
    return sum(mix64(id_ + 1) for id_ in ids) & _MASK


@dataclass(frozen=True)
class ModelledManifest:
    group_rows: Int64s

    url = "sim://data"

    @property
    def num_rows(self) -> int:
        return int(self.group_rows.sum())

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.group_rows.tobytes()).hexdigest()


class ModelledTask:
    """Leaves the witness's counts at the end."""

    def __init__(self, leave: Callable[[Int64s], None]) -> None:
        self._leave = leave

    def metrics(self) -> Mapping[str, object]:
        return {}

    def finish(self, model: Weights, folder: Path) -> None:
        self._leave(model.counts.copy())


class ModelledFeed:
    """Lanes from a cursor on, by the product's own order and sampler; ids are read, rows are not."""

    def training(
        self, order: Order, lanes: range, cursor: Cursor, num_steps: int, holes: Sequence[Hole] = ()
    ) -> Iterable[Sequence[LaneBatch]]:
        step: list[LaneBatch] = []
        for (slice_,) in LaneSampler(order, lanes, micro_batch_of(order), cursor, num_steps):
            step.append(_batch(order, slice_.epoch, slice_.lane, slice_.lo, slice_.hi))
            if len(step) == len(lanes):
                reach("data")
                yield step
                step = []

    def validation(self, lanes: range) -> None:
        return None


def micro_batch_of(order: Order) -> int:
    return int(order.micro_batch)  # type: ignore[attr-defined]  # set by `order_of`


@lru_cache(1 << 16)
def _batch(order: Order, epoch: int, lane: int, lo: int, hi: int) -> LaneBatch:
    ids = order.epoch(epoch).ids(lane, lo, hi)
    return LaneBatch(lane, epoch, lo, lo + len(ids), ids, {} if len(ids) else None)


@lru_cache(64)
def order_of(rows: tuple[int, ...], num_lanes: int, seed: int, micro_batch: int) -> Order:
    """Return the order of a run; runs of one shape share it, and what was worked out of it."""
    order = Order(rows, num_lanes=num_lanes, seed=seed, block_row_groups=2)
    order.micro_batch = micro_batch  # type: ignore[attr-defined]
    return order


@dataclass(frozen=True)
class ModelledPlan:
    """What `elastic_train.plan.Plan` is to its users."""

    config: Config
    task: ModelledTask
    manifest: ModelledManifest
    order: Order
    feed: ModelledFeed
    total_steps: int
    device: torch.device

    @property
    def num_lanes(self) -> int:
        return self.config.batch.num_lanes

    @property
    def micro_batch(self) -> int:
        return self.config.batch.micro_batch

    @property
    def retention(self) -> Retention:
        return Retention.of(last=self.config.checkpoint.keep_last)

    def build_state(self) -> ModelledState:
        return ModelledState(Weights(np.zeros(self.manifest.num_rows, np.int64)))

    def check_continues(self, record: CommitRecord) -> None:
        assert record.manifest_digest == self.manifest.digest and record.config_digest == self.config.identity()


@lru_cache(1 << 16)
def sums_of(ids: tuple[int, ...]) -> CoverageSums:
    return CoverageSums.of_ids(np.array(ids, np.int64))


class SlowSnapshot(Snapshot):
    """A snapshot whose copy takes time, so that training comes to where it must wait for it."""

    def __init__(self, sleep: Callable[[], None], part: Part, leaves: Leaves, is_still: Callable[[LeafPath], bool]):
        super().__init__(part, leaves, is_still)
        self._sleep = sleep

    def copy(self, buffer: Buffer, check: Callable[[], None], tell: Callable[[int], None]) -> None:
        self._sleep()
        super().copy(buffer, check, tell)


_plans: dict[tuple[int, int, int], AttemptPlan] = {}
_plan_attempt = layout.plan_attempt


def plan_attempt(state: State, num_writers: int = 1) -> AttemptPlan:
    """Plan as the product does, once for every shape: torch's planner is slow, and states of one size are alike."""
    model = state["model"]
    assert isinstance(model, dict), "as `ModelledState.tensors` makes it"
    shape = model["counts"].numel(), num_writers, layout.LEAST_PART_BYTES
    if shape not in _plans:
        _plans[shape] = _plan_attempt(state, num_writers)
    return _plans[shape]


def write_part(
    store: Store, attempt: str, part: Part, contents: Iterable[memoryview], plain: Mapping[str, bytes]
) -> WrittenPart:
    """Write one part's file as JSON, with the product's checksums."""
    assert not plain, "the modelled state holds tensors"
    with store.write(f"{attempt}/{part.name}") as file, HashingSink(file) as sink:
        held = [(str(slot.path[-1]), slot, content) for slot, content in zip(part.slots, contents, strict=True)]
        numbers = {name: np.frombuffer(content, np.int64).tolist() for name, _, content in held}
        digests = {name: tensor_digest(slot.dtype, slot.shape, content) for name, slot, content in held}
        sink.write(json.dumps(numbers).encode())
        sink.close()
    return WrittenPart(part.name, sink.record(), {}, digests)


def finish_attempt(
    store: Store, attempt: str, plan: AttemptPlan, written: Sequence[WrittenPart]
) -> dict[str, FileRecord]:
    return {part.name: part.file for part in written}


def read_leaves(
    store: Store, attempt: str, files: Mapping[str, FileRecord], wanted: Mapping[LeafPath, object]
) -> dict[LeafPath, object]:
    leaves: dict[LeafPath, object] = {}
    for name, record in files.items():
        content = bytearray(record.size)
        with open_checked(store, f"{attempt}/{name}", record) as file:
            file.fill(0, [memoryview(content)])
        leaves |= {("model", name): torch.tensor(numbers) for name, numbers in json.loads(content).items()}
    return leaves
