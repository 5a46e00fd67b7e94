"""A decoder-only transformer, computing the same as Llama under other names.

Pre-norm blocks (Xiong et al. 2020) with RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021, by halves
as in GPT-NeoX), grouped queries (Ainslie et al. 2023) and SwiGLU (Shazeer 2020), or experts instead; no biases. For the
equivalent model of transformers see `as_transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_train.parallel.attention.documents import Documents, attend_documents
from elastic_train.parallel.attention.kernels import causal_kernel
from elastic_train.tasks.decoder.experts import MixtureOfExperts, RouterLosses

Gather = Callable[[Tensor], Tensor]
Sight = Tensor | Documents | None
"""What tokens see: a mask (batch, 1, tokens, tokens) that is true where they attend, or a bias added to the scores;
their documents; None for all tokens before them."""

_WIDTH_MULTIPLE = 64


class Attention(nn.Module):
    """Causal attention with `heads` queries, groups of which share a key and a value."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head_dim, self.is_grouped = shape.head_dim, shape.kv_heads != shape.heads
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.o = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Sight, gather: Gather | None = None) -> Tensor:
        """Map x (batch, tokens, dim) to the same shape.

        `gather` fetches keys and values of tokens that other ranks compute; the mask's last dimension includes them.
        """
        query, key = _rotate(self._heads(self.q(x)), cos, sin), _rotate(self._heads(self.k(x)), cos, sin)
        value = self._heads(self.v(x))
        if gather is not None:
            key, value = gather(torch.stack((key, value))).unbind(0)
        if isinstance(mask, Documents):
            attended = attend_documents(query, key, value, mask)
        elif mask is None and (attend := causal_kernel(query)) is not None:
            attended = attend(query, key, value, is_grouped=self.is_grouped)
        else:
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=self.is_grouped
            )
        return self.o(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        """Return shape (batch, heads, tokens, head_dim)."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU: one projection gates another."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and an MLP, or experts, each after a norm and inside a residual."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(shape.dim, shape.norm_eps)
        self.attention = Attention(shape)
        self.norm_mlp = nn.RMSNorm(shape.dim, shape.norm_eps)
        self.mlp = _mlp_of(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Sight,
        losses: RouterLosses | None = None,
        gather: Gather | None = None,
    ) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x), cos, sin, mask, gather))
        given = () if losses is None else (losses,)
        return x + self.dropout(self.mlp(self.norm_mlp(x), *given))  # type: ignore[no-any-return]


def _mlp_of(shape: DecoderShape) -> nn.Module:
    if not shape.experts:
        return MLP(shape.dim, shape.hidden)
    shared = MLP(shape.dim, shape.shared_hidden) if shape.shared_hidden else None
    return MixtureOfExperts(shape.dim, shape.expert_hidden, shape.experts, shape.experts_per_token, shared)


class Decoder(nn.Module):
    """Predict each next token; logits of shape (batch, tokens, vocabulary)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.dim)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.RMSNorm(shape.dim, shape.norm_eps)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            _draw(name, parameter, shape)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Sight = None,
        losses: RouterLosses | None = None,
        gather: Gather | None = None,
    ) -> Tensor:
        """Map tokens (batch, width) int64 to logits; positions of the same shape, by default 0, 1, …; by
        default a token sees all before it.

        A causal mask hides right padding from real tokens. `losses` collects router losses. With `gather` the tokens
        are a part of each row's (`Attention`), with that part's positions and mask.
        """
        return self.run(self.parts, tokens, positions, mask, losses=losses, gather=gather)

    @property
    def parts(self) -> list[str]:
        """Names of the modules with weights, in running order."""
        return ["embed", *(f"blocks.{number}" for number in range(self.shape.depth)), "norm", "head"]

    def run(
        self,
        parts: Sequence[str],
        tokens: Tensor,
        positions: Tensor | None,
        mask: Sight,
        x: Tensor | None = None,
        losses: RouterLosses | None = None,
        gather: Gather | None = None,
    ) -> Tensor:
        """Run consecutive parts on the output of the part before them; see `forward`."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cos, sin = rotations(positions, self.shape)
        for name in parts:
            if name == "embed":
                x = self.dropout(self.embed(tokens))
            elif name.startswith("blocks."):
                x = self.get_submodule(name)(x, cos, sin, mask, losses, gather)
            else:
                x = self.get_submodule(name)(x)
        assert x is not None, "some part runs"
        return x


def _draw(name: str, parameter: Tensor, shape: DecoderShape) -> None:
    """Initialise a parameter; norms are ones already, and meta tensors need nothing."""
    if parameter.ndim > 1 and not parameter.is_meta:
        # residual outputs are smaller in deeper models (Radford et al. 2019)
        is_added = name.endswith(("attention.o.weight", "mlp.down.weight", "experts.down", "shared.down.weight"))
        nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * shape.depth) if is_added else 1.0))


def drawn_weights(shape: DecoderShape) -> Iterator[tuple[str, Tensor]]:
    """Yield each of a decoder's parameters as `Decoder` initialises it; one block is in memory at a time."""
    nn.Embedding(shape.vocabulary, shape.dim)  # modules' own draws are overwritten, but advance torch's generator
    for _ in range(shape.depth):
        Block(shape)
    nn.Linear(shape.dim, shape.vocabulary, bias=False)
    with torch.device("meta"):
        sketch = Decoder(shape)
    for name, parameter in sketch.named_parameters():
        drawn = torch.ones(parameter.shape)
        _draw(name, drawn, shape)
        yield name, drawn


def rotations(positions: Tensor, shape: DecoderShape) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, in fp32; shape (rows, 1, tokens, head_dim)."""
    halves = torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / shape.rope_base ** (halves / shape.head_dim)
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    lower, upper = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-upper, lower), dim=-1) * sin.to(x.dtype)


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a decoder; by default `kv_heads` equals `heads`, and `hidden`, the MLP's width, is 8/3 of `dim`.

    With `experts`, each block has that many instead of its MLP, of width `expert_hidden` (by default `hidden`), of
    which a token uses `experts_per_token`; in addition there is a shared MLP of width `shared_hidden` for all tokens,
    unless it is 0.
    """

    vocabulary: int
    dim: int = 256
    depth: int = 4
    heads: int = 4
    kv_heads: int = 0
    hidden: int = 0
    tied: bool = True
    dropout: float = 0.0
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    experts: int = 0
    experts_per_token: int = 2
    expert_hidden: int = 0
    shared_hidden: int = 0

    def __post_init__(self) -> None:
        for name, default in (
            ("kv_heads", self.heads),
            ("hidden", -(-8 * self.dim // (3 * _WIDTH_MULTIPLE)) * _WIDTH_MULTIPLE),
        ):
            object.__setattr__(self, name, getattr(self, name) or default)
        object.__setattr__(self, "expert_hidden", self.expert_hidden or self.hidden)
        for name in ("vocabulary", "dim", "depth", "heads", "kv_heads", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim {self.dim} is not an even multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1, not {self.dropout}")
        for name in ("experts", "expert_hidden", "shared_hidden"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token must be from 1 to experts {self.experts}, not {self.experts_per_token}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads
