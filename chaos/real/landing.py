"""The end of a soak: stop the job, and restart it with the end of the epoch as its last step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chaos.judge.evidence.run_files import record_files
from chaos.real.job import Job
from chaos.scenario.schedule import Due


def land(last_step: Callable[[int], int]) -> Callable[[Job], None]:
    """Return the function that ends a soak; `last_step` returns the end of the epoch of a step."""

    def bring_down(job: Job) -> None:
        job.await_healed()
        for node in range(len(job.nodes)):
            job.inject(Due("stop_node", node, None, 0.0))
        while any(node.is_up for node in job.nodes):
            job.look("all nodes' leaving")
            job.check_progress("all nodes' leaving")
        until = last_step(newest_commit(job.folder))
        job.on_event(f"landing: the job ends at step {until}")
        job.record("horizon", steps=until)
        for each in job.nodes:
            each.command = [*each.command, "--max_steps", str(until)]
        for node in range(len(job.nodes)):
            job.inject(Due("start_node", node, None, 0.0))

    return bring_down


def newest_commit(folder: Path) -> int:
    """Return the step of the newest commit; 0 if there is none."""
    records = record_files(folder)
    return int(records[-1].stem.rpartition("-")[2]) if records else 0
