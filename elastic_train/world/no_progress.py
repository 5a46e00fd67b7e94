"""End a job whose worlds get no further, with an exit code that says not to restart it.

A sample that kills its process, or a device that computes wrongly, ends every world at the same step. Processes die
with their knowledge, so the count is taken from the histories in `run.dir`. Worlds that break while all processes
survive, e.g. in a network that drops large packets, are handled by `elastic_train.world.standstill`.
"""

from __future__ import annotations

from elastic_train.errors import NoProgressError
from elastic_train.job.plan import Plan
from elastic_train.tracking.history_files import Stagnation
from elastic_train.world.agreement import agree
from elastic_train.world.world import World

MOST_COUNTED = 100


def check_progress(world: World, plan: Plan) -> Stagnation:
    """Return, on every rank, the number of consecutive worlds that got no further, and their step.

    Raises NoProgressError, on every rank, if there are too many.
    """
    num_terms, step = agree(world.group, lambda: _check(world, plan))
    return Stagnation(num_terms, step)


def _check(world: World, plan: Plan) -> tuple[int, int]:
    limit = plan.config.give_up_after_worlds
    found = world.history.stagnation(limit or MOST_COUNTED)
    if limit is None or found.num_terms < limit or 2 * world.history.num_ended(limit) < limit - 1:
        return found.num_terms, found.step  # processes that outlive their worlds count for themselves
    world.history.no_progress(step=found.step)
    raise NoProgressError(
        f"the last {limit} worlds, up to term {world.term - 1}, got no further than step {found.step}: the processes' "
        f"logs say how they ended; a signal at every try points to {_suspect(plan, found)} or to a device. "
        f"Starting again tries {limit} worlds more; give_up_after sets how many"
    )


def _suspect(plan: Plan, found: Stagnation) -> str:
    """Name the data that may contain a sample that kills its process."""
    if 2 * found.num_in_validation <= found.num_terms:
        return "the samples of the next step"
    times = f"{found.num_in_validation} of {found.num_terms}"
    return (
        f"the samples of the validation set {plan.config.data.validation} ({times} worlds ended while they validated)"
    )
