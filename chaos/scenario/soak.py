"""A soak: bursts of faults of all possible kinds, drawn from a seed, until there were enough; then the end.

Faults that need a tracker, a freezing disk or own data are possible if the scenario provides them; those that need S3
are not, because the commits to damage and count must be in the run's folder.

A burst starts when all earlier faults are undone and the full world trains again; its faults come within seconds of
each other, so that most hit a recovery. Rare kinds and rare (failpoint, kind) pairs are drawn first. The job is
endless: it is asked to leave, and restarted with the end of the epoch as its last step.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import get_args

from chaos.errors import ScenarioError
from chaos.scenario.kinds import (
    IN_LIVE_JOBS,
    KINDS,
    LOCAL,
    ON_DISK,
    Need,
)
from chaos.scenario.model import Nodes, Point, Scenario
from chaos.scenario.schedule import Due
from elastic_train.config.parallel import ParallelConfig
from elastic_train.system.failpoints import POINTS

MOST_COPIES = 3
PAUSES_S = (0.0, 0.1, 0.5, 1.0, 2.0)
ENTERING = ("form", "restore", "hand-over")
"""Failpoints that only a new world reaches: the previous one must be ended."""
LATE = ("commit", "write", "sync", "record", "publish")
"""Failpoints that the writer of a commit reaches."""
_DEAR = Counter({"kill_job": 12, "flip_bit": 6, "truncate_file": 6, "delete_file": 6, "start_twin": 6})
"""Cost of kinds whose recovery restarts processes or takes seconds: number of other faults drawn for one of these."""
_DEAR.update({"hang": 3, "hang-native": 3, "freeze_agent": 2})
_DEAR.update({"kill_node": 5, "stop_node": 5, "freeze_node": 2, "cut_node": 2, "cut_link": 2, "cut_one_way": 2})
_DEAR.update({"unfit_node": 6, "refuse_address": 2, "hosts_file": 2, "freeze_fs": 3})
_DEAR.update({"slow_network": 2, "lose_packets": 2, "etcd_outage": 2, "lose_etcd_data": 2, "tracker_outage": 8})
_WITH_THE_JOB = ("flip_bit", "truncate_file", "delete_file")


def kinds_of(scenario: Scenario, missing: Mapping[str, str]) -> list[str]:
    """Return the kinds that a soak draws from; `start_node` follows by itself, where a node is to come back.

    Kinds that need a job to themselves are left out, unless the scenario names them.
    """
    assert scenario.soak is not None, "only called for a soak"
    brought = {None, *(need for need in get_args(Need) if getattr(scenario, need))}
    wanted = scenario.soak.kinds or [kind for kind in LOCAL if KINDS[kind].is_drawn]
    able = [kind for kind in wanted if KINDS[kind].needs in brought and kind not in missing]
    if scenario.nodes.recovery != "live":
        able = [kind for kind in able if kind not in IN_LIVE_JOBS]
    return [kind for kind in able if kind != "start_node"]


def drawn_shards(scenario: Scenario, seed: int) -> dict[str, object]:
    """Return the `parallel` settings that a soak draws from its seed; empty if it draws none."""
    if scenario.soak is None or not scenario.soak.shards:
        return {}
    draws = random.Random(f"{seed} shards")
    shards = draws.choice(get_args(ParallelConfig.model_fields["shards"].annotation))
    return {"shards": shards, "copies": draws.randint(1, min(MOST_COPIES, scenario.nodes.count))}


def drawn_nodes(scenario: Scenario, seed: int) -> Nodes:
    """Return a scenario's nodes, with the number of ranks that a soak draws, if it does."""
    if scenario.soak is None or scenario.soak.most_ranks is None:
        return scenario.nodes
    ranks = random.Random(f"{seed} ranks").randint(1, scenario.soak.most_ranks)
    return scenario.nodes.model_copy(update={"ranks": ranks})


def can_be_at(kind: str, point: str) -> bool:
    """Return True if a soak plants a kind at a failpoint."""
    return point == "sync" or kind not in ON_DISK


