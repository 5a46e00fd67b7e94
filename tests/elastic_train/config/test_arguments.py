"""Keyword arguments of a class that the configuration names: unknown names, and values of other types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from elastic_train.config.arguments import wrong_arguments

if TYPE_CHECKING:
    from somewhere import Unknown  # type: ignore[import-not-found]


class Made:
    """A class as tasks are."""

    def __init__(
        self,
        size: int = 3,
        rate: float = 0.1,
        name: str | None = None,
        is_flipped: bool = False,
        crop: Literal["shift", "centre"] = "shift",
        scale: Sequence[float] = (0.5, 1.0),
        pair: tuple[int, int] = (1, 2),
        weights: str | Sequence[float] | None = None,
        model: Mapping[str, int] | None = None,
        folder: Path | None = None,
        sloppy: int = None,  # type: ignore[assignment]  # noqa: RUF013
        unknown: Unknown | None = None,
        other: Any = None,
        bare=0,  # type: ignore[no-untyped-def]
    ) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("size", "010", "must be a number: a leading zero"),
        ("size", "64", "write 64 without quotes"),
        ("size", True, "must be a number"),
        ("size", 1000.0, "write 1000"),
        ("size", 2.5, "must be a whole number"),
        ("size", None, "must be a whole number, given null"),
        ("rate", "1e-3", "write 0.001"),
        ("rate", False, "must be a number"),
        ("name", 5, "must be text"),
        ("name", ["a"], "must be text"),
        ("is_flipped", 1, "must be true or false"),
        ("is_flipped", "yes", "true"),
        ("crop", "middle", "'shift' or 'centre'"),
        ("scale", 0.5, "must be a list"),
        ("scale", "[0.5, 1]", "must be a list"),
        ("scale", [0.5, "1"], "1: must be a number"),
        ("pair", [1, 2, 3], "another length"),
        ("weights", 5, "text or a list"),
        ("model", [1], "must be a mapping"),
        ("model", {"dim": "64"}, "dim: must be a number"),
        ("folder", 3, "must be text"),
        ("sise", 3, "did you mean 'size'"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: object, said: str) -> None:
    """With what was probably meant: nothing is converted, or left for a step to find."""
    (wrong,) = wrong_arguments(Made, {name: value}, "task.params")
    assert wrong.startswith("task.params")
    assert said in wrong


def test_values_of_the_annotated_types_are_taken() -> None:
    """Also whole numbers where any number is, lists where a tuple is, and defaults that are not of the type."""
    values = {
        "size": 5, "rate": 1, "name": None, "is_flipped": True, "crop": "centre", "scale": [1, 0.5], "pair": [1, 2],
        "weights": "balanced", "model": {"dim": 64}, "folder": "a/b", "sloppy": None, "unknown": 5, "other": {1: 2},
        "bare": "x",
    }  # fmt: skip
    assert wrong_arguments(Made, values, "task.params") == []
    assert wrong_arguments(lambda **others: others, {"any": 1}, "task.params") == []
