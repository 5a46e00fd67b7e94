"""Audit: derive from a run's commits, in words, what they prove about its samples, without histories or trust in the
trainer.

A commit's intervals prove that every step was applied once, by one term. Its sums at the end of every epoch prove, by
their closed form, that each sample counted once in that epoch, except those of listed holes. For an unfinished epoch,
the applied ids follow from the order, which needs the dataset's manifest.

Prove a mixture commit's samples per source, given the sources' manifests.

Sums of a source are never reset, and its epoch ends at slightly different positions in each lane. So they are compared
with everything that the order has at the applied positions: whole passes by their closed form, the rest sample by
sample. The number of samples of each source follows from shares and sizes alone, without a manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from elastic_train.checkpoint.commits.reader import DAMAGE, discover, read_record, records
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.stores.store import Store
from elastic_train.core.accounting import CoverageSums, Hole, SampleAccount, expected_sums
from elastic_train.core.arrays import Int64s
from elastic_train.core.lineage import cut, tiling_problems
from elastic_train.core.mixture import Mixture, SourceFacts, expected_sums_of
from elastic_train.core.order import VERSION, LengthBuckets, Order
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.row_lengths import NAME, load_lengths
from elastic_train.errors import ConfigError, CorruptError, DataError
from elastic_train.system.wording import counted, updates_left_out

Numbers = Mapping[str, int]
_CHUNK = 1 << 20


@dataclass(slots=True)
class Audit:
    """Findings of an audit: sentences that are proven, unproven, or wrong."""

    commit: str
    step: int
    num_epochs: int
    holes: tuple[Hole, ...]
    num_truncated: int
    proven: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 if everything is proven, 65 if something is wrong, 1 if something is unproven."""
        return CorruptError.exit_code if self.wrong else 1 if self.unproven else 0


def audit(store: Store, manifests: Sequence[Manifest]) -> Audit:
    """Audit the newest commit of a store and its predecessors; raise CommitError if all commits are damaged.

    `manifests` are the training set's, empty if it cannot be read: one, needed only for the unfinished epoch, or those
    of a mixture's sources, in order. Raise ConfigError if the store has no commit.
    """
    head = discover(store, damage=_wrong_with_record).head
    if head is None:
        raise ConfigError(f"{store.url}: no commits yet; is this the run's folder, or the URL of its commits?")
    account = head.account or SampleAccount()
    found = Audit(head.key, head.step, head.cursor.epoch, account.holes, account.truncated)
    _check_steps(found, store, head)
    if head.account is None or head.order is None:
        found.unproven.append("the samples: the commit is of a version that did not yet keep what proves them")
        return found
    if head.sources:
        _check_sources(found, head, manifests)
        return found
    _check_epochs(found, head, head.account, head.order)
    if head.cursor.offset:
        _check_unfinished(found, head, head.account, head.order, manifests[0] if manifests else None)
    return found


def _check_sources(found: Audit, head: CommitRecord, manifests: Sequence[Manifest]) -> None:
    """Compare the sums of each source of a mixture with its order."""
    assert head.order is not None and head.account is not None, "checked before"
    order = mixture_of(head, None)
    found.wrong += check_counts(head, order)
    found.num_epochs = order.num_epochs(head.cursor)
    found.proven += [f"{hole}, are left out, and no other sample is" for hole in head.account.holes]
    if (why := differing(head, manifests)) is not None:
        found.unproven.append(f"which samples of the sources were applied: {why}")
        return
    order = mixture_of(head, manifests)
    for number in range(len(manifests)):
        is_right, said = check_source(head, order, number)
        (found.proven if is_right else found.wrong).append(said)


def _wrong_with_record(store: Store, key: str) -> str | None:
    """Return why a record cannot be read, None if it can; the commit's files are not checked."""
    try:
        read_record(store, key)
    except DAMAGE as error:
        return str(error)
    return None


def _check_steps(found: Audit, store: Store, head: CommitRecord) -> None:
    problems = tiling_problems(head.intervals, head.step)
    found.wrong += [f"steps: {problem}" for problem in problems]
    num_terms = len({interval.term for interval in head.intervals})
    if not problems:
        left_out = updates_left_out(head.skipped_steps or ())
        found.proven.append(
            f"steps [0, {head.step}) were applied once each, by {counted(num_terms, 'term')} in turn"
            + (f"; {left_out}" if left_out else "")
        )
    ancestors = 0
    for key, record, why in records(store):
        if record is None:
            found.unproven.append(f"{key}: {why}")
        elif record.key != head.key and record.intervals == cut(head.intervals, record.step):
            ancestors += 1
            mine, theirs = (head.account or SampleAccount()).epochs, (record.account or SampleAccount()).epochs
            if theirs != mine[: len(theirs)]:
                found.wrong.append(f"{key}: its sums at the end of an epoch are not those of {head.key}")
    found.proven.append(f"{ancestors} earlier commits that are still there are part of the same lineage")


