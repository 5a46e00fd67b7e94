"""The interface between the next-token task and the model that it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from elastic_train.data.dataset.manifest import Manifest
from elastic_train.tasks.placements import Degrees, Piece, Placements
from elastic_train.tasks.rows.token_rows import TokenColumns
from elastic_train.tasks.task import Batch

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Yields a model's initial weights by name, as `Deferring.initial_weights` does."""


@dataclass(frozen=True, slots=True)
class Logits:
    """Output of a model's last module, (rows, width, vocabulary), and terms to add to the training loss."""

    values: Tensor
    added: Sequence[Tensor] = ()


class LanguageModel(Protocol):
    """A kind of model that predicts the next token.

    `vocabulary` is its number of token ids once prepared; `folder` is its own folder, if any; `max_positions` the
    longest row that it accepts, None for any.
    """

    vocabulary: int

    @property
    def folder(self) -> Path | None: ...

    @property
    def max_positions(self) -> int | None: ...

    def prepare(self, manifest: Manifest, rows: TokenColumns) -> None:
        """Take from the training set what building the model needs; raise ConfigError if they do not fit."""

    def build(self) -> nn.Module:
        """Build the model, as `Task.build_model` does."""

    def sketch(self, build: Callable[[], nn.Module]) -> tuple[nn.Module, Weights] | None:
        """Return the model without weights (`Deferring.sketch_model`), and its weights; None if these cannot be made
        one by one. `build` is the task's `build_model`."""

    def placements(self, model: nn.Module, degrees: Degrees) -> Placements:
        """Return the model's placements (`Placing.placements`)."""

    def run(self, model: nn.Module, batch: Batch, piece: Piece) -> Tensor | Logits:
        """Run a piece of the model on a micro-batch, or on the piece's part of it (`part_of`)."""

    def head(self, model: nn.Module) -> nn.Linear | None:
        """Return the linear layer whose unchanged output is the logits; None if there may be none."""

    def begin_export(self, folder: Path) -> Mapping[str, str] | None:
        """Begin a transformers folder, as `ExportingByName.begin_export` does, except for the tokenizer."""
