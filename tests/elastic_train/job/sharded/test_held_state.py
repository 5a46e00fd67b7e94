"""Sharded state: rounded gradients, late ones, differing copies, and the optimizers that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_train.checkpoint.commits.reader import load, read_state
from elastic_train.checkpoint.commits.record import CommitFacts, CommitRecord
from elastic_train.checkpoint.commits.writer import CommitWriter
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Store
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.config.schema import Config
from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import lane_additions
from elastic_train.core.order import Cursor
from elastic_train.errors import ConfigError, PeerLostError, WeightsDifferError
from elastic_train.job.build import build_state
from elastic_train.job.optimizers.choice import choose
from elastic_train.job.peer_states import PeerState
from elastic_train.job.reshard import take_first_seat
from elastic_train.job.sharded.elementwise import Slots, check_types, slots_of
from elastic_train.job.sharded.held_tree import Held, spans_of, written_of
from elastic_train.job.sharded.zero1_share import Zero1Share
from elastic_train.job.state import AppliedState, norm_of
from elastic_train.job.state_shards import Place
from elastic_train.parallel.group import Group
from elastic_train.placement.grains import Layout, Listed, lay_out
from elastic_train.placement.holdings import all_held, circle_of, sections_of
from elastic_train.placement.seats import seats_of
from elastic_train.tasks.task import ParameterGroup
from elastic_train.world.equal_weights import check_same_weights
from elastic_train.world.fencing import StoreFence
from tests.elastic_train.job.optimizers.odd_optimizers import CountingGroups
from tests.elastic_train.job.sharded.shard_jobs import (
    NUM_LANES,
    Offloads,
    Shards,
    build,
    compute,
    facts_of,
    fingerprint,
    loss_of,
    meet,
    replicated,
    shards_of,
    train,
)
from tests.elastic_train.placement.laws import models
from tests.memory_machine import in_memory

STEPS = 2


def newcomers(size: int) -> list[PeerState]:
    """Return the peer states of ranks that hold nothing, each on its own node."""
    return [PeerState(Place(0, 0), None, ("", str(number))) for number in range(size)]


def ranks(rank: int, size: int, shards: Shards, gathers: torch.dtype | None, offload: Offloads) -> list[list[str]]:
    """Train with one to three copies and rounded gradients; return the weights after each step."""
    torch.set_num_threads(1)
    group, found = meet("world", rank, size), []
    for copies in (1, 2, 3):
        state, digests = build(shards, copies, wire="bf16", gathers=gathers, offload=offload), []
        take_first_seat(group, state.shards, newcomers(size))
        for step in range(STEPS):
            train(group, state, step + 1)
            digests.append(fingerprint(group, state))
        found.append(digests)
    group.barrier()
    return found


def rounded(until: int, gathers: torch.dtype | None) -> list[str]:
    """Return the weights after every step of one rank that sums lane gradients rounded to bf16.

    With `gathers`, these are the gradients at the weights rounded to it.
    """
    state, group, found = build("none"), Group(0, 1, None, 60), []
    state.shards.sum_of(group, NUM_LANES)
    trained = [parameter for parameter in state.model.parameters() if parameter.requires_grad]
    while state.step < until:
        sums: list[list[Tensor]] = []
        exact = [parameter.data.clone() for parameter in state.model.parameters()]
        for parameter in state.model.parameters() if gathers else ():
            parameter.data.copy_(parameter.data.to(gathers))
        for lane in range(NUM_LANES):
            found_here = torch.autograd.grad(loss_of(state, lane), trained, allow_unused=True)
            pairs = zip(trained, found_here, strict=True)
            sums.append([torch.zeros_like(one) if got is None else got.bfloat16().float() for one, got in pairs])
        for parameter, kept in zip(state.model.parameters(), exact, strict=True):
            parameter.data.copy_(kept)
        for left, right in lane_additions(NUM_LANES):
            sums[left] = [one + other for one, other in zip(sums[left], sums[right], strict=True)]
        for parameter, total in zip(trained, sums[0], strict=True):
            assert parameter.grad is not None, "the sum has bound it"
            parameter.grad.copy_(total / (3.0 * NUM_LANES))
        state.apply(facts_of(state), norm_of(group.all_gather(state.measure()), state.shards.table))
        found.append(fingerprint(group, state))
    return found


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("shards", "size", "gathers", "offload"),
    [
        ("gradients", 3, None, "none"),
        ("parameters", 4, None, "none"),
        ("parameters", 1, torch.bfloat16, "none"),
        ("parameters", 3, torch.bfloat16, "none"),
        ("parameters", 2, torch.bfloat16, "all"),
    ],
)
@pytest.mark.parametrize("on_devices", [False, True], ids=["hosts", "devices"])
def test_what_is_sent_rounded_is_rounded_lane_by_lane(
    shards: str, size: int, gathers: torch.dtype | None, offload: str, on_devices: bool
) -> None:
    """For any world and copies: each lane's gradient is rounded once, and neither sums nor held weights are.

    Gathered weights are rounded for every rank, also for those who hold them.
    """
    torch.set_num_threads(1)
    expected = rounded(STEPS, gathers)
    assert expected not in (replicated(STEPS), rounded(STEPS, None) if gathers else ())
    assert in_memory(ranks, size, shards, gathers, offload, on_devices=on_devices) == [[expected] * 3] * size


def test_what_depends_on_the_ranks_is_not_sent() -> None:
    with pytest.raises(ValueError, match=r"bits would depend on the world, .* set wire to bf16"):
        Config(data={"train": "rows"}, parallel={"shards": "gradients", "wire": "powersgd"})  # type: ignore[arg-type]


def test_sums_are_not_sent_rounded() -> None:
    with pytest.raises(ValueError, match=r"set parallel.wire to exact, or parallel.shards to gradients or parameters"):
        Config(data={"train": "rows"}, parallel={"shards": "optimizer", "wire": "bf16"})  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_arrives_late_reaches_no_gradient() -> None:
    """Peers may still write to the buffers of an aborted step: the next one sums in other memory."""
    expected, group, state = replicated(2), Group(0, 1, None, 60), build("gradients")
    take_first_seat(group, state.shards, newcomers(1))
    train(group, state, 1)
    old = [shards_of(state).gradients_at(one.run) for one in shards_of(state).trained_runs]
    gradients = state.shards.sum_of(group, NUM_LANES)
    gradients.begin()
    with pytest.raises(PeerLostError), gradients.turn(0):
        state.model(torch.ones(1, 2, dtype=torch.int64)).sum().backward()
        raise PeerLostError("in the middle of a lane")
    measured = compute(group, state)
    for memory in old:
        memory.fill_(torch.nan)
    state.apply(facts_of(state), norm_of(group.all_gather(measured), state.shards.table))
    assert fingerprint(group, state) == expected[1]


def flipped(rank: int, size: int) -> list[str]:
    """Flip one bit of rank 2's shard; return each rank's report."""
    torch.set_num_threads(1)
    group, state, said = meet("world", rank, size), build("parameters", 2), list[str]()
    shards = state.shards
    take_first_seat(group, shards, newcomers(size))
    train(group, state, 1)
    for _ in range(2):
        try:
            check_same_weights(group, shards, state.step)
            said.append("")
        except WeightsDifferError as error:
            said.append(str(error))
        if rank == 2:
            shards_of(state).trained_runs[-1].weights[3:4].view(torch.int32).bitwise_xor_(1)
    group.barrier()
    return said


@pytest.mark.slow
def test_copies_of_weights_that_differ_are_found_by_all() -> None:
    """No rank has all weights to compare; the holders of each grain compare theirs."""
    seen = in_memory(flipped, 4)
    for rank in range(4):
        before, after = seen[rank] or []
        assert (
            not before and "step 1: ranks " in after and "hold different weights, " in after and ", first in '" in after
        )


def committed(store: Store, state: AppliedState) -> CommitRecord:
    """Commit the state of a rank that holds everything."""
    facts = CommitFacts(
        step=state.step,
        cursor=state.reached.cursor,
        coverage=state.reached.coverage,
        rng={},
        metrics={},
        config_digest="",
        manifest_digest="",
        world_size=1,
    )
    fence = StoreFence(store)
    if isinstance(state.shards.share, Zero1Share):
        state.pieces.assign([0])
    return CommitWriter(store, fence, fence.claim(), None).save(state.pieces.tree(), facts, state.reached.intervals)


@pytest.mark.heavy
@pytest.mark.parametrize(("shards", "offload"), [("optimizer", "none"), ("parameters", "none"), ("none", "optimizer")])
def test_what_an_optimizer_counts_in_its_groups_is_state_in_shards_too(
    shards: Shards, offload: Offloads, tmp_path: Path
) -> None:
    """A commit of sharded state continues replicated and the reverse; offloaded blocks count as one update together."""
    torch.set_num_threads(1)
    group, store = Group(0, 1, None, 60), open_store(str(tmp_path))
    recipe = {"name": f"{CountingGroups.__module__}:{CountingGroups.__name__}"}

    def begun(kind: tuple[Shards, Offloads]) -> AppliedState:
        state = build(kind[0], recipe=recipe, offload=kind[1])
        if isinstance(state.shards.share, Zero1Share):
            take_first_seat(group, state.shards, newcomers(1))
        return state

    kinds: list[tuple[Shards, Offloads]] = [("none", "none"), (shards, offload)]
    through = [begun(kind) for kind in kinds]
    for state in through:
        train(group, state, 3)
    records = [committed(store, state) for state in through]
    for state in through:
        train(group, state, 6)
    expected = fingerprint(group, through[0])
    assert fingerprint(group, through[1]) == expected
    for kind, record in zip(kinds[::-1], records, strict=True):
        state, reached = begun(kind), replace(through[0].reached, step=3, cursor=Cursor(0, 3))
        state.restore(partial(load, store, record), reached, keeps_rates=True)
        train(group, state, 6)
        assert fingerprint(group, state) == expected


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_groups_have_only_what_is_trained(name: str, tmp_path: Path) -> None:
    """A task may freeze all of a group in its model, and have parameters without elements.

    A commit has all moments, also those of another shape than their weights.
    """
    group, found, kept = Group(0, 1, None, 60), [], []
    for shards in ("none", "optimizer"):
        model = nn.ModuleDict({"one": nn.Linear(8, 8), "norm": nn.LayerNorm(8).requires_grad_(False)})
        model["none"] = nn.Linear(4, 0)
        seeded = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.data.normal_(generator=seeded)
        groups = [ParameterGroup(("norm.weight", "norm.bias"), lr_factor=0.5)]
        parallel = ParallelConfig(shards=shards, bucket_mb=0.1)
        state = build_state(
            model, OptimizerConfig(name=name), 50, "cpu", is_fp16=False, groups=groups, parallel=parallel
        )
        if shards != "none":
            take_first_seat(group, state.shards, newcomers(1))
        gradients = state.shards.sum_of(group, NUM_LANES)
        gradients.begin()
        for lane in range(NUM_LANES):
            with gradients.turn(lane):
                model["norm"](model["one"](torch.ones(2, 8))).square().sum().backward()
        gradients.finish(1.0)
        state.apply(facts_of(state), norm_of(group.all_gather(state.measure()), state.shards.table))
        store = open_store(str(tmp_path / shards))
        optimizer: Any = read_state(store, committed(store, state))["optimizer"]
        assert optimizer["state"].keys() == {"one.weight", "one.bias"}
        kept.append({(name, key): moment for name, one in optimizer["state"].items() for key, moment in one.items()})
        found.append(fingerprint(group, state))
        state.shards._close_sums()
    assert found[0] == found[1] and kept[0].keys() == kept[1].keys()
    assert all(torch.equal(moment, kept[1][name]) for name, moment in kept[0].items())


class MomentumOfMatrices(torch.optim.SGD):
    """Takes steps of fixed length along the momentum of matrices, and along the gradients of vectors."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                along = one.grad
                if one.dim() == 2:
                    along = self.state[one].setdefault("momentum", torch.zeros_like(one)).mul_(0.9).add_(along)
                one.sub_(along / (1e-6 + along.norm()), alpha=group["lr"])


