"""Kernels that Triton autotunes: each process times several configurations and keeps one.

Configurations may differ in summation order, and the fastest one differs between processes. So such kernels are
reported at start, and ranks compare the chosen configurations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from elastic_train.system.wording import counted

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
