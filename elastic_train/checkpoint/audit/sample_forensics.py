"""Forensics: find the samples that were applied too often or not at all, from the ids that every rank recorded.

With `run.forensic` each rank records the ids of each step before the step's reduction. The newest commit says which
steps count, and by which term; ids of steps that were never applied do not. A rank that cannot write its record keeps
training: its steps then prove nothing, and accuse nobody.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from elastic_train.checkpoint.audit.coverage_proof import (
    Audit,
    Numbers,
    applied_ids,
    differing,
    expected_times,
    mixture_of,
    order_of,
)
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.core.accounting import SampleAccount
from elastic_train.core.arrays import Ranges, ranges_of
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.errors import ConfigError
from elastic_train.tracking.history_files import FOLDER

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Read:
    """The ids that one rank contributed to one step, as half-open ranges; a repeated id is in several."""

    term: int
    rank: int
    step: int
    epoch: int
    ids: Ranges
    world: int
    """Number of ranks that contributed samples to the step."""


def look_closely(found: Audit, run_dir: Path, head: CommitRecord, manifests: Sequence[Manifest]) -> None:
    """Add to an audit the samples of each epoch that were applied too often or not at all, and their steps.

    Raise ConfigError if the run recorded no ids.
    """
    assert head.order is not None and head.account is not None, "the audit says so before"
    reads = _applied_reads(run_dir, head)
    steps_told = _told_steps(reads)
    if not reads:
        raise ConfigError(f"{run_dir}/{FOLDER}: no ids are there; they are kept from the start on with `run.forensic`")
    silent = [step for step in range(1, head.step + 1) if step not in steps_told]
    if silent:
        listed = _listed(ranges_of(np.array(silent, dtype=np.int64)))
        found.unproven.append(
            f"which samples the steps {listed} applied: the ids of all ranks, or of some, are missing; "
            "were they kept all along?"
        )
        return
    for epoch in range(head.cursor.epoch + (head.cursor.offset > 0)):
        _compare(found, head, [read for read in reads if read.epoch == epoch], epoch, manifests)


def _told_steps(reads: Sequence[Read]) -> set[int]:
    num_ranks = Counter(read.step for read in reads)
    return {read.step for read in reads if num_ranks[read.step] >= read.world}


def _applied_reads(run_dir: Path, head: CommitRecord) -> list[Read]:
    """Return the contributions to the steps of a commit's lineage."""
    term_of = {step: i.term for i in head.intervals for step in range(i.lo + 1, i.hi + 1)}
    # A step that was repeated in the same term, without a hole's samples, was recorded twice: the last counts.
    reads = {(read.term, read.rank, read.step): read for read in _reads(run_dir)}
    return [read for read in reads.values() if term_of.get(read.step) == read.term]


def _reads(run_dir: Path) -> Iterator[Read]:
    for path in sorted((run_dir / FOLDER).glob("[0-9]*-*-*.jsonl")):
        for text in path.read_bytes().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue  # torn when its process died
            if isinstance(line, dict) and line.get("op") == "read":
                ids = tuple((lo, hi) for lo, hi in line["ids"])
                yield Read(line["term"], line["rank"], line["step"], line["epoch"], ids, line["world"])


def _compare(
    found: Audit, head: CommitRecord, reads: Sequence[Read], epoch: int, manifests: Sequence[Manifest]
) -> None:
    """Compare how often each sample was applied in an epoch with how often it should have been.

    Samples of a mixture are compared over the whole run, since its sources have separate epochs.
    """
    assert head.order is not None and head.account is not None, "checked before"
    when = f"epoch {epoch}"
    times = np.zeros(head.order["num_samples"], dtype=np.int32)
    for read in reads:
        for lo, hi in read.ids:
            times[lo:hi] += 1
    if head.sources:
        expected, when = _expected_of_mixture(head, head.account, manifests), "over the whole run"
        if expected is None:
            found.unproven.append("how often each sample was applied: name the sources with --data, in their order")
            return
    else:
        expected = _expected(head.order, head.account, head, epoch, manifests[0] if manifests else None)
    too_often = np.flatnonzero(times > (1 if expected is None else expected))
    missing = np.flatnonzero(times < expected) if expected is not None else np.zeros(0, dtype=np.int64)
    for id_ in too_often[:_MOST_NAMED].tolist():
        where = [f"{r.step} (term {r.term}, rank {r.rank})" for r in reads for lo, hi in r.ids if lo <= id_ < hi]
        found.wrong.append(f"{when}: sample {id_} was applied {times[id_]} times, in steps {', '.join(where)}")
    if len(too_often):
        found.wrong.append(f"{when}: applied too often are the samples {_listed(ranges_of(too_often))}")
    if len(missing):
        found.wrong.append(f"{when}: missing are the samples {_listed(ranges_of(missing))}")
    if expected is None:
        found.unproven.append(f"{when}: which samples are missing; name the dataset with --data")
    elif not len(too_often) and not len(missing):
        found.proven.append(f"{when}: by the ids that {len(reads)} lines name, none is repeated and none missing")


def _expected_of_mixture(
    head: CommitRecord, account: SampleAccount, manifests: Sequence[Manifest]
) -> np.ndarray[tuple[int], np.dtype[np.int32]] | None:
    if differing(head, manifests) is not None:
        return None
    return expected_times(mixture_of(head, manifests), head.cursor.offset, account.holes).astype(np.int32)


def _expected(
    order: Numbers, account: SampleAccount, head: CommitRecord, epoch: int, manifest: Manifest | None
) -> np.ndarray[tuple[int], np.dtype[np.int32]] | None:
    """Return how often each sample should have been applied in an epoch so far; None if unknown."""
    times = np.ones(order["num_samples"], dtype=np.int32)
    if epoch == head.cursor.epoch:
        if manifest is None or manifest.digest != head.manifest_digest:
            return None
        times[:] = 0
        run_order = order_of(head, order, manifest)
        for ids in applied_ids(run_order, epoch, head.cursor.offset, order["micro_batch"], account.holes):
            times[ids] = 1
        return times
    for hole in account.holes:
        for lo, hi in hole.left_out_of(epoch):
            times[lo:hi] = 0
    return times


def _listed(ranges: Ranges) -> str:
    return ", ".join(str(lo) if hi == lo + 1 else f"{lo} to {hi - 1}" for lo, hi in ranges)