@pytest.mark.parametrize("shards", ["optimizer", "parameters"])
def test_moments_of_matrices_alone_are_committed_in_the_order_of_their_weights(shards: Shards, tmp_path: Path) -> None:
    """Matrices that are cut along their second dimension lie in memory column by column; commits say so."""
    torch.set_num_threads(1)
    group, found = Group(0, 1, None, 60), []
    recipe = {"name": f"{MomentumOfMatrices.__module__}:{MomentumOfMatrices.__name__}"}
    for number, kind in enumerate(("none", shards)):
        store = open_store(str(tmp_path / str(number)))
        state = build(kind, recipe=recipe, dims={"blocks.0.0.weight": 1})
        if isinstance(state.shards.share, Zero1Share):
            take_first_seat(group, state.shards, newcomers(1))
        train(group, state, 2)
        optimizer: Any = read_state(store, committed(store, state))["optimizer"]
        found.append(optimizer["state"])
    whole, kept = found
    assert whole.keys() == kept.keys()
    assert all(torch.equal(one["momentum"], kept[name]["momentum"]) for name, one in whole.items())


class NormedSteps(torch.optim.SGD):
    """Takes a step of fixed length for each parameter, as LARS does."""

    def norms(self) -> list[Tensor]:
        return [one.grad.norm() for group in self.param_groups for one in group["params"]]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        gradients = [one.grad for group in self.param_groups for one in group["params"]]
        for gradient, norm in zip(gradients, self.norms(), strict=True):
            gradient.div_(norm + 1e-6)
        super().step()


