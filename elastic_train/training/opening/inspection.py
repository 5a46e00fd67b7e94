"""Before a run's first step: report what has changed since its last start, and find unusable rows.

Changes are those of keys, code and libraries. The inspection reads some rows of all data sets for a few seconds. It
finds lists that are too long for the task or lack a value and, for tasks that are `Inspecting`, ids, classes and list
lengths that their `collate` would refuse.

Each rank inspects its own row groups in a fixed random order, so that those inspected in time are a random sample; of a
small data set, they are all. The inspection is skipped once a run has a step or a commit.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from elastic_train import errors
from elastic_train.checkpoint.commits.record import CommitRecord, is_exhausted
from elastic_train.core.arrays import Int64s
from elastic_train.data.arrow.numbers import first_incomplete, lengths_of
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.row_groups import RowGroups, num_decoders
from elastic_train.data.dataset.row_lengths import find_lengths
from elastic_train.data.loading.lane_batch import too_long
from elastic_train.errors import DataError, ElasticTrainError, RowError, UnreadableError
from elastic_train.job.plan import Plan
from elastic_train.job.plan_facts import config_of, describe_changes
from elastic_train.system.extras import version_of
from elastic_train.tasks.task import Inspecting, Limited
from elastic_train.tasks.task_source import source_files
from elastic_train.training.session import Inspected, Process, Unfit
from elastic_train.world.agreement import OWN, OWN_SECTIONS, own_sources
from elastic_train.world.world import World

MOST_NAMED = 20
LIMIT_S, LIMIT_SHARE = 10.0, 0.25
"""Seconds that a rank inspects rows, and the fraction of the peer timeout that this may take."""
_ROWS_PER_THREAD, _MOST_ROWS_PER_THREAD, _NUM_SLICES, _QUICK_S = 16, 1 << 20, 8, 0.02
"""Threads begin with small slices, doubled while all of them are quick; lengths in rows, time in seconds."""

SOURCE = "source of "
"""Prefix of the digests of the task's modules in a commit's versions."""
_OF_RECIPE = ("optimizer", "compile", "epochs", "max_steps")
_SAID = "what has changed"
VALIDATION = "the validation set"
"""Name of the validation set's digest in a commit's versions."""
_OF_BITS = ("precision", "reduction", "threads_per_rank", "device")
LIBRARIES = ("numpy", "pyarrow", "transformers", "tokenizers", "peft", "pillow", "torchvision")


def inspect_rows(process: Process, world: World) -> None:
    """Inspect rows; raise DataError on every rank if any rank has found an unfit one."""
    plan, fitness = process.plan, _fitness_of(process.plan)
    if not fitness.columns:
        return
    if not process.inspected:
        limit_s = min(LIMIT_S, LIMIT_SHARE * plan.config.peer_timeout_s)
        with process.watchdog.resting():
            mine = _inspect(fitness, plan.feed.manifests, world.group.rank, world.group.size, limit_s)
        process.inspected.append(mine)
    found = [Inspected(*of_rank) for of_rank in world.group.all_gather_objects(process.inspected[0])]
    world.announce(_judged(plan, found))


def inspect_alone(plan: Plan) -> str:
    """Inspect rows of a plan's data sets without a world, and return a summary; raise DataError for an unfit row."""
    fitness = _fitness_of(plan)
    if not fitness.columns:
        return "no rows were inspected"
    return _judged(plan, [_inspect(fitness, plan.feed.manifests, 0, 1, LIMIT_S)])


def _judged(plan: Plan, found: Sequence[Inspected]) -> str:
    """Return a summary of the inspected rows; raise the errors that ranks have found."""
    if wrong := sorted(each for of_rank in found for each in (of_rank.unfit, *of_rank.others) if each is not None):
        lines = [f"{plan.feed.manifests[at].place_of_sample(sample)}: {why}" for at, sample, why in wrong[:MOST_NAMED]]
        more = len(wrong) - MOST_NAMED
        raise RowError("\n".join([*lines, *([f"and {more} rows more"] if more > 0 else [])]))
    if failed := [of_rank.failure for of_rank in found if of_rank.failure is not None]:
        name, text = failed[0]
        raise getattr(errors, name, DataError)(text)
    total = sum(manifest.num_rows for manifest in plan.feed.manifests)
    inspected = min(total, sum(of_rank.num_rows for of_rank in found))  # ranks of an earlier world divided it otherwise
    num_cut = min(inspected, sum(of_rank.num_cut for of_rank in found))
    cut = f"; rows that are longer than it takes, and will be cut (data.too_long): {num_cut:,}" if num_cut else ""
    return f"{inspected:,} of {total:,} rows were inspected before the first step, and are fit for the task{cut}"


