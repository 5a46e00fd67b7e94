"""The base class of all sections of the configuration, and its checks of paths and numbers.

pydantic would make a number of the text '010', and true of 'yes' or 1. Here a value of another type is refused, with
what was probably meant.

Periods are text: '100 steps', '15 min', '2 epochs', or several with commas between them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from elastic_train.config import yaml12

log = logging.getLogger(__name__)
Value = object
MOST_BYTES_OF_A_NAME = 255
"""Length limit of one component of a path on common file systems."""
MOST_CHARS_OF_A_NAME = 128
"""Length limit of the names of runs and projects: 250 in MLflow, 128 in Weights & Biases."""
_EXACT = 2**53
"""Above this, not every integer has an exact float."""

SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "day": 86400.0}
"""Units of time, and their lengths in seconds."""


class Old(NamedTuple):
    """A key of earlier versions: its type, its default, and the keys of today that say the same in a section.

    Without `now` its value is ignored. `why` completes a warning that begins with the key.
    """

    kind: object
    default: object
    why: str
    now: Callable[[Mapping[str, Any]], Mapping[str, object]] | None = None


def _check_old(name: str, old: Old, value: object) -> None:
    """Raise ValueError unless an old key's value is of its type."""
    try:
        TypeAdapter[object](cast(Any, old.kind)).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{name} {old.why}, and its value is wrong: {error.errors()[0]['msg']}") from None


class Section(BaseModel):
    """Frozen, with no other keys than its fields; a field's docstring is its key's meaning.

    `OLD` has the keys of earlier versions, which are still taken. A value other than the default is warned of once.
    """

    OLD: ClassVar[Mapping[str, Old]] = {}

    # What pydantic says of a mistake has no values in it, which may be secrets; `sources` says it better in any case.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _has_keys_of_today(cls, section: object) -> object:
        """Put the keys of today in place of old ones."""
        if not isinstance(section, Mapping) or cls.OLD.keys().isdisjoint(section):
            return section
        today = {name: value for name, value in section.items() if name not in cls.OLD}
        given = {name: old for name, old in cls.OLD.items() if name in section}
        for name, old in given.items():
            _check_old(name, old, section[name])
        for name, old in given.items():
            if section[name] != old.default:
                _warn(f"configuration: {name} {old.why}")
                with contextlib.suppress(AttributeError, TypeError):  # a wrong value is refused later, by its key
                    today |= old.now(section) if old.now is not None else {}
        return today

    @field_validator("*", mode="before")
    @classmethod
    def _is_as_written(cls, value: object, info: ValidationInfo) -> object:
        """Refuse a value that would be changed, and text that no file or path can hold."""
        assert info.field_name is not None
        kind = cls.model_fields[info.field_name].annotation
        if value == "" and str in scalars_of(kind):
            raise ValueError("is empty: give a text, or leave the key out")
        is_section = any(isinstance(each, type) and issubclass(each, Section) for each in (kind, *alternatives(kind)))
        for each in () if is_section else _texts(value):  # a section looks at its own
            if "\0" in each or not _is_unicode(each):
                raise ValueError("has a character that no file can hold: it must be Unicode text without NUL")
        _check(kind, value)
        return value


_warned = set[str]()


def _warn(text: str) -> None:
    """Warn once of what each process reads several times."""
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)


def scalars_of(kind: object) -> frozenset[type]:
    """Return which of str, bool, int and float a key takes, but for null; all of them where the type is left open."""
    if kind is object:
        return frozenset((str, bool, int, float))
    if kind is ByteSize:
        return frozenset((str, int))
    if kind is float:
        return frozenset((int, float))
    if isinstance(kind, type):
        return frozenset((kind,) if kind in (str, bool, int) else ())
    if get_origin(kind) is Literal:
        return frozenset(type(each) for each in get_args(kind))
    return frozenset(scalar for each in alternatives(kind) for scalar in scalars_of(each))


