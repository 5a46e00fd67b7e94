"""Show a run's progress: a live line on a terminal, plain lines elsewhere, and a banner on resume.

Training does not depend on it: a closed pipe or full disk behind the stream is reported once on stderr, and every later
line is tried again.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from elastic_train.system.progress_bar import progress_line

LINE_EVERY_S = 2.0
PANEL_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class ResumeBanner:
    """Step at which a run resumes, and the cost of the interruption; None for unknown values."""

    commit: str
    step: int
    age_s: float | None
    steps_lost: int | None
    world_before: int | None
    world_after: int
    term_before: int | None
    term_after: int
    detect_s: float | None
    form_s: float | None
    restore_s: float
    skipped: tuple[tuple[str, str], ...] = ()

    def lines(self) -> list[str]:
        """Return the banner's text: one line for an ordinary restart, else one fact per line."""

        def seconds(value: float | None) -> str:
            return "unknown" if value is None else f"{value:.1f} s"

        ranks = f"{'?' if self.world_before is None else self.world_before} -> {self.world_after}"
        term = f"{'?' if self.term_before is None else self.term_before} -> {self.term_after}"
        lost = "unknown" if self.steps_lost is None else str(self.steps_lost)
        is_known = self.age_s is not None and self.age_s >= 0  # negative if this clock is behind the writer's
        age = f", {self.age_s:.1f} s old" if is_known else ""
        first = f"Resuming from step {self.step} ({self.commit}{age}); steps lost: {lost}"
        if not self.steps_lost and not self.skipped and self.world_before == self.world_after:
            return [first]
        return [
            first,
            f"ranks {ranks}, term {term}",
            f"detect {seconds(self.detect_s)}, form {seconds(self.form_s)}, restore {seconds(self.restore_s)}",
            *(f"skipped {key}: {why}" for key, why in self.skipped),
        ]


@dataclass(frozen=True, slots=True)
class Status:
    """The progress of a run."""

    step: int
    total_steps: int
    loss: float | None
    samples_per_s: float | None
    world: int
    last_commit_step: int | None
    epochs: float
    """Epochs so far; of a mixture's slowest source."""
    total_epochs: int | None
    """None if the run ends after a number of steps."""
    slowest: tuple[int, float] | None = None
    """The rank that the others wait for, and its lane time relative to the median; None if all are similar."""

    @property
    def end(self) -> int:
        """The last step: of a run that is further than the configuration's last step, its own."""
        return max(self.step, self.total_steps)


class Progress:
    """Shows the newest status: in place on a terminal, elsewhere a line at most every `LINE_EVERY_S` seconds."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(markup=False, soft_wrap=True)
        self._clock = clock
        self._live: Live | None = None
        self._shown_at = -math.inf
        self._unshown: Status | None = None
        self._rates: list[tuple[float, int]] = []
        self._has_failed = False

    def update(self, status: Status) -> None:
        """Show a status; cheap enough to call at every step."""
        now = self._clock()
        self._unshown = status
        if now - self._shown_at >= (PANEL_EVERY_S if self._console.is_terminal else LINE_EVERY_S):
            self._contain(lambda: self._draw(status, now))

    def event(self, text: str) -> None:
        """Show a line that stays."""
        self._contain(lambda: self._console.print(text, highlight=False, markup=False))

    def banner(self, banner: ResumeBanner) -> None:
        """Show where the run resumes."""
        lines = banner.lines()
        if self._console.is_terminal and len(lines) > 1:
            panel = Panel(Text("\n".join(lines)), title="resumed", border_style="yellow")
            self._contain(lambda: self._console.print(panel))
            return
        for line in lines:
            self.event(line)

    def close(self) -> None:
        """Leave the last status on the screen."""
        if (status := self._unshown) is not None:
            self._contain(lambda: self._draw(status, self._clock()))
        if (live := self._live) is not None:
            self._live = None
            self._contain(live.stop)

    def _contain(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except (OSError, ValueError, SystemExit) as error:  # rich turns a closed pipe into SystemExit
            was_quiet, self._console.quiet = self._console.quiet, True
            self._console.print()  # a quiet console drops what it could not write instead of keeping it forever
            self._console.quiet = was_quiet
            if not self._has_failed:
                self._has_failed = True
                reason = "the pipe is closed" if isinstance(error, SystemExit) else error
                with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be gone as well
                    sys.stderr.write(f"progress cannot be shown ({reason}); training continues\n")
                    sys.stderr.flush()

    def _draw(self, status: Status, now: float) -> None:
        self._shown_at, self._unshown = now, None
        if status.samples_per_s is not None:  # the first step takes longer, as it compiles and reads ahead
            self._rates = [*self._rates[-20:], (now, status.step)]
        line = progress_line("training", status.step, status.end, "steps")
        line += "".join(f", {name} {value}" for name, value in self._facts(status))
        if not self._console.is_terminal:
            self._console.print(line, highlight=False)
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(Text(line), refresh=True)

    def _facts(self, status: Status) -> list[tuple[str, str]]:
        def shown(value: float | None, form: str) -> str:
            return "-" if value is None else format(value, form)

        epochs = math.floor(status.epochs * 10) / 10
        of = "" if status.total_epochs is None else f" of {max(status.total_epochs, math.ceil(epochs))}"
        slowest = (
            [("slowest", f"rank {status.slowest[0]} ({status.slowest[1]:.1f}x the median)")] if status.slowest else []
        )
        return [
            ("epoch", f"{epochs:.1f}{of}"),
            ("loss", shown(status.loss, ".4f")),
            ("samples/s", shown(status.samples_per_s, ".0f")),
            ("ranks", str(status.world)),
            ("last commit", shown(status.last_commit_step, "d")),
            ("time left", self._time_left(status)),
            *slowest,
        ]

    def _time_left(self, status: Status) -> str:
        (then, step), (now, _) = (self._rates[0], self._rates[-1]) if self._rates else ((0.0, 0), (0.0, 0))
        if status.step <= step or now <= then:
            return "-"
        seconds = int((status.end - status.step) * (now - then) / (status.step - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def flush_streams() -> None:
    """Flush stdout and stderr; silence a broken one, which would fail the process's exit."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
