"""Expert parallelism: send tokens to the ranks with their experts, and the outputs back.

In a *turn*, each rank computes one lane of its own, in lockstep with the others. An expert's rank computes each lane's
tokens separately, as one rank with all experts would, and keeps each lane's weight gradients apart, so results do not
depend on the degree. A rank without a lane, or without samples, still takes part with its experts. In a pipeline, the
ranks of a stage run one schedule in lockstep, so several forward passes may precede the first backward pass.

Token counts are all-gathered first; then tensors are exchanged all-to-all and concatenated in rank order. Backward
passes do the reverse. In a recomputed block, tokens are sent again just before its backward pass, and its experts keep
nothing until then. All exchanges raise PeerLostError if a peer is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from elastic_train.config.combinations import refused
from elastic_train.parallel.group import Group
from elastic_train.parallel.unit_weights import is_in_backward

T = TypeVar("T")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Leaf = dict[int, Tensor]
"""A lane's gradients of expert weights, by parameter id."""


class Unit(Protocol):
    """The experts of a block; a rank holds some of them."""

    links: ExpertLinks | None

    @property
    def stacked(self) -> Sequence[nn.Parameter]:
        """Weights, stacked by expert along their first dimension."""

    @property
    def width(self) -> int:
        """Number of elements per token."""

    def compute(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the experts' outputs for tokens sorted by expert, `counts` for each; same shape and dtype."""


class _Kept(NamedTuple):
    """Saved for the backward pass: the tokens and outputs of each rank computed here, and the token counts."""

    passes: Sequence[tuple[Tensor, Tensor] | None]
    given: list[int]
    taken: list[int]


class ExpertLinks:
    """This rank's exchanges with the others of its cell or stage, block by block, in the order of `units`."""

    def __init__(self, units: Sequence[Unit], again: Collection[Unit] = ()) -> None:
        """`units` are those of the whole model, or of a chunk of each stage; other stages' units have no experts here.

        A forward pass of units in `again` saves nothing: their blocks are recomputed in the backward pass.
        """
        self.units, self._again = units, frozenset(map(id, again))
        self._group: Group | None = None
        self._left: list[Unit] = []
        """Units still to run forward in this turn, the next one last."""
        self._left_back: list[Unit] = []
        """Units still to run backward in this turn, the next one last."""
        self._computed: dict[int, _Kept] = {}
        """Saved data of recomputed units, by id, until their backward pass."""
        self._taken_part: dict[int, list[_Kept | None]] = {}
        """Saved data of forward passes without a lane of this rank, by turn; None for units in `again`."""
        self.leaves: Sequence[Leaf] = ()
        """Gradients of this turn's lanes, by rank of the cell."""
        self.anchor = torch.zeros(0, requires_grad=True)
        """A tensor that every expert output depends on, so that each backward pass reaches the experts.

        Callers that request gradients of specific tensors must request this one's, too.
        """

    @property
    def group(self) -> Group:
        assert self._group is not None, "no cell has been formed"
        return self._group

    def bind(self, group: Group) -> None:
        """Exchange with the ranks of this group from now on; a rank's number determines its experts."""
        self._group, self._taken_part, self._computed = group, {}, {}

    @property
    def here(self) -> list[Unit]:
        """Units of which this rank has experts, in execution order."""
        return [unit for unit in self.units if len(unit.stacked[0])]

    @contextlib.contextmanager
    def turn(self, *, trains: bool) -> Iterator[None]:
        """Return the context of this rank's passes; if none runs in it, the rank still takes part with its experts."""
        with self.backward_pass(0), self.forward_pass(0, trains=trains):
            yield

    @contextlib.contextmanager
    def forward_pass(self, turn: int, *, trains: bool) -> Iterator[None]:
        """Return the context of this rank's forward pass in a turn."""
        units = self.here
        self._left = units[::-1]
        yield
        if len(self._left) == len(units):
            kept = [self.forward(unit, None, (), trains=trains)[1] for unit in units]
            if trains:
                self._taken_part[turn] = kept
        assert not self._left, f"{len(self._left)} of {len(units)} blocks with experts were not run"

    @contextlib.contextmanager
    def backward_pass(self, turn: int) -> Iterator[None]:
        """Return the context of this rank's backward pass in a turn; afterwards `leaves` has the turn's gradients."""
        self.leaves = [{} for _ in range(self.group.size)]
        self._left_back = self.here
        yield
        if (kept := self._taken_part.pop(turn, None)) is not None:
            for unit, one in zip(reversed(self.here), reversed(kept), strict=True):
                if one is None:
                    self.forward_again(unit, None, ())
                self.backward(unit, one, None)

    def add(self, leaf: Leaf) -> None:
        """Add a lane's gradients to those of this rank's experts."""
        for unit in self.here:
            for one in unit.stacked:
                if (gradient := leaf.pop(id(one), None)) is not None:
                    one.grad = gradient if one.grad is None else one.grad.add_(gradient)

    def take_leaves(self) -> Sequence[Leaf]:
        """Return the turn's leaves and release them."""
        leaves, self.leaves = self.leaves, ()
        return leaves

    def most(self, count: int) -> int:
        """Return the maximum of `count` over all ranks."""
        return int(self.group.all_gather(torch.tensor(count)).max())

    def turns(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the items for forward passes, one per turn, until no rank of the cell has any left."""
        while True:
            found = list(islice(items, 1))
            if not self.most(len(found)):
                return
            with self.turn(trains=False):
                yield from found

    def spread(self, unit: Unit, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the outputs of all experts for a lane's tokens, `counts` for each expert."""
        if not torch.is_grad_enabled():
            return self.forward(unit, x, counts, trains=False)[0]
        return _Spread.apply(x, self.anchor, unit, counts, self)  # type: ignore[no-any-return, no-untyped-call]

    def forward(
        self, unit: Unit, x: Tensor | None, counts: Sequence[int], *, trains: bool
    ) -> tuple[Tensor, _Kept | None]:
        """Send tokens to their experts, compute the received ones, and return the outputs for this rank's tokens."""
        expected = self._left.pop() if self._left else None
        assert expected is unit, "experts run in the order of the model's blocks, each once"
        is_kept = trains and not self.is_again(unit)
        made, kept = self._forward(unit, x, counts, trains=is_kept)
        return made, kept if is_kept else None

    def is_again(self, unit: Unit) -> bool:
        """Return True if a unit is recomputed in the backward pass."""
        return id(unit) in self._again

    def forward_again(self, unit: Unit, x: Tensor | None, counts: Sequence[int]) -> Tensor:
        """Repeat `forward` and save its data for the unit's backward pass, which comes next."""
        assert self._left_back and self._left_back[-1] is unit, "what is computed again has its backward pass next"
        with saved_tensors_hooks(Tensor.detach, _as_kept):
            made, self._computed[id(unit)] = self._forward(unit, x, counts, trains=True)
        return made

    def _forward(self, unit: Unit, x: Tensor | None, counts: Sequence[int], *, trains: bool) -> tuple[Tensor, _Kept]:
        group, mine = self.group, self.group.rank
        table = self._counts(unit, x, counts)
        sources = [_Source.of(row) for row in table]
        dtype = next((source.dtype for source in sources if source.dtype is not None), torch.float32)
        per_rank = len(sources[0].counts) // group.size
        here = [source.counts[mine * per_rank : (mine + 1) * per_rank] for source in sources]
        taken, given = [sum(row) for row in here], _by_rank(sources[mine].counts, group.size)
        like = unit.stacked[0].new_empty(0, unit.width, dtype=dtype)
        arrived = self._trade(torch.split(like if x is None else x.detach().contiguous(), given), taken)
        parts = torch.split(arrived, taken)
        passes = [
            _pass(unit, part, row, source.autocast, trains=trains)
            for part, row, source in zip(parts, here, sources, strict=True)
        ]
        made = [part if one is None else one[1].detach() for part, one in zip(parts, passes, strict=True)]
        return self._trade(made, given), _Kept(passes, given, taken)

    def backward(self, unit: Unit, kept: _Kept | None, gradient: Tensor | None) -> Tensor:
        """Send output gradients to the experts, and return the gradients of this rank's tokens.

        `kept` is None for a recomputed unit.
        """
        expected = self._left_back.pop() if self._left_back else None
        assert expected is unit, "backward passes come in the opposite order of the blocks"
        if kept is None and (kept := self._computed.pop(id(unit), None)) is None:
            raise refused("experts called outside their block", "experts that a model calls outside their block")
        if gradient is None:
            dtype = next((one[0].dtype for one in kept.passes if one is not None), torch.float32)
            gradient = unit.stacked[0].new_empty(0, unit.width, dtype=dtype)
        arrived = self._trade(torch.split(gradient.contiguous(), kept.given), kept.taken)
        found = []
        for part, one, leaf in zip(torch.split(arrived, kept.taken), kept.passes, self.leaves, strict=True):
            if one is None:
                found.append(part)
                continue
            tokens, made = one
            trained = [weights for weights in unit.stacked if weights.requires_grad]
            of_tokens, *of_weights = torch.autograd.grad(made, [tokens, *trained], part)
            found.append(of_tokens)
            leaf |= zip(map(id, trained), of_weights, strict=True)
        return self._trade(found, kept.given)

    def _counts(self, unit: Unit, x: Tensor | None, counts: Sequence[int]) -> list[list[int]]:
        """All-gather each rank's dtypes and its token count per expert."""
        num_experts = self.group.size * len(unit.stacked[0])
        row = [0, 0, *counts] if counts else [0] * (2 + num_experts)
        if x is not None:
            row[0] = 1 + _DTYPES.index(x.dtype)
            if torch.is_autocast_enabled(x.device.type):
                row[1] = 1 + _DTYPES.index(torch.get_autocast_dtype(x.device.type))
        found: list[list[int]] = self.group.all_gather(torch.tensor(row)).tolist()
        return found

    def _trade(self, parts: Sequence[Tensor], taken: Sequence[int]) -> Tensor:
        """Exchange rows with each rank; return the received ones, `taken` of each rank, in rank order."""
        mine, arrived = self.group.rank, parts[0].new_empty(sum(taken), parts[0].shape[1])
        places = torch.split(arrived, list(taken))
        arriving, leaving = self.group.begin_exchange(
            [(rank, part) for rank, part in enumerate(parts) if rank != mine and len(part)],
            [(rank, part) for rank, part in enumerate(places) if rank != mine and len(part)],
        )
        places[mine].copy_(parts[mine])
        self.group.wait(arriving + leaving)
        return arrived


class _Source(NamedTuple):
    """A rank's row: dtype of its tokens, autocast dtype (each None if absent), and token count per expert."""

    dtype: torch.dtype | None
    autocast: torch.dtype | None
    counts: list[int]

    @classmethod
    def of(cls, row: Sequence[int]) -> _Source:
        dtype, autocast, *counts = row
        return cls(_DTYPES[dtype - 1] if dtype else None, _DTYPES[autocast - 1] if autocast else None, counts)


def _by_rank(counts: Sequence[int], size: int) -> list[int]:
    """Return the number of tokens for the experts of each rank."""
    each = len(counts) // size
    return [sum(counts[rank * each : (rank + 1) * each]) for rank in range(size)]


def _pass(
    unit: Unit, x: Tensor, counts: Sequence[int], autocast: torch.dtype | None, *, trains: bool
) -> tuple[Tensor, Tensor] | None:
    """Compute a rank's tokens as that rank would; return tokens and outputs, None without tokens."""
    if not len(x):
        return None
    with torch.set_grad_enabled(trains), torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        tokens = x.detach().requires_grad_(trains)
        return tokens, unit.compute(tokens, counts)


def _as_kept(tensor: Tensor) -> Tensor:
    """Return a saved tensor unchanged: torch must not count it among the tensors that checkpointing saved."""
    return tensor


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, unit: Unit, counts: Sequence[int], links: ExpertLinks) -> Tensor:
        ctx.unit, ctx.links, ctx.kept = unit, links, None
        if links.is_again(unit):
            ctx.save_for_backward(x.new_empty(0))  # unpacking it triggers the block's recomputation
            if is_in_backward():
                return links.forward_again(unit, x, counts)
        made, ctx.kept = links.forward(unit, x, counts, trains=True)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        _ = ctx.saved_tensors
        found = ctx.links.backward(ctx.unit, ctx.kept, gradients[0])
        ctx.kept = None
        return found, ctx.links.anchor.new_empty(0), None, None, None
