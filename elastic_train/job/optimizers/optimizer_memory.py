"""Save and restore everything an optimizer keeps between steps, wherever it keeps it, as one tree.

Torch's optimizers keep tensors per parameter. Others keep counts in parameter groups or attributes, state under keys
that are not parameters, lists, or another optimizer. Values that differ from those at construction are state; the
others are settings, which a changed configuration may change. State is therefore found by comparison at each save. A
value that cannot be saved is refused by name.

The optimizer is never stepped to find its state: a step could have side effects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from elastic_train.checkpoint.format.layout import State
from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.value_text import Reader, Writer, Written

OWN, TEXT, TENSORS = "own", "text", "tensors"
"""Keys of the saved values outside parameters' state: JSON text, and the tensors that it names."""
_SCHEDULED = frozenset({"params", "lr", "initial_lr"})
"""Keys of a group that the model and the schedule set."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_TORCHS = frozenset(vars(SGD([nn.Parameter(torch.zeros(1))], lr=0.1))) - {"defaults", *_HOOKS} | {
    *("step", "_opt_called", "grad_scale", "found_inf"),
}
"""Attributes of every optimizer that are not state, and those that torch's schedulers and scalers add."""

_REFERENCES = ("optimizer", "group", "parameter", "moment", "whole state", "groups")
_ATTRIBUTES = ("attribute", "parameter")
"""Kinds of locations that are attributes; others are keys of mappings."""

Names = Mapping[int, str]
"""Parameter names, by id."""
Place = str
"""Location of a value, as JSON.

["attribute", optimizer, name], ["group", optimizer, group, key], ["parameter", optimizer, parameter, attribute], or
["state", optimizer, key, name]; without name if the key is not a parameter.
"""


class _Value(NamedTuple):
    """A value as JSON, the types in it that cannot be saved, and the names of its tensors."""

    written: Written
    opaque: list[str]
    tensors: set[str]

    @property
    def text(self) -> str:
        return json.dumps(self.written)


