"""Layouts that are ruled out say why; the best are the best; and faults cost what they cost."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import pairwise

import pytest
from pydantic import ValidationError

from elastic_train.config.schema import Config
from elastic_train.core.lanes import owned_lanes
from elastic_train.errors import ConfigError
from elastic_train.planning.arithmetic.catalogue import parse_cluster
from elastic_train.planning.arithmetic.goodput import Reliability
from elastic_train.planning.arithmetic.layouts import Batch, Layout
from elastic_train.planning.arithmetic.memory import memory_of
from elastic_train.planning.arithmetic.model import Sizes
from elastic_train.planning.report import make_report
from elastic_train.planning.search import LESS_IS_BETTER, Job, best, compare, scaling, work_out
from elastic_train.program.schedules import Kind, Pipeline, timetable
from tests.elastic_train.planning.shapes import LLAMA_7B, LLAMA_70B, Transformer

OWN = Sizes(4.0, 4.0, 8.0)
SMALL = Transformer(12, 768, 12, 32_000, 1024).facts(4, OWN)


def job(on: str = "2x8xH100", lanes: int = 64) -> Job:
    return Job(SMALL, Batch(lanes, 4), parse_cluster(on), 1000, price=2.0)


@pytest.mark.parametrize(
    ("layout", "lanes", "said"),
    [
        (Layout(tensor=3), 64, "does not divide 16 devices"),
        (Layout(), 8, "only 8 lanes"),
        (Layout(tensor=16), 64, "beyond a node"),
        (Layout(tensor=4, pipeline=4), 3, "pp 4 does not work with 3 lanes"),
        (Layout(expert=8), 6, "ep 8 does not work with 6 lanes"),
        (Layout(tensor=3), 48, "tp x cp = 3 leaves 2 of a node's 8 devices over"),
        (Layout(pipeline=2, expert=3), 48, "tp x ep x cp = 3 leaves 2 of a node's 8 devices over"),
        (Layout(pipeline=16), 64, "12 blocks in 16 stages"),
        (Layout(pipeline=8, interleave=2), 64, "12 blocks in 16 stages"),
        (Layout(expert=2), 64, "has no experts"),
        (Layout(context=16), 64, "cp 16 reaches beyond a node"),
        (Layout(tensor=4, context=4), 64, "tp x cp = 16 reaches beyond a node"),
        (Layout("optimizer", copies=32), 64, "only 16 replicas"),
        (Layout("optimizer", copies=9, context=2, tensor=2), 64, "only 8 ranks of each part"),
    ],
)
def test_what_rules_a_layout_out_is_said(layout: Layout, lanes: int, said: str) -> None:
    outcome = work_out(job(f"{3 if lanes == 48 else 2}x8xH100", lanes), layout)
    assert any(said in problem for problem in outcome.problems)
    assert not outcome.figures


def test_stages_of_different_nodes_wait_for_the_links_between_these() -> None:
    """The same cells of four stages, each in one node or on two; tensor ranks stay together."""
    layout = Layout(tensor=2, pipeline=4)
    inside, between = (work_out(job(on), layout) for on in ("2x8xH100", "4x4xH100"))
    assert not inside.problems and not between.problems and layout.runs_today
    assert inside.step is not None and between.step is not None
    assert between.step.tensor_s > inside.step.tensor_s
    assert between.step.bubble_s == inside.step.bubble_s


def test_a_layout_has_as_many_lanes_as_stages_exactly_where_training_takes_it() -> None:
    """Of cells that have fewer lanes each than stages, the bubble is the price; a job that has fewer is refused."""
    for lanes, says_no in ((4, False), (3, True)):
        batch = {"global_batch": 4 * lanes, "micro_batch": 4}
        tree = {"data": {"train": "rows"}, "batch": batch, "parallel": {"pipeline": 4}, "max_steps": 1}
        with pytest.raises(ValidationError) if says_no else contextlib.nullcontext():
            Config.model_validate(tree)
        outcome = work_out(job("2x8xH100", lanes), Layout(pipeline=4, tensor=2))
        assert bool(outcome.problems) == says_no


def test_what_does_not_fit_names_what_takes_the_memory() -> None:
    outcome = work_out(replace(job(), model=LLAMA_70B.facts(1, OWN)), Layout())
    assert "of optimizer and" in outcome.problems[0]
    assert "H100 has 77 GB to use of 80 GB" in outcome.problems[0]


@pytest.mark.heavy
@pytest.mark.parametrize("figure", ["throughput", "memory", "cost", "goodput"])
def test_the_best_are_in_order_and_fit(figure: str) -> None:
    chosen = best(compare(job(), Layout(), with_cells=True), figure)
    values = [one.figures[figure] for one in chosen]
    assert len(values) == 5 and not any(one.problems for one in chosen)
    assert values == sorted(values, reverse=figure not in LESS_IS_BETTER)


def test_what_is_offloaded_is_in_the_hosts_memory_and_crosses_the_bus() -> None:
    facts = replace(job(), model=LLAMA_7B.facts(1, OWN), cluster=parse_cluster("8xH100"))
    kept, moved = (work_out(facts, Layout("optimizer", 2, offload=where)) for where in ("none", "optimizer"))
    assert kept.memory and moved.memory and kept.step and moved.step
    held = 8 * facts.model.trained / 4
    assert kept.memory.optimizer == pytest.approx(held)
    assert moved.memory.optimizer == 2 * (32 << 20)
    assert moved.memory.host_bytes - kept.memory.host_bytes == pytest.approx(held)
    assert moved.step.update_s == pytest.approx(held / 50e9)
    [problem] = work_out(facts, Layout(offload="all")).problems
    assert "offload all does not work with shards none" in problem


@pytest.mark.heavy
def test_a_run_with_fewer_ranks_than_copies_is_one_whose_ranks_all_hold_everything() -> None:
    """As in training, where copies are two by default, also on the single device that offload is for."""
    alone, layout = job("1xH100", lanes=4), Layout("parameters", 2, offload="all")
    own = make_report(alone, layout, "throughput", with_cells=False).own
    assert not own.problems and own.figures == work_out(alone, replace(layout, copies=1)).figures


def test_without_cells_only_what_the_trainer_runs_is_compared() -> None:
    assert all(one.layout.runs_today for one in compare(job(), Layout(), with_cells=False))


@pytest.mark.heavy
def test_what_recomputes_selectively_is_compared_with_nothing_else() -> None:
    """The pass that was followed has it: without, a layout would seem to need as little memory."""
    for own, expected in (("selective", {"selective"}), ("units", {"none", "units"}), ("none", {"none", "units"})):
        found = compare(job(), Layout(recompute=own), with_cells=False)
        assert {one.layout.recompute for one in found} == expected


def test_a_part_of_each_row_takes_a_part_of_the_activations_and_of_the_work() -> None:
    """Every rank holds the whole model all the same, and all of them sum its gradient."""
    after = Layout(bucket_mb=None)  # as ranks of a cell exchange gradients
    rows, parts = (work_out(job(lanes=16), layout) for layout in (after, replace(after, context=4)))
    assert rows.memory and parts.memory and rows.step and parts.step
    assert parts.memory.activations == pytest.approx(rows.memory.activations / 4)
    assert parts.memory.states == rows.memory.states
    assert parts.memory.exchange == rows.memory.exchange
    assert rows.step.compute_s <= parts.step.compute_s < 4 * rows.step.compute_s, "calls of kernels are not shared"
    assert parts.step.tensor_s > rows.step.tensor_s == 0
    assert parts.layout.name == "shards none, cp 4"
    spread = work_out(job(lanes=16), Layout("optimizer", copies=2, context=4)).memory
    assert spread and spread.optimizer == pytest.approx(parts.memory.optimizer / 8), "16 ranks hold all twice"
    assert spread.staging == parts.memory.staging and spread.exchange == parts.memory.exchange


def test_chunks_of_a_stage_make_the_bubble_smaller_and_cost_links_and_memory() -> None:
    """The bubble is a third, and lanes wait for neighbours thrice as long (Narayanan et al. 2021, section 2.2.2)."""
    plain, chunks = (work_out(job(lanes=32), Layout(pipeline=4, interleave=number)) for number in (1, 3))
    assert plain.memory and chunks.memory and plain.step and chunks.step
    assert chunks.step.bubble_s == pytest.approx(plain.step.bubble_s / 3)
    assert chunks.step.tensor_s == pytest.approx(3 * plain.step.tensor_s)
    of_blocks = sum(unit.saved_bytes for unit in SMALL.blocks) / 4
    assert chunks.memory.activations - plain.memory.activations == pytest.approx(of_blocks * 3 / 3)
    assert chunks.memory.states == plain.memory.states
    assert chunks.layout.name == "shards none, pp 4, vpp 3"


def test_stages_may_have_unequal_numbers_of_blocks() -> None:
    """As in training: a step waits for the largest stage, here of three blocks of twelve, as without a fifth stage."""
    four, five, six = (work_out(job("1x60xH100", lanes=60), Layout(pipeline=number)) for number in (4, 5, 6))
    assert four.step and five.step and six.step and four.memory and five.memory and six.memory
    assert five.step.compute_s == pytest.approx(four.step.compute_s * 15 / 12)
    assert four.memory.states == five.memory.states > six.memory.states


@pytest.mark.parametrize(
    ("layout", "lanes", "cells", "expected"),
    [
        (Layout(pipeline=4), 7, 1, 4.0),
        (Layout(pipeline=4), 3, 1, 3.0),
        (Layout(pipeline=4, schedule="gpipe"), 7, 1, 7.0),
        (Layout(pipeline=4, schedule="gpipe"), 15, 2, 8.0),
        (Layout(pipeline=4, interleave=2), 7, 1, 7.0),
        (Layout(pipeline=4, interleave=2), 8, 1, 5.5),
        (Layout(pipeline=4, interleave=2), 15, 2, 7.0),  # one of the cells has seven
        (Layout(pipeline=4, interleave=2), 17, 2, 6.0),
        (Layout(pipeline=8, interleave=4), 15, 1, 15.0),
        (Layout(pipeline=8, interleave=4), 16, 1, 9.75),
    ],
)
def test_a_stage_keeps_the_lanes_that_its_schedule_has_under_way(
    layout: Layout, lanes: int, cells: int, expected: float
) -> None:
    """As many as in the timetable that training goes by, for each cell's number of lanes."""
    model = Transformer(32, 768, 12, 32_000, 1024).facts(4, OWN)
    cluster = parse_cluster(f"{layout.pipeline * cells}xH100")
    one, found = (memory_of(model, which, Batch(lanes, 4), cluster) for which in (Layout(), layout))
    kept = sum(unit.saved_bytes for unit in model.blocks)
    rest = one.activations - kept
    assert found.activations == pytest.approx(kept / layout.pipeline * expected + rest)
    assert expected == max(alive(layout, len(owned_lanes(cell, cells, lanes))) for cell in range(cells))


