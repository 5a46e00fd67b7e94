"""Each part of a machine, well and broken: what is broken is found, and the message has what was expected and found."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

import pytest
import torch
from torch import Tensor

from chaos.services.store_mount import NoMountError, run_as_root
from elastic_train.health import clock, examinations, precheck
from elastic_train.health.clock import examine_clock
from elastic_train.health.examinations import (
    MOST,
    PIECE,
    examine_memory,
    examine_products,
    known_product,
    or_its_error,
    own_cores,
)
from elastic_train.health.precheck import NUM_BYTES, anonymous_file, examine_folders
from elastic_train.health.result import Finding, Planned, examine_all, ok
from elastic_train.system.file_systems import Mount
from rendezvous import EtcdServer, etcd_options

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_machine_that_computes_rightly_has_the_known_bits_in_each_type(num_threads: int) -> None:
    """On every core that may be used, and afterwards the thread may go where it could before; or by two threads."""
    before, cores = torch.get_num_threads(), own_cores()
    torch.set_num_threads(num_threads)
    try:
        [finding] = examine_products(CPU, tuple(MOST), cores)
    finally:
        torch.set_num_threads(before)
    assert finding.level == "ok", finding
    assert (f"on {len(cores)} core" in finding.found) == (num_threads == 1)
    assert own_cores() == cores


@pytest.mark.parametrize("dtype", list(MOST))
def test_no_sum_of_a_known_product_is_rounded(dtype: torch.dtype) -> None:
    """The largest sum that there can be is held exactly, and so is the number before it."""
    most = torch.tensor(MOST[dtype] ** 2 * 256, dtype=torch.int64)
    assert [int(one.to(dtype)) for one in (most, most - 1)] == [int(most), int(most) - 1]


@pytest.mark.parametrize("dtype", list(MOST))
def test_a_wide_product_of_copies_is_known_too(dtype: torch.dtype) -> None:
    """The product of an accelerator that gets one element wrong."""
    known = known_product(dtype, CPU, tiles=3)
    assert known.product.shape == (384, 384)
    assert [known.wrong(shift) for shift in (0, 5, 400)] == [None, None, None]
    known.product[300, 200] += 1
    said = known.wrong(5)
    assert said is not None and said.startswith("1 element of 147456")


def test_a_core_that_computes_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one element, on the last core only: the message has the core, both values, and what to do."""
    rightly, last = Tensor.__matmul__, own_cores()[-1]

    def wrongly(left: Tensor, right: Tensor) -> Tensor:
        product = rightly(left, right)
        if product.dtype == torch.float32 and os.sched_getaffinity(0) == {last}:
            product[5, 7] += 1
        return product

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(Tensor, "__matmul__", wrongly)
    [finding] = examine_products(CPU, (torch.float64, torch.float32), own_cores())
    assert finding.level == "fail"
    assert f"core {last} computes wrongly: 1 element of 16384" in finding.found
    assert "float32" in finding.found and "vendor's diagnosis" in finding.remedy


def test_a_product_that_is_not_a_number_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN equals nothing, itself included."""
    rightly = Tensor.__matmul__

    def wrongly(left: Tensor, right: Tensor) -> Tensor:
        product = rightly(left, right)
        return torch.full_like(product, torch.nan) if product.dtype == torch.float32 else product

    monkeypatch.setattr(Tensor, "__matmul__", wrongly)
    [finding] = examine_products(CPU, (torch.float32,))
    assert finding.level == "fail" and "16384 elements" in finding.found and "is nan" in finding.found


def test_memory_that_keeps_its_bits_is_well() -> None:
    """All of it is filled; with no time, a piece."""
    [finding] = examine_memory(CPU, 3 * 8 * PIECE, budget_s=60.0)
    assert finding == Finding("memory", "ok", "12.6 MB of the memory keep what is written")
    [finding] = examine_memory(CPU, 3 * 8 * PIECE, budget_s=0.0)
    assert finding == Finding("memory", "ok", "4.19 MB of the memory keep what is written")
    [finding] = examine_memory(CPU, 1 << 20, budget_s=60.0)
    assert finding.level == "warn"


@pytest.mark.parametrize("stuck_at", [0, 1])
def test_a_bit_that_is_stuck_is_found_whatever_it_is_stuck_at(stuck_at: int) -> None:
    """The pattern or its complement differs from it."""

    def stick(words: Tensor) -> None:
        one = words[1, 11:12]
        one.bitwise_and_(~(1 << 40)) if stuck_at == 0 else one.bitwise_or_(1 << 40)

    [finding] = examine_memory(CPU, 2 * 8 * PIECE, budget_s=60.0, between=stick)
    assert finding.level == "fail" and "1 changed, 0x" in finding.found
    was, became = (int(text.strip(","), 16) for text in finding.found.split() if text.startswith("0x"))
    assert was ^ became == 1 << 40


def test_two_addresses_of_one_word_are_found() -> None:
    """Each word differs from all others."""

    def alias(words: Tensor) -> None:
        words[0, 3] = words[1, 3]

    [finding] = examine_memory(CPU, 2 * 8 * PIECE, budget_s=60.0, between=alias)
    assert finding.level == "fail"


def test_no_more_memory_is_taken_than_a_share_of_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of the control group counts, too, and workers of one node share."""
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1048576 kB\n")
    monkeypatch.setattr(examinations, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(examinations, "_CGROUP", tmp_path)
    assert examinations.room(CPU, 1) == int(0.05 * (1 << 30))
    (tmp_path / "memory.max").write_text(f"{300 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{290 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {90 << 20}\n")  # of files that were read
    assert examinations.room(CPU, 5) == (5 << 20) // 5
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "meminfo").write_text(f"MemAvailable: {1 << 30} kB\n")
    assert examinations.room(CPU, 4) == examinations.MOST_BYTES // 4
    (tmp_path / "meminfo").unlink()
    assert examinations.room(CPU, 1) == 0


