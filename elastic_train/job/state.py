"""The applied state: everything an optimizer step changes, as one unit that moves from step s to s+1.

Weights, optimizer, scheduler, scaler, cursor, coverage sums and step are saved, restored and transferred together. The
norm of a step's gradient comes from each rank's sums of squares per grain (`devices.squares`), so it depends neither on
how tensors are cut nor on the thread count.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.commits.record import Improvement
from elastic_train.checkpoint.format.layout import State
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.accounting import CoverageSums, SampleAccount
from elastic_train.core.arrays import Int64s, Ranges
from elastic_train.core.lineage import Interval, extend
from elastic_train.core.order import Cursor
from elastic_train.errors import WeightsDifferError
from elastic_train.job.optimizers.schedule import Recipe, read_recipe, say_changes
from elastic_train.job.sharded.share import SharedScaler
from elastic_train.job.state_shards import CommitPieces, Place, StateShards
from elastic_train.job.units.compiled import CompiledBlocks
from elastic_train.parallel.devices.squares import clip_factor, total_norm
from elastic_train.placement.grains import Layout
from elastic_train.placement.table import Parts, Table

_RECIPE = "recipe"
"""Attribute of the scheduler that stores the recipe."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts about a step whose mean gradient is in place; equal on every rank.

    `cursor` and `account` are those after the step, `coverage` has the step's own sums, and `term` is the world's.
    `buffers` pairs each buffer with its value after the step's forward passes. `loss` is the sum over lanes; `is_fast`
    is True if the gradient's rounding depends on the world. `sources` has the sums of each source of a mixture.
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
    """True if any sample has a target; if not, a zero gradient means no update, not even decay or momentum."""


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """Progress of a state: its position in the data, the terms that applied its steps, and its last validation.

    `fast_steps` and `skipped_steps` are half-open ranges of steps, counted from 0: those whose rounding depended on the
    world, and those without update because loss or gradient was not finite or no sample had a target. `num_nonfinite`
    is the number of consecutive non-finite steps up to the last one. `norm` is the last step's gradient norm, if known.
    `improvement` is for early stopping. `sources` has the coverage sums of each source of a mixture, over its own ids.
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
    norm: float | None = None
    sources: tuple[CoverageSums, ...] = ()
    improvement: Improvement | None = None

    @property
    def term(self) -> int:
        """Term that applied the last step; 0 before the first."""
        return self.intervals[-1].term if self.intervals else 0

    @property
    def is_fast(self) -> bool:
        """True if the last step's rounding depended on the world."""
        return bool(self.fast_steps) and self.fast_steps[-1][1] == self.step

    def advance(
        self, facts: StepFacts, norm: float = 0.0, *, is_finite: bool = True, is_skipped: bool = False
    ) -> TrainProgress:
        """Return the progress after one more step."""
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
    """Add to the sums of each source; `sources` is empty before the first step."""
    return tuple(mine + own for mine, own in zip(sources or [CoverageSums()] * len(more), more, strict=True))


def _with(ranges: Ranges, step: int) -> Ranges:
    """Append a step, greater than all before, to half-open ranges."""
    if ranges and ranges[-1][1] == step:
        return (*ranges[:-1], (ranges[-1][0], step + 1))
    return (*ranges, (step, step + 1))


@dataclass(frozen=True, slots=True)
class Pending:
    """A step whose gradients this rank holds, and its contribution to their norm."""

    facts: StepFacts
    measured: Tensor


