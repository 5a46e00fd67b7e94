"""Data on a store that does not answer: its SDK's errors are reported like any other failure, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import EndpointConnectionError, NoCredentialsError
from fsspec.implementations.memory import MemoryFileSystem

from elastic_train.cli.main import main
from elastic_train.core.order import Cursor, Order
from elastic_train.data.dataset.describe import describe
from elastic_train.data.dataset.manifest import build_manifest, load_manifest
from elastic_train.data.dataset.verify import verify
from elastic_train.data.loading import reader
from elastic_train.data.loading.lane_batch import BatchBuilder, SampleRules
from elastic_train.data.loading.reader import Reader
from elastic_train.data.parquet import sources
from elastic_train.data.parquet.footer import NAME as FOOTERS
from elastic_train.data.parquet.sources import RemoteSource, open_source
from elastic_train.errors import AwayError, DataError

URL = "silent://rows"
ERRORS = [NoCredentialsError(), EndpointConnectionError(endpoint_url="http://127.0.0.1:9")]


class Silent(MemoryFileSystem):  # type: ignore[misc]
    """Files in memory; while there is an `error`, every call that reads raises it, as s3fs does."""

    protocol = "silent"
    store: dict[str, Any] = {}  # noqa: RUF012 - of this class, not of every memory:// file
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    error: Exception | None = None
    num_calls = 0

    def _answer(self) -> None:
        Silent.num_calls += 1
        if self.error is not None:
            raise self.error

    def _open(self, path: str, mode: str = "rb", **options: object) -> Any:
        self._answer()
        return super()._open(path, mode, **options)

    def info(self, path: str, **options: object) -> Any:
        self._answer()
        return super().info(path, **options)

    def exists(self, path: str, **options: object) -> bool:
        self._answer()
        return bool(super().exists(path, **options))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> bytes:
        self._answer()
        return bytes(super().cat_file(path, start, end))


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Silent]]:
    """A dataset of 20 rows in two row groups, on a store that still answers; retries do not wait."""
    fsspec.register_implementation("silent", Silent, clobber=True)
    monkeypatch.setattr(sources._again, "wait", lambda _: 0.0)
    monkeypatch.setattr(reader._again, "wait", lambda _: 0.0)
    with fsspec.open(f"{URL}/a.parquet", "wb") as file:
        pq.write_table(pa.table({"a": range(20)}), file, row_group_size=10)
    build_manifest(URL)
    yield Silent
    Silent.error = None
    Silent.store.clear()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_store_that_cannot_be_reached_is_refused_by_name(silent: type[Silent], error: Exception) -> None:
    """No credentials, or a wrong endpoint: the message has the address, what the SDK says, and what to check."""
    silent.error = error
    with pytest.raises(DataError) as raised:
        load_manifest(URL)
    assert str(raised.value) == (
        f"{URL}/manifest.json: cannot be reached: {error}; check the address, and the store's credentials and endpoint"
    )


def test_a_url_that_fsspec_cannot_open_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address whose package is not installed, or whose protocol nobody knows, says so."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # whether it is installed here or not
    with pytest.raises(DataError, match=r"gs://x/manifest\.json: cannot be opened: .*install gcsfs"):
        load_manifest("gs://x")
    with pytest.raises(DataError, match=r"nosuch://x/manifest\.json: cannot be opened: Protocol not known"):
        load_manifest("nosuch://x")


@pytest.mark.parametrize(
    "arguments", [["describe", URL], ["verify", URL], ["verify", URL, "--add-lengths", "input_ids"], ["synth", URL]]
)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_commands_end_with_65_and_no_traceback(
    silent: type[Silent], capsys: pytest.CaptureFixture[str], arguments: list[str], error: Exception
) -> None:
    """Every command that is given the address of such data says what is wrong with it."""
    silent.error = error
    with pytest.raises(SystemExit) as ended:
        main(["data", *arguments])
    assert ended.value.code == DataError.exit_code
    assert f"error: {URL}: cannot be reached: {error}" in capsys.readouterr().err


def test_commands_refuse_an_unknown_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped protocol is an error in one line, too."""
    with pytest.raises(SystemExit) as ended:
        main(["data", "describe", "nosuch://x"])
    assert ended.value.code == DataError.exit_code
    assert "error: nosuch://x: cannot be opened: Protocol not known" in capsys.readouterr().err


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_source_raises_oserror_after_its_retries(silent: type[Silent], error: Exception) -> None:
    """Sizes and ranges raise what the protocol of sources promises, when it was tried so often."""
    remote = open_source(URL)
    assert isinstance(remote, RemoteSource)
    silent.error = error
    for act in (lambda: remote.size("a.parquet"), lambda: remote.read("a.parquet", 0, 4)):
        silent.num_calls = 0
        with pytest.raises(OSError, match=str(error)) as raised:
            act()
        assert raised.value.__cause__ is error
        assert silent.num_calls == sources.TRIES


@pytest.mark.parametrize("has_footers", [True, False], ids=["with footers", "without"])
@pytest.mark.parametrize("is_at_first", [True, False], ids=["from the first call on", "later"])
def test_a_row_group_on_a_silent_store_is_away_not_lost(
    silent: type[Silent], has_footers: bool, is_at_first: bool
) -> None:
    """It is retried, and no sample of it is left out, also under quarantine; when the store answers, it is read."""
    if not has_footers:
        del silent.store[next(key for key in silent.store if key.endswith(FOOTERS))]
    manifest = load_manifest(URL)
    rows = Reader(manifest, ["a"])
    if not is_at_first:
        rows.decode(0)
    silent.error = ERRORS[1]
    with pytest.raises(AwayError, match=r"storage of the data is away: silent://rows/manifest.json: cannot be reached"):
        rows.decode(1)
    order = Order(manifest.group_rows, num_lanes=1, seed=1, is_shuffled=False)
    builder = BatchBuilder(rows.first_id, 20, lambda rows, ids: {}, SampleRules(quarantines=True), seed=0)
    with pytest.raises(AwayError):
        builder.take(0, Cursor(), 0, order.samples(Cursor(0, 10), 0, 10), rows.decode)
    silent.error = None
    assert rows.decode(1).num_rows == 10


def test_a_store_that_goes_silent_is_reported_file_by_file(silent: type[Silent]) -> None:
    """Verify reports each file that stops answering after the manifest was read; describe ends with an error."""
    manifest = load_manifest(URL)
    silent.error = ERRORS[1]
    assert [verdict.wrong for verdict in verify(manifest)] == [f"cannot be read: {ERRORS[1]}", None]
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read \(Could not connect"):
        describe(manifest)
