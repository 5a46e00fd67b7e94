"""Pipeline parallelism: neighbouring stages send activations forward and gradients backward.

An activation carries the state of torch's generators, so the next stage continues where the sender stopped, as one rank
would; random numbers do not depend on the stages.

An activation's form follows from the shapes of its lane's micro-batch, so it is sent once for each key. Sends of one
exchange overlap with computation until the next exchange, receives until a pass needs them. All messages of one
exchange start together: a device runs exchanges in order, and both ends of a message use the same exchange
(`program.schedules`). Two stages have at most one message in flight in each direction, so activations and gradients
cannot be confused, even if a neighbour is on both sides.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import Work

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
