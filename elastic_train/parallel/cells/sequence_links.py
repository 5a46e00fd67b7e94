"""Sequence parallelism: tensor ranks split every row's tokens between the layers that are cut.

Row layers reduce-scatter their outputs over the tokens, and column layers all-gather their inputs (Korthikanti et al.
2022, section 4.2.2): the volume and the tree are those of whole sums. A rank saves only its own tokens of a column
layer's input and gathers the rest again in the backward pass, which divides a block's saved activations by the number
of ranks. Tensors are (…, tokens, size), with equally many tokens for each rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout, linear

from elastic_train.config.combinations import refused
from elastic_train.parallel.cells.links import TOKENS, CellLinks, exchanged, gather, gathered, sum_of_own
from elastic_train.parallel.group import Group


def own_tokens(tensor: Tensor, links: CellLinks) -> Tensor:
    """Return this rank's tokens of a replicated tensor; its gradient is all-gathered."""
    size = links.group.size
    if tensor.shape[TOKENS] % size:
        what = f"rows of {tensor.shape[TOKENS]} tokens between {size} ranks"
        raise refused("a size that it does not divide", what, "sequence")
    group = links.group
    return exchanged(tensor, lambda one: _own(one, group).clone(), partial(gather, group=group))


def all_tokens(tensor: Tensor, links: CellLinks) -> Tensor:
    """All-gather the ranks' tokens for equal use on all of them; a rank gets its own tokens' gradient."""
    group = links.group
    return exchanged(tensor, partial(gather, group=group), lambda gradient: _own(gradient, group).contiguous())


def scattered(tensor: Tensor, links: CellLinks) -> Tensor:
    """Reduce-scatter a tensor: return the sum of all ranks' tensors for this rank's tokens."""
    return exchanged(tensor, partial(sum_of_own, group=links.group), partial(gather, group=links.group))


def own_dropout(tensor: Tensor, share: float, links: CellLinks) -> Tensor:
    """Apply dropout to this rank's tokens as one rank would: masks are drawn for all tokens on every rank."""
    *rest, tokens, size = tensor.shape
    drawn = dropout(tensor.new_ones(*rest, tokens * links.group.size, size), share)
    return tensor * _own(drawn, links.group).clone()


class GatheredInput:
    """The shared input of several column layers, gathered once in the forward and once in the backward pass."""

    def __init__(self, own: Tensor, links: CellLinks) -> None:
        self._own, self._group = own, links.group
        self.whole = gathered(own, links.group)
        self._again: Tensor | None = None
        self._num_left = 0

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a layer; it saves only this rank's tokens of its input."""
        self._num_left += weight.requires_grad
        return _Linear.apply(self.whole, self._own.detach(), weight, bias, self)  # type: ignore[no-any-return, no-untyped-call]

    def is_of(self, given: Tensor) -> bool:
        """Return True if `given` is this input, as this rank's tokens or gathered."""
        return given is self._own or given is self.whole

    def forget(self) -> None:
        """Release the input once all layers have used it."""
        del self._own, self.whole

    def again(self, own: Tensor) -> Tensor:
        """Gather the input again from this rank's tokens, once for all layers that need it."""
        found = gather(own, self._group) if self._again is None else self._again
        self._num_left -= 1
        self._again = found if self._num_left else None
        return found


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, given: GatheredInput
    ) -> Tensor:
        ctx.given = given
        ctx.save_for_backward(own, weight)
        return linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_weight = of_bias = None
        of_whole = (rows @ weight.to(rows.dtype)).view(*gradient.shape[:-1], -1).to(own.dtype)
        if ctx.needs_input_grad[2]:
            whole = ctx.given.again(own).to(rows.dtype).flatten(0, -2)
            of_weight = (rows.t() @ whole).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = rows.sum(0).to(weight.dtype)
        return of_whole, None, of_weight, of_bias, None


def _own(tensor: Tensor, group: Group) -> Tensor:
    return tensor.chunk(group.size, TOKENS)[group.rank]
