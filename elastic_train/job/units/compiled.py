"""Compiled blocks (torch.compile) whose results are the same in every world, because only one shape is compiled.

A kernel depends on code, machine and the shapes of a call. torch.compile by default also depends on the shapes seen
before: a second shape triggers dynamic kernels, and after eight recompilations it gives up. Here, every process
compiles the calls of the run's first micro-batch before it joins a world. Calls with other shapes, such as those of an
epoch's last micro-batch, run uncompiled. Nothing is compiled during a step.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Hashable, Iterator
from importlib.metadata import version
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from elastic_train.config.combinations import refused
from elastic_train.config.schema import Config
from elastic_train.job.units.blocks import unit_names
from elastic_train.system.wording import counted
from elastic_train.tasks.task import Task

log = logging.getLogger(__name__)

CALLS = "the compiled calls"
"""Name of the compiled calls in the comparison between ranks."""
_OPTIONS: dict[str, Any] = {
    "deterministic": True,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
}
"""Disables all options that choose kernels by timing, whatever the environment says."""
_MOST_CALLS = 4096
"""Limit for different compiled calls; torch's default is eight, beyond which it silently stops compiling."""


class CompiledBlocks:
    """The blocks of a model, or all of it if it has none, with their compiled calls."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: dict[Hashable, str] = {}
        self._is_learning = False
        self._has_warned = False
        self._seconds = 0.0
        self._num_calls = self._num_plain = 0
        names = unit_names(model)
        self._num_blocks = len(names)
        for name in names or [""]:
            self._wrap(name, model.get_submodule(name))

    def _wrap(self, name: str, block: nn.Module) -> None:
        plain = block.forward
        own = _with_own_code(plain, name) if _is_on_gpu(block) else plain
        compiled = torch.compile(own, dynamic=False, options=_OPTIONS)

        def forward(*arguments: Any, **named: Any) -> Any:
            return self._run(name, block, plain, compiled, arguments, named)

        block.forward = forward

    def _run(
        self,
        name: str,
        block: nn.Module,
        plain: Callable[..., Any],
        compiled: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        """Run a block's call: compiled if it was learned, else (validation, other shapes) uncompiled."""
        if not (block.training and torch.is_grad_enabled()):
            return plain(*arguments, **named)
        call = (name, *_kind_of((arguments, named)))
        if self._is_learning:
            self._calls[call] = f"{name}: {', '.join(map(str, call[1:]))}"
            return compiled(*arguments, **named)
        self._num_calls += 1
        if call not in self._calls:
            self._num_plain += 1
            self._warn(call)
            return plain(*arguments, **named)
        with torch.compiler.set_stance("fail_on_recompile"):
            return compiled(*arguments, **named)

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Compile the calls made inside, regardless of torch's stance; raise ConfigError if torch cannot."""
        import torch._dynamo.config
        from torch._dynamo.exc import TorchDynamoException

        began, self._is_learning = time.monotonic(), True
        limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), _MOST_CALLS)
        try:
            limiting = torch._dynamo.config.patch({**limits, "fail_on_recompile_limit_hit": True})
            with torch.compiler.set_stance("default"), limiting:
                yield
        except TorchDynamoException as error:
            raise refused(
                "no compiler for the model", f"this model, which torch cannot compile ({_reason(error)})"
            ) from error
        finally:
            self._is_learning = False
            self._seconds = time.monotonic() - began

    def __str__(self) -> str:
        what = counted(self._num_blocks, "block") if self._num_blocks else "the whole model"
        return f"{what} compiled before training, in {self._seconds:.0f} s"

    def describe_share(self) -> str | None:
        """Return the fraction of training calls that ran uncompiled, as text; None if there were none."""
        if not self._num_plain:
            return None
        share, left = 100 * self._num_plain / self._num_calls, counted(self._num_plain, "call")
        return (
            f"compile: {left} of {self._num_calls} of blocks in training ({share:.1f} %) ran uncompiled on rank 0: "
            "their shapes are not the first micro-batch's. Bits are equal in each world; steps are slower"
        )

    def described(self) -> list[str]:
        """Return a line for each compiled call; equal on ranks that compute equally."""
        return sorted(self._calls.values())

    def _warn(self, call: tuple[Hashable, ...]) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "compile: a micro-batch has not the shape of the run's first one (a block is called with %s), and is "
                "computed without compiled kernels, as all such are: give rows one length, or set compile to false",
                ", ".join(map(str, call[1:])),
            )


