"""Run one seed and judge it.

The judge is `chaos.judge.checker`, as for real runs. It sees every fault, even harmless ones, so it may report a
recovery that was not needed as `unknown`; a run counts against the product when an invariant is *false*, or any but
`faults`, `rpo` and `rto` is *unknown*.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

from chaos.judge.checker import judge
from chaos.judge.evidence.applied import skipped_steps
from chaos.judge.evidence.run_files import Evidence
from chaos.judge.findings import Finding
from chaos.sim.campaign.swarm import (
    LONE_S,
    draw,
    draw_agent,
    draw_bad_data,
    draw_lone,
    draw_no_numbers,
    draw_of_etcd,
    draw_outages,
    draw_skews,
    draw_unfit,
    in_order,
)
from chaos.sim.job.fault import SimFault
from chaos.sim.job.job import Job
from chaos.sim.job.shape import Shape, Shards
from elastic_train.world.quarantine import FOLDER

MOST, MOST_IN_STORM, STORMS = 8, 30, 0.2
"""Most faults in a run, most in a storm, and the share of storms: longer jobs that are hit again while recovering."""
RESTARTS = 1 / 6
"""Share of runs in which a fault restarts all processes of the world, as with plain torchrun."""
SPOILT = 1 / 8
"""Share of runs in which row groups are unreadable and quarantined."""
TRACKED = 1 / 8
"""Share of runs that send metrics to a tracker."""
REFUSED = 1 / 6
"""Share of runs in which etcd refuses calls for a while or holds foreign records."""
SKEWED = 1 / 8
"""Share of live runs with clocks seconds apart. With restarts, steps are too far apart to measure the skew."""
WITH_VECTORS, MOST_WITH_VECTORS = 1 / 8, 8
"""Share of runs in which the product's own code sums lane vectors, and most ranks in these: all send to all."""
ON_DEVICES = 1 / 2
"""Share of these runs with the vectors on devices."""
IN_SHARDS, MOST_COPIES = 1 / 8, 3
"""Share of runs that train a real, tiny model with sharded state, and the most copies of each shard."""
CELLS, STAGES, NEAR_S = (2, 2, 3, 4), (2, 2, 3, 4), 0.003
"""Workers per cell and number of stages, for runs with cells; and the longest message delay in them: a world of up to a
hundred ranks meets a dozen times before its first step, each time as long as the slowest message."""
IN_SHARES, MOST_IN_SHARES = 1 / 3, 24
"""Share of runs with cells that train a real, tiny model with sharded moments, and most workers in these, since every
rank computes all columns."""
AGENTS = 1 / 32
"""Share of live runs in which a node's agent freezes but its workers do not."""
UNFIT = 1 / 16
"""Share of live runs with several nodes in which one restarts on a processor that computes wrongly."""
LEAST_STEP_S = 4.0
"""Least time of a step on one rank, in jobs that last for minutes."""
WITHOUT_NUMBERS = 1 / 16
"""Share of runs in which some losses are not finite."""
ALONE = 1 / 10
"""Share of runs with several nodes whose only fault is one bad node, in a job of some minutes."""
NEEDS_A_LOSS = ("faults", "rpo", "rto")
"""Invariants that may stay unknown when the faults did no harm, or only late."""
MOST_UNSEEN = 500_000
"""Number of allocations between two garbage collections."""