class Drawn:
    """A soak's faults, in order; the same seed draws the same faults."""

    def __init__(self, scenario: Scenario, seed: int, missing: Mapping[str, str]) -> None:
        assert scenario.soak is not None, "only made for a soak"
        self._soak, self._ttl_s = scenario.soak, scenario.nodes.lease_ttl_s
        self._nodes = scenario.nodes.count
        self._draws = random.Random(f"{seed} soak")
        self.kinds = kinds_of(scenario, missing)
        if not self.kinds:
            asked = [(kind, why) for kind, why in missing.items() if kind in (self._soak.kinds or LOCAL)]
            reasons = [f"{kind} cannot be done here: {why}" for kind, why in asked]
            raise ScenarioError(*(f"{scenario.name}: {why}" for why in reasons or ["no kind is left to draw from"]))
        # Random starting phase per kind: otherwise expensive kinds would come last, in a short soak never.
        self._num = {kind: -self._draws.random() for kind in self.kinds}
        self._cells = Counter[tuple[str, str]]()
        self._points = {
            kind: [point for point in POINTS if can_be_at(kind, point)]
            for kind in self.kinds
            if KINDS[kind].aim == "point"
        }

    def __call__(self, num_done: Callable[[], int]) -> Iterator[Due]:
        """Yield faults until enough were done, or the time since the first is over."""
        began: float | None = None  # starts at the first fault: starting the job may take minutes on a loaded machine
        while num_done() < self._soak.faults and not self._is_late(began):
            burst = [fault for _ in range(self._draws.randint(1, self._soak.burst)) for fault in self._one()]
            for place, fault in enumerate(burst):
                yield replace(fault, is_healed=place == 0)
                began = began or time.monotonic()

    def _is_late(self, began: float | None) -> bool:
        minutes = self._soak.minutes
        return minutes is not None and began is not None and time.monotonic() - began > 60 * minutes

    def _one(self) -> list[Due]:
        """Draw one of the least frequent kinds, and return a fault of it with the faults that belong to it."""
        costs = {kind: (self._num[kind] + 1) * max(1, _DEAR[kind]) for kind in self.kinds}
        least = sorted(self.kinds, key=lambda kind: (costs[kind], self._draws.random()))
        kind = self._draws.choice(least[: max(4, len(least) // 3)])
        self._num[kind] += 1
        if KINDS[kind].aim == "point":
            return self._at_point(kind)
        fault = self._due(kind)
        if kind not in _WITH_THE_JOB or "kill_job" not in self.kinds:
            return [fault]
        # Survivors hold the state, so damaged files are read only by a restarted job: one restart for several.
        others = [other for other in _WITH_THE_JOB if other in self.kinds and other != kind]
        more = [other for other in others if self._draws.random() < 0.5]
        for other in (*more, "kill_job"):
            self._num[other] += 1
        return [fault, *map(self._due, more), Due("kill_job", None, None, 0.0, for_s=1.0)]

    def _due(self, kind: str) -> Due:
        short, long = self._ttl_s * self._draws.uniform(0.1, 0.5), self._ttl_s * self._draws.uniform(1.5, 2.5)
        for_s = short if self._draws.random() < (0.7 if kind in ("kill_node", "stop_node") else 0.5) else long
        aim = KINDS[kind].aim
        roles: tuple[str, ...] = ("one", "one", "leader", "other")
        if kind in ("kill_node", "freeze_node", "stop_node"):
            roles = (*roles, "minority", "majority")
        target = self._draws.choice(roles) if aim in ("worker", "node") and kind != "kill_job" else None
        lasts = KINDS[kind].lasts != "never"
        pause_s = self._draws.choice(PAUSES_S)
        return Due(kind, target, None, pause_s, for_s=round(for_s, 2) if lasts else None)

    def _at_point(self, kind: str) -> list[Due]:
        """Draw the failpoint with the fewest faults of this kind; end the world first if only a new one reaches it."""
        point = min(self._points[kind], key=lambda point: (self._cells[point, kind], self._draws.random()))
        self._cells[point, kind] += 1
        for_s = round(self._ttl_s * self._draws.choice((0.2, 2.0)), 2) if KINDS[kind].lasts == "must" else None
        target = "writer" if point in LATE else self._draws.choice(("one", "leader", "other"))
        nth = self._draws.randint(1, 1 if point in (*ENTERING, *LATE) else 5)
        fault = Due(kind, target, None, 0.0, for_s=for_s, point=Point(name=point, nth=nth))
        trigger = [Due("kill_worker", "one", None, 0.1)] if point in ENTERING else []
        return [fault, *trigger]