def _is_on_gpu(block: nn.Module) -> bool:
    return any(one.is_cuda for one in block.parameters())


def _with_own_code(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a copy of a method with its own code object.

    torch keeps compiled variants with the code object and checks them one by one. If all blocks shared one, each call
    of a deep model would be compared with every other block's, and the GPU would wait for the host. On CPUs, equal
    blocks share the first one's compiled code, so that a process starts sooner.
    """
    function = getattr(forward, "__func__", None)
    if not isinstance(function, FunctionType):
        return forward
    code = function.__code__.replace(co_name=f"{function.__code__.co_name} of {name or 'the model'}")
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return MethodType(own, forward.__self__)  # type: ignore[attr-defined]


def _kind_of(arguments: Any) -> tuple[Hashable, ...]:
    """Return the properties of a call's arguments that its kernels depend on."""
    return tuple(map(_kind, pytree.tree_leaves(arguments)))


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return f"{dtype}{list(leaf.shape)}{'' if leaf.is_contiguous() else leaf.stride()}{'+' * leaf.requires_grad}"
    is_plain = leaf is None or isinstance(leaf, (bool, int, float, str))
    return repr(leaf) if is_plain else type(leaf).__qualname__  # as text 1, 1.0 and True differ


def _reason(error: Exception) -> str:
    """Return the compiler's error line, or else the first line."""
    said = str(error)
    found = re.search(r"^.*\berror: .*$", said, flags=re.MULTILINE)
    return (found[0] if found else said.strip().partition("\n")[0]).strip()


def check_can_compile(device: torch.device) -> None:
    """Refuse a machine without a compiler for the device's kernels."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise refused("no compiler for the model", "this machine: Triton is missing or does not know its GPU")
        return
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise refused("no compiler for the model", "this machine, which has no C++ compiler") from error


def compiler_of(device: torch.device) -> dict[str, str]:
    """Return the compiler of kernels, for comparison with other ranks."""
    if device.type == "cuda":
        return {"compiler": f"triton {version('triton')}"}
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    found = re.search(r"\w+ version [\w.]+", get_compiler_version_info(get_cpp_compiler()))
    return {"compiler": f"{found[0] if found else get_cpp_compiler()}, {pick_vec_isa()}"}


MEASURED = ("H200",)
"""Parts of the names of GPUs on which compiled blocks are faster (docs/benchmarks.md): 1.39 times, for the decoder."""


def decide(config: Config, task: Task, device: torch.device) -> tuple[bool, str | None]:
    """Return the value of `compile` on a machine, and for a GPU with `auto` a line that explains it."""
    if config.compile != "auto":
        return config.compile, None
    if device.type != "cuda":
        return False, None
    if (obstacle := _obstacle(config, task, torch.cuda.get_device_name(device))) is not None:
        return False, f"compile: auto is false here: {obstacle}"
    return True, "compile: auto is true here, where it was measured to help: steps begin after a minute of compiling"


def _obstacle(config: Config, task: Task, name: str) -> str | None:
    """Return the reason not to compile unless explicitly configured; None if there is none."""
    from torch.utils._triton import has_triton

    from elastic_train.tasks.causal_lm import CausalLM
    from elastic_train.tasks.language.own_decoder import OwnDecoder

    if not any(part in name.split() for part in MEASURED):
        return f"it was not measured on {name}. Set it to true, and compare"
    model = task.language_model if isinstance(task, CausalLM) else None
    if not isinstance(model, OwnDecoder) or model.shape.experts:
        return "it was measured with the decoder of CausalLM only, without experts. Set it to true, and compare"
    if config.precision in ("fp32", "fp8"):
        return "it was measured in bf16 only. Set it to true, and compare"
    if config.parallel.shards == "parameters" or config.parallel.cell.size > 1:
        return "compiling needs the whole model on each GPU once"
    if config.parallel.recompute == "selective":
        return "recompute: selective needs separate operations"
    return None if has_triton() else "Triton is missing or does not know this GPU"
