"""Model facts for a plan: its units, their work and memory, and the bytes per element.

A unit is a block or the rest of the model, as exchanged by `parallel.shards`. Amounts are per micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from elastic_train.placement.grains import Layout as Cut

MOST_LANES = 8
"""Number of lanes of the first step to measure: the largest micro-batch is traced, the mean size scales the work."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a pass: FLOPs of matrix products and convolutions, bytes moved by other kernels, and kernel calls.

    `float8_flops` are those of the FLOPs that are computed in float8.
    """

    flops: float = 0.0
    moved_bytes: float = 0.0
    calls: int = 0
    float8_flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
            self.calls + other.calls,
            self.float8_flops + other.float8_flops,
        )

    def over(self, parts: float) -> Work:
        """Return one of `parts` equal parts of the work; each part makes all calls."""
        return self.times(1 / parts)

    def times(self, size: float) -> Work:
        """Return the work of a micro-batch of another size, in as many calls."""
        return Work(self.flops * size, self.moved_bytes * size, self.calls, self.float8_flops * size)


@dataclass(frozen=True, slots=True)
class Unit:
    """A block or the rest: elements with padding; `trained` ones get a gradient, `experts` are expert weights.

    `trained_experts` are both.

    `saved_bytes` is what the forward pass keeps for the backward pass; `output_bytes` is passed to the next unit.
    """

    name: str
    elements: int
    trained: int
    forward: Work
    backward: Work
    saved_bytes: float = 0.0
    output_bytes: float = 0.0
    experts: int = 0
    trained_experts: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes per element: weight, gradient and optimizer state.

    The trainer uses 4, 4 and the optimizer's moments; mixed precision as in the ZeRO paper is 2, 2 and 12.
    """

    weight: float = 4.0
    gradient: float = 4.0
    state: float = 8.0


@dataclass(frozen=True)
class ModelFacts:
    """A model, and the work of a micro-batch of `samples` samples with `tokens` tokens (0: not text).

    `transient_bytes` is the peak memory of a pass beyond what its units keep. `tied` elements are shared by the first
    and the last layer. `largest_tensor` and `num_tensors` are of what is trained. `cut` splits the model
    into grains, for exact shares.
    """

    name: str
    blocks: tuple[Unit, ...]
    rest: Unit
    samples: float
    tokens: int = 0
    sizes: Sizes = Sizes()
    transient_bytes: float = 0.0
    buffer_bytes: float = 0.0
    input_bytes: float = 0.0
    largest_tensor: int = 0
    num_tensors: int = 0
    tied: int = 0
    precision: str = "fp32"
    cut: Cut | None = None

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        return (*self.blocks, self.rest)

    @cached_property
    def elements(self) -> int:
        return sum(unit.elements for unit in self.units)

    @cached_property
    def trained(self) -> int:
        return sum(unit.trained for unit in self.units)

    @cached_property
    def largest_block(self) -> int:
        return max((unit.elements for unit in self.blocks), default=0)

    @cached_property
    def forward(self) -> Work:
        return sum((unit.forward for unit in self.units), Work())

    @cached_property
    def backward(self) -> Work:
        return sum((unit.backward for unit in self.units), Work())

    @cached_property
    def flops(self) -> float:
        """FLOPs that a micro-batch needs, without recomputation (model FLOPs)."""
        return self.forward.flops + self.backward.flops

    @property
    def amount(self) -> str:
        return "tokens" if self.tokens else "samples"

    @property
    def amounts(self) -> float:
        return self.tokens or self.samples