def alternatives(kind: object) -> tuple[object, ...]:
    """Return the types that a type is a union of, but for null; none for a type that is no union."""
    if get_origin(kind) is Annotated:
        return (get_args(kind)[0],)
    is_union = isinstance(kind, types.UnionType) or get_origin(kind) is Union
    return tuple(each for each in get_args(kind) if each is not types.NoneType) if is_union else ()


def below(kind: object, name: str) -> object:
    """Return the type of what a key has below it by this name, or number; None if it has nothing so named."""
    if kind is object:
        return object
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field, old = kind.model_fields.get(name), kind.OLD.get(name) if issubclass(kind, Section) else None
        return field.annotation if field is not None else old.kind if old is not None else None
    if get_origin(kind) is dict:
        return get_args(kind)[1]
    if get_origin(kind) is tuple and name.isdecimal():
        parts = get_args(kind)
        return parts[0] if parts[-1] is Ellipsis else parts[int(name)] if int(name) < len(parts) else None
    return next((found for each in alternatives(kind) if (found := below(each, name)) is not None), None)


def _check(kind: object, value: object) -> None:
    """Raise ValueError for a value that is not of a key's type, and that pydantic would convert."""
    if isinstance(value, Mapping | list | tuple):
        for name, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            if not (isinstance(kind, type) and issubclass(kind, BaseModel)):  # which checks its own
                _check(below(kind, f"{name}"), each)
        return
    if takes := scalars_of(kind):
        wants_text = kind is str or (str in alternatives(kind) and int not in takes)
        is_number = isinstance(value, bool | int | float) and wants_text
        mistake = "must be text: quote it" if is_number else not_one_of(takes, value)
        if mistake is not None:
            raise ValueError(mistake)


def not_one_of(takes: frozenset[type], value: object) -> str | None:
    """Return what is wrong with a value where these types are wanted, and what to write; None if it may be right."""
    wants = "true or false" if takes == {bool} else "a number"
    if isinstance(value, bool):
        return None if bool in takes or takes == {str} else f"must be {wants}"
    if isinstance(value, str) and str not in takes:
        return f"must be {wants}{_meant(value)}"
    if isinstance(value, int | float) and takes == {bool}:
        return "must be true or false"
    if isinstance(value, int | float) and takes == {bool, str}:
        return "must be true, false or a name"
    if isinstance(value, float) and float not in takes and int in takes and abs(value) >= _EXACT:
        return "must be a whole number, written without point or exponent: a float has no more than 15 exact digits"
    return None


def _meant(text: str) -> str:
    """Return, with a colon before it, what the author of a text probably meant by it; nothing if nobody can say."""
    if (why := yaml12.misread(text)) is not None:
        return f": {why}"
    stripped = text.strip().replace(",", "").lower()
    if stripped.lstrip("+-") in ("nan", "inf", "infinity"):
        return f": YAML writes .{stripped.lstrip('+-')[:3]}"
    try:
        number = yaml12.scalar(stripped)
    except ValueError as error:
        return f": {error}"
    if number is None or isinstance(number, str):
        return ""
    return f": write {str(number).lower()} without quotes"


def wrong_arguments(function: Callable[..., object], given: Mapping[str, object]) -> Iterator[str]:
    """Yield what is wrong with arguments that are not of the type of their parameter, as far as that is known."""
    with contextlib.suppress(NameError, TypeError, PydanticUserError):  # a type that cannot be found, or be checked
        kinds = get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
        for name, value in given.items():
            try:
                is_scalar = isinstance(value, bool | int | float | str)
                TypeAdapter[object](kinds.get(name, object)).validate_python(value, strict=is_scalar)
            except ValidationError as error:
                yield f"'{name}': {error.errors()[0]['msg']}, given {value!r}"


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(name)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def folder(value: str | None) -> str | None:
    """Refuse a URL where a local folder is needed, and a path that no file system takes."""
    if value is not None and "://" in value:
        raise ValueError("must be a local folder; only datasets and checkpoint.url accept URLs")
    if any(len(part.encode()) > MOST_BYTES_OF_A_NAME for part in (value or "").split("/")):
        raise ValueError(f"has a name of more than {MOST_BYTES_OF_A_NAME} bytes, which no file system takes")
    return home(value)


