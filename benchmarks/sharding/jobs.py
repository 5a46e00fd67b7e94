"""A job that takes steps like the training loop, with whole or sharded state, and nothing around it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from elastic_train.config.parallel import BucketSize, ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.accounting import CoverageSums, SampleAccount
from elastic_train.core.lanes import lane_seed
from elastic_train.core.mesh import Mesh
from elastic_train.core.order import Cursor
from elastic_train.job.build import build_state
from elastic_train.job.peer_states import PeerState, gather_peer_states, roll_forward
from elastic_train.job.reshard import take_first_seat, take_state
from elastic_train.job.state import AppliedState, StepFacts, norm_of
from elastic_train.job.units.blocks import recording_order
from elastic_train.parallel.group import Group
from elastic_train.tasks.models.text_encoder import EncoderShape, TextEncoder

Mode = Literal["none", "optimizer", "gradients", "parameters"]
MODES: tuple[Mode, ...] = get_args(Mode)[1:]
"""Modes of sharding, from least to most sharded; the last one is compared with `fully_shard`."""
CLIP_NORM = 0.01
OPTIMIZER = OptimizerConfig(clip_norm=CLIP_NORM, warmup_steps=2)
TOTAL_STEPS = 10_000


class Computing(Protocol):
    """The model and the loss of a job."""

    @property
    def num_lanes(self) -> int: ...

    @property
    def num_samples(self) -> int: ...

    def build(self) -> nn.Module:
        """Build the model, with the same weights on every rank."""

    def loss(self, model: nn.Module, step: int, lane: int) -> Tensor:
        """Return a lane's loss, summed over its samples."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step: lanes of `micro_batch` samples with `num_tokens` tokens each, by a transformer encoder."""

    shape: EncoderShape
    num_lanes: int = 8
    micro_batch: int = 4
    num_tokens: int = 64

    def build(self) -> TextEncoder:
        """Build the model, with the same weights on every rank."""
        torch.manual_seed(1)
        return TextEncoder(self.shape).train()

    def loss(self, model: nn.Module, step: int, lane: int) -> Tensor:
        """Return the loss, summed over the samples, of random inputs for a lane of a step."""
        torch.default_generator.manual_seed(lane_seed(1, step, lane))  # torch's own function formats three tracebacks
        tokens = torch.randint(1, self.shape.vocabulary, (self.micro_batch, self.num_tokens))
        lengths = torch.full((self.micro_batch,), self.num_tokens)
        numbers, missing = torch.zeros(self.micro_batch, 1), torch.zeros(self.micro_batch, 1, dtype=torch.bool)
        logits: Tensor = model(tokens, lengths, numbers, missing, torch.zeros(self.micro_batch, 1, dtype=torch.int64))
        return nn.functional.cross_entropy(logits, tokens[:, 0] % self.shape.num_classes, reduction="sum")

    @property
    def num_samples(self) -> int:
        return self.num_lanes * self.micro_batch


SMALL = Work(EncoderShape(8192, 11, 128, 256, 4, 4, 0.1, 1, 1, 64))
WIDE = Work(EncoderShape(8192, 11, 128, 512, 8, 8, 0.1, 1, 1, 64), micro_batch=1, num_tokens=32)
"""Models of 5 and 30 million parameters."""


class Job:
    """A training state, and its steps."""

    def __init__(
        self,
        group: Group,
        work: Computing,
        shards: Mode,
        copies: int = 1,
        bucket_mb: BucketSize = "auto",
        term: int = 1,
    ) -> None:
        parallel = ParallelConfig(shards=shards, copies=copies, bucket_mb=bucket_mb)
        self.work, self._path = work, ("", str(group.rank))
        model = work.build()
        device = str(next(model.parameters()).device)
        self.state: AppliedState = build_state(model, OPTIMIZER, TOTAL_STEPS, device, is_fp16=False, parallel=parallel)
        with recording_order(self.state.model, self.state.shards.order):
            work.loss(self.state.model, 0, 0)
        self.enter(group, term)

    def enter(self, group: Group, term: int = 1) -> Sequence[PeerState]:
        """Join a world and roll forward to its ranks' furthest step; sharded state gets a seat.

        Returns each rank's state if shards were lost: nothing has changed then, and the caller must call `begin_anew`.
        Returns an empty list otherwise.
        """
        self.group, self.term, state = group, term, self.state
        state.shards.enter(Mesh(group.rank, group.size), None)
        brought: Sequence[PeerState] = gather_peer_states(group, state, self._path)
        brought = roll_forward(group, state, brought)
        if take_state(group, state, brought).lost.size:
            return brought
        self._bind()
        return []

    def begin_anew(self, brought: Sequence[PeerState]) -> None:
        """Take a seat whose content will be loaded from a commit."""
        self.state.drop_pending()
        take_first_seat(self.group, self.state.shards, brought)
        self._bind()

    def _bind(self) -> None:
        self.state.shards.share.agree_on_order(self.group, self.state.shards.order)
        self.state.shards.trained_in = self.term
        self.gradients = self.state.shards.sum_of(self.group, self.work.num_lanes)
        self.lanes = self.state.shards.table.assigned(self.work.num_lanes)[self.group.rank]

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.state.model.parameters())

    def step(self, before_update: Callable[[], object] = lambda: None) -> None:
        """Take one step like the training loop; `before_update` waits for a save."""
        measured = self.compute(before_update=before_update)
        self.apply(norm_of(self.group.all_gather(measured), self.state.shards.table))
        self.state.shards.share.refresh(self.group)

    def compute(
        self, in_lane: Callable[[], object] = lambda: None, before_update: Callable[[], object] = lambda: None
    ) -> Tensor:
        """Compute a step's mean gradient, in place in its shards; return this rank's measurement of it."""
        state = self.state
        self.gradients.begin()
        for lane in (*self.lanes, None):  # other ranks of the group may have one lane more
            with self.gradients.turn(lane):
                if lane is not None:
                    torch.autograd.backward(self.work.loss(state.model, state.step, lane))
                    in_lane()
        self.gradients.finish(float(self.work.num_samples))
        before_update()
        return state.measure()

    @property
    def facts(self) -> StepFacts:
        """Facts of the next step."""
        return StepFacts(Cursor(0, self.state.step + 1), CoverageSums(), self.term, SampleAccount())

    def apply(self, norm: Tensor) -> None:
        """Apply the computed step."""
        self.state.apply(self.facts, norm)


def live_bytes() -> int:
    """Return the bytes of all tensors that Python can reach."""
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