def _check_epochs(found: Audit, head: CommitRecord, account: SampleAccount, order: Numbers) -> None:
    """Compare the sums at the end of every epoch with their closed form."""
    num_samples, num_finished = order["num_samples"], head.cursor.epoch
    longest = -(-num_samples // order["num_lanes"])
    steps_per_epoch = -(-longest // order["micro_batch"])
    place = divmod(head.step, steps_per_epoch)
    if (num_finished, head.cursor.offset) != (place[0], place[1] * order["micro_batch"]):
        found.wrong.append(f"step {head.step} is not at {head.cursor}: an epoch has {steps_per_epoch} steps")
        return
    if len(account.epochs) != num_finished:
        found.wrong.append(f"{num_finished} epochs are finished, but the commit has sums of {len(account.epochs)}")
        return
    whole = CoverageSums.of_all(num_samples) if num_finished else CoverageSums()
    before = expected_sums(whole, account.holes, 0)
    for number, sums in enumerate(account.epochs):
        after = expected_sums(whole, account.holes, number + 1)
        if sums != after:
            found.wrong.append(
                f"epoch {number}: the sums over the samples applied are not those of {_all(num_samples, account.holes)}"
                f" ({sums.count - before.count} samples, it should be {after.count - before.count})"
            )
        before = after
    if num_finished and account.epochs[-1] == before:
        named = "epoch 0" if num_finished == 1 else f"each of the epochs 0 to {num_finished - 1}"
        found.proven.append(
            f"in {named}, {_all(num_samples, account.holes)} counted exactly once: the sums are the closed form's"
        )
    for hole in account.holes:
        found.proven.append(f"{hole}, are left out, and no other sample is")


def _check_unfinished(
    found: Audit, head: CommitRecord, account: SampleAccount, order: Numbers, manifest: Manifest | None
) -> None:
    """Compare the sums of the unfinished epoch with the ids at its applied positions."""
    epoch, offset = head.cursor.epoch, head.cursor.offset
    sums = head.coverage - (account.epochs[-1] if account.epochs else CoverageSums())
    where = f"epoch {epoch}, the first {offset} places of each of {order['num_lanes']} lanes"
    if manifest is None:
        found.unproven.append(f"{where}: the dataset's manifest was not found; name its folder or URL with --data")
        return
    if manifest.digest != head.manifest_digest:
        found.unproven.append(f"{where}: {manifest.url} is not the dataset that {head.key} was trained on")
        return
    try:
        run_order = order_of(head, order, manifest)
    except DataError as error:
        found.unproven.append(f"{where}: {error}")
        return
    ids = applied_ids(run_order, epoch, offset, order["micro_batch"], account.holes)
    expected = CoverageSums()
    for part in ids:
        expected += CoverageSums.of_ids(part)
    if sums == expected:
        found.proven.append(f"{where}: their {expected.count} samples counted exactly once, and no other did")
    else:
        found.wrong.append(
            f"{where}: {sums.count} samples counted, and they are not the {expected.count} of these places"
        )


def order_of(record: CommitRecord, numbers: Numbers, manifest: Manifest) -> Order:
    """Return the order of a commit's run; raise DataError if the row lengths it depends on are missing."""
    if numbers.get("version") != VERSION:
        raise DataError(f"{record.key} has the order of another version: audit it with the version that began the run")
    arrangement = None
    if numbers["lengths"]:
        lengths = load_lengths(manifest)
        if lengths.fingerprint != numbers["lengths"]:
            raise DataError(f"{manifest.url}/{NAME}: is not what {record.key} was trained with")
        arrangement = LengthBuckets(lengths, numbers["micro_batch"], fingerprint=lengths.fingerprint)
    return Order(
        manifest.group_rows,
        num_lanes=numbers["num_lanes"],
        seed=int(record.rng["seed"]),
        block_row_groups=numbers["block_row_groups"],
        arrangement=arrangement,
    )


def applied_ids(order: Order, epoch: int, offset: int, micro_batch: int, holes: Sequence[Hole]) -> list[Int64s]:
    """Return the ids at the first positions of every lane of an epoch, without those of holes."""
    parts = []
    for lane in range(order.num_lanes):
        lo, end = order.lane_bounds(lane)
        for first in range(0, min(offset, end - lo), _CHUNK):
            ids = order.epoch(epoch).ids(lane, first, min(offset, first + _CHUNK))
            steps = epoch * order.num_steps(micro_batch) + (first + np.arange(len(ids))) // micro_batch
            for hole in holes:
                kept = (ids < hole.lo) | (ids >= hole.hi) | (steps < hole.since)
                ids, steps = ids[kept], steps[kept]
            parts.append(ids)
    return parts


def _all(num_samples: int, holes: Sequence[Hole]) -> str:
    return f"each of {num_samples:,} samples" + (", those of holes aside," if holes else "")


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