@dataclass(slots=True)
class AppliedState:
    """Everything that `apply` changes, and the layout of the weights in grains, which is constant."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR
    scaler: SharedScaler
    config: OptimizerConfig
    shards: StateShards
    layout: Layout
    outline: Mapping[str, Sequence[str]]
    """Descriptions of parameters and parameter groups, one line each, for comparison with other ranks."""
    reached: TrainProgress = field(default_factory=TrainProgress)
    pending: Pending | None = None
    """Step that is neither applied nor dropped; the next world decides."""
    recipe: Recipe | None = None
    """Settings that determine the updates, as stored in commits."""
    changes: str | None = None
    """Description of the recipe's changes since the restored commit."""
    compiled: CompiledBlocks | None = None
    """Compiled blocks of the model, if `compile` is on."""
    pieces: CommitPieces = field(init=False)
    """This rank's pieces of commits."""
    _first: tuple[dict[str, Any], dict[str, Any]] = field(init=False)
    """Initial states of scheduler and scaler."""

    def __post_init__(self) -> None:
        self.pieces = CommitPieces(self.shards)
        self._first = copy.deepcopy((self.scheduler.state_dict(), self.scaler.state_dict()))

    @property
    def step(self) -> int:
        return self.reached.step

    @property
    def num_updates(self) -> int:
        """Number of applied steps that have updated weights."""
        return self.step - sum(hi - lo for lo, hi in self.reached.skipped_steps) - self.scaler.num_overflows

    @property
    def place(self) -> Place:
        return Place(self.reached.step, self.reached.term)

    def measure(self) -> Tensor:
        """Unscale the reduced gradients in place and return this rank's contribution to their norm, on the CPU.
        Call it once per step, before `apply`. The device has finished all gradients when it returns.
        """
        self.scaler.unscale_(self.optimizer)
        return contribution_of(self.shards.table, self.shards.share.measure())

    def hold(self, facts: StepFacts, measured: Tensor) -> None:
        """Keep the step whose gradients are in place until the next world decides: peers may have applied it."""
        self.pending = Pending(facts, measured)

    def drop_pending(self) -> None:
        """Discard a step that no rank has applied."""
        if self.pending is not None:
            self.pending = None
            self.scaler.forget_step()

    def begin_again(self) -> None:
        """Reset progress, schedule and scaler to their initial values; keep weights and optimizer."""
        self.drop_pending()
        self.reached = TrainProgress()
        schedule, scaler = copy.deepcopy(self._first)
        self.scheduler.load_state_dict(schedule)
        self.scaler.load_state_dict(scaler)
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def apply(self, facts: StepFacts, norm: Tensor) -> None:
        """Take one optimizer step with the reduced gradients in place; `norm` is their norm.

        Clipping, scaling and the finiteness check depend on reduced values only, so all ranks decide equally. A step
        whose loss or gradient is not finite leaves weights, moments and buffers unchanged, unless the configuration
        keeps it; it still counts as applied, because its samples are consumed. The same holds for a step whose fp16
        gradients overflowed, which is how a scaler finds its scale; it counts as finite until the scale is too small to
        be the cause. A step without target and gradient is skipped, too.
        """
        if self.config.clip_norm is not None:
            clip(self.optimizer, self.config.clip_norm, float(norm))
        has_norm = bool(norm.isfinite())
        is_finite = math.isfinite(facts.loss) and (has_norm or self.scaler.is_own_overflow())
        is_empty = not facts.has_target and float(norm) == 0.0
        is_skipped = is_empty or (not is_finite and self.config.on_nonfinite != "keep")
        if not has_norm:
            self.scaler.note_overflow(self.optimizer)
            self.scaler.num_overflows += self.scaler.is_enabled() and not is_skipped
        self.pending = None
        if not is_skipped:
            if has_norm or not self.scaler.is_enabled():  # a fused update would skip an overflow unseen by its hooks
                self.optimizer.step()
            for buffer, value in facts.buffers:
                buffer.copy_(value)
        if is_empty:
            self.scaler.forget_step()
        else:
            self.scaler.update()
        self.scheduler.step()
        self.reached = self.reached.advance(facts, float(norm), is_finite=is_finite, is_skipped=is_skipped)

    def restore(self, fill: Callable[[State], None], reached: TrainProgress, *, keeps_rates: bool = False) -> None:
        """Load saved state, which `fill` reads into the held tensors, and its progress; see `Share.take`."""
        vars(self.scheduler).pop(_RECIPE, None)
        shards = self.shards
        shards.share.take(fill, shards.cut.cuts, shards.table.place, keeps_rates=keeps_rates)
        self.reached = reached
        if self.recipe is not None:
            self.changes = say_changes(read_recipe(vars(self.scheduler).get(_RECIPE)), self.recipe, self.step)
            self.keep_recipe(self.recipe)

    def adopt(self, alike: State, reached: TrainProgress) -> Sequence[float] | None:
        """Load the common state that another rank of the column sent; see `Share.take_common`."""
        counts = self.shards.share.take_common(alike)
        self.reached = reached
        if self.recipe is not None:
            self.keep_recipe(self.recipe)
        return counts

    def keep_recipe(self, recipe: Recipe) -> None:
        """Store a recipe, with its schedule, in future commits."""
        self.recipe = recipe
        vars(self.scheduler)[_RECIPE] = recipe.to_text()  # torch's scheduler saves its attributes


