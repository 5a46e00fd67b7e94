"""Classify token sequences, and metadata columns, by a pre-trained transformers model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor, nn

from elastic_train.data.dataset.manifest import Manifest
from elastic_train.tasks.decoder.as_transformers import save_folder
from elastic_train.tasks.models.adapters import Adapter, frozen_groups, leave_base_out
from elastic_train.tasks.models.folder_weights import open_folder, runs_as_listed
from elastic_train.tasks.models.hugging_face import Kind, Source, check_positions
from elastic_train.tasks.models.tensor_plans import placed
from elastic_train.tasks.models.text_encoder import Metadata
from elastic_train.tasks.placements import Degrees, Placements
from elastic_train.tasks.rows.labelled_rows import ClassifiesRows, LabelledRows
from elastic_train.tasks.rows.token_rows import check_range, check_token_ids, check_tokenizer
from elastic_train.tasks.rows.tokenizing import write_tokenizer
from elastic_train.tasks.task import Batch, LaneLoss, ParameterGroup

if TYPE_CHECKING:
    from torchmetrics import Metric


class SequenceClassifier(ClassifiesRows):
    """Fine-tune a transformers model to classify rows of up to `max_tokens` tokens, and metadata.

    `hf` is {path: a local folder}, whose head is initialised randomly if it does not fit these classes, or {config:
    {model_type: bert, …}}. With `lora`, values of peft's LoraConfig, adapters and the head are trained, and the rest is
    frozen; `adapter` is for other types of peft: {type: ia3, …}.

    `label`, `numeric` and `categorical` name columns, by default the manifest's; [] for none. `class_weights` is
    "balanced", which weighs each sample by the inverse share of its class in the training set, or a list with a weight
    for each class. With `fixed_width` micro-batches are padded to `max_tokens`, as compiled kernels need, instead of
    their longest row.
    """

    def __init__(
        self,
        hf: Mapping[str, Any],
        lora: Mapping[str, Any] | None = None,
        adapter: Mapping[str, Any] | None = None,
        max_tokens: int = 512,
        class_weights: str | Sequence[float] | None = None,
        label: str | None = None,
        tokens: str = "input_ids",
        numeric: Sequence[str] | None = None,
        categorical: Sequence[str] | None = None,
        category_buckets: int = 64,
        fixed_width: bool = False,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        self.source, self.max_tokens = Source.of(hf), max_tokens
        self.adapter = Adapter.of(self.source, lora, adapter)
        self.rows = LabelledRows(tokens, label, numeric, categorical, category_buckets, class_weights)
        self._fixed_width = fixed_width

    def prepare(self, manifest: Manifest) -> None:
        self.rows.prepare(manifest)
        names = manifest.labels or [str(number) for number in range(self.rows.num_classes)]
        config = self.config = self.source.load_config(num_labels=self.rows.num_classes)
        config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}
        self.source.check_length(config, self.max_tokens)
        if self.source.path is not None:
            check_tokenizer(manifest, self.source.path)
        self.vocabulary = config.get_text_config().vocab_size
        check_token_ids(manifest, self.rows.tokens, self.vocabulary)
        self.padding = _padding_of(config)

    def build_model(self) -> nn.Module:
        body = self.source.build(self._kind)
        self._tell_padding(body)
        check_positions(body, self.max_tokens)
        model: nn.Module = body
        if self.adapter is not None:
            model = self.adapter.attach(model, task_type="SEQ_CLS")
        if self._reads_metadata:
            model = self._with_metadata(model)
        if self.adapter is not None:
            leave_base_out(model)
        return model

    def sketch_model(self) -> nn.Module | None:
        opened = None if self.adapter is not None else open_folder(self.source, self._kind)
        if opened is None:
            return None
        body, self._first_weights = opened
        self._tell_padding(body)
        check_positions(body, self.max_tokens)
        if not runs_as_listed(body, input_ids=torch.tensor([[0, 1]])):
            return None
        return self._with_metadata(body) if self._reads_metadata else body

    def initial_weights(self) -> Iterator[tuple[str, Tensor]]:
        if not self._reads_metadata:
            yield from self._first_weights
            return
        for name, tensor in self._first_weights:
            yield f"body.{name}", tensor
        for name, parameter in self._with_metadata(nn.Identity()).named_parameters():
            yield name, parameter.detach()

    def _tell_padding(self, body: Any) -> None:
        """Set the padding once the model is built: an embedding does not learn the padding token it is built with."""
        for config in (body.config, body.config.get_text_config()):
            config.pad_token_id = self.padding

    @property
    def _kind(self) -> Kind:
        return Kind("AutoModelForSequenceClassification", self.config, draws_head=True)

    @property
    def _reads_metadata(self) -> bool:
        return bool(self.rows.numeric or self.rows.categorical)

    def _with_metadata(self, body: nn.Module) -> WithMetadata:
        rows = self.rows
        sizes = len(rows.numeric), len(rows.categorical), rows.category_buckets
        return WithMetadata(body, rows.num_classes, *sizes)

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        return frozen_groups(model)

    def placements(self, model: nn.Module, degrees: Degrees) -> Placements:
        return placed(model, degrees.tensor, self.adapter)

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> Batch:
        batch = self.rows.collate(rows, ids, self.max_tokens, has_fixed_width=self._fixed_width)
        tokens, lengths = batch.pop("tokens"), batch.pop("lengths")
        assert self.vocabulary is not None, "prepare comes first"
        check_range(tokens.numpy(), ids, self.rows.tokens, self.vocabulary)
        is_real = torch.arange(tokens.shape[1]) < lengths[:, None]
        batch["input_ids"] = tokens.masked_fill(~is_real, self.padding)
        batch["attention_mask"] = is_real.long()
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        tokens = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with last_tokens(model, tokens["attention_mask"]):
            if isinstance(model, WithMetadata):
                logits = model(batch["numeric"], batch["is_missing"], batch["categories"], **tokens)
            else:
                logits = model(**tokens).logits
        return self.rows.loss(logits.float(), batch["label"])

    def why_not_exported(self) -> str | None:
        if not self._reads_metadata:
            return None
        return (
            f"the model reads {', '.join([*self.rows.numeric, *self.rows.categorical])} as well as the tokens, which "
            "no model of transformers does: use --to safetensors, or train it with numeric: [] and categorical: []"
        )

    def export(self, model: nn.Module, folder: Path, *, is_merged: bool) -> None:
        save_folder(model, folder, is_merged=is_merged)
        write_tokenizer(self.source.path, self.rows.known, folder)

    def metrics(self) -> Mapping[str, Metric]:
        from elastic_train.tasks.classification_metrics import CalibrationError

        return {**super().metrics(), "calibration_error": CalibrationError()}


def _padding_of(config: Any) -> int:
    """Return the id to pad rows with: the configuration's, or that of an end of texts, if the model has it; else 0."""
    config = config.get_text_config()
    ends = config.eos_token_id
    named = [config.pad_token_id, *(ends if isinstance(ends, list) else [ends])]
    return next((int(each) for each in named if each is not None and 0 <= each < config.vocab_size), 0)


