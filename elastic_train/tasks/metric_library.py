"""Import torchmetrics without most of its slow dependencies.

It imports scipy.signal to restore a name that scipy dropped, for a speech package; transformers for two classes, used
by its text score to load models; and matplotlib, in its plot module, for each metric's `plot`. Every node and command
that asks a task for its metrics would wait for all of them. Placeholders replace them during the import here: what
torchmetrics took from one becomes the real object on use, and a later import gets the real module. If the speech
package is installed, scipy.signal is imported as usual.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_SIGNAL, _TRANSFORMERS, _PLOTS = "scipy.signal", "transformers", "torchmetrics.utilities.plot"
_FOR_SPEECH = "gammatone"


class _Later:
    """A module's attribute by name; the module is imported on a call or attribute access."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __getattr__(self, attribute: str) -> object:
        if attribute.startswith("__"):  # typing inspects annotations this way
            raise AttributeError(attribute)
        return getattr(self._real(), attribute)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._real()(*arguments, **named)

    def _real(self) -> Any:
        return getattr(importlib.import_module(self._module), self._name)


class _Placeholder(ModuleType):
    """A module with every name except Python's own, such as those of its file or folder."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, loader=None)

    def __getattr__(self, name: str) -> _Later:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(self.__name__, name)


@contextlib.contextmanager
def _later(*names: str) -> Iterator[None]:
    """Keep modules from being imported unless they already are; torchmetrics requests only installed ones."""
    placeholders = {name: _Placeholder(name) for name in names if name not in sys.modules}
    sys.modules.update(placeholders)
    try:
        yield
    finally:
        for name in placeholders:
            del sys.modules[name]


with _later(_TRANSFORMERS, _PLOTS, *(() if importlib.util.find_spec(_FOR_SPEECH) else (_SIGNAL,))):
    from torchmetrics import Metric
    from torchmetrics.classification import (
        BinaryAUROC,
        BinaryF1Score,
        MulticlassAccuracy,
        MulticlassAUROC,
        MulticlassConfusionMatrix,
        MulticlassF1Score,
    )

__all__ = [
    "BinaryAUROC",
    "BinaryF1Score",
    "Metric",
    "MulticlassAUROC",
    "MulticlassAccuracy",
    "MulticlassConfusionMatrix",
    "MulticlassF1Score",
]
