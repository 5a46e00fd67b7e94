"""The judge: a healthy run passes, every planted bug is caught by its invariant, and nothing is true by default."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chaos.judge.checker import COMPARED, INVARIANTS, WITHOUT_HISTORIES, judge
from chaos.judge.evidence.applied import lineage_of, shape_of
from chaos.judge.evidence.holes import coverage_counts
from chaos.judge.evidence.recovery_cost import recoveries
from chaos.judge.evidence.run_files import Evidence, Line, collect, items, number
from chaos.judge.findings import find
from chaos.judge.invariants.exactly_once.agreement import partition
from chaos.judge.invariants.exactly_once.samples import closed_form, coverage
from chaos.judge.invariants.tracked_values import tracking
from chaos.judge.verdict import examine
from chaos.planted.catalogue import PLANTED, Planted
from chaos.planted.damage import harmless_kill
from chaos.planted.edits import edit
from elastic_train.core.accounting import CoverageSums
from elastic_train.core.order import Order
from tests.chaos.recorded import digest_at, metrics_at, samples_until

pytestmark = pytest.mark.usefixtures("weights_loaded_once")

ALL = {*INVARIANTS, *COMPARED, "sums", "claims", "deliverable", "causes", "witness", "tracking"}


def truths(folder: Path) -> dict[str, str]:
    findings = judge(collect(folder / "faulted"), collect(folder / "reference"))
    return {finding.invariant: finding.truth for finding in findings}


def test_a_healthy_run_passes(healthy: Path) -> None:
    """Every invariant of a healthy run is true."""
    findings = judge(collect(healthy / "faulted"), collect(healthy / "reference"))
    assert [finding for finding in findings if finding.truth != "true"] == []
    assert {finding.invariant for finding in findings} == ALL


@pytest.mark.heavy
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_bug_is_caught_by_its_invariant(folder: Path, planted: Planted) -> None:
    """Damage as a bug would cause it makes the named invariant false or unknown as expected, with a reason."""
    planted.plant(folder / "faulted")
    verdict = examine(folder)
    found = {finding.invariant: finding for finding in verdict.findings}
    assert found[planted.invariant].truth == planted.truth, found[planted.invariant].why
    assert len(found[planted.invariant].why) > 10
    assert not verdict.is_valid


def test_a_kill_that_lost_nothing_is_seen_where_a_survivor_had_committed_as_it_left(folder: Path) -> None:
    run = collect(folder / "faulted")
    killed = next(number(line, "t") for line in run.of("fault") if line.get("is_drawn"))
    kept = next(line["step"] for line in run.of("restore") if number(line, "t") > killed)
    last = [line for line in run.of("commit") if line["step"] == kept]
    assert last
    edit(folder / "faulted", lambda line: {**line, "t": killed + 1e-3} if line in last else line)
    assert truths(folder)["faults"] == "true"
    harmless_kill(folder / "faulted")
    assert truths(folder)["faults"] == "unknown"


def test_every_invariant_has_a_bug_that_breaks_it() -> None:
    """Each invariant is false or unknown for some planted bug."""
    assert {planted.invariant for planted in PLANTED} == ALL


def test_values_logged_after_a_newer_term_began_may_be_missing_from_the_tracker(healthy: Path) -> None:
    """The tracker should have every step's value, unless it was logged too late to be sent."""
    run = collect(healthy / "faulted")
    assert run.metrics is not None and run.tracked is not None
    held = [point for point in items(run.tracked, "train/loss") if point[0] != 10]  # type: ignore[index]
    (logged,) = [line for line in run.metrics[1] if line.get("step") == 10]
    for at, truth in ((number(logged, "t"), "unknown"), (number(run.metrics[2][-1], "t"), "true")):
        lines = [{**line, "t": at} if line is logged else line for line in run.metrics[1]]
        lacks = replace(run, metrics={**run.metrics, 1: lines}, tracked={"train/loss": held})
        assert find("tracking", lambda: tracking(lacks)).truth == truth  # noqa: B023 - called at once


