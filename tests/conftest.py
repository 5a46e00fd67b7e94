"""Fixtures for tests of several packages: a small real dataset, and trainer runs started as users start them."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings

from elastic_train.data.dataset.manifest import build_manifest
from rendezvous.etcd.server import free_ports
from rendezvous.process_table import environ_of as environ_of_process
from rendezvous.torchelastic import standby as standbys
from rendezvous.torchelastic.standby import ForkedWorker, Program, Standby

if TYPE_CHECKING:
    from chaos.services.freezing_disk import FreezingDisk
    from chaos.services.network.namespace import Cable

ROOT = Path(__file__).parent.parent
CLASSES = 4
START_TIMEOUT_S = 400.0
RANKS_TIMEOUT_S = 300.0
PATIENCE_S = 240.0
"""Seconds that a test waits for an expected event on a busy machine; no test checks how soon it happens."""
MOST_LOG_LINES = 30
MOST_UNSEEN = 50_000
"""The number of new objects after which the garbage collector runs."""
standbys.FORKS_WITHIN_S = PATIENCE_S  # later a node starts programs, not forks: too slow for tests
settings.register_profile("any machine", deadline=None)  # an example's duration says nothing about the property
settings.register_profile("inner-loop", deadline=None, max_examples=25)  # a quarter of the examples in `make test`
settings.load_profile("any machine")


MARK = re.compile(r"^pytestmark = \[?pytest\.mark\.(\w+)", re.MULTILINE)
"""The line that marks every test of a module, such as slow."""
FEW = ("hunt", "process")
"""Marks of few tests: modules without them are not collected for these."""
RUNNING: list[pytest.Item] = []
"""The running test, if there is one."""
UNFINISHED: dict[str, float] = {}
"""When each test that runs in any process was started, by its id, in seconds of the monotonic clock."""


def pytest_configure(config: pytest.Config) -> None:
    """Run the garbage collector rarely from the start: importing everything makes a million permanent objects.

    Where most tests run, each process forks its standby process before it has threads that use libraries: what both
    import is imported once.
    """
    terms = config.option.markexpr.split(" and ")
    if "PYTEST_XDIST_WORKER" in os.environ and "not deploy" in terms and "not slow" not in terms:
        import tests.preload  # noqa: F401

        standby()
    gc.set_threshold(MOST_UNSEEN)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # an interrupt ends a run also where it was started in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip modules of which no test runs, to save importing them and deselecting their tests."""
    if " or " in config.option.markexpr or collection_path.suffix != ".py":
        return None
    terms, text = config.option.markexpr.split(" and "), collection_path.read_text(encoding="utf-8")
    is_left_out = (mark := MARK.search(text)) is not None and f"not {mark[1]}" in terms
    return True if is_left_out or any(few in terms and f"mark.{few}" not in text for few in FEW) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run slow tests first when several processes share the tests: started last, one would delay the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not any(map(item.get_closest_marker, ("slow", "process"))))
    if getattr(config.option, "loadgroup", False):
        for item in items:
            name_group(item)


def name_group(item: pytest.Item) -> None:
    """Put a test's group into its id, where xdist looks for it: pytest 9.2 does not read where xdist 3.8 writes it."""
    group = item.get_closest_marker("xdist_group")
    if group is not None and not item.nodeid.endswith(f"@{group.args[0]}"):
        item._id = item.id.parse(f"{item.nodeid}@{group.args[0]}")


def pytest_collection_finish() -> None:
    """Run the garbage collector rarely, and exclude torch and the tests (a million permanent objects)."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Skip the five garbage collections at the end of pytest where several processes share the tests."""
    if getattr(session.config.option, "dist", "no") != "no" or "PYTEST_XDIST_WORKER" in os.environ:
        gc.freeze()


def pytest_runtest_logstart(nodeid: str) -> None:
    UNFINISHED[nodeid] = time.monotonic()


