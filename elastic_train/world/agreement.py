"""Agreeing: rank 0 looks at the outside world and decides; every rank takes its answer, or raises its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from elastic_train import errors
from elastic_train.errors import ElasticTrainError
from elastic_train.parallel.group import Group

T = TypeVar("T")


def agree(group: Group, decide: Callable[[], T]) -> T:
    """Let rank 0 decide and tell the others; if it fails, every rank raises an error of the same kind.

    What `decide` returns must be made of JSON's types (a tuple arrives as a list).
    """
    if group.rank == 0:
        try:
            value = decide()
        except ElasticTrainError as error:
            group.broadcast_object({"error": _public_name(error), "message": str(error)}, 0)
            raise
        group.broadcast_object({"value": value}, 0)
        return value
    answer = group.broadcast_object(None, 0)
    assert isinstance(answer, dict), "rank 0 sends a value or an error"
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return answer["value"]  # type: ignore[no-any-return]


def _public_name(error: ElasticTrainError) -> str:
    """Return the name of the nearest class that errors.py has; rooms have finer ones of their own."""
    return next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
