"""Probe an attention kernel: its bits must repeat in two runs and two processes, and its values must be right.

    python -m elastic_train.parallel.attention.probe KERNEL COMPILES DEVICE < call.json

prints the digest of one run. The second process is run once per machine, and its result is cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from elastic_train.parallel.attention.kernels import KERNELS, Call, Kernel, sdpa
from elastic_train.system.extras import version_of
from elastic_train.system.files import locked, write_atomically

OTHER_PROCESS_S = 180.0
"""Timeout in seconds for the other process; most of it is for importing torch and a compiler."""
_TOLERANCE = 0.05
"""Largest allowed error relative to the largest value; a correct bf16 kernel is off by 0.01."""
_MOST_TOKENS = 1024
"""Tokens compared with plain arithmetic, which needs memory quadratic in the tokens."""


class NotRepeatableError(Exception):
    """A kernel's bits differed between runs, or its results are wrong."""


def digest_of(kernel: Kernel, call: Call, device: torch.device, *, compiles: bool) -> str:
    """Return the digest of an active kernel's results for a call, forward and backward."""
    digest = hashlib.sha256()
    for tensor in _run(kernel, call, device, compiles=compiles):
        digest.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
    first, second = (digest_of(kernel, call, device, compiles=compiles) for _ in range(2))
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
    """Return the digest from another process on this machine, cached if possible.

    Of concurrent processes, one runs it for all. If nothing can be cached, each runs its own.
    """
    known, path = _known_by(kernel, call, device, compiles=compiles), _cache()
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(path.with_suffix(".lock"), 0))
        except OSError:
            return _ask(kernel, call, device, compiles=compiles)
        kept = _kept(path)
        if known not in kept:
            kept[known] = _ask(kernel, call, device, compiles=compiles)
            with contextlib.suppress(OSError):  # e.g. a full disk: the next process runs it again
                write_atomically(path, json.dumps(kept))
        return kept[known]


def _ask(kernel: Kernel, call: Call, device: torch.device, *, compiles: bool) -> str:
    asked = {**asdict(call), "dtype": str(call.dtype).removeprefix("torch.")}
    command = [sys.executable, "-m", __name__, kernel.name, str(compiles), str(device)]
    try:
        found = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, timeout=OTHER_PROCESS_S, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise NotRepeatableError(f"another process did not answer within {OTHER_PROCESS_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().rpartition("\n")[2]
        raise NotRepeatableError(f"another process failed ({last or error.returncode})") from error
    return found.stdout.split()[-1]


def _known_by(kernel: Kernel, call: Call, device: torch.device, *, compiles: bool) -> str:
    """Return the cache key of a digest: everything that its bits depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    versions = [f"{package} {version_of(package)}" for package in kernel.packages if version_of(package)]
    return " · ".join([kernel.name, name, f"torch {torch.__version__}", *versions, f"compiled {compiles}", str(call)])


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic-train" / "attention.json"


def _kept(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):  # no cache yet, or a process died while writing it
        return {}
    return found if isinstance(found, dict) else {}


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
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    kernel.activate()
    sys.stdout.write(digest_of(kernel, call, torch.device(device), compiles=compiles == "True") + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