class NormOfAll(NormedSteps):
    """Takes steps of fixed length for all parameters together."""

    def norms(self) -> list[Tensor]:
        norms = super().norms()
        return [sum(norms, torch.zeros(()))] * len(norms)


class LargeSteps(torch.optim.SGD):
    """Scales the gradients of matrices that are large, and of them alone."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for one in self.param_groups[0]["params"]:
            if one.dim() == 2 and min(one.shape) >= 128:
                one.grad /= one.grad.norm(dim=0)
        super().step()


class LargeRows(torch.optim.SGD):
    """Keeps a number per row of large matrices, and one per element of all other parameters, as timm's Adafactor."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for one in self.param_groups[0]["params"]:
            is_large = one.dim() == 2 and min(one.shape) >= 128
            seen = one.grad.square().mean(1, keepdim=True) if is_large else one.grad.square()
            kept = self.state[one].setdefault("seen", torch.zeros_like(seen))
            one.grad /= kept.add_(seen).sqrt()
        super().step()


class LongSteps(torch.optim.SGD):
    """Takes the signs of gradients with many elements."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for one in self.param_groups[0]["params"]:
            if one.numel() >= 4096:
                one.grad.sign_()
        super().step()


class NormedMatrices(NormedSteps):
    """Demands matrices, as the first Muon does."""

    def norms(self) -> list[Tensor]:
        assert all(one.dim() == 2 for one in self.param_groups[0]["params"]), "no matrix"
        return super().norms()


class LateMomentum(torch.optim.SGD):
    """Keeps a momentum of parameters with elements, from its fifth step on, in float32."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        [group] = self.param_groups
        group["num"] = group.get("num", 0) + 1
        for one in group["params"]:
            if one.numel() and group["num"] >= group.get("first", 5):
                kept = self.state[one].setdefault("late", torch.zeros_like(one, dtype=torch.float32))
                one.grad = kept.mul_(0.9).add_(one.grad).to(one.dtype, copy=True)
        super().step()