def home(value: str | None) -> str | None:
    """Expand ~, which no shell expands in a file."""
    return None if value is None else os.path.expanduser(value)  # noqa: PTH111 - a Path would change the rest of it


def checked_name(name: str | None, most: int, *, without: str = "", key: str = "") -> str | None:
    """Refuse a name that a tracker would refuse, or cut, once the run has begun."""
    if name is not None and (len(name) > most or set(name) & set(without)):
        rest = f", without {' '.join(without)}" if without else ""
        raise ValueError(f"{key}must be {most} characters at most{rest}")
    return name


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type, default, meaning) of every key of a section and the sections in it."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        below = _section_in(kind)
        if below is None or below[0] is not kind:
            default = "required" if field.is_required() else _as_written(field.get_default(call_default_factory=True))
            yield f"{prefix}{name}", _kind_in_words(kind), default, field.description or ""
        if below is not None:
            yield from keys_of(below[0], f"{prefix}{name}{below[1]}")


def _section_in(kind: object) -> tuple[type[BaseModel], str] | None:
    """Return the section that a key is, may be or is a list of, and how to go on to its keys; None for other keys."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind, "."
    found = next((one for part in get_args(kind) if (one := _section_in(part)) is not None), None)
    return (found[0], "[].") if found is not None and get_origin(kind) in (list, tuple) else found


def _as_written(value: object) -> str:
    """Return a value as a file or a command line has it."""
    return "null" if value is None else value if isinstance(value, str) and value else json.dumps(yaml12.plain(value))


def _kind_in_words(kind: object) -> str:
    """Return the values that a key takes: words, a type, or several with a bar between them."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " | ".join(_as_written(value) for value in parts)
    if origin is Annotated:
        return _kind_in_words(parts[0])
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(_kind_in_words(part) for part in parts))
    if origin in (list, tuple):
        return f"list of {_kind_in_words(parts[0])}"
    if kind is types.NoneType:
        return "null"
    if kind is ByteSize:
        return "size"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "section"
    return getattr(origin or kind, "__name__", str(kind))


class Forms(NamedTuple):
    """The units that a key takes (steps, epochs, worlds, s), and all of its valid forms as advice."""

    units: tuple[str, ...]
    advice: str


def periods_of(text: str | None, forms: Forms) -> dict[str, float]:
    """Return the periods that a text names, by unit; times are in seconds, under 's'.

    Raises ValueError for a text that is not a period, or names two of one unit.
    """
    periods = dict[str, float]()
    for part in text.split(",") if text is not None else ():
        unit, number = _period(part.strip(), forms)
        if unit in periods:
            raise ValueError(f"names two periods in {'time' if unit == 's' else unit}: give one of each")
        periods[unit] = number
    return periods


def _period(text: str, forms: Forms) -> tuple[str, float]:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]+)", text)
    name = "" if found is None else found[2] if found[2] in SECONDS else f"{found[2].removesuffix('s')}s"
    unit = "s" if name in SECONDS or name == "days" else name
    is_number = found is not None and 0 < float(found[1]) * SECONDS["day"] < math.inf
    if found is None or not is_number or unit not in forms.units or (unit != "s" and not found[1].isdecimal()):
        raise ValueError(f"'{text}' is not a period: {forms.advice}")
    return unit, float(found[1]) * (SECONDS[name.removesuffix("s") or "s"] if unit == "s" else 1.0)


def written(**periods: float | None) -> str | None:
    """Return periods as a text, such as '50 steps, 900 s'; None for none."""
    return ", ".join(f"{number:.15g} {unit}" for unit, number in periods.items() if number is not None) or None


def whole(number: float | None) -> int | None:
    """Return a number of steps, epochs or worlds as an integer."""
    return None if number is None else int(number)


def has_unit(value: object, forms: Forms) -> object:
    """Return a key's value; raise ValueError for a number without a unit."""
    is_bare = type(value) in (int, float)
    if is_bare:
        raise ValueError(f"has no unit: {forms.advice}")
    return value
