"""The package's own decoder as a language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastic_train.config.combinations import Found
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.errors import ConfigError
from elastic_train.parallel.attention.documents import Documents
from elastic_train.system.wording import did_you_mean, nearest
from elastic_train.tasks.decoder.as_transformers import begin_llama
from elastic_train.tasks.decoder.experts import RouterLosses, with_terms, without_terms
from elastic_train.tasks.decoder.model import Decoder, DecoderShape, drawn_weights
from elastic_train.tasks.language.language_model import Logits, Weights
from elastic_train.tasks.placements import ContextPart, Degrees, Piece, Placements, Use, deal
from elastic_train.tasks.rows.token_rows import TokenColumns, bias_of, sight_of
from elastic_train.tasks.task import Batch

_SIZES = [each.name for each in fields(DecoderShape)]
_USES: Mapping[str, Use] = {
    **{f"blocks.*.attention.{name}": "column" for name in "qkv"},
    "blocks.*.attention.o": "row",
    **{f"blocks.*.mlp.{name}": "column" for name in ("gate", "up", "shared.gate", "shared.up")},
    **{f"blocks.*.mlp.{name}": "row" for name in ("down", "shared.down")},
    "dropout": "split",
    **{f"blocks.*.{name}": "tokens" for name in ("norm_attention", "norm_mlp")},
    "blocks.*.dropout": "dropout",
    "norm": "join",
}
_USES_WITH_EXPERTS: Mapping[str, Use] = {**_USES, "blocks.*.mlp": "whole"}
"""Tensor ranks share the heads of attention and the width of MLPs; experts are distributed. Tokens are split from the
embedding to the last norm, except for attention and MLPs."""


class OwnDecoder:
    """A decoder for rows of up to `max_tokens` tokens; its vocabulary is the data tokenizer's unless given.

    Expert routers add `balance_loss` and `router_z_loss` to the training loss (`RouterLosses`).
    """

    folder: Path | None = None
    max_positions: int | None = None

    def __init__(self, sizes: Mapping[str, Any], balance_loss: float, router_z_loss: float, max_tokens: int) -> None:
        for name in sizes:
            if name not in _SIZES:
                raise ValueError(f"model has no '{name}'{did_you_mean(nearest(name, _SIZES))}")
        self._sizes = sizes
        self.vocabulary: int = sizes.get("vocabulary") or 0
        DecoderShape(**{**sizes, "vocabulary": self.vocabulary or 1})  # rejects invalid sizes
        self._balance_loss, self._router_z_loss, self._max_tokens = balance_loss, router_z_loss, max_tokens

    @property
    def shape(self) -> DecoderShape:
        return DecoderShape(**{**self._sizes, "vocabulary": self.vocabulary})

    def prepare(self, manifest: Manifest, rows: TokenColumns) -> None:
        self.vocabulary = self._sizes.get("vocabulary") or manifest.vocabulary_size or 0
        if not self.vocabulary:
            raise ConfigError(
                f"task.params.model.vocabulary: {manifest.url} has no tokenizer; say how many token ids it has"
            )

    def build(self) -> nn.Module:
        return Decoder(self.shape)

    def sketch(self) -> tuple[nn.Module, Weights] | None:
        with torch.device("meta"):
            return self.build(), partial(drawn_weights, self.shape)

    def placements(self, model: nn.Module, degrees: Degrees) -> Placements:
        if not isinstance(model, Decoder):  # a subclass of the task may build another model
            return Placements()
        found, blocks = list(_unfit(model.shape, degrees)), range(1, 1 + model.shape.depth)
        uses = _USES_WITH_EXPERTS if model.shape.experts else _USES
        return Placements(uses, deal(model.parts, degrees.stages, blocks), context=True, found=found)

    def run(self, model: nn.Module, batch: Batch, piece: Piece) -> Tensor | Logits:
        """Run a piece; a stage's output includes the losses of its routers and earlier ones."""
        tokens, positions, given = batch["tokens"], batch.get("positions"), piece.given
        losses, gather = self._router_losses(model, batch, piece.part), {}
        mask: Documents | Tensor | None
        if piece.part is None:
            mask = sight_of(batch)
        else:
            mask, gather = bias_of(batch["mask"], next(model.parameters()).dtype), {"gather": piece.part.gather}
        if piece.modules:
            assert isinstance(model, Decoder), "no other has stages"
            if losses is not None and given is not None:
                given = without_terms(given, (*tokens.shape, model.shape.dim), losses)
            out = model.run(piece.modules, tokens, positions, mask, given, losses, **gather)
        else:
            out = model(tokens, positions, mask, *(() if losses is None else (losses,)), **gather)
        if piece.is_last:
            return Logits(out, () if losses is None else losses.terms)
        return out if losses is None else with_terms(out, losses)

    def head(self, model: nn.Module) -> nn.Linear | None:
        return model.head if type(model) is Decoder else None

    def _router_losses(self, model: nn.Module, batch: Batch, part: ContextPart | None) -> RouterLosses | None:
        """Return the collector of router losses; None outside training, or without routers."""
        if not (model.training and isinstance(model, Decoder) and model.shape.experts):
            return None
        gather = None if part is None else part.gather
        return RouterLosses(batch["places"], self._balance_loss, self._router_z_loss, gather=gather)

    def begin_export(self, folder: Path) -> Mapping[str, str] | None:
        return begin_llama(self.shape, folder, self._max_tokens)


def _unfit(shape: DecoderShape, degrees: Degrees) -> Iterator[Found]:
    params = "task.params.model"
    for name in ("heads", "kv_heads", "shared_hidden" if shape.experts else "hidden"):
        if (size := getattr(shape, name)) % degrees.tensor:
            yield Found("a size that it does not divide", f"{params}.{name}: {size}", "tensor")
    if degrees.stages > shape.depth:
        yield Found("fewer blocks than stages", f"{params}.depth: {shape.depth} in {degrees.stages} stages")
