"""A mixture of experts: a router sends each token to a few of many MLPs, without dropping any (dropless).

A token's output is the sum of its experts' outputs, likeliest first, weighted by probability; for several experts these
sum to 1 (Jiang et al. 2024), a single expert's is unchanged (Fedus et al. 2021). Each expert's tokens are one product,
in lane order, so bits depend on the lane only. The routers' addition to a lane's loss (`RouterLosses`) also depends on
that lane only: no rank needs other lanes. Kernels for a given number of tokens per expert would be compiled for one
lane only, so all of it runs outside compiled graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from elastic_train.parallel.cells.expert_links import ExpertLinks
from elastic_train.parallel.cells.links import CellLinks, outside_of_graphs, shared, summed


@dataclass(frozen=True, slots=True)
class RouterLosses:
    """Auxiliary losses that a model's routers add to a lane's summed loss, per block, over the tokens at `places`.

    `balance` times the number of tokens, times the number of experts, times the sum over experts of (share of tokens) *
    (mean probability), which is at least 1, with equality for an even spread (Fedus et al. 2021, section 2.2). And `z`
    times the squared log-sum-exp of the logits (Zoph et al. 2022, section 3.2).

    With `gather`, `places` are in a part of each row: the share of tokens is that of all parts, whose terms add up.
    """

    places: Tensor
    balance: float
    z: float
    terms: list[Tensor] = field(default_factory=list)
    gather: Callable[[Tensor], Tensor] | None = None

    def add(self, logits: Tensor, chosen: Tensor) -> None:
        """Add a block's logits (tokens, experts) and chosen experts (tokens, experts per token)."""
        logits, chosen = logits.index_select(0, self.places), chosen.index_select(0, self.places)
        num_experts = logits.shape[1]
        counts = shares_of(chosen, num_experts).double()
        counts = counts if self.gather is None else self.gather(counts[None]).sum(0)  # whole numbers, in any order
        shares = counts.to(logits.dtype) / counts.sum().clamp(min=1).to(logits.dtype)
        likely = logits.softmax(-1).sum(0)  # the mean, times the number of tokens
        self.terms.append(self.balance * num_experts * (shares * likely).sum())
        self.terms.append(self.z * logits.logsumexp(-1).square().sum())


def with_terms(out: Tensor, losses: RouterLosses) -> Tensor:
    """Return a stage's output for the next one as one vector: its activations, and the router losses so far."""
    assert all(term.dtype == out.dtype for term in losses.terms), "both are in fp32"
    return torch.cat((out.flatten(), torch.stack(losses.terms)))


def without_terms(given: Tensor, shape: Sequence[int], losses: RouterLosses) -> Tensor:
    """Return the previous stage's activations, of this shape; its router losses are added to `losses`."""
    size = math.prod(shape)
    out, terms = torch.split(given, [size, len(given) - size])
    losses.terms.extend(terms.unbind())
    return out.view(*shape)


def shares_of(chosen: Tensor, num_experts: int) -> Tensor:
    return (chosen.flatten()[:, None] == torch.arange(num_experts, device=chosen.device)).sum(0)


def counts_of(chosen: Tensor, num_experts: int) -> list[int]:
    """Return how many tokens each expert gets; evenly spread for fake tensors, as in a plan."""
    if isinstance(chosen, FakeTensor):
        ends = [expert * chosen.numel() // num_experts for expert in range(num_experts + 1)]
        return [hi - lo for lo, hi in pairwise(ends)]
    counts: list[int] = shares_of(chosen, num_experts).tolist()
    return counts


class Experts(nn.Module):
    """MLPs of one shape (SwiGLU), with weights stacked by expert; with `links`, only some are on this rank."""

    def __init__(self, dim: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts, self.width = num_experts, dim
        self.links: ExpertLinks | None = None
        self.gate = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.up = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden))

    @outside_of_graphs
    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Map x (tokens, dim), grouped by expert with `counts` tokens each; same shape and type."""
        return self.compute(x, counts) if self.links is None else self.links.spread(self, x, counts)

    @property
    def stacked(self) -> Sequence[nn.Parameter]:
        return self.gate, self.up, self.down

    def compute(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Map the tokens of this rank's experts: each expert has its own product, whose bits no other expert affects.

        Without any token one expert computes an empty product, so that weights have a gradient of zeros: ranks with
        parts of a block need gradients of all of it or none, since exchanges follow from them.
        """
        least = 1 if any(counts) else 0
        made = [
            F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
            for part, gate, up, down in zip(
                torch.split(x, list(counts)), *(weights.unbind() for weights in self.stacked), strict=True
            )
            if len(part) >= least
        ]
        return torch.cat(made).to(x.dtype)


class MixtureOfExperts(nn.Module):
    """The replacement of a block's MLP; `shared`, if given, sees every token.

    With `links` tensor ranks hold equal runs of consecutive experts: every rank routes all tokens, and their outputs
    are added.
    """

    def __init__(self, dim: int, hidden: int, num_experts: int, per_token: int, shared: nn.Module | None) -> None:
        super().__init__()
        self.num_experts, self.per_token = num_experts, per_token
        self.links: CellLinks | None = None
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = Experts(dim, hidden, num_experts)
        self.shared = shared

    @outside_of_graphs
    def forward(self, x: Tensor, losses: RouterLosses | None = None) -> Tensor:
        """Map x (rows, width, dim) to the same shape."""
        tokens = x.flatten(0, -2)
        with torch.autocast(x.device.type, enabled=False):  # in bf16 many experts would be equally likely
            logits = F.linear(tokens.float(), self.router.weight.float())
            weights, chosen = logits.softmax(-1).topk(self.per_token)
            weights = weights / weights.sum(-1, keepdim=True) if self.per_token > 1 else weights
        if losses is not None:
            losses.add(logits, chosen)
        order = chosen.flatten().argsort(stable=True)
        if self.links is not None:
            tokens, weights = shared(tokens, self.links), shared(weights, self.links)
        # Copies first, and an index without repetitions: a token's gradients are then summed in one order.
        copies = tokens[:, None].expand(-1, self.per_token, -1).reshape(-1, tokens.shape[-1])
        made = self._made(copies, order, counts_of(chosen, self.num_experts))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        made = made.index_select(0, back).view(len(tokens), self.per_token, tokens.shape[-1])
        out: Tensor = (made * weights[..., None].to(made.dtype)).sum(1).view_as(x)
        out = out if self.links is None else summed(out, self.links)
        return out if self.shared is None else out + self.shared(x)

    def _made(self, copies: Tensor, order: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the experts' outputs for copies in an order, by expert; zeros for experts of other tensor ranks."""
        if self.links is None:
            return self.experts(copies.index_select(0, order), counts)  # type: ignore[no-any-return]
        group, each = self.links.group, self.num_experts // self.links.group.size
        mine = slice(group.rank * each, (group.rank + 1) * each)
        before, own = sum(counts[: mine.start]), sum(counts[mine])
        made = self.experts(copies.index_select(0, order[before : before + own]), counts[mine])
        return F.pad(made, (0, 0, before, len(order) - before - own))
