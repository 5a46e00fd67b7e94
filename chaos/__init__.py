"""Faults on purpose: scenarios, an executor with real processes, and a checker that trusts nothing but files.

The names in `__all__` are the public interface: `log_ids` for scripts under test, and `examine`, which judges a run's
folder again as `elastic-chaos check` does. They are loaded on first use (PEP 562), so that a script that imports
`chaos.hook` loads nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chaos.errors import ChaosError
    from chaos.hook import log_ids
    from chaos.judge.verdict import Verdict, examine

__all__ = ["ChaosError", "Verdict", "examine", "log_ids"]

_MODULE_OF = {
    "ChaosError": "chaos.errors",
    "Verdict": "chaos.judge.verdict",
    "examine": "chaos.judge.verdict",
    "log_ids": "chaos.hook",
}


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it, once."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
