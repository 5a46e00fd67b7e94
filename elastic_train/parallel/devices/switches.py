"""What determines kernels, and so bits, in a process: switches, which can be restored, and autotuned kernels.

Libraries or a task may change switches at any time without any other sign. Triton's autotuner times several
configurations of a kernel in each process and keeps one. Configurations may differ in summation order, and the fastest
one differs between processes. So ranks compare both, and autotuned kernels are reported at start.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from elastic_train.system.wording import counted

_ENVIRONMENT = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "OPENBLAS_CORETYPE",
    "NVIDIA_TF32_OVERRIDE",
)
"""Environment variables that libraries read at first use; ranks compare them, but they cannot be restored."""

UNREADABLE = "unreadable, as the old and the new names of torch were mixed"


def _fp32_precision(backend: str, operation: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return (
        functools.partial(torch._C._get_fp32_precision_getter, backend, operation),
        functools.partial(torch._C._set_fp32_precision_setter, backend, operation),
    )


def _matmul(name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return functools.partial(getattr, _cuda.matmul, name), functools.partial(setattr, _cuda.matmul, name)


def _autocast(device: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return functools.partial(torch.is_autocast_enabled, device), functools.partial(torch.set_autocast_enabled, device)


def _autocast_type(device: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return functools.partial(torch.get_autocast_dtype, device), functools.partial(torch.set_autocast_dtype, device)


def _flushes_denormals() -> bool:
    return float(torch.full((), 1e-40, dtype=torch.float32, device="cpu") * 1.0) == 0.0


_cuda = torch.backends.cuda
_SWITCHES: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch.backends.fp32_precision": _fp32_precision("generic", "all"),
    "torch.backends.cudnn.fp32_precision": _fp32_precision("cuda", "all"),
    "torch.backends.mkldnn.fp32_precision": _fp32_precision("mkldnn", "all"),
    "torch.set_float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch.backends.cuda.matmul.allow_tf32": (torch._C._get_cublas_allow_tf32, torch._C._set_cublas_allow_tf32),
    "torch.backends.cudnn.allow_tf32": (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
    "torch.backends.cuda.matmul.fp32_precision": _fp32_precision("cuda", "matmul"),
    "torch.backends.cudnn.conv.fp32_precision": _fp32_precision("cuda", "conv"),
    "torch.backends.cudnn.rnn.fp32_precision": _fp32_precision("cuda", "rnn"),
    "torch.backends.mkldnn.matmul.fp32_precision": _fp32_precision("mkldnn", "matmul"),
    "torch.backends.mkldnn.conv.fp32_precision": _fp32_precision("mkldnn", "conv"),
    "torch.backends.mkldnn.rnn.fp32_precision": _fp32_precision("mkldnn", "rnn"),
    **{
        f"torch.backends.cuda.matmul.{name}": _matmul(name)
        for name in (
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_accumulation",
        )
    },
    "torch.set_deterministic_debug_mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_flush_denormal": (_flushes_denormals, torch.set_flush_denormal),
    "torch.backends.mkldnn.enabled": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "torch.backends.cudnn.enabled": (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    "torch.backends.cudnn.benchmark": (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    "torch.backends.cudnn.deterministic": (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    "torch.backends.cuda.enable_flash_sdp": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "torch.backends.cuda.enable_mem_efficient_sdp": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "torch.backends.cuda.enable_math_sdp": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "torch.backends.cuda.enable_cudnn_sdp": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "autocast on the CPU": _autocast("cpu"),
    "autocast on CUDA": _autocast("cuda"),
    "the type of autocast on the CPU": _autocast_type("cpu"),
    "the type of autocast on CUDA": _autocast_type("cuda"),
}
"""General switches come before those of one backend or operation, which follow them."""


def _read(name: str) -> object:
    try:
        return _SWITCHES[name][0]()
    except RuntimeError:  # set by its new name, so torch refuses to read it by the old one
        return UNREADABLE


_CHANGED: dict[str, tuple[object, object]] = {}
"""Switches that this package has changed after start: the values before and since."""


def change(name: str, value: object) -> None:
    """Change a switch; `KeptSwitches.set_back` keeps the new value."""
    before = _CHANGED[name][0] if name in _CHANGED else _read(name)
    _SWITCHES[name][1](value)
    _CHANGED[name] = before, value


def release(names: Iterable[str]) -> None:
    """Undo `change` for some switches."""
    for name in names:
        if name in _CHANGED:
            _SWITCHES[name][1](_CHANGED.pop(name)[0])


def switches() -> dict[str, object]:
    """Return this process's current switches."""
    return {name: _read(name) for name in _SWITCHES}