def contribution_of(table: Table, squares: Tensor) -> Tensor:
    """Return this rank's contribution to the norm from its grains' squares: float64, of equal shape on all ranks."""
    if table.has_all_gradients:
        return torch.tensor(total_norm(squares.numpy()), dtype=torch.float64)
    return padded(squares, max(grains.size for of_part in table.updated for _, grains in of_part))


def padded(squares: Tensor, size: int) -> Tensor:
    """Return squares padded with zeros to `size` numbers, at least one."""
    row = torch.zeros(max(1, size), dtype=torch.float64)
    row[: squares.numel()] = squares
    return row


def known_alone(table: Table, measured: Tensor) -> Tensor | None:
    """Return the norm if this rank's measurement determines it, else None."""
    return measured if table.has_all_gradients else None


def norm_of(gathered: Tensor, table: Table) -> Tensor:
    """Return the norm from all ranks' measurements, by rank: a float64 on the CPU.

    Raises WeightsDifferError if ranks measured different values for the same gradient.
    """
    if table.has_all_gradients:
        _check_same(gathered)
        return gathered[0]
    return norm_of_rows(gathered, table.parts, table.updated)


def norm_of_rows(gathered: Tensor, parts: Parts, holders: Sequence[Iterable[tuple[int, Int64s]]]) -> Tensor:
    """Return the norm from the rows of ranks that together hold all trained grains.

    `holders` has, for each model part, pairs of a rank and the grains that its row begins with.
    """
    return torch.tensor(total_norm(parts.squares_of(gathered.numpy(), holders)), dtype=torch.float64)


def clip(optimizer: Optimizer, limit: float, norm: float) -> None:
    """Scale the reduced gradients of what this rank updates so that their norm, now `norm`, is at most `limit`."""
    if (factor := clip_factor(norm, limit)) != 1.0:
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _check_same(gathered: Tensor) -> None:
    """Raise WeightsDifferError unless all ranks measured the same norm; all NaN norms are equal."""
    norms = gathered.flatten().nan_to_num(nan=-1.0, posinf=math.inf)
    if not bool((norms == norms[0]).all()):
        who, _ = name_others(norms.view(torch.int64).tolist(), "gradients")
        raise WeightsDifferError(
            f"{who}, by the norm of the sum over all ranks: memory or a connection is damaged, or a device computes "
            "wrongly. The step is not applied: all ranks end, and the next start continues from the last commit"
        )


def name_others(sums: Sequence[int], what: str = "weights", ranks: Sequence[int] | None = None) -> tuple[str, int]:
    """Describe the ranks whose `what` differs from the majority's, by checksum, and return one rank of the majority.

    The checksums are of `ranks`, by default all ranks. Without a majority, the text says that none is known to be
    right.
    """
    ranks = ranks or range(len(sums))
    by_value: dict[int, list[int]] = {}
    for rank, value in zip(ranks, sums, strict=True):
        by_value.setdefault(value, []).append(rank)
    most = max(by_value.values(), key=len)
    if 2 * len(most) > len(sums):
        others = [rank for rank in ranks if rank not in most]
        return f"ranks {others} hold other {what} than the {len(most)} others", most[0]
    if len(sums) == 2:
        first, second = ranks
        return f"ranks {first} and {second} hold different {what}, and nothing says which of them is right", first
    sets = " and ".join(str(ranks) for ranks in by_value.values())
    return f"ranks {sets} hold different {what}, and no majority says which are right", ranks[0]
