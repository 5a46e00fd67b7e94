"""Progress is a line now and then, in place on a terminal, and the last status at the end."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from rich.console import Console

from elastic_train.tracking.progress import LINE_EVERY_S, Progress, ResumeBanner, Status


@dataclass
class Clock:
    """Time that tests move."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def status(step: int, **changes: object) -> Status:
    facts: dict[str, object] = {
        "step": step,
        "total_steps": 100,
        "loss": 0.25,
        "samples_per_s": 1000.0,
        "world": 4,
        "last_commit_step": 50,
        "epochs": step / 60,
        "total_epochs": 2,
    }
    return Status(**{**facts, **changes})  # type: ignore[arg-type]


def console(*, is_terminal: bool) -> tuple[Console, Callable[[], str]]:
    file = io.StringIO()
    return Console(file=file, force_terminal=is_terminal, width=200, soft_wrap=True), file.getvalue


BANNER = ResumeBanner(
    commit="commits/00000012",
    step=12,
    age_s=3.0,
    steps_lost=4,
    world_before=4,
    world_after=3,
    term_before=6,
    term_after=7,
    detect_s=1.25,
    form_s=None,
    restore_s=0.5,
    skipped=(("commits/[13]", "torn"),),
)


def test_plain_output_is_at_most_a_line_every_two_seconds_and_the_last_status() -> None:
    """Statuses between are not shown, but the last one always is, once."""
    clock, (out, text) = Clock(), console(is_terminal=False)
    progress = Progress(out, clock)
    for step in range(1, 51):
        progress.update(status(step))
        clock.now += LINE_EVERY_S / 20
    progress.close()
    progress.close()
    assert [line.split(",")[0] for line in text().splitlines()] == [
        "training: 1 of 100 steps",
        "training: 21 of 100 steps",
        "training: 41 of 100 steps",
        "training: 50 of 100 steps",
    ]
    assert "21 of 100 steps, 21%, epoch 0.3 of 2, loss 0.2500, samples/s 1000, ranks 4, last commit 50" in text()


def test_a_status_shown_last_is_not_repeated_at_the_end() -> None:
    """Closing adds nothing when the newest status is on the screen."""
    out, text = console(is_terminal=False)
    progress = Progress(out, Clock())
    progress.update(status(1, loss=None, last_commit_step=None))
    progress.close()
    assert text().count("1 of 100 steps, 1%") == 1
    assert "loss -" in text()


@pytest.mark.parametrize(
    ("first", "then", "seconds", "expected"),
    [(0, 50, 3661.0, "1:01:01"), (10, 20, 10.0, "0:01:20"), (50, 40, 10.0, "-"), (99, 100, 5.0, "0:00:00")],
)
def test_the_time_left_follows_the_rate_and_is_unknown_after_a_rollback(
    first: int, then: int, seconds: float, expected: str
) -> None:
    """The time left is what the last steps' rate gives; none when steps were given up."""
    clock, (out, text) = Clock(), console(is_terminal=False)
    progress = Progress(out, clock)
    progress.update(status(first))
    clock.now = seconds
    progress.update(status(then))
    assert text().splitlines()[-1].endswith(f"time left {expected}")


def test_a_run_whose_configuration_was_shortened_since_has_no_more_than_100_percent() -> None:
    """It showed `20 of 15 steps, 133%`, and a negative time left."""
    clock, (out, text) = Clock(), console(is_terminal=False)
    progress = Progress(out, clock)
    for clock.now, step in ((0.0, 110), (10.0, 150)):
        progress.update(status(step))
    assert "150 of 150 steps, 100%, epoch 2.5 of 3" in text() and text().splitlines()[-1].endswith("time left 0:00:00")


def test_a_run_begins_with_0_percent_and_its_start_counts_for_no_rate() -> None:
    clock, (out, text) = Clock(), console(is_terminal=False)
    progress = Progress(out, clock)
    for now, step in ((0.0, 0), (100.0, 1), (110.0, 11)):
        clock.now = now
        progress.update(status(step, **({"loss": None, "samples_per_s": None} if step == 0 else {})))
    lines = text().splitlines()
    assert lines[0].startswith("training: 0 of 100 steps, 0%, ") and lines[-1].endswith("time left 0:01:29")