@dataclass(frozen=True, slots=True)
class _Fitness:
    """Criteria for rows: no missing values in list columns and, unless `cuts`, at most `longest` values."""

    longest: Mapping[str, int]
    cuts: bool
    task: Inspecting | None

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys([*self.longest, *(self.task.inspected_columns() if self.task else ())]))

    def unfit_lists(self, rows: pa.Table) -> list[tuple[int, str]]:
        """Return the rows with unfit lists, in order, and the reason for each."""
        found = []
        for name, longest in self.longest.items():
            column = rows.column(name)
            if not self.cuts:
                lengths = lengths_of(column)
                found += [(row, too_long(int(lengths[row]), name, longest)) for row in _above(lengths, longest)]
            if (row := first_incomplete(column)) is not None:
                found.append((row, f"a value within the list of column '{name}' is missing (null): {_REWRITE}"))
        return sorted(found)

    def count_cut(self, rows: pa.Table) -> int:
        if not self.cuts:
            return 0
        is_cut = np.zeros(len(rows), dtype=bool)
        for name, longest in self.longest.items():
            is_cut |= lengths_of(rows.column(name)) > longest
        return int(is_cut.sum())


_REWRITE = "write the data again without it, or leave the row out, and build the manifest again"


def _fitness_of(plan: Plan) -> _Fitness:
    task = plan.task
    longest, cuts = (
        (task.longest(), plan.config.data.too_long == "truncate") if isinstance(task, Limited) else ({}, False)
    )
    return _Fitness(longest, cuts, task if isinstance(task, Inspecting) else None)


def _above(lengths: Int64s, longest: int) -> list[int]:
    return [int(row) for row in np.flatnonzero(lengths > longest)[:MOST_NAMED]]


def _inspect(fitness: _Fitness, manifests: Sequence[Manifest], rank: int, num_ranks: int, limit_s: float) -> Inspected:
    """Inspect a rank's row groups until the time limit, or until enough unfit rows are found.

    Failures are returned rather than raised: all ranks must learn of them.
    """
    unfit: list[Unfit] = []
    if rank == 0:
        for number, manifest in enumerate(manifests):
            unfit += [(number, *each) for each in _known_to_be_longer(fitness, manifest)]
    num_rows = num_cut = 0
    try:
        for inspected, cut, found in _unfit_rows(fitness, manifests, rank, num_ranks, limit_s):
            num_rows, num_cut = inspected, num_cut + cut
            unfit += [each for each in found if each not in unfit]
            if len(unfit) > MOST_NAMED:
                break
    except ElasticTrainError as error:
        if not unfit:
            return Inspected(0, None, (type(error).__name__, str(error)))
    return Inspected(num_rows, unfit[0] if unfit else None, None, tuple(unfit[1 : MOST_NAMED + 1]), num_cut)


def _unfit_rows(
    fitness: _Fitness, manifests: Sequence[Manifest], rank: int, num_ranks: int, limit_s: float
) -> Iterator[tuple[int, int, list[Unfit]]]:
    """Yield the number of rows inspected so far, of truncated rows among the last ones, and the unfit rows."""
    readers = [RowGroups(manifest, fitness.columns) for manifest in manifests]
    until, num_rows, per_thread = time.monotonic() + limit_s, 0, _ROWS_PER_THREAD
    with ThreadPoolExecutor(num_decoders(), "inspect") as pool:
        for number, group in _row_groups(manifests, rank, num_ranks):
            if num_rows and time.monotonic() > until:
                return
            try:
                rows = readers[number].decode(group)
            except UnreadableError:
                continue  # handled when its samples are due (data.quarantine)
            first_id = int(manifests[number].group_first_id[group])
            lists = [(number, first_id + row, why) for row, why in fitness.unfit_lists(rows)]
            if fitness.task is None:
                num_rows += len(rows)
                yield num_rows, fitness.count_cut(rows), lists
                continue
            yield num_rows, fitness.count_cut(rows), lists
            lo = 0
            while lo < len(rows):
                began = time.monotonic()
                if num_rows and began > until:
                    return
                begins = range(lo, min(len(rows), lo + _NUM_SLICES * per_thread), per_thread)
                parts = list(pool.map(fitness.task.unfit_rows, [rows.slice(begin, per_thread) for begin in begins]))
                num_inspected = min(len(rows) - lo, _NUM_SLICES * per_thread)
                found = zip(begins, parts, strict=True)
                lo, num_rows = lo + num_inspected, num_rows + num_inspected
                if time.monotonic() - began < _QUICK_S:
                    per_thread = min(2 * per_thread, _MOST_ROWS_PER_THREAD)
                unfit = [(number, first_id + at + int(row), str(why)) for at, part in found for row, why in part]
                yield num_rows, 0, unfit


def _known_to_be_longer(fitness: _Fitness, manifest: Manifest) -> Iterator[tuple[int, str]]:
    """Yield the first samples that are too long according to the manifest's lengths, if it has them."""
    known = find_lengths(manifest)
    longest = None if known is None or fitness.cuts else fitness.longest.get(known.column)
    if known is None or longest is None or (known.longest is not None and known.longest <= longest):
        return
    num_found = 0
    for first, num_rows in zip(manifest.group_first_id, manifest.group_rows, strict=True):
        lengths = known(np.arange(first, first + num_rows))
        for row in _above(lengths, longest):
            yield int(first) + row, too_long(int(lengths[row]), known.column, longest)
            num_found += 1
        if num_found >= MOST_NAMED:
            return


