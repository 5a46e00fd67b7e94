"""The GPU benchmark: the sizes it knows, the device's peak, and where it writes its figures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console

from benchmarks.gpu import limits
from benchmarks.gpu.__main__ import BEGIN, END, write
from benchmarks.gpu.faults import KINDS, faults
from benchmarks.gpu.job import GIB, SIZES, size_for
from benchmarks.gpu.limits import Limit, OutOfTimeError, job_folder, nothing_left
from benchmarks.gpu.measure import memory_of_worlds
from benchmarks.gpu.parts import PARTS, TESTS_END_S, Machine, Part, measure, peak_flops, run_tests
from elastic_train.tasks.decoder.model import Decoder
from rendezvous.process_table import is_alive
from tests.conftest import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("memory", "size"), [(80 * GIB, "1b"), (24 * GIB, "300m"), (8 * GIB, "100m")])
def test_the_largest_model_that_fits_is_measured(memory: int, size: str) -> None:
    assert size_for(memory) == size


def test_flops_are_those_of_the_formula() -> None:
    """Of the decoder itself, counted by hand: two products forward, four backward, for each weight and token."""
    size = SIZES["tiny"]
    num_weights = sum(parameter.numel() for parameter in Decoder(size.shape).parameters())
    assert size.num_parameters == num_weights
    assert size.flops_per_token == 6 * num_weights + 12 * 2 * 64 * 64


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("Other", None),
    ],
)
def test_peaks_are_known_by_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_figures_are_written_as_they_come_where_the_documentation_has_marks(tmp_path: Path) -> None:
    """Those of the same device that were not measured again stay, with their day; those of another device go."""
    page = tmp_path / "doc.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page, {"mfu_compiled": 0.4}, "a device")
    page.write_text(re.sub(r"\d{4}-\d\d-\d\d", "2026-01-02", page.read_text()))
    write(page, {"fast_vs_plain": 0.98}, "a device")
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert "| `mfu_compiled` | 0.4 | ≥ 0.5 | 2026-01-02 |" in text and f"torch {torch.__version__}" in text
    assert "| `fast_vs_plain` | 0.98 | ≥ 0.99 | 20" in text
    write(page, {"fast_vs_plain": 0.99}, "another device")
    assert "mfu_compiled" not in page.read_text()


def test_the_figures_in_the_documentation_can_be_added_to(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text((ROOT / "docs/benchmarks.md").read_text())
    rows = page.read_text().partition(BEGIN)[2].partition(END)[0].count("| `")
    write(page, {"killed_worker_s": 0.5}, "NVIDIA H200")
    assert page.read_text().partition(BEGIN)[2].partition(END)[0].count("| `") == rows + 1


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.md").write_text("no marks")
    with pytest.raises(SystemExit, match="has no <!-- gpu -->"):
        write(tmp_path / "none.md", {}, "a device")


class Clock:
    """A clock that parts advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


MACHINE = Machine("tiny", "tiny", "cpu", is_quick=True)
Act = Callable[[Clock, Limit], Iterator[Mapping[str, object]]]


def measured(within_s: float, **acts: Act) -> tuple[list[str], list[Mapping[str, object]], Clock]:
    """Measure parts that last as they say and start nothing; return what is missing, the figures, and the clock."""
    clock, noted = Clock(), list[Mapping[str, object]]()
    parts = {name: Part(lambda _, limit, act=act: act(clock, limit), 10.0) for name, act in acts.items()}
    with mock.patch.dict(PARTS, parts, clear=True), mock.patch.object(limits, "children_of", lambda _: []):
        missing = measure(MACHINE, list(acts), within_s, Console(stderr=True), noted.append, clock)
    return missing, noted, clock


def lasting(seconds: float, *figures: str) -> Act:
    """Return a part that yields each of the figures after some seconds, and is killed at its limit."""

    def act(clock: Clock, limit: Limit) -> Iterator[Mapping[str, object]]:
        for figure in figures:
            if limit.left_s < seconds:
                clock.now = limit.at
                raise OutOfTimeError(f"{figure} was killed at its limit")
            clock.now += seconds
            yield {figure: seconds}

    return act


def fails(clock: Clock, limit: Limit) -> Iterator[Mapping[str, object]]:
    yield {"before": 1}
    raise KeyError("none")


def leaves(clock: Clock, limit: Limit) -> Iterator[Mapping[str, object]]:
    raise SystemExit("no etcd")
    yield {}


def fits(clock: Clock, limit: Limit) -> Iterator[Mapping[str, object]]:
    """Take turns until the limit is near."""
    while not limit.is_near():
        clock.now += 1.0
    yield {"turns": clock.now}


