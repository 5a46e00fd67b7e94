"""The attention kernels, fastest first, and the process's current choice.

One kernel computes torch's own function (`scaled_dot_product_attention`, SDPA) for all models. Kernels that SDPA cannot
use, cuDNN in deterministic mode and FlexAttention, compute only the causal attention of the package's decoder. Packed
rows are computed by the operator of `documents`, with the active FlashAttention, or else by SDPA with a mask.

FlexAttention (Dong et al. 2024) is for compiled blocks on a GPU. No two thread blocks add to the same element, so its
bits are reproducible. It takes 1.6 times as long as cuDNN's attention; torch's deterministic mode takes 2.9 times.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_train.parallel.attention.documents import WIDEST_HEAD, attend_documents, by_mask, documents_of
from elastic_train.parallel.devices import switches
from elastic_train.system.wording import first_line

LEAST_HEAD = 16
"""Narrowest head that FlexAttention takes."""
_BLOCK = 128
"""Queries and keys per block of the mask: FlexAttention's default."""
_KEYS = (
    *("fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_stages", "fwd_num_warps"),
    *("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2", "bwd_num_stages", "bwd_num_warps"),
)
_OPTIONS: Mapping[tuple[int, int], Mapping[int, tuple[int, ...]]] = {
    (8, 0): {64: (128, 64, 3, 4, 64, 64, 64, 64, 2, 4), 128: (128, 64, 3, 8, 64, 64, 64, 64, 2, 4)},
    (9, 0): {64: (128, 128, 3, 4, 64, 128, 128, 64, 3, 8), 128: (128, 64, 3, 8, 64, 128, 128, 64, 3, 8)},
    (10, 0): {64: (128, 128, 3, 4, 64, 128, 128, 64, 3, 4), 128: (128, 64, 3, 8, 64, 128, 128, 64, 3, 4)},
}
"""Options by compute capability and head width, in bf16 and fp16, to fix the kernels across versions of torch.

They are the defaults of torch 2.13; no others were tried.
"""


def options_for(capability: tuple[int, int], width: int, dtype: torch.dtype) -> dict[str, int]:
    """Return FlexAttention's options for a device; empty to keep torch's choice, which depends only on its version."""
    found = _OPTIONS.get(capability, {}).get(width) if dtype.itemsize == 2 else None
    return {} if found is None else dict(zip(_KEYS, found, strict=True))


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_grouped: bool, options: Mapping[str, int] | None = None
) -> Tensor:
    """Return causal attention, each of shape (batch, heads, tokens, head_dim); keys and values may have fewer heads.

    `options` replace the table's.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    if options is None:
        capability = torch.cuda.get_device_capability(query.device)
        options = options_for(capability, query.shape[-1], query.dtype)
    num_tokens = query.shape[2]
    number = torch.arange(-(-num_tokens // _BLOCK), dtype=torch.int32, device=query.device)
    others = number.repeat(len(number), 1)
    mask = BlockMask.from_kv_blocks(
        torch.ones_like(number)[None, None],  # in each row of blocks, the diagonal one is partly visible
        ((number[:, None] + others) % len(number))[None, None],
        number[None, None],  # and all before it fully
        others[None, None],
        BLOCK_SIZE=_BLOCK,
        mask_mod=_is_visible,
        seq_lengths=(num_tokens, num_tokens),
    )
    attended = flex_attention(
        query,
        key,
        value,
        block_mask=mask,
        enable_gqa=is_grouped,
        kernel_options=dict(options) or None,  # type: ignore[arg-type]
    )
    assert isinstance(attended, Tensor)
    return attended


def _is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


Attend = Callable[[Tensor, Tensor, Tensor, "Call"], Tensor]
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of SDPA without a mask: shapes (batch, heads, tokens, width) of queries, and of keys and values.

    With `lengths`, those of its documents, it is a call of `attend_documents`.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    dtype: torch.dtype
    is_causal: bool
    dropout: float = 0.0
    scale: float | None = None
    lengths: tuple[int, ...] = ()

    @property
    def is_grouped(self) -> bool:
        return self.query[1] != self.key[1]

    @property
    def is_plain(self) -> bool:
        """True if the package's decoder makes such calls."""
        is_square = self.query[2] == self.key[2] and len(self.query) == 4
        return self.is_causal and self.dropout == 0 and self.scale in (None, 1 / math.sqrt(self.query[3])) and is_square


@dataclass(frozen=True, slots=True)
class Machine:
    """The device that kernels run on; with `compiles`, the model's blocks are compiled."""

    device: torch.device
    capability: tuple[int, int]
    compiles: bool


def machine_of(device: torch.device, *, compiles: bool) -> Machine:
    """Return the description of a GPU."""
    return Machine(device, torch.cuda.get_device_capability(device), compiles)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: `obstacle` returns why a machine cannot use it for a call, `activate` puts it in place."""

    name: str
    obstacle: Callable[[Machine, Call], str | None]
    activate: Callable[[], None]
    attend: Attend
    of: Literal["sdpa", "decoder", "documents"] = "sdpa"
    """The calls it computes: all of SDPA, only the causal ones of the package's decoder, or those of packed rows."""
    packages: tuple[str, ...] = ()
    """Packages, besides torch, whose version may change its bits."""


def sdpa(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
    """Compute a call by SDPA with the active kernel."""
    if call.lengths:
        return by_mask(query, key, value, documents_of(call.lengths, query.device), call.scale)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=call.dropout,
        is_causal=call.is_causal,
        scale=call.scale,
        enable_gqa=call.is_grouped,
    )


