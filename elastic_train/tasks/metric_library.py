"""torchmetrics, imported without most of what it spends its time on.

It imports scipy.signal to put back a name that scipy has dropped, for a package that measures speech, transformers
for two classes with which its score of texts loads models, and matplotlib, in its module of plots, for each metric's
`plot`. Every node would wait for all of them, and so would every command that asks a task for its metrics. While
torchmetrics is imported here, placeholders stand for them. Nothing is hidden: what torchmetrics has taken from one
becomes the real thing when it is used, and a later import of any of them gets it. Where the speech package is
installed, scipy.signal is imported as torchmetrics has it.
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
    """What a module has by some name; the module is imported when that is called, or something of it is asked for."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __getattr__(self, attribute: str) -> object:
        if attribute.startswith("__"):  # by which typing looks at what stands in an annotation
            raise AttributeError(attribute)
        return getattr(self._real(), attribute)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._real()(*arguments, **named)

    def _real(self) -> Any:
        return getattr(importlib.import_module(self._module), self._name)


class _Placeholder(ModuleType):
    """Has every name but Python's own, by which others look at modules: that of its file, or of its folder."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, loader=None)

    def __getattr__(self, name: str) -> _Later:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(self.__name__, name)


@contextlib.contextmanager
def _later(*names: str) -> Iterator[None]:
    """Keep modules from being imported that are not yet; torchmetrics asks for none that is not installed."""
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
