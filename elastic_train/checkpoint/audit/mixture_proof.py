"""Prove a mixture commit's samples per source, given the sources' manifests.

Sums of a source are never reset, and its epoch ends at slightly different positions in each lane. So they are compared
with everything that the order has at the applied positions: whole passes by their closed form, the rest sample by
sample. The number of samples of each source follows from shares and sizes alone, without a manifest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_train.checkpoint import CommitRecord
from elastic_train.core.accounting import Hole
from elastic_train.core.arrays import Int64s
from elastic_train.core.coverage import CoverageSums
from elastic_train.core.mixture.account import SourceFacts, expected_sums_of
from elastic_train.core.mixture.dealing import Mixture
from elastic_train.core.order import Order
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.system.wording import counted


def mixture_of(record: CommitRecord, manifests: Sequence[Manifest] | None) -> Mixture:
    """Return the order of a commit's run; without manifests, one with the same sources at the same positions."""
    assert record.order is not None and record.sources, "it is of a mixture"
    rows = [m.group_rows for m in manifests] if manifests else [[source.num_samples] for source in record.sources]
    orders = [
        Order(
            each,
            num_lanes=record.order["num_lanes"],
            seed=int(record.rng["seed"]),
            block_row_groups=record.order["block_row_groups"],
        )
        for each in rows
    ]
    return Mixture(orders, [source.share for source in record.sources])


def check_counts(record: CommitRecord, order: Mixture) -> list[str]:
    """Return what is wrong with a commit's numbers: its cursor, and the count of samples of each source."""
    assert record.order is not None and record.sources and record.account is not None, "it is of a mixture"
    cursor = order.cursor_at(record.step, record.order["micro_batch"])
    if record.cursor != cursor:
        return [f"step {record.step} is at {cursor}, not at {record.cursor}"]
    wrong = []
    counts = np.sum([order.counts(lane, cursor.offset) for lane in range(order.num_lanes)], axis=0).tolist()
    found = [source.coverage.count for source in record.sources]
    if sum(found) != record.coverage.count or sum(found) + record.account.left_out != sum(counts):
        wrong.append(
            f"{record.coverage.count} samples were counted in all, {sum(found)} of the sources and "
            f"{record.account.left_out} left out; it should be {sum(counts)} in all"
        )
    for source, count, mine in zip(record.sources, counts, found, strict=True):
        if mine > count or (mine < count and not record.account.holes):
            wrong.append(f"source '{source.name}': {mine} samples were counted, its places are {count}")
    return wrong


def differing(record: CommitRecord, manifests: Sequence[Manifest]) -> str | None:
    """Return why manifests are not those that a commit was trained on; None if they are."""
    sources = record.sources or ()
    if len(manifests) != len(sources):
        return (
            f"the manifests of {len(manifests)} of {len(sources)} sources were found; name the folders or URLs of all, "
            "in their order, with --data"
        )
    for manifest, source in zip(manifests, sources, strict=True):
        if manifest.digest != source.manifest_digest:
            return f"{manifest.url} is not the source '{source.name}' that {record.key} was trained on"
    return None


def check_source(record: CommitRecord, order: Mixture, number: int) -> tuple[bool, str]:
    """Compare a source's sums with its order; return True if they match, and a sentence about it."""
    assert record.sources and record.account is not None, "it is of a mixture"
    source, place = record.sources[number], record.cursor.offset
    whole = CoverageSums.of_all(source.num_samples)
    expected = expected_sums_of(order, number, whole, place, record.account.holes)
    aside = ", those of holes aside," if record.account.holes else ""
    where = f"source '{source.name}', {_places(order, number, place, source)}{aside}"
    if source.coverage == expected:
        return True, f"{where} counted exactly once each, and no other did"
    return False, f"{where}: {source.coverage.count} samples counted, and they are not the {expected.count} of these"


def _places(order: Mixture, number: int, place: int, source: SourceFacts) -> str:
    passes = int(order.num_passes(place)[number])
    counts = sum(int(order.counts(lane, place)[number]) for lane in range(order.num_lanes))
    rest = counts - passes * source.num_samples
    return f"{counted(passes, 'epoch')} of {source.num_samples:,} samples and the next {rest:,}"


def expected_times(order: Mixture, place: int, holes: Sequence[Hole]) -> Int64s:
    """Return how often each sample should have been applied at the lanes' positions [0, place); shape (samples,)."""
    passes = order.num_passes(place)
    sizes = [each.num_samples for each in order.orders]
    times = np.repeat(passes, sizes)
    for number, first_id in enumerate(order.first_id.tolist()):
        for ids in order.ahead(number, int(passes[number]), place):
            np.add.at(times, ids + first_id, 1)
    for hole in holes:
        times[hole.lo : hole.hi] = hole.epoch
        for lo, hi in hole.applied_before:
            times[lo:hi] += 1
    return times
