"""A job that forms world after world and never gets to a step: it ends, with a code that says not to start it again.

A sample that kills its process, or a device that computes wrongly, ends every world at the same step. Processes die
with what they know, so the count is taken from the histories in `run.dir`.
"""

from __future__ import annotations

from elastic_train.errors import NoProgressError
from elastic_train.job.plan import Plan
from elastic_train.world.agreement import agree
from elastic_train.world.world import World


def check_progress(world: World, plan: Plan, step: int) -> None:
    """Raise NoProgressError, on every rank, if too many worlds in a row have ended without a step after `step`."""
    agree(world.group, lambda: _check(world, plan, step))


def _check(world: World, plan: Plan, step: int) -> None:
    limit = plan.config.give_up_after_worlds
    if limit is None or world.history.num_without_step(limit) < limit:
        return
    world.history.no_progress(step=step)
    raise NoProgressError(
        f"the last {limit} worlds, up to term {world.term - 1}, ended without a step after step {step}: the processes' "
        "logs say how they ended; a signal at every try points to the samples of this step or to a device. Starting "
        f"again tries {limit} worlds more; give_up_after_worlds sets how many"
    )
