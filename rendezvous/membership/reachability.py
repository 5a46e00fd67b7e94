"""Finds nodes that a member cannot reach although all of them reach etcd: no lease ends, yet a world of both hangs.

A member that has waited for its peers for longer than a lease connects to the agents of their nodes; one does it for
all workers of a node. It names those that do not answer twice in a row in its own record, and `decisions` makes worlds
without such pairs. It keeps probing what was out of reach, so that a network that heals is used again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from rendezvous.errors import StoreError
from rendezvous.membership import decisions
from rendezvous.membership.participant import Participant
from rendezvous.membership.probes import is_reachable
from rendezvous.membership.records import Member

AGAIN_S = 1.0
"""How long after the first probe nodes that did not answer are probed again."""

LOOK_EVERY_S = 10.0
SELDOM_S = 60.0
"""How often a member checks whether its own record misses any node: an answer from etcd may have been lost."""
_MOST_AT_ONCE = 16

_log = logging.getLogger("rendezvous")


class Reachability:
    """Which nodes one member reaches; a thread probes when `ask`ed, and those that were out of reach now and then."""

    def __init__(self, participant: Participant, probe: Callable[[str], bool] = is_reachable) -> None:
        self._participant, self._probe = participant, probe
        self._silent: frozenset[str] = frozenset()
        self._looked_at = 0.0
        self._asked, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._serve, name="reach", daemon=True).start()

    def ask(self) -> None:
        """Have all nodes of this member's world probed soon; returns at once."""
        if time.monotonic() - self._looked_at > (AGAIN_S if self._silent else LOOK_EVERY_S):
            self._asked.set()

    def close(self) -> None:
        self._closed.set()
        self._asked.set()

    def look(self) -> None:
        """Probe the nodes of this member's world and those that it misses, and report what has changed."""
        view, world = self._participant.view, self._participant.world
        mine = view.member(self._participant.id)
        self._looked_at = time.monotonic()
        if mine is None:
            return
        mates = decisions.mates_of(view, world) if world else ()
        if next((mate for mate in mates if mate.node_id == mine.node_id), mine) != mine:
            return
        missed_before = frozenset(mine.missed)
        agents = {m.node_id: m for m in (*mates, *(m for m in view.members if m.node_id in missed_before))}
        silent = self._silent_of({name: m for name, m in agents.items() if self._can_tell(m, mine)})
        missed = frozenset(name for name in silent if name in self._silent or name in missed_before)
        self._silent = silent
        if missed != missed_before:
            _log.warning(
                "nodes in etcd that cannot be reached from here: %s", ", ".join(sorted(missed)) or "none any more"
            )
            self._participant.report_missed(missed)

    def _silent_of(self, agents: Mapping[str, Member]) -> frozenset[str]:
        if not agents:
            return frozenset()
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(agents))) as pool:
            answers = dict(zip(agents, pool.map(lambda m: self._probe(m.agent), agents.values()), strict=True))
        return frozenset(name for name, answers_it in answers.items() if not answers_it)

    @staticmethod
    def _can_tell(other: Member, mine: Member) -> bool:
        """Whether a probe tells anything: it does not for this node, nor for a loopback address, which is this host."""
        is_near = other.agent.startswith(("127.", "localhost", "[::1]"))
        return bool(other.agent) and not is_near and other.node_id != mine.node_id

    def _serve(self) -> None:
        """Probe when asked, and every few seconds while this member's record misses any node."""
        while not self._closed.is_set():
            is_asked = self._asked.wait(LOOK_EVERY_S if self._misses_any() else SELDOM_S)
            self._asked.clear()
            if is_asked or self._misses_any():
                try:
                    self.look()
                except StoreError as error:
                    _log.debug("could not report the nodes that are out of reach: %s", error)

    def _misses_any(self) -> bool:
        mine = self._participant.view.member(self._participant.id)
        return mine is not None and bool(mine.missed)
