"""Optimizers that keep state in unusual places: some that commits can hold, and some that must be refused."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


class Odd(Optimizer):
    """Subtracts the gradient times the rate and `scale`."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.begin()

    def begin(self) -> None:
        """Create the initial state."""

    def before(self) -> None:
        """Run once per step, before the update."""

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        """Return the factor of a parameter's gradient."""
        return 1.0

    def parameters(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        return ((group, one) for group in self.param_groups for one in group["params"])

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.before()
        for group, one in self.parameters():
            assert one.grad is not None, "gradients are in place"
            one.sub_(group["lr"] * one.grad * self.scale(group, one))


class Counter(Odd):
    """Counts in an attribute that exists from the start."""

    def begin(self) -> None:
        self.count = 0

    def before(self) -> None:
        self.count += 1

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        return 1 / self.count


class LateCounter(Counter):
    """Gets an attribute and per-parameter state only at its tenth step."""

    def before(self) -> None:
        super().before()
        if self.count >= 10:
            self.extra = getattr(self, "extra", 1.0) * 0.5
            for _, one in self.parameters():
                slow = self.state[one].setdefault("slow", one.clone())
                slow.lerp_(one, 0.5)
                one.lerp_(slow, self.extra)

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        return 1.0


class CountingGroups(Odd):
    """Counts in its parameter groups, like ScheduleFree, and has a growing number there, like Prodigy."""

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        if parameter is group["params"][0]:
            group["k"], group["d"] = group.get("k", 0) + 1, group.get("d", 0.1) * 1.25
        return group["d"] / group["k"]


class TensorInGroups(Odd):
    """Keeps a tensor in each group, created at the first step."""

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        group.setdefault("d", torch.ones(())).mul_(0.9)
        return group["d"]


class Lists(Odd):
    """Keeps momentum in a list, norms in a deque, and a dict keyed by parameter."""

    def begin(self) -> None:
        self.momentum = [torch.zeros_like(one) for _, one in self.parameters()]
        self.norms: deque[float] = deque(maxlen=3)
        self.seen: dict[Tensor, list[float]] = {}

    def before(self) -> None:
        self.norms.append(sum(float(one.grad.norm()) for _, one in self.parameters() if one.grad is not None))

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        place = [one is parameter for _, one in self.parameters()].index(True)
        assert parameter.grad is not None, "gradients are in place"
        self.momentum[place].mul_(0.9).add_(parameter.grad)
        self.seen.setdefault(parameter, []).append(sum(self.norms))
        return self.momentum[place] / (1 + len(self.seen[parameter]) + max(self.norms))


class ListsInState(Odd):
    """Keeps a parameter's last gradients in its state, in a deque of tensors."""

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        assert parameter.grad is not None, "gradients are in place"
        last = self.state[parameter].setdefault("last", deque(maxlen=3))
        last.append(parameter.grad.clone())
        return sum(last) / 3


class GlobalKey(Odd):
    """Keeps a count in its state, under a key that is no parameter."""

    def before(self) -> None:
        whole = self.state.setdefault("whole", {"n": 0, "norm": torch.zeros(())})  # type: ignore[call-overload]
        whole["n"] += 1
        whole["norm"] += sum(one.grad.norm() for _, one in self.parameters() if one.grad is not None)

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        whole: Any = self.state["whole"]  # type: ignore[index]
        return whole["n"] / whole["norm"]


class Lookahead(Odd):
    """Wraps another optimizer, sharing its groups but not its state, and updates slow weights every third step."""

    def begin(self) -> None:
        self.inner = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.inner.param_groups = self.param_groups
        self.slow = {one: one.detach().clone() for _, one in self.parameters()}
        self.count = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        if self.count % 3 == 0:
            for one, slow in self.slow.items():
                slow.lerp_(one, 0.5)
                one.copy_(slow)


class SeededNoise(Odd):
    """Draws noise from generators that it seeds (Langevin dynamics)."""

    def begin(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.others = [np.random.default_rng(3), random.Random(4)]

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        numpys, pythons = self.others
        both = float(numpys.random()) + pythons.random()
        return 1 + both + torch.randn(parameter.shape, generator=self.generator)


class WholeNorm(Odd):
    """Divides by the norm of all gradients, which depends on the parameter order."""

    def before(self) -> None:
        self.norm = torch.stack([one.grad.sum() for _, one in self.parameters() if one.grad is not None]).norm()

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        return 1 / self.norm


LATE = 14
"""A step after the rehearsal's last one."""


class Late(Odd):
    """Halves its updates late."""

    def counted(self, parameter: Tensor) -> Any:
        """Return the number of steps."""

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        return 0.5 if self.counted(parameter) > LATE else 1.0


class OnParameters(Late):
    """Counts in an attribute of each parameter."""

    def counted(self, parameter: Any) -> Any:
        parameter.count = getattr(parameter, "count", 0) + 1
        return parameter.count


class InSlots(Late):
    """Counts in a slot."""

    __slots__ = ("count",)
    count: int

    def begin(self) -> None:
        self.count = 0

    def before(self) -> None:
        self.count += 1

    def counted(self, parameter: Tensor) -> Any:
        return self.count


class InDefaults(Late):
    """Counts in the defaults of its groups, where torch keeps settings."""

    def before(self) -> None:
        self.defaults["count"] = self.defaults.get("count", 0) + 1

    def counted(self, parameter: Tensor) -> Any:
        return self.defaults["count"]


SAVED = (
    Counter, LateCounter, CountingGroups, TensorInGroups, Lists, ListsInState, GlobalKey, Lookahead, SeededNoise,
    WholeNorm, OnParameters, InSlots, InDefaults,
)  # fmt: skip
"""Those that a run may use if state is replicated."""


class ProcessNoise(Odd):
    """Draws noise from torch's global generator."""

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        return 1 + torch.randn_like(parameter)


class PythonNoise(Counter):
    """Draws from Python's global generator, from its eighth step on."""

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        return random.random() if self.count > 7 else 1.0


class Hook(Odd):
    """Counts in the closure of its step hook."""

    def begin(self) -> None:
        calls: list[int] = []

        def hook(optimizer: Optimizer, arguments: object, named: object) -> None:
            calls.append(1)
            for group in optimizer.param_groups:
                group["factor"] = 1 / len(calls)

        self.register_step_pre_hook(hook)

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        return group["factor"]


_CALLS = itertools.count(1)


class Module(Odd):
    """Counts in a global of its module."""

    def before(self) -> None:
        self.factor = 1 / next(_CALLS)

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        return self.factor


class Schedule(Module):
    """Keeps an iterator, whose state cannot be inspected."""

    def begin(self) -> None:
        self.factors = (1 / number for number in itertools.count(1))

    def before(self) -> None:
        self.factor = next(self.factors)


@dataclass
class Tracker:
    count: int = 0


class OwnObject(Odd):
    """Counts in an object of its own class."""

    def begin(self) -> None:
        self.tracker = Tracker()

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        self.tracker.count += 1
        return 1 / self.tracker.count


class LateClosure(Odd):
    """Counts in a closure, which affects its updates only from the hundredth on."""

    def begin(self) -> None:
        count = 0

        def factor() -> float:
            nonlocal count
            count += 1
            return 1.0 if count < 100 else 0.5

        self.factor = factor

    def before(self) -> None:
        self.now = self.factor()

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        return self.now


class LateObject(LateClosure):
    """Counts in a tensor of an object whose class was created in a function."""

    def begin(self) -> None:
        self.tracker = type("Local", (), {})()
        self.tracker.count = torch.zeros(())
        self.factor = self.count

    def count(self) -> float:
        self.tracker.count += 1
        return 1.0 if float(self.tracker.count) < 100 else 0.5


class ByAddress(Odd):
    """Keeps momentum by the addresses of parameters."""

    def begin(self) -> None:
        self.momentum: dict[int, Tensor] = {}

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        kept = self.momentum.setdefault(id(parameter), torch.zeros_like(parameter))
        return kept.mul_(0.9).add_(1.0)


class Views(Odd):
    """Keeps views of one vector, and modifies the vector."""

    def begin(self) -> None:
        self.whole = torch.zeros(sum(one.numel() for _, one in self.parameters()))
        sizes = [one.numel() for _, one in self.parameters()]
        self.parts = dict(zip([one for _, one in self.parameters()], self.whole.split(sizes), strict=True))

    def before(self) -> None:
        self.whole.mul_(0.9).add_(1.0)

    def scale(self, group: dict[str, Any], parameter: Tensor) -> Any:
        return self.parts[parameter].view_as(parameter)


class OwnRate(Odd):
    """Changes the rate of its groups."""

    def before(self) -> None:
        for group in self.param_groups:
            group["lr"] *= 0.5


class ScheduleFree(Odd):
    """Has different weights for training and for use."""

    def train(self) -> None:
        """Switch to the weights for training."""

    def eval(self) -> None:
        """Switch to the weights for use."""


class Sharpness(Odd):
    """Needs a second gradient."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"


class InModule(Late):
    """Counts in a buffer of a module."""

    def begin(self) -> None:
        self.module = torch.nn.BatchNorm1d(2)

    def before(self) -> None:
        self.module.num_batches_tracked += 1  # type: ignore[operator]

    def counted(self, parameter: Tensor) -> Any:
        return self.module.num_batches_tracked


class InTensorOfObject(Late):
    """Counts in one of many elements of a tensor that an object has."""

    def begin(self) -> None:
        self.object = Tracker()
        self.object.counts = torch.zeros(3)  # type: ignore[attr-defined]

    def before(self) -> None:
        self.object.counts[1] += 1  # type: ignore[attr-defined]

    def counted(self, parameter: Tensor) -> Any:
        return self.object.counts[1]  # type: ignore[attr-defined]


class LateHook(Odd):
    """Counts in the closure of a hook, which changes weights late."""

    def begin(self) -> None:
        calls: list[int] = []

        def hook(optimizer: Optimizer, arguments: object, named: object) -> None:
            calls.append(1)
            for _, one in self.parameters() if len(calls) > LATE else ():
                one.data.mul_(0.5)

        self.register_step_post_hook(hook)


class InGenerator(Schedule):
    """Counts in the frame of a generator function that yields factors late."""

    def begin(self) -> None:
        self.factors = (0.5 if number > LATE else 1.0 for number in itertools.count())


REFUSED: dict[type[Optimizer], str] = {
    ProcessNoise: "draws from the random numbers of the process.*torch.Generator",
    PythonNoise: "draws from the random numbers of the process",
    Hook: "keeps its attribute '_optimizer_step_pre_hooks', which changes as it steps",
    Module: "other results when the same steps are repeated",
    Schedule: "factors",
    OwnObject: "keeps its attribute 'tracker', which changes as it steps, and a Tracker there cannot be saved",
    LateClosure: "keeps its attribute 'factor', which changes as it steps, and a function there cannot be saved",
    LateObject: "keeps its attribute 'tracker', which changes as it steps, and a Local there cannot be saved",
    InModule: "keeps its attribute 'module', which changes as it steps, and a BatchNorm1d there cannot be saved",
    InTensorOfObject: "keeps its attribute 'object', which changes as it steps, and a Tracker there cannot be saved",
    LateHook: "keeps its attribute '_optimizer_step_post_hooks', which changes as it steps, and a function there",
    InGenerator: "keeps its attribute 'factors', which changes as it steps, and a generator there cannot be saved",
    ByAddress: "steps on otherwise from what a commit holds",
    Views: "steps on otherwise from what a commit holds",
    OwnRate: "changes its own 'lr'",
    ScheduleFree: r"needs train\(\) and eval\(\)",
    Sharpness: "needs a closure that computes the loss again",
    torch.optim.LBFGS: "needs a closure that computes the loss again",
    torch.optim.SparseAdam: "needs sparse gradients",
}
