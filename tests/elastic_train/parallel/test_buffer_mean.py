"""Buffers that forward passes change: the lanes' mean, equal for every world, and errors that name them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_train.checkpoint.format.dcp import weights_digest
from elastic_train.core.lanes import contiguous, owned_lanes
from elastic_train.errors import ConfigError, PeerLostError
from elastic_train.parallel.buffer_mean import BufferMean
from elastic_train.parallel.gradient_sum import make_sum
from elastic_train.parallel.group import Group
from tests.elastic_train.parallel.sums import make_gradient_sum
from tests.memory_machine import in_memory
from tests.memory_world import group_of

LANES = (4, 5, 7)
EMPTY = 1  # a lane that has no sample in some steps
STEPS = 5


class Net(nn.Module):
    """A buffer of every kind: written in place, assigned, counted, rarely changed, and a cache that is not state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.GELU(), nn.Linear(13, 3))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("coarse", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("is_warm", torch.zeros((), dtype=torch.bool))
        self.register_buffer("constant", torch.arange(4.0))
        self.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("codes", torch.ones(2).to(torch.float8_e4m3fn))
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.average: Tensor
        self.coarse: Tensor
        self.seen: Tensor
        self.is_warm: Tensor

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.body(x)
        self.average = 0.9 * self.average + 0.1 * made.detach().mean(0)
        self.coarse.mul_(1 + made.detach().abs().mean().bfloat16())
        self.seen += len(x)
        self.is_warm.fill_(True)
        self.cache = torch.zeros(len(x))
        return made


def batch(step: int, lane: int) -> Tensor:
    return torch.randn(3 + lane % 3, 7, generator=torch.Generator().manual_seed(100 * step + lane)) * 10 ** (lane % 4)


def train(group: Group, num_lanes: int, make: Callable[[], nn.Module] = Net, steps: int = STEPS) -> nn.Module:
    """Train a few steps as the loop does, on data that depend on step and lane alone; return the model."""
    torch.manual_seed(3)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    lanes = owned_lanes(group.rank, group.size, num_lanes)
    gradients = make_gradient_sum("canonical", list(net.parameters()), group, num_lanes)
    buffers = BufferMean(
        net, ["seen"], group, lambda flats: make_sum("canonical", flats, group, contiguous(group.size, num_lanes))
    )
    for step in range(steps):
        digests = run(net, gradients, buffers, lanes, step)
        changed = torch.tensor([buffers.has_changed and not buffers.is_tracking])
        if bool(group.all_gather(changed).any()):
            buffers.track()
            digests = run(net, gradients, buffers, lanes, step)
        gathered = [0] * num_lanes
        for lane, digest in digests.items():
            gathered[lane] = digest
        table = group.all_gather(torch.tensor(gathered)).sum(0).tolist()
        is_empty = [lane == EMPTY and step % 2 == 1 for lane in range(num_lanes)]
        made = buffers.finish([digest for digest, empty in zip(table, is_empty, strict=True) if not empty])
        gradients.finish(float(num_lanes))
        optimizer.step()
        for buffer, value in made:
            buffer.copy_(value)
    return net


def run(net: nn.Module, gradients: object, buffers: BufferMean, lanes: range, step: int) -> dict[int, int]:
    """Run a rank's lanes; return their checksums of integer buffers."""
    digests = {}
    gradients.begin()  # type: ignore[attr-defined]
    buffers.begin()
    for lane in lanes:
        is_empty = lane == EMPTY and step % 2 == 1
        with gradients.turn(lane), buffers.lane(lane, is_empty=is_empty):  # type: ignore[attr-defined]
            if not is_empty:
                net(batch(step, lane)).square().sum().backward()
                digests[lane] = buffers.digest()
    buffers.restore()
    return digests


def alone(num_lanes: int = 4, make: Callable[[], nn.Module] = Net, steps: int = STEPS) -> nn.Module:
    return train(Group(0, 1, None, 60), num_lanes, make, steps)


def ranks(rank: int, size: int) -> list[str]:
    group = group_of("world", rank, size)
    return [weights_digest(train(group, num_lanes), {}) for num_lanes in LANES]


@pytest.mark.heavy
@pytest.mark.parametrize("size", [2, 3, 4])
def test_buffers_do_not_depend_on_the_world_size(size: int) -> None:
    """For every number of lanes, W ranks end with the weights and buffers of one, empty lanes included."""
    assert in_memory(ranks, size) == [[weights_digest(alone(num_lanes), {}) for num_lanes in LANES]] * size


def test_a_steps_buffers_are_the_mean_of_its_lanes() -> None:
    """Every lane starts from the step's buffers: the same as averaging copies of the model with one lane each."""
    torch.manual_seed(3)
    before = Net()
    copies = [copy.deepcopy(before) for _ in range(4)]
    for lane, each in enumerate(copies):
        each(batch(0, lane))
    after = alone(steps=1).state_dict()
    for name in ("body.1.running_mean", "body.1.running_var", "average", "coarse"):
        expected = torch.stack([each.state_dict()[name].double() for each in copies]).mean(0)
        torch.testing.assert_close(after[name].double(), expected, rtol=1e-2 if name == "coarse" else 1e-5, atol=1e-6)
    assert int(after["body.1.num_batches_tracked"]) == 1
    assert int(after["seen"]) == sum(len(batch(0, lane)) for lane in range(4))
    assert bool(after["is_warm"])
    assert torch.equal(after["constant"], torch.arange(4.0))


def test_lanes_without_samples_do_not_count() -> None:
    """The mean is over the lanes that ran: a step of four lanes with one empty is a mean of three."""
    first, second = alone(steps=1), alone(steps=2)
    copies = [copy.deepcopy(first) for _ in range(4)]
    # The second step's weights are those after the first: the copies' forward passes start from them and the buffers.
    for lane in (0, 2, 3):
        copies[lane](batch(1, lane))
    expected = torch.stack([copies[lane].state_dict()["average"] for lane in (0, 2, 3)]).mean(0)
    torch.testing.assert_close(second.state_dict()["average"], expected)
    assert int(second.state_dict()["seen"]) - int(first.state_dict()["seen"]) == sum(
        len(batch(1, lane)) for lane in (0, 2, 3)
    )


def test_a_model_that_changes_no_buffer_has_nothing_in_the_sum() -> None:
    """Constant buffers are checked, but never copied, added or exchanged."""
    net = nn.Linear(7, 3)
    net.register_buffer("constant", torch.ones(5))
    net.register_buffer("unknown", torch.full((5,), torch.nan))
    group = Group(0, 1, None, 60)
    buffers = BufferMean(net, [], group, lambda flats: pytest.fail("there is nothing to sum"))
    buffers.begin()
    for lane in range(2):
        with buffers.lane(lane, is_empty=False):
            net(torch.ones(1, 7))
    assert not buffers.has_changed
    assert buffers.finish([0, 0]) == []


class Uncounted(nn.Module):
    """Has statistics of its own, which batch_norm changes unnoticed by torch's version counters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("variance", torch.ones(7))
        self.mean: Tensor
        self.variance: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * functional.batch_norm(x, self.mean, self.variance, training=True)


@pytest.mark.parametrize("is_empty", [False, True], ids=["a rank cannot read its samples", "all samples are in holes"])
def test_changes_are_found_although_the_first_step_of_a_world_shows_none(is_empty: bool) -> None:
    """That step is repeated without what cannot be read, or has no sample at all."""
    net, group = Uncounted(), Group(0, 1, None, 60)
    buffers = BufferMean(net, [], group, lambda flats: make_sum("canonical", flats, group, contiguous(group.size, 1)))
    for at in range(2):
        buffers.begin()
        with buffers.lane(0, is_empty=is_empty and at == 0):
            if not is_empty or at:
                net(batch(at, 0))
        buffers.restore()
        if is_empty and at == 0:
            assert buffers.finish([]) == []
    assert buffers.has_changed
    assert not net.mean.any() and bool((net.variance == 1).all())


def test_validation_leaves_the_buffers_unchanged() -> None:
    """Changes by forward passes outside steps are undone, including assigned buffers."""
    net = alone(steps=2)
    group = Group(0, 1, None, 60)
    buffers = BufferMean(net, [], group, lambda flats: make_sum("canonical", flats, group, contiguous(group.size, 4)))
    before, tensors = (
        weights_digest(net, {}),
        {name: id(tensor) for name, tensor in net.named_buffers() if name != "cache"},
    )
    with buffers.untouched():
        net(batch(9, 0))
        assert weights_digest(net, {}) != before
    assert weights_digest(net, {}) == before
    assert {name: id(tensor) for name, tensor in net.named_buffers() if name != "cache"} == tensors


@pytest.mark.parametrize("is_tracking", [False, True])
def test_a_step_that_ends_in_the_middle_of_a_pass_leaves_the_buffers_as_they_were(is_tracking: bool) -> None:
    """A lost peer or a request to leave may end it, and the state before it is committed or trained on."""
    net = alone(steps=2)
    group = Group(0, 1, None, 60)
    buffers = BufferMean(
        net, ["seen"], group, lambda flats: make_sum("canonical", flats, group, contiguous(group.size, 4))
    )
    if is_tracking:
        buffers.track()
    before = weights_digest(net, {})
    buffers.begin()
    with pytest.raises(PeerLostError), buffers.lane(0, is_empty=False):
        net(batch(9, 0))
        raise PeerLostError("connection reset by peer")
    assert weights_digest(net, {}) != before
    buffers.undo()
    assert weights_digest(net, {}) == before
    net.get_buffer("average").add_(1.0)  # a later step's
    applied = weights_digest(net, {})
    buffers.undo()
    assert weights_digest(net, {}) == applied != before


class Uneven(nn.Module):
    """Counts its samples in an attribute that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(7, 3)
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))
        self.tokens: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.tokens += len(x)
        return self.body(x)  # type: ignore[no-any-return]


class Growing(Uneven):
    """Keeps a growing cache in its state."""

    def forward(self, x: Tensor) -> Tensor:
        self.tokens = torch.zeros(len(x), dtype=torch.int64)
        return self.body(x)  # type: ignore[no-any-return]


class Complex(Uneven):
    """Rotates a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.phase: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.phase *= 1j
        return self.body(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Uneven, r"'tokens'.*summed_buffers"),
        (Growing, r"turned buffer 'tokens' from \(\) .* into \(3,\).*persistent=False"),
        (Complex, r"'phase' is torch.complex64 and changes .* keep its real view"),
    ],
)
def test_a_buffer_that_cannot_be_summed_is_named(make: Callable[[], nn.Module], message: str) -> None:
    """The error says what is wrong and what to do, before a step is applied."""
    with pytest.raises(ConfigError, match=message):
        alone(make=make)
