"""Probe the float8 products of a run: their bits must repeat in two runs and two processes, and their values be right.

    python -m elastic_train.parallel.product_probe DEVICE < calls.json

prints the digest of one run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from elastic_train.parallel.devices.repeats import (
    NotRepeatableError,
    begin_as_a_trainer,
    digest_elsewhere,
    digest_of,
    machine_name,
)
from elastic_train.parallel.linear_products import SCALED, quantise, scaled_product

_TOLERANCE = 0.02
"""Largest allowed error relative to the largest value: results are in bf16."""


class Call(NamedTuple):
    """A layer's call: tokens, inputs and outputs."""

    rows: int
    inputs: int
    outputs: int


class Recorder(TorchFunctionMode):
    """Records the calls of layers in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Call, None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._scaled_mm:
            (rows, inputs), (_, outputs) = args[0].shape, args[1].shape
            self.calls[Call(rows, inputs, outputs)] = None
        return func(*args, **(kwargs or {}))


def check_products(calls: Collection[Call], device: torch.device) -> None:
    """Raise NotRepeatableError if the three products of some layer's call differ in a second run or process."""
    if not calls:
        return
    for call in calls:
        rows, weight, _ = _drawn(call, device)
        left, right = (values.float() * scales for values, scales in map(quantise, (rows, weight)))
        expected, found = left @ right.t(), scaled_product(rows, weight)
        if not bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max()):
            raise NotRepeatableError("its results are not those of plain arithmetic")
    first, second = (digest_of(_run(calls, device)) for _ in range(2))
    if first != second:
        raise NotRepeatableError("two runs gave different bits")
    asked = json.dumps(sorted(calls))
    known_by = f"{machine_name(device)} · {asked}"
    if first != digest_elsewhere([__name__, str(device)], asked, known_by, "float8"):
        raise NotRepeatableError("another process gave different bits")


def _drawn(call: Call, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, a weight and a gradient of the output that are the same in every process."""
    draw = torch.Generator().manual_seed(1)
    shapes = (call.rows, call.inputs), (call.outputs, call.inputs), (call.rows, call.outputs)
    rows, weight, gradient = (torch.randn(shape, generator=draw).to(device) for shape in shapes)
    return rows.bfloat16(), weight, gradient.bfloat16()


def _run(calls: Collection[Call], device: torch.device) -> Iterator[Tensor]:
    for call in sorted(calls):
        rows, weight, gradient = _drawn(call, device)
        yield scaled_product(rows, weight)
        yield SCALED.of_input(gradient, weight)
        yield SCALED.of_weight(gradient, rows)


def main(arguments: Sequence[str]) -> None:
    """Print the digest of one run."""
    calls = [Call(*each) for each in json.loads(sys.stdin.read())]
    begin_as_a_trainer()
    sys.stdout.write(digest_of(_run(calls, torch.device(arguments[0]))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
