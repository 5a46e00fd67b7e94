"""A pre-norm transformer encoder that classifies a token sequence together with its metadata.

Architecture: Vaswani et al. 2017 with the pre-norm residual order of Xiong et al. 2020; mean pooling over the real
tokens. Categorical metadata enter by embeddings, numeric metadata by projections, and a missing value of either kind
has its own learned vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Sizes of the encoder; `category_buckets` counts the rows of each categorical embedding, row 0 being missing."""

    vocabulary: int
    num_classes: int
    max_tokens: int
    dim: int
    depth: int
    num_heads: int
    dropout: float
    num_numeric: int
    num_categorical: int
    category_buckets: int


class Block(nn.Module):
    """Self-attention and a two-layer perceptron, each after a norm and inside a residual."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.num_heads, self.dropout = shape.num_heads, shape.dropout
        self.norm_attention, self.norm_mlp = nn.LayerNorm(shape.dim), nn.LayerNorm(shape.dim)
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim)
        self.out = nn.Linear(shape.dim, shape.dim)
        self.mlp = nn.Sequential(
            nn.Linear(shape.dim, 4 * shape.dim),
            nn.GELU(),
            nn.Linear(4 * shape.dim, shape.dim),
            nn.Dropout(shape.dropout),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map x (batch, tokens, dim) to the same shape; mask (batch, 1, 1, tokens) is true at real tokens."""
        batch, tokens, dim = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, tokens, 3, self.num_heads, dim // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(batch, tokens, dim)), dropout)
        return x + self.mlp(self.norm_mlp(x))  # type: ignore[no-any-return]


class Metadata(nn.Module):
    """Embed numeric and categorical metadata columns into one vector; row 0 of `buckets` is a missing category."""

    def __init__(self, num_numeric: int, num_categorical: int, buckets: int, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(num_numeric, dim) * 0.02)
        self.missing = nn.Parameter(torch.randn(num_numeric, dim) * 0.02)
        self.categories = nn.ModuleList(nn.Embedding(buckets, dim) for _ in range(num_categorical))

    def forward(self, numeric: Tensor, is_missing: Tensor, categories: Tensor) -> Tensor:
        """Sum the columns' vectors: (batch, dim) from (batch, numeric), a bool mask of that shape, and (batch,
        categorical)."""
        vector = numeric @ self.scale + is_missing.to(numeric.dtype) @ self.missing
        for column, embedding in enumerate(self.categories):
            vector = vector + embedding(categories[:, column])
        return vector


class TextEncoder(nn.Module):
    """Classify padded token sequences with metadata; logits of shape (batch, num_classes)."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.dim)
        self.positions = nn.Parameter(torch.randn(shape.max_tokens, shape.dim) * 0.02)
        self.metadata = Metadata(shape.num_numeric, shape.num_categorical, shape.category_buckets, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.num_classes)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(
        self, tokens: Tensor, lengths: Tensor, numeric: Tensor, is_missing: Tensor, categories: Tensor
    ) -> Tensor:
        """Map tokens (batch, width) int64, padded; lengths (batch,) >= 1; metadata as in `Metadata`."""
        width = tokens.shape[1]
        mask = torch.arange(width, device=tokens.device) < lengths[:, None]
        x = self.tokens(tokens) + self.positions[:width]
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])
        x = self.norm(x) * mask[:, :, None]
        pooled = x.sum(dim=1) / lengths[:, None].to(x.dtype)
        return self.head(pooled + self.metadata(numeric, is_missing, categories))  # type: ignore[no-any-return]
