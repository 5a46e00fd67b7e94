"""Facts of published models, worked out from their shapes as the papers give them.

Operations of a block: Narayanan et al. 2021, appendix; bytes that a block keeps: Korthikanti et al. 2022, section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.planning.arithmetic.model import ModelFacts, Sizes, Unit, Work

MIXED = Sizes(2.0, 2.0, 12.0)
"""Weights and gradients of 16 bits; fp32 weights and two moments in the optimizer (Rajbhandari et al. 2020)."""


@dataclass(frozen=True)
class Transformer:
    """A decoder; `hidden` is an MLP's width, `matrices` how many it has; `scores`: attention's are kept (unfused)."""

    layers: int
    dim: int
    heads: int
    vocabulary: int
    tokens: int
    hidden: int = 0
    kv_heads: int = 0
    matrices: int = 2
    scores: bool = False

    @property
    def block(self) -> int:
        kv = (self.kv_heads or self.heads) / self.heads
        return int(self.dim**2 * (2 + 2 * kv) + self.matrices * self.dim * (self.hidden or 4 * self.dim))

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.rest

    @property
    def rest(self) -> int:
        tables = 1 if self.scores else 2  # GPT's head is its embedding
        return tables * self.vocabulary * self.dim

    def facts(self, micro_batch: int, sizes: Sizes = MIXED) -> ModelFacts:
        tokens = micro_batch * self.tokens
        flops = 2.0 * self.block * tokens + 4.0 * tokens * self.tokens * self.dim
        kept = 34.0 * tokens * self.dim + (5.0 * self.heads * tokens * self.tokens if self.scores else 0.0)
        head = 2.0 * tokens * self.dim * self.vocabulary
        forward, backward = Work(flops, 2 * kept, 20), Work(2 * flops, 4 * kept, 40)
        blocks = tuple(
            Unit(f"blocks.{number}", self.block, self.block, forward, backward, kept, 2.0 * tokens * self.dim)
            for number in range(self.layers)
        )
        rest = Unit(
            "", self.rest, self.rest, Work(head, 0.0, 5), Work(2 * head, 0.0, 10), 4.0 * tokens * self.vocabulary
        )
        return ModelFacts(
            "published", blocks, rest, micro_batch, tokens, sizes, largest_tensor=self.rest, precision="bf16"
        )


LLAMA_7B = Transformer(32, 4096, 32, 32_000, 4096, hidden=11_008, matrices=3)
LLAMA_70B = Transformer(80, 8192, 64, 32_000, 4096, hidden=28_672, kv_heads=8, matrices=3)
LLAMA_405B = Transformer(126, 16_384, 128, 128_256, 8192, hidden=53_248, kv_heads=8, matrices=3)


def gpt(layers: int, dim: int, heads: int) -> Transformer:
    """Return a GPT of Megatron-LM's studies: 51,200 tokens known, sequences of 2,048, attention unfused."""
    return Transformer(layers, dim, heads, 51_200, 2048, scores=True)
