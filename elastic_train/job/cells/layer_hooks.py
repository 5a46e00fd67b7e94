"""Hooks for tensor parallelism, installed around a model's modules and removable.

Column layers share their input, and row layers' outputs are summed (Shoeybi et al. 2019). With sequence parallelism,
tensor ranks split every row's tokens between the layers that are cut: row layers reduce-scatter their outputs over the
tokens, and column layers all-gather their inputs (Korthikanti et al. 2022, section 4.2.2). The volume and the tree are
those of whole sums. A rank saves only its own tokens of a column layer's input and gathers the rest again in the
backward pass, which divides a block's saved activations by the number of ranks. Tensors are (…, tokens, size), with
equally many tokens for each rank.

These functions run outside compiled graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout

from elastic_train.config.combinations import refused
from elastic_train.job.cells.cell_plan import CellPlan
from elastic_train.parallel.cells.links import (
    TOKENS,
    CellLinks,
    exchanged,
    gather,
    gathered,
    outside_of_graphs,
    shared,
    sum_of_own,
    summed,
)
from elastic_train.parallel.group import Group
from elastic_train.parallel.linear_products import Products, products_of
from elastic_train.tasks.placements import Stream


class Hook(Protocol):
    """An installed hook on a module or a parameter."""

    def remove(self) -> None:
        """Remove the hook."""


def hooks_of(model: nn.Module, plan: CellPlan, links: CellLinks) -> Iterator[Hook]:
    """Install a plan's hooks and yield them."""
    columns: dict[str, list[nn.Linear]] = {}
    whole = tuple(f"{name}." for name, use in plan.tensor.items() if use == "whole")
    for name, use in plan.tensor.items():
        module, shares_tokens = model.get_submodule(name), plan.shares_tokens and not name.startswith(whole)
        if use in ("partial", "tokens"):
            yield from _sums_of_gradients(module.parameters(), links)
        elif use == "column":
            assert isinstance(module, nn.Linear), "the plan was checked"
            columns.setdefault(name.rpartition(".")[0], []).append(module)
        elif use == "row":
            assert isinstance(module, nn.Linear), "the plan was checked"
            yield _Replaced(module, partial(_add_up, module, links, scattered if shares_tokens else summed))
            if shares_tokens and module.bias is not None:  # each rank adds it to its own tokens
                yield from _sums_of_gradients([module.bias], links)
        elif use == "split":
            yield module.register_forward_hook(outside_of_graphs(lambda _, __, made: own_tokens(made, links)))
        elif use == "enter":
            yield _changing_first(module, partial(own_tokens, links=links))
        elif use == "join":
            yield _changing_first(module, partial(all_tokens, links=links))
        elif use == "whole":
            yield _changing_first(module, partial(all_tokens, links=links))
            yield module.register_forward_hook(outside_of_graphs(lambda _, __, made: _first_own(made, links)))
        elif use == "dropout":
            assert isinstance(module, nn.Dropout), "the plan was checked"
            yield _Replaced(module, partial(_drop, module, links))
    for name, (during, after) in plan.draws.items():
        module = model.get_submodule(name)
        yield module.register_forward_pre_hook(_drawing(during, links))
        yield module.register_forward_hook(_drawing(after, links), always_call=True)  # also if recomputation ends there
    for parent, layers in columns.items():
        if plan.shares_tokens and not f"{parent}.".startswith(whole):
            around = model.get_submodule(parent) if plan.tensor.get(parent) == "gather" else None
            yield from _gathering(layers, around, links)
        else:
            yield from _sharing(layers, links)


def _drawing(stream: Stream, links: CellLinks) -> Callable[..., None]:
    """Return a hook that makes random numbers come from a stream, where they are drawn at all."""

    @outside_of_graphs
    def switch(module: nn.Module, given: tuple[Any, ...], *_: object) -> None:
        if stream == "shared":
            links.streams.use_shared()
        elif module.training:
            tensor = next(one for one in (*given, *module.parameters()) if isinstance(one, Tensor))
            links.streams.use_own(links.group.rank, tensor.device)

    return switch


def _sums_of_gradients(parameters: Iterable[nn.Parameter], links: CellLinks) -> Iterator[Hook]:
    for one in parameters:
        if one.requires_grad:
            yield one.register_hook(links.sum)  # type: ignore[no-untyped-call]


def _sharing(layers: Sequence[nn.Linear], links: CellLinks) -> Iterator[Hook]:
    share = _SharedOnce(links, len(layers))
    return (layer.register_forward_pre_hook(share) for layer in layers)