def _row_groups(manifests: Sequence[Manifest], rank: int, num_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield a rank's row groups, each with its data set's number; the ranks together cover all row groups."""
    ends = np.cumsum([len(manifest.group_rows) for manifest in manifests])
    for place in np.random.default_rng(0).permutation(int(ends[-1]))[rank::num_ranks].tolist():
        number = int(np.searchsorted(ends, place, side="right"))
        yield number, place - (int(ends[number - 1]) if number else 0)


def versions_of(plan: Plan) -> dict[str, str]:
    """Return, for commits, the digests of the task's modules and of the validation set, and versions of libraries."""
    digests = dict(line.rsplit(" ", 1) for line in own_sources(plan))
    found = {f"{SOURCE}{name}": digest for name, digest in digests.items()}
    if (digest := plan.feed.validation_digest) is not None:
        found[VALIDATION] = digest
    return found | _libraries()


@functools.cache
def _libraries() -> dict[str, str]:
    return {name: version for name in LIBRARIES if (version := version_of(name)) is not None}


def say_changes(process: Process, world: World, head: CommitRecord | None, versions: Mapping[str, str]) -> None:
    """Announce, once per process, the changes since the commit that the run continues from."""
    is_said = _SAID in process.warned
    process.warned.add(_SAID)
    if is_said or head is None or not world.is_leader:
        return
    plan = process.plan
    lines = _of_length(process, head), _of_keys(plan, head), _of_validation(plan, head), _of_code(plan, head, versions)
    for line in itertools.chain(*lines):
        world.announce(line)


def _of_length(process: Process, head: CommitRecord) -> Iterator[str]:
    """Yield a line if the run is already finished."""
    step, total = process.state.step, process.plan.total_steps
    stopping, improvement = process.plan.config.validation.early_stopping, process.state.reached.improvement
    if step < total and is_exhausted(stopping, improvement):
        yield (
            f"Early stopping has ended this run after step {step} of {total} ({head.key}): raise "
            "validation.early_stopping.patience, or set early_stopping to null, to train more"
        )
    if step == total:
        yield f"All {total} steps are applied already ({head.key}): raise epochs or max_steps to train more"


def _of_keys(plan: Plan, head: CommitRecord) -> Iterator[str]:
    """Yield a line with the keys that differ from the last start, except those without effect on the computation.

    Changes of the recipe, which is in the commit, are reported by the state.
    """
    changed = describe_changes(plan.config, config_of(plan.config, head.term))
    ours = [line for line in changed if not _is_own(line.partition(" ")[0])]
    if ours:
        may_round = any(line.partition(" ")[0] in _OF_BITS for line in ours)
        effect = "; bits of the weights may differ from here on" if may_round else ""
        yield f"The configuration has changed since the last start: {'; '.join(ours)}{effect}"


def _of_validation(plan: Plan, head: CommitRecord) -> Iterator[str]:
    """Yield a warning if the validation rows differ from those of the commit, whatever their path."""
    before, now = head.versions.get(VALIDATION), plan.feed.validation_digest
    if before is not None and now is not None and before != now:
        yield (
            f"WARNING: the validation set {plan.config.data.validation} is not the one of {head.key} (digest "
            f"{now[:12]}, then {before[:12]}): earlier values, as of checkpoint.keep_best and early stopping, are of "
            "other rows. Restore that set, or start again in another run.dir, to compare them"
        )


def _is_own(key: str) -> bool:
    section = key.partition(".")[0]
    return key in OWN or section in OWN_SECTIONS or section in _OF_RECIPE or section == "checkpoint"


def _of_code(plan: Plan, head: CommitRecord, versions: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for changed files and libraries; commits of older releases do not record them."""
    before = head.versions
    files = {SOURCE + name: path for name, path in source_files(type(plan.task)).items()}
    sources = {name for name in {**before, **versions} if name.startswith(SOURCE)}
    knows = any(name in before for name in sources)
    changed = sorted(name for name in sources if knows and before.get(name) != versions.get(name))
    if changed:
        named = ", ".join(str(files.get(name, name.removeprefix(SOURCE))) for name in changed)
        yield (
            f"WARNING: code has changed since {head.key}: {named}. The steps before {head.step} were computed by the "
            "earlier code: if it computes something else now, start again in another run.dir"
        )
    now = {"torch": torch.__version__, **versions}
    libraries = [name for name in ("torch", *LIBRARIES) if name in before and before[name] != now.get(name)]
    if libraries:
        what = ", ".join(f"{name} {before[name]}, now {now.get(name, 'none')}" for name in libraries)
        yield f"Libraries have changed since {head.key} ({what}): bits may differ from here on"
