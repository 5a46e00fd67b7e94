"""What a world's first rank makes of the rows that all ranks have given with a step: it says what it sees.

Sums over a window go to the history and the tracker, and those of all the worlds that a process has led to its result.
What is wrong is an event, in the history, the log and the tracker; what follows from it is the configuration's choice,
and reaches the other ranks with the next step's flags. Nothing here decides a bit.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from elastic_train.insight.detection import Detector
from elastic_train.insight.events import Event, EventLines, Kind
from elastic_train.insight.phases import PHASES
from elastic_train.insight.totals import PhaseTotals, PhaseWindow
from elastic_train.job.auditing.auditor import WrongGradient
from elastic_train.tracking.tracker import Tracker
from elastic_train.training.step_sums import StepSums
from elastic_train.world.world import World
from rendezvous.etcd.tally import TALLY


class Watch:
    """The rows of one world, whose ranks have so many lanes; `totals` are the process's, over all of its worlds.

    `wants_to_stop` says whether an event is to end the job, by `actions`; `drop` asks a rank's node to leave, and says
    what came of that; `at_first_step` is called once, when the world has applied its first.
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
        at_first_step: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.totals = totals
        self.num_events = Counter[str]()
        self.wants_to_stop = self._wants_commit = False
        self._world, self._tracker, self._every_steps = world, tracker, every_steps
        self._actions, self._host_of, self._drop = actions, host_of, drop
        self._window, self._detector = PhaseWindow(), Detector(num_lanes, world.mesh.alike)
        self._step, self._at_first_step = 0, at_first_step
        self._lines, self._clock = EventLines(), clock

    def step(self, step: int, sums: StepSums, norm: float, num_failed_saves: int, *, is_overflow: bool = False) -> None:
        """Take the rows of a step that was applied, and the norm of its gradient; of saves those failed in a row.

        With `is_overflow` the scale of the loss was too large for fp16, which is how it is found.
        """
        self._window.add(sums.ranks)
        if self._step == 0:
            self._at_first_step()
        self._step = step
        usual_norm = None if is_overflow else norm
        for event in self._detector.step(step, sums.ranks, sums.mean, usual_norm, num_failed_saves, TALLY.read()):
            self.tell(event)
        self._announce_due(self._clock())
        if self._window.num_steps >= self._every_steps:
            self.say()

    def tell_of(self, found: Sequence[WrongGradient], step: int) -> None:
        """Say whose gradients are wrong in the step after one that was applied."""
        for one in found:
            num_right = one.num_computed - one.num_wrong
            for rank in one.ranks:
                event = Event("wrong_gradient", step, step + 1, rank, one.num_wrong, num_right, " computations")
                self.tell(replace(event, lane=one.lane, samples=one.samples))

    def take_wanted_commit(self) -> bool:
        """Say whether an event since the last time is to be followed by a commit."""
        wants, self._wants_commit = self._wants_commit, False
        return wants

    def say(self) -> None:
        """Say what the steps since the last time have cost; nothing if there are none."""
        window, self._window = self._window, PhaseWindow()
        if window.num_steps == 0:
            return
        self.totals.add(window)
        self._world.history.phases(step=self._step, steps=window.num_steps, seconds=window.by_rank())
        if self._tracker is not None:
            means = window.mean()
            self._tracker.log(self._step, {f"time/{phase}_s": means[phase] for phase in (*PHASES, "hidden")})

    def say_rest(self) -> None:
        """Say what is left at a world's end, of costs and of events."""
        self.say()
        self._announce_due(math.inf)

    def _announce_due(self, now: float) -> None:
        for line in self._lines.due(now):
            self._world.announce(line)

    def tell(self, event: Event) -> None:
        """Say what begins or ends to be wrong, and do what the configuration says of its kind."""
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
        """Do what the configuration says of what begins to be wrong, and say what that is; None if it is to be told."""
        action = self._actions.get(event.kind, "tell")
        self._wants_commit |= action == "snapshot"
        self.wants_to_stop |= action == "stop"
        if action == "drop" and event.rank is not None:
            return self._drop(event.rank)
        return {"snapshot": "a commit follows", "stop": "the job ends"}.get(action)
