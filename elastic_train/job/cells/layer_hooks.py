"""Hooks for tensor parallelism, installed around a model's modules and removable.

Column layers share their input, and row layers' outputs are summed (Shoeybi et al. 2019). With sequence parallelism,
column layers all-gather the tokens of their input, and row layers reduce-scatter theirs (Korthikanti et al. 2022).
These functions run outside compiled graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.functional import linear

from elastic_train.job.cells.cell_plan import CellPlan
from elastic_train.parallel.cells.links import CellLinks, outside_of_graphs, shared, summed
from elastic_train.parallel.cells.sequence_links import GatheredInput, all_tokens, own_dropout, own_tokens, scattered


class Hook(Protocol):
    """An installed hook on a module or a parameter."""

    def remove(self) -> None:
        """Remove the hook."""


def hooks_of(model: nn.Module, plan: CellPlan, links: CellLinks) -> Iterator[Hook]:
    """Install a plan's hooks and yield them."""
    columns: dict[str, list[nn.Linear]] = {}
    for name, use in plan.tensor.items():
        module = model.get_submodule(name)
        if use in ("partial", "tokens"):
            yield from _sums_of_gradients(module.parameters(), links)
        elif use == "column":
            assert isinstance(module, nn.Linear), "the plan was checked"
            columns.setdefault(name.rpartition(".")[0], []).append(module)
        elif use == "row":
            assert isinstance(module, nn.Linear), "the plan was checked"
            yield _Replaced(module, partial(_add_up, module, links, scattered if plan.shares_tokens else summed))
            if plan.shares_tokens and module.bias is not None:  # each rank adds it to its own tokens
                yield from _sums_of_gradients([module.bias], links)
        elif use == "split":
            yield module.register_forward_hook(outside_of_graphs(lambda _, __, made: own_tokens(made, links)))
        elif use == "enter":
            yield _changing_first(module, partial(own_tokens, links=links))
        elif use == "join":
            join = outside_of_graphs(lambda _, given: (all_tokens(given[0], links), *given[1:]))
            yield module.register_forward_pre_hook(join)
        elif use == "dropout":
            assert isinstance(module, nn.Dropout), "the plan was checked"
            yield _Replaced(module, partial(_drop, module, links))
    for parent, layers in columns.items():
        if plan.shares_tokens:
            whole = model.get_submodule(parent) if plan.tensor.get(parent) == "gather" else None
            yield from _gathering(layers, whole, links)
        else:
            yield from _sharing(layers, links)


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
        made, self._num_left = self._last.linear(layer.weight, layer.bias), self._num_left - 1
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
    total = add(linear(given, layer.weight), links)
    return total if layer.bias is None else total + layer.bias


def _drop(layer: nn.Dropout, links: CellLinks, given: Tensor) -> Tensor:
    return own_dropout(given, layer.p, links) if layer.training and layer.p else given
