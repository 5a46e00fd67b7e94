"""A model of transformers as a language model: from a folder or configuration, with or without adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from elastic_train.config.combinations import Found
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.errors import ConfigError
from elastic_train.tasks.language.language_model import Logits, Weights
from elastic_train.tasks.models.adapters import Adapter, leave_base_out
from elastic_train.tasks.models.context_parts import logits_of_part, try_parts_of_rows
from elastic_train.tasks.models.folder_weights import open_folder, runs_as_listed, stand_ins
from elastic_train.tasks.models.hugging_face import (
    Kind,
    Source,
    check_causal,
    check_positions,
    has_transformers,
    model_of_transformers,
)
from elastic_train.tasks.models.packed_rows import Masks, check_documents, packed_logits
from elastic_train.tasks.models.stage_plans import Parts, planned, run_parts, try_in_parts, unfit_for_stages
from elastic_train.tasks.models.tensor_plans import placed
from elastic_train.tasks.placements import ContextPart, Degrees, Piece, Placements
from elastic_train.tasks.rows.token_rows import PADDING, TokenColumns, check_tokenizer
from elastic_train.tasks.task import Batch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HAS_LAST_HEAD = "_has_last_head"
"""Attribute of models that `check_causal` knows; a wrapper built by a subclass of the task lacks it."""


class TransformersModel:
    """The model of a source, for rows of up to `max_tokens` tokens; with an `adapter` its base is frozen."""

    def __init__(self, source: Source, adapter: Adapter | None, max_tokens: int) -> None:
        self.source, self._adapter, self._max_tokens = source, adapter, max_tokens
        self.vocabulary = 0
        self._has_documents, self._has_holes = True, False  # until `prepare` knows the columns
        self._masks: Masks = "all"  # until a trial has shown that it needs fewer
        self._parts: Parts | None = None
        self._runs_as_listed: bool | None = None
        self._has_last_head = False

    @cached_property
    def config(self) -> PretrainedConfig:
        return self.source.load_config()

    @property
    def folder(self) -> Path | None:
        return self.source.path

    @property
    def max_positions(self) -> int | None:
        most = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return None if most is None else most - self._num_prompt

    @property
    def _num_prompt(self) -> int:
        """Number of tokens that an adapter puts before a row's own."""
        return 0 if self._adapter is None else self._adapter.num_tokens

    def prepare(self, manifest: Manifest, rows: TokenColumns) -> None:
        self._has_documents, self._has_holes = bool(rows.documents), bool(rows.attention)
        self.vocabulary = self.config.get_text_config().vocab_size
        self.source.check_length(self.config, self._max_tokens + self._num_prompt)
        if self._adapter is not None and self._num_prompt and (rows.attention or rows.documents):
            raise ConfigError(
                f"task.params.adapter: {self._adapter.kind} puts one prompt before each row, and the columns "
                "attention_mask and document_ids hide tokens from others: set these to false, or use another type"
            )
        if self.source.path is not None:
            check_tokenizer(manifest, self.source.path)

    def build(self) -> nn.Module:
        built = self.source.build(self._kind)
        check_positions(built, self._max_tokens + self._num_prompt)
        self._has_last_head = check_causal(built)
        self._check_documents(built)
        model: nn.Module = built
        if self._adapter is not None:
            model = self._adapter.attach(model, task_type="CAUSAL_LM")
            leave_base_out(model)
        vars(model)[_HAS_LAST_HEAD] = self._has_last_head
        return model

    @property
    def _kind(self) -> Kind:
        return Kind("AutoModelForCausalLM", self.config)

    def sketch(self) -> tuple[nn.Module, Weights] | None:
        opened = None if self._adapter is not None else open_folder(self.source, self._kind)
        if opened is None:
            return None
        model, weights = opened
        if self._runs_as_listed is None:  # takes two passes of the whole model, once
            check_positions(model, self._max_tokens)
            self._has_last_head = check_causal(model, stand_ins(model))
            self._check_documents(model)
            self._runs_as_listed = runs_as_listed(model, input_ids=torch.tensor([[0, 1]]))
        vars(model)[_HAS_LAST_HEAD] = self._has_last_head
        return (model, weights.__iter__) if self._runs_as_listed else None

    def _check_documents(self, model: nn.Module) -> None:
        if self._has_documents:
            self._masks = check_documents(model, self._max_tokens, has_holes=self._has_holes)

    def placements(self, model: nn.Module, degrees: Degrees) -> Placements:
        """Return the model's placements; a trial, which needs passes of it, is made only if all else fits."""
        cut = placed(model, degrees.tensor, self._adapter, sequence=degrees.sequence)
        if not has_transformers(model):
            return cut
        found, parts = list[Found](), None
        if degrees.stages > 1:
            parts = planned(model)
            found += unfit_for_stages(model, parts, degrees.stages)
        if degrees.context > 1 and not found and not self._num_prompt:
            found += try_parts_of_rows(model, degrees.context, self._max_tokens)
        if parts is None or found:
            return replace(cut, context=True, found=[*cut.found, *found])
        if self._parts is None:
            found += try_in_parts(model, parts)
        self._parts = None if found else parts
        return replace(cut, stages=parts.dealt(degrees.stages), context=True, found=[*cut.found, *found])

    def run(self, model: nn.Module, batch: Batch, piece: Piece) -> Tensor | Logits:
        run = partial(self._logits, model, batch, piece.part)
        if not piece.modules:
            return Logits(run())
        assert self._parts is not None, "the placements have found them"
        out = run_parts(model, self._parts, piece.modules, piece.given, run)
        return Logits(out) if piece.is_last else out

    def _logits(self, model: nn.Module, batch: Batch, part: ContextPart | None) -> Tensor:
        """Return logits for every token; shape (rows, width, vocabulary)."""
        if part is not None:
            return logits_of_part(model, batch, part.gather)
        tokens, documents = batch["tokens"], batch.get("documents")
        if documents is not None and self._has_documents:
            return packed_logits(model, batch, self._masks)
        named = {} if documents is None else {"attention_mask": (documents != PADDING).long()}
        logits: Tensor = model(input_ids=tokens, use_cache=False, **named).logits
        return logits[:, self._num_prompt :]

    def head(self, model: nn.Module) -> nn.Linear | None:
        if not vars(model).get(_HAS_LAST_HEAD):
            return None
        head = model_of_transformers(model)[1].get_output_embeddings()
        return head if type(head) is nn.Linear else None

    def begin_export(self, folder: Path) -> Mapping[str, str] | None:
        return None