class OptimizerMemory:
    """An optimizer's state, found by comparison with its values at construction; made before its first step."""

    def __init__(self, optimizer: Optimizer, names: Names) -> None:
        self._optimizer = optimizer
        self._all = list(_with_inner(optimizer, []))
        self._built = dict(self._values(Writer(lambda: self._known(names))))

    def tree(self, names: Names) -> State:
        """Return the state as a commit has it: per parameter, the groups, and other state if there is any."""
        parameters = {id(one): one for group in self._optimizer.param_groups for one in group["params"]}
        kept = {names[key]: self._optimizer.state[one] for key, one in parameters.items() if self._has_state(one)}
        plain = {name: {key: one for key, one in values.items() if _is_plain(one)} for name, values in kept.items()}
        groups = [
            {**settings_of(group), "params": [names[id(one)] for one in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        own = self.own(names)
        return {"state": plain, "param_groups": groups, **({OWN: own} if own else {})}

    def _has_state(self, parameter: Tensor) -> bool:
        return parameter in self._optimizer.state

    def own(self, names: Names) -> State:
        """Return changed values outside parameters' state; empty if there are none.

        Raises ConfigError if a value cannot be saved.
        """
        writer = Writer(lambda: self._known(names))
        found = {place: one for place, one in self._values(writer) if one.tensors or one.text != self._text_at(place)}
        for place, one in found.items():
            if one.opaque:
                raise ConfigError(
                    f"optimizer.name: {type(self._optimizer).__name__} keeps {_shown(place)}, which changes as it "
                    f"steps, and a {one.opaque[0]} there cannot be saved: keep numbers, tensors or containers of them, "
                    "or set optimizer.name to adamw"
                )
        if not found:
            return {}
        used = set().union(*(one.tensors for one in found.values()))
        tensors = {name: tensor for name, tensor in writer.tensors.items() if name in used}
        written = [(place, one.written) for place, one in found.items()]
        return {TEXT: json.dumps(written), **({TENSORS: tensors} if tensors else {})}

    def opaque_attributes(self) -> list[str]:
        """Return the attributes whose values cannot be saved, such as functions."""
        places = [(json.loads(place), one) for place, one in self._built.items() if one.opaque]
        return [str(place[2]) for place, _ in places if place[0] == "attribute"]

    def _text_at(self, place: Place) -> str | None:
        built = self._built.get(place)
        return None if built is None else built.text

    def take_own(self, own: Mapping[str, Any], names: Names) -> None:
        """Load the result of `own`; attributes that it lacks get their initial values."""
        saved: dict[Place, Written] = dict(json.loads(own[TEXT])) if own else {}
        now = dict(self._values(Writer(lambda: self._known(names))))
        reader = Reader(own.get(TENSORS, {}), self._device(), self._reader_of(names))
        for place in [place for place in now if place not in self._built and place not in saved]:
            self._remove(json.loads(place), names)
        for place, built in self._built.items():
            changed = place not in saved and (place not in now or now[place].text != built.text)
            if changed and not (built.tensors or built.opaque):
                self._put(json.loads(place), reader.read(built.written), names)
        for place, written in saved.items():
            self._put(json.loads(place), reader.read(written), names)

    def take_state(self, saved: Mapping[str, Mapping[str, Any]], names: Names) -> None:
        """Load parameters' tensors; a parameter without saved state starts as before its first step.

        Keeps the saved dtypes: torch's own loading would cast a 16-bit parameter's state to 16 bits.
        """
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            for one in group["params"]:
                state.pop(one, None)
                if (kept := saved.get(names[id(one)])) is not None:
                    state[one] = {key: _placed(key, value, one, group) for key, value in kept.items()}

    def _values(self, writer: Writer) -> Iterator[tuple[Place, _Value]]:
        """Yield each value outside parameters' plain state."""
        for place, value in self._found(writer):
            writer.opaque, writer.used = [], set()
            yield json.dumps(place), _Value(writer.write(value), writer.opaque, writer.used)

    def _found(self, writer: Writer) -> Iterator[tuple[list[Any], Any]]:
        shared = {id(group) for group in self._optimizer.param_groups}
        for number, one in enumerate(self._all):
            for name, value in _attributes(one).items():
                if name not in _TORCHS:
                    yield ["attribute", number, name], _hooks(value) if name in _HOOKS else value
            for place, group in enumerate(one.param_groups):
                if number == 0 or id(group) not in shared:
                    others = _SCHEDULED if number == 0 else {"params"}
                    yield from (
                        (["group", number, place, key], value) for key, value in group.items() if key not in others
                    )
            if number == 0 or one.state is not self._optimizer.state:
                yield from self._found_in_state(number, one, writer)
            if number == 0:
                for parameter in (parameter for group in one.param_groups for parameter in group["params"]):
                    for key, value in vars(parameter).items():
                        yield ["parameter", number, writer.write(parameter), key], value

    def _found_in_state(self, number: int, one: Optimizer, writer: Writer) -> Iterator[tuple[list[Any], Any]]:
        trained = {id(parameter) for group in one.param_groups for parameter in group["params"]}
        for key, values in one.state.items():
            if id(key) not in trained:
                yield ["state", number, writer.write(key)], values
            else:
                for name, value in values.items():
                    if number > 0 or not _is_plain(value):
                        yield ["state", number, writer.write(key), name], value

    def _references(self, names: Names) -> Iterator[tuple[Written, Any]]:
        """Yield the objects that are written by reference: optimizers, parameters, and the tensors of their state."""
        yield from ((["optimizer", number], one) for number, one in enumerate(self._all))
        for place, group in enumerate(self._optimizer.param_groups):
            yield ["group", place], group
            for one in group["params"]:
                if (name := names.get(id(one))) is not None:
                    yield ["parameter", name], one
                    kept = self._optimizer.state.get(one, {})
                    yield from ((["moment", name, key], v) for key, v in kept.items() if isinstance(v, Tensor))
        yield from ((["whole state"], self._optimizer.state), (["groups"], self._optimizer.param_groups))

    def _known(self, names: Names) -> dict[int, Written]:
        return {id(one): written for written, one in self._references(names)}

    def _reader_of(self, names: Names) -> Callable[[Sequence[Any]], Any]:
        found = {tuple(written): one for written, one in self._references(names)}
        return lambda written: found[tuple(written)] if written[0] in _REFERENCES else None

    def _device(self) -> torch.device:
        found = (one.device for group in self._optimizer.param_groups for one in group["params"])
        return next(found, torch.device("cpu"))

    def _put(self, place: Sequence[Any], value: Any, names: Names) -> None:
        owner, name = self._slot(place, names)
        if place[0] in _ATTRIBUTES:
            setattr(owner, name, value)
        else:
            owner[name] = value

    def _remove(self, place: Sequence[Any], names: Names) -> None:
        owner, name = self._slot(place, names)
        if place[0] in _ATTRIBUTES:
            delattr(owner, name)
        else:
            owner.pop(name, None)

    def _slot(self, place: Sequence[Any], names: Names) -> tuple[Any, Any]:
        """Return the object or mapping that has a value, and the value's name or key there."""
        kind, number, *keys = place
        one = self._all[number]
        if kind == "attribute":
            return one, keys[0]
        if kind == "parameter":
            return self._key(keys[0], names), keys[1]
        if kind == "group":
            return one.param_groups[keys[0]], keys[1]
        key = self._key(keys[0], names)
        return (one.state, key) if len(keys) == 1 else (one.state[key], keys[1])

    def _key(self, written: Written, names: Names) -> Any:
        """Return a key of an optimizer's state."""
        return Reader({}, self._device(), self._reader_of(names)).read(written)


def names_of(model: nn.Module) -> Names:
    """Return the names of a model's parameters, by id."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings as a commit stores them: all entries except its parameters."""
    return {key: value for key, value in group.items() if key != "params" and _is_setting(value)}


def places_of(own: Mapping[str, Any]) -> list[list[Any]]:
    """Return the locations of the values in a result of `OptimizerMemory.own`."""
    return [json.loads(place) for place, _ in json.loads(own[TEXT])] if own else []


def _shown(place: Place) -> str:
    """Describe a value's location."""
    kind, _, *keys = json.loads(place)
    if kind == "attribute":
        return f"its attribute '{keys[0]}'"
    if kind == "parameter":
        return f"an attribute '{keys[1]}' of parameters"
    return f"'{keys[1]}' of its parameter groups" if kind == "group" else f"'{keys[-1]}' in its state"


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes, from its namespace and its slots."""
    slots = [name for kind in type(optimizer).__mro__ for name in vars(kind).get("__slots__", ())]
    return {**vars(optimizer), **{name: getattr(optimizer, name) for name in slots if hasattr(optimizer, name)}}


def _hooks(hooks: Mapping[int, Any]) -> list[Any]:
    """Return the step hooks that the optimizer's own code installed."""
    ours = __name__.partition(".")[0]
    return [one for one in hooks.values() if not str(getattr(one, "__module__", "")).startswith(f"{ours}.")]


def _with_inner(optimizer: Optimizer, seen: list[Optimizer]) -> Iterator[Optimizer]:
    """Yield an optimizer and the optimizers in its attributes, also within containers."""
    if any(one is optimizer for one in seen):
        return
    seen.append(optimizer)
    yield optimizer
    for name, value in vars(optimizer).items():
        if name not in _TORCHS:
            for inner in _optimizers_in(value):
                yield from _with_inner(inner, seen)


def _optimizers_in(value: object) -> Iterator[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _optimizers_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _optimizers_in(one)


def _is_plain(value: object) -> bool:
    """Return True if a commit stores a value of a parameter's state by name."""
    return value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str)


def _is_setting(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_setting(one) for one in value)
    return _is_plain(value)


def _placed(key: str, value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """Return a saved value on the device where torch keeps it: update counts on the CPU unless the kernels count.

    A tensor of the parameter's shape gets its strides, as multi-tensor kernels require.
    """
    if not isinstance(value, Tensor):
        return value
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value.to(parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
