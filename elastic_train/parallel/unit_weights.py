"""Sharded weights (ZeRO-3): each unit's weights are gathered before use and released after it.

A turn is one forward and backward pass on some ranks of a group, with a list of actions (`program.schedules`); hooks of
the blocks only report the pass's progress. A rank without a lane in a turn only sends.

The last block's weights stay from the forward to the backward pass; the rest's stay from the first turn to the last. If
several lanes are in flight at once there are no blocks: all weights are the rest, gathered once per step. A block that
runs twice in a forward pass, or out of order, raises ConfigError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from elastic_train.config.combinations import refused
from elastic_train.parallel.devices.host_memory import Event, HostMemory
from elastic_train.parallel.exchange import messages_of
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import Work
from elastic_train.placement.holdings import Run
from elastic_train.placement.seating import Move, by_flats
from elastic_train.program.schedules import REST, Begin, End, Free, UnitAction, Walk, gathering_turn
from elastic_train.system.huge_pages import on_huge_pages

T = TypeVar("T")
Copies = list[tuple[Tensor, Tensor]]
"""Pairs of destination and source."""
_NOT_THERE = "storage of size 0", "data is not allocated"
"""Parts of torch's messages for tensors whose memory was released."""


@dataclass(frozen=True, slots=True)
class UnitFlats:
    """A unit's flat vectors by number, and the module that uses them; None for the rest of the model."""

    name: str
    flats: Mapping[int, Tensor]
    module: nn.Module | None = None


