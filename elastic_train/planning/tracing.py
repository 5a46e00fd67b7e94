"""Count the work of forward and backward passes per unit as operations run, on fake or real tensors.

Matrix products, convolutions and attention count by FLOPs (torch's formulas), other operations by the bytes they read
and write. Memory counts from its allocation until it is freed, so a unit keeps what is still allocated after its
forward pass.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from elastic_train.parallel.attention.documents import ATTEND, ATTEND_BACKWARD
from elastic_train.planning.arithmetic.model import Work

REST = ""
_ATEN = torch.ops.aten
_FORWARD = (
    _ATEN._scaled_dot_product_flash_attention_for_cpu,
    _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_cudnn_attention,
    ATTEND,
)
_ATTENTION: dict[Any, Callable[..., int]] = {
    **{
        packet: lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, _of_heads(k, q), _of_heads(v, q))  # type: ignore[no-untyped-call]
        for packet in _FORWARD
    },
    **{
        packet: lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(  # type: ignore[no-untyped-call]
            g.shape, q.shape, _of_heads(k, q), _of_heads(v, q)
        )
        for packet in (
            _ATEN._scaled_dot_product_flash_attention_for_cpu_backward,
            ATTEND_BACKWARD,
        )
    },
}
"""Attention with fewer key heads than query heads, and on a CPU: torch's counter fails on these or skips them.

Packed rows count as one document each.
"""
_FREE = {
    _ATEN.t, _ATEN.transpose, _ATEN.view, _ATEN.detach, _ATEN._unsafe_view, _ATEN.split, _ATEN.as_strided,
    _ATEN.expand, _ATEN.permute, _ATEN.select, _ATEN.slice, _ATEN.unsqueeze, _ATEN.squeeze, _ATEN.unbind,
    _ATEN.alias, _ATEN.empty, _ATEN.empty_like, _ATEN.new_empty, _ATEN.empty_strided, _ATEN.lift_fresh,
    _ATEN._local_scalar_dense, _ATEN.unfold, _ATEN.reshape, _ATEN.view_as_real, _ATEN.chunk,
    torch.ops.prim.device,
}  # fmt: skip
"""Operations that move no bytes: views, uninitialized memory, and device queries that only fake tensors make."""

_REORDERS = {_ATEN.convolution, _ATEN.convolution_backward}
"""Operations whose library works on reordered copies of its inputs and outputs, which are allocated meanwhile."""


@dataclass(slots=True)
class UnitTrace:
    """A unit's passes, the bytes it keeps, and the bytes of its output."""

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    saved_bytes: float = 0.0
    output_bytes: float = 0.0


class Trace(TorchDispatchMode):
    """Count the pass that runs inside this context; `known` is memory allocated before, such as weights."""

    def __init__(self, model: nn.Module, units: Sequence[str], known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.units = {name: UnitTrace() for name in (*units, REST)}
        self.live_bytes = self.peak_bytes = 0
        self._model, self._now = model, REST
        self._is_backward = False
        self._known = {id(one.untyped_storage()) for one in known}
        self._kept = [one.untyped_storage() for one in known]  # kept alive, so that no new storage gets their ids
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._entered: dict[str, int] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[Trace]:
        """Track the running unit, and drop each gradient once it is accumulated."""
        hooks = [
            hook
            for name in self.units
            if name != REST
            for hook in (
                self._model.get_submodule(name).register_forward_pre_hook(partial(self._enter, name)),
                self._model.get_submodule(name).register_forward_hook(partial(self._leave, name)),
            )
        ]
        trained = [one for one in self._model.parameters() if one.requires_grad]
        hooks += [one.register_post_accumulate_grad_hook(_forget) for one in trained]  # type: ignore[no-untyped-call]
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def end_forward(self) -> None:
        """Record what the forward pass keeps in addition to its blocks."""
        kept = sum(unit.saved_bytes for unit in self.units.values())
        self.units[REST].saved_bytes = max(0.0, self.live_bytes - kept)
        self._is_backward = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._count(func._overloadpacket, args, kwargs, out)
        for tensor in _tensors(out):
            self._note(tensor)
        return out

    def _count(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if packet in _FREE:
            return
        if packet in _ATTENTION:
            work = Work(float(_ATTENTION[packet](*args, **kwargs)), 0.0, 1)
        elif packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
            work = Work(flops, 0.0, 1, flops if packet is _ATEN._scaled_mm else 0.0)
        else:
            moved = sum(one.numel() * one.element_size() for one in (*_tensors((args, kwargs)), *_tensors(out)))
            work = Work(0.0, float(moved), 1)
        if packet in _REORDERS:
            arranged = sum(one.numel() * one.element_size() for one in (*_tensors((args, kwargs)), *_tensors(out)))
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + arranged)
        unit = self.units[self._now]
        if self._is_backward:
            unit.backward += work
        else:
            unit.forward += work

    def _note(self, tensor: Tensor) -> None:
        """Count a new storage until it is freed."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known or key in self._storages:
            return
        num_bytes = storage.nbytes()
        self._storages[key] = weakref.ref(storage, partial(self._gone, key, num_bytes))
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _gone(self, key: int, num_bytes: int, _: object) -> None:
        del self._storages[key]
        self.live_bytes -= num_bytes

    def _enter(self, name: str, module: nn.Module, arguments: object) -> None:
        if self._is_backward:
            return  # recomputation
        self._entered[name], self._now = self.live_bytes, name
        for tensor in _tensors(arguments):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._left, name))  # type: ignore[no-untyped-call]

    def _leave(self, name: str, module: nn.Module, arguments: object, output: object) -> None:
        if self._is_backward:
            return
        unit, self._now = self.units[name], REST
        unit.saved_bytes = float(max(0, self.live_bytes - self._entered[name]))
        unit.output_bytes = float(sum(one.numel() * one.element_size() for one in _tensors(output)))
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._back, name))  # type: ignore[no-untyped-call]

    def _back(self, name: str, gradient: Tensor) -> None:
        self._now = name

    def _left(self, name: str, gradient: Tensor) -> None:
        """End a unit's backward pass at its input's gradient, unless the previous unit's pass has begun by then."""
        if self._now == name:
            self._now = REST


def _tensors(tree: object) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(tree) if isinstance(one, Tensor)]


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _of_heads(shared: Tensor, query: Tensor) -> tuple[int, ...]:
    """Return the shape of keys or values with the query's number of heads: torch supports others only from 2.12 on."""
    return (shared.shape[0], query.shape[1], *shared.shape[2:])
