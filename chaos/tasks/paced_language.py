"""The language model, which cells can hold, slow enough for faults to be placed between its steps."""

from __future__ import annotations

from chaos.tasks.paced import PacedStages
from elastic_train.tasks.causal_lm import CausalLM


class PacedLanguage(PacedStages, CausalLM):  # type: ignore[misc]
    """What a language model takes, and the pace."""
