"""The package's decoder in float64, from its definition: next-token logits without the package's code.

Llama blocks: RMSNorm, rotary positions by halves, grouped queries, SwiGLU, no biases; experts replace the MLP, weighted
by a softmax over all of them. Rows are computed one by one, without padding; a token attends to the unmasked earlier
tokens of its document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chaos.judge.evidence.run_files import Line, part
from chaos.judge.evidence.stored_weights import Tensors
from chaos.judge.findings import Unknown

Ints = npt.NDArray[np.int64]
_PATHS = ("elastic_train.tasks.causal_lm:CausalLM", "chaos.tasks.paced_language:PacedLanguage")
_COLUMNS = ("labels", "attention_mask", "document_ids")
_SIZES: dict[str, Any] = {"heads": 4, "rope_base": 10_000.0, "norm_eps": 1e-5, "experts_per_token": 2}
_PRODUCTS = ("gate", "up", "down")

if TYPE_CHECKING:
    Tensor = Any


def is_language_model(path: object, params: Line) -> bool:
    """Return True if a task is the package's decoder, with or without experts, or its paced variant."""
    return path in _PATHS and not params.get("hf") and isinstance(params.get("model") or {}, dict)


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A trained decoder: parameters by name, task settings, and input columns by purpose."""

    weights: Tensors
    sizes: Line
    max_tokens: int
    z_loss: float
    named: Mapping[str, str]

    @classmethod
    def of(cls, weights: Tensors, params: Line, manifest: Line) -> LanguageModel:
        known = part(manifest, "columns") if "columns" in manifest else {}
        named = {"tokens": str(params.get("tokens", "input_ids"))}
        for name in _COLUMNS:
            asked = params.get(name)
            if isinstance(asked, str) or (asked is not False and (asked or name in known)):
                named[name] = asked if isinstance(asked, str) else name
        sizes = params.get("model")
        shape = {**_SIZES, **(sizes if isinstance(sizes, dict) else {})}
        most, z_loss = params.get("max_tokens", 1024), params.get("z_loss", 0.0)
        return cls(weights, shape, int(most), float(z_loss), named)  # type: ignore[call-overload, arg-type]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(self.named.values()))

    def metrics(self, rows: pa.Table, close: float) -> tuple[dict[str, float], float]:
        """Return the metrics of rows, and the share of targets whose two likeliest tokens have close logits."""
        total, penalty, num_right, num_close, num_targets = 0.0, 0.0, 0, 0, 0
        lists = {use: rows.column(name).to_pylist() for use, name in self.named.items()}
        for row in range(len(rows)):
            logits, targets = self._predicted({use: self._cut(values[row]) for use, values in lists.items()})
            if not len(targets):
                continue
            own = logits.gather(1, targets[:, None])[:, 0]
            normalizers, top = logits.logsumexp(-1), logits.topk(min(2, logits.shape[1]), dim=-1).values
            total += float((normalizers - own).sum())
            penalty += self.z_loss * float(normalizers.square().sum())
            num_right += int((logits.argmax(-1) == targets).sum())
            num_close += int((top[:, 0] - top[:, -1] < close).sum())
            num_targets += len(targets)
        if not num_targets:
            raise Unknown("no row of the validation set has a target")
        found = {"loss": (total + penalty) / num_targets, "samples": float(len(rows))}
        found |= {"perplexity": float(np.exp(total / num_targets)), "token_accuracy": num_right / num_targets}
        return found, num_close / num_targets

    def _cut(self, values: list[int] | None) -> Ints:
        return np.array((values or [])[: self.max_tokens], np.int64)

    def _predicted(self, row: Mapping[str, Ints]) -> tuple[Tensor, Tensor]:
        """Return the logits at positions with a target, and the targets."""
        embedding, tokens = self._weight("embed.weight"), row["tokens"]
        places = np.arange(len(tokens))
        is_first = np.ones(len(tokens), bool)
        documents = row.get("document_ids", np.zeros(len(tokens), np.int64))
        is_first[1:] = documents[1:] != documents[:-1]
        run = is_first.cumsum()
        is_real = row.get("attention_mask", np.ones(len(tokens), np.int64)) != 0
        sees = (run[:, None] == run) & (places <= places[:, None]) & is_real
        sees |= places == places[:, None]  # keeps masked tokens from attending to nothing; no token attends to them
        labels = row.get("labels", tokens)
        is_target = is_real[:-1] & is_real[1:] & (run[:-1] == run[1:]) & (labels[1:] >= 0)
        x = embedding[tokens]
        positions = places - np.maximum.accumulate(np.where(is_first, places, 0))
        angles = self._angles(embedding.new_tensor(positions), embedding.shape[1])
        bias = embedding.new_tensor(np.where(sees, 0.0, -np.inf))
        for block in range(sum(name.endswith(".attention.q.weight") for name in self.weights)):
            x = self._block(x, f"blocks.{block}", angles, bias)
        x = self._norm(x, "norm")[np.flatnonzero(is_target)]
        head = "head.weight" if "head.weight" in self.weights else "embed.weight"
        return x @ self._weight(head).T, embedding.new_tensor(labels[1:][is_target]).long()

    def _angles(self, positions: Tensor, dim: int) -> Tensor:
        size = dim // int(self.sizes["heads"])  # type: ignore[call-overload]
        halves = np.arange(0, size, 2) / size
        found = positions[:, None] * positions.new_tensor(float(self.sizes["rope_base"]) ** -halves)  # type: ignore[arg-type]
        return found.repeat(1, 2)

    def _block(self, x: Tensor, name: str, angles: Tensor, bias: Tensor) -> Tensor:
        normed, size = self._norm(x, f"{name}.norm_attention"), angles.shape[1]
        query, key, value = (
            (normed @ self._weight(f"{name}.attention.{kind}.weight").T).view(len(x), -1, size).transpose(0, 1)
            for kind in "qkv"
        )
        shared = len(query) // len(key)
        key, value = key.repeat_interleave(shared, 0), value.repeat_interleave(shared, 0)
        scores = _rotated(query, angles) @ _rotated(key, angles).transpose(1, 2) / size**0.5 + bias
        attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(x.shape)
        x = x + attended @ self._weight(f"{name}.attention.o.weight").T
        normed = self._norm(x, f"{name}.norm_mlp")
        if f"{name}.mlp.router.weight" in self.weights:
            return x + self._experts(normed, f"{name}.mlp")
        return x + _gated(normed, *(self._weight(f"{name}.mlp.{kind}.weight") for kind in _PRODUCTS))

    def _experts(self, x: Tensor, name: str) -> Tensor:
        """Return the output of each token's likeliest experts, weighted by probability, plus that of shared ones."""
        per_token = int(self.sizes["experts_per_token"])  # type: ignore[call-overload]
        likely, chosen = (x @ self._weight(f"{name}.router.weight").T).softmax(-1).topk(per_token)
        likely = likely / likely.sum(-1, keepdim=True) if per_token > 1 else likely
        stacks = [self._weight(f"{name}.experts.{kind}") for kind in _PRODUCTS]
        found = x.new_zeros(x.shape)
        for expert, weights in enumerate(zip(*stacks, strict=True)):
            found = found + _gated(x, *weights) * (likely * (chosen == expert)).sum(-1, keepdim=True)
        if f"{name}.shared.gate.weight" in self.weights:
            found = found + _gated(x, *(self._weight(f"{name}.shared.{kind}.weight") for kind in _PRODUCTS))
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.sizes["norm_eps"]).sqrt()
        return x / scale * self._weight(f"{name}.weight")

    def _weight(self, name: str) -> Tensor:
        if name not in self.weights:
            raise Unknown(f"the commit holds no {name}: it is not a decoder that can be evaluated here")
        return self.weights[name].double()


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the MLP (SwiGLU) output of tokens."""
    gated = x @ gate.T
    return (gated * gated.sigmoid() * (x @ up.T)) @ down.T


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair of a vector's halves by the angles of its position."""
    half = x.shape[-1] // 2
    swapped = x.roll(half, -1)
    signs = x.new_ones(2 * half)
    signs[:half] = -1
    return x * angles.cos() + swapped * signs * angles.sin()