def test_a_tracker_may_keep_values_that_a_damaged_commit_had_settled(healthy: Path) -> None:
    """For steps recomputed after damage it may hold an older value, if some term logged it.

    The rank that recomputed it may have died before it logged, and another continued from its step.
    """
    run = collect(healthy / "faulted")
    assert run.metrics is not None and run.tracked is not None
    older, newer = ({"t": 0.0, "step": 12, "values": {"train/rate": value}} for value in (1.0, 2.0))
    logged = {**run.metrics, 1: [*run.metrics[1], older]}
    again = {**logged, 2: [*run.metrics[2], newer]}
    damaged = [["commits/00000001-000000000012.json", "is missing"]]
    (restored,) = [line for line in run.of("restore") if line["term"] == 2 and line["rank"] == 0]
    for skipped, value, truth in ((damaged, 1.0, "true"), (damaged, 3.0, "false"), ([], 1.0, "false")):
        restored["skipped"] = skipped
        for metrics in (again, logged):
            held = replace(run, metrics=metrics, tracked={**run.tracked, "train/rate": [[12, value]]})
            assert find("tracking", lambda: tracking(held)).truth == truth  # noqa: B023 - called at once


def test_a_tracker_may_lack_values_of_steps_that_a_damaged_commit_had_settled(healthy: Path) -> None:
    """A world that ended before validating its last step logged nothing to send, and nothing is sent later."""
    run = collect(healthy / "faulted")
    assert run.metrics is not None and run.tracked is not None
    logged = {**run.metrics, 2: [*run.metrics[2], {"t": 0.0, "step": 12, "values": {"validation/loss": 1.0}}]}
    (restored,) = [line for line in run.of("restore") if line["term"] == 2 and line["rank"] == 0]
    for skipped, truth in (([["commits/00000001-000000000012.json", "is missing"]], "true"), ([], "unknown")):
        restored["skipped"] = skipped
        lacks = replace(run, metrics=logged)
        assert find("tracking", lambda: tracking(lacks)).truth == truth  # noqa: B023 - called at once


def test_no_invariant_is_true_by_default() -> None:
    """For a run without files each invariant is unknown, or reports what is missing."""
    nothing = Evidence(Path("nowhere"), [], [], {}, None, np.zeros(3, np.int64), metrics={})
    findings = judge(nothing, nothing)
    assert {finding.invariant for finding in findings} == ALL - {"causes"}, "nobody was asked why it stopped"
    assert [finding for finding in findings if finding.truth == "true"] == []


@pytest.mark.parametrize("error", [AssertionError, RecursionError, KeyError, RuntimeError])
def test_a_check_that_raises_is_unknown(error: type[Exception]) -> None:
    """Whatever a check raises, its finding is unknown, and the other checks still run."""

    def trip() -> str:
        raise error("over itself")

    found = find("coverage", trip)
    assert found.truth == "unknown"
    assert error.__name__ in found.why


def test_every_invariant_can_be_unknown(folder: Path) -> None:
    """History lines with nothing but their operation prove nothing, neither for nor against.

    Required evidence that is missing (the witness's counts) is reported.
    """
    for part in ("faulted", "reference"):
        edit(folder / part, lambda line: {"op": line["op"]})
        (folder / part / "result.json").write_text("{}")
        (folder / part / "witness.npy").unlink(missing_ok=True)
        for path in (folder / part / "metrics").glob("*.jsonl"):
            path.unlink()
    found = truths(folder)
    assert set(found.values()) == {"unknown"}, found
    assert set(found) == ALL


def test_a_missing_reference_run_is_reported(healthy: Path, tmp_path: Path) -> None:
    """A run to be compared with a reference is not valid without it; other runs have no such finding."""
    shutil.copytree(healthy / "faulted", tmp_path / "run" / "faulted")
    found = {finding.invariant: finding.truth for finding in examine(tmp_path / "run").findings}
    assert {name: found[name] for name in COMPARED} == dict.fromkeys(COMPARED, "unknown")
    edit(tmp_path / "run" / "faulted", lambda line: {**line, "reference": False})
    verdict = examine(tmp_path / "run")
    assert verdict.is_valid and COMPARED.keys().isdisjoint(finding.invariant for finding in verdict.findings)


