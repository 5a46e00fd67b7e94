"""The text classifier, slow enough for faults to be placed between its steps."""

from __future__ import annotations

from chaos.tasks.paced import Paced
from elastic_train.tasks.text_classifier import TextClassifier


class PacedClassifier(Paced, TextClassifier):  # type: ignore[misc]
    """The text classifier with its parameters, and the pace."""
