"""A model's parameters as views of the layout's flat vectors, and their gradients alike.

Runs of grains can then be updated, sent and received where they lie, and the model sees it. Elements between tensors
are zero, and stay so.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from elastic_train.errors import ConfigError
from elastic_train.shards.grains import Flat, Layout
from elastic_train.shards.holdings import Run


class FlatModel:
    """Weights and gradients in flat vectors, by the numbers of the layout's; frozen ones have an empty gradient."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
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
        self.gradients = [_zeros(flat, 0 if flat.group is None else flat.numel, device) for flat in layout.flats]
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

    def weights_at(self, run: Run) -> Tensor:
        return self.weights[run.flat][run.lo : run.hi]

    def gradients_at(self, run: Run) -> Tensor:
        return self.gradients[run.flat][run.lo : run.hi]


def _zeros(flat: Flat, numel: int, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=getattr(torch, flat.dtype.removeprefix("torch.")), device=device)