SHAPES = (
    Shape(),
    Shape(nodes=2, ranks=2, lanes=8, rows=(64, 64, 33), epochs=2, commit_every=4, least_part_bytes=1 << 20),
    Shape(nodes=4, lanes=5, micro_batch=3, rows=(17, 50, 9, 31, 2), epochs=4, commit_every=3, keep_last=2),
    Shape(nodes=2, min_nodes=2, lanes=4, rows=(101,), epochs=4, commit_every=7, lane_s=0.5),
    Shape(nodes=3, ranks=2, min_nodes=2, lanes=12, micro_batch=2, rows=(20,) * 9, epochs=3, lane_s=0.3, ttl_s=5.0),
    Shape(nodes=1, ranks=3, lanes=6, rows=(90, 15), epochs=3, commit_every=4, lane_s=0.05),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that determines a run: the same case gives the same history."""

    seed: int
    shape: Shape
    faults: tuple[SimFault, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a case."""

    case: Case
    findings: tuple[Finding, ...]
    digest: str
    num_faults: Mapping[str, int]
    virtual_s: float
    errors: tuple[str, ...]

    @property
    def violations(self) -> tuple[Finding, ...]:
        """The findings that count against the product."""
        return tuple(
            finding
            for finding in self.findings
            if finding.truth == "false" or (finding.truth == "unknown" and finding.invariant not in NEEDS_A_LOSS)
        )


def case_of(seed: int, num_nodes: int | None = None, *, has_cells: bool = False, has_stages: bool = False) -> Case:
    """Draw a case from a seed; `num_nodes` applies to runs with cells, whose stages may be on different nodes."""
    draws = random.Random(f"{seed}/case")
    shape = draws.choice(SHAPES)
    shape = replace(
        shape,
        peer_timeout_s=draws.choice((20.0, 60.0, 300.0)),
        delay_s=draws.choice((0.001, 0.003, 0.02)),
        lane_s=shape.lane_s * draws.choice((0.5, 1.0, 3.0)),
    )
    if num_nodes is not None:
        shape = replace(shape, nodes=num_nodes, ranks=1, lanes=max(shape.lanes, num_nodes))
    if has_cells:
        draws_of_cells = random.Random(f"{seed}/cells")
        shape = (in_stages if has_stages else in_cells)(shape, draws_of_cells)
    is_storm = draws.random() < STORMS
    if is_storm:
        shape = replace(shape, epochs=3 * shape.epochs)
    has_no_spares = shape.ranks % shape.cell == 0 and shape.num_replicas <= shape.lanes
    if random.Random(f"{seed}/recovery").random() < RESTARTS and has_no_spares:
        shape = replace(shape, recovery="restart")
    faults = draw(random.Random(f"{seed}/faults"), shape, MOST_IN_STORM if is_storm else MOST)
    data = random.Random(f"{seed}/data")
    if data.random() < SPOILT:
        shape = replace(shape, unreadable="quarantine")
        faults = in_order([*faults, *draw_bad_data(data, shape)])
    tracker = random.Random(f"{seed}/tracker")
    if tracker.random() < TRACKED:
        shape = replace(shape, tracked=True)
        faults = in_order([*faults, *draw_outages(tracker, shape)])
    etcd = random.Random(f"{seed}/etcd")
    if etcd.random() < REFUSED:
        faults = in_order([*faults, *draw_of_etcd(etcd, shape)])
    is_small = shape.cell == 1 and shape.nodes * shape.ranks <= MOST_WITH_VECTORS
    if random.Random(f"{seed}/vectors").random() < WITH_VECTORS and is_small:
        shape = replace(shape, vectors=True, device=random.Random(f"{seed}/device").random() < ON_DEVICES)
    shards = random.Random(f"{seed}/shards")
    if shards.random() < IN_SHARDS and is_small:
        shape = in_shards(shape, shards)
    shares = random.Random(f"{seed}/shares")
    if shape.cell > 1 and shares.random() < IN_SHARES and shape.nodes * shape.ranks <= MOST_IN_SHARES:
        shape = in_shards(shape, shares)
    clocks = random.Random(f"{seed}/clocks")
    if shape.nodes > 1 and shape.recovery == "live" and clocks.random() < SKEWED:
        faults = in_order([*faults, *draw_skews(clocks, shape)])
    agents = random.Random(f"{seed}/agents")
    if shape.recovery == "live" and agents.random() < AGENTS:
        faults = in_order([*faults, draw_agent(agents, shape)])
    machines = random.Random(f"{seed}/machines")
    if shape.nodes > 1 and shape.recovery == "live" and machines.random() < UNFIT:
        faults = in_order([*faults, draw_unfit(machines, shape)])
    numbers = random.Random(f"{seed}/numbers")
    if numbers.random() < WITHOUT_NUMBERS:
        faults = in_order([*faults, *draw_no_numbers(numbers, shape)])
    alone = random.Random(f"{seed}/alone")
    if shape.nodes > 1 and alone.random() < ALONE:
        return _case_of_one(seed, shape, alone)
    return Case(seed, shape, faults)


def in_shards(shape: Shape, draws: random.Random) -> Shape:
    """Return the shape with a real, tiny model; draws which of its state is sharded and the number of copies.

    With cells, only the optimizer state is sharded.
    """
    copies, what = draws.randint(1, MOST_COPIES), draws.choice(get_args(Shards) if shape.cell == 1 else ("optimizer",))
    return replace(shape, vectors=False, device=False, copies=copies, shards=what)


def in_cells(shape: Shape, draws: random.Random) -> Shape:
    """Return the shape with cells: nodes hold one or more, some have spare workers, and some cells stay spare.

    The number of rows grows with the step size, to keep the number of steps.
    """
    cell = draws.choice(CELLS)
    return _of_cells(replace(shape, cell=cell), cell, draws)


def in_stages(shape: Shape, draws: random.Random) -> Shape:
    """Return the shape with stages on different nodes if a node cannot hold them all, for at least two cells."""
    stage_size = draws.choice((1, 1, 2, 3))
    stages = max(1, min(draws.choice(STAGES), shape.nodes // 2))
    return _of_cells(replace(shape, cell=stages * stage_size, stages=stages), stage_size, draws)


def _of_cells(shape: Shape, least: int, draws: random.Random) -> Shape:
    cell, ranks = shape.cell, least * draws.choice((1, 1, 2)) + draws.choice((0, 0, 1))
    num_cells = shape.cells_of([ranks] * shape.nodes)
    lanes = max(2, shape.stages, draws.choice((num_cells, num_cells - 1, 2 * num_cells)))
    num_rows = lanes * shape.micro_batch * draws.randint(4, 8) - lanes // 3
    rows = tuple((number + 1) * num_rows // 4 - number * num_rows // 4 for number in range(4))
    min_nodes, delay_s = min(shape.min_nodes, shape.nodes // 2), min(shape.delay_s, NEAR_S)
    return replace(shape, cell=cell, ranks=ranks, lanes=lanes, rows=rows, min_nodes=min_nodes, delay_s=delay_s)


def _case_of_one(seed: int, shape: Shape, draws: random.Random) -> Case:
    """Return the case of a job that is long enough for one bad node and can continue without it.

    Every shard has two holders or more: with one, all workers would restart, and the bad node might come first.
    """
    copies = max(2, shape.copies) if shape.copies else 0
    lane_s = max(shape.lane_s, LEAST_STEP_S / shape.lanes)
    shape = replace(shape, recovery="live", min_nodes=1, copies=copies, lane_s=lane_s)
    steps = round((30.0 + draws.uniform(0.5, 1.5) * LONE_S) / shape.step_s)
    shape = replace(shape, epochs=max(1, round(shape.epochs * steps / shape.total_steps)))
    return Case(seed, shape, (draw_lone(draws, shape),))


def simulate(case: Case, bug: Mapping[str, object] | None = None) -> Outcome:
    """Run a case and judge it against the same job without faults."""
    return run_and_judge(case, bug)[1]


def run_and_judge(case: Case, bug: Mapping[str, object] | None = None) -> tuple[Evidence | None, Outcome]:
    """Run and judge a case as `simulate` does; also return the run's evidence, or None if the product's code raised."""
    job = Job(case.shape, case.seed, case.faults, bug=bug)
    try:
        with _rare_collection():
            run = job.run()
            reference = reference_of(_same_job(case.shape), holes_of(run), skipped_in(run))
            # The reference is shared by all jobs with the same outcome, so its settings are those of none.
            findings = judge(run, replace(reference, config=run.config))
    except Exception as error:  # noqa: BLE001 - whatever breaks in the product's code is this run's finding
        run, findings = None, [Finding("crash", "false", f"{type(error).__name__}: {error}")]
    outcome = Outcome(
        case,
        tuple(findings),
        "" if run is None else digest_of(run),
        dict(job.injector.num_faults),
        job.around.kernel.now,
        tuple(job.record.errors),
    )
    return run, outcome


@contextlib.contextmanager
def _rare_collection() -> Iterator[None]:
    """Collect garbage rarely: a run keeps nearly all its objects, and each collection scans them all."""
    before = gc.get_threshold()
    gc.set_threshold(MOST_UNSEEN)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def digest_of(run: Evidence) -> str:
    """Return the SHA-256 of everything that a run left behind."""
    digest = hashlib.sha256(json.dumps(run.result).encode())
    for lines in run.processes:
        digest.update(json.dumps(lines).encode())
    for commit in run.commits:
        digest.update(f"{commit.key} {commit.digest}".encode())
    if run.metrics is not None:
        digest.update(json.dumps([run.metrics, run.tracked]).encode())
    return digest.hexdigest()


def _same_job(shape: Shape) -> Shape:
    """Return the shape reduced to what determines the final state: one rank has all lanes, time does not matter."""
    rows, epochs, lanes = shape.rows, shape.epochs, shape.lanes
    lane_s = Shape().lane_s / lanes
    same = Shape(nodes=1, lanes=lanes, micro_batch=shape.micro_batch, rows=rows, epochs=epochs, lane_s=lane_s)
    # State held whole by one rank must end equal to state held by many, in shards or cells.
    return replace(
        same,
        commit_every=shape.commit_every,
        vectors=shape.vectors,
        copies=min(1, shape.copies),
        cell=shape.cell,
        stages=shape.stages,
        is_whole=True,
    )


def holes_of(run: Evidence) -> str:
    """Return the holes that a run reports, as JSON; "" for none."""
    holes = (run.result or {}).get("holes")
    return json.dumps(holes) if holes else ""


def skipped_in(run: Evidence) -> tuple[int, ...]:
    """Return the steps, counted from 0, whose updates a run reports as skipped; the judge verifies the reasons."""
    return tuple(sorted(step - 1 for step in skipped_steps(run.result or {})))


@lru_cache(256)
def reference_of(shape: Shape, holes: str = "", nonfinite: tuple[int, ...] = ()) -> Evidence:
    """Return the fault-free run of a job on one rank, which knows `holes` from the start and has finite losses in all
    steps but `nonfinite`."""
    shape = replace(shape, unreadable="quarantine") if holes else shape
    job = Job(shape, 0, (), first_pid=1_000_000, nonfinite=nonfinite)
    if holes:
        job.around.storage.put(f"{FOLDER}{0:08d}-{0:012d}-0.json", holes.encode())
    return job.run()
