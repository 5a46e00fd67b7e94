"""Keyword arguments that a configuration has for a class of Python: compared with its signature before they are given.

Names must be the signature's. A value must be of the annotated type where that is made of booleans, numbers, text,
paths, lists, mappings and None: nothing is converted. Other types, and those that cannot be resolved, are left to the
class.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from elastic_train.config.section import not_one_of, scalars_of
from elastic_train.system.wording import did_you_mean, nearest

_LISTS = {list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection}
_MAPPINGS = {dict, collections.abc.Mapping, collections.abc.MutableMapping}


def wrong_arguments(
    factory: Callable[..., object], values: Mapping[str, object], key: str, owner: str | None = None
) -> list[str]:
    """Return what is wrong with the names and types of arguments.

    `key` is where they stand in the configuration, and `owner` names the factory there.
    """
    parameters = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    wrong = []
    for name, value in values.items():
        if name in parameters:
            parameter = parameters[name]
            is_default = type(parameter.default) is type(value) and parameter.default == value
            if not is_default:
                why = mismatch(_annotation(factory, parameter), value)
                wrong += [f"{key}.{name}: {why}"] if why else []
        elif not takes_any:
            wrong.append(f"{owner or key} has no '{name}'{did_you_mean(nearest(name, list(parameters)))}")
    return wrong


def mismatch(kind: object, value: object) -> str | None:
    """Return why a value is not of a type; None if it is, or if nothing is known of the type."""
    kinds = list(_alternatives(kind))
    if value is None:
        is_right = any(each in (None, types.NoneType) or not _is_known(each) for each in kinds)
        return None if is_right else f"must be {_names(kinds)}, given null"
    reasons = [_mismatch(each, value) for each in kinds if each not in (None, types.NoneType)]
    if not reasons or None in reasons:
        return None
    if len(reasons) == 1:
        return reasons[0]
    takes = frozenset(scalar for each in kinds for scalar in scalars_of(each))
    return _given(not_one_of(takes, value) or f"must be {_names(kinds)}", value)


def _mismatch(kind: object, value: object) -> str | None:
    origin = get_origin(kind) or kind
    if origin is Literal:
        is_right = any(type(each) is type(value) and each == value for each in get_args(kind))
        return None if is_right else _given(f"must be {_names([kind])}", value)
    if kind in (str, Path):
        return None if isinstance(value, str) else _given("must be text", value)
    if kind in (bool, int, float):
        return _wrong_scalar(kind, value)
    if origin in _LISTS:
        if not isinstance(value, list | tuple):
            return _given("must be a list", value)
        return _wrong_part(enumerate(value), _element_types(kind, len(value)), value)
    if origin in _MAPPINGS:
        if not isinstance(value, Mapping):
            return _given("must be a mapping", value)
        each = get_args(kind)[1] if len(get_args(kind)) == 2 else Any
        return _wrong_part(value.items(), [each] * len(value), value)
    return None


def _wrong_scalar(kind: object, value: object) -> str | None:
    assert isinstance(kind, type), "it is bool, int or float"
    if isinstance(value, bool) == (kind is bool) and isinstance(value, (int, float) if kind is float else kind):
        return None
    if kind is int and isinstance(value, float) and value.is_integer():
        return _given(f"must be a whole number: write {int(value)}", value)
    whole = "must be a whole number" if kind is int and isinstance(value, float) else None
    return _given(whole or not_one_of(scalars_of(kind), value) or f"must be {_names([kind])}", value)


def _wrong_part(parts: Any, kinds: list[object] | None, value: object) -> str | None:
    """Return what is wrong with the first wrong part of a list or mapping; `kinds` is None for another length."""
    if kinds is None:
        return _given("has another length", value)
    found = ((name, mismatch(kind, part)) for (name, part), kind in zip(parts, kinds, strict=True))
    return next((f"{name}: {why}" for name, why in found if why), None)


def _element_types(kind: object, length: int) -> list[object] | None:
    args = get_args(kind)
    if get_origin(kind) is tuple and args and args[-1] is not Ellipsis:
        return list(args) if len(args) == length else None
    return [args[0] if args else Any] * length


def _alternatives(kind: object) -> Iterator[object]:
    if get_origin(kind) is Annotated:
        yield from _alternatives(get_args(kind)[0])
    elif get_origin(kind) is Union or isinstance(kind, types.UnionType):
        for each in get_args(kind):
            yield from _alternatives(each)
    else:
        yield kind


def _is_known(kind: object) -> bool:
    origin = get_origin(kind) or kind
    return kind in (str, Path, bool, int, float) or origin is Literal or origin in _LISTS | _MAPPINGS


def _names(kinds: list[object]) -> str:
    names = {str: "text", Path: "text", bool: "true or false", int: "a whole number", float: "a number"}
    return " or ".join(dict.fromkeys(name for kind in kinds for name in _names_of(kind, names)))


def _names_of(kind: object, names: Mapping[Any, str]) -> Iterator[str]:
    origin = get_origin(kind) or kind
    if kind in names:
        yield names[kind]
    elif origin is Literal:
        yield from (repr(each) for each in get_args(kind))
    elif kind in (None, types.NoneType):
        yield "null"
    else:
        yield "a list" if origin in _LISTS else "a mapping"


def _given(why: str, value: object) -> str:
    return f"{why}, given {value!r}"


def _annotation(factory: Callable[..., object], parameter: inspect.Parameter) -> object:
    """Return the type of a parameter; Any if it has none, or if its names are not there at run time."""
    kind = parameter.annotation
    if kind is parameter.empty:
        return Any
    if not isinstance(kind, str):
        return kind
    maker = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
    names = getattr(inspect.unwrap(maker), "__globals__", {})
    holder = types.SimpleNamespace(__annotations__={"kind": kind})
    try:
        return typing.get_type_hints(holder, globalns=names, include_extras=True)["kind"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return Any
