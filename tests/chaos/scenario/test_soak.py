"""A soak's faults: drawn from the seed alone, of every kind, in bursts, and at every failpoint cell in turn."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.cli import _as_arguments
from chaos.errors import ScenarioError
from chaos.real.runs import unslowed
from chaos.scenario.kinds import KINDS
from chaos.scenario.model import FOLDER, load
from chaos.scenario.schedule import Due
from chaos.scenario.soak import Drawn, can_be_at, drawn_nodes, drawn_shards, kinds_of
from elastic_train.config import sources
from elastic_train.core.lanes import owned_lanes, parts_of
from elastic_train.parallel.exchange import is_balanced
from elastic_train.system.failpoints import KINDS as POINT_KINDS
from elastic_train.system.failpoints import POINTS

SOAK = load(FOLDER / "soak.yaml")


def drawn(seed: int, num: int, missing: dict[str, str] | None = None) -> list[Due]:
    return list(islice(Drawn(SOAK, seed, missing or {})(lambda: 0), num))


@pytest.mark.heavy
@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_faults_depend_on_the_seed_alone(seed: int) -> None:
    """The same seed draws the same faults, each with its kind's parameters; the first waits for a healthy job."""
    faults = drawn(seed, 200)
    assert faults == drawn(seed, 200)
    assert faults[0].is_healed
    for fault in faults:
        kind = KINDS[fault.kind]
        assert kind.local
        assert (fault.point is not None) == (kind.aim == "point")
        assert (fault.target is not None) == (kind.aim in ("worker", "node", "point") and fault.kind != "kill_job")
        assert fault.for_s is not None if kind.lasts == "must" else fault.for_s is None or kind.lasts == "may"


def test_every_kind_is_drawn_and_expensive_kinds_are_rare() -> None:
    """Five hundred faults have every kind; whole jobs rarely die, since recovering from that takes long."""
    num = Counter(fault.kind for fault in drawn(1, 500))
    needs = (None, "tracker", "freezing_disk", "orders")
    own = {name for name, kind in KINDS.items() if kind.local and kind.is_drawn and kind.needs in needs}
    assert set(num) == own - {"start_node"}
    assert num["kill_job"] < num["freeze_worker"] * 3
    assert min(num.values()) >= 2


def test_five_hundred_faults_are_of_many_kinds_and_places() -> None:
    """There are at least 45 kinds, including node starts at the end; and a kind comes at many failpoints."""
    faults = drawn(1, 500)
    assert len({"start_node", *(fault.kind for fault in faults)}) >= 45
    assert len({(fault.kind, fault.point.name) for fault in faults if fault.point}) >= 45


def test_a_soak_puts_to_the_test_what_only_floats_show() -> None:
    """It draws random numbers, has moments, clips, changes its rate, and its worlds have two, four and eight ranks."""
    config = sources.load(str(SOAK.config), environ={}, arguments=[])
    optimizer, num_lanes = config.optimizer, config.batch.num_lanes
    assert (optimizer.name, optimizer.schedule, config.reduction) == ("adamw", "cosine", "canonical")
    assert optimizer.clip_norm is not None and optimizer.warmup_steps and optimizer.schedule_steps
    assert config.task.params["dropout"]
    assert SOAK.nodes.count * SOAK.nodes.ranks >= 4
    for size in (2, 4, 8):
        assert is_balanced([parts_of(owned_lanes(rank, size, num_lanes), num_lanes) for rank in range(size)])


def test_every_way_of_holding_the_state_is_drawn() -> None:
    """The seeds cover all modes, with one to three copies; a soak that does not ask for it has the default."""
    found = Counter(
        (shards["shards"], shards["copies"]) for shards in (drawn_shards(SOAK, seed) for seed in range(200))
    )
    assert set(found) == {(what, num) for what in ("none", "optimizer", "gradients", "parameters") for num in (1, 2, 3)}
    assert drawn_shards(load(FOLDER / "soak-witness.yaml"), 1) == {}
    config = sources.load(str(SOAK.config), environ={}, arguments=_as_arguments({"parallel": drawn_shards(SOAK, 1)}))
    assert config.parallel.model_dump(include={"shards", "copies"}) == drawn_shards(SOAK, 1)


def test_nodes_have_one_rank_or_two() -> None:
    """All nodes of a seed have the same number, for worlds of up to eight ranks, including non-powers of two."""
    found = {seed: drawn_nodes(SOAK, seed) for seed in range(20)}
    assert {nodes.ranks for nodes in found.values()} == {1, 2}
    assert {nodes.model_copy(update={"ranks": 1}) for nodes in found.values()} == {SOAK.nodes}
    witness = load(FOLDER / "soak-witness.yaml")
    assert {drawn_nodes(witness, seed) for seed in range(20)} == {witness.nodes}


def test_kinds_this_machine_cannot_do_are_not_drawn() -> None:
    assert "cut_node" not in {fault.kind for fault in drawn(1, 500, {"cut_node": "no namespaces"})}


def test_a_processor_that_computes_wrongly_needs_a_task_and_workers_that_notice_it() -> None:
    """The witness takes no orders, and in `restart` mode a worker is in its world from its start."""
    restarted = SOAK.model_copy(update={"nodes": SOAK.nodes.model_copy(update={"recovery": "restart"})})
    assert "unfit_node" in kinds_of(SOAK, {})
    assert "unfit_node" not in (*kinds_of(load(FOLDER / "soak-witness.yaml"), {}), *kinds_of(restarted, {}))


def test_cells_not_yet_hit_are_drawn_next() -> None:
    """In a long soak every cell comes, each about as often as others of its kind."""
    cells = Counter((fault.point.name, fault.kind) for fault in drawn(1, 2000) if fault.point)
    assert set(cells) == {(point, kind) for point in POINTS for kind in POINT_KINDS if can_be_at(kind, point)}
    for kind in POINT_KINDS:
        counts = [num for (_, of), num in cells.items() if of == kind]
        assert max(counts) - min(counts) <= 1


def test_a_soak_that_can_do_nothing_is_refused() -> None:
    """If a machine can do none of the requested kinds, this is reported before a node starts."""
    assert SOAK.soak is not None
    cut = SOAK.model_copy(update={"soak": SOAK.soak.model_copy(update={"kinds": ("cut_node",)})})
    with pytest.raises(ScenarioError, match="cut_node cannot be done here: no namespaces"):
        Drawn(cut, 1, {"cut_node": "no namespaces", "storage_full": "no mounts"})


@pytest.mark.parametrize(
    ("params", "expected"),
    [("{lane_ms: 12}", {"lane_ms": 0}), ("{lane_ms: 12, dim: 64}", {"lane_ms": 0, "dim": 64}), ("{dim: 64}", None)],
)
def test_the_reference_run_drops_only_a_tasks_waits(params: str, expected: dict[str, int] | None) -> None:
    """In the run without faults a task loses its waits, and no other parameter; a task without waits is unchanged."""
    config = sources.load("configs/soak.yaml", environ={}, arguments=[f"--task.params={params}"])
    found = [yaml.safe_load(text.partition("=")[2]) for text in unslowed(config)]
    assert found == ([expected] if expected else [])


def test_a_soak_ends_after_the_requested_number_of_faults() -> None:
    """Only faults that were done count, however many were drawn and missed."""
    done = [0]
    for _ in Drawn(SOAK, 1, {})(lambda: done[0]):
        done[0] += 1
    assert SOAK.soak is not None and 500 <= done[0] < 500 + 4 * SOAK.soak.burst
