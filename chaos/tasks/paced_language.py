"""The language model, which supports model parallelism, slowed so that faults can be placed between its steps."""

from __future__ import annotations

from chaos.tasks.paced import PacedStages
from elastic_train.tasks.causal_lm import CausalLM


class PacedLanguage(PacedStages, CausalLM):  # type: ignore[misc]
    """The language model with its parameters, and the pace."""
