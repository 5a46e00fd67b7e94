"""A model's parameters, and their gradients, as views of the layout's flat vectors.

Runs of grains can thus be updated, sent and received in place. Padding between tensors is and stays zero. A tensor lies
there in its memory order, so its parameter has the strides of that order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from elastic_train.config.combinations import refused
from elastic_train.parallel.buckets import FlatGradient, Placed
from elastic_train.parallel.unit_weights import UnitFlats
from elastic_train.placement.grains import Layout, strides_of
from elastic_train.placement.holdings import Run


class FlatModel:
    """Flat vectors of weights, and of gradients if these are whole, by number in the layout."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._model, self._layout = model, layout
        self.gradients: list[Tensor] = []
        self.block_names = list(dict.fromkeys(flat.unit for flat in layout.flats if flat.unit and flat.numel))
        """Names of the blocks, in execution order as far as it is known."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._device = next(iter(parameters.values())).device
        self._places = [(parameters[tensor.names[0]], tensor.flat, tensor.start) for tensor in layout.tensors]
        self._strides = {id(parameters[one.names[0]]): strides_of(one.shape, one.cut) for one in layout.tensors}
        for tensor, (parameter, _, _) in zip(layout.tensors, self._places, strict=True):
            if parameter.device != self._device:
                what = f"'{tensor.names[0]}' on {parameter.device} and other parameters on {self._device}"
                raise refused("parameters on several devices", what)
        self.weights: list[Tensor] = []
        self.is_whole = all(one.untyped_storage().nbytes() >= one.nbytes for one, _, _ in self._places)
        """True if the weights of the start are in memory, whole."""
        if not self.is_whole:
            self.weights = [self.zeros(number, 0) for number in range(len(layout.flats))]
            self.renew()
            return
        for number, flat in enumerate(layout.flats):  # one at a time, so that at most one is in memory twice
            self.weights.append(vector := self.zeros(number, flat.numel))
            for parameter, start in self._parameters_of(number):
                part = self._at(vector, parameter, start)
                with torch.no_grad():
                    part.copy_(parameter)
                parameter.data = part

    def make_gradients(self) -> None:
        """Allocate whole gradients; frozen vectors get empty ones."""
        sizes = [0 if flat.group is None else flat.numel for flat in self._layout.flats]
        self.gradients = [self.zeros(number, numel) for number, numel in enumerate(sizes)]

    def bind(self) -> list[Tensor]:
        """Make every trained parameter's gradient a view of its flat one; return the flat gradients."""
        for parameter, flat, start in self._places:
            if parameter.requires_grad:
                parameter.grad = self._at(self.gradients[flat], parameter, start)
        return self.gradients

    def placed(self) -> list[Placed]:
        """Return the position of each trained parameter's gradient, in the model's order."""
        return [Placed(*place) for place in self._places if place[0].requires_grad]

    def units(self) -> list[list[FlatGradient]]:
        """Return the gradients to exchange together, in exchange order: the last block first, non-block weights last.
        Parameters without elements, such as those of other stages, are left out.
        """
        return [
            [
                FlatGradient(number, self._layout.flats[number].numel, [*self._filled(number)])
                for number in self._flats_of(name)
                if self._layout.flats[number].group is not None and self._layout.flats[number].numel
            ]
            for name in (*reversed(self.block_names), "")
        ]

    def blocks(self) -> tuple[list[UnitFlats], UnitFlats]:
        """Return the weights to gather together: the blocks, in order, and the rest of the model."""
        blocks = [
            UnitFlats(name, {number: self.weights[number] for number in self._flats_of(name)}, module)
            for name in (*self.block_names, "")
            for module in [self._model.get_submodule(name) if name else None]
        ]
        return blocks[:-1], blocks[-1]

    def everything(self) -> UnitFlats:
        """Return all weights as one unit to gather."""
        return UnitFlats("", {number: vector for number, vector in enumerate(self.weights) if vector.numel()})

    def allocate(self) -> None:
        """Allocate whole weights after `renew`."""
        for vector in self.weights:
            vector.untyped_storage().resize_(vector.nbytes)

    def renew(self) -> None:
        """Free the whole weights and give the parameters unallocated memory to gather weights into.

        Pending receives still write to the old memory, which also cannot be freed while NumPy refers to it.
        """
        self.is_whole = False
        for number, old in enumerate(self.weights):
            numel = self._layout.flats[number].numel
            self.weights[number] = vector = torch.empty(numel, dtype=old.dtype, device=old.device)
            for parameter, start in self._parameters_of(number):
                parameter.data = self._at(vector, parameter, start)
            vector.untyped_storage().resize_(0)

    @contextlib.contextmanager
    def showing(self, vectors: Mapping[int, Tensor]) -> Iterator[None]:
        """Make the model's parameters views of other flat vectors, by number, within the context."""
        changed = [(one, start, flat) for one, flat, start in self._places if flat in vectors]
        before = [one.data for one, _, _ in changed]
        for one, start, flat in changed:
            one.data = self._at(vectors[flat], one, start)
        try:
            yield
        finally:
            for (one, _, _), weights in zip(changed, before, strict=True):
                one.data = weights

    def standing_for(self, weights: Tensor) -> Tensor:
        """Return the weights if they are on the model's device, else a stand-in there that takes gradients."""
        if weights.device == self._device:
            return weights
        return torch.empty(1, dtype=weights.dtype, device=self._device).expand(weights.shape)

    def brought(self, held: Tensor) -> Tensor:
        """Return a held tensor on the model's device."""
        return held.to(self._device)

    def weights_at(self, run: Run) -> Tensor:
        """Return a run of the weights, which must be whole."""
        return self.weights[run.flat][run.lo : run.hi]

    def _at(self, vector: Tensor, parameter: nn.Parameter, start: int) -> Tensor:
        """Return a parameter's view of a flat vector."""
        return vector[start : start + parameter.numel()].as_strided(parameter.shape, self._strides[id(parameter)])

    def _flats_of(self, unit: str) -> list[int]:
        return [number for number, flat in enumerate(self._layout.flats) if flat.unit == unit]

    def _parameters_of(self, number: int) -> list[tuple[nn.Parameter, int]]:
        return [(parameter, start) for parameter, flat, start in self._places if flat == number]

    def _filled(self, number: int) -> Iterator[tuple[nn.Parameter, int]]:
        return ((parameter, start) for parameter, start in self._parameters_of(number) if parameter.numel())

    def zeros(self, number: int, numel: int) -> Tensor:
        """Return zeros with a flat vector's dtype; on a CPU they take no memory until written."""
        dtype = getattr(torch, self._layout.flats[number].dtype.removeprefix("torch."))
        if self._device.type != "cpu" or not numel:
            return torch.zeros(numel, dtype=dtype, device=self._device)
        return torch.from_numpy(np.zeros(numel * dtype.itemsize, dtype=np.uint8)).view(dtype)