class GroupScale(torch.optim.SGD):
    """Keeps the largest gradient of each group, unused so far, as Prodigy and others do."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            found = [float(one.grad.abs().max()) for one in group["params"] if one.numel()]
            group["largest"] = max([group.get("largest", 0.0), *found])
        super().step()


def slots(kind: Callable[..., torch.optim.Optimizer]) -> Slots:
    [found] = slots_of(kind([nn.Parameter(torch.ones(2, 2))], lr=0.1), partial(kind, lr=0.1))
    return found


@pytest.mark.parametrize(
    ("kind", "moments", "counts", "is_atomic"),
    [
        (torch.optim.AdamW, ("exp_avg", "exp_avg_sq"), True, False),
        (partial(torch.optim.AdamW, amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), True, False),
        (torch.optim.SGD, (), False, False),
        (partial(torch.optim.SGD, momentum=0.9, nesterov=True), ("momentum_buffer",), False, False),
        (torch.optim.Muon, ("momentum_buffer",), False, True),
        (torch.optim.Adafactor, (), True, True),
        (partial(torch.optim.AdamW, fused=True), ("exp_avg", "exp_avg_sq"), True, True),
        (NormedSteps, (), False, True),
        (LargeSteps, (), False, True),
        (LongSteps, (), False, True),
        (NormedMatrices, (), False, True),
        (LateMomentum, ("late",), False, False),
    ],
)
def test_an_optimizers_moments_are_found_by_trying_it(
    kind: Callable[..., torch.optim.Optimizer], moments: tuple[str, ...], counts: bool, is_atomic: bool
) -> None:
    found = slots(kind)
    assert (found.moments, found.count is not None, found.is_atomic) == (moments, counts, is_atomic)


def test_a_parameter_without_dimensions_may_be_held_by_itself() -> None:
    """It has no part that could be updated otherwise; some optimizers keep nothing of an empty one."""
    [found] = slots_of(LateMomentum([nn.Parameter(torch.tensor(1.0))], lr=0.1), partial(LateMomentum, lr=0.1))
    assert found.moments == ("late",)


def test_what_an_optimizer_raises_for_a_large_parameter_is_said() -> None:
    weights = nn.Parameter(torch.ones(2, 2, 2))
    with pytest.raises(ConfigError, match="update a part of a parameter: no matrix: set parallel"):
        slots_of(NormedMatrices([weights], lr=0.1), partial(NormedMatrices, lr=0.1))


def test_moments_of_another_type_than_their_weights_are_refused_in_shards() -> None:
    """Shards would keep them in the weights' type, and have other bits than a whole state."""
    optimizer = LateMomentum([{"params": nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)), "first": 1}], lr=0.1)
    with pytest.raises(ConfigError, match=r"'late' that it keeps of torch.bfloat16 weights is torch.float32"):
        check_types(optimizer, partial(LateMomentum, lr=0.1))
    check_types(torch.optim.AdamW([torch.ones(2, 2, dtype=torch.bfloat16)]), torch.optim.AdamW)


