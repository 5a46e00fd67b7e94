"""Steps whose loss or gradient is NaN or infinite: who did it is written down, and the last good commit is kept.

The update of such a step is left out (`AppliedState.apply`), so commits stay finite; what is counted and decided here
is alike on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.core.arrays import ranges_of
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.errors import NoProgressError
from elastic_train.training.session import Session
from elastic_train.training.step_sums import StepSums


def report_nonfinite(session: Session, lanes: Sequence[LaneBatch], sums: StepSums, norm: float) -> None:
    """Report the step that was just applied; raise NoProgressError, on every rank, after too many in a row.

    Where no lane's loss says which lanes did it, because the gradient alone is not finite, all lanes are listed.
    """
    state, config = session.state, session.plan.config.optimizer
    suspects = set(sums.nonfinite_lanes) or set(range(session.plan.num_lanes))
    samples = {batch.lane: ranges_of(batch.ids) for batch in lanes if batch.lane in suspects}
    session.world.history.nonfinite(step=state.step, loss=sums.loss, norm=norm, samples=samples)
    if state.reached.num_nonfinite == 1:
        where = f"lanes {list(sums.nonfinite_lanes)}" if sums.nonfinite_lanes else "no lane alone"
        what = "used all the same" if config.on_nonfinite == "keep" else "left out"
        session.world.announce(
            f"step {state.step}: loss {sums.mean}, gradient norm {norm}, by {where}; its update is {what}"
        )
        session.commits.pin_newest()
    if config.on_nonfinite == "fail" and state.reached.num_nonfinite >= config.nonfinite_limit:
        raise NoProgressError(
            f"loss or gradient of {config.nonfinite_limit} steps in a row, up to step {state.step}, was not finite; "
            f"the samples are in {session.plan.config.run.dir}/history (op nonfinite), and the last commit is pinned. "
            "Lower optimizer.lr, remove the samples, or set optimizer.on_nonfinite to skip or keep"
        )
