"""Which nodes a member cannot reach although all of them reach etcd: no lease ends, and every world of both hangs.

A member that has waited for its peers for longer than a lease connects to the agents of their nodes; one does it for
all workers of a node. Those that do not answer twice in a row it names in its own record, and `membership` makes worlds
without such pairs. What was out of reach is tried again, so that a network that heals needs nobody's help.
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
"""A second look at nodes that did not answer comes so long after the first."""

LOOK_EVERY_S = 10.0
SELDOM_S = 60.0
"""How often a member asks its own record whether it misses somebody: an answer of etcd's may have been lost."""
_MOST_AT_ONCE = 16

_log = logging.getLogger("rendezvous")


class Reachability:
    """One member's knowledge of whom it reaches; a thread looks when `ask`ed, and now and then at who was missed."""

    def __init__(self, participant: Participant, probe: Callable[[str], bool] = is_reachable) -> None:
        self._participant, self._probe = participant, probe
        self._silent: frozenset[str] = frozenset()
        self._looked_at = 0.0
        self._asked, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._serve, name="reach", daemon=True).start()

    def ask(self) -> None:
        """Have a look at all nodes of this member's world soon; returns at once."""
        if time.monotonic() - self._looked_at > (AGAIN_S if self._silent else LOOK_EVERY_S):
            self._asked.set()

    def close(self) -> None:
        self._closed.set()
        self._asked.set()

    def look(self) -> None:
        """Connect to the nodes of this member's world and to those that it misses, and say what has changed."""
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
            _log.warning("out of reach although etcd is not: %s", ", ".join(sorted(missed)) or "nobody any more")
            self._participant.report_missed(missed)

    def _silent_of(self, agents: Mapping[str, Member]) -> frozenset[str]:
        if not agents:
            return frozenset()
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(agents))) as pool:
            answers = dict(zip(agents, pool.map(lambda m: self._probe(m.agent), agents.values()), strict=True))
        return frozenset(name for name, answers_it in answers.items() if not answers_it)

    @staticmethod
    def _can_tell(other: Member, mine: Member) -> bool:
        """A loopback address means another machine there; the own machine needs no look."""
        is_near = other.agent.startswith(("127.", "localhost", "[::1]"))
        return bool(other.agent) and not is_near and other.node_id != mine.node_id

    def _serve(self) -> None:
        """Look when asked, and every few seconds as long as this member's record says that it misses somebody."""
        while not self._closed.is_set():
            is_asked = self._asked.wait(LOOK_EVERY_S if self._misses_somebody() else SELDOM_S)
            self._asked.clear()
            if is_asked or self._misses_somebody():
                try:
                    self.look()
                except StoreError as error:
                    _log.debug("could not say who is out of reach: %s", error)

    def _misses_somebody(self) -> bool:
        mine = self._participant.view.member(self._participant.id)
        return mine is not None and bool(mine.missed)
