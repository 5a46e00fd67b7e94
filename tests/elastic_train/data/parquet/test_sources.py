"""Near ranges are read as one, failures are retried, and late ranges are requested twice."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.data.parquet import sources
from elastic_train.data.parquet.sources import RemoteSource, join_near
from tests.conftest import PATIENCE_S

CONTENT = bytes(range(256)) * 8
RANGES = [(0, 10), (900, 1000), (1000, 1100), (2000, 2048)]


class Troubled(MemoryFileSystem):  # type: ignore[misc]
    """Files in memory whose ranges fail, or wait, the first so many times."""

    failing: Counter[int] = Counter()  # noqa: RUF012
    waiting: Counter[int] = Counter()  # noqa: RUF012
    go_on = threading.Event()
    calls: list[tuple[int, int]] = []  # noqa: RUF012

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> bytes:
        assert start is not None and end is not None
        self.calls.append((start, end))
        if self.failing[start]:
            self.failing[start] -= 1
            raise ConnectionError("reset by peer")
        if self.waiting[start]:
            self.waiting[start] -= 1
            assert self.go_on.wait(PATIENCE_S)
        return bytes(super().cat_file(path, start, end))


@pytest.fixture
def troubled(monkeypatch: pytest.MonkeyPatch) -> RemoteSource:
    """A file of 2,048 bytes; what fails is tried again at once, and what is late is not asked for twice."""
    monkeypatch.setattr(sources, "SOONEST_HEDGE_S", 1e6)
    monkeypatch.setattr(sources._again, "wait", lambda _: 0.0)
    Troubled.failing.clear()
    Troubled.waiting.clear()
    Troubled.go_on.clear()
    Troubled.calls.clear()
    filesystem = Troubled(skip_instance_cache=True)
    filesystem.pipe_file("/troubled/a", CONTENT)
    return RemoteSource(filesystem, "/troubled")


def read_all(file: Any) -> bytes:
    """Read all ranges of an open file, as pyarrow would."""
    parts = []
    for lo, hi in RANGES:
        file.seek(lo)
        parts.append(file.read(hi - lo))
    return b"".join(parts)


WANTED = b"".join(CONTENT[lo:hi] for lo, hi in RANGES)


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 60)), max_size=12), st.integers(0, 40))
def test_joined_ranges_hold_all_and_stay_apart(starts: list[tuple[int, int]], max_gap: int) -> None:
    """Every range is in exactly one joined one; joined ones are further apart than the gap, and minimal."""
    ranges = [(lo, lo + size) for lo, size in starts]
    joined = join_near(ranges, max_gap)
    for lo, hi in ranges:
        assert sum(first <= lo and hi <= end for first, end in joined) == 1
    assert all(later[0] - earlier[1] > max_gap for earlier, later in itertools.pairwise(joined))
    assert {lo for lo, _ in joined} <= {lo for lo, _ in ranges}
    assert {hi for _, hi in joined} <= {hi for _, hi in ranges}


def test_only_the_requested_ranges_are_available(troubled: RemoteSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near ranges take one request; bytes that were not asked for cannot be read."""
    monkeypatch.setattr(sources, "MAX_GAP", 0)
    monkeypatch.setattr(join_near, "__defaults__", (0,))
    file = troubled.open("a", RANGES)
    assert read_all(file) == WANTED
    assert sorted(troubled._filesystem.calls) == [(0, 10), (900, 1100), (2000, 2048)]
    file.seek(500)
    with pytest.raises(OSError, match=r"bytes \[500, 510\) were not fetched"):
        file.read(10)


def test_failures_are_retried_a_bounded_number_of_times(troubled: RemoteSource) -> None:
    """A range that fails four times is read, one that fails for ever raises what the file system said."""
    Troubled.failing[0] = sources.TRIES - 1
    assert read_all(troubled.open("a", RANGES)) == WANTED
    Troubled.failing[0] = 1000
    with pytest.raises(ConnectionError, match="reset by peer"):
        troubled.open("a", RANGES)


def test_a_missing_file_is_not_retried(troubled: RemoteSource) -> None:
    """There is no retry, and no wait, for a missing file."""
    with pytest.raises(FileNotFoundError):
        troubled.read("b", 0, 10)
    assert len(Troubled.calls) == 1


def test_a_late_range_is_requested_twice(troubled: RemoteSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that does not come back is overtaken by a second one, once others of the first ones came."""
    monkeypatch.setattr(sources, "SOONEST_HEDGE_S", 0.01)
    monkeypatch.setattr(sources, "LONGEST_PAUSE_S", 1e6)
    monkeypatch.setattr(join_near, "__defaults__", (0,))
    Troubled.waiting[0] = 1
    try:
        assert read_all(troubled.open("a", RANGES)) == WANTED
        assert Counter(Troubled.calls).most_common(1)[0][1] == 2
    finally:
        Troubled.go_on.set()


def test_a_uniformly_slow_store_gets_no_second_requests(
    troubled: RemoteSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is slow as a whole gets no second requests beyond those that were saved; all ranges come."""
    monkeypatch.setattr(sources, "SOONEST_HEDGE_S", 0.001)
    troubled._took_s.append(0.001)
    troubled._hedges_left = 2.0 - 4 * sources.HEDGED_SHARE
    looks = threading.Semaphore(0)
    may_hedge = troubled._may_hedge

    def looked() -> bool:
        looks.release()
        return may_hedge()

    monkeypatch.setattr(troubled, "_may_hedge", looked)
    Troubled.waiting.update(dict.fromkeys((0, 500, 1000, 1500), 5))
    monkeypatch.setattr(join_near, "__defaults__", (0,))
    parts = [[(lo, lo + 10)] for lo in (0, 500, 1000, 1500)]
    with ThreadPoolExecutor(4) as pool:
        files = [pool.submit(troubled.open, "a", ranges) for ranges in parts]
        for _ in range(40):
            looks.acquire()
        Troubled.go_on.set()
        assert [file.result()._parts[ranges[0]] for file, ranges in zip(files, parts, strict=True)] == [
            CONTENT[lo:hi] for ((lo, hi),) in parts
        ]
    assert len(Troubled.calls) == 4 + 2


@pytest.mark.parametrize("is_again", [False, True])
def test_local_ranges_are_read_as_they_are(tmp_path: Any, is_again: bool) -> None:
    """A local source reads the ranges that it is asked for and no gap, each to the file's end at most."""
    (tmp_path / "a").write_bytes(CONTENT)
    local = sources.open_source(str(tmp_path))
    file = local.open("a", [(0, 10), (10, 20), (30, 40), (2040, 3000)], is_again=is_again)
    assert (bytes(file.part(5, 15)), bytes(file.part(30, 40))) == (CONTENT[5:15], CONTENT[30:40])
    assert bytes(file.part(2040, 3000)) == CONTENT[2040:]
    with pytest.raises(OSError, match=r"bytes \[15, 35\) were not fetched"):
        file.part(15, 35)
    assert (local.size("a"), local.read("a", 2040, 4000)) == (2048, CONTENT[2040:])
    assert isinstance(sources.open_source("memory://x"), RemoteSource)
