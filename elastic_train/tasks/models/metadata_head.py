"""A transformers classifier combined with metadata columns: their logits are added."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from elastic_train.tasks.models.text_encoder import Metadata

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
    hooks = [child.register_forward_hook(choose) for child in inner.children() if child is not inner.base_model]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
