"""What neighbouring stages of a cell send each other: activations forward, their gradients backward.

With an activation goes the state of torch's generator, from which the stage that it comes from has drawn: the next
stage goes on where that one has ended, as one rank would. So what is drawn does not depend on the stages.

The form of an activation follows from the shapes of its lane's micro-batch, so it is sent once for each of these; both
ends know it from then on. What one exchange sends is under way while the stage computes, until the next exchange; what
it takes, until a pass needs it. Gradients have a channel of their own: where stages have several chunks of the model,
a neighbour may be the next stage and the one before.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import BackChannel, PointToPoint, Work

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 14


class Form(NamedTuple):
    """The type and shape of an activation."""

    dtype: torch.dtype
    shape: torch.Size

    def to_words(self) -> Tensor:
        """Return a message of fixed length that says it."""
        words = [_DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return torch.tensor(words + [0] * (2 + _MOST_DIMS - len(words)))


class Activation(NamedTuple):
    """What a stage gives to the next; `key` is alike for those of one form."""

    key: Hashable
    tensor: Tensor


class Awaited(NamedTuple):
    """A message that comes for the pass `name`: an activation of the form that `key` stands for, or the gradient of
    `made`, which was sent."""

    name: Hashable
    key: Hashable = None
    made: Tensor | None = None


class _Arriving(NamedTuple):
    """A message on its way; `form` is that of an activation, None for a gradient."""

    memory: Tensor
    form: Form | None
    works: list[Work]


class StageLinks:
    """Links of this rank's stage, in one world, to the places `before` and `after` it in its cell, if there are any."""

    def __init__(self, group: Group, before: int | None, after: int | None) -> None:
        self._group, self._before, self._after = group, before, after
        self._back = BackChannel(group)
        self._given = dict[Hashable, Form]()
        self._taken = dict[Hashable, Form]()
        self._leaving, self._sent = list[Work](), list[Tensor]()
        self._arriving = dict[Hashable, _Arriving]()
        self._state_bytes = torch.get_rng_state().numel()

    def exchange(
        self, *, activation: Activation | None = None, gradient: Tensor | None = None, takes: Sequence[Awaited] = ()
    ) -> None:
        """Begin to send an activation to the next stage, or a gradient to the one before, and to take what comes.

        Raises PeerLostError.
        """
        self.finish()
        known = [one for one in takes if one.made is not None or one.key in self._taken]
        self._arriving |= {one.name: self._begin_to_take(one) for one in known}
        if activation is not None:
            self._send(self._group, self._packed(activation), self._after)
        if gradient is not None:
            self._send(self._back, [gradient.contiguous()], self._before)
        for one in takes:
            if one.name not in self._arriving:
                self._learn_form(one.key)
                self._arriving[one.name] = self._begin_to_take(one)

    def arrived(self, name: Hashable) -> Tensor | None:
        """Return what has come for a pass, once it has; with an activation torch's generator goes on where its sender's
        was. None if nothing comes for it."""
        if name not in self._arriving:
            return None
        memory, form, works = self._arriving.pop(name)
        self._group.wait(works)
        if form is None:
            return memory
        torch.set_rng_state(memory[: self._state_bytes].clone())
        return self._content_of(memory, form)

    def finish(self) -> None:
        """Wait until all that was sent is taken."""
        self._group.wait(self._leaving)
        self._leaving, self._sent = [], []

    def _send(self, channel: PointToPoint, messages: list[Tensor], place: int | None) -> None:
        _, leaving = channel.begin_exchange([(_known(place), one) for one in messages], [])
        self._leaving += leaving
        self._sent += messages

    def _packed(self, activation: Activation) -> list[Tensor]:
        """Return one message with the generator's state and the activation, after one with its form if that is new."""
        key, tensor = activation
        form = Form(tensor.dtype, tensor.shape)
        memory = self._room_for(form)
        memory[: self._state_bytes] = torch.get_rng_state()
        self._content_of(memory, form).copy_(tensor.detach())
        before = self._given.setdefault(key, form)
        assert before is form or before == form, f"a stage gave {form} for shapes for which it gave {before} before"
        return [form.to_words(), memory] if before is form else [memory]

    def _begin_to_take(self, one: Awaited) -> _Arriving:
        if one.made is not None:
            memory, form = torch.empty_like(one.made, memory_format=torch.contiguous_format), None
            arriving, _ = self._back.begin_exchange([], [(_known(self._after), memory)])
        else:
            form = self._taken[one.key]
            memory = self._room_for(form)
            arriving, _ = self._group.begin_exchange([], [(_known(self._before), memory)])
        return _Arriving(memory, form, arriving)

    def _learn_form(self, key: Hashable) -> None:
        """Receive the form of an activation, which its sender tells before it sends the first."""
        words = torch.empty(2 + _MOST_DIMS, dtype=torch.int64)
        self._group.exchange([], [(_known(self._before), words)])
        dtype, num_dims, *sizes = words.tolist()
        self._taken[key] = Form(_DTYPES[dtype], torch.Size(sizes[:num_dims]))

    def _room_for(self, form: Form) -> Tensor:
        return torch.empty(self._state_bytes + form.shape.numel() * form.dtype.itemsize, dtype=torch.uint8)

    def _content_of(self, memory: Tensor, form: Form) -> Tensor:
        """Return the activation in a message; it begins where kernels like tensors to begin."""
        return memory[self._state_bytes :].view(form.dtype).view(form.shape)


def _known(place: int | None) -> int:
    assert place is not None, "there is no stage on this side"
    return place
