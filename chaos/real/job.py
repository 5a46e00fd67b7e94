"""Run a scenario with real processes: a real etcd, one torchrun per node, real signals, sockets and files.

The executor follows the run's histories to know the step, injects each fault when due, undoes it when its time is over,
records both with the histories, and leaves no process running, whatever ends it.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos.errors import RunError
from chaos.real import leftovers
from chaos.real.acts import ACTS, Struck, Undo
from chaos.real.acts.effects import Effect
from chaos.real.acts.failpoints import PATIENCE_S, Points
from chaos.real.history_tail import Followed
from chaos.real.leftovers import Enough, on_first_signal
from chaos.scenario.kinds import KINDS, LOCAL
from chaos.scenario.model import Scenario
from chaos.scenario.schedule import Due
from chaos.services.surroundings import Surroundings
from chaos.services.torchrun_node import Node, signal_all
from elastic_train.system.failpoints import KINDS as POINT_KINDS
from elastic_train.system.failpoints import POINTS
from rendezvous.process_table import stat_of

_LOOK_EVERY_S = 0.01
_AGAIN_S = 0.05
"""Seconds between retries of what could not be done: finding a node's processes takes milliseconds."""
_DYING_S = 2.0
_PROOF_S = 30.0
"""Seconds after a fault's end within which it must be proven: a stopping process may take a while."""
_SETTLED_S = 0.5
"""Seconds until steps in progress at an event are applied."""


@dataclass(frozen=True, slots=True)
class _Unproved:
    """A fault whose effect is not proven yet."""

    number: int
    fault: Due
    node: int | None
    look: Effect
    until: float
    """When it is over, by the monotonic clock."""
    undo: Undo | None


