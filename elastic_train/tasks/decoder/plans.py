"""How ranks share the package's own decoder: by heads and widths, by tokens, and in stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from elastic_train.tasks.decoder.shape import DecoderShape
from elastic_train.tasks.placements import Use

USES: Mapping[str, Use] = {
    **{f"blocks.*.attention.{name}": "column" for name in "qkv"},
    "blocks.*.attention.o": "row",
    **{f"blocks.*.mlp.{name}": "column" for name in ("gate", "up")},
    "blocks.*.mlp.down": "row",
    **{f"blocks.*.mlp.shared.{name}": "column" for name in ("gate", "up")},
    "blocks.*.mlp.shared.down": "row",
    "dropout": "split",
    "blocks.*.norm_attention": "tokens",
    "blocks.*.norm_mlp": "tokens",
    "blocks.*.dropout": "dropout",
    "norm": "join",
}
"""How tensor ranks share a block: some heads of its attention each, and a part of its MLP's width; experts are dealt
out. Tokens are shared out from the embedding to the last norm, but for attention and MLPs."""


def stages_of(shape: DecoderShape, parts: Sequence[str], num_stages: int) -> list[Sequence[str]]:
    """Deal the parts to stages (`deal`); raises ValueError, with every reason, if it cannot be done."""
    wrong = []
    if num_stages > shape.depth:
        wrong.append(f"depth {shape.depth} is less than {num_stages} stages, each of which has a block at least")
    if shape.tied:
        wrong.append("tied: true has one matrix in the first stage and in the last: set it to false")
    if wrong:
        raise ValueError(*wrong)
    return deal(parts, 1, shape.depth, num_stages)


def deal(parts: Sequence[str], num_before: int, num_blocks: int, num_stages: int) -> list[Sequence[str]]:
    """Deal a model's parts, of which so many come before its blocks, to stages of about as many blocks each.

    Where it does not come out even, the last ones have more. Other parts stay with the block beside them.
    """
    ends = [num_before + stage * num_blocks // num_stages for stage in range(num_stages + 1)]
    ends[0], ends[-1] = 0, len(parts)
    return [parts[lo:hi] for lo, hi in pairwise(ends)]