def described() -> dict[str, str]:
    """Return switches and environment as text, for comparison between ranks."""
    environment = {name: os.environ.get(name, "unset") for name in _ENVIRONMENT}
    return {name: str(value) for name, value in switches().items()} | environment


class TrainingModes:
    """The current training mode of each of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self._modes = [(name, module, module.training) for name, module in model.named_modules()]

    def set_back(self) -> str:
        """Restore the modules' modes; return a line if any had changed, else ""."""
        changed = [(name, module, mode) for name, module, mode in self._modes if module.training != mode]
        for _, module, mode in changed:
            module.training = mode
        if not changed:
            return ""
        name, _, mode = changed[0]
        return (
            f"training mode of {len(changed)} modules was changed from {mode} to {not mode} "
            f"(first of '{name or 'the model'}')"
        )


def begin_training(model: nn.Module) -> list[str]:
    """Put a model into training mode, except modules in eval mode below one that trains; return their names.

    A model that is in eval mode as a whole, as libraries load it, trains as a whole.
    """
    kept = [(name, module) for name, module in model.named_modules() if model.training and not module.training]
    model.train()
    for _, module in kept:
        module.training = False
    return [name for name, _ in kept]


class KeptSwitches:
    """The current switches and a model's training modes; `set_back` undoes later changes."""

    def __init__(self, model: nn.Module) -> None:
        self._switches, self._modes = switches(), TrainingModes(model)

    def set_back(self) -> list[str]:
        """Restore changed switches; return a line per change, which includes the switches that follow it."""
        kept, lines = self._switches | {name: value for name, (_, value) in _CHANGED.items()}, list[list[str]]()
        for name, value in switches().items():
            if value == kept[name] or UNREADABLE in (value, kept[name]):
                continue
            if lines and _read(name) != value:
                lines[-1].append(f"{name} from {kept[name]} to {value}")
                continue
            _SWITCHES[name][1](kept[name])
            lines.append([f"{name} was changed from {kept[name]} to {value}"])
        for name in kept if lines else ():  # restoring by an old name sets other switches to torch's choice
            if kept[name] not in (UNREADABLE, _read(name)):
                _SWITCHES[name][1](kept[name])
        found = [", and with it ".join((first, ", ".join(rest)) if rest else (first,)) for first, *rest in lines]
        return found + [line for line in [self._modes.set_back()] if line]


_TUNER = "triton.runtime.autotuner"


TUNED = "the configuration of "
"""Prefix of the names under which ranks compare choices; kernels that have not run yet are missing."""


def tuned_kernels() -> dict[str, str]:
    """Return the configurations chosen so far, by kernel and kind of call."""
    return {
        f"{TUNED}{name} for {call}": str(chosen)
        for name, kernel in _kernels()
        for call, chosen in sorted(kernel.cache.items(), key=str)
    }


def describe_tuning() -> str | None:
    """Describe the autotuned kernels and the remedy; None if there are none."""
    if not (names := [name for name, _ in _kernels()]):
        return None
    more = f" and {counted(len(names) - 1, 'more kernel')}" if names[1:] else ""
    return (
        f"{names[0]}{more} with @triton.autotune: each process times several configurations and keeps one, so ranks, "
        "and later worlds, may have other bits. Give it one triton.Config (in triton.autotune's configs)"
    )


def _kernels() -> Iterator[tuple[str, Any]]:
    """Yield the kernels with more than one configuration in loaded modules, by name."""
    if (tuning := sys.modules.get(_TUNER)) is None:
        return
    seen = set[int]()
    for module in sorted(name for name in sys.modules if not name.startswith(("torch.", "triton."))):
        for name, value in list(getattr(sys.modules[module], "__dict__", {}).items()):
            kernel = value
            while isinstance(kernel, tuning.KernelInterface):
                if isinstance(kernel, tuning.Autotuner) and len(kernel.configs) > 1 and id(kernel) not in seen:
                    seen.add(id(kernel))
                    yield f"{module}.{name}", kernel
                kernel = getattr(kernel, "fn", None)  # kernel below another decorator of Triton
