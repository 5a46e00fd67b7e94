"""Switches that determine the kernels of a process, and kernels that Triton (here a fake one) tunes, are named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import nn

from elastic_train.parallel.devices.switches import (
    TUNED,
    KeptSwitches,
    begin_training,
    describe_tuning,
    described,
    switches,
    tuned_kernels,
)


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


@pytest.mark.heavy
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


MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Start from torch's default, even if other tests of this process made kernels deterministic."""
    kept = KeptSwitches(nn.Identity())
    torch.set_deterministic_debug_mode("default")
    yield
    kept.set_back()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda: torch.set_float32_matmul_precision("medium"), "matmul_precision was changed from highest to medium"),
        (lambda: torch.backends.cuda.enable_flash_sdp(False), "enable_flash_sdp was changed from True to False"),
        (lambda: torch.backends.cuda.enable_math_sdp(False), "enable_math_sdp was changed from True to False"),
        (lambda: torch.set_deterministic_debug_mode("warn"), "deterministic_debug_mode was changed from 0 to 1"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "set_num_threads was changed from"),
        (lambda: torch.set_default_dtype(torch.float64), "changed from torch.float32 to torch.float64"),
        (lambda: torch._C._set_mkldnn_enabled(False), "mkldnn.enabled was changed from True to False"),
        (lambda: torch.set_flush_denormal(True), "set_flush_denormal was changed from False to True"),
        (lambda: torch._C._set_cudnn_benchmark(True), "cudnn.benchmark was changed from False to True"),
        (lambda: torch.set_autocast_enabled("cpu", True), "autocast on the CPU was changed from False to True"),
        (lambda: torch.set_autocast_enabled("cuda", True), "autocast on CUDA was changed from False to True"),
        (lambda: setattr(MATMUL, "allow_tf32", True), "cuda.matmul.allow_tf32 from False to True"),
        (lambda: setattr(torch.backends.cudnn, "allow_tf32", False), "cudnn.allow_tf32 was changed from True to False"),
        (lambda: setattr(MATMUL, "fp32_precision", "tf32"), "cuda.matmul.fp32_precision was changed from none to tf32"),
        (lambda: setattr(torch.backends, "fp32_precision", "tf32"), "backends.fp32_precision was changed from none to"),
        (lambda: setattr(MATMUL, "allow_bf16_reduced_precision_reduction", False), "changed from True to False"),
    ],
)
def test_a_switch_is_set_back_and_named(change: Callable[[], object], line: str) -> None:
    kept, before = KeptSwitches(nn.Identity()), switches()
    change()
    [found] = kept.set_back()
    assert line in found
    assert switches() == before and kept.set_back() == []


def test_training_modes_are_set_back_module_by_module() -> None:
    """A module that was in eval mode when training began remains in eval mode."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    kept = KeptSwitches(model)
    model.eval()
    [line] = kept.set_back()
    assert line == "training mode of 2 modules was changed from True to False (first of 'the model')"
    assert [module.training for module in model.modules()] == [True, True, False]


def test_modules_that_a_task_leaves_in_eval_mode_stay_so() -> None:
    """Modules of a model in training mode; a model entirely in eval mode is in the state in which libraries load it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    assert begin_training(model) == ["1"] and [module.training for module in model] == [True, False]
    assert begin_training(model.eval()) == [] and all(module.training for module in model.modules())


def test_ranks_compare_the_environment_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    before = described()
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert before["MKL_CBWR"] == "unset" and described()["MKL_CBWR"] == "COMPATIBLE"