def test_a_draft_left_by_a_killed_process_is_not_a_leak(folder: Path) -> None:
    """A process killed during a write cannot clean up; any other process has to."""
    (kill, _) = collect(folder / "faulted").of("fault")
    at = kill["t"]
    assert isinstance(at, float)
    for seconds, truth in ((-0.2, "true"), (-60.0, "false")):
        drafts = [["terms/.00000002.json.7", at + seconds]]
        edit(
            folder / "faulted",
            lambda line, drafts=drafts: {**line, "drafts": drafts} if line["op"] == "clean" else line,
        )  # type: ignore[misc]
        assert truths(folder)["cleanliness"] == truth


def test_a_torn_last_line_is_passed_over(folder: Path) -> None:
    """If a process died while writing, its history loses only that line."""
    for path in (folder / "faulted" / "history").glob("00000001-*"):
        path.write_bytes(path.read_bytes() + b'{"op": "step", "t": 1.5, "te')
    assert set(truths(folder).values()) == {"true"}


def test_a_killed_rank_may_lack_the_last_lines_of_its_term(folder: Path) -> None:
    """Lines not yet written by a killed rank leave a gap, but only in its term's last quarter second."""
    path = sorted((folder / "faulted" / "history").glob("00000001-00001-*"))[0]
    lines = path.read_text().splitlines()
    ended_at = json.loads(lines[-1])["t"]
    seen = set()
    for num_left in range(len(lines) - 1, len(lines) - 6, -1):
        path.write_text("\n".join(lines[:num_left]) + "\n")
        is_last = json.loads(lines[num_left])["t"] >= ended_at - 0.25
        assert truths(folder)["partition"] == ("true" if is_last else "false")
        seen.add(is_last)
    assert seen == {True, False}


def test_a_rank_killed_while_a_file_system_was_frozen_lacks_all_lines_since(folder: Path) -> None:
    """Its histories waited for the frozen writes; a gap in the middle, or without that fault, is a missing lane."""
    histories = folder / "faulted" / "history"
    path = sorted(histories.glob("00000001-00001-*"))[0]
    lines = path.read_text().splitlines()
    steps = [place for place, line in enumerate(lines) if json.loads(line)["op"] == "step"]
    began, ended_at = (json.loads(lines[place])["t"] for place in (steps[2], steps[-1]))
    kept = lines[: steps[3]]
    path.write_text("\n".join(kept) + "\n")
    assert truths(folder)["partition"] == "false"
    fault = {"op": "fault", "t": began, "kind": "freeze_fs", "for_s": ended_at - began, "nodes": [], "pids": []}
    with (histories / "chaos.jsonl").open("a") as file:
        file.write(json.dumps({**fault, "target": None, "term": 1, "seen_step": 0}) + "\n")
    assert truths(folder)["partition"] == "true"
    path.write_text("\n".join([*kept, *lines[steps[4] :]]) + "\n")
    assert truths(folder)["partition"] == "false"


