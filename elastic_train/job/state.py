"""The applied state: all that an optimizer step changes, one unit that moves from step s to s+1, never between.

Weights, optimizer, scheduler, scaler, cursor, coverage sums and step are saved, restored and handed over together.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.commits.improvement import Improvement
from elastic_train.checkpoint.format.layout import State
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.accounting import SampleAccount
from elastic_train.core.arrays import Ranges
from elastic_train.core.coverage import CoverageSums
from elastic_train.core.lineage import Interval, extend
from elastic_train.core.order import Cursor
from elastic_train.job.commit_pieces import CommitPieces
from elastic_train.job.optimizers.recipe_changes import Recipe, read_recipe, say_changes
from elastic_train.job.sharded.shared_scaler import SharedScaler
from elastic_train.job.state_shards import Place, StateShards
from elastic_train.job.units.compiled import CompiledBlocks
from elastic_train.placement.grains import Layout

_RECIPE = "recipe"
"""The attribute of the scheduler that has the recipe."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What is known of a step whose mean gradient is in place; equal on every rank.

    `cursor` and `account` are those after the step, `coverage` are the step's own sums, `term` is the world's.
    `buffers` are pairs of a buffer and what the step's forward passes have made of it. `loss` is the lanes' sum;
    `is_fast` says that the gradient's rounding depends on the world. `sources` are the sums of each of a mixture.
    """

    cursor: Cursor
    coverage: CoverageSums
    term: int
    account: SampleAccount
    buffers: Sequence[tuple[Tensor, Tensor]] = ()
    loss: float = 0.0
    is_fast: bool = False
    sources: tuple[CoverageSums, ...] = ()
    has_target: bool = True
    """Whether a sample has a target; else a step without a gradient changes nothing, by decay or momentum either."""


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """How far a state has come: its place in the data, the terms that applied its steps, what it was last worth.

    `fast_steps` and `skipped_steps` are half-open ranges of the steps, counted from 0, whose rounding depended on the
    world, and those whose update was left out: loss or gradient was not finite, or no sample had a target.
    `num_nonfinite` counts the newest steps in a row that were not finite. `norm` is that of the last step's gradient,
    where it is known. `improvement` is what early stopping goes by. `sources` are the coverage sums of each source of a
    mixture, over the source's own ids.
    """

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    coverage: CoverageSums = field(default_factory=CoverageSums)
    intervals: tuple[Interval, ...] = ()
    validation: Mapping[str, float | None] = field(default_factory=dict)
    account: SampleAccount = field(default_factory=SampleAccount)
    fast_steps: Ranges = ()
    skipped_steps: Ranges = ()
    num_nonfinite: int = 0
    norm: float = 0.0
    sources: tuple[CoverageSums, ...] = ()
    improvement: Improvement | None = None

    @property
    def term(self) -> int:
        """The term that applied the last step; 0 before the first."""
        return self.intervals[-1].term if self.intervals else 0

    @property
    def is_fast(self) -> bool:
        """Whether the last step's rounding depended on the world."""
        return bool(self.fast_steps) and self.fast_steps[-1][1] == self.step

    def advance(
        self, facts: StepFacts, norm: float = 0.0, *, is_finite: bool = True, is_skipped: bool = False
    ) -> TrainProgress:
        """Return the place one step further."""
        account, total = facts.account, self.coverage + facts.coverage
        if facts.cursor.epoch > self.cursor.epoch:
            account = account.end_epoch(total)
        return replace(
            self,
            step=self.step + 1,
            cursor=facts.cursor,
            coverage=total,
            intervals=extend(self.intervals, facts.term, self.step, self.step + 1),
            account=account,
            fast_steps=_with(self.fast_steps, self.step) if facts.is_fast else self.fast_steps,
            skipped_steps=_with(self.skipped_steps, self.step) if is_skipped else self.skipped_steps,
            num_nonfinite=0 if is_finite else self.num_nonfinite + 1,
            norm=norm,
            sources=add_sources(self.sources, facts.sources),
        )


def add_sources(sources: Sequence[CoverageSums], more: Sequence[CoverageSums]) -> tuple[CoverageSums, ...]:
    """Add to the sums of each source; there are none before the first step."""
    return tuple(mine + own for mine, own in zip(sources or [CoverageSums()] * len(more), more, strict=True))


def _with(ranges: Ranges, step: int) -> Ranges:
    """Append a step, greater than all before, to half-open ranges."""
    if ranges and ranges[-1][1] == step:
        return (*ranges[:-1], (ranges[-1][0], step + 1))
    return (*ranges, (step, step + 1))


@dataclass(frozen=True, slots=True)
class Pending:
    """A step whose gradients this rank holds, and what it has measured of them."""

    facts: StepFacts
    measured: Tensor


