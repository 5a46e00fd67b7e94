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
from elastic_train.parallel.unit_weights import UnitFlats
from elastic_train.shards.grains import Flat, Layout
from elastic_train.shards.holdings import Run


class FlatModel:
    """Weights and gradients in flat vectors, by the numbers of the layout's; frozen ones have an empty gradient.

    With `is_dealt` no gradient is whole: there are only the `homes` of what this rank holds of each. With `is_gathered`
    weights are whole only until `release`, and from then on while they are gathered: each run that this rank holds has
    memory of its own.
    """

    def __init__(self, model: nn.Module, layout: Layout, *, is_dealt: bool = False, is_gathered: bool = False) -> None:
        self._model, self._layout = model, layout
        self.is_dealt, self.is_gathered, self.is_whole = is_dealt, is_gathered, True
        self.homes: dict[int, Tensor] = {}
        self.block_names = list(dict.fromkeys(flat.unit for flat in layout.flats if flat.unit))
        """The units but the rest of the model, in the order in which passes run them, as far as it is known."""
        self._held: list[Run] = []
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._device = next(iter(parameters.values())).device
        self._places = [(parameters[tensor.names[0]], tensor.flat, tensor.start) for tensor in layout.tensors]
        for tensor, (parameter, _, _) in zip(layout.tensors, self._places, strict=True):
            if parameter.device != self._device:
                raise ConfigError(
                    f"'{tensor.names[0]}' is on {parameter.device}, other parameters are on {self._device}: a model "
                    "whose state is sharded is on one device; put it there, or set parallel.shards to none"
                )
        self.weights = [self._zeros(flat, 0 if is_gathered else flat.numel) for flat in layout.flats]
        whole = [0 if flat.group is None or is_dealt else flat.numel for flat in layout.flats]
        self.gradients = [self._zeros(flat, numel) for flat, numel in zip(layout.flats, whole, strict=True)]
        for number, flat in enumerate(layout.flats):  # one after the other: nothing else is there twice
            self.weights[number] = vector = self._zeros(flat, flat.numel)
            for parameter, start in self._parameters_of(number):
                part = vector[start : start + parameter.numel()].view(parameter.shape)
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
        """Make room for the gradients of the trained runs that this rank holds, instead of those that it had."""
        self._held = list(runs)
        sizes = [sum(run.hi - run.lo for run in runs if run.flat == number) for number in range(len(self.weights))]
        self.homes = {
            number: self._zeros(flat, sizes[number])
            for number, flat in enumerate(self._layout.flats)
            if flat.group is not None
        }

    def units(self) -> list[list[FlatGradient]]:
        """Return what is exchanged together, in the order of the exchange: the last block first, the rest last."""
        return [
            [
                FlatGradient(number, self._layout.flats[number].numel, self._parameters_of(number))
                for number in self._flats_of(name)
                if self._layout.flats[number].group is not None
            ]
            for name in (*reversed(self.block_names), "")
        ]

    def blocks(self) -> tuple[list[UnitFlats], UnitFlats]:
        """Return what is gathered together: the blocks, in their order, and the rest."""
        blocks = [
            UnitFlats(name, {number: self.weights[number] for number in self._flats_of(name)}, module)
            for name in (*self.block_names, "")
            for module in [self._model.get_submodule(name) if name else None]
        ]
        return blocks[:-1], blocks[-1]

    def memory_of(self, run: Run) -> Tensor:
        """Return the memory of the weights of a run that this rank holds or is to hold.

        Where weights are gathered it is new, with the weights in it while these are whole.
        """
        if not self.is_gathered:
            return self.weights_at(run)
        return (
            self.weights_at(run).clone()
            if self.is_whole
            else self._zeros(self._layout.flats[run.flat], run.hi - run.lo)
        )

    def release(self) -> None:
        """Let go of whole weights, where they are gathered: those that count are held."""
        if self.is_gathered and self.is_whole:
            self.renew()  # memory that was once shown to NumPy cannot be given back for a while
            self.is_whole = False

    def allocate(self) -> None:
        """Make room for whole weights once more."""
        for vector in self.weights:
            vector.untyped_storage().resize_(vector.nbytes)

    def renew(self) -> None:
        """Give the parameters other memory to gather into: they let go of what they have, where more may arrive."""
        for number, old in enumerate(self.weights):
            self.weights[number] = vector = torch.empty(old.shape, dtype=old.dtype, device=old.device)
            for parameter, start in self._parameters_of(number):
                parameter.data = vector[start : start + parameter.numel()].view(parameter.shape)
            vector.untyped_storage().resize_(0)

    def weights_at(self, run: Run) -> Tensor:
        """Return a run of the weights, which must be whole."""
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

    def _flats_of(self, unit: str) -> list[int]:
        return [number for number, flat in enumerate(self._layout.flats) if flat.unit == unit]

    def _parameters_of(self, number: int) -> list[tuple[nn.Parameter, int]]:
        return [(parameter, start) for parameter, flat, start in self._places if flat == number]

    def _zeros(self, flat: Flat, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=getattr(torch, flat.dtype.removeprefix("torch.")), device=self._device)
