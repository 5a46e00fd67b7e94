"""Choose this process's attention kernels before its first world; in every world, ranks adopt rank 0's choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from elastic_train.parallel.attention.documents import Documents, attend_documents, by_mask, lengths_of
from elastic_train.parallel.attention.kernels import (
    FLEX,
    KERNELS,
    MASK,
    TORCH,
    Call,
    Kernel,
    Machine,
    put_in_place,
    why,
)
from elastic_train.parallel.attention.probe import check_repeats
from elastic_train.parallel.devices.repeats import NotRepeatableError

FINGERPRINT = "attention"
"""Name of the kernels in the comparison between ranks."""
Check = Callable[..., None]


@dataclass(slots=True)
class Choice:
    """The chosen kernels: `causal` for the decoder's causal calls, `everywhere` for SDPA, `packed` for packed rows.

    `packed` is "" if the run has none. `admitted` kernels have passed their probe; `refused` has the reason for each
    other one.
    """

    causal: str
    everywhere: str
    packed: str = ""
    admitted: list[Kernel] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name by which ranks compare choices."""
        return _name(self.causal, self.everywhere, self.packed)

    def __str__(self) -> str:
        if self.refused and not self.admitted:
            said = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
            return (
                f"WARNING: no kernel of attention repeats its bits on this machine ({said}), so weights may differ "
                "from run to run: use other versions of torch and its driver, or set reduction to fast"
            )
        reasons = "".join(f"; not {name}: {reason}" for name, reason in self.refused.items())
        return f"attention is computed by {self.name}{reasons}"


_current: Choice | None = None


def current() -> Choice | None:
    """Return this process's choice; None on CPUs, and if no micro-batch could be read at start."""
    return _current


def fingerprint(*, compiles: bool) -> str:
    """Return the name of this process's kernels, for comparison between ranks."""
    if _current is not None:
        return _current.name
    return _name(FLEX, TORCH) if compiles else TORCH


def _name(causal: str, everywhere: str, packed: str = "") -> str:
    name = causal if causal == everywhere else f"{causal}, elsewhere {everywhere}"
    return f"{name}, packed rows by {packed}" if packed else name


class Recorder(TorchFunctionMode):
    """Records the calls of SDPA without a mask, and those for packed rows, which it computes with one."""

    def __init__(self, compute_type: torch.dtype | None) -> None:
        super().__init__()
        self._compute_type = compute_type
        self.calls: dict[Call, None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._note(*args, **named)
        elif func is attend_documents:
            return self._with_mask(*args)
        return func(*args, **named)

    def _with_mask(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float | None, dropout: float
    ) -> Tensor:
        if not dropout and key.shape == value.shape:
            dtype, lengths = self._compute_type or query.dtype, tuple(lengths_of(documents.on_host))
            call = Call(tuple(query.shape), tuple(key.shape), dtype, is_causal=True, scale=scale, lengths=lengths)
            self.calls[call] = None
        return by_mask(query, key, value, documents, scale, dropout)

    def _note(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        if attn_mask is None and key.shape == value.shape:  # only torch's kernel takes other calls
            dtype = self._compute_type or query.dtype
            self.calls[Call(tuple(query.shape), tuple(key.shape), dtype, is_causal, dropout_p, scale)] = None


def choose(
    calls: Iterable[Call], machine: Machine, kernels: Sequence[Kernel] = KERNELS, check: Check = check_repeats
) -> Choice:
    """Probe kernels, fastest first, on a run's calls, and activate the first that passes.

    A kernel for all of SDPA must pass for each call, one for the decoder only for the causal ones. For packed rows it
    must pass as if each row were one document, since their own kernel, probed last, is built on it.
    """
    global _current
    packed = [call for call in calls if call.lengths]
    plain = [call for call in calls if call.is_plain and not call.lengths]
    every = list(dict.fromkeys(replace(call, lengths=()) for call in calls))
    choice = Choice(TORCH, TORCH)
    for kernel in kernels:
        wanted = {"sdpa": every, "decoder": plain, "documents": []}[kernel.of]
        if not wanted:
            continue
        reason = _obstacle(kernel, wanted, machine, check)
        if reason is not None:
            choice.refused[kernel.name] = reason
            continue
        choice.admitted.append(kernel)
        if kernel.of == "sdpa":
            break
    by_sdpa = [kernel for kernel in choice.admitted if kernel.of == "sdpa"]
    choice.everywhere = by_sdpa[0].name if by_sdpa else TORCH
    choice.causal = choice.admitted[0].name if choice.admitted else TORCH
    put_in_place(choice.causal, choice.everywhere, kernels=kernels)
    if packed:
        choice.packed = _of_packed(packed, choice, machine, kernels, check)
        put_in_place(choice.causal, choice.everywhere, choice.packed, kernels)
    _current = choice
    return choice


def _of_packed(calls: Sequence[Call], choice: Choice, machine: Machine, kernels: Sequence[Kernel], check: Check) -> str:
    """Probe the kernels of packed rows; return the first that passes, or the mask."""
    for kernel in kernels:
        if kernel.of == "documents":
            reason = _obstacle(kernel, calls, machine, check)
            if reason is None:
                choice.admitted.append(kernel)
                return kernel.name
            choice.refused[kernel.name] = reason
    return MASK


def _obstacle(kernel: Kernel, calls: Sequence[Call], machine: Machine, check: Check) -> str | None:
    """Return the reason why a kernel cannot be used for some calls; None if it passes."""
    for call in calls:
        if (reason := kernel.obstacle(machine, call)) is not None:
            return reason
    try:
        kernel.activate()
        for call in calls:
            check(kernel, call, machine.device, compiles=machine.compiles)
    except NotRepeatableError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a package's kernel may raise anything
        return why(error)
    return None


def adopt(name: str, machine: Machine, kernels: Sequence[Kernel] = KERNELS) -> bool:
    """Switch to the kernels of another rank's choice, given by name; return True if this process can.

    It cannot if blocks are compiled, because the kernel is compiled in. A process that has probed nothing relies on the
    other rank's probe.
    """
    global _current
    if machine.compiles:
        return False
    usable = [kernel for kernel in kernels if _current is None or kernel.name == TORCH or kernel in _current.admitted]
    of_packed = ("", MASK, *(kernel.name for kernel in usable if kernel.of == "documents"))
    named = {
        _name(causal.name, one.name, packed): (causal.name, one.name, packed)
        for causal in usable
        for one in usable
        for packed in of_packed
        if one.of == "sdpa" and causal.of != "documents"
    }
    if name not in named:
        return False
    causal, everywhere, packed = named[name]
    try:
        put_in_place(causal, everywhere, packed or MASK, kernels)
    except Exception as error:  # noqa: BLE001 - a package's kernel may raise anything
        refused = {causal: why(error)}
        put_in_place(TORCH, TORCH, kernels=kernels)
        _current = Choice(TORCH, TORCH, refused=refused)
        return False
    _current = replace(_current or Choice(TORCH, TORCH), causal=causal, everywhere=everywhere, packed=packed)
    return True