class UnitWeights:
    """Gathers units' weights for turns of a group; between turns their flat vectors have no memory.

    `blocks` are in the order of a forward pass. `shares` has this rank's moves of what each rank of the group holds,
    also to itself, and `held` returns its memory of a run.
    """

    def __init__(
        self,
        blocks: Sequence[UnitFlats],
        rest: UnitFlats,
        group: Group,
        shares: Sequence[Move],
        held: Callable[[Run], Tensor],
        memory: HostMemory | None = None,
        rounded: torch.dtype | None = None,
    ) -> None:
        """With `memory`, held weights may be in host memory, and are copied in during computation.

        With `rounded`, weights are rounded to this dtype, sent in it, and used as such by every rank, also if it is
        alone: so they depend on no world.
        """
        self._memory, self._rounded = memory, rounded
        self._rounded_of: dict[int, Copies] = {}
        """By unit: places in the flat vectors, and the rounded weights for them."""
        self._coming: dict[int, Event] = {}
        self._units, self._group, self._held = [*blocks, rest], group, held  # the rest is the last: REST is -1
        self._num_blocks, self._moves = len(blocks), by_flats(shares, [unit.flats for unit in self._units])
        self._ranks = list(dict.fromkeys([group.rank, *(rank for one in shares for rank in one[:2])]))
        self._receivers: Collection[int] = ()
        self._arriving: dict[int, list[Work]] = {}
        self._leaving: list[Work] = []
        self._lent: list[Tensor] = []
        """Temporary device memory that sends read from."""
        self._whole: set[int] = set()
        self._is_running, self._has_rest, self._is_dirty = False, False, False
        self._walk = Walk((), self._act)
        self._reduce: Callable[[UnitAction], None] | None = None
        self._forward = 0
        """Index after the last block that the running forward pass has reached."""
        self._hooks = [
            hook
            for number, block in enumerate(blocks)
            if block.module is not None
            for hook in (
                block.module.register_forward_pre_hook(partial(self._enter, number)),
                block.module.register_forward_hook(partial(self._leave, number)),
            )
        ]

    def close(self) -> bool:
        """Remove the hooks; return True if pending receives may still write to the flat vectors."""
        for hook in self._hooks:
            hook.remove()
        if not self._is_dirty:
            self.end_pass()
        if self._memory is not None:
            self._memory.settle("in")
        self._walk = Walk((), lambda action: None)
        return self._is_dirty

    def end_pass(self) -> None:
        """Release the weights kept between the turns of a pass; the next turn gathers them again."""
        if self._has_rest:
            self._has_rest = False
            self._release(REST)

    def gather(self) -> None:
        """Gather, on all ranks of the group at once, the weights kept between turns."""
        self.end_pass()
        with self.turn(self._ranks, trains=False):
            pass

    @contextlib.contextmanager
    def turn(
        self, receivers: Collection[int], *, trains: bool, reduce: Callable[[UnitAction], None] | None = None
    ) -> Iterator[Walk]:
        """Return the context of a turn in which `receivers` compute.

        A pass's first turn must include all that ever will. `reduce` makes the exchanges of gradients, if any, between
        those of weights. At the end, outstanding exchanges are made and all weights but the kept ones are released.
        """
        self._is_dirty = True
        self._receivers, self._forward, self._reduce = receivers, 0, reduce
        self._is_running = self._group.rank in receivers
        actions = gathering_turn(self._num_blocks, has_rest=self._has_rest, trains=trains, reduces=reduce is not None)
        self._walk = Walk(actions, self._act)
        try:
            self._walk.enter("forward", REST)
            yield self._walk
            self._walk.finish()
            self._group.wait(self._leaving)
        except BaseException as error:
            self._arriving.clear()  # they would keep the group's connections
            self._coming.clear()
            if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NOT_THERE):
                what = f"a block's parameter that is used while the block does not run ({error})"
                raise refused("blocks that do not run once each, in one order", what) from error
            raise
        finally:
            self._leaving, self._lent, self._is_running, self._reduce = [], [], False, None
            self._rounded_of.clear()
        self._is_dirty = False

    def _act(self, action: UnitAction) -> None:
        match action:
            case Begin("gather", unit):
                self._post(unit)
                self._has_rest |= unit == REST
            case End("gather", unit):
                self._await(unit)
            case Free(unit):
                self._release(unit)
            case Begin() | End():
                assert self._reduce is not None, "nothing is to be reduced"
                self._reduce(action)

    def turns(self, items: Iterator[T], world: Group) -> Iterator[T]:
        """Yield the items for forward passes, and take part in those of the group until no rank has more."""
        self.end_pass()
        while True:
            item = next(items, None)
            has_more = world.all_gather(torch.tensor(int(item is not None))).flatten().tolist()
            if not any(has_more):
                break
            with self.turn([rank for rank in self._ranks if has_more[rank]], trains=False):
                if item is not None:
                    yield item
        self.end_pass()

    def _enter(self, number: int, module: nn.Module, arguments: object) -> None:
        if not self._is_running:
            return
        if is_in_backward():  # a recomputation
            self._enter_backward(number)
            return
        if number < self._forward:
            last = self._units[self._forward - 1].name
            what = f"block '{self._units[number].name}', which runs after '{last}' in a forward pass"
            raise refused("blocks that do not run once each, in one order", what)
        self._walk.enter("forward", number)
        self._await(number)
        self._forward = number + 1

    def _leave(self, number: int, module: nn.Module, arguments: object, output: Any) -> None:
        if not self._is_running or is_in_backward():
            return
        if torch.is_grad_enabled():
            for tensor in pytree.tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._on_gradient, number))  # type: ignore[no-untyped-call]
        if self._walk.next == Free(number) and number + 1 < self._num_blocks:
            self._walk.step()

    def _on_gradient(self, number: int, gradient: Tensor) -> None:
        if self._is_running:
            self._enter_backward(number)

    def _enter_backward(self, number: int) -> None:
        self._walk.enter("backward", number)
        self._await(number)

    def _post(self, number: int) -> None:
        """Send this rank's share of a unit's weights, and begin to receive the others'."""
        flats, rank, own = self._units[number].flats, self._group.rank, Copies()
        for whole in flats.values() if self._is_running else ():
            whole.untyped_storage().resize_(whole.nbytes)
            on_huge_pages(whole)
        rounded = self._rounded_of.setdefault(number, [])
        given = {
            run: self._given(run, flats[run.flat], own, rounded)
            for one in self._moves[number]
            if one.giver == one.taker
            for run in one.runs
        }
        self._bring(number, own)

        def tensors(one: Move) -> list[Tensor]:
            if one.giver == rank:
                return [given[run] for run in one.runs]
            return [self._taken(flats[run.flat][run.lo : run.hi], rounded) for run in one.runs]

        due = [one for one in self._moves[number] if one.taker in self._receivers]
        arriving, leaving = self._group.begin_exchange(*messages_of(due, rank, tensors))
        self._leaving += leaving
        if self._is_running:
            self._arriving[number] = arriving

    def _given(self, run: Run, whole: Tensor, own: Copies, rounded: Copies) -> Tensor:
        """Return the memory to send a run from, and add its local destination to `own`, or to `rounded`.

        A device sends device memory.
        """
        held = self._held(run)
        place = whole[run.lo : run.hi] if self._is_running else None
        is_brought = self._group.is_on_device(whole) and not self._group.is_on_device(held)
        if self._is_rounded(held):
            where = whole.device if is_brought else held.device
            given = held.new_empty(held.shape, dtype=self._rounded, device=where)
            if is_brought:
                own.append((given, held))
            else:
                given.copy_(held)
            if place is None:
                self._lent.append(given)
            else:
                rounded.append((place, given))
            return given
        if place is None and is_brought and any(to in self._receivers for to in self._ranks):
            self._lent.append(place := whole.new_empty(held.shape))
        if place is None:
            return held
        own.append((place, held))
        return place if is_brought else held

    def _taken(self, place: Tensor, rounded: Copies) -> Tensor:
        """Return the memory to receive into, and add its destination to `rounded` if that is another."""
        if not self._is_rounded(place):
            return place
        rounded.append((place, arriving := place.new_empty(place.shape, dtype=self._rounded)))
        return arriving

    def _is_rounded(self, weights: Tensor) -> bool:
        is_wider = self._rounded is not None and weights.dtype.itemsize > self._rounded.itemsize
        return is_wider and weights.is_floating_point()  # no indexes, no codes, no complex numbers

    def _bring(self, number: int, own: Copies) -> None:
        """Copy this rank's share of a unit's weights into place; from host memory, during computation."""
        if self._memory is None:
            for place, held in own:
                place.copy_(held)
        elif own:  # after the computations that used this memory before
            self._coming[number] = self._memory.copy("in", own, [self._memory.compute(lambda: None)])
            if any(self._group.is_on_device(place) for place, _ in own):  # whose exchange comes after what is computed
                self._await_own(number)

    def _await_own(self, number: int) -> None:
        if self._memory is not None and number in self._coming:
            self._memory.compute(lambda: None, [self._coming.pop(number)])
            self._memory.join()

    def _await(self, number: int) -> None:
        if number in self._arriving:
            self._group.wait(self._arriving.pop(number))
            self._whole.add(number)
        self._await_own(number)
        for place, rounded in self._rounded_of.pop(number, ()):
            place.copy_(rounded)

    def _release(self, number: int) -> None:
        self._await(number)
        if number in self._whole:
            self._whole.remove(number)
            for whole in self._units[number].flats.values():
                whole.untyped_storage().resize_(0)


def is_in_backward() -> bool:
    """Return True during a backward pass: a forward pass in it is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)
