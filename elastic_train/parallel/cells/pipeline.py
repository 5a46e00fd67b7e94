"""Run a stage's program: forward and backward passes of its lanes, and exchanges with neighbouring stages.

A lane's activation is a leaf of the stage's graph, so its backward pass adds the same gradients as on one rank. Lanes
without samples, and turns without a lane, are skipped in the exchanges by all stages; their passes compute nothing.

Neighbouring stages send activations forward and gradients backward. An activation carries the state of torch's
generators, so the next stage continues where the sender stopped, as one rank would; random numbers do not depend on the
stages. Its form follows from the shapes of its lane's micro-batch, so it is sent once for each key. Sends of one
exchange overlap with computation until the next exchange, receives until a pass needs them. All messages of one
exchange start together: a device runs exchanges in order, and both ends of a message use the same exchange
(`program.schedules`). Two stages have at most one message in flight in each direction, so activations and gradients
cannot be confused, even if a neighbour is on both sides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import Work
from elastic_train.program.schedules import Action, AddExperts, Close, Exchange, Open, Pass

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 14
_ALIGNMENT = 512
"""Alignment in bytes of device allocations: the kernel chosen for a tensor may depend on its alignment."""


class Generators:
    """Reads and sets the generators of host and device at once, so that another rank can continue from here."""

    def __init__(self, device: torch.device) -> None:
        of_device = [torch.cuda.default_generators[device.index]] if device.type == "cuda" else []
        self._all = [torch.default_generator, *of_device]
        self._sizes = [one.get_state().numel() for one in self._all]
        self.num_bytes = sum(self._sizes)

    def state(self) -> Tensor:
        """Return the generators' states: bytes in host memory, 1-D, of constant length."""
        return torch.cat([one.get_state() for one in self._all])

    def seed(self, seed: int) -> None:
        """Seed all of them, with a number below 2^63."""
        for one in self._all:
            one.manual_seed(seed)

    def continue_at(self, state: Tensor) -> None:
        """Set the generators to `state`, on any device."""
        for one, part in zip(self._all, state.cpu().split_with_sizes(self._sizes), strict=True):
            one.set_state(part.clone())


