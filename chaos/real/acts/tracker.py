"""Faults of the tracker: killed and restarted, or frozen for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.real.acts.job_view import Act, JobView
from chaos.real.acts.outcome import Struck

if TYPE_CHECKING:
    from chaos.scenario.schedule import Due


def tracker_outage(job: JobView, fault: Due) -> Struck | None:
    """Kill the server, which then refuses, or freeze it, so that it does not answer; drawn at random."""
    server = job.around.tracker
    assert server is not None, "the scenario has one, since the kind needs it"
    if not server.is_answering:
        return None
    is_killed = job.draws.random() < 0.5
    pids = server.kill() if is_killed else server.freeze()
    started: list[int] = []

    def bring_back() -> list[int] | None:
        if not started:
            started.extend(server.begin() if is_killed else server.thaw())
        return started if server.is_answering else None

    return Struck(pids, signal="SIGKILL" if is_killed else "SIGSTOP", undo=bring_back)


ACTS: dict[str, Act] = {"tracker_outage": tracker_outage}
