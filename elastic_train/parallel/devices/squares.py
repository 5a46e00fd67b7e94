"""Sums of squares per grain: on a GPU by one kernel, elsewhere by `placement.norm`, with the same bits.

torch's operations need fifteen passes over memory; the kernel saves 0.16 s of a step of 0.57 s. They are the fallback
where Triton is missing or cannot compile.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from elastic_train.core.arrays import Int64s
from elastic_train.placement.grain_tables import Lengths
from elastic_train.placement.grains import Cut
from elastic_train.placement.norm import grain_squares, in_memory_order, lengths_of

log = logging.getLogger(__name__)
_WIDTH = 256
_BLOCK = 1 << 14
"""Grains folded at once: 32 MiB of rows."""
Fold = Callable[[Tensor, Tensor, torch.dtype], None]
"""Folds grains, given by address and length, into rows of squares, float64, shape (grains, _WIDTH)."""
_FOLDED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes that the kernel reads."""


def squares_of_tensors(tensors: Iterable[tuple[Tensor, Cut | None]]) -> Tensor:
    """Return the sum of squares of each grain of tensors, float64, shape (grains,), on the CPU.

    Grains are in the layout's order: tensor by tensor, each with its cut. All tensors are on one device.
    """
    filled = [(tensor, cut) for tensor, cut in tensors if tensor.numel()]
    lengths = [lengths_of(tuple(tensor.shape), cut) for tensor, cut in filled]
    return squares_of_vectors([in_memory_order(tensor, cut) for tensor, cut in filled], lengths)


def squares_of_vectors(vectors: Sequence[Tensor], lengths: Sequence[Lengths]) -> Tensor:
    """Return the sums of squares of vectors, given their grains' lengths; all vectors are on one device."""
    fold = _fold_of(vectors)
    return grain_squares(vectors, lengths) if fold is None else _squares(fold, vectors, lengths)


def _fold_of(tensors: Sequence[Tensor]) -> Fold | None:
    """Return the kernel for such tensors, None if there is none."""
    is_known = all(tensor.dtype in _FOLDED for tensor in tensors)
    return cuda_fold() if is_known and tensors and tensors[0].is_cuda else None


def _squares(fold: Fold, flats: Sequence[Tensor], lengths: Sequence[Lengths]) -> Tensor:
    """Return the squares of the vectors' grains, in order; vectors of one dtype are processed together."""
    ends = np.cumsum([len(of_flat) for of_flat in lengths])
    folded, numbers = list[Tensor](), list[Int64s]()
    for dtype in dict.fromkeys(flat.dtype for flat in flats):
        some = [number for number, flat in enumerate(flats) if flat.dtype == dtype]
        whole = [flats[number].contiguous() for number in some]
        places = torch.from_numpy(_places(whole, [lengths[number] for number in some])).to(whole[0].device)
        folded += [_fold_block(fold, block, dtype) for block in torch.split(places, _BLOCK)]
        numbers += [np.arange(ends[number - 1] if number else 0, ends[number]) for number in some]
    sums = np.empty(int(ends[-1]))
    sums[np.concatenate(numbers)] = torch.cat(folded).cpu().numpy()
    return torch.from_numpy(sums)


def _fold_block(fold: Fold, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the squares of some grains, float64, on their device."""
    rows, width = torch.empty(len(places), _WIDTH, dtype=torch.float64, device=places.device), _WIDTH
    fold(places, rows, dtype)
    while width > 1:
        width //= 2
        rows[:, :width].add_(rows[:, width : 2 * width])
    return rows[:, 0].clone()


def _places(flats: Sequence[Tensor], lengths: Sequence[Lengths]) -> Int64s:
    """Return the address and length of each grain of vectors of one dtype, in order, shape (grains, 2)."""
    size = flats[0].element_size()
    places = np.concatenate([_offsets(of_flat) for of_flat in lengths])
    places[:, 0] *= size
    places[:, 0] += np.repeat([flat.data_ptr() for flat in flats], [len(of_flat) for of_flat in lengths])
    return places


@functools.lru_cache(maxsize=1024)
def _offsets(lengths: Lengths) -> Int64s:
    """Return the first element and the length of each grain of a vector, shape (grains, 2)."""
    sizes = np.array(lengths, dtype=np.int64)
    return np.stack([np.cumsum(sizes) - sizes, sizes], axis=1)


@functools.cache
def cuda_fold() -> Fold | None:
    """Return the kernel, tested once; None without Triton, or if it cannot compile (it needs a C compiler)."""
    try:
        fold = triton_fold()
        _squares(fold, [torch.ones(3, device="cuda")], [(3,)])
    except ImportError:
        return None
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        log.warning("gradients' norms take longer on this device than they need to: Triton cannot compile (%s)", error)
        return None
    return fold


def triton_fold() -> Fold:
    """Return the kernel; raises ImportError without Triton."""
    import triton.language as tl

    from elastic_train.parallel.devices.squares_kernel import fold_squares

    types = dict(zip(_FOLDED, (tl.float32, tl.bfloat16, tl.float16, tl.float64), strict=True))

    def fold(places: Tensor, rows: Tensor, dtype: torch.dtype) -> None:
        with torch.cuda.device(places.device) if places.is_cuda else contextlib.nullcontext():
            # Squares are exact in float64 except a float64's, which a fused multiply-add would round later.
            fold_squares[(len(places),)](
                places, rows, width=_WIDTH, dtype=types[dtype], num_warps=8, enable_fp_fusion=False
            )

    return fold
