"""A model's parameters as views of the layout's flat vectors, and their gradients alike.

Runs of grains can then be updated, sent and received where they lie, and the model sees it. Elements between tensors
are zero, and stay so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from elastic_train.errors import ConfigError
from elastic_train.parallel.dealt_sum import FlatGradient
from elastic_train.shards.grains import Flat, Layout
from elastic_train.shards.holdings import Run


class FlatModel:
    """Weights and gradients in flat vectors, by the numbers of the layout's; frozen ones have an empty gradient.

    With `is_dealt` no gradient is whole: there are only the `homes` of what this rank holds of each.
    """

    def __init__(self, model: nn.Module, layout: Layout, *, is_dealt: bool = False) -> None:
        self._layout, self.is_dealt = layout, is_dealt
        self.homes: dict[int, Tensor] = {}
        self._held: list[Run] = []
        parameters = dict(model.named_parameters(remove_duplicate=False))
        device = next(iter(parameters.values())).device
        self._places = [(parameters[tensor.names[0]], tensor.flat, tensor.start) for tensor in layout.tensors]
        for tensor, (parameter, _, _) in zip(layout.tensors, self._places, strict=True):
            if parameter.device != device:
                raise ConfigError(
                    f"'{tensor.names[0]}' is on {parameter.device}, other parameters are on {device}: a model whose "
                    "state is sharded is on one device; put it there, or set parallel.shards to none"
                )
        self.weights = [_zeros(flat, flat.numel, device) for flat in layout.flats]
        whole = [0 if flat.group is None or is_dealt else flat.numel for flat in layout.flats]
        self.gradients = [_zeros(flat, numel, device) for flat, numel in zip(layout.flats, whole, strict=True)]
        for parameter, flat, start in self._places:
            part = self.weights[flat][start : start + parameter.numel()].view(parameter.shape)
            with torch.no_grad():
                part.copy_(parameter)
            parameter.data = part

    def bind(self) -> list[Tensor]:
        """Make every trained parameter's gradient the view of its flat one; return the flat ones."""
        for parameter, flat, start in self._places:
            if parameter.requires_grad:
                parameter.grad = self.gradients[flat][start : start + parameter.numel()].view(parameter.shape)
        return self.gradients

    def make_homes(self, runs: Sequence[Run]) -> None:
        """Make room for the gradients of the runs that this rank holds, instead of those that it had."""
        self._held = list(runs)
        sizes = [sum(run.hi - run.lo for run in runs if run.flat == number) for number in range(len(self.weights))]
        self.homes = {
            number: self.weights[number].new_zeros(sizes[number])
            for number, flat in enumerate(self._layout.flats)
            if flat.group is not None
        }

    def units(self) -> list[list[FlatGradient]]:
        """Return what is exchanged together, in the order of the exchange: the last block first, the rest last."""
        units: dict[str, list[FlatGradient]] = {}
        for number, flat in enumerate(self._layout.flats):
            if flat.group is not None:
                mine = [(parameter, start) for parameter, place, start in self._places if place == number]
                units.setdefault(flat.unit, []).append(FlatGradient(number, flat.numel, mine))
        return [units[name] for name in sorted(units, key=lambda name: (name == "", -list(units).index(name)))]

    def weights_at(self, run: Run) -> Tensor:
        return self.weights[run.flat][run.lo : run.hi]

    def gradients_at(self, run: Run) -> Tensor:
        """Return the gradient of a run, which this rank holds."""
        if not self.is_dealt:
            return self.gradients[run.flat][run.lo : run.hi]
        start = 0
        for one in (one for one in self._held if one.flat == run.flat):
            if one.lo <= run.lo and run.hi <= one.hi:
                return self.homes[run.flat][start + run.lo - one.lo : start + run.hi - one.lo]
            start += one.hi - one.lo
        assert run.lo == run.hi, f"{run} is not held"
        return self.homes[run.flat][:0]


def _zeros(flat: Flat, numel: int, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=getattr(torch, flat.dtype.removeprefix("torch.")), device=device)
