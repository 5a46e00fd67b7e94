"""Language models that predict the next token: pre-training, and fine-tuning on all or some of the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_train.data.dataset.manifest import Manifest
from elastic_train.errors import ConfigError
from elastic_train.system.wording import did_you_mean, nearest
from elastic_train.tasks.decoder.experts import RouterLosses, with_terms, without_terms
from elastic_train.tasks.decoder.model import Decoder, drawn_weights
from elastic_train.tasks.decoder.plans import SEQUENCE_PLAN, TENSOR_PLAN, stages_of
from elastic_train.tasks.decoder.shape import DecoderShape
from elastic_train.tasks.models.adapters import IN_LAYERS, IN_PARTS, Adapter, frozen_groups, leave_base_out
from elastic_train.tasks.models.context_parts import check_computes_parts, logits_of_part
from elastic_train.tasks.models.folder_weights import open_folder, runs_as_listed, stand_ins
from elastic_train.tasks.models.folders import begin_llama, save_folder
from elastic_train.tasks.models.hugging_face import Kind, Source, check_causal, check_positions
from elastic_train.tasks.models.packed_rows import check_documents, packed_logits
from elastic_train.tasks.models.sampling import check_prompt, go_on
from elastic_train.tasks.models.stage_plans import Parts, check_runs_in_parts, parts_of, run_parts
from elastic_train.tasks.models.tensor_plans import sequence_plan_of, tensor_plan_of
from elastic_train.tasks.rows.token_parts import PADDING, bias_of, part_of
from elastic_train.tasks.rows.token_rows import IGNORED, TokenColumns, why_not_in_parts
from elastic_train.tasks.rows.tokenizing import tokenizer_of, write_tokenizer
from elastic_train.tasks.rows.vocabulary import check_lists, check_same_tokens, check_token_ids, check_tokenizer
from elastic_train.tasks.task import (
    Batch,
    ContextPart,
    LaneLoss,
    ParameterGroup,
    Sampling,
    SequencePlan,
    StagePlan,
    TensorPlan,
    Tokenizer,
)

if TYPE_CHECKING:
    from torchmetrics import Metric

_SIZES = [each.name for each in fields(DecoderShape)]


class CausalLM:
    """Train a decoder to predict the next token of rows of up to `max_tokens` tokens.

    `model` gives the sizes of the package's own decoder (dim, depth, heads, kv_heads, hidden, vocabulary, tied,
    dropout, rope_base, norm_eps; experts, experts_per_token, expert_hidden, shared_hidden); its vocabulary is that of
    the data's tokenizer by default. `hf` is a model of
    transformers instead: {path: its local folder}, or {config: {model_type: llama, …}} to begin with drawn weights.

    With `lora`, values of peft's LoraConfig such as {r: 8, target_modules: [q_proj, v_proj]}, adapters of a folder's
    model are trained, and the model itself stays as it is. `adapter` is for other types of peft, too: {type: ia3, …}.

    `labels` (which tokens are targets, others are -100), `attention_mask` and `document_ids` name columns of lists with
    a value for each token; those that have these names in the data are used without being asked for, and false turns
    one off. `z_loss` times the square of the logits' log-sum-exp is added to every target's loss (Chowdhery et al.
    2022, section 5). With `fixed_width` a micro-batch is padded to `max_tokens`, as compiled kernels need it, and not
    to its longest row.

    Routers to experts add to the loss of training `balance_loss` for tokens that are unequally spread, and
    `router_z_loss` for large logits (`RouterLosses`): in each block, over the places of targets.
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
        for name in model or {}:
            if name not in _SIZES:
                raise ValueError(f"model has no '{name}'{did_you_mean(nearest(name, _SIZES))}")
        self._sizes = {"vocabulary": 0, **(model or {})}
        DecoderShape(**{**self._sizes, "vocabulary": self._sizes["vocabulary"] or 1})  # refuses what does not fit
        self.source = None if hf is None else Source.of(hf)
        self.adapter = Adapter.of(self.source, lora, adapter, takes_prompts=True)
        self._parts: Parts | None = None
        self._runs_as_listed: bool | None = None
        self.max_tokens, self.z_loss = max_tokens, z_loss
        self.balance_loss, self.router_z_loss = balance_loss, router_z_loss
        self._tokens, self._fixed_width = tokens, fixed_width
        self.rows = TokenColumns(tokens, documents="document_ids")  # until `prepare` knows which columns there are
        self._asked = {"labels": labels, "attention_mask": attention_mask, "document_ids": document_ids}

    def prepare(self, manifest: Manifest) -> None:
        self._known = manifest
        chosen = {name: _column(manifest, name, asked) for name, asked in self._asked.items()}
        columns = (self._tokens, chosen["labels"], chosen["attention_mask"], chosen["document_ids"])
        self.rows = TokenColumns(*columns, has_fixed_width=self._fixed_width)
        check_lists(manifest, *self.rows.names())
        if self.source is None:
            self.vocabulary = self._sizes["vocabulary"] or manifest.vocabulary_size or 0
            if not self.vocabulary:
                raise ConfigError(
                    f"task.params.model.vocabulary: {manifest.url} has no tokenizer; say how many token ids it has"
                )
        else:
            self._prepare_source(self.source, manifest)
        check_token_ids(manifest, self._tokens, self.vocabulary)

    def _prepare_source(self, source: Source, manifest: Manifest) -> None:
        self.config = source.load_config()
        self.vocabulary = self.config.get_text_config().vocab_size
        source.check_length(self.config, self._longest)
        if self._num_prompt and (self.rows.attention or self.rows.documents):
            raise ConfigError(
                f"task.params.adapter: {self.adapter.kind} puts one prompt before each row, and the columns "  # type: ignore[union-attr]
                "attention_mask and document_ids hide tokens from others: set these to false, or use another type"
            )
        if source.path is not None:
            check_tokenizer(manifest, source.path)

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
        if self.source is None:
            return Decoder(self._shape)
        built = self.source.build(Kind("AutoModelForCausalLM", self.config))
        check_positions(built, self._longest)
        check_causal(built)
        self._check_documents(built)
        model: nn.Module = built
        if self.adapter is not None:
            model = self.adapter.attach(model, task_type="CAUSAL_LM")
            leave_base_out(model)
        return model

    def sketch_model(self) -> nn.Module | None:
        if self.source is None:
            with torch.device("meta"):
                return self.build_model()
        kind = Kind("AutoModelForCausalLM", self.config)
        opened = None if self.adapter is not None else open_folder(self.source, kind)
        if opened is None:
            return None
        model, self._first_weights = opened
        if self._runs_as_listed is None:  # it takes two passes of the whole model, once
            check_positions(model, self.max_tokens)
            check_causal(model, stand_ins(model))
            self._check_documents(model)
            self._runs_as_listed = runs_as_listed(model, input_ids=torch.tensor([[0, 1]]))
        return model if self._runs_as_listed else None

    def _check_documents(self, model: nn.Module) -> None:
        if self.rows.documents:
            check_documents(model, self.max_tokens, has_holes=bool(self.rows.attention))

    def initial_weights(self) -> Iterator[tuple[str, Tensor]]:
        return drawn_weights(self._shape) if self.source is None else iter(self._first_weights)

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        return frozen_groups(model)

    def tensor_plan(self, model: nn.Module, degree: int) -> TensorPlan:
        if not isinstance(model, Decoder):
            self._check_adapter(IN_PARTS, f"parallel.tensor: {degree}")
            return tensor_plan_of(model, degree)
        widths = ("shared_hidden",) if model.shape.experts else ("hidden",)
        for name in ("heads", "kv_heads", *widths):
            if (size := getattr(model.shape, name)) % degree:
                raise ConfigError(
                    f"parallel.tensor: {degree} does not divide task.params.model.{name}, which is {size}: change "
                    "either"
                )
        return TENSOR_PLAN

    def sequence_plan(self, model: nn.Module, degree: int) -> SequencePlan:
        if wrong := why_not_in_parts(degree, self.max_tokens, has_fixed_width=self._fixed_width):
            raise ConfigError(f"parallel.sequence: true shares out rows between {degree} ranks: {wrong}")
        if isinstance(model, Decoder) and model.shape.experts:
            raise ConfigError(
                "parallel.sequence: true shares out tokens, all of which routers look at, and "
                f"task.params.model.experts is {model.shape.experts}: set it to false"
            )
        if isinstance(model, Decoder):
            return SEQUENCE_PLAN
        self._check_adapter((), "parallel.sequence: true")
        return sequence_plan_of(model, degree)

    def _check_adapter(self, kinds: Sequence[str], key: str) -> None:
        if self.adapter is not None:
            self.adapter.check_is_in(kinds, key)

    def stage_plan(self, model: nn.Module, num_stages: int) -> StagePlan:
        if not isinstance(model, Decoder):
            self._check_adapter(IN_LAYERS, "parallel.pipeline")
            parts = parts_of(model, num_stages)
            if self._parts is None:  # it takes two passes of the whole model, once
                check_runs_in_parts(model, parts)
            self._parts = parts
            return parts.dealt(num_stages)
        try:
            return stages_of(model.shape, model.parts, num_stages)
        except ValueError as error:
            raise ConfigError(
                *(f"parallel.pipeline, in {num_stages} stages: task.params.model.{why}" for why in error.args)
            ) from error

    def run_stage(
        self, model: nn.Module, modules: Sequence[str], batch: Batch, given: Tensor | None
    ) -> Tensor | LaneLoss:
        if isinstance(model, Decoder):
            return self._run_decoder(model, modules, batch, given)
        assert self._parts is not None, "the plan has found them"
        out = run_parts(model, self._parts, modules, given, lambda: self._logits(model, batch, None))
        return self._loss_of(out, batch, is_training=model.training) if modules[-1] == self._parts.last else out

    def _run_decoder(
        self, model: Decoder, modules: Sequence[str], batch: Batch, given: Tensor | None
    ) -> Tensor | LaneLoss:
        """Run a stage; with what it gives to the next one go the losses of its routers, and of those before."""
        tokens, losses = batch["tokens"], self._router_losses(model, batch)
        if losses is not None and given is not None:
            given = without_terms(given, (*tokens.shape, model.shape.dim), losses)
        out = model.run(modules, tokens, batch.get("positions"), _mask_of(batch), given, losses)
        if modules[-1] == "head":
            return _with_losses(self._loss_of(out, batch, is_training=model.training), losses)
        return out if losses is None else with_terms(out, losses)

    def check_parts(self, model: nn.Module, num_parts: int) -> None:
        if not isinstance(model, Decoder):
            self._check_adapter(IN_LAYERS, f"parallel.context: {num_parts}")
            check_computes_parts(model, num_parts, self.max_tokens)
        elif model.shape.experts:
            raise ConfigError(
                f"parallel.context: {num_parts}: routers weigh whole rows, and task.params.model.experts is "
                f"{model.shape.experts}: set either to its default"
            )

    def loss_of_part(self, model: nn.Module, batch: Batch, part: ContextPart) -> LaneLoss:
        mine = part_of(batch, part)
        if not isinstance(model, Decoder):
            return self._loss_of(logits_of_part(model, mine, batch["tokens"].shape[1], part.gather), mine)
        mask = bias_of(mine["mask"], next(model.parameters()).dtype)
        logits = model(mine["tokens"], mine["positions"], mask, gather=part.gather)
        return self._loss_of(logits, mine)

    def run_stage_of_part(
        self, model: nn.Module, modules: Sequence[str], batch: Batch, given: Tensor | None, part: ContextPart
    ) -> Tensor | LaneLoss:
        mine = part_of(batch, part)
        if isinstance(model, Decoder):
            mask, last = bias_of(mine["mask"], next(model.parameters()).dtype), "head"
            out = model.run(modules, mine["tokens"], mine["positions"], mask, given, gather=part.gather)
        else:
            assert self._parts is not None, "the plan has found them"
            width, last = batch["tokens"].shape[1], self._parts.last
            run = partial(logits_of_part, model, mine, width, part.gather)
            out = run_parts(model, self._parts, modules, given, run)
        return self._loss_of(out, mine) if modules[-1] == last else out

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> Batch:
        return self.rows.collate(rows, ids, self.max_tokens, self.vocabulary)

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        losses = self._router_losses(model, batch)
        found = self._loss_of(self._logits(model, batch, losses), batch, is_training=model.training)
        return _with_losses(found, losses)

    def _router_losses(self, model: nn.Module, batch: Batch) -> RouterLosses | None:
        """Return what takes the losses of routers; None outside of training, and without any."""
        if not (model.training and self.source is None and self._sizes.get("experts")):
            return None
        return RouterLosses(batch["places"], self.balance_loss, self.router_z_loss)

    def _loss_of(self, logits: Tensor, batch: Batch, *, is_training: bool = True) -> LaneLoss:
        """Compute the loss from logits for every token; shape (rows, width, vocabulary)."""
        places, targets = batch["places"], batch["targets"]
        logits = logits.flatten(0, 1).float()
        if 2 * len(places) < len(logits):  # then a copy of theirs is small, and spares the loss of all others
            logits, places = logits[places], torch.arange(len(places), device=places.device)
        spread = targets.new_full((len(logits),), IGNORED).index_copy_(0, places, targets)
        likelihoods = F.cross_entropy(logits, spread, ignore_index=IGNORED, reduction="none")[places]
        total = likelihoods.sum()
        if self.z_loss:
            total = total + self.z_loss * logits.logsumexp(-1)[places].square().sum()
        if is_training:
            return LaneLoss(total, float(len(targets)))
        return LaneLoss(total, float(len(targets)), likelihoods, logits.argmax(-1)[places] == targets)

    def metrics(self) -> Mapping[str, Metric]:
        from elastic_train.tasks.language_metrics import Perplexity, TokenAccuracy

        return {"perplexity": Perplexity(), "token_accuracy": TokenAccuracy()}

    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_of(self._folder, self._known)

    def continue_ids(self, model: nn.Module, ids: Sequence[int], sampling: Sampling) -> list[int]:
        most = None if self.source is None else getattr(self.config.get_text_config(), "max_position_embeddings", None)
        check_prompt(ids, self.vocabulary, None if most is None else most - self._num_prompt, sampling)
        return go_on(model, ids, sampling)

    def export(self, model: nn.Module, folder: Path, *, is_merged: bool) -> None:
        save_folder(model, folder, is_merged=is_merged)
        write_tokenizer(self._folder, self._known, folder)

    def begin_export(self, folder: Path) -> Mapping[str, str] | None:
        if self.source is not None:
            return None
        names = begin_llama(self._shape, folder)
        if names is not None:
            write_tokenizer(self._folder, self._known, folder)
        return names

    @property
    def _shape(self) -> DecoderShape:
        return DecoderShape(**{**self._sizes, "vocabulary": self.vocabulary})

    @property
    def _num_prompt(self) -> int:
        """How many tokens an adapter puts before a row's own."""
        return 0 if self.adapter is None else self.adapter.num_tokens

    @property
    def _longest(self) -> int:
        return self.max_tokens + self._num_prompt

    @property
    def _folder(self) -> Path | None:
        """The model's own folder."""
        return None if self.source is None else self.source.path

    def _logits(self, model: nn.Module, batch: Batch, losses: RouterLosses | None) -> Tensor:
        """Return logits for every token; shape (rows, width, vocabulary)."""
        tokens, documents = batch["tokens"], batch.get("documents")
        if self.source is None:
            given = () if losses is None else (losses,)
            return model(tokens, batch.get("positions"), _mask_of(batch), *given)  # type: ignore[no-any-return]
        if documents is not None and self.rows.documents:
            return packed_logits(model, tokens, batch["positions"], documents)
        named = {} if documents is None else {"attention_mask": (documents != PADDING).long()}
        logits: Tensor = model(input_ids=tokens, use_cache=False, **named).logits
        return logits[:, self._num_prompt :]


def _with_losses(found: LaneLoss, losses: RouterLosses | None) -> LaneLoss:
    return found if losses is None else replace(found, total=found.total + losses.total())


def _mask_of(batch: Batch) -> Tensor | None:
    """Return which tokens each token sees, None where that is all before it."""
    documents = batch.get("documents")
    return None if documents is None else causal_within(documents)


def causal_within(documents: Tensor) -> Tensor:
    """Return which tokens each token sees: those of its document up to itself; (rows, 1, width, width) of bool."""
    width = documents.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def _column(manifest: Manifest, name: str, asked: str | bool | None) -> str | None:
    """Return the column that is asked for, else the one of the name itself if the data has it."""
    if asked is False:
        return None
    if isinstance(asked, str):
        return asked
    return name if asked or name in manifest.columns else None
