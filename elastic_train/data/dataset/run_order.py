"""The sample order of a run, from configuration and manifests: of one dataset or a mixture."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.config.schema import Config
from elastic_train.core.mixture import Mixture, RunOrder
from elastic_train.core.order import Arrangement, LengthBuckets, Order
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.row_lengths import load_lengths
from elastic_train.data.dataset.training_sources import Source


def order_of(config: Config, manifest: Manifest, sources: Sequence[Source]) -> RunOrder:
    """Return the order of a training set, or of a mixture that interleaves its sources' orders."""
    orders = [
        Order(
            each.group_rows,
            num_lanes=config.batch.num_lanes,
            seed=config.run.seed,
            block_row_groups=config.data.block_row_groups,
            arrangement=arrangement_of(config, each),
        )
        for each in ([source.manifest for source in sources] or [manifest])
    ]
    return Mixture(orders, [source.share for source in sources]) if sources else orders[0]


def count_steps(config: Config, order: RunOrder) -> int:
    """Count the steps of a run: `max_steps`, or its epochs; for a mixture, epochs of every source."""
    if config.max_steps is not None:
        return config.max_steps
    if isinstance(order, Mixture):
        return order.steps_for(config.epochs, config.batch.micro_batch)
    return config.epochs * order.num_steps(config.batch.micro_batch)


def arrangement_of(config: Config, manifest: Manifest) -> Arrangement | None:
    """Return how samples are arranged into micro-batches; None without bucketing."""
    if not config.data.length_bucketing:
        return None
    lengths = load_lengths(manifest)
    return LengthBuckets(lengths, config.batch.micro_batch, fingerprint=lengths.fingerprint)


def fingerprint_of(order: RunOrder) -> int:
    """Return the fingerprint of an order's arrangement; 0 without one."""
    return order.arrangement.fingerprint if order.arrangement else 0
