"""Probe an attention kernel: its bits must repeat in two runs and two processes, and its values must be right.

    python -m elastic_train.parallel.attention.probe KERNEL COMPILES DEVICE < call.json

prints the digest of one run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from elastic_train.parallel.attention.kernels import KERNELS, Call, Kernel, sdpa
from elastic_train.parallel.devices.repeats import (
    NotRepeatableError,
    begin_as_a_trainer,
    digest_elsewhere,
    digest_of,
    machine_name,
)
from elastic_train.system.extras import version_of

_TOLERANCE = 0.05
"""Largest allowed error relative to the largest value; a correct bf16 kernel is off by 0.01."""
_MOST_TOKENS = 1024
"""Tokens compared with plain arithmetic, which needs memory quadratic in the tokens."""


def check_repeats(kernel: Kernel, call: Call, device: torch.device, *, compiles: bool) -> None:
    """Raise NotRepeatableError if an active kernel's bits differ in a second run, here or in another process."""
    if compiles:
        torch.compiler.reset()  # or a late kernel exceeds the limit of compiled variants of one function
    part = replace(call, query=_cut(call.query), key=_cut(call.key), lengths=_cut_lengths(call))
    found = _run(kernel, part, device, compiles=compiles)
    with sdpa_kernel(SDPBackend.MATH):
        expected = _run(replace(kernel, attend=sdpa), part, device, compiles=False)
    for one, right in zip(found, expected, strict=True):
        off = (one.float() - right.float()).abs().max()
        if not bool(off <= _TOLERANCE * right.float().abs().max()):
            raise NotRepeatableError("its results are not those of plain arithmetic")
    first, second = (digest_of(_run(kernel, call, device, compiles=compiles)) for _ in range(2))
    if first != second:
        raise NotRepeatableError("two runs gave different bits")
    if first != _of_another_process(kernel, call, device, first, compiles=compiles):
        raise NotRepeatableError("another process gave different bits")


def _cut(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, *shape[1:-2], min(shape[-2], _MOST_TOKENS), shape[-1])


def _cut_lengths(call: Call) -> tuple[int, ...]:
    """Return the lengths of the documents in the first tokens of the first row."""
    left, found = min(call.query[-2], _MOST_TOKENS), list[int]()
    for length in call.lengths:
        found.append(min(length, left - sum(found)))
    return tuple(length for length in found if length)


def _run(kernel: Kernel, call: Call, device: torch.device, *, compiles: bool) -> list[Tensor]:
    """Return a call's output and gradients for inputs that are the same in every process."""
    draw = torch.Generator().manual_seed(1)
    shapes = (call.query, call.key, call.key)
    given = [torch.randn(shape, generator=draw).to(device, call.dtype).requires_grad_() for shape in shapes]
    back = torch.randn(call.query, generator=draw).to(device, call.dtype)
    devices = [device] if device.type == "cuda" else []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernel.attend(query, key, value, call)

    function = torch.compile(attend, dynamic=False) if compiles else attend
    with torch.random.fork_rng(devices), torch.autocast(device.type, enabled=False), torch.enable_grad():
        torch.manual_seed(1)  # for dropout
        attended = function(*given)
        return [attended, *torch.autograd.grad(attended, given, back)]


def _of_another_process(kernel: Kernel, call: Call, device: torch.device, mine: str, *, compiles: bool) -> str:
    """Return the digest from another process on this machine."""
    asked = {**asdict(call), "dtype": str(call.dtype).removeprefix("torch.")}
    versions = [f"{package} {version_of(package)}" for package in kernel.packages if version_of(package)]
    known_by = " · ".join([kernel.name, machine_name(device), *versions, f"compiled {compiles}", str(call)])
    command = [__name__, kernel.name, str(compiles), str(device)]
    return digest_elsewhere(command, json.dumps(asked), known_by, "attention")


def main(arguments: Sequence[str]) -> None:
    """Print the digest of one run of a kernel."""
    name, compiles, device = arguments
    asked = json.loads(sys.stdin.read())
    call = Call(
        **asked
        | {name: tuple(asked[name]) for name in ("query", "key", "lengths")}
        | {"dtype": getattr(torch, asked["dtype"])}
    )
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    begin_as_a_trainer()
    kernel.activate()
    sys.stdout.write(digest_of(_run(kernel, call, torch.device(device), compiles=compiles == "True")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
