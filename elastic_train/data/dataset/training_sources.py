"""The sources of a run's samples: their manifests, joined into one with consecutive row numbers, and their order.

Sample ids and row groups of a source follow those of the sources before it, so all are distinct.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from elastic_train.config.datasets import DataConfig, names_of
from elastic_train.config.schema import Config
from elastic_train.core.accounting import CoverageSums
from elastic_train.core.mixture import Mixture, RunOrder
from elastic_train.core.order import Arrangement, LengthBuckets, Order
from elastic_train.data.dataset.manifest import Manifest, load_manifest
from elastic_train.data.dataset.row_lengths import load_lengths
from elastic_train.errors import DataError


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset of a mixture: name, integer share of the positions, and manifest."""

    name: str
    share: int
    manifest: Manifest


def load_sources(data: DataConfig, num_lanes: int) -> tuple[Source, ...]:
    """Read the manifests of a mixture; empty without one.

    Raise DataError if one cannot be read, has fewer rows than lanes, or the same rows as another.
    """
    if data.mixture is None or data.shares is None:
        return ()
    manifests = [load_manifest(each.source) for each in data.mixture]
    found = [Source(*facts) for facts in zip(names_of(data.mixture), data.shares, manifests, strict=True)]
    first: dict[str, str] = {}
    for manifest in manifests:
        if manifest.num_rows < num_lanes:
            raise DataError(
                f"{manifest.url}: has {manifest.num_rows} rows, and a source of a mixture needs one for each of the "
                f"{num_lanes} lanes (batch.global_batch / batch.micro_batch): leave it out, or make batch.micro_batch "
                "larger"
            )
        if (other := first.setdefault(manifest.digest, manifest.url)) != manifest.url:
            raise DataError(
                f"{manifest.url}: holds the same rows as {other} (digest {manifest.digest[:12]}), so each would be "
                "trained on twice: name one of them in data.mixture, with the sum of their weights"
            )
    return tuple(found)


def join(sources: Sequence[Source]) -> Manifest:
    """Return one manifest for several sources, located at the first one's URL.

    File paths are prefixed with their source's number. Labels are weighted by the sources' shares, which is how often
    they are seen.
    """
    first, *others = (source.manifest for source in sources)
    if not others:
        return first
    manifests = [first, *others]
    return replace(
        first,
        files=tuple(
            replace(entry, path=f"{number}/{entry.path}")
            for number, manifest in enumerate(manifests)
            for entry in manifest.files
        ),
        columns={
            name: kind
            for name, kind in first.columns.items()
            if all(other.columns.get(name) == kind for other in others)
        },
        num_rows=sum(manifest.num_rows for manifest in manifests),
        coverage=sum((manifest.coverage for manifest in manifests), CoverageSums()),
        labels=next((manifest.labels for manifest in manifests if manifest.labels is not None), None),
        label_counts=_label_counts(sources),
        vocabulary_size=max(manifest.vocabulary_size or 0 for manifest in manifests) or None,
    )


def _label_counts(sources: Sequence[Source]) -> tuple[int, ...] | None:
    """Return label counts weighted by shares, scaled to the total number of rows."""
    counts = [source.manifest.label_counts for source in sources]
    if any(each is None for each in counts):
        return None
    num_rows = sum(source.manifest.num_rows for source in sources)
    turn = sum(source.share for source in sources)
    total = [Fraction(0)] * max(len(each or ()) for each in counts)
    for source, each in zip(sources, counts, strict=True):
        for label, count in enumerate(each or ()):
            total[label] += Fraction(source.share * count * num_rows, turn * source.manifest.num_rows)
    return tuple(math.ceil(count) for count in total)


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
