"""What tensor ranks exchange where each goes on with some tokens of every row between the layers that are cut.

The sum of a row layer's outputs is added up token by token, each at the rank that goes on with it, and column layers
get all tokens' inputs (Korthikanti et al. 2022, section 4.2.2): as much is sent as for whole sums, along the same
tree. A rank keeps its own tokens of a column layer's input, and gathers them once more in the backward pass. So all
that a block keeps is divided by the number of ranks. Tensors are (…, tokens, size), with tokens for each rank alike.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout, linear

from elastic_train.config.combinations import refused
from elastic_train.parallel.cells.context_links import TOKENS, gather, gathered, sum_of_own
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.parallel.group import Group


def own_tokens(tensor: Tensor, links: CellLinks) -> Tensor:
    """Return this rank's tokens of a tensor that all ranks have; all of them get its whole gradient."""
    size = links.group.size
    if tensor.shape[TOKENS] % size:
        what = f"rows of {tensor.shape[TOKENS]} tokens between {size} ranks"
        raise refused("a size that it does not divide", what, "sequence")
    return _OwnTokens.apply(tensor, links.group)  # type: ignore[no-any-return, no-untyped-call]


def all_tokens(tensor: Tensor, links: CellLinks) -> Tensor:
    """Return all ranks' tokens, with which all of them do the same; a rank gets its own tokens' gradient."""
    return _AllTokens.apply(tensor, links.group)  # type: ignore[no-any-return, no-untyped-call]


def scattered(tensor: Tensor, links: CellLinks) -> Tensor:
    """Return the sum of all ranks' tensors, of this rank's tokens alone."""
    return _Scattered.apply(tensor, links.group)  # type: ignore[no-any-return, no-untyped-call]


def own_dropout(tensor: Tensor, share: float, links: CellLinks) -> Tensor:
    """Leave out what one rank would of its tokens: numbers are drawn for all of them, alike on all ranks."""
    *rest, tokens, size = tensor.shape
    drawn = dropout(tensor.new_ones(*rest, tokens * links.group.size, size), share)
    return tensor * _own(drawn, links.group).clone()


class GatheredInput:
    """One input of several column layers: all ranks' tokens of it, and again in the backward pass, once for all."""

    def __init__(self, own: Tensor, links: CellLinks) -> None:
        self._own, self._group = own, links.group
        self.whole = gathered(own, links.group)
        self._again: Tensor | None = None
        self._num_left = 0

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a layer; it keeps this rank's tokens of its input alone."""
        self._num_left += weight.requires_grad
        return _Linear.apply(self.whole, self._own.detach(), weight, bias, self)  # type: ignore[no-any-return, no-untyped-call]

    def is_of(self, given: Tensor) -> bool:
        """Say whether this is what has been gathered of a rank's tokens, or is given as all of them."""
        return given is self._own or given is self.whole

    def forget(self) -> None:
        """Keep nothing of the input: all layers have had it."""
        del self._own, self.whole

    def again(self, own: Tensor) -> Tensor:
        """Return the whole input once more, given this rank's tokens; as often as layers need it."""
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


class _OwnTokens(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _own(tensor, group).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gather(gradients[0], ctx.group), None


class _AllTokens(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _own(gradients[0], ctx.group).contiguous(), None


class _Scattered(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return sum_of_own(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gather(gradients[0], ctx.group), None


def _own(tensor: Tensor, group: Group) -> Tensor:
    return tensor.chunk(group.size, TOKENS)[group.rank]