def test_a_terminal_has_a_line_in_place_that_ends_with_the_last_status() -> None:
    """On a terminal the status is drawn in place, and its last state stays."""
    clock, (out, text) = Clock(), console(is_terminal=True)
    progress = Progress(out, clock)
    progress.update(status(1))
    progress.update(status(2))
    progress.event("saved [5]")
    assert "2 of 100" not in text()
    progress.close()
    assert "2 of 100" in text()
    assert "saved [5]" in text()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_banner_shows_what_the_interruption_cost(is_terminal: bool) -> None:
    """Commit, steps lost, worlds, terms and times are said; what is not known is called unknown."""
    out, text = console(is_terminal=is_terminal)
    Progress(out).banner(BANNER)
    for fact in ["commits/00000012", "steps lost: 4", "ranks 4 -> 3, term 6 -> 7", "detect 1.2 s"]:
        assert fact in text()
    assert "form unknown" in text()
    assert "skipped commits/[13]: torn" in text()


def test_a_banner_without_an_earlier_world_says_so() -> None:
    """A first term after a copied folder has no world before."""
    first = ResumeBanner("c", 1, None, None, None, 2, None, 1, None, None, 0.1)
    assert first.lines()[1] == "ranks ? -> 2, term ? -> 1"
    assert "steps lost: unknown" in first.lines()[0]


def test_an_ordinary_restart_is_one_line() -> None:
    """The same ranks, and nothing lost: there is nothing more to say."""
    line = ResumeBanner("commits/a.json", 7, 3.0, 0, 2, 2, 1, 2, None, None, 0.1).lines()
    assert line == ["Resuming from step 7 (commits/a.json, 3.0 s old); steps lost: 0"]


class Failing(io.StringIO):
    """A stream that cannot be written to while `error` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = OSError(28, "No space left on device")

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_stream_that_fails_is_reported_once_and_retried(
    is_terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is raised while a stream cannot be written to, and lines come again when it can."""
    stream = Failing()
    progress = Progress(Console(file=stream, force_terminal=is_terminal, width=200), Clock())
    progress.update(status(1))
    progress.banner(BANNER)
    progress.event("lost")
    stream.error = None
    progress.event("seen")
    stream.error = ValueError("I/O operation on closed file")
    progress.update(status(2))
    progress.close()
    assert "seen" in stream.getvalue()
    assert "lost" not in stream.getvalue()
    printed = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(printed) == 1
    assert "training continues" in printed[0]
    assert "No space left" in printed[0]


PROGRAM = """
import select, sys
from elastic_train.tracking.progress import Progress, Status, flush_streams
if sys.argv[1] == "closed pipe":  # the reader has to have ended first
    reader = select.poll()
    reader.register(1, 0)
    reader.poll()
progress = Progress(clock=iter(range(0, 1000, 10)).__next__)
for step in range(5):
    progress.update(Status(step, 100, 0.5, 1.0, 1, None, 0.0, None))
    progress.event("event")
progress.close()
flush_streams()
print("the end", file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stdout", ["closed pipe", "full disk", "none"])
def test_a_process_outlives_its_stdout(stdout: str) -> None:
    """With a closed pipe, a full disk or nothing as stdout a process runs to its end, and exits with 0."""
    redirection = {"closed pipe": "| true", "full disk": "> /dev/full", "none": ">&-"}[stdout]
    command = (
        f"set -o pipefail; sleep 0; {shlex.quote(sys.executable)} -c {shlex.quote(PROGRAM)} '{stdout}' {redirection}"
    )
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("training continues") == (0 if stdout == "none" else 1)
    assert done.stderr.endswith("the end\n")


def test_a_rank_that_the_others_wait_for_is_named() -> None:
    """With how many times the median it takes; a world whose ranks are alike says nothing of it."""
    clock, (out, text) = Clock(), console(is_terminal=False)
    progress = Progress(out, clock)
    progress.update(status(1))
    assert "slowest" not in text()
    clock.now += LINE_EVERY_S
    progress.update(status(2, slowest=(3, 1.84)))
    assert "slowest rank 3 (1.8x the median)" in text()