def test_moments_may_have_shapes_that_follow_from_a_parameters() -> None:
    """They are found for each number of dimensions that a group's parameters have."""
    parameters = [nn.Parameter(torch.ones(2 + dims, *[2] * dims)) for dims in range(3)]
    [found] = slots_of(torch.optim.Adafactor(parameters), torch.optim.Adafactor)
    assert found.shapes_of((7,)) == {"variance": (7,)}
    assert found.shapes_of((8, 9)) == {"row_var": (8, 1), "col_var": (1, 9)}
    assert found.shapes_of((4, 8, 9)) == {"row_var": (4, 8, 1), "col_var": (4, 1, 9)}


@pytest.mark.heavy
@pytest.mark.parametrize(("shards", "offload"), [("optimizer", "none"), ("parameters", "none"), ("none", "optimizer")])
def test_moments_of_a_size_of_their_own_take_no_more_memory(shards: Shards, offload: Offloads) -> None:
    """Adafactor keeps a number per row and per column in shards, too: a fortieth of the weights."""
    group, recipe = Group(0, 1, None, 60), {"name": "adafactor"}
    whole, state = build("none", recipe=recipe), build(shards, recipe=recipe, offload=offload)
    take_first_seat(group, state.shards, newcomers(1))
    for one in (whole, state):
        train(group, one, 1)
    share = shards_of(state)
    needed = [tensor for kept in whole.optimizer.state.values() for name, tensor in kept.items() if name != "step"]
    held = sum(moment.numel() for one in share.runs for moment in one.moments.values())
    assert 0 <= held - sum(map(Tensor.numel, needed)) < 64 * len(needed)
    assert 40 * held < sum(one.weights.numel() for one in share.trained_runs)


