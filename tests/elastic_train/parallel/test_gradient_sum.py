"""The gradient sum and its group: equal bits for every world, and the error after a peer's death."""

from __future__ import annotations

import json
import os
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.utils.checkpoint import checkpoint

from elastic_train.checkpoint.format.dcp import weights_digest
from elastic_train.core.lanes import Assignment, contiguous, lane_seed, owned_lanes, tree_sum
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.errors import ConfigError, PeerLostError
from elastic_train.parallel.buckets import Bucket, ExchangeQueue, Filling, cut_buckets
from elastic_train.parallel.devices.device import Device, HostQueue, Mark
from elastic_train.parallel.exchange import Everywhere, Scratch, Subtrees, halving_turns
from elastic_train.parallel.gradient_sum import Tree, TreeSum, make_sum, place_gradients
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import Aside, PointToPoint
from elastic_train.program.schedules import Walk, filling_turn
from elastic_train.training.step_sums import _packed, _read_tables, gather_tables
from tests.conftest import PATIENCE_S, run_ranks
from tests.elastic_train.parallel.sums import make_gradient_sum
from tests.memory_machine import in_memory
from tests.memory_world import group_of

LANES = (4, 5, 7, 8, 12, 13, 16)
EMPTY = 2  # a lane that has no sample in some steps


class Net(nn.Module):
    """Odd sizes, dropout, two dtypes, and a parameter that no lane uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 13), nn.Dropout(0.3), nn.GELU(), nn.Linear(13, 3))
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale  # type: ignore[no-any-return]


def train(
    group: Group, num_lanes: int, steps: int = 3, assigned: Assignment | None = None, bucket_bytes: float | None = None
) -> str:
    """Train a few steps on data that depends on step and lane alone; return the weights' digest."""
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    assigned = assigned or contiguous(group.size, num_lanes)
    lanes = assigned[group.rank]
    if bucket_bytes is None:
        gradients = make_sum("canonical", place_gradients(list(net.parameters()))[0], group, assigned)
    else:
        gradients = make_gradient_sum("canonical", list(net.parameters()), group, num_lanes, bucket_bytes)
    for step in range(steps):
        gradients.begin()
        for lane in lanes:
            with gradients.turn(lane):
                if lane == EMPTY and step % 2:
                    continue
                torch.manual_seed(lane_seed(1, step, lane))
                net(torch.randn(5, 7) * 10 ** (lane % 5)).square().sum().backward()
        gradients.finish(5.0 * num_lanes)
        optimizer.step()
    gradients.close()
    return weights_digest(net, {})


def dealt(size: int, num_lanes: int) -> Assignment:
    """Return the lanes of each rank, dealt in turn."""
    return tuple(range(rank, num_lanes, size) for rank in range(size))


@cache
def alone(num_lanes: int) -> str:
    """Return the weights that one rank ends with."""
    return train(Group(0, 1, None, 60), num_lanes)


def ranks(rank: int, size: int, num_lanes: int) -> list[str]:
    """Train with contiguous and with dealt lanes; then with buckets of one parameter each, and of all."""
    group = group_of("world", rank, size)
    found = [train(group, num_lanes, assigned=assign(size, num_lanes)) for assign in (contiguous, dealt)]
    return found + [train(group, num_lanes, bucket_bytes=least) for least in (1, 1 << 20)]


@pytest.mark.heavy
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_lanes", LANES)
def test_the_gradient_does_not_depend_on_the_world_size(size: int, num_lanes: int) -> None:
    """For every number of lanes, W ranks end with the weights of one, empty lanes and unused parameters included.

    Neither the assignment of lanes to ranks nor an exchange beside the backward pass changes a bit.
    """
    assert in_memory(ranks, size, num_lanes) == [[alone(num_lanes)] * 4] * size


@pytest.mark.parametrize("bucket_bytes", [None, 1])
def test_gradients_that_are_discarded_between_lanes_are_an_error(bucket_bytes: float | None) -> None:
    """`zero_grad()` in a task's loss would leave the last lane's gradients alone: another sum on other ranks."""
    net = nn.Linear(2, 2)
    gradients = make_gradient_sum("canonical", list(net.parameters()), Group(0, 1, None, 60), 4, bucket_bytes)
    gradients.begin()
    for lane in range(4):
        with gradients.turn(lane):
            net.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match=r"discarded within a step.* shape \(2, 2\).*zero_grad\(\)"):
        gradients.finish(1.0)