def test_a_part_that_fails_is_named_and_the_others_are_measured() -> None:
    """Its figures until then are kept."""
    missing, noted, _ = measured(600.0, first=fails, second=leaves, third=lasting(1.0, "third"))
    assert missing == ["first: KeyError: 'none'", "second: SystemExit: no etcd"]
    assert noted == [{"before": 1}, {"third": 1.0}]


def test_a_part_ends_at_its_limit_with_what_it_has() -> None:
    """It may take twice its share, here of a third, of the time left, and leaves a fifth if others follow."""
    missing, noted, clock = measured(
        90.0, slow=lasting(25.0, "one", "two", "three"), patient=fits, last=lasting(2.0, "last")
    )
    assert missing == ["slow: three was killed at its limit", "patient: ended at its limit, with what it had"]
    assert [list(figures) for figures in noted] == [["one"], ["two"], ["turns"], ["last"]]
    assert clock.now == 1000.0 + 60.0 + 20.0 + 2.0


@pytest.mark.parametrize("names", [list(PARTS), list(PARTS)[::-1], list(PARTS)[4:7]])
def test_all_parts_end_within_the_time_however_long_each_would_take(names: list[str]) -> None:
    missing, _, clock = measured(520.0, **{name: lasting(1e6, name) for name in names})
    assert clock.now <= 1520.0 and len(missing) == len(names)
    missing, noted, clock = measured(520.0, **{name: lasting(1.0, name) for name in names})
    assert len(noted) == len(names) and clock.now == 1000.0 + len(names)


def test_a_part_alone_has_all_the_time() -> None:
    assert measured(520.0, one=lasting(500.0, "one"))[1] == [{"one": 500.0}]


def answering(limit: Limit, /, number: int) -> int:
    return number + 1


def failing(limit: Limit, /) -> None:
    raise KeyError("none")


def dying(limit: Limit, /) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def endless(limit: Limit, /, said: str) -> None:
    """Start a process whose parent has ended, tell its number, and sleep."""
    with job_folder(0) as folder:
        text = "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=-3, start_new_session=True).pid)"
        found = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, check=True).stdout.decode()
        Path(said).write_text(f"{found.strip()} {folder} .")
        time.sleep(1000)


def is_said(said: Path) -> float:
    """A clock that jumps once a file has been written."""
    return float(said.exists() and said.read_text().endswith("."))


@pytest.mark.process
def test_a_measurement_is_killed_at_its_limit_with_all_that_it_has_started(tmp_path: Path) -> None:
    with pytest.raises(OutOfTimeError, match="endless was killed at its limit"):
        Limit(1.0, partial(is_said, tmp_path / "said")).run(endless, str(tmp_path / "said"))
    pid, folder, _ = (tmp_path / "said").read_text().split()
    assert not is_alive(int(pid)) and not Path(folder).exists()


@pytest.mark.process
def test_tests_are_interrupted_before_the_limit_and_those_that_ran_are_counted(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pathlib, time\n"
        "def test_first(): pass\n"
        "def test_second(): assert False\n"
        f"def test_third(): pathlib.Path({str(tmp_path / 'said')!r}).write_text('.'); time.sleep(1000)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", f"--junitxml={tmp_path / 'report.xml'}", str(tmp_path)]
    limit = Limit(TESTS_END_S + 0.5, partial(is_said, tmp_path / "said"))
    noted = list[Mapping[str, object]]()
    with nothing_left(), pytest.raises(OutOfTimeError, match="interrupted"):
        noted.extend(run_tests(command, os.environ, tmp_path / "report.xml", limit))
    assert noted == [{"tests_passed": 1, "tests_failed": 1}]


@pytest.mark.process
@pytest.mark.hunt
def test_a_rank_that_is_lost_beside_another_on_one_device_costs_no_step() -> None:
    """Killed, stopped and out of memory, once each, as on a GPU, with a device that stands in for it."""
    found = {name: value for each in faults(Limit(time.monotonic() + 600.0), "cpu", 1) for name, value in each.items()}
    assert all(found.pop(f"{name}_s") for name in KINDS.values()), found
    assert found == {
        **{f"{name}_times": "1 of 1" for name in KINDS.values()},
        "faults_missed": 0,
        "faults_steps_lost": 0,
        "faults_survivor_kept_its_process": True,
        "faults_hash_equal": True,
    }


@pytest.mark.process
def test_worlds_that_end_in_an_operation_are_all_formed() -> None:
    assert Limit(time.monotonic() + PATIENCE_S).run(memory_of_worlds, "cpu", 3)["worlds"] == 3


@pytest.mark.process
def test_a_measurement_that_fails_says_why() -> None:
    limit = Limit(time.monotonic() + PATIENCE_S)
    assert limit.run(answering, 1) == 2
    with pytest.raises(RuntimeError, match="failing: KeyError: 'none'"):
        limit.run(failing)
    with pytest.raises(RuntimeError, match="dying: its process has died"):
        limit.run(dying)
