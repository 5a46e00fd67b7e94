"""Write Python values as text and tensors, without pickle, for optimizers that keep them in attributes or groups.

Numbers, text, containers, arrays and random generators become JSON. Tensors are stored separately, each once, so that
two references to one tensor are restored as such. Any other value is opaque: only a description is written, which shows
if it changes but cannot be read back.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import io
import pickle
import random
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Written = Any
"""JSON: a plain value, or a list of its kind and contents."""
_SEQUENCES: Mapping[str, type] = {
    one.__name__: one for one in (list, tuple, set, frozenset, collections.deque, torch.Size)
}
_MAPPINGS: Mapping[str, type] = {
    one.__name__: one for one in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
}
_FACTORIES: Mapping[str, type] = {one.__name__: one for one in (dict, list, set, int, float, collections.deque)}
_UNPICKLABLE = (pickle.PickleError, TypeError, AttributeError, ValueError, RuntimeError, ImportError)


class Writer:
    """Writes values; `known` returns, on first use, the objects that are written by reference, by id."""

    def __init__(self, known: Callable[[], Mapping[int, Written]]) -> None:
        self._ask_known = known
        self.tensors: dict[str, Tensor] = {}
        self.opaque: list[str] = []
        """Types of the opaque values written."""
        self.used: set[str] = set()
        """Names of the tensors written, for the first time or again."""
        self._is_inside: set[int] = set()

    def write(self, value: Any) -> Written:
        """Return a value as JSON."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is not tuple and (known := self._known.get(id(value))) is not None:
            self.used |= {known[1]} if known[0] == "tensor" else set()
            return known
        if id(value) in self._is_inside:  # it contains itself
            return self._described(value)
        self._is_inside.add(id(value))
        try:
            return self._write(value)
        finally:
            self._is_inside.discard(id(value))

    @functools.cached_property
    def _known(self) -> dict[int, Written]:
        return dict(self._ask_known())

    def _write(self, value: Any) -> Written:
        kind: str = type(value).__name__
        if isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta":
            return self._tensor(value)
        if type(value) is _SEQUENCES.get(kind):
            return [kind, self._items(value), getattr(value, "maxlen", None)]
        factory = getattr(value, "default_factory", None)
        if type(value) is _MAPPINGS.get(kind) and (factory is None or factory in _FACTORIES.values()):
            pairs = [[self.write(key), self.write(one)] for key, one in _pairs(value)]
            return [kind, pairs, None if factory is None else factory.__name__]
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return ["array", self._put(torch.from_numpy(value.copy()))]
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return ["number", value.dtype.str, value.item()]
        if isinstance(value, torch.Generator):
            return ["torch", value.device.type, self._put(value.get_state())]
        if type(value) is random.Random:
            return ["random", self.write(value.getstate())]
        if type(value) is np.random.Generator:
            return ["numpy", type(value.bit_generator).__name__, self.write(value.bit_generator.state)]
        if type(value) is complex:
            return ["complex", value.real, value.imag]
        return ["bytes", value.hex()] if type(value) is bytes else self._described(value)

    def _items(self, value: Any) -> list[Written]:
        items = [self.write(one) for one in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items

    def _tensor(self, value: Tensor) -> Written:
        role = "parameter" if isinstance(value, nn.Parameter) else "gradient" if value.requires_grad else ""
        written = ["tensor", self._put(value.detach()), value.device.type, role]
        self._known[id(value)] = written
        return written

    def _put(self, tensor: Tensor) -> str:
        self.tensors[name := str(len(self.tensors))] = tensor
        self.used.add(name)
        return name

    def _described(self, value: object) -> Written:
        kind = type(value).__qualname__
        self.opaque.append(kind)
        return ["opaque", kind, _fingerprint(value)]


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items())


class _Pickler(pickle.Pickler):
    """Pickles an object's state for comparison only; the result is never loaded.

    Single numbers are compared by value, other tensors by identity and version, functions by their closures, generators
    by their position, parameters and optimizers by type, and classes by name.
    """

    def persistent_id(self, value: object) -> object:
        if type(value) is Tensor:
            if value.numel() == 1 and value.device.type == "cpu" and not value.is_sparse:
                return "Tensor", repr(value.tolist())
            return "Tensor", id(value), value._version
        return type(value).__qualname__ if isinstance(value, Tensor | Optimizer) else None

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, types.FunctionType):
            cells = [_content(cell) for cell in value.__closure__ or ()]
            own = (cells, value.__defaults__, value.__kwdefaults__, vars(value))
            return str, (value.__qualname__,), own
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            return str, (value.__qualname__,), (None if frame is None else (frame.f_lasti, dict(frame.f_locals)))
        if isinstance(value, type | types.ModuleType) and value is not str:
            return str, (value.__name__,)
        return NotImplemented


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _fingerprint(value: object) -> str:
    """Return a digest of an object; "" if it cannot be inspected, e.g. a lock or a file."""
    content = io.BytesIO()
    try:
        _Pickler(content).dump(value)
    except _UNPICKLABLE:
        return ""
    return hashlib.sha256(content.getvalue()).hexdigest()[:16]


class Reader:
    """Reads the output of a `Writer`; `known` resolves references and returns None for other kinds."""

    def __init__(
        self, tensors: Mapping[str, Tensor], device: torch.device, known: Callable[[Sequence[Any]], Any]
    ) -> None:
        self._tensors, self._device, self._known = tensors, device, known
        self._read: dict[str, Tensor] = {}

    def read(self, written: Written) -> Any:
        """Return the value; its tensors are the reader's, on the type of device they were on."""
        if not isinstance(written, list):
            return written
        if (value := self._known(written)) is not None:
            return value
        kind, *parts = written
        if kind in _SEQUENCES:
            items = [self.read(one) for one in parts[0]]
            return collections.deque(items, parts[1]) if kind == "deque" else _SEQUENCES[kind](items)
        if kind in _MAPPINGS:
            pairs = {self.read(key): self.read(one) for key, one in parts[0]}
            if kind == "defaultdict":
                return collections.defaultdict(_FACTORIES.get(parts[1]), pairs)
            return _MAPPINGS[kind](pairs)
        return self._single(kind, parts)

    def _single(self, kind: str, parts: Sequence[Any]) -> Any:
        if kind == "tensor":
            return self._tensor(*parts)
        if kind == "array":
            return self._tensors[parts[0]].cpu().numpy().copy()
        if kind == "number":
            return np.dtype(parts[0]).type(parts[1])
        if kind == "torch":
            generator = torch.Generator(self._device if parts[0] != "cpu" else "cpu")
            return generator.set_state(self._tensors[parts[1]].cpu())
        if kind == "random":
            own = random.Random()
            own.setstate(self.read(parts[0]))
            return own
        if kind == "numpy":
            bits = getattr(np.random, parts[0])()
            bits.state = self.read(parts[1])
            return np.random.Generator(bits)
        if kind == "complex":
            return complex(*parts)
        assert kind == "bytes", f"'{kind}' is no kind of value"
        return bytes.fromhex(parts[0])

    def _tensor(self, name: str, device: str, role: str) -> Tensor:
        if name not in self._read:
            value = self._tensors[name].to("cpu" if device == "cpu" else self._device)
            is_parameter = role == "parameter"
            self._read[name] = nn.Parameter(value) if is_parameter else value.requires_grad_(role == "gradient")
        return self._read[name]
