"""Text classification over tokenised Parquet with metadata: the *quality* and *policy* schemas, or a user's own.

Rows become padded tensors without a Python loop; the width is the micro-batch's longest row, rounded up, so a lane has
the same shapes on any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import nn

from elastic_train.data.dataset.manifest import Manifest
from elastic_train.errors import ConfigError
from elastic_train.tasks.models.text_encoder import EncoderShape, TextEncoder
from elastic_train.tasks.rows.labelled_rows import ClassifiesRows, LabelledRows
from elastic_train.tasks.rows.token_rows import check_range, check_token_ids
from elastic_train.tasks.task import Batch, LaneLoss

if TYPE_CHECKING:
    pass


class TextClassifier(ClassifiesRows):
    """Classify `input_ids` and metadata columns into the classes of the label column.

    `numeric` and `categorical` name the metadata columns (default: all of the schema's). `class_weights="balanced"`
    weighs each sample by the inverse share of its class in the training set; a list has a weight for each class.
    `vocabulary` is the number of token ids, needed only for data without a tokenizer.
    """

    def __init__(
        self,
        max_tokens: int = 256,
        dim: int = 128,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.1,
        class_weights: str | Sequence[float] | None = None,
        label: str | None = None,
        tokens: str = "input_ids",
        numeric: Sequence[str] | None = None,
        categorical: Sequence[str] | None = None,
        category_buckets: int = 64,
        vocabulary: int | None = None,
    ) -> None:
        sizes = {"max_tokens": (max_tokens, 1), "dim": (dim, 1), "depth": (depth, 0), "heads": (heads, 1)}
        sizes |= {"vocabulary": (1 if vocabulary is None else vocabulary, 1)}
        for name, (value, least) in sizes.items():
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1, not {dropout}")
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}")
        self.max_tokens, self.dim, self.depth, self.heads, self.dropout = max_tokens, dim, depth, heads, dropout
        self.rows = LabelledRows(tokens, label, numeric, categorical, category_buckets, class_weights)
        self.vocabulary = vocabulary

    @property
    def num_classes(self) -> int:
        return self.rows.num_classes

    def prepare(self, manifest: Manifest) -> None:
        self.rows.prepare(manifest)
        self.vocabulary = self.vocabulary or manifest.vocabulary_size
        if self.vocabulary is None:
            raise ConfigError(f"task.params.vocabulary: {manifest.url} has no tokenizer; say how many token ids it has")
        check_token_ids(manifest, self.rows.tokens, self.vocabulary)

    def build_model(self) -> nn.Module:
        assert self.vocabulary is not None, "prepare comes first"
        return TextEncoder(
            EncoderShape(
                vocabulary=self.vocabulary,
                num_classes=self.num_classes,
                max_tokens=self.max_tokens,
                dim=self.dim,
                depth=self.depth,
                num_heads=self.heads,
                dropout=self.dropout,
                num_numeric=len(self.rows.numeric),
                num_categorical=len(self.rows.categorical),
                category_buckets=self.rows.category_buckets,
            )
        )

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> Batch:
        assert self.vocabulary is not None, "prepare comes first"
        batch = self.rows.collate(rows, ids, self.max_tokens)
        check_range(batch["tokens"].numpy(), ids, self.rows.tokens, self.vocabulary)
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        logits = model(
            batch["tokens"], batch["lengths"], batch["numeric"], batch["is_missing"], batch["categories"]
        ).float()
        return self.rows.loss(logits, batch["label"])