def test_a_rank_sends_whole_outputs_to_the_next_stage_unless_it_has_some_tokens_alone() -> None:
    """Every rank of a tensor group has the whole output of a block, and sends it to that of the next stage."""
    facts, sent = job("8xH100", lanes=8), dict[bool, float]()
    for is_shared in (False, True):
        layout = Layout(tensor=4, pipeline=2, sequence=is_shared)
        plain, chunks = (work_out(facts, replace(layout, interleave=number)).step for number in (1, 2))
        assert plain and chunks
        link = facts.cluster.inside  # with two chunks a lane comes to each stage once more, each way
        sent[is_shared] = link.bytes_per_s * ((chunks.tensor_s - plain.tensor_s) / (8 * 2) - link.alpha_s)
    output = SMALL.blocks[0].output_bytes
    assert sent == {False: pytest.approx(output), True: pytest.approx(output / 4)}


def alive(layout: Layout, lanes: int) -> float:
    """Return of how many lanes the first stage keeps all that its chunks make, by the timetable, at most."""
    kind: Kind = "interleaved" if layout.interleave > 1 else layout.schedule
    kept, most = set[tuple[int, int]](), 0
    for tick in timetable(Pipeline(kind, layout.pipeline, lanes, layout.interleave)):
        if (one := tick[0]) is not None:
            most = max(most, len(kept | {(one.number, one.chunk)}))
            kept ^= {(one.number, one.chunk)}
    return most / layout.interleave


