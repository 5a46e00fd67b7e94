"""Switches of a process that decide which kernels compute, and so the bits: looked at, compared among ranks, set back.

Libraries, or a task, may change them at any time, and nothing else would show it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

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
"""Read by libraries where they are used first, so ranks compare them, and nothing sets them back."""

_cuda = torch.backends.cuda
_SWITCHES: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch.set_float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch.set_deterministic_debug_mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_flush_denormal": (lambda: float(torch.full((), 1e-40) * 1.0) == 0.0, torch.set_flush_denormal),
    "torch.backends.mkldnn.enabled": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "torch.backends.cudnn.enabled": (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    "torch.backends.cudnn.benchmark": (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    "torch.backends.cuda.enable_flash_sdp": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "torch.backends.cuda.enable_mem_efficient_sdp": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "torch.backends.cuda.enable_math_sdp": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "torch.backends.cuda.enable_cudnn_sdp": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "autocast on the CPU": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda is_on: torch.set_autocast_enabled("cpu", is_on),
    ),
}


def switches() -> dict[str, object]:
    """Return the switches of this process as they are."""
    return {name: get() for name, (get, _) in _SWITCHES.items()}


def described() -> dict[str, str]:
    """Return switches and environment as texts, for comparison with other ranks."""
    environment = {name: os.environ.get(name, "unset") for name in _ENVIRONMENT}
    return {name: str(value) for name, value in switches().items()} | environment


class KeptSwitches:
    """The switches and a model's training modes as they are now; `set_back` undoes what has changed since."""

    def __init__(self, model: nn.Module) -> None:
        self._switches = switches()
        self._modes = [(name, module, module.training) for name, module in model.named_modules()]

    def set_back(self) -> list[str]:
        """Set back what has changed, and return a line for each."""
        lines = []
        for name, value in switches().items():
            if value != (kept := self._switches[name]):
                _SWITCHES[name][1](kept)
                lines.append(f"{name} was changed from {kept} to {value}")
        changed = [(name, module, mode) for name, module, mode in self._modes if module.training != mode]
        for _, module, mode in changed:
            module.training = mode
        if changed:
            name, _, mode = changed[0]
            lines.append(
                f"training mode of {len(changed)} modules was changed from {mode} to {not mode} "
                f"(first of '{name or 'the model'}')"
            )
        return lines