def pytest_runtest_logfinish(nodeid: str) -> None:
    UNFINISHED.pop(nodeid, None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that were running when the run was interrupted, such as by CI's time limit."""
    for nodeid, started in UNFINISHED.items():
        terminalreporter.write_line(f"NOT FINISHED {nodeid}, started {time.monotonic() - started:.0f} s ago")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    RUNNING[:] = [item]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of each log in a failed test's own folder: elsewhere, such as on CI, the folder is gone."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and folder is not None:
        for log in sorted(path for pattern in ("log", "*.log") for path in folder.rglob(pattern) if path.is_file()):
            lines = log.read_text(errors="replace").splitlines()[-MOST_LOG_LINES:]
            report.sections.append((f"end of {log.relative_to(folder)}", "\n".join(lines)))
    return report


def write_rows(folder: Path, num_rows: int, *, seed: int = 0, num_files: int = 3, group_rows: int = 17) -> Path:
    """Write tokenised rows of a learnable label with metadata, some of it missing, and their manifest."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, CLASSES, num_rows)
    tokens = [rng.integers(1 + 8 * kind, 12 + 8 * kind, rng.integers(3, 24)).astype(np.int32) for kind in label]
    size = rng.integers(0, 1000, num_rows).astype(np.float64)
    size[rng.random(num_rows) < 0.07] = np.nan
    kinds = np.array(["module", "class", "function", None], dtype=object)[rng.integers(0, 4, num_rows)]
    table = pa.table(
        {
            "input_ids": pa.array(tokens, pa.list_(pa.int32())),
            "size": pa.array(size, pa.float64(), from_pandas=True),
            "kind": pa.array(kinds, pa.string()),
            "label": pa.array(label, pa.int32()),
        }
    )
    folder.mkdir(parents=True)
    share = -(-num_rows // num_files)
    for number in range(num_files):
        pq.write_table(table.slice(number * share, share), folder / f"part-{number}.parquet", row_group_size=group_rows)
    build_manifest(str(folder), label_column="label")
    return folder


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training set of 331 rows (a prime) and a validation set of 101."""
    return write_sets(tmp_path_factory.mktemp("rows"), 331, 101)


def write_sets(folder: Path, num_train: int, num_validation: int) -> Path:
    """Write a training and a validation set into a folder, and return it."""
    write_rows(folder / "train", num_train, seed=1)
    write_rows(folder / "validation", num_validation, seed=2)
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FreezingDisk]:
    """A small file system, at `run` below the test's folder, that can be frozen; skips where none can be mounted."""
    from chaos.services.freezing_disk import freezing_disk
    from chaos.services.store_mount import NoMountError

    try:
        with freezing_disk(tmp_path / "run") as made:
            yield made
    except NoMountError as error:
        pytest.skip(str(error))


@pytest.fixture
def laid() -> Iterator[Cable]:
    """A cable to a network namespace; skips where none can be made."""
    from chaos.services.network.namespace import NoNamespacesError, cable

    try:
        with cable() as made:
            yield made
    except NoNamespacesError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Finished:
    """The outcome of a started command."""

    code: int
    output: str
    codes: tuple[int, ...] = ()
    """The exit codes of all ranks, if `start` started ranks."""


@dataclass(frozen=True)
class Printed:
    """A program's exit code and what it wrote to stdout and stderr."""

    returncode: int
    stdout: str
    stderr: str


def start(
    arguments: list[str], *, num_ranks: int | None = None, environ: dict[str, str] | None = None, timeout_s: float = 280
) -> Finished:
    """Run `python -m elastic_train ...` as one process, or as `num_ranks` ranks in the environment of a launcher.

    The processes are forked from one that has imported the trainer, which saves seconds for each. A PYTHONPATH in
    `environ` has no effect on them: the workers of a torchrun that `begin` starts have imported nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output"
        command = [sys.executable, "-m", "elastic_train", *arguments]
        ranks = [begin(command, log, {**place, **(environ or {})}) for place in places_of(num_ranks)]
        deadline = time.monotonic() + timeout_s
        try:
            codes = [rank.wait(max(0.0, deadline - time.monotonic())) for rank in ranks]
        finally:
            for rank in ranks:
                rank.close(signal.SIGKILL)
        return Finished(next((code for code in codes if code), 0), log.read_text(), tuple(codes))


def run(command: list[str], timeout_s: float = 280) -> Finished:
    """Start a command with `begin` and wait until it ends."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output"
        process = begin(command, log)
        try:
            code = process.wait(timeout_s)
        finally:
            process.close(signal.SIGKILL)
        return Finished(code, log.read_text())


def run_source(source: str, *arguments: str, cwd: Path = ROOT, timeout_s: float = 280) -> Printed:
    """Run a program's text as `python -c SOURCE ARGS…` does, in a fork of a process that has imported the trainer.

    Not for tests of a program's imports, standard input or exit.
    """
    with tempfile.TemporaryDirectory() as folder:
        text, out, err = (Path(folder) / name for name in ("source", "out", "err"))
        text.write_text(f"import os; os.chdir({str(cwd)!r})\n{source}")
        program = Program("tests.source_program", (str(text), *arguments))
        process = standby().start(program, environ_of(), str(out), str(err))
        try:
            code = process.wait(timeout_s)
        finally:
            process.close(signal.SIGKILL)
        return Printed(code, out.read_text(), err.read_text())


