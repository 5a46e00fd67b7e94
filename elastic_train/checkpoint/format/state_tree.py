"""The nested state and its leaves: what the file format keeps of a tree, and what must be recorded in addition.

torch.distributed.checkpoint names a leaf by its path, turns mapping keys into text, and drops empty mappings. Without
the additions, a state after one optimizer step (parameters numbered 0, 1, ...) would come back with other keys, and
plain SGD's without any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from elastic_train.checkpoint.format.pieces import Pieces
from elastic_train.errors import ConfigError

StatePath = tuple[str | int, ...]
"""Path of a leaf in a nested state: text for mapping keys, integers for list indices."""


def survey(tree: object, at: StatePath = ()) -> tuple[tuple[StatePath, ...], tuple[StatePath, ...]]:
    """Return the paths of mappings with integer keys, and of empty ones."""
    int_keyed = tuple(path for path, mapping in _mappings(tree, at) if mapping and _is_int_keyed(path, mapping))
    empty = tuple(path for path, mapping in _mappings(tree, at) if not mapping and path)
    return int_keyed, empty


def leaves_of(tree: object, at: StatePath = ()) -> Iterator[tuple[StatePath, object]]:
    """Yield every leaf with its path, as torch does; a list without tensors or mappings at any depth is one leaf.

    A tensor in pieces is a leaf.
    """
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves_of(value, (*at, str(key)))
    elif isinstance(tree, list) and _is_split(tree):
        for index, value in enumerate(tree):
            yield from leaves_of(value, (*at, index))
    else:
        yield at, tree


def _is_split(values: list[object]) -> bool:
    return any(
        isinstance(value, Mapping | Tensor | Pieces) or (isinstance(value, list) and _is_split(value))
        for value in values
    )


def fill(
    tree: dict[str, object],
    leaves: Mapping[StatePath, object],
    int_keyed: Sequence[StatePath],
    empty: Sequence[StatePath],
) -> None:
    """Put every leaf at its path, creating mappings and lists; other entries stay."""
    numbered = frozenset(int_keyed)
    for path in empty:
        _put(tree, path, {}, numbered)
    for path, value in leaves.items():
        _put(tree, path, value, numbered)


def _put(tree: dict[str, object], path: StatePath, value: object, numbered: frozenset[StatePath]) -> None:
    place: object = tree
    for depth, part in enumerate(path):
        key = int(part) if path[:depth] in numbered else part
        if depth == len(path) - 1:
            _set(place, key, value)
            return
        below = _get(place, key)
        if not isinstance(below, dict | list):
            below = [] if isinstance(path[depth + 1], int) else {}
            _set(place, key, below)
        place = below


def _get(place: object, key: str | int) -> object:
    if isinstance(place, list):
        return place[int(key)] if int(key) < len(place) else None
    assert isinstance(place, dict), f"'{key}' is not inside a container"
    return place.get(key)


def _set(place: object, key: str | int, value: object) -> None:
    if isinstance(place, list):
        place.extend([None] * (int(key) + 1 - len(place)))
        place[int(key)] = value
    else:
        assert isinstance(place, dict), f"'{key}' is not inside a container"
        place[key] = value


def _mappings(tree: object, at: StatePath) -> Iterator[tuple[StatePath, Mapping[object, object]]]:
    if isinstance(tree, Mapping):
        yield at, tree
        for key, value in tree.items():
            yield from _mappings(value, (*at, str(key)))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _mappings(value, (*at, index))


def _is_int_keyed(path: StatePath, mapping: Mapping[object, object]) -> bool:
    kinds = {type(key) for key in mapping}
    if kinds not in ({str}, {int}):
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        shown = ".".join(str(part) for part in path)
        raise ConfigError(f"state '{shown}' has keys of type {names}; a checkpoint holds text or integer keys")
    return kinds == {int}
