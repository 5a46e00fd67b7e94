"""What neighbouring stages of a cell send each other: activations forward, their gradients backward.

With an activation goes the state of torch's generator, from which the stage that it comes from has drawn: the next
stage goes on where that one has ended, as one rank would. So what is drawn does not depend on the stages.

The form of an activation follows from the shapes of its lane's micro-batch, so it is sent once for each of these; both
ends know it from then on. What one exchange sends is under way while the stage computes, until the next exchange.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import Work

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 14
Messages = list[tuple[int, Tensor]]
"""Tensors, and the places that they go to or come from."""


class Form(NamedTuple):
    """The type and shape of an activation."""

    dtype: torch.dtype
    shape: torch.Size

    def to_words(self) -> Tensor:
        """Return a message of fixed length that says it."""
        words = [_DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return torch.tensor(words + [0] * (2 + _MOST_DIMS - len(words)))


class Activation(NamedTuple):
    """What a stage gives to the next; `key` is alike for lanes whose micro-batches have the same shapes."""

    key: Hashable
    tensor: Tensor


class StageLinks:
    """Links of this rank's stage, in one world, to the places `before` and `after` it in its cell, if there are any."""

    def __init__(self, group: Group, before: int | None, after: int | None) -> None:
        self._group, self._before, self._after = group, before, after
        self._given = dict[Hashable, Form]()
        self._taken = dict[Hashable, Form]()
        self._leaving, self._sent = list[Work](), Messages()
        self._state_bytes = torch.get_rng_state().numel()

    def exchange(
        self,
        *,
        activation: Activation | None = None,
        gradient: Tensor | None = None,
        awaits: Hashable | None = None,
        awaits_gradient_of: Tensor | None = None,
    ) -> Tensor | None:
        """Send an activation to the next stage, or a gradient to the one before, and return what is awaited, if it is.

        `awaits` is the key of an activation, whose generator's state is torch's from then on; `awaits_gradient_of` is
        an activation that was sent. Raises PeerLostError.
        """
        self.finish()
        sends = self._packed(activation) if activation is not None else Messages()
        if gradient is not None:
            sends.append((_known(self._before), gradient.contiguous()))
        memory: Tensor | None = None
        if awaits_gradient_of is not None:
            memory = torch.empty_like(awaits_gradient_of, memory_format=torch.contiguous_format)
        elif awaits is not None and (form := self._taken.get(awaits)) is not None:
            memory = self._room_for(form)
        source = self._after if awaits_gradient_of is not None else self._before
        arriving, self._leaving = self._group.begin_exchange(
            sends, [] if memory is None else [(_known(source), memory)]
        )
        self._sent = sends
        self._group.wait(arriving)
        if awaits is None:
            return memory
        return self._unpacked(awaits, self._take_first(awaits) if memory is None else memory)

    def finish(self) -> None:
        """Wait until all that was sent is taken."""
        self._group.wait(self._leaving)
        self._leaving, self._sent = [], []

    def _packed(self, activation: Activation) -> Messages:
        """Return one message with the generator's state and the activation, after one with its form if that is new."""
        key, tensor = activation
        form, place = Form(tensor.dtype, tensor.shape), _known(self._after)
        memory = self._room_for(form)
        memory[: self._state_bytes] = torch.get_rng_state()
        self._content_of(memory, form).copy_(tensor.detach())
        before = self._given.setdefault(key, form)
        assert before is form or before == form, f"a stage gave {form} for shapes for which it gave {before} before"
        return [(place, form.to_words()), (place, memory)] if before is form else [(place, memory)]

    def _take_first(self, key: Hashable) -> Tensor:
        """Receive an activation whose form is not known yet."""
        words = torch.empty(2 + _MOST_DIMS, dtype=torch.int64)
        self._group.exchange([], [(_known(self._before), words)])
        dtype, num_dims, *sizes = words.tolist()
        self._taken[key] = Form(_DTYPES[dtype], torch.Size(sizes[:num_dims]))
        memory = self._room_for(self._taken[key])
        self._group.exchange([], [(_known(self._before), memory)])
        return memory

    def _unpacked(self, key: Hashable, memory: Tensor) -> Tensor:
        torch.set_rng_state(memory[: self._state_bytes].clone())
        return self._content_of(memory, self._taken[key])

    def _room_for(self, form: Form) -> Tensor:
        return torch.empty(self._state_bytes + form.shape.numel() * form.dtype.itemsize, dtype=torch.uint8)

    def _content_of(self, memory: Tensor, form: Form) -> Tensor:
        """Return the activation in a message; it begins where kernels like tensors to begin."""
        return memory[self._state_bytes :].view(form.dtype).view(form.shape)


def _known(place: int | None) -> int:
    assert place is not None, "there is no stage on this side"
    return place