def test_lanes_must_be_run_by_their_owner() -> None:
    """A rank that skips one of its lanes is detected before anything is exchanged."""
    net = nn.Linear(2, 2)
    gradients = make_gradient_sum("canonical", list(net.parameters()), Group(0, 1, None, 60), 4)
    gradients.begin()
    for lane in (0, 1, 3):
        with gradients.turn(lane):
            net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match="not all of this rank's leaves"):
        gradients.finish(1.0)


def test_exchanges_beside_a_pass_come_after_what_they_use_and_before_what_uses_them() -> None:
    """On a device a call returns before the work is done, so a queue of work must wait for another."""
    log = list[str]()

    class Queue(HostQueue):
        def __init__(self, name: str) -> None:
            self.name, self.num_marks = name, 0

        @contextmanager
        def entered(self) -> Iterator[None]:
            log.append(f"{self.name} entered")
            yield
            log.append(f"{self.name} left")

        def mark(self) -> Mark:
            self.num_marks += 1
            log.append(f"{self.name} at {self.num_marks}")
            point = partial(bool, 1)
            names[point] = f"{self.name} at {self.num_marks}"
            return point

        def follow(self, mark: Mark) -> None:
            log.append(f"{self.name} follows {names[mark]}")

        def keep(self, tensor: torch.Tensor) -> None:
            log.append(f"{self.name} keeps {tensor.numel()}")

    names, computing, exchanging = dict[Mark, str](), Queue("computing"), Queue("exchanging")
    device = Device(torch.device("cpu"), lambda tensor: True, lambda: computing, lambda: exchanging, None)
    queue = ExchangeQueue(Group(0, 1, None, 60, device))
    queue.begin(lambda: log.append("exchange"), [torch.ones(3)])
    queue.join()
    queue.close()
    assert log == [
        "exchanging keeps 3",
        "computing at 1",
        "exchanging entered",
        "exchanging follows computing at 1",
        "exchange",
        "exchanging left",
        "exchanging at 1",
        "computing follows exchanging at 1",
    ]


def test_whatever_an_exchange_beside_a_pass_reads_is_kept_for_it() -> None:
    """Also sums that its rank cannot add up further: memory that is given out again could hold other values."""
    read, kept = set[int](), set[int]()

    class Queue(HostQueue):
        def keep(self, tensor: torch.Tensor) -> None:
            kept.add(tensor.data_ptr())

    class Reading(Everywhere):
        def reduce(self, elements: Subtrees, ranks: PointToPoint, scratch: Scratch) -> None:
            read.update(buffers[elements.number].data_ptr() for buffers in elements.mine.values())

    group = Group(0, 1, None, 60, Device(torch.device("cpu"), lambda tensor: True, HostQueue, Queue, None))
    group.size = 2  # the other one is never asked
    net = nn.Linear(3, 5)
    flats, placed = place_gradients(list(net.parameters()))
    gradients = TreeSum([Tree(flats, group, [range(3), range(3, 4)], Reading(), placed)], 1.0)
    gradients.begin()
    for lane in range(3):
        with gradients.turn(lane):
            net(torch.ones(3)).sum().backward()
    gradients.finish(4.0)
    gradients.close()
    assert len(read) == 2
    assert read <= kept


def test_what_an_abandoned_group_has_ended_is_not_finished() -> None:
    """An aborted operation leaves its stream like a finished one, and another thread would go on with its values."""
    group = Group(0, 1, None, 60)
    with pytest.raises(PeerLostError, match="abandoned"):
        Aside(group).polling(lambda is_broken: group.abandon())


