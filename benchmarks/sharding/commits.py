"""Commits of shards: the cost of a save, the speed of reading pieces, and compatibility with stock torch."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.tensor import DTensor, Shard, zeros

from benchmarks.figures import Effort
from benchmarks.ranks import Meeting, run
from benchmarks.sharding.jobs import MODES, SMALL, WIDE, Job, Mode
from benchmarks.sharding.peers import mesh_of
from elastic_train.checkpoint.commits.pruning import prune
from elastic_train.checkpoint.commits.reader import discover, load, read_state
from elastic_train.checkpoint.commits.record import CommitFacts, CommitRecord
from elastic_train.checkpoint.commits.retention_policies import Retention
from elastic_train.checkpoint.commits.writer import CommitWriter
from elastic_train.checkpoint.format.layout import State, plan_attempt
from elastic_train.checkpoint.format.state_tree import Pieces, leaves_of
from elastic_train.checkpoint.saving.background_saves import Role, SaveMemory, Saves
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.world.fencing import StoreFence

RANKS_TO_SAVE = 2
WORLDS = (1, 3, 4, 7)


class SavingJob:
    """A job and its background saves in one world, in a folder that all its ranks see."""

    def __init__(self, job: Job, folder: str) -> None:
        group = job.group
        self.job, self.store = job, open_store(folder)
        fence = StoreFence(self.store)
        (term, *_) = group.all_gather_objects(fence.claim() if group.rank == 0 else 0)
        self.writers = list(job.state.pieces.assign(range(group.size)))
        role = Role(self.writers.index(group.rank), len(self.writers), "benchmark")
        self.saves = Saves(self.store, CommitWriter(self.store, fence, term, None), term, role, SaveMemory())

    @property
    def num_bytes(self) -> int:
        """Number of bytes that this rank writes."""
        plan = plan_attempt(self.job.state.pieces.tree(), len(self.writers))
        return plan.parts[self.job.group.rank].num_bytes

    def save(self) -> tuple[float, CommitRecord]:
        """Save the state during a step; return the seconds that this rank's training waited, and the commit."""
        state, pieces = self.job.state, self.job.state.pieces
        started = time.perf_counter()
        self.saves.begin(pieces.tree(), _facts(self.job), state.reached.intervals, pieces.only_update_changes())
        stall_s = time.perf_counter() - started

        def await_copy() -> None:
            nonlocal stall_s
            before = time.perf_counter()
            self.saves.await_staging()
            stall_s += time.perf_counter() - before

        self.job.step(await_copy)
        ended = self.saves.wait(self.job.group.check)
        assert ended is None or ended.error is None, f"the save failed: {ended}"  # a rank may have nothing to write
        self.job.group.barrier()
        head = discover(self.store, damage=lambda store, key: None).head
        assert head is not None, "it was published"
        return stall_s, head


def _facts(job: Job) -> CommitFacts:
    state = job.state
    return CommitFacts(
        step=state.step,
        cursor=state.reached.cursor,
        coverage=state.reached.coverage,
        rng={},
        metrics={},
        config_digest="",
        manifest_digest="",
        world_size=job.group.size,
    )


def save_stall(effort: Effort) -> dict[str, object]:
    """Return the milliseconds that a rank's training waits for a save, per GB that this rank writes.

    `vs_copy` is that time over a bare copy of as many bytes to allocated memory, on every rank at once.
    """
    stalls = dict[str, float]()
    for shards in MODES:
        with tempfile.TemporaryDirectory() as folder:
            found = run(_stall, RANKS_TO_SAVE, shards, folder, 3 if effort.is_quick else 9)
        worst = max(found, key=lambda one: one["stall_s"] / one["gigabytes"])
        stalls[shards] = round(1e3 * worst["stall_s"] / worst["gigabytes"], 1)
        stalls[f"{shards}_vs_copy"] = round(worst["stall_s"] / worst["copy_s"], 3)
        effort.say(f"{shards}: {worst['gigabytes']:.2f} GB a rank, {stalls[shards]} ms a GB")
    return {"save_stall_ms_per_gb": stalls}


def _stall(meeting: Meeting, shards: Mode, folder: str, rounds: int) -> dict[str, float]:
    job = Job(meeting.group, WIDE, shards)
    job.step()
    saving = SavingJob(job, folder)
    here, there = (torch.ones(saving.num_bytes, dtype=torch.uint8) for _ in range(2))
    stalls, copies = list[float](), list[float]()
    for _ in range(rounds + 1):  # the first one warms up
        stall_s, newest = saving.save()
        stalls.append(stall_s)
        copies.append(meeting.timed(lambda: there.copy_(here)))
        if meeting.group.rank == 0:
            prune(saving.store, Retention.of(last=1), newest=newest)
    gigabytes = saving.num_bytes / 1e9
    return {"stall_s": statistics.median(stalls[1:]), "copy_s": statistics.median(copies[1:]), "gigabytes": gigabytes}