def test_the_order_of_passes_is_in_a_layouts_name_where_it_is_another() -> None:
    assert Layout(pipeline=4, schedule="gpipe").name == "shards none, pp 4, gpipe"
    assert Layout(schedule="gpipe").name == "shards none"


@pytest.mark.parametrize("recompute", ["none", "units"])
def test_shared_out_tokens_take_a_part_of_all_that_a_block_keeps(recompute: str) -> None:
    """Without it the inputs of norms and of what is cut are whole on every rank (Korthikanti et al. 2022, table 2)."""
    layout = Layout(tensor=4, recompute=recompute)
    whole, shared = (work_out(job(), one) for one in (layout, replace(layout, sequence=True)))
    assert whole.memory and shared.memory and whole.step and shared.step
    uncut = sum((1 if recompute == "units" else 6) * unit.output_bytes for unit in SMALL.blocks)
    uncut += 6 * SMALL.blocks[0].output_bytes if recompute == "units" else 0.0
    assert whole.memory.activations - shared.memory.activations == pytest.approx(uncut * 3 / 4)
    assert whole.memory.states == shared.memory.states
    assert shared.step.tensor_s > whole.step.tensor_s, "inputs of column layers are gathered once more"
    assert shared.layout.name.startswith(
        f"shards none{', recompute units' if recompute == 'units' else ''}, tp 4, sp 4"
    )


