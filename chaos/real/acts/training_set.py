"""Faults of the data that is trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.real.acts.job_view import Act, JobView
from chaos.real.acts.outcome import Struck

if TYPE_CHECKING:
    from chaos.scenario.schedule import Due


def bad_row_group(job: JobView, fault: Due) -> Struck | None:
    """Damage a row group of the run's own training set under the job."""
    assert job.around.data is not None, "the scenario has it, since the kind needs it"
    damage = job.around.data.spoil(job.draws)
    return None if damage is None else Struck([], recorded=damage)


ACTS: dict[str, Act] = {"bad_row_group": bad_row_group}