def test_after_a_bucket_that_could_not_be_exchanged_none_is() -> None:
    """A peer would mistake the next bucket for it, and gloo aborts a process that receives more than it expects."""
    net, begun = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), list[Bucket]()
    flats, placed = place_gradients(list(net.parameters()))
    buckets = cut_buckets(placed, flats, 1)

    def finish(bucket: Bucket) -> None:
        begun.append(bucket)
        raise PeerLostError("gone")

    queue = ExchangeQueue(Group(0, 1, None, 60))
    filling = Filling([bucket.parameters for bucket in buckets])
    full = iter(buckets)
    walk = Walk(filling_turn(len(buckets)), lambda action: queue.begin(partial(finish, next(full))))
    with filling.filling(walk):
        net(torch.ones(1, 3)).sum().backward()
    with pytest.raises(PeerLostError, match="gone"):
        queue.join()
    queue._thread.begin(lambda: None).result(PATIENCE_S)  # after all earlier work of the queue
    filling.close()
    queue.close()
    assert len(buckets) > 1 and begun == buckets[:1]


def beside(rank: int, size: int, folder: str) -> None:
    """Train with whole vectors, with buckets of one parameter, and of all; then abandon a step, and take another."""
    torch.set_num_threads(1)
    group = Group(rank, size, FileStore(f"{folder}/store", size), 60)
    found = [[train(group, num, bucket_bytes=least) for num in LANES[:3]] for least in (None, 1, 1 << 20)]
    net = nn.Linear(3, 2)
    gradients = make_gradient_sum("canonical", list(net.parameters()), group, size, 1)
    for _ in range(2):
        gradients.begin()
        with gradients.turn(rank):
            net(torch.full((1, 3), float(rank + 1))).sum().backward()
    gradients.finish(1.0)
    assert net.weight.grad is not None
    found.append([str(net.weight.grad.tolist())])
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    group.barrier()
    os._exit(0)