def test_an_unknown_figure_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'memory'"):
        best([], "memry")


@pytest.mark.heavy
def test_strong_scaling_ends_where_lanes_do_and_weak_scaling_does_not() -> None:
    strong, weak = (scaling(job(), Layout(), weak=weak) for weak in (False, True))
    assert strong[-1].devices == 64
    assert weak[-1].devices == 1024
    efficiencies = [row.efficiency for row in strong]
    assert all(later <= before + 1e-9 for before, later in pairwise(efficiencies))


@pytest.mark.heavy
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=4), Layout("optimizer", 9, context=2)])
def test_both_scalings_agree_at_the_runs_own_devices(layout: Layout) -> None:
    """Both are the run itself there, also of replicas of several devices."""
    at = [{row.devices: row.outcome for row in scaling(job(), layout, weak=weak)} for weak in (False, True)]
    assert at[False][16] == at[True][16] == work_out(job(), layout)


@pytest.mark.parametrize(("on", "expected"), [("2x6xH100", [1, 2, 4, 6, 12, 24]), ("4xH100", [1, 2, 4, 8, 16, 32])])
def test_scaling_is_over_whole_nodes(on: str, expected: list[int]) -> None:
    """Of nodes of six, eight devices would be two nodes, and the speed-up that of twelve."""
    rows = scaling(job(on, lanes=36), Layout(), weak=False)
    assert [row.devices for row in rows] == [row.outcome.devices for row in rows] == expected


def test_a_slower_link_waits_longer() -> None:
    fast, slow = (work_out(job(on), Layout()).figures for on in ("2x8xH100", "2x8xH100@10GbE"))
    assert slow["communication"] > 2 * fast["communication"]
    assert slow["throughput"] < fast["throughput"]


def test_live_recovery_loses_less_than_a_restart_and_one_copy_as_much() -> None:
    def share(recovery: str, layout: Layout) -> float:
        hours = Reliability(mtbf_h=50.0, recovery=recovery, spares=1)  # type: ignore[arg-type]
        return work_out(replace(job("8x8xH100"), reliability=hours), layout).figures["goodput"]

    live, restart = share("live", Layout()), share("restart", Layout())
    assert live > restart
    assert share("live", Layout("parameters", 1)) < live


def test_the_repair_of_the_only_node_counts_once() -> None:
    """An hour of repair after every ten: ten elevenths are left, but for saves and what is computed again."""
    outcome = work_out(replace(job("8xH100"), reliability=Reliability(mtbf_h=10.0)), Layout())
    assert 0.9 * 10 / 11 < outcome.figures["goodput"] < 10 / 11
    spared = replace(job("8xH100"), reliability=Reliability(mtbf_h=10.0, spares=1))
    assert work_out(spared, Layout()).figures["goodput"] > 10 / 11


def test_days_and_cost_follow_from_steps_price_and_goodput() -> None:
    outcome = work_out(job(), Layout())
    assert outcome.step is not None and outcome.goodput is not None
    assert outcome.days == pytest.approx(1000 * outcome.step.total_s / outcome.goodput.share / 86400)
    assert outcome.cost == pytest.approx(outcome.days * 24 * 2.0 * 16)