class Form(NamedTuple):
    """The dtype and shape of an activation."""

    dtype: torch.dtype
    shape: torch.Size

    def to_words(self) -> Tensor:
        """Return the form as a message of fixed length."""
        words = [_DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return torch.tensor(words + [0] * (2 + _MOST_DIMS - len(words)))


class Activation(NamedTuple):
    """A stage's output for the next one; lanes with equal `key` have equal forms."""

    key: Hashable
    tensor: Tensor


class Awaited(NamedTuple):
    """The expected message for the pass `name`: an activation of the form of `key`, or the gradient of `made`."""

    name: Hashable
    key: Hashable = None
    made: Tensor | None = None


class _Arriving(NamedTuple):
    """A message being received; `form` is that of an activation, None for a gradient."""

    memory: Tensor
    form: Form | None
    works: list[Work]


class Links:
    """Exchanges with neighbouring stages; these are of a model in one stage, which exchanges nothing."""

    def exchange(
        self, *, activation: Activation | None = None, gradient: Tensor | None = None, takes: Sequence[Awaited] = ()
    ) -> None:
        """Begin to send an activation to the next stage or a gradient to the previous one, and to receive `takes`.

        Raises PeerLostError.
        """
        raise AssertionError("there are no neighbours")

    def arrived(self, name: Hashable) -> Tensor | None:
        """Wait for and return the tensor for a pass; None if none is expected."""
        return None

    def finish(self) -> None:
        """Wait until all sends are complete."""


class StageLinks(Links):
    """Links of this rank's stage, in one world, to the places `before` and `after` it in its cell, if any.

    Messages are in the memory of `device`, on which the stage computes.
    """

    def __init__(self, group: Group, before: int | None, after: int | None, device: torch.device) -> None:
        self._group, self._before, self._after, self._device = group, before, after, device
        self._given = dict[Hashable, Form]()
        self._taken = dict[Hashable, Form]()
        self._leaving, self._sent = list[Work](), list[Tensor]()
        self._arriving = dict[Hashable, _Arriving]()
        self.generators = Generators(device)
        self._head_bytes = -(-self.generators.num_bytes // _ALIGNMENT) * _ALIGNMENT

    def exchange(
        self, *, activation: Activation | None = None, gradient: Tensor | None = None, takes: Sequence[Awaited] = ()
    ) -> None:
        self.finish()
        sends = list[tuple[int, Tensor]]()
        if activation is not None:
            sends.append((_known(self._after), self._packed(activation)))
        if gradient is not None:
            sends.append((_known(self._before), gradient.contiguous()))
        receives = [(_known(self._before if one.made is None else self._after), self._room(one)) for one in takes]
        arriving, leaving = self._group.begin_exchange(sends, receives)
        is_one = any(self._group.is_on_device(tensor) for _, tensor in (*sends, *receives))
        for number, (one, (_, memory)) in enumerate(zip(takes, receives, strict=True)):
            form = self._taken[one.key] if one.made is None else None
            self._arriving[one.name] = _Arriving(memory, form, arriving if is_one else arriving[number : number + 1])
        self._leaving += arriving if is_one else leaving
        self._sent += [tensor for _, tensor in sends]

    def arrived(self, name: Hashable) -> Tensor | None:
        """With an activation, torch's generators continue where the sender's stopped."""
        if name not in self._arriving:
            return None
        memory, form, works = self._arriving.pop(name)
        self._group.wait(works)
        if form is None:
            return memory
        self.generators.continue_at(memory.view(torch.uint8)[: self.generators.num_bytes])
        return self._content_of(memory, form)

    def finish(self) -> None:
        self._group.wait(self._leaving)
        self._leaving, self._sent = [], []

    def _packed(self, activation: Activation) -> Tensor:
        """Return a message with the generators' state and the activation; send its form first if it is new."""
        key, tensor = activation
        form = Form(tensor.dtype, tensor.shape)
        before = self._given.setdefault(key, form)
        assert before == form, f"a stage gave {form} for shapes for which it gave {before} before"
        if before is form:
            words = form.to_words()
            self._leaving.append(self._group.send(_known(self._after), words))
            self._sent.append(words)
        memory = self._memory_for(form)
        memory.view(torch.uint8)[: self.generators.num_bytes] = self.generators.state()
        self._content_of(memory, form).copy_(tensor.detach())
        return memory

    def _room(self, one: Awaited) -> Tensor:
        """Return memory for a message; receive an activation's form first if it is new."""
        if one.made is not None:
            return torch.empty_like(one.made, memory_format=torch.contiguous_format)
        if one.key not in self._taken:
            words = torch.empty(2 + _MOST_DIMS, dtype=torch.int64)
            self._group.exchange([], [(_known(self._before), words)])
            dtype, num_dims, *sizes = words.tolist()
            self._taken[one.key] = Form(_DTYPES[dtype], torch.Size(sizes[:num_dims]))
        return self._memory_for(self._taken[one.key])

    def _memory_for(self, form: Form) -> Tensor:
        num_elements = self._head_bytes // form.dtype.itemsize + form.shape.numel()
        return torch.empty(num_elements, dtype=form.dtype, device=self._device)

    def _content_of(self, memory: Tensor, form: Form) -> Tensor:
        """Return the activation in a message; its start is aligned."""
        return memory[self._head_bytes // form.dtype.itemsize :].view(form.shape)


def _known(place: int | None) -> int:
    assert place is not None, "there is no stage on this side"
    return place


class Passes(ABC):
    """A rank's passes, by turn; lanes are numbered in the order in which their gradients are added."""

    @abstractmethod
    def key(self, number: int) -> Hashable | None:
        """Return the key that lanes with equal shapes share; None if the lane has no samples."""

    @abstractmethod
    def forward(self, one: Pass, given: Tensor | None) -> Tensor | None:
        """Run a chunk on the previous piece's output (None for the first); return its output, or the last piece's loss.

        Returns None without samples, or if there is nothing to backpropagate through.
        """

    @abstractmethod
    def backward(self, one: Pass, made: Tensor | None, gradient: Tensor | None) -> None:
        """Add a lane's gradients, given that of the output of `forward`; None for the last piece."""

    def waited(self) -> None:  # noqa: B027 - few ask for it
        """Note that an exchange has ended."""

    def open(self, one: Open) -> None:  # noqa: B027 - outside of steps there are no leaves
        """Begin the leaf of a turn."""

    def close(self, one: Close) -> None:  # noqa: B027
        """End the leaf of a turn."""

    def add_experts(self, one: AddExperts) -> None:  # noqa: B027
        """Add the gradients that a turn's lanes have given to this rank's experts."""


@dataclass(frozen=True, slots=True)
class _Alive:
    """A lane's input and output in a chunk, kept from its forward to its backward pass."""

    given: Tensor | None
    made: Tensor


_Lanes = dict[tuple[int, int], _Alive]
"""By lane number and chunk."""


def run_program(actions: Iterable[Action], links: Links, passes: Passes) -> int:
    """Run the actions of a step; return the maximum number of live lanes, counted per chunk."""
    alive, most = _Lanes(), 0
    made: Tensor | None = None
    for action in actions:
        match action:
            case Exchange():
                _exchange(action, links, passes, alive, made)
                passes.waited()
            case Pass():
                made = _pass(action, links, passes, alive)
                most = max(most, len(alive))
            case Open():
                passes.open(action)
            case Close():
                passes.close(action)
            case AddExperts():
                passes.add_experts(action)
    links.finish()
    return most


def _pass(one: Pass, links: Links, passes: Passes, alive: _Lanes) -> Tensor | None:
    """Run a pass; return its output for the next piece, or its gradient for the previous one."""
    given = links.arrived(one)
    if given is not None:
        passes.waited()
    if one.direction == "forward":
        start = None if given is None else given.requires_grad_()
        made = passes.forward(one, start)
        if made is not None:
            alive[one.number, one.chunk] = _Alive(start, made)
        return made
    lane = alive.pop((one.number, one.chunk), None)
    passes.backward(one, None if lane is None else lane.made, given)
    return None if lane is None or lane.given is None else lane.given.grad


def _exchange(action: Exchange, links: Links, passes: Passes, alive: _Lanes, made: Tensor | None) -> None:
    """Begin to send the last pass's result, and to receive the tensors for other passes."""
    takes = [_awaited(one, passes, alive) for one in action.takes if passes.key(one.number) is not None]
    sends, key = action.sends, None if action.sends is None else passes.key(action.sends.number)
    if sends is None or key is None:
        links.exchange(takes=takes)
        return
    assert made is not None, "a lane with samples has made something, and what it was given has a gradient"
    if sends.direction == "forward":
        links.exchange(activation=Activation((sends.chunk, key), made), takes=takes)
    else:
        links.exchange(gradient=made, takes=takes)


def _awaited(one: Pass, passes: Passes, alive: _Lanes) -> Awaited:
    if one.direction == "forward":
        return Awaited(one, key=(one.chunk, passes.key(one.number)))
    return Awaited(one, made=alive[one.number, one.chunk].made)