def test_a_long_history_in_parts_is_one(healthy: Path, folder: Path) -> None:
    """The parts of a process's history are joined, and lines that a part repeats count once."""
    for path in (folder / "faulted" / "history").glob("[0-9]*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        again = [json.dumps({**json.loads(line), "again": True}) + "\n" for line in lines[:2]]
        path.write_text("".join(lines[:9]))
        path.with_name(f"{path.stem}.p000001.jsonl").write_text("".join([*again, *lines[9:12]]))
        path.with_name(f"{path.stem}.p000002.jsonl").write_text("".join([*again, *lines[12:]]))
    whole, parts = collect(healthy / "faulted"), collect(folder / "faulted")
    assert parts.processes == whole.processes
    assert examine(folder).is_valid


@pytest.mark.parametrize("what", ["old terms", "the first part of a long history"])
def test_a_run_that_deleted_histories_is_not_accused(folder: Path, what: str) -> None:
    """Statements that need histories are unknown, with the reason; results and commits still prove theirs."""
    history = folder / "faulted" / "history"
    for path in history.glob("00000001-*.jsonl"):
        if what == "old terms":
            path.unlink()
        else:
            path.rename(path.with_name(f"{path.stem}.p000001.jsonl"))
    if what == "old terms":
        (history / "summary.json").write_text('{"through": 1, "pruned": 1, "num_faults": 0, "trained_s": 1.0}')
    findings = judge(collect(folder / "faulted"), collect(folder / "reference"))
    assert {x.truth for x in findings if x.invariant in WITHOUT_HISTORIES} == {"true"}
    others = [x for x in findings if x.invariant not in WITHOUT_HISTORIES]
    assert {x.truth for x in others} == {"unknown"} and all("were deleted" in x.why for x in others)


def test_a_commit_no_history_records_is_part_of_the_chain(folder: Path) -> None:
    """A record without a line in any history is part of the chain if its publisher had died."""
    path = sorted((folder / "faulted" / "history").glob("00000002-00000-*"))[0]
    *before, commit, end = path.read_text().splitlines()
    assert '"commit", "t"' in commit and '"end"' in end
    path.write_text("\n".join([*before, end]) + "\n")
    assert truths(folder)["records"] == "false"
    path.write_text("\n".join(before) + "\n")
    assert set(truths(folder).values()) == {"true"}


def test_a_copy_is_not_a_reference(healthy: Path, tmp_path: Path) -> None:
    """A run compared with itself, or with a copy, proves nothing."""
    shutil.copytree(healthy / "faulted", tmp_path / "run" / "faulted")
    shutil.copytree(healthy / "faulted", tmp_path / "run" / "reference")
    found = truths(tmp_path / "run")
    assert found["hash"] == found["metrics"] == found["losses"] == "unknown"
    for path in (tmp_path / "run" / "reference" / "history").glob("chaos.jsonl"):
        path.unlink()  # without its faults it still has the same processes
    assert truths(tmp_path / "run")["hash"] == "unknown"


def test_costs_of_faults(healthy: Path) -> None:
    """RPO counts the steps that the next world recomputed, RTO lasts until its first step, and the parts add up."""
    kill, join = recoveries(collect(healthy / "faulted"))
    assert (kill.rpo_steps, join.rpo_steps) == (3, 0)
    assert kill.rto_s == pytest.approx(1.0 + 2.0 + 0.1)
    for cost in (kill, join):
        assert cost.detect_s is not None
        assert cost.form_s is not None
        assert cost.detect_s + cost.form_s + cost.restore_s + cost.warm_s == pytest.approx(cost.rto_s)


def test_lineage_leaves_out_what_was_given_up(healthy: Path) -> None:
    """Steps 11 to 13 of term 1 are not in the weights; term 2 applied them again."""
    lineage = lineage_of(collect(healthy / "faulted"))
    assert [applied.step for applied in lineage] == list(range(1, 31))
    assert [applied.term for applied in lineage] == [1] * 10 + [2] * 12 + [3] * 8


def test_a_process_about_to_receive_a_state_did_not_have_it() -> None:
    """Process 1 lived through a world in which others had step 2, and never got it; that branch is dead.

    It got step 2 of the new branch in term 4, which broke before its history recorded that.
    """
    worlds = {1: (8, 9), 2: (1, 9), 3: (5, 6), 4: (1, 5), 5: (1, 7)}
    lines: list[Line] = [
        {"op": "form", "t": 10.0 * term, "term": term, "rank": rank, "pid": pid}
        for term, pids in worlds.items()
        for rank, pid in enumerate(pids)
    ]
    for term, rank, step in ((1, 0, 0), (1, 1, 0), (2, 1, 2), (3, 0, 0), (3, 1, 0), (4, 1, 2), (5, 0, 2)):
        where = {"term": term, "rank": rank, "step": step, "commit": None, "given_by": None}
        lines.append({"op": "restore", "t": 10.0 * term + 1, **where})
    for term, step in ((1, 1), (1, 2), (3, 1), (3, 2), (5, 3)):
        lines += [{"op": "step", "t": 10.0 * term + 2, "term": term, "rank": rank, "step": step} for rank in (0, 1)]
    run = Evidence(Path("drawn"), [lines], [], {}, {"step": 3}, None)
    assert [(applied.term, applied.step) for applied in lineage_of(run)] == [(3, 1), (3, 2), (5, 3)]


def test_shape_counts_samples_as_the_lanes_do(healthy: Path) -> None:
    """The checker's arithmetic agrees with a loop over every lane, and with the trainer's order."""
    shape = shape_of(collect(healthy / "faulted"))
    assert [shape.samples_before(step) for step in range(31)] == [samples_until(step) for step in range(31)]
    order = Order([101], num_lanes=6, seed=1)
    assert shape.steps_per_epoch == order.num_steps(4)


@pytest.mark.parametrize("rows", [1, 2, 101, 1 << 16, (1 << 20) + 1])
def test_the_closed_form_agrees_with_the_trainers(rows: int) -> None:
    """The sums that the checker computes independently equal the trainer's."""
    trainers = CoverageSums.of_all(rows)
    assert closed_form(rows) == (trainers.sum_a, trainers.sum_b)


def test_verdict_names_what_is_asked_for(healthy: Path) -> None:
    """verdict.json has hashes, coverage, costs, faults, both runs' validation and tracker runs, seed and invariants."""
    verdict = examine(healthy)
    fields = json.loads((healthy / "verdict.json").read_text())
    assert fields == json.loads(json.dumps(verdict.fields))
    assert fields["valid"] is True
    assert fields["weights_sha256"] == fields["reference_weights_sha256"] == digest_at(30)
    assert fields["coverage"] == {"min": 1, "max": 1, "samples": 101}
    assert (fields["rpo_steps"], fields["seed"], len(fields["faults"])) == (3, 7, 2)
    assert fields["rto_s"] == pytest.approx(3.1, abs=0.01)
    loss = metrics_at(30)["loss"]
    assert fields["validation"] == {"macro_f1": None, "reference_macro_f1": None, "loss": loss, "reference_loss": loss}
    assert fields["mlflow_run_id"] == fields["reference_mlflow_run_id"] == "m"
    assert {item["invariant"] for item in fields["invariants"]} >= set(INVARIANTS)


@pytest.mark.parametrize(("name", "counts"), [("witness-repeat", (1, 2)), ("witness-skip", (0, 1)), ("skip", (0, 1))])
def test_coverage_distinguishes_repeats_from_skips(
    healthy: Path, tmp_path: Path, name: str, counts: tuple[int, int]
) -> None:
    """The minimum and maximum counts of a sample are the planted ones."""
    shutil.copytree(healthy / "faulted", tmp_path / "run")
    next(planted for planted in PLANTED if planted.name == name).plant(tmp_path / "run")
    if name == "skip":
        (tmp_path / "run" / "witness.npy").unlink()
    assert coverage_counts(collect(tmp_path / "run")) == counts


def test_a_soak_may_end_before_its_failpoints_are_reached(folder: Path) -> None:
    """Its histories show when it recovered: many failpoints are never reached, and that is not a finding."""
    missed = {"op": "missed", "t": 1.0, "kind": "kill", "point": "form", "node": 1}
    (folder / "faulted" / "history" / "missed.jsonl").write_text(json.dumps(missed) + "\n")
    assert truths(folder)["faults"] == "true"


def test_a_fault_without_an_effect_counts_for_nothing(folder: Path) -> None:
    """It is reported as missed, not as survived; nor does it explain later events."""
    edit(
        folder / "faulted",
        lambda line: {**line, "op": "missed", "why": "nothing showed"} if _is_effect_of(line, 1) else line,
    )
    found = {finding.invariant: finding for finding in examine(folder).findings}
    assert found["faults"].why.startswith("1 faults of 1 kinds") and "1 missed" in found["faults"].why
    assert found["deaths"].truth == "unknown" and "no fault since term 1 explains it" in found["deaths"].why
    fields = json.loads((folder / "verdict.json").read_text())
    assert fields["missed_by_kind"] == {"kill_node": 1} and fields["faults_by_kind"] == {"start_node": 1}


def _is_effect_of(line: Line, number: int) -> bool:
    return line["op"] == "effect" and line["fault"] == number


@pytest.mark.parametrize("degree", ["tensor", "pipeline"])
def test_in_cells_each_place_computes_every_lane(healthy: Path, degree: str) -> None:
    """A lane on two cells, a lane that lacks a place, and a lane reported by a rank of another place are violations."""
    run = collect(healthy / "faulted")
    places = [[_at_place(line, place) for line in lines] for place in (0, 1) for lines in run.processes]
    cells = replace(run, config={**run.config, "parallel": {degree: 2}}, processes=places)
    assert _partition_of(cells) == find("coverage", lambda: coverage(cells)).truth == "true"
    assert _partition_of(replace(cells, config=run.config)) == "false", "without cells it is twice too many"
    process, at = next(
        (lines, at) for lines in places[len(places) // 2 :] for at, line in enumerate(lines) if line["op"] == "step"
    )
    for change in ([], [{**process[at], "place": 0}], [process[at], process[at]]):
        spoilt = [[*lines[:at], *change, *lines[at + 1 :]] if lines is process else lines for lines in places]
        assert _partition_of(replace(cells, processes=spoilt)) == "false"

    one, other = next(
        (one, other)
        for one in _steps(places)
        for other in _steps(places)
        if all(one[key] == other[key] for key in ("term", "step", "place")) and one["rank"] != other["rank"]
    )
    lanes = {id(one): other["lanes"], id(other): one["lanes"]}
    crossed = [[{**line, "lanes": lanes.get(id(line), line.get("lanes"))} for line in lines] for lines in places]
    assert _partition_of(replace(cells, processes=crossed)) == "false", "a cell has two cells' lanes at its places"


def test_where_experts_are_spread_each_rank_computes_lanes_of_its_own(healthy: Path) -> None:
    """They are nevertheless distinguished by their places in cells."""
    run = collect(healthy / "faulted")
    placed = [
        [{**line, "place": line["rank"] % 2} if line["op"] == "step" else line for line in lines]  # type: ignore[operator]
        for lines in run.processes
    ]
    cells = replace(run, config={**run.config, "parallel": {"expert": 2}}, processes=placed)
    assert _partition_of(cells) == find("coverage", lambda: coverage(cells)).truth == "true"
    assert _partition_of(replace(cells, config={**run.config, "parallel": {"tensor": 2}})) == "false"
    assert _partition_of(replace(cells, processes=run.processes)) == "false", "no rank says its place"


def test_ranks_with_equal_experts_of_each_stage_are_a_crew(healthy: Path) -> None:
    """In a cell of two stages of two ranks with different experts, the first ranks of both compute its lanes."""
    run = collect(healthy / "faulted")
    staged = [
        [_at_stage(line, stage) if line["op"] == "step" else line for line in lines]
        for stage in (0, 1)
        for lines in run.processes
    ]
    parallel = {"expert": 2, "pipeline": 2}
    cells = replace(run, config={**run.config, "parallel": parallel}, processes=staged)
    assert _partition_of(cells) == find("coverage", lambda: coverage(cells)).truth == "true"
    tensor = {"tensor": 2, "pipeline": 2}
    assert _partition_of(replace(cells, config={**run.config, "parallel": tensor})) == "false"


def _at_stage(line: Line, stage: int) -> Line:
    """Return a rank's line as that of a stage of a cell of four, each of whose stages has two ranks."""
    cell, expert = divmod(line["rank"], 2)  # type: ignore[operator, call-overload, misc]
    place = 2 * stage + expert
    return {**line, "rank": 4 * cell + place, "place": place, "world": 2 * line["world"]}  # type: ignore[operator]


def _at_place(line: Line, place: int) -> Line:
    """Return a rank's line as that of a place of a cell of two."""
    rank = {"rank": 2 * line["rank"] + place} if isinstance(line.get("rank"), int) else {}  # type: ignore[operator]
    return {**line, "place": place, **rank}


def _steps(processes: list[list[Line]]) -> list[Line]:
    return [line for lines in processes for line in lines if line["op"] == "step"]


def _partition_of(run: Evidence) -> str:
    return find("partition", lambda: partition(run)).truth
