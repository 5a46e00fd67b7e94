"""The memory of summands that were added is reused, whatever the unit, and the amount kept is bounded."""

from __future__ import annotations

import torch

from elastic_train.parallel.leaves import BufferPool


def test_memory_is_used_again_for_what_fits_into_it() -> None:
    spare = BufferPool(2)
    first = spare.take(torch.empty(8), torch.float32)
    spare.give_back(first)
    smaller = spare.take(torch.empty(5), torch.float32)
    assert smaller.data_ptr() == first.data_ptr() and smaller.shape == (5,)
    spare.give_back(smaller)  # all of it can be kept
    assert spare.take(torch.empty(8), torch.float32).data_ptr() == first.data_ptr()


def test_memory_of_another_kind_or_size_is_fresh() -> None:
    spare = BufferPool(2)
    kept = [torch.empty(8), torch.empty(8, dtype=torch.float64), torch.empty(64)]
    for memory in kept:
        spare.give_back(memory)
    assert spare.take(torch.empty(64), torch.float32).data_ptr() != kept[2].data_ptr(), "two are kept"
    assert spare.take(torch.empty(8), torch.float64).data_ptr() == kept[1].data_ptr()
    spare.clear()
    assert spare.take(torch.empty(8), torch.float32).data_ptr() != kept[0].data_ptr()