def _gathering(layers: Sequence[nn.Linear], whole: nn.Module | None, links: CellLinks) -> Iterator[Hook]:
    """All-gather the tokens for layers, and for the module around them if it reads the number of tokens."""
    once = _GatheredOnce(links, len(layers))
    if whole is not None:
        yield _changing_first(whole, once.begin)
    for layer in layers:
        yield _Replaced(layer, partial(once, layer))


def _changing_first(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Hook:
    """Change a module's first argument, positional or named `hidden_states` as in transformers."""

    @outside_of_graphs
    def before(
        _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            return (change(arguments[0]), *arguments[1:]), named
        return (), {**named, "hidden_states": change(named["hidden_states"])}

    return module.register_forward_pre_hook(before, with_kwargs=True)


class _SharedOnce:
    """The input of `num_layers` layers: if all get the same tensor, the sum of its gradients is exchanged once."""

    def __init__(self, links: CellLinks, num_layers: int) -> None:
        self._links, self._num_layers = links, num_layers
        self._last: tuple[Tensor, Tensor] | None = None
        self._num_left = 0

    @outside_of_graphs
    def __call__(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = arguments[0]
        if self._last is None or self._last[0] is not given:
            self._last, self._num_left = (given, shared(given, self._links)), self._num_layers
        found, self._num_left = self._last[1], self._num_left - 1
        if not self._num_left:
            self._last = None  # release the activation
        return (found, *arguments[1:])


class _GatheredOnce:
    """The input of layers that get all ranks' tokens: gathered once in the forward and once in the backward pass."""

    def __init__(self, links: CellLinks, num_layers: int) -> None:
        self._links, self._num_layers = links, num_layers
        self._last: GatheredInput | None = None
        self._num_left = 0

    def begin(self, given: Tensor) -> Tensor:
        """Return all tokens of the layers' next input."""
        self._last, self._num_left = GatheredInput(given, self._links), self._num_layers
        return self._last.whole

    def __call__(self, layer: nn.Linear, given: Tensor) -> Tensor:
        if self._last is None or not self._last.is_of(given):
            self.begin(given)
        assert self._last is not None
        made, self._num_left = self._last.through(layer), self._num_left - 1
        if not self._num_left:
            self._last.forget()
            self._last = None
        return made


class _Replaced:
    """A module with a replaced `forward`."""

    def __init__(self, module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        self._module = module
        module.forward = outside_of_graphs(forward)

    def remove(self) -> None:
        del self._module.forward


def _add_up(layer: nn.Linear, links: CellLinks, add: Callable[[Tensor, CellLinks], Tensor], given: Tensor) -> Tensor:
    """Sum the ranks' products, then add the bias."""
    total = add(products_of(layer, given).linear(given, layer.weight, None), links)
    return total if layer.bias is None else total + layer.bias


def _first_own(made: Any, links: CellLinks) -> Any:
    """Keep this rank's tokens of a module's output, the first of several."""
    return own_tokens(made, links) if isinstance(made, Tensor) else (own_tokens(made[0], links), *made[1:])


def _drop(layer: nn.Dropout, links: CellLinks, given: Tensor) -> Tensor:
    return own_dropout(given, layer.p, links) if layer.training and layer.p else given


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

    def through(self, layer: nn.Linear) -> Tensor:
        """Apply a layer; it saves only this rank's tokens of its input."""
        self._num_left += layer.weight.requires_grad
        how = products_of(layer, self.whole)
        return _Linear.apply(self.whole, self._own.detach(), layer.weight, layer.bias, self, how)  # type: ignore[no-any-return, no-untyped-call]

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
        ctx: Any, whole: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, given: GatheredInput, how: Products
    ) -> Tensor:
        ctx.given, ctx.products = given, how
        ctx.save_for_backward(own, weight)
        return how.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_weight = of_bias = None
        of_whole = ctx.products.of_input(rows, weight).view(*gradient.shape[:-1], -1).to(own.dtype)
        if ctx.needs_input_grad[2]:
            whole = ctx.given.again(own).to(rows.dtype).flatten(0, -2)
            of_weight = ctx.products.of_weight(rows, whole).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = rows.sum(0).to(weight.dtype)
        return of_whole, None, of_weight, of_bias, None, None


def _own(tensor: Tensor, group: Group) -> Tensor:
    return tensor.chunk(group.size, TOKENS)[group.rank]
