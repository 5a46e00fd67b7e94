"""Simulated jobs of cells: drawn, valid, and recovered by place, with the product's own placement and standbys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from chaos.judge.evidence.run_files import Evidence, Line, whole
from chaos.sim.campaign.long_runs import Draw
from chaos.sim.campaign.simulate import Case, reference_of, run_and_judge, simulate
from chaos.sim.job.fault import SimFault
from chaos.sim.job.job import Job
from chaos.sim.job.shape import Shape

pytestmark = pytest.mark.slow

DRAWN, IN_STAGES = Draw(in_cells=True), Draw(in_cells=True, in_stages=True)
TWO_CELLS = Shape(nodes=2, ranks=2, cell=2, lanes=6, rows=(60, 60, 41), epochs=3, commit_every=7, lane_s=0.15)


def test_jobs_of_cells_are_drawn_in_all_their_forms() -> None:
    """Cells of two to four, one or two per node, with or without standbys, on 4 to 16 nodes; live or restarted."""
    shapes = [DRAWN.case(seed).shape for seed in range(200)]
    assert {shape.cell for shape in shapes} == {2, 3, 4}
    assert {shape.ranks // shape.cell for shape in shapes} == {1, 2}
    assert {shape.ranks % shape.cell for shape in shapes} == {0, 1}
    assert {4, 16} <= {shape.nodes for shape in shapes} <= set(range(4, 17))
    assert {shape.recovery for shape in shapes if shape.ranks % shape.cell == 0} == {"live", "restart"}
    assert {shape.recovery for shape in shapes if shape.ranks % shape.cell} == {"live"}
    assert any(shape.lanes < shape.num_replicas for shape in shapes), "some cells wait for room"
    assert {shape.copies for shape in shapes} == {0, 1, 2, 3} and not any(shape.vectors for shape in shapes)
    in_shares = [shape for shape in shapes if shape.copies]
    assert {shape.shards for shape in in_shares} == {"optimizer"} and {shape.cell for shape in in_shares} == {2, 3, 4}
    assert DRAWN.options == "--cells"
    assert {Draw((32, 32), 0.1, in_cells=True).case(seed).shape.cell for seed in range(20)} == {2, 4, 8}


def test_jobs_of_stages_are_drawn_in_all_their_forms() -> None:
    """Two to four stages of one to three workers, on separate nodes or two per node, with standby workers."""
    shapes = [IN_STAGES.case(seed).shape for seed in range(200)]
    sizes = [shape.cell // shape.stages for shape in shapes]
    assert {shape.stages for shape in shapes} == {2, 3, 4} and set(sizes) == {1, 2, 3}
    assert {shape.ranks // size for shape, size in zip(shapes, sizes, strict=True)} == {1, 2, 3}
    assert {shape.ranks % size for shape, size in zip(shapes, sizes, strict=True)} == {0, 1}
    assert all(shape.cells_of([shape.ranks] * (shape.nodes - 1)) >= 1 for shape in shapes)
    assert sum(shape.ranks < shape.cell for shape in shapes) > 100, "most are of several nodes"
    assert all(shape.ranks >= shape.cell for shape in shapes if shape.recovery == "restart")
    assert IN_STAGES.options == "--cells --stages"
    long = [Draw((32, 32), 0.1, in_cells=True, in_stages=True).case(seed).shape for seed in range(20)]
    assert {shape.stages for shape in long} == {2, 3, 4} and {shape.cell // shape.stages for shape in long} == {2, 4, 8}


@pytest.mark.parametrize("draw", [DRAWN, IN_STAGES], ids=["cells", "stages"])
@pytest.mark.parametrize("seed", [2, pytest.param(7, marks=pytest.mark.hunt)])
def test_a_job_of_cells_is_valid_and_the_same_when_it_is_repeated(seed: int, draw: Draw) -> None:
    outcome = simulate(draw.case(seed))
    assert outcome.violations == () and sum(outcome.num_faults.values()) > 0
    assert simulate(draw.case(seed)).digest == outcome.digest


@pytest.mark.parametrize("seed", [40, pytest.param(46, marks=pytest.mark.hunt), 51])
def test_what_cells_over_several_nodes_have_brought_to_light_is_mended(seed: int) -> None:
    """Forgotten places while nobody could write; a frozen stage; an end that had to be repeated."""
    assert simulate(IN_STAGES.case(seed)).violations == ()


def test_a_long_job_of_cells_is_valid() -> None:
    outcome = simulate(Draw((4, 4), 0.1, 600.0, in_cells=True).case(3))
    assert outcome.case.shape.ranks == 8
    assert outcome.violations == () and sum(outcome.num_faults.values()) > 10


def test_the_state_of_a_lost_place_comes_from_the_same_place_of_another_cell() -> None:
    """One cell continues, a new worker completes the other; the weights equal those of one rank with all parts."""
    shape = replace(TWO_CELLS, lane_s=0.4)
    run = _run(shape, SimFault("kill_worker", at_s=9.0, node=1, rank=1))
    worlds = _worlds(run)
    assert [size for _, size in worlds] == [4, 2, 4]
    taken = [line for line in run.of("restore") if line["given_by"] is not None]
    assert {(whole(line, "rank"), line["given_by"]) for line in taken} == {(2, 0), (3, 1)}, (
        "who was idle, and who is new"
    )
    assert not run.of("rollback")
    _check_same_weights(shape, run)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_share_of_a_places_moments_is_taken_over_by_its_column(stages: int) -> None:
    """Three cells with two copies of each shard lose two ranks of a place in turn, but no step, and no bit differs."""
    shape = replace(TWO_CELLS, nodes=3, stages=stages, copies=2, lane_s=0.4)
    kills = [SimFault("kill_worker", at_s=at_s, node=node, rank=1) for at_s, node in ((8.0, 1), (14.0, 2))]
    run = _run(shape, *kills)
    assert next(size for _, size in _worlds(run)) == 6 and len(_worlds(run)) > 2
    assert not run.of("rollback") and not any(line.get("lost") for line in run.of("restore"))
    _check_same_weights(shape, run)


def test_a_share_that_all_holders_have_lost_comes_from_the_newest_commit() -> None:
    """With one copy each rank loss loses a shard, which the judge sees and accepts; the weights are right."""
    shape = replace(TWO_CELLS, nodes=3, copies=1, commit_every=3)
    run, outcome = run_and_judge(Case(1, shape, (SimFault("kill_worker", at_s=9.0, node=1, rank=1),)))
    assert outcome.violations == () and run is not None
    assert any(line.get("lost") for line in run.of("restore")) and run.of("rollback")


def test_a_spare_fills_the_place_at_once() -> None:
    """It waits, warmed up, on the node that lost a worker: no world is smaller."""
    shape = replace(TWO_CELLS, ranks=3)
    run = _run(shape, SimFault("kill_worker", at_s=9.0, node=-1))
    assert [size for _, size in _worlds(run)] == [4, 4]
    [taken] = [line for line in run.of("restore") if line["given_by"] is not None]
    assert whole(taken, "rank") % 2 == whole(taken, "given_by") % 2 == 0, "the leader's place is the first"
    _check_same_weights(shape, run)


def test_a_spare_node_takes_the_place_of_one_that_has_lost_a_worker() -> None:
    """With --nnodes 1:2 the third node waits; a node that no longer makes a cell does not keep it out."""
    shape = replace(TWO_CELLS, nodes=3, spares=1, lane_s=0.4)
    run = _run(shape, SimFault("kill_worker", at_s=9.0, node=-1))
    assert [size for _, size in _worlds(run)] == [4, 4]
    hosts = {term: {line["host"] for line in run.of("form") if line["term"] == term} for term, _ in _worlds(run)}
    first, second = hosts.values()
    assert len(first) == len(second) == 2 and first != second
    _check_same_weights(shape, run)


def test_a_lost_node_is_made_up_for_by_a_spare_one() -> None:
    """Two cells of two nodes each, and a fifth: only the new ones receive state, from the same stage of the other cell.

    If two are lost at once, one of each cell, the rest makes one.
    """
    shape = replace(TWO_CELLS, nodes=5, cell=4, stages=2, lane_s=0.4)
    first = _run(shape, SimFault("kill_node", at_s=9.0, node=-1, for_s=100.0))
    assert [size for _, size in _worlds(first)] == [8, 8]
    taken = [line for line in first.of("restore") if line["given_by"] is not None]
    assert len(taken) == 2 and all(whole(line, "rank") % 4 == whole(line, "given_by") % 4 for line in taken)
    assert not first.of("rollback")
    _check_same_weights(shape, first)

    [hosts] = [{whole(line, "rank"): str(line["host"]) for line in first.of("form") if line["term"] == 1}]
    lost = [int(hosts[rank].rpartition("-")[2]) for rank in (0, 6)]
    both = _run(shape, *(SimFault("kill_node", at_s=9.0, node=node, for_s=100.0) for node in lost))
    assert [size for _, size in _worlds(both)] == [8, 4] and not both.of("rollback")
    _check_same_weights(shape, both)


def test_a_job_outlives_a_storage_outage_in_which_a_rank_is_lost() -> None:
    """Nobody can write, so members step back from leading repeatedly, under new ids; each keeps its part."""
    shape = replace(TWO_CELLS, lane_s=0.4)
    faults = SimFault("storage_outage", at_s=8.0, for_s=40.0), SimFault("kill_worker", at_s=9.0, node=1, rank=1)
    run = _run(shape, *faults)
    assert not run.of("rollback")
    _check_same_weights(shape, run)


def test_a_part_that_every_cell_has_lost_comes_from_the_newest_commit() -> None:
    """The same place of both cells dies at once: the judge finds nothing wrong, and the weights are right."""
    faults = tuple(SimFault("kill_worker", at_s=9.0, node=node, rank=rank) for node in (0, 1) for rank in (0, 1))
    outcome = simulate(Case(1, TWO_CELLS, faults))
    assert outcome.violations == () and outcome.num_faults == {"kill_worker": 4}


def _run(shape: Shape, *faults: SimFault) -> Evidence:
    run = Job(shape, 1, faults).run()
    assert run.result is not None and run.result["status"] == "done"
    return run


def _worlds(run: Evidence) -> list[tuple[int, int]]:
    """Return the terms that applied a step, with their numbers of ranks."""
    return list(dict.fromkeys((whole(line, "term"), whole(line, "world")) for line in _in_time(run, "step")))


def _in_time(run: Evidence, op: str) -> Iterator[Line]:
    yield from sorted(run.of(op), key=lambda line: float(str(line["t"])))


def _check_same_weights(shape: Shape, run: Evidence) -> None:
    alone = reference_of(replace(shape, nodes=1, ranks=1, spares=0, is_whole=True, copies=min(1, shape.copies)))
    assert run.result is not None and alone.result is not None
    assert run.result["weights_sha256"] == alone.result["weights_sha256"]