@dataclass(slots=True)
class AppliedState:
    """Everything that `apply` changes, and the cut of its weights into grains, which nothing changes."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR
    scaler: SharedScaler
    config: OptimizerConfig
    shards: StateShards
    layout: Layout
    outline: Mapping[str, Sequence[str]]
    """What tells parameters and parameter groups from another rank's, one line each, by what they are."""
    reached: TrainProgress = field(default_factory=TrainProgress)
    pending: Pending | None = None
    """The step that is neither applied nor dropped, if any: what is left of a world decides."""
    recipe: Recipe | None = None
    """What decides its updates, as a commit keeps it."""
    changes: str | None = None
    """What has changed of the recipe since the commit that was restored, in words."""
    compiled: CompiledBlocks | None = None
    """What of the model is compiled, if anything is to be."""
    pieces: CommitPieces = field(init=False)
    """What this rank gives to commits."""
    _first: tuple[dict[str, Any], dict[str, Any]] = field(init=False)
    """Schedule and scaler as they were built."""

    def __post_init__(self) -> None:
        self.pieces = CommitPieces(self.shards)
        self._first = copy.deepcopy((self.scheduler.state_dict(), self.scaler.state_dict()))

    @property
    def step(self) -> int:
        return self.reached.step

    @property
    def num_updates(self) -> int:
        """How many of the applied steps have updated weights."""
        return self.step - sum(hi - lo for lo, hi in self.reached.skipped_steps) - self.scaler.num_overflows

    @property
    def place(self) -> Place:
        return Place(self.reached.step, self.reached.term)

    @property
    def cursor(self) -> Cursor:
        return self.reached.cursor

    @property
    def coverage(self) -> CoverageSums:
        return self.reached.coverage

    def measure(self) -> Tensor:
        """Undo the loss's scale in the reduced gradients that are in place; return what they say of their norm.

        Once for each step, before `apply`. It is on the CPU: a device has computed all of the gradients by then.
        """
        self.scaler.unscale_(self.optimizer)
        return self.shards.measure()

    def hold(self, facts: StepFacts, measured: Tensor) -> None:
        """Keep the step whose gradients are in place until the next world decides: peers may have applied it."""
        self.pending = Pending(facts, measured)

    def drop_pending(self) -> None:
        """Let go of a step that nobody has applied."""
        if self.pending is not None:
            self.pending = None
            self.scaler.forget_step()

    def begin_again(self) -> None:
        """Be where the run begins, but for weights and optimizer: what this rank held of another part is of no use."""
        self.drop_pending()
        self.reached = TrainProgress()
        schedule, scaler = copy.deepcopy(self._first)
        self.scheduler.load_state_dict(schedule)
        self.scaler.load_state_dict(scaler)
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def apply(self, facts: StepFacts, norm: Tensor) -> None:
        """Take one optimizer step with the reduced gradients in place, whose norm is `norm`.

        Clipping, the scaler's decision and what is finite read reduced values only, so every rank decides alike. A step
        whose loss or gradient is not finite leaves weights, moments and buffers alone, unless the configuration keeps
        it; it still counts as applied: its samples are spent. So does one whose fp16 gradients overflowed, which is
        how a scaler finds its scale, and which counts as finite until the scale is too small to be the cause. A step
        without target and gradient is left out, too.
        """
        if self.config.clip_norm is not None:
            self.shards.clip(self.config.clip_norm, norm)
        has_norm = bool(norm.isfinite())
        is_finite = math.isfinite(facts.loss) and (has_norm or self.scaler.is_own_overflow())
        is_empty = not facts.has_target and float(norm) == 0.0
        is_skipped = is_empty or (not is_finite and self.config.on_nonfinite != "keep")
        if not has_norm:
            self.scaler.note_overflow(self.optimizer)
            self.scaler.num_overflows += self.scaler.is_enabled() and not is_skipped
        self.pending = None
        if not is_skipped:
            self.scaler.step(self.optimizer)
            for buffer, value in facts.buffers:
                buffer.copy_(value)
        if not is_empty:
            self.scaler.update()
        self.scheduler.step()
        self.reached = self.reached.advance(facts, float(norm), is_finite=is_finite, is_skipped=is_skipped)

    def restore(self, fill: Callable[[State], None], reached: TrainProgress, *, keeps_rates: bool = False) -> None:
        """Take over what was saved at a place, as `fill` reads it back into what is held; see `StateShards.take`."""
        vars(self.scheduler).pop(_RECIPE, None)
        self.shards.take(fill, keeps_rates=keeps_rates)
        self.reached = reached
        if self.recipe is not None:
            self.changes = say_changes(read_recipe(vars(self.scheduler).get(_RECIPE)), self.recipe, self.step)
            self.keep_recipe(self.recipe)

    def adopt(self, alike: State, reached: TrainProgress) -> Sequence[float] | None:
        """Take over what all ranks of a column have alike, as one of them gives it; see `Share.take_common`."""
        counts = self.shards.share.take_common(alike)
        self.reached = reached
        if self.recipe is not None:
            self.keep_recipe(self.recipe)
        return counts

    def keep_recipe(self, recipe: Recipe) -> None:
        """Let commits hold a recipe, with the schedule that it has."""
        self.recipe = recipe
        vars(self.scheduler)[_RECIPE] = recipe.to_text()  # torch's scheduler saves its attributes
