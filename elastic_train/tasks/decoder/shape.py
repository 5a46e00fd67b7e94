"""The sizes of the package's own decoder."""

from __future__ import annotations

from dataclasses import dataclass

_WIDTH_MULTIPLE = 64


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
