"""Language models that predict the next token: pre-training, and fine-tuning on all or some of the tokens.

`go_on` generates the following tokens, one after another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_train.config.combinations import Found
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.errors import ConfigError
from elastic_train.tasks.decoder.as_transformers import save_folder
from elastic_train.tasks.language.language_model import LanguageModel, LastLayer
from elastic_train.tasks.language.own_decoder import OwnDecoder
from elastic_train.tasks.language.transformers_model import TransformersModel
from elastic_train.tasks.models.adapters import Adapter, frozen_groups
from elastic_train.tasks.models.hugging_face import Source, has_transformers, model_of_transformers
from elastic_train.tasks.models.stage_plans import forwards_of, passed
from elastic_train.tasks.placements import Degrees, Piece, Placements, loss_of
from elastic_train.tasks.rows.token_rows import (
    IGNORED,
    TokenColumns,
    check_lists,
    check_same_tokens,
    check_token_ids,
    part_of,
    uneven_widths,
)
from elastic_train.tasks.rows.tokenizing import tokenizer_of, write_tokenizer
from elastic_train.tasks.task import Batch, LaneLoss, ParameterGroup, Sampling, Tokenizer

if TYPE_CHECKING:
    from torchmetrics import Metric


class CausalLM:
    """Train a decoder to predict the next token of rows of up to `max_tokens` tokens.

    `model` gives the sizes of the package's own decoder (dim, depth, heads, kv_heads, hidden, vocabulary, tied,
    dropout, rope_base, norm_eps; experts, experts_per_token, expert_hidden, shared_hidden); its vocabulary is the data
    tokenizer's by default. `hf` selects a model of transformers instead: {path: its local folder}, or {config:
    {model_type: llama, …}} for random initial weights.

    With `lora`, values of peft's LoraConfig such as {r: 8, target_modules: [q_proj, v_proj]}, adapters of a folder's
    model are trained and the model itself is frozen. `adapter` is for other types of peft: {type: ia3, …}.

    `labels` (which tokens are targets, others are -100), `attention_mask` and `document_ids` name list columns with a
    value per token; columns with these names are used by default, and false turns one off. `z_loss` times the squared
    log-sum-exp of the logits is added to every target's loss (Chowdhery et al. 2022, section 5). With `fixed_width`
    micro-batches are padded to `max_tokens`, as compiled kernels need, instead of their longest row.

    Expert routers add to the training loss `balance_loss` for unevenly spread tokens, and `router_z_loss` for large
    logits (`RouterLosses`): in each block, over the target positions.
    """

    def __init__(
        self,
        model: Mapping[str, Any] | None = None,
        hf: Mapping[str, Any] | None = None,
        lora: Mapping[str, Any] | None = None,
        adapter: Mapping[str, Any] | None = None,
        max_tokens: int = 1024,
        tokens: str = "input_ids",
        labels: str | bool | None = None,
        attention_mask: str | bool | None = None,
        document_ids: str | bool | None = None,
        fixed_width: bool = False,
        z_loss: float = 0.0,
        balance_loss: float = 0.01,
        router_z_loss: float = 0.001,
    ) -> None:
        if model is not None and hf is not None:
            raise ValueError("give model, the sizes of a decoder, or hf, a model of transformers, not both")
        if max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2, to predict a token from one before it, not {max_tokens}")
        factors = {"z_loss": z_loss, "balance_loss": balance_loss, "router_z_loss": router_z_loss}
        for name, factor in factors.items():
            if not factor >= 0:
                raise ValueError(f"{name} must be at least 0, not {factor}")
        source = None if hf is None else Source.of(hf)
        self.adapter = Adapter.of(source, lora, adapter, takes_prompts=True)
        self.language_model: LanguageModel = (
            OwnDecoder(model or {}, balance_loss, router_z_loss, max_tokens)
            if source is None
            else TransformersModel(source, self.adapter, max_tokens)
        )
        self.max_tokens, self.z_loss = max_tokens, z_loss
        self._tokens, self._fixed_width = tokens, fixed_width
        self.rows = TokenColumns(tokens, documents="document_ids")  # until `prepare` knows the columns
        self._asked = {"labels": labels, "attention_mask": attention_mask, "document_ids": document_ids}

    def prepare(self, manifest: Manifest) -> None:
        self._known = manifest
        chosen = {name: _column(manifest, name, asked) for name, asked in self._asked.items()}
        columns = (self._tokens, chosen["labels"], chosen["attention_mask"], chosen["document_ids"])
        self.rows = TokenColumns(*columns, has_fixed_width=self._fixed_width)
        check_lists(manifest, *self.rows.names())
        self.language_model.prepare(manifest, self.rows)
        check_token_ids(manifest, self._tokens, self.vocabulary)

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the prepared model."""
        return self.language_model.vocabulary

    def check_held_out(self, manifest: Manifest) -> None:
        check_lists(manifest, *self.rows.names())
        check_same_tokens(self._known, manifest)
        check_token_ids(manifest, self._tokens, self.vocabulary)

    def columns(self) -> Sequence[str]:
        return list(self.rows.names())

    def longest(self) -> Mapping[str, int]:
        return dict.fromkeys(self.rows.names(), self.max_tokens)

    def inspected_columns(self) -> Sequence[str]:
        return self.columns()

    def unfit_rows(self, rows: pa.Table) -> Sequence[tuple[int, str]]:
        return self.rows.unfit_rows(rows, self.vocabulary)

    def build_model(self) -> nn.Module:
        return self.language_model.build()

    def sketch_model(self) -> nn.Module | None:
        sketch = self.language_model.sketch()
        if sketch is None:
            return None
        model, self._first_weights = sketch
        return model

    def initial_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._first_weights()

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        return frozen_groups(model)

    def placements(self, model: nn.Module, degrees: Degrees) -> Placements:
        placed = self.language_model.placements(model, degrees)
        widths = uneven_widths(degrees.tensor, self.max_tokens, has_fixed_width=self._fixed_width)
        found = [Found("a size that it does not divide", widths, "sequence")] if widths else []
        return replace(placed, found=[*placed.found, *found])

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> Batch:
        return self.rows.collate(rows, ids, self.max_tokens, self.vocabulary)

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        return loss_of(self, model, batch)

    def run(self, model: nn.Module, batch: Batch, piece: Piece) -> Tensor | LaneLoss:
        mine = batch if piece.part is None else part_of(batch, piece.part)
        last = self._last_layer(model, mine) if piece.is_last else None
        with contextlib.nullcontext() if last is None else forwards_of({last.head: passed}):
            made = self.language_model.run(model, mine, piece)
        if isinstance(made, Tensor):
            return made
        if last is None:
            loss = self._loss_of(made.values, mine, is_training=model.training)
        else:
            wanted = made.values.flatten(0, 1)[mine["places"]]
            loss = last.loss(wanted, mine["targets"], is_training=model.training)
        return replace(loss, total=loss.total + torch.stack(list(made.added)).sum()) if made.added else loss

    def _last_layer(self, model: nn.Module, mine: Batch) -> LastLayer | None:
        """Return the layer to leave out of the model's pass as logits of all tokens are too large; None if none is."""
        head = self.language_model.head(model)
        last = None if head is None else LastLayer(head, self.z_loss)
        return last if last is not None and last.takes_chunks(mine["tokens"].numel()) else None

    def _loss_of(self, logits: Tensor, batch: Batch, *, is_training: bool) -> LaneLoss:
        """Compute the loss from logits for every token; shape (rows, width, vocabulary)."""
        places, targets = batch["places"], batch["targets"]
        logits = logits.flatten(0, 1).float()
        if 2 * len(places) < len(logits):  # then a copy of these rows is small, and saves the loss of all others
            logits, places = logits[places], torch.arange(len(places), device=places.device)
        spread = targets.new_full((len(logits),), IGNORED).index_copy_(0, places, targets)
        likelihoods = F.cross_entropy(logits, spread, ignore_index=IGNORED, reduction="none")[places]
        total = likelihoods.sum()
        if self.z_loss:
            total = total + self.z_loss * logits.logsumexp(-1)[places].square().sum()
        if is_training:
            return LaneLoss(total, float(len(targets)))
        return LaneLoss(total, float(len(targets)), likelihoods, logits.argmax(-1)[places] == targets)

    def begin_predicting(self, manifest: Manifest) -> None:
        """Read all columns: the loss of a row needs its targets."""

    def predictions(self, loss: LaneLoss, batch: Batch) -> Mapping[str, Tensor | Sequence[str]]:
        """Return the mean loss of each row's targets, NaN without any, and their number."""
        assert loss.predictions is not None, "a model in eval mode has the loss of each target"
        num_rows, width = batch["tokens"].shape
        rows = batch["places"] // width
        total = loss.predictions.new_zeros(num_rows).index_add(0, rows, loss.predictions)
        targets = rows.bincount(minlength=num_rows)
        return {"loss": total / targets, "targets": targets}

    def metrics(self) -> Mapping[str, Metric]:
        from elastic_train.tasks.language.metrics import Perplexity, TokenAccuracy

        return {"perplexity": Perplexity(), "token_accuracy": TokenAccuracy()}

    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_of(self.language_model.folder, self._known)

    def continue_ids(self, model: nn.Module, ids: Sequence[int], sampling: Sampling) -> list[int]:
        check_prompt(ids, self.vocabulary, self.language_model.max_positions, sampling)
        return go_on(model, ids, sampling)

    def export(self, model: nn.Module, folder: Path, *, is_merged: bool) -> None:
        save_folder(model, folder, is_merged=is_merged)
        write_tokenizer(self.language_model.folder, self._known, folder)

    def begin_export(self, folder: Path) -> Mapping[str, str] | None:
        names = self.language_model.begin_export(folder)
        if names is not None:
            write_tokenizer(self.language_model.folder, self._known, folder)
        return names