def test_a_folder_that_keeps_what_is_written_is_well_and_stays_as_it_was(tmp_path: Path) -> None:
    """One that is not there yet is not made: the one that it will be in is examined, once."""
    findings = list(examine_folders([str(tmp_path / "run" / "data"), str(tmp_path)]))
    assert findings == [Finding("disk", "ok", f"{tmp_path} keeps what is written")]
    assert not list(tmp_path.iterdir())


class Disk(io.FileIO):
    """A file whose disk gives other bytes than it got, or an error, once they are synced."""

    spoilt: int | None = None
    error: int | None = None

    def read(self, size: int | None = -1) -> bytes:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        content = bytearray(super().read(size if size is not None else -1))
        if self.spoilt is not None:
            content[self.spoilt] ^= 1
        return bytes(content)


@pytest.mark.heavy
@pytest.mark.parametrize("at", [0, NUM_BYTES - 1])
def test_a_disk_that_gives_other_bytes_fails(tmp_path: Path, at: int) -> None:
    """The message has the folder, and where the first wrong byte is."""

    def opened(folder: Path) -> IO[bytes]:
        with anonymous_file(folder) as file:
            disk = Disk(os.dup(file.fileno()), "r+b")
        disk.spoilt = at
        return disk  # type: ignore[return-value]

    [finding] = examine_folders([str(tmp_path)], opened)
    assert finding.level == "fail" and f"right up to {at}" in finding.found and str(tmp_path) in finding.found


@pytest.mark.parametrize(("number", "level"), [(5, "fail"), (117, "fail"), (30, "warn"), (116, "warn")])
def test_errors_of_a_local_device_fail_and_what_training_copes_with_is_told(
    tmp_path: Path, number: int, level: str
) -> None:
    """EIO and EUCLEAN are a disk's; EROFS and ESTALE are not proof of one."""

    def opened(folder: Path) -> IO[bytes]:
        with anonymous_file(folder) as file:
            disk = Disk(os.dup(file.fileno()), "r+b")
        disk.error = number
        return disk  # type: ignore[return-value]

    [finding] = examine_folders([str(tmp_path)], opened)
    assert (finding.level, os.strerror(number) in finding.found) == (level, True)


@pytest.mark.parametrize(("number", "level"), [(13, "warn"), (107, "warn"), (116, "warn"), (5, "fail")])
def test_a_folder_that_cannot_be_looked_at_is_told_like_one_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, level: str
) -> None:
    """EACCES, and ENOTCONN and ESTALE of a server that is away, kept a fit node out; other folders are examined."""
    away, is_dir = tmp_path / "away", Path.is_dir

    def refused(self: Path) -> bool:
        if self == away:
            raise OSError(number, os.strerror(number))
        return is_dir(self)

    monkeypatch.setattr(Path, "is_dir", refused)
    monkeypatch.setattr(precheck, "mount_of", lambda path: Mount("/", "ext4", frozenset()))
    first, second = examine_folders([str(away), str(tmp_path)])
    assert (first.level, second.level) == (level, "ok")
    assert str(away) in first.found and os.strerror(number) in first.found


def test_an_error_on_a_network_mount_is_no_proof_against_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may be what fails, for all nodes alike."""

    def refused(folder: Path) -> IO[bytes]:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(precheck, "mount_of", lambda path: None)
    [finding] = examine_folders([str(tmp_path)], refused)
    assert finding.level == "warn"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        run_as_root("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder))
    except NoMountError as error:
        pytest.skip(str(error))
    yield folder
    run_as_root("umount", str(folder))


def test_a_full_disk_is_told_with_its_folder(small: Path) -> None:
    """A real one: training copes with it, and the node is let in."""
    [finding] = examine_folders([str(small)])
    assert finding.level == "warn"
    assert finding.found == f"{small}: a file of 2.1 MB cannot be written and read: No space left on device"
    assert not list(small.iterdir())


@pytest.mark.slow
def test_the_clock_is_compared_with_etcds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is far ahead is told; where nobody says what time it is, that is not held against this machine."""
    with EtcdServer() as server:
        options = etcd_options(server.endpoint)
        [finding] = examine_clock(options)
        assert finding.level == "ok", finding
        now = clock.time.time
        with contextlib.ExitStack() as undo:
            patched = undo.enter_context(monkeypatch.context())
            patched.setattr(clock.time, "time", lambda: now() + 60.0)
            [finding] = examine_clock(options)
        assert finding.level == "warn" and "s ahead of etcd's" in finding.found
    [finding] = examine_clock(options)
    assert finding.level == "ok" and "not known" in finding.found


def test_an_error_of_a_device_itself_makes_it_unfit_and_another_proves_nothing() -> None:
    """As of a GPU whose memory is broken, or whose memory is all taken."""
    device = torch.device("cuda", 0)

    def broken() -> Iterator[Finding]:
        yield ok("memory", "a part of it")
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    def taken() -> Iterator[Finding]:
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    both = {"memory": broken, "products": taken}
    planned = {
        name: Planned(partial(or_its_error, device, name, one), "look", 60.0, late="warn") for name, one in both.items()
    }
    before, unfit, unknown = examine_all(planned)
    assert (before.level, unfit.level, unknown.level) == ("ok", "fail", "warn")
    assert unfit.found == "cuda:0 fails: CUDA error: uncorrectable ECC error encountered"
    assert unknown.found == "OutOfMemoryError: CUDA out of memory"
