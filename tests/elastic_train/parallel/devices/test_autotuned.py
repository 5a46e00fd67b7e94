"""Kernels that Triton tunes are found among the loaded modules and named, here with a fake Triton."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from elastic_train.parallel.devices.autotuned import TUNED, describe_tuning, tuned_kernels


class KernelInterface:
    """Like Triton's class, which each of its decorators returns."""

    def __init__(self, fn: object = None) -> None:
        self.fn = fn


class Autotuner(KernelInterface):
    def __init__(self, num_configs: int, **chosen: str) -> None:
        super().__init__(KernelInterface())
        self.configs, self.cache = ["a configuration"] * num_configs, chosen


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    tuning, task = ModuleType("triton.runtime.autotuner"), ModuleType("a_users_task")
    tuning.__dict__.update(KernelInterface=KernelInterface, Autotuner=Autotuner)
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", tuning)
    monkeypatch.setitem(sys.modules, "a_users_task", task)
    return task


def test_a_tasks_own_tuning_is_named_with_the_way_out(task: ModuleType) -> None:
    assert describe_tuning() is None
    task.__dict__.update(pinned=Autotuner(1), plain=KernelInterface(), number=3)
    assert describe_tuning() is None and tuned_kernels() == {}
    task.__dict__.update(scan=KernelInterface(Autotuner(4, width_8="num_warps: 4")), same=task)
    said = describe_tuning()
    assert said is not None and said.startswith("a_users_task.scan with @triton.autotune")
    assert "one triton.Config" in said
    task.__dict__["gather"] = Autotuner(2)
    assert str(describe_tuning()).startswith("a_users_task.scan and 1 more kernel with")


def test_what_was_chosen_so_far_is_compared(task: ModuleType) -> None:
    task.__dict__["scan"] = Autotuner(4, width_8="num_warps: 4", width_16="num_warps: 8")
    assert tuned_kernels() == {
        f"{TUNED}a_users_task.scan for width_16": "num_warps: 8",
        f"{TUNED}a_users_task.scan for width_8": "num_warps: 4",
    }


def test_without_triton_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton.runtime.autotuner", raising=False)
    assert describe_tuning() is None and tuned_kernels() == {}