@dataclass(slots=True)
class Job:
    """A job to run to its end: nodes, faults, and the folder of its histories."""

    folder: Path
    nodes: list[Node]
    scenario: Scenario
    faults: Iterable[Due]
    seed: int
    on_look: Callable[[Followed], None]
    on_event: Callable[[str], None]
    replay: str | None = None
    around: Surroundings = field(default_factory=Surroundings)
    land: Callable[[Job], None] | None = None
    """Ends an endless job, once its faults are over or Ctrl-C was pressed."""
    cell_size: int = 1
    """Ranks per replica; ranks beyond whole cells are spares."""
    stage_size: int | None = None
    """Ranks per stage, which must share a node; all of a cell if None."""
    come_within_s: float = PATIENCE_S
    followed: Followed = field(default_factory=Followed)
    lost: list[Node] = field(default_factory=list)
    draws: random.Random = field(default_factory=random.Random)
    num_faults: int = 0
    damaged: set[str] = field(default_factory=set)
    """Commits with a damaged file."""
    _deadline: float = 0.0
    _undos: list[tuple[float, str, Undo]] = field(default_factory=list)
    _points: Points = field(default_factory=Points)
    _placed: set[int] = field(default_factory=set)
    _kinds: set[str] = field(default_factory=set)
    _born: dict[int, int | None] = field(default_factory=dict)
    _ended_at: dict[int, float] = field(default_factory=dict)
    _unproved: list[_Unproved] = field(default_factory=list)
    _disturbed_at: float = 0.0
    _is_stopping: bool = False

    def run(self) -> None:
        """Start the nodes, inject every fault when due, and wait for the end; leave no process running."""
        (self.folder / "history").mkdir(parents=True, exist_ok=True)
        self.draws = random.Random(f"{self.seed} acts")
        self.record(
            "scenario",
            name=self.scenario.name,
            seed=self.seed,
            recovery=self.scenario.nodes.recovery,
            patience_s=self.scenario.patience_s,
            reference=self.scenario.reference,
            nonfinite=self.scenario.nonfinite,
            max_restarts=self.scenario.nodes.max_restarts,
            spare_nodes=self.scenario.nodes.count - self.scenario.nodes.min,
            command=self.nodes[0].command,
            replay=self.replay,
            kinds=[name for name in LOCAL if KINDS[name].aim != "point"],
            points=POINTS,
            point_kinds=POINT_KINDS,
            missing=self.around.missing,
            network=self.scenario.network,
            link=None if self.around.link is None else asdict(self.around.link),
        )
        self._deadline, self._disturbed_at = time.monotonic() + self.scenario.timeout_s, time.time()
        try:
            for node in self.nodes:
                node.start()
            self._inject_all()
            if self.land is not None:
                self.land(self)
            self._wait_for_end()
        except RunError as error:
            self.record("stuck", why=str(error).partition("; the end of")[0])
            raise
        finally:
            self._clean_up()

    def _inject_all(self) -> None:
        """Inject the faults; Ctrl-C or SIGTERM ends a soak early."""
        with on_first_signal(self._stop) if self.land is not None else contextlib.nullcontext():
            try:
                for fault in self.faults:
                    self.inject(fault)
            except Enough:
                self.record("stopped", faults=self.num_faults)
        self._is_stopping = False

    def _stop(self) -> None:
        """Let the next look, when no fault is half done, end the faults."""
        self._is_stopping = True
        self.on_event(f"stopping after {self.num_faults} faults: its end, and a verdict; once more to give up")

    def inject(self, fault: Due) -> None:
        """Wait until a fault is due and possible, inject it, and record it with the time just before."""
        what = f"{fault.kind} on {'node ' if isinstance(fault.target, int) else ''}{fault.target}"
        moment = time.monotonic() + (fault.after_s or 0.0)
        if fault.is_healed:
            self.await_healed()
        while True:
            self.look(what)
            if time.monotonic() >= moment and self._has_come(fault):
                if fault.point is not None:
                    self._points.arm(self, fault)
                    return
                at = time.time()
                if (done := ACTS[fault.kind](self, fault)) is not None:
                    break
                time.sleep(_AGAIN_S)
            is_over = not any(node.is_up for node in self.nodes) and not self._undos
            if is_over and not (fault.kind == "start_node" and fault.step is None):
                raise RunError(f"the job ended before {what} was due; {self._logs()}")
            self._check_is_up(fault)
            self._check_is_alive(what)
        self.note(fault, done, at)
        if done.undo is not None:
            self._undos.append((time.monotonic() + (fault.for_s or 0.0), fault.kind, done.undo))

    def note(self, fault: Due, done: Struck, at: float) -> None:
        self.num_faults += 1
        self._kinds.add(fault.kind)
        self._disturbed_at = time.time()
        followed, node = self.followed, done.nodes[0].number if done.nodes else None
        moments = {"at_step": fault.step, "is_drawn": fault.is_drawn, "seen_step": followed.step}
        who = {"kind": fault.kind, "target": fault.target, "node": node, "nodes": [n.number for n in done.nodes]}
        what = {"signal": done.signal, "for_s": fault.for_s, "point": fault.point.name if fault.point else None}
        seen = {"seen_commit": followed.commit, "term": followed.term}
        until = time.monotonic() + (fault.for_s or 0.0)
        self._unproved.append(_Unproved(self.num_faults, fault, node, done.proof, until, done.undo))
        self.record(
            "fault",
            t=at,
            number=self.num_faults,
            **who,
            **what,
            **moments,
            **seen,
            **done.recorded,
            **self._named(done.pids),
        )
        where = f" on node {node}" if node is not None else ""
        point = f" at {fault.point.name}" if fault.point else ""
        self.on_event(f"fault {self.num_faults}: {fault.kind}{point}{where} at step {followed.step}")
        self._look_for_effects()

    def _look_for_effects(self, *, is_last: bool = False) -> None:
        """Record the proof of each fault's effect, or, a while after its end, that there is none.

        A fault that cannot be undone yet is not over, however long it was to last.
        """
        undoing = {id(undo) for _, _, undo in self._undos}
        for one in list(self._unproved):
            where: dict[str, Any] = {"kind": one.fault.kind, "point": one.fault.point.name if one.fault.point else None}
            if (proof := one.look()) is not None:
                self.record("effect", fault=one.number, proof=proof, **where)
            elif is_last or (time.monotonic() > one.until + _PROOF_S and id(one.undo) not in undoing):
                why = "nothing showed that it had an effect"
                self.record("missed", fault=one.number, node=one.node, why=why, **where)
                self.on_event(f"fault {one.number}: {one.fault.kind}: {why}")
            else:
                continue
            self._unproved.remove(one)

    def undo_after(self, seconds: float, kind: str, undo: Undo) -> None:
        self._undos.append((time.monotonic() + seconds, kind, undo))

    def await_healed(self) -> None:
        """Wait until all is undone and the full world has applied a step since; raise RunError if it never does."""
        while not self._is_healed():
            self.look("the whole world's training")
            self._check_is_alive("training by the whole world")
        seconds = max(0.0, self.followed.applied_at - self._disturbed_at)
        self.record("healed", seconds=seconds)
        self.on_event(f"whole {seconds:.1f} s later: {self.num_faults} faults of {len(self._kinds)} kinds so far")
        self._disturbed_at = time.time()

    def _check_is_alive(self, waiting_for: str) -> None:
        """In a soak, raise RunError if something awaited does not come although no fault is active."""
        soak = self.scenario.soak
        if soak and not self._undos and time.time() > self._disturbed_at + soak.heal_s:
            why = f"{waiting_for} did not come within {soak.heal_s:.0f} s, with nothing wrong any more"
            raise RunError(f"{why} (step {self.followed.step}, term {self.followed.term}); {self._logs()}")

    def check_progress(self, waiting_for: str) -> None:
        """In a soak, raise RunError if the job takes no steps although no fault is active."""
        soak = self.scenario.soak
        last = max(self._disturbed_at, self.followed.applied_at)
        if soak and not self._undos and time.time() > last + soak.heal_s:
            where = f"step {self.followed.step}, term {self.followed.term}"
            raise RunError(f"{waiting_for} did not come, and no step for {soak.heal_s:.0f} s ({where}); {self._logs()}")

    @property
    def full_size(self) -> int:
        """Number of training ranks if all nodes are well."""
        stage_size = self.stage_size or self.cell_size
        num_stages = self.scenario.nodes.count * (self.scenario.nodes.ranks // stage_size)
        return num_stages * stage_size // self.cell_size * self.cell_size

    def _is_healed(self) -> bool:
        is_whole = self.followed.world == self.full_size and all(node.is_up for node in self.nodes)
        trains = self.followed.applied_at > self._disturbed_at + _SETTLED_S
        return not self._undos and is_whole and trains and self._points.are_over(self)

    def _check_is_up(self, fault: Due) -> None:
        """Raise RunError rather than wait for ever for a node that has ended by itself."""
        node = self.nodes[fault.target] if isinstance(fault.target, int) else None
        is_awaited = node in self.lost or fault.kind == "start_node" or bool(self._undos)
        if node is not None and node.code is not None and not is_awaited:
            what = f"{fault.kind} on node {node.number} was due, but it has ended with code {node.code}"
            raise RunError(f"{what}; the end of its log:\n{node.tail()}")

    def _has_come(self, fault: Due) -> bool:
        """Return True if a fault is due; a drawn one also needs an applied step that is in no commit.

        For that the histories are read again: since the last look a busy machine may have committed.
        """
        followed = self.followed
        if fault.is_drawn:
            followed.look(self.folder)
        if fault.at_s is not None:
            return followed.began_at is not None and time.time() >= followed.began_at + fault.at_s
        if fault.is_drawn and (followed.commit is None or followed.step <= followed.commit):
            return False
        return fault.has_come(followed.step)

    def _wait_for_end(self) -> None:
        while any(node.is_up for node in self.nodes) or self._undos:
            self.look("its end")
            self.check_progress("the job's end")
        self._points.give_up(self)
        self.followed.look(self.folder)
        self.on_look(self.followed)
        if all(node.code != 0 for node in self.nodes):
            raise RunError(f"no node ended well; {self._logs()}")

    def look(self, waiting_for: str) -> None:
        """Read what has happened, undo what is due, and wait a moment; raise RunError once the job's time is over."""
        if self._is_stopping:
            raise Enough
        if self.land is None and time.monotonic() > self._deadline:
            raise RunError(
                f"the job did not reach {waiting_for} within {self.scenario.timeout_s:.0f} s "
                f"(step {self.followed.step}, term {self.followed.term}); {self._logs()}"
            )
        self._look_for_effects()
        for pending in [pending for pending in self._undos if time.monotonic() >= pending[0]]:
            self._undo(pending)
        self._points.look(self)
        self.followed.look(self.folder)
        self._note_ends()
        self._place()
        self.on_look(self.followed)
        time.sleep(_LOOK_EVERY_S)

    def _undo(self, pending: tuple[float, str, Undo]) -> None:
        """Undo a fault; if that is not possible yet, the next look tries again."""
        _, kind, undo = pending
        pids = undo()
        if pids is not None:
            self._undos.remove(pending)
            self._disturbed_at = time.time()
            self.record("undo", kind=kind, **self._named(pids))

    def _note_ends(self) -> None:
        """Record when each node ended: its explanation must come before, and not long before."""
        for node in self.nodes:
            if node.code is None:
                self._ended_at.pop(node.number, None)
            else:
                self._ended_at.setdefault(node.number, time.time())

    def _place(self) -> None:
        """Record the node of each process that has joined the world since the last look."""
        new = set(self.followed.pids.values()) - self._placed
        self._placed |= new
        for node in self.nodes if new else []:
            if pids := sorted(new.intersection(node.pids())):
                self._born.update({pid: stat.born if (stat := stat_of(pid)) else None for pid in pids})
                self.record("node", node=node.number, **self._named(pids))

    def _named(self, pids: list[int]) -> dict[str, Any]:
        """Return pids and birth times of processes: their pids may be reused."""
        return {"pids": pids, "born": [self._born.get(pid) for pid in pids]}

    def _clean_up(self) -> None:
        """Record how nodes ended and what outlived the job, and end that."""
        for _, _, undo in self._undos if any(node.is_up for node in self.nodes) else []:
            undo()
        is_over = not any(node.is_up for node in self.nodes)
        self._note_ends()
        self._look_for_effects(is_last=True)
        for node in self.nodes:
            if node.code is not None:
                self.record("exit", t=self._ended_at[node.number], node=node.number, code=node.code)
        left = self._left(_DYING_S if is_over else 0.0)
        if is_over:
            found = leftovers.look(self.folder, self._placed, self.around, self.scenario.nodes.lease_ttl_s)
            seen: dict[str, object] = {"drafts": found.drafts, "shared_memory": found.shared_memory}
            if self.around.etcd is not None:
                seen["leases"] = found.leases
            self.record("clean", t=None, orphans=left, **seen)
        signal_all(left, signal.SIGKILL)
        for node in self.nodes:
            node.kill()

    def _left(self, patience_s: float) -> list[int]:
        """Return the processes left after the nodes' end; those that die with their agent get a moment."""
        until = time.monotonic() + patience_s
        while (left := [pid for node in self.nodes for pid in node.pids()]) and time.monotonic() < until:
            time.sleep(_AGAIN_S)
        return left

    def record(self, op: str, *, t: float | None = None, **fields: object) -> None:
        """Append a line to the executor's own history."""
        line = json.dumps({"op": op, "t": time.time() if t is None else t, **fields})
        with (self.folder / "history" / "chaos.jsonl").open("a") as file:
            file.write(line + "\n")

    def _logs(self) -> str:
        return "\n".join(f"the end of node {node.number}'s log:\n{node.tail()}" for node in self.nodes)
