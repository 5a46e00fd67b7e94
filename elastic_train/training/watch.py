"""Rank 0's monitoring of a world, from the rows that all ranks send with each step.

Sums over a window go to the history and the tracker, and totals over all worlds that the process led go to its result.
When something goes wrong, an event is raised in the history, the log and the tracker; the configured reaction reaches
the other ranks with the next step's flags. Nothing here affects any bit.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from elastic_train.config.monitoring import EventKind as Kind
from elastic_train.insight.detection import Detector, Event, EventLines
from elastic_train.insight.phases import PHASES, PhaseTotals, PhaseWindow
from elastic_train.job.auditor import WrongGradient
from elastic_train.tracking.tracker import Tracker
from elastic_train.training.step_sums import StepSums
from elastic_train.world.world import World
from rendezvous.etcd.tally import TALLY


class Watch:
    """Monitors one world, whose ranks have `num_lanes` lanes each; `totals` are the process's, over all of its worlds.

    `drop` asks a rank's node to leave and returns the outcome as text. `followed` are the actions that events of the
    process's worlds have led to.
    """

    def __init__(
        self,
        world: World,
        tracker: Tracker | None,
        totals: PhaseTotals,
        every_steps: int,
        num_lanes: Sequence[int],
        actions: Mapping[Kind, str],
        host_of: Callable[[int], str | None],
        drop: Callable[[int], str],
        clock: Callable[[], float] = time.monotonic,
        followed: set[str] | None = None,
    ) -> None:
        self.totals = totals
        self.num_events = Counter[str]()
        self._wants_commit, self._followed = False, set() if followed is None else followed
        self._world, self._tracker, self._every_steps = world, tracker, every_steps
        self._actions, self._host_of, self._drop = actions, host_of, drop
        self._window, self._detector = PhaseWindow(), Detector(num_lanes, world.mesh.alike)
        self._step = 0
        self._lines, self._clock = EventLines(), clock

    def step(self, step: int, sums: StepSums, norm: float, num_failed_saves: int, *, is_overflow: bool = False) -> None:
        """Process the rows of an applied step, its gradient norm, and the number of consecutive failed saves.

        With `is_overflow`, the loss scale was too large for fp16, which is part of finding the scale.
        """
        self._window.add(sums.ranks)
        self._step = step
        usual_norm = None if is_overflow else norm
        for event in self._detector.step(step, sums.ranks, sums.mean, usual_norm, num_failed_saves, TALLY.read()):
            self.tell(event)
        self._announce_due(self._clock())
        if self._window.num_steps >= self._every_steps:
            self.say()

    def tell_of(self, found: Sequence[WrongGradient], step: int) -> None:
        """Report the ranks whose gradients are wrong in the step after `step`."""
        for one in found:
            num_right = one.num_computed - one.num_wrong
            for rank in one.ranks:
                event = Event("wrong_gradient", step, step + 1, rank, one.num_wrong, num_right, " computations")
                self.tell(replace(event, lane=one.lane, samples=one.samples))

    @property
    def wants_to_stop(self) -> bool:
        """True if an event of this or an earlier world ends the job."""
        return "stop" in self._followed

    def take_wanted_commit(self) -> bool:
        """Return True if an event since the last call requires a commit."""
        wants, self._wants_commit = self._wants_commit, False
        return wants

    def say(self) -> None:
        """Report the phase times of the steps since the last report, if any."""
        window, self._window = self._window, PhaseWindow()
        if window.num_steps == 0:
            return
        self.totals.add(window)
        self._world.history.phases(step=self._step, steps=window.num_steps, seconds=window.by_rank())
        if self._tracker is not None:
            means = window.mean()
            self._tracker.log(self._step, {f"time/{phase}_s": means[phase] for phase in (*PHASES, "hidden")})

    def say_rest(self) -> None:
        """Report the remaining phase times and events at a world's end."""
        self.say()
        self._announce_due(math.inf)

    def _announce_due(self, now: float) -> None:
        for line in self._lines.due(now):
            self._world.announce(line)

    def tell(self, event: Event) -> None:
        """Report an event's start or end, and take the configured action."""
        host = None if event.rank is None else self._host_of(event.rank)
        then = None if event.is_over else self._follow(event)
        self._world.history.event(
            kind=event.kind,
            step=event.step,
            since=event.since,
            who=None if event.rank is None else (event.rank, host),
            measured=(event.value, event.usual, event.unit),
            is_over=event.is_over,
            then=then,
            audited=None if event.lane is None else (event.lane, event.samples),
        )
        text = f"{event.render(host)}{f'; {then}' if then else ''}"
        line = self._lines.add(event, text, self._clock(), is_urgent=then is not None)
        if line is not None:
            self._world.announce(line)
        if event.is_over:
            return
        self.num_events[event.kind] += 1
        if self._tracker is not None:
            self._tracker.log(event.step, {f"events/{event.kind}": self.num_events[event.kind]})

    def _follow(self, event: Event) -> str | None:
        """Take the configured action for a new event and return its description; None if it is only reported."""
        action = self._actions.get(event.kind, "tell")
        self._wants_commit |= action == "snapshot"
        self._followed.add(action)
        if action == "drop" and event.rank is not None:
            return self._drop(event.rank)
        return {"snapshot": "a commit follows", "stop": "the job ends"}.get(action)