def test_each_parameter_group_has_moments_of_its_own() -> None:
    """Muon's matrices are not split; AdamW's parameters are."""
    choice = choose(OptimizerConfig(name="muon"))
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], "use_muon": is_muon} for is_muon in (True, False)]
    found = slots_of(choice.make(groups), choice.make)
    assert [(one.moments, one.is_atomic) for one in found] == [
        (("momentum_buffer",), True),
        (("exp_avg", "exp_avg_sq"), False),
    ]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (NormOfAll, "weights' of a part"),
        (GroupScale, "depends on the part"),
        (LargeRows, "of a part of a large tensor"),
        (partial(torch.optim.SGD, momentum=0.9, dampening=0.5), "that has kept zeros"),
    ],
)
def test_an_optimizer_whose_update_needs_more_than_an_element_is_refused(
    kind: Callable[..., torch.optim.Optimizer], why: str
) -> None:
    """Some scale by all parameters; damped momentum starts with a gradient."""
    with pytest.raises(ConfigError, match=f"{why}.*set parallel.shards to none"):
        slots(kind)


def test_trained_weights_that_commits_do_not_hold_are_refused_in_shares() -> None:
    """A commit has no copy of a lost shard; frozen weights exist in every process at its start."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(requires_grad=False)])
    left_out = ["1.weight"]

    def drop(_: nn.Module, state: dict[str, Tensor], prefix: str, __: object) -> None:
        for name in left_out:
            state.pop(f"{prefix}{name}", None)

    model.register_state_dict_post_hook(drop)  # type: ignore[no-untyped-call]
    build_state(model, OptimizerConfig(), 9, "cpu", is_fp16=False, parallel=ParallelConfig(shards="parameters"))
    left_out.append("0.bias")
    with pytest.raises(ConfigError, match=r"such as '0.bias'"):
        build_state(model, OptimizerConfig(), 9, "cpu", is_fp16=False, parallel=ParallelConfig(shards="parameters"))


worlds = st.tuples(st.integers(1, 20), st.integers(1, 30))


@given(models(), worlds)
def test_writers_cut_every_tensor_into_its_elements_once(listed: list[Listed], world: tuple[int, int]) -> None:
    """This holds for any number of writers and of sections at whose ends memory is cut."""
    layout, written = _written(listed, world)
    for tensor, by_writer in zip(layout.tensors, written_of(layout, written), strict=True):
        assert len(by_writer) == len(written)
        spans = sorted(span for spans in by_writer for span in spans)
        ends = [0, *(hi for _, hi in spans)]
        assert [lo for lo, _ in spans] == ends[:-1] and ends[-1] == tensor.numel


@given(models(), worlds)
def test_a_span_joins_grains_of_one_section_and_no_others(listed: list[Listed], world: tuple[int, int]) -> None:
    """A writer thus has as few spans as contiguous pieces of memory."""
    layout, written = _written(listed, world)
    for held in written:
        for tensor, spans in spans_of(layout, held).items():
            expected = list[tuple[int, int]]()
            for grain in _grains_of(layout, tensor, held.grains):
                lo, hi = int(layout.lo[grain]), int(layout.hi[grain])
                is_next = bool(expected) and expected[-1][1] == lo
                if is_next and held.sections[grain] == held.sections[grain - 1]:
                    lo = expected.pop()[0]
                expected.append((lo, hi))
            assert spans == expected


def _written(listed: list[Listed], world: tuple[int, int]) -> tuple[Layout, list[Held]]:
    """Return a layout, and the elements that each rank of a world holds if all are held once."""
    layout, (num_ranks, num_sections) = lay_out(listed), world
    circle = circle_of(layout)
    sections = sections_of(circle, num_sections)
    return layout, [Held(grains, sections) for grains in all_held(circle, seats_of([()] * num_ranks, 1))]


def _grains_of(layout: Layout, tensor: int, held: Int64s) -> list[int]:
    return np.intersect1d(held, np.array(layout.tensors[tensor].grains, dtype=np.int64)).tolist()
