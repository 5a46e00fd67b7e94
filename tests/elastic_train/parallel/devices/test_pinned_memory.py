"""Memory that devices copy to, with a fake driver; and the kernel that squares gradients, which reads by address."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.parallel.devices import host_memory, squares
from elastic_train.parallel.devices.host_memory import pinned
from elastic_train.parallel.devices.squares import grain_squares, lengths_of, squares_of_tensors, squares_of_vectors
from elastic_train.placement.grains import GRAIN, cut_along

DEVICE = torch.device("cuda", 1)


class FakeDriver:
    """Records which memory is registered, and on which device; its calls return `status`."""

    def __init__(self) -> None:
        self.status, self.current = 0, torch.device("cuda", 0)
        self.registered: dict[int, int] = {}
        self.devices: list[torch.device] = []

    def cudaHostRegister(self, start: int, num_bytes: int, flags: int) -> int:
        self.devices.append(self.current)
        self.registered |= {} if self.status else {start: num_bytes}
        return self.status

    def cudaHostUnregister(self, start: int) -> int:
        self.devices.append(self.current)
        del self.registered[start]
        return 0

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", driver.device)
    monkeypatch.setattr(host_memory, "_LEAST_SHARE", 100)
    return driver


@pytest.mark.heavy
@pytest.mark.parametrize("num_bytes", [1, 100, 101, 1001])
def test_memory_is_zeroed_and_pinned_until_nothing_uses_it(driver: FakeDriver, num_bytes: int) -> None:
    """The memory's own device is current: otherwise the thread would allocate memory on another one."""
    memory = pinned(num_bytes, DEVICE)
    assert torch.equal(memory, torch.zeros(num_bytes, dtype=torch.uint8))
    view = memory[:1]
    assert driver.registered == {memory.data_ptr(): num_bytes}
    del memory
    gc.collect()
    assert len(driver.registered) == 1, "a view still uses it"
    del view
    gc.collect()
    assert not driver.registered and driver.devices == [DEVICE, DEVICE]


@pytest.mark.heavy
def test_nothing_is_not_pinned_and_a_refusal_is_a_lack_of_memory(driver: FakeDriver) -> None:
    assert pinned(0, DEVICE).numel() == 0 and not driver.devices
    driver.status = 2
    with pytest.raises(MemoryError, match=r"300 bytes of host memory cannot be pinned \(CUDA's error 2\)"):
        pinned(300, DEVICE)
    gc.collect()
    assert driver.devices == [DEVICE], "what was not registered is not given back"


TYPES = (torch.float32, torch.bfloat16, torch.float64)
WIDTH = 256


def fold(places: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> None:
    """Sum the squares of each grain into a row, as the kernel does, from its address and length alone."""
    for row, (address, numel) in zip(rows, places.tolist(), strict=True):
        memory = (ctypes.c_byte * (numel * dtype.itemsize)).from_address(address)
        values = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8).copy()).view(dtype).double()
        table = torch.zeros(GRAIN, dtype=torch.float64)
        table[:numel] = values
        table = (table * table).view(GRAIN // WIDTH, WIDTH)
        while len(table) > 1:
            table = table[: len(table) // 2] + table[len(table) // 2 :]
        row.copy_(table[0])


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 3, 255, 257, 30_000, GRAIN, GRAIN + 1, 2 * GRAIN]), st.sampled_from(TYPES)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 3),
)
def test_a_kernel_gets_each_grain_and_its_square_the_place_of_the_grain(
    tensors: list[tuple[int, torch.dtype]], seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(numel, generator=draw, dtype=torch.float64).to(dtype) for numel, dtype in tensors]
    filled = [tensor for tensor in drawn if tensor.numel()]
    if not filled:
        return
    lengths = [lengths_of(tuple(tensor.shape), None) for tensor in filled]
    grains = [grain for tensor, sizes in zip(filled, lengths, strict=True) for grain in tensor.split(list(sizes))]
    expected = torch.cat([grain_squares([grain], [(grain.numel(),)]) for grain in grains])
    assert torch.equal(squares._squares(fold, filled, lengths), expected)
    assert torch.equal(squares_of_tensors((tensor, None) for tensor in drawn), expected)


def test_many_grains_are_folded_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squares, "_BLOCK", 2)
    grains = list(torch.randn(5, 1000, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(squares._squares(fold, grains, [(1000,)] * 5), squares_of_vectors(grains, [(1000,)] * 5))


def test_a_kernel_gets_the_grains_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets a matrix with cut columns from a copy in memory order."""
    monkeypatch.setattr(squares, "_fold_of", lambda tensors: fold)
    values, cut = torch.randn(30, 40, generator=torch.Generator().manual_seed(1)), cut_along((30, 40), 1)
    found = squares_of_tensors([(values, cut)])
    assert found.tolist() == [float(grain_squares([column], [(30,)])) for column in values.t()]


def test_nothing_has_no_squares() -> None:
    assert squares_of_tensors([(torch.empty(0), None)]).tolist() == squares_of_vectors([], []).tolist() == []