def load_times(effort: Effort) -> dict[str, object]:
    """Return the time of dcp.load over ours, where each rank reads its rows of every tensor from a commit in pieces."""
    ratios = dict[str, float]()
    for size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            found = run(_loads, size, folder, 3 if effort.is_quick else 9)
        ours, theirs = (statistics.median(found[0][side]) for side in ("ours", "theirs"))
        ratios[f"w{size}"] = round(theirs / ours, 3)
        effort.say(f"{size} ranks: {ours:.3f} s, dcp.load {theirs:.3f} s")
    return {"load_vs_dcp": ratios}


def _loads(meeting: Meeting, folder: str, rounds: int) -> dict[str, list[float]]:
    """Load the same files into the same shards in turn, each on all ranks; the first round warms up."""
    group = meeting.group
    job = Job(group, WIDE, MODES[-1], 2)
    job.step()
    saving = SavingJob(job, folder)
    _, record = saving.save()
    whole, mesh, files = read_state(saving.store, record), mesh_of(meeting), f"{folder}/{record.attempt}"
    theirs = cast(State, _mapped(whole, lambda tensor: zeros(tensor.shape, device_mesh=mesh, placements=[Shard(0)])))
    ours = cast(State, _mapped(whole, lambda tensor: rows_of(tensor, group.rank, group.size)))

    def read_ours() -> None:
        load(saving.store, record, ours)
        group.barrier()

    def read_theirs() -> None:
        loader.load(theirs, checkpoint_id=files)
        group.barrier()

    times = [(meeting.timed(read_ours), meeting.timed(read_theirs)) for _ in range(rounds + 1)]
    assert _have_the_same(ours, theirs), "both read the same"
    return {"ours": [one for one, _ in times[1:]], "theirs": [other for _, other in times[1:]]}


def rows_of(tensor: Tensor, rank: int, size: int) -> Pieces:
    """Return a rank's pieces of a tensor that is sharded by rows, as by `fully_shard`."""
    num_rows, row = len(tensor), tensor[0].numel()
    each = -(-num_rows // size)
    lo, hi = (row * min(num_rows, (rank + turn) * each) for turn in (0, 1))
    held = {(lo, hi): torch.zeros(hi - lo, dtype=tensor.dtype)} if lo < hi else {}
    return Pieces(tensor.dtype, tensor.shape, held, ())


def _have_the_same(ours: State, theirs: State) -> bool:
    both = zip(leaves_of(ours), leaves_of(theirs), strict=True)
    pairs = [(one, other.to_local()) for (_, one), (_, other) in both if isinstance(other, DTensor)]
    assert pairs, "there are tensors"
    return all(
        torch.equal(memory, other.reshape(-1))
        for one, other in pairs
        if isinstance(one, Pieces)
        for memory in one.held.values()
    )


def dcp_equal(effort: Effort) -> dict[str, object]:
    """Return, by number of ranks, True if stock dcp.load reads a commit as the state of one unsharded rank."""
    equal = dict[str, bool]()
    with tempfile.TemporaryDirectory() as folder:
        run(_write, 1, "none", f"{folder}/whole", f"{folder}/whole.pt")
        whole = torch.load(f"{folder}/whole.pt", weights_only=True)
        for shards, size in itertools.product(MODES, WORLDS):
            (attempt, *_) = run(_write, size, shards, f"{folder}/{shards}-{size}", "")
            blank = {key: _mapped(whole[key], torch.zeros_like) for key in ("model", "optimizer")}
            loader.load(blank, checkpoint_id=f"{folder}/{shards}-{size}/{attempt}", no_dist=True)
            found = dict(leaves_of(blank))
            tensors = [(path, leaf) for path, leaf in leaves_of(whole) if isinstance(leaf, Tensor)]
            assert tensors, "there are tensors"
            equal[f"{shards}_w{size}"] = all(torch.equal(leaf, cast(Tensor, found[path])) for path, leaf in tensors)
            effort.say(f"{shards}, {size} ranks: {len(tensors)} tensors, {equal[f'{shards}_w{size}']}")
    return {"dcp_load_equal": equal}


def _write(meeting: Meeting, shards: Mode, folder: str, whole: str) -> str:
    """Commit after two steps, and return the location; with `whole`, also save the whole state there with torch."""
    job = Job(meeting.group, SMALL, shards, 2)
    for _ in range(2):
        job.step()
    if whole:
        torch.save(job.state.shards.share.held(), whole)
    Path(folder).mkdir(exist_ok=True)
    _, record = SavingJob(job, folder).save()
    return record.attempt


def _mapped(tree: object, change: Callable[[Tensor], object]) -> object:
    """Return a state in which every tensor with dimensions is changed."""
    if isinstance(tree, dict):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_mapped(value, change) for value in tree]
    return change(tree) if isinstance(tree, Tensor) and tree.dim() else tree