def _by_cudnn(query: Tensor, key: Tensor, value: Tensor, *, is_grouped: bool) -> Tensor:
    """Compute causal attention by cuDNN, whose frontend, unlike SDPA, has a deterministic backward pass."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, True)[0]  # type: ignore[no-any-return]


def _no_flash(*capabilities: int) -> Callable[[Machine, Call], str | None]:
    """Return an `obstacle` function for a replacement of torch's FlashAttention."""

    def obstacle(machine: Machine, call: Call) -> str | None:
        import torch.nn.attention as attention

        if machine.capability[0] not in capabilities:
            return f"compute capability {machine.capability[0]}.{machine.capability[1]}"
        if call.dtype not in _HALF or call.dropout:
            return "dropout" if call.dropout else str(call.dtype)
        # last: a newer torch helps only where nothing else is in the way
        return None if hasattr(attention, "activate_flash_attention_impl") else f"torch {torch.__version__} lacks it"

    return obstacle


def _activate_flash(name: str) -> Callable[[], None]:
    def activate() -> None:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl(name)

    return activate


def _restore() -> None:
    """Restore torch's own FlashAttention and choice of kernels."""
    import torch.nn.attention as attention

    if getattr(attention, "current_flash_attention_impl", lambda: None)() is not None:
        attention.restore_flash_attention_impl()
    switches.release(_SDPA_SWITCHES)


def _only_math() -> None:
    _restore()
    for name in _SDPA_SWITCHES:
        switches.change(name, False)


def _no_cudnn(machine: Machine, call: Call) -> str | None:
    if importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed"
    return None if call.is_plain and call.dtype in _HALF else "other calls than the decoder's"


def _install_cudnn() -> None:
    import cudnn.torch

    cudnn.torch.install()


def _no_flex(machine: Machine, call: Call) -> str | None:
    if not machine.compiles:
        return "blocks are not compiled"
    return None if call.is_plain and call.query[3] >= LEAST_HEAD else "other calls than the decoder's"


def _no_varlen(machine: Machine, call: Call) -> str | None:
    if machine.device.type == "cuda" and machine.capability < (8, 0):
        return f"compute capability {machine.capability[0]}.{machine.capability[1]}"
    if call.dtype not in _HALF or call.query[3] > WIDEST_HEAD:
        return f"{call.dtype}, heads of {call.query[3]}"
    return None


def _anything(machine: Machine, call: Call) -> str | None:
    return None


_SDPA_SWITCHES = tuple(f"torch.backends.cuda.enable_{name}_sdp" for name in ("flash", "mem_efficient", "cudnn"))
FLEX, CUDNN, TORCH, VARLEN, MASK = "flex", "cudnn", "torch", "varlen", "mask"
KERNELS = (
    Kernel("FA4", _no_flash(9, 10), _activate_flash("FA4"), sdpa, packages=("flash-attn-4", "flash-attn-cute")),
    Kernel("FA3", _no_flash(9), _activate_flash("FA3"), sdpa, packages=("flash-attn-3", "flash-attn")),
    Kernel(
        CUDNN,
        _no_cudnn,
        _install_cudnn,
        lambda query, key, value, call: _by_cudnn(query, key, value, is_grouped=call.is_grouped),
        of="decoder",
        packages=("nvidia-cudnn-frontend", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    ),
    Kernel(
        FLEX,
        _no_flex,
        lambda: None,
        lambda query, key, value, call: causal_attention(query, key, value, is_grouped=call.is_grouped),
        of="decoder",
    ),
    Kernel(TORCH, _anything, _restore, sdpa),
    Kernel("math", _anything, _only_math, sdpa),
    Kernel(
        VARLEN,
        _no_varlen,
        lambda: None,
        lambda query, key, value, call: attend_documents(
            query, key, value, documents_of(call.lengths, query.device), call.scale
        ),
        of="documents",
    ),
)
"""Fastest first: FA3 takes 0.79 of the time of cuDNN's non-deterministic attention, then cuDNN's deterministic one.

These were measured by others on H100s (forward and backward, 8,192 tokens, heads of 128); FlexAttention and torch's own
by this project.
"""

_causal = FLEX
"""Kernel of the decoder's causal attention; FlexAttention applies only to compiled blocks."""
_packed = MASK
"""Kernel of packed rows on GPUs in deterministic mode."""


def put_in_place(causal: str, everywhere: str, packed: str = MASK, kernels: Sequence[Kernel] = KERNELS) -> None:
    """Use one kernel for the decoder's causal calls, one for SDPA and one for packed rows in this process."""
    global _causal, _packed
    by_name = {kernel.name: kernel for kernel in kernels}
    by_name[everywhere].activate()
    if by_name[causal].of != "sdpa":
        by_name[causal].activate()
    _causal, _packed = causal, packed


@contextlib.contextmanager
def trying_documents() -> Iterator[None]:
    """Within this context, packed rows call the kernel's operator, so that the calls can be recorded and probed."""
    global _packed
    before, _packed = _packed, VARLEN
    try:
        yield
    finally:
        _packed = before


def masks_documents(device: torch.device) -> bool:
    """Return True if packed rows on a device are computed with a mask: if bits must repeat and no kernel is proven."""
    return device.type == "cuda" and _packed == MASK and torch.are_deterministic_algorithms_enabled()


def causal_kernel(query: Tensor) -> Callable[..., Tensor] | None:
    """Return the function that replaces SDPA for a decoder's causal attention; None to use SDPA.

    It is None unless on a GPU in deterministic mode: elsewhere torch's own choice is the fastest.
    """
    if not (query.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return None
    if _causal == CUDNN and query.dtype in _HALF:
        return _by_cudnn
    is_compiled = torch.compiler.is_compiling() and query.shape[-1] >= LEAST_HEAD
    return causal_attention if _causal == FLEX and is_compiled else None


def why(error: Exception) -> str:
    """Return a short reason why a kernel cannot be used."""
    return f"{type(error).__name__}: {first_line(error)}"