def _column(manifest: Manifest, name: str, asked: str | bool | None) -> str | None:
    """Return the requested column, else the one called `name` if the data has it."""
    if asked is False:
        return None
    if isinstance(asked, str):
        return asked
    return name if asked or name in manifest.columns else None


def check_prompt(ids: Sequence[int], vocabulary: int, most: int | None, sampling: Sampling) -> None:
    """Reject a prompt that is empty, has invalid ids, or leaves a model of `most` positions no room."""
    if not ids:
        raise ConfigError("the prompt has no tokens: give at least one")
    if wrong := [id_ for id_ in ids if not 0 <= id_ < vocabulary]:
        raise ConfigError(f"the prompt has token id {wrong[0]}, the model takes those from 0 to {vocabulary - 1}")
    if most is not None and len(ids) + sampling.num_tokens > most:
        raise ConfigError(
            f"the prompt's {len(ids)} tokens and {sampling.num_tokens} more are too many for a model of {most} "
            "positions: ask for fewer, or shorten the prompt"
        )


_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def go_on(model: nn.Module, ids: Sequence[int], sampling: Sampling) -> list[int]:
    """Return the tokens that follow `ids`: by transformers, which caches keys and values, or one by one.

    Of the generation settings in a model's folder only its special tokens count: the others, such as a penalty for
    repetitions, choose other tokens than `sampling` does.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([list(ids)], device=device)
    if hasattr(model, "generate") and has_transformers(model):
        found: Any = model
        inner: Any = model_of_transformers(model)[1]
        how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        if sampling.temperature > 0:
            how = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": None}
        mask = torch.ones_like(tokens)
        own = inner.generation_config
        inner.generation_config = type(own)(**{name: getattr(own, name, None) for name in _SPECIAL_TOKENS})
        try:
            tokens = found.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=sampling.num_tokens, **how)
        finally:
            inner.generation_config = own
    else:
        for _ in range(sampling.num_tokens):
            tokens = torch.cat((tokens, choose(model(tokens)[:, -1].float(), sampling)), dim=1)
    following: list[int] = tokens[0, len(ids) :].tolist()
    return following


def choose(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return a token for each row of logits, (rows, vocabulary); shape (rows, 1)."""
    if sampling.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits / sampling.temperature).softmax(-1), 1)
