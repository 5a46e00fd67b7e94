"""Direct preference optimization (Rafailov et al. 2023): adapters learn to prefer one answer over another.

The reference is the base with adapters disabled, so no second model is held; it does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_train.data.dataset.manifest import Manifest
from elastic_train.tasks.causal_lm import check_prompt, go_on
from elastic_train.tasks.decoder.as_transformers import save_folder
from elastic_train.tasks.language.language_model import Logits
from elastic_train.tasks.language.transformers_model import TransformersModel
from elastic_train.tasks.models.adapters import Adapter, frozen_groups, without_adapters
from elastic_train.tasks.models.hugging_face import Source
from elastic_train.tasks.placements import Piece
from elastic_train.tasks.rows.token_rows import TokenColumns, check_lists, check_same_tokens, check_token_ids
from elastic_train.tasks.rows.tokenizing import tokenizer_of, write_tokenizer
from elastic_train.tasks.task import Batch, LaneLoss, ParameterGroup, Sampling, Tokenizer

if TYPE_CHECKING:
    from torchmetrics import Metric

SIDES = (("chosen_ids", "chosen_labels"), ("rejected_ids", "rejected_labels"))
_COLUMNS = [name for side in SIDES for name in side]
_TOKENS = pa.large_list(pa.int64())
"""Type of all columns once joined: datasets may have others, such as int32 for one of them."""


class Preferences:
    """Train adapters of a transformers model on pairs of answers, as written by `data import`.

    `hf`, `lora` or `adapter`, and `fixed_width` are as in `CausalLM`. The loss of a pair is -log sigmoid(beta * m): m
    is by how much more likely the chosen answer has become than the rejected one, in nats, relative to the base.
    Answers count up to `max_tokens` tokens of their chat.
    """

    def __init__(
        self,
        hf: Mapping[str, Any],
        lora: Mapping[str, Any] | None = None,
        adapter: Mapping[str, Any] | None = None,
        max_tokens: int = 1024,
        beta: float = 0.1,
        fixed_width: bool = False,
    ) -> None:
        source = Source.of(hf)
        chosen = Adapter.of(source, lora, adapter)
        if chosen is None:
            raise ValueError("give lora, or adapter: the reference is the base without it")
        if chosen.values.get("bias", "none") != "none":
            raise ValueError(f"{chosen.key} trains biases of the base, which is the reference: leave bias out")
        if max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2, to predict a token from one before it, not {max_tokens}")
        if not beta > 0:
            raise ValueError(f"beta must be greater than 0, not {beta}")
        self._model = TransformersModel(source, chosen, max_tokens)
        self._max_tokens, self._beta = max_tokens, beta
        self._rows = TokenColumns("tokens", "labels", has_fixed_width=fixed_width)

    def prepare(self, manifest: Manifest) -> None:
        self._known = manifest
        check_lists(manifest, *_COLUMNS)
        self._model.prepare(manifest, self._rows)
        self._check_ids(manifest)

    def _check_ids(self, manifest: Manifest) -> None:
        for tokens, _ in SIDES:
            check_token_ids(manifest, tokens, self._model.vocabulary)

    def check_held_out(self, manifest: Manifest) -> None:
        check_lists(manifest, *_COLUMNS)
        check_same_tokens(self._known, manifest)
        self._check_ids(manifest)

    def columns(self) -> Sequence[str]:
        return _COLUMNS

    def longest(self) -> Mapping[str, int]:
        return dict.fromkeys(_COLUMNS, self._max_tokens)

    def inspected_columns(self) -> Sequence[str]:
        return _COLUMNS

    def unfit_rows(self, rows: pa.Table) -> Sequence[tuple[int, str]]:
        vocabulary = self._model.vocabulary
        return sorted(each for side in SIDES for each in TokenColumns(*side).unfit_rows(rows, vocabulary))

    def build_model(self) -> nn.Module:
        return self._model.build()

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        return frozen_groups(model)

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> Batch:
        """Return the output of `TokenColumns.collate` for the chosen chats, followed by the rejected ones."""
        names = [*self._rows.names()]
        both = [pa.table([rows.column(name).cast(_TOKENS, safe=False) for name in side], names=names) for side in SIDES]
        return self._rows.collate(
            pa.concat_tables(both), np.concatenate([ids, ids]), self._max_tokens, self._model.vocabulary
        )

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        with without_adapters(model):
            reference = self._likelihoods(model, batch)
        chosen, rejected = (self._likelihoods(model, batch) - reference).chunk(2)
        margins = chosen - rejected
        total = -F.logsigmoid(self._beta * margins).sum()
        if model.training:
            return LaneLoss(total, float(len(margins)))
        return LaneLoss(total, float(len(margins)), margins, margins > 0)

    def _likelihoods(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the log-likelihood of each row's answer; shape (rows,)."""
        found = self._model.run(model, batch, Piece())
        assert isinstance(found, Logits), "a whole model has logits"
        places, tokens = batch["places"], batch["tokens"]
        logits = found.values.flatten(0, 1)[places].float()
        likelihoods = -F.cross_entropy(logits, batch["targets"], reduction="none")
        return likelihoods.new_zeros(len(tokens)).index_add(0, places // tokens.shape[1], likelihoods)

    def begin_predicting(self, manifest: Manifest) -> None:
        """Do nothing: all columns are read, since both answers are needed."""

    def predictions(self, loss: LaneLoss, batch: Batch) -> Mapping[str, Tensor | Sequence[str]]:
        """Return the chosen answer's gain in likelihood over the reference, minus the rejected one's."""
        assert loss.predictions is not None, "a model in eval mode has the margin of each pair"
        return {"margin": loss.predictions}

    def metrics(self) -> Mapping[str, Metric]:
        from elastic_train.tasks.language.metrics import PreferenceAccuracy

        return {"accuracy": PreferenceAccuracy()}

    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_of(self._model.folder, self._known)

    def continue_ids(self, model: nn.Module, ids: Sequence[int], sampling: Sampling) -> list[int]:
        check_prompt(ids, self._model.vocabulary, self._model.max_positions, sampling)
        return go_on(model, ids, sampling)

    def export(self, model: nn.Module, folder: Path, *, is_merged: bool) -> None:
        save_folder(model, folder, is_merged=is_merged)
        write_tokenizer(self._model.folder, self._known, folder)
