"""Facts that a commit records about its state, so that it can be judged without the run."""

from __future__ import annotations

from elastic_train.checkpoint import CommitFacts
from elastic_train.core.coverage import CoverageSums
from elastic_train.core.mixture.account import SourceFacts
from elastic_train.core.order import VERSION
from elastic_train.data.dataset.run_order import fingerprint_of
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState, TrainProgress


def describe_commit(plan: Plan, state: AppliedState, world_size: int) -> CommitFacts:
    """Return the facts that a commit of the state records."""
    return CommitFacts(
        step=state.step,
        cursor=state.reached.cursor,
        coverage=state.reached.coverage,
        rng={"policy": "seed, step, lane", "seed": plan.config.run.seed},
        metrics=state.reached.validation,
        config_digest=plan.config.identity(),
        manifest_digest=plan.manifest.digest,
        world_size=world_size,
        account=state.reached.account,
        order=order_facts(plan),
        fast_steps=state.reached.fast_steps or None,
        skipped_steps=state.reached.skipped_steps or None,
        improvement=state.reached.improvement,
        sources=source_facts(plan, state.reached) or None,
        cut_dims=state.layout.dims or None,
    )


def source_facts(plan: Plan, reached: TrainProgress) -> tuple[SourceFacts, ...]:
    """Return a mixture's sources with the sums of their applied samples; empty for a single training set."""
    sums = reached.sources or [CoverageSums()] * len(plan.sources)
    return tuple(
        SourceFacts(source.name, source.share, source.manifest.num_rows, source.manifest.digest, applied)
        for source, applied in zip(plan.sources, sums, strict=True)
    )


def order_facts(plan: Plan) -> dict[str, int]:
    """Return the numbers that, with the seed, determine the sample order."""
    return {
        "version": VERSION,
        "num_samples": plan.manifest.num_rows,
        "num_lanes": plan.num_lanes,
        "micro_batch": plan.micro_batch,
        "block_row_groups": plan.order.block_row_groups,
        "lengths": fingerprint_of(plan.order),
    }