@pytest.mark.slow
def test_processes_have_the_same_bits_and_discard_a_sum(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run_ranks(beside, 3, str(tmp_path))
    for rank in range(3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == [[*map(alone, LANES[:3])]] * 3 + [[str([[6.0] * 3] * 2)]]


def test_buckets_are_cut_from_the_end_and_cover_every_gradient() -> None:
    """Each has just the requested bytes, except a vector's first; backward passes fill them in this order."""
    net = Net()
    flats, placed = place_gradients(list(net.parameters()))
    starts = {id(one.parameter): one.start for one in placed}
    for least in (1, 100, 300, 1 << 20):
        buckets = cut_buckets(placed, flats, least)
        for number, flat in enumerate(flats):
            ends = [(bucket.lo, bucket.hi) for bucket in buckets if bucket.flat == number][::-1]
            assert ends[0][0] == 0 and ends[-1][1] == flat.numel()
            assert all(one[1] == other[0] for one, other in pairwise(ends))
            assert all((hi - lo) * flat.element_size() >= least for lo, hi in ends[1:])
        for bucket in (bucket for bucket in buckets if len(bucket.parameters) > 1):
            without_last = bucket.hi - starts[id(bucket.parameters[-2])]
            assert without_last * flats[bucket.flat].element_size() < least, "it was full before"
        filled = [parameter for bucket in buckets for parameter in bucket.parameters]
        assert sorted(map(id, filled)) == sorted(map(id, net.parameters()))
    assert [[len(bucket.parameters)] for bucket in cut_buckets(placed, flats, 1)] == [[1]] * 6


def twice(rank: int, size: int) -> str:
    """Use a parameter in two reentrantly checkpointed parts of a model: its gradient arrives in two parts."""
    group, net = group_of("world", rank, size), nn.Linear(4, 4)
    gradients = make_gradient_sum("canonical", list(net.parameters()), group, size, 1)
    gradients.begin()
    try:
        with gradients.turn(rank):
            x = torch.ones(1, 4, requires_grad=True)
            x = checkpoint(net, checkpoint(net, x, use_reentrant=True), use_reentrant=True)
            x.sum().backward()
    except ConfigError as error:
        return str(error)
    return ""


def test_whoever_keeps_a_closed_sum_keeps_no_gradients() -> None:
    """The next world's are made as soon as it is closed, and a device may have no room for both."""
    net = Net()
    total = make_gradient_sum("canonical", list(net.parameters()), group_of("alone", 0, 1), 4)
    for lane in range(4):
        with total.turn(lane):
            net(torch.ones(2, 7)).sum().backward()
    held = [weakref.ref(tensor) for _, tensor in total.tensors()]
    total.close()
    assert held and not any(tensor() is not None for tensor in held)


def test_a_gradient_that_comes_in_parts_is_refused() -> None:
    """The first part may have been exchanged already: the sum would lack the second."""
    assert all("gets its gradient in several parts" in str(said) for said in in_memory(twice, 2))


def lonely(rank: int, size: int, folder: str, bucket_bytes: float | None) -> None:
    group = Group(rank, size, FileStore(f"{folder}/store", size), 600)
    group.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    message = "nothing"
    try:
        train(group, 4, steps=1000, bucket_bytes=bucket_bytes)
    except PeerLostError as error:
        message = str(error)
    (Path(folder) / "message").write_text(message)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [None, 1])
def test_a_dead_peer_raises_peer_lost_error(tmp_path: Path, bucket_bytes: float | None) -> None:
    """A rank whose peer was killed gets PeerLostError long before the group's timeout, also during a backward pass."""
    run_ranks(lonely, 2, str(tmp_path), bucket_bytes, codes=(0, None))
    assert "rank 0 of 2: a collective failed" in (tmp_path / "message").read_text()


def test_the_lane_table_keeps_every_bit() -> None:
    """Floats are sent as their bits, integers modulo 2^64, in the order of lanes."""
    rows = {1: [0.1 + 0.2, -0.0, 2**64 - 1], 0: [float("inf"), 1e-310, 3]}
    tables = gather_tables(Group(0, 1, None, 60), Mesh(0, 1), (range(2),), rows, [7, 0.5])
    assert tables.ranks == [(7, 0.5)]
    table = tables.lanes
    assert [[float(row[0]).hex(), float(row[1]).hex(), row[2]] for row in table] == [
        [float("inf").hex(), (1e-310).hex(), 3],
        [(0.1 + 0.2).hex(), (-0.0).hex(), 2**64 - 1],
    ]


@pytest.mark.parametrize("cell", [Cell(), Cell(tensor=2)])
def test_the_first_rank_of_a_replica_reports_its_lanes(cell: Cell) -> None:
    """Lanes are found by replica, whatever its number of ranks; every rank has its own row."""
    num_lanes, num_replicas = 5, 2
    rows = []
    for rank in range(num_replicas * cell.size):
        mesh = Mesh(rank, num_replicas * cell.size, cell)
        lanes = owned_lanes(mesh.replica, num_replicas, num_lanes)
        said = [_packed([lane, 0.5] if mesh.place == 0 else [-1, -1.0]) for lane in lanes]
        rows.append(b"".join([_packed([rank, 1.5]), *said]).ljust(8 * (3 + 3 * 3), b"\0"))
    gathered = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int64).reshape(len(rows), -1)
    whole = Mesh(0, num_replicas * cell.size, cell)
    tables = _read_tables(gathered, whole, contiguous(num_replicas, num_lanes), 3)
    assert tables.lanes == [(lane, 0.5) for lane in range(num_lanes)]
    assert tables.ranks == [(rank, 1.5) for rank in range(num_replicas * cell.size)]


def test_tree_sum_adds_along_the_tree() -> None:
    """The sum of lanes is ((0+1)+(2+3))+4, not the running sum."""
    values = [1e16, 1.0, -1e16, 1.0, 0.25]
    assert tree_sum(values) == ((values[0] + values[1]) + (values[2] + values[3])) + values[4]
    assert tree_sum(values) != sum(values)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("length", [1, 7, 64, 1000])
def test_halving_keeps_every_element_once(size: int, length: int) -> None:
    """The slices that ranks keep at the end tile the vector, and partners mirror one another."""
    turns = [halving_turns(rank, size, length) for rank in range(size)]
    kept = sorted(rank_turns[-1][1] for rank_turns in turns)
    assert [lo for lo, _ in kept] == [0, *[hi for _, hi in kept[:-1]]]
    assert kept[-1][1] == length
    for rank_turns in turns:
        for number, (partner, keep, give) in enumerate(rank_turns):
            assert turns[partner][number][1:] == (give, keep)