def begin(command: list[str], log: Path | None = None, environ: dict[str, str] | None = None) -> ForkedWorker:
    """Start `python -m MODULE …`, such as a node, and return it: a Popen that is a fork, as in `start`.

    A node's standby process is a fork of it in turn, so its workers have nothing to import either.
    """
    program = Program.of(command[1:])
    assert command[0] == sys.executable and program is not None, f"{command[0]} is no module of this Python"
    said = os.devnull if log is None else str(log)
    if log is not None and program.module == "torch.distributed.run":  # otherwise it leaves a folder in /tmp
        environ = {"PET_LOG_DIR": str(log.parent / "torchelastic"), **(environ or {})}
    return standby().start(program, environ_of(**(environ or {})), said, said)


@pytest.fixture(autouse=True)
def same_environ() -> Iterator[None]:
    """Undo what a launcher or a handler in this process has set for workers: those of another test would inherit it."""
    before = _of_workers()
    yield
    for name in _of_workers().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _of_workers() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("ELASTIC_", "GLOO_"))}


def environ_of(**own: str) -> dict[str, str]:
    """Return the environment of a user's process: without the variables that pytest and imported libraries have set.

    With pytest's variables, cyclopts would read the sources of all callers. With OpenMP's, which scikit-learn sets when
    imported, no node could fork its standby process: each would import the trainer anew (ten core-seconds).
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "KMP_"))}
    return {**inherited, "OMP_NUM_THREADS": "1", **own}


def assert_slow(started: str) -> None:
    """Fail a quick test that starts something slow; if it is started once, only the first test that needs it fails."""
    marks = {mark.name for item in RUNNING for mark in item.iter_markers()}
    assert not RUNNING or marks & {"slow", "process", "long", "deploy"}, (
        f"{RUNNING[0].nodeid} is to be a quick test, and starts {started}: mark it slow"
    )


@functools.cache
def standby() -> Standby:
    """Return the process that has imported the trainer; there is one per pytest process."""
    assert_slow("a process that imports the trainer")
    own = standbys.loaded_with(environ_of_process(os.getpid()))
    forks = "tests.preload" in sys.modules and own == standbys.loaded_with(environ_of())
    with contextlib.chdir(ROOT), mock.patch.object(standbys, "may_fork", lambda: True):  # xdist's thread waits
        made = Standby(forks=forks, environ=environ_of())
    made.preload("tests.preload")
    assert made.wait_until_ready(START_TIMEOUT_S), f"the trainer was not imported within {START_TIMEOUT_S:.0f} s"
    return made


def run_ranks(
    of_rank: Callable[..., None], size: int, *arguments: object, codes: Sequence[int | None] | None = None
) -> None:
    """Run `of_rank(rank, size, *arguments)` for each rank, in processes that are forked as in `start`.

    Their exit codes must be `codes`, all 0 by default. A rank whose code is None is lost: it is killed when the others
    have ended, since it may be frozen.
    """
    expected = codes or [0] * size
    with tempfile.TemporaryDirectory() as folder:
        log, what = Path(folder) / "output", Path(folder) / "what"
        what.write_bytes(pickle.dumps((of_rank, (size, *arguments))))
        ranks = [begin([sys.executable, "-m", "tests.rank_program", str(what), str(rank)], log) for rank in range(size)]
        try:
            found = [None if code is None else ranks[rank].wait(RANKS_TIMEOUT_S) for rank, code in enumerate(expected)]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error}, codes {[rank.poll() for rank in ranks]}\n{log.read_text()}") from None
        finally:
            for rank in ranks:
                rank.close(signal.SIGKILL)
        assert found == list(expected), f"codes {found}, not {expected}\n{log.read_text()}"


def eventually(
    fact: Callable[[], object], what: str = "what the test waits for", timeout_s: float = PATIENCE_S
) -> None:
    """Return as soon as `fact` holds; fail with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)


def no_thread(self: threading.Thread) -> None:
    """Stand in for `Thread.start` at the limit of threads."""
    raise RuntimeError("can't start new thread")


def places_of(num_ranks: int | None) -> list[dict[str, str]]:
    """Return the environment that a launcher gives each rank; an empty one without a launcher."""
    if num_ranks is None:
        return [{}]
    world = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
