"""Ask another process of this machine for the digest of a computation: libraries may choose kernels per process.

It is asked once per machine, and its answer is cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from elastic_train.system.files import locked, write_atomically

OTHER_PROCESS_S = 180.0
"""Timeout in seconds for the other process; most of it is for importing torch and a compiler."""


class NotRepeatableError(Exception):
    """A kernel's bits differed between runs, or its results are wrong."""


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return the digest of the bits of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def begin_as_a_trainer() -> None:
    """Set what a trainer's process sets, for kernels that depend on it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def machine_name(device: torch.device) -> str:
    """Return the name of a device and of torch's version, as a part of a cache key."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return f"{name} · torch {torch.__version__}"


def digest_elsewhere(command: Sequence[str], asked: str, known_by: str, cache: str) -> str:
    """Return the digest that `python -m command` prints for `asked` as its input, cached by `known_by` if possible.

    Of concurrent processes, one runs it for all. If nothing can be cached, each runs its own. Raises NotRepeatableError
    if it fails.
    """
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic-train" / f"{cache}.json"
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(path.with_suffix(".lock"), 0))
        except OSError:
            return _ask(command, asked)
        kept = _kept(path)
        if known_by not in kept:
            kept[known_by] = _ask(command, asked)
            with contextlib.suppress(OSError):  # e.g. a full disk: the next process runs it again
                write_atomically(path, json.dumps(kept))
        return kept[known_by]


def _ask(command: Sequence[str], asked: str) -> str:
    try:
        found = subprocess.run(
            [sys.executable, "-m", *command],
            input=asked,
            capture_output=True,
            text=True,
            timeout=OTHER_PROCESS_S,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise NotRepeatableError(f"another process did not answer within {OTHER_PROCESS_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().rpartition("\n")[2]
        raise NotRepeatableError(f"another process failed ({last or error.returncode})") from error
    return found.stdout.split()[-1]


def _kept(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):  # no cache yet, or a process died while writing it
        return {}
    return found if isinstance(found, dict) else {}