_DIM = 32


class WithMetadata(nn.Module):
    """`body` reads the tokens, a small perceptron the metadata; logits of shape (batch, num_classes).

    The perceptron's last layer starts with zeros, so that training starts with the body's predictions.
    """

    def __init__(self, body: nn.Module, num_classes: int, num_numeric: int, num_categorical: int, buckets: int) -> None:
        super().__init__()
        self.body = body
        self.metadata = Metadata(num_numeric, num_categorical, buckets, _DIM)
        self.head = nn.Sequential(nn.Linear(_DIM, _DIM), nn.GELU(), nn.Linear(_DIM, num_classes))
        nn.init.zeros_(self.head[2].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.head[2].bias)  # type: ignore[arg-type]

    def forward(self, numeric: Tensor, is_missing: Tensor, categories: Tensor, **tokens: Tensor) -> Tensor:
        """Return logits; metadata as in `Metadata`, `tokens` are the body's inputs."""
        logits: Tensor = self.body(**tokens).logits
        return logits + self.head(self.metadata(numeric, is_missing, categories))  # type: ignore[no-any-return]


@contextlib.contextmanager
def last_tokens(model: nn.Module, is_real: Tensor) -> Iterator[None]:
    """Make a decoder classify rows by their last tokens, whatever these are; `is_real` (rows, width) is a prefix.

    Transformers classifies every token, and then searches for the last one without the padding's id.
    """
    from transformers import PreTrainedModel

    last = (is_real.sum(1) - 1).clamp(min=0)

    def choose(module: nn.Module, arguments: Any, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor) or output.ndim != 3 or output.shape[:2] != is_real.shape:
            return None
        index = last[:, None, None].expand(-1, 1, output.shape[2])
        return output.gather(1, index).expand_as(output)

    inner: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    with contextlib.ExitStack() as hooks:
        for child in inner.children():
            if child is not inner.base_model:
                hooks.enter_context(child.register_forward_hook(choose))
        yield
