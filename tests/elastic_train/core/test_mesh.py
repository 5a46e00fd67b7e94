"""Ranks, replicas and places: laws of the mesh, for every shape of a cell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.lanes import leaves_of, owned_lanes
from elastic_train.core.mesh import Cell, Mesh

degrees = st.integers(1, 3)
cells = st.builds(Cell, degrees, degrees, degrees, degrees)


@given(cells, st.integers(1, 5))
def test_every_rank_has_unique_coordinates(cell: Cell, num_replicas: int) -> None:
    """No two ranks share coordinates, and each coordinate is below its degree."""
    size = num_replicas * cell.size
    seen = {Mesh(rank, size, cell).coordinates for rank in range(size)}
    assert len(seen) == size
    for replica, *coordinates in seen:
        degrees = (cell.stage, cell.tensor, cell.expert, cell.context)
        assert replica < num_replicas
        assert all(at < degree for at, degree in zip(coordinates, degrees, strict=True))


@given(cells, st.integers(1, 5))
def test_a_column_has_one_rank_of_every_replica(cell: Cell, num_replicas: int) -> None:
    """A column's ranks differ in nothing but the replica, come by replica, and the columns make up the world."""
    size = num_replicas * cell.size
    meshes = [Mesh(rank, size, cell) for rank in range(size)]
    for mesh in meshes:
        column = [meshes[rank] for rank in mesh.column]
        assert [other.replica for other in column] == list(range(num_replicas))
        assert {other.coordinates[1:] for other in column} == {mesh.coordinates[1:]}
        assert mesh.column[mesh.replica] == mesh.rank
    assert sorted(rank for mesh in meshes[: cell.size] for rank in mesh.column) == list(range(size))


@given(cells, st.integers(1, 5), st.integers(0, 20))
def test_the_ranks_of_a_replica_own_the_same_lanes(cell: Cell, num_replicas: int, more: int) -> None:
    """Lanes belong to replicas: all ranks of one agree, and the replicas' lanes are a partition."""
    num_lanes, size = num_replicas + more, num_replicas * cell.size
    owned = {}
    for mesh in (Mesh(rank, size, cell) for rank in range(size)):
        lanes = owned_lanes(mesh.replica, mesh.num_replicas, num_lanes)
        assert owned.setdefault(mesh.replica, lanes) == lanes
    assert sorted(lane for lanes in owned.values() for lane in lanes) == list(range(num_lanes))


@given(cells, st.integers(1, 3), st.integers(0))
def test_ranks_that_differ_along_one_axis_are_a_group(cell: Cell, num_replicas: int, at: int) -> None:
    """Each in every replica, by replica; and those that differ in their tokens alone hold one part of the state."""
    size = num_replicas * cell.size
    mesh = Mesh(at % size, size, cell)
    coordinates = [Mesh(rank, size, cell).coordinates for rank in range(size)]
    for number, axis in enumerate(("stage", "tensor", "expert", "context"), start=1):
        found = mesh.across(axis)  # type: ignore[arg-type]
        alike = [[*one[1:number], *one[number + 1 :]] for one in coordinates]
        assert found == sorted(found) == [rank for rank in range(size) if alike[rank] == alike[mesh.rank]]
        assert len({coordinates[rank][number] for rank in found}) == len(found) // num_replicas
    assert mesh.across("context") == list(mesh.by_part[cell.part_of(mesh.place)])
    assert sorted(rank for ranks in mesh.by_part for rank in ranks) == list(range(size))
    part, number = cell.holder_of(mesh.rank)
    assert mesh.by_part[part][number] == mesh.rank


def test_a_rank_is_a_replica_by_default() -> None:
    mesh = Mesh(2, 5)
    assert (mesh.replica, mesh.num_replicas, mesh.place, mesh.column) == (2, 5, 0, range(5))


@pytest.mark.parametrize(("rank", "size", "cell"), [(3, 3, Cell()), (0, 5, Cell(tensor=2)), (-1, 2, Cell())])
def test_ranks_that_do_not_fill_whole_cells_are_refused(rank: int, size: int, cell: Cell) -> None:
    with pytest.raises(AssertionError):
        Mesh(rank, size, cell)


@given(cells, st.integers(1, 4))
def test_ranks_that_compute_alike_are_those_of_one_stage(cell: Cell, num_replicas: int) -> None:
    """And who speaks for a cell's lanes is of the last one, which alone knows their losses."""
    meshes = [Mesh(rank, num_replicas * cell.size, cell) for rank in range(num_replicas * cell.size)]
    by_stage = [[mesh.rank for mesh in meshes if mesh.coordinates.stage == stage] for stage in range(cell.stage)]
    assert meshes[0].alike == by_stage
    speaker = next(mesh for mesh in meshes if mesh.place == cell.speaker)
    assert speaker.coordinates == (speaker.replica, cell.stage - 1, 0, 0, 0)


def test_ranks_of_a_replica_compute_its_lanes_together() -> None:
    """Rows of ranks are compared with lanes by rank, also where a replica has several ranks."""
    assert Mesh(0, 2).num_lanes([range(3), range(3, 5)]) == [3, 2]
    assert Mesh(3, 4, Cell(tensor=2)).num_lanes([range(3), range(3, 5)]) == [3, 3, 2, 2]


@given(cells, st.integers(1, 4), st.integers(0, 20))
def test_ranks_with_experts_compute_lanes_of_their_own(cell: Cell, num_replicas: int, more: int) -> None:
    """Neighbouring lanes at a time, by their experts, of the replica's; only in the last turn a rank may have none."""
    degree = cell.expert
    num_lanes, size = num_replicas * degree + more, num_replicas * cell.size
    assert cell.most_ranks(num_lanes) >= size
    meshes = [Mesh(rank, size, cell) for rank in range(size)]
    lanes = meshes[0].assigned(num_lanes)
    assert [mesh.owner for mesh in meshes] == [mesh.replica * degree + mesh.coordinates.expert for mesh in meshes]
    assert meshes[0].num_lanes(lanes) == [len(lanes[mesh.owner]) for mesh in meshes] and min(map(len, lanes)) > 0
    for owner in range(num_replicas * degree):
        ranks = [mesh for mesh in meshes if mesh.owner == owner]
        assert len(ranks) == cell.crew and [mesh.speaks for mesh in ranks] == [True] + [False] * (cell.crew - 1)
        assert meshes[cell.speaker_of(owner)].coordinates[1:] == (cell.stage - 1, 0, owner % degree, 0)
    for replica in range(num_replicas):
        ranks = lanes[replica * degree : (replica + 1) * degree]
        turns = [one[turn] for turn in range(len(ranks[0])) for one in ranks if turn < len(one)]
        assert turns == list(owned_lanes(replica, num_replicas, num_lanes))


@pytest.mark.parametrize("context", [1, 2, 4])
def test_each_rank_of_a_cell_has_leaves_of_its_own(context: int) -> None:
    """All together have every leaf once, and those that a rank adds are the ones that it computes."""
    num_lanes, cell = 7, Cell(context=context, tensor=2)
    meshes = [Mesh(rank, 3 * cell.size, cell) for rank in range(3 * cell.size)]
    column = [mesh for mesh in meshes if mesh.coordinates.tensor == 1]
    assigned = leaves_of(meshes[0].assigned(num_lanes), context)
    for mesh, leaves in zip(column, assigned, strict=True):
        lanes = mesh.assigned(num_lanes)[mesh.owner]
        assert [mesh.leaf(lane, num_lanes) for lane in lanes] == list(leaves)
    assert sorted(leaf for leaves in assigned for leaf in leaves) == list(range(context * num_lanes))
