"""Loading a task: its `collate` takes rows and ids, and random numbers if it wants them."""

from __future__ import annotations

import re

import pytest

from elastic_train.config.schema import TaskConfig
from elastic_train.errors import ConfigError
from elastic_train.tasks.task import load_task


class Plain:
    """A task of the older kind, whose `collate` takes no random numbers."""

    def collate(self, rows: object, ids: object) -> dict[str, object]:
        return {}

    prepare = columns = build_model = loss = metrics = lambda self: None


class Drawing(Plain):
    def collate(self, rows: object, ids: object, draw: object) -> dict[str, object]:  # type: ignore[override]
        return {}


class Wrong(Plain):
    def collate(self, rows: object) -> dict[str, object]:  # type: ignore[override]
        return {}


@pytest.mark.parametrize("kind", [Plain, Drawing])
def test_tasks_with_and_without_random_numbers(kind: type) -> None:
    """Both kinds of `collate` make a task."""
    assert isinstance(load_task(TaskConfig(path=f"{__name__}:{kind.__name__}")), kind)


def test_a_module_without_the_task_is_named_by_its_file() -> None:
    """Another module of this name may come earlier on PYTHONPATH."""
    with pytest.raises(ConfigError, match=rf"has no attribute 'Mine'; it was imported from {re.escape(__file__)}\)"):
        load_task(TaskConfig(path=f"{__name__}:Mine"))
    with pytest.raises(ConfigError, match=r"cannot be imported \(No module named 'nowhere'\); write module:Class"):
        load_task(TaskConfig(path="nowhere:Mine"))


def test_a_collate_with_other_parameters_is_refused() -> None:
    """The message names the task, what its method takes, and what is expected."""
    message = r"task.path: '.*:Wrong': Wrong.collate\(rows.* cannot be called .*; expected collate\(rows, ids\)"
    with pytest.raises(ConfigError, match=message):
        load_task(TaskConfig(path=f"{__name__}:Wrong"))


class Old(Plain):
    """A task that says how it is cut as tasks once did."""

    tensor_plan = loss_of_part = lambda self: None


def test_methods_that_are_not_called_any_longer_are_refused_with_their_successors() -> None:
    with pytest.raises(ConfigError) as caught:
        load_task(TaskConfig(path=f"{__name__}:Old"))
    assert re.findall(r"has `(\w+)`, which is not called: write `(\w+)", str(caught.value)) == [
        ("tensor_plan", "placements"),
        ("loss_of_part", "run"),
    ]
