"""Users' scripts: worlds are observed from outside, rows counted by three lines, and nothing is invented."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import chaos.hook
from chaos.cli import main
from chaos.errors import ScenarioError
from chaos.hook import VARIABLE, log_ids
from chaos.judge.evidence.recovery_cost import recoveries
from chaos.judge.evidence.run_files import Line, collect, items
from chaos.judge.evidence.script_samples import counts_of
from chaos.judge.invariants import script_run as judging
from chaos.judge.verdict import examine
from chaos.planted.edits import edit
from chaos.report.figures.coverage import coverage_figure
from chaos.scenario import model as scenarios
from chaos.scenario.model import Fault, Nodes, Scenario
from chaos.script import watch as scripts
from chaos.script.nodes import check, nodes_of, uses_etcd
from chaos.script.watch import worker_of
from chaos.services.network.namespace import Cable
from chaos.services.surroundings import Surroundings
from tests.chaos import fake_torchrun
from tests.conftest import PATIENCE_S, ROOT

pytestmark = pytest.mark.slow

STOCK = ROOT / "examples" / "stock_ddp.py"
ENDS = fake_torchrun.HELD_AT - 1


def fake(ranks: int, *options: str) -> str:
    """Return a command whose `{dir}` is the run's own folder; its history is next to that."""
    return " ".join([sys.executable, fake_torchrun.__file__, "{dir}", "{dir}/../history", str(ranks), *options])


def broken(folder: Path, *options: str) -> Path:
    """Run the fake with one fault, a worker killed while its world waits for it, and without."""
    faults = (Fault(kind="kill_worker", node=0, at_step=ENDS),)
    if options:  # no hook reports steps, so the fault comes as soon as there is a worker
        faults = (Fault(kind="kill_worker", node=0, after_s=0),)
    described = Scenario(
        name="x", description="y", nodes=Nodes(count=1), faults=faults, timeout_s=PATIENCE_S, reference=not options
    )
    scripts.execute(fake(1 if options else 2, *options), described, 1, folder, replay="again", say=lambda _: None)
    return folder


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script that resumes exactly at its snapshot, and lost nothing."""
    return broken(tmp_path_factory.mktemp("script") / "run")


def truths(folder: Path) -> dict[str, str]:
    return {finding.invariant: finding.truth for finding in examine(folder).findings}


def why(folder: Path, invariant: str) -> str:
    return next(finding.why for finding in examine(folder).findings if finding.invariant == invariant)


def test_a_script_that_loses_nothing_is_valid(healthy: Path) -> None:
    """Its worlds, steps, costs and rows are known from its processes and the hook alone."""
    verdict = examine(healthy)
    assert [finding for finding in verdict.findings if finding.truth != "true"] == []
    assert {finding.invariant for finding in verdict.findings} == {*judging.INVARIANTS, "coverage"}
    (cost,) = recoveries(verdict.run)
    assert (cost.kind, cost.term, cost.rpo_steps) == ("kill_worker", 2, ENDS - 20)
    assert all((times == 1).all() for times in counts_of(verdict.run).values())
    assert verdict.fields["coverage"] == {"min": 1, "max": 1, "samples": fake_torchrun.ROWS}
    assert verdict.fields["replay"] == "again"
    assert not list((healthy / "faulted" / "history").glob("*.tmp"))


def test_the_report_shows_a_script(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` judges it again, and its page has the rows' strips and the losses, but none of our failpoints."""
    with pytest.raises(SystemExit) as left:
        main(["check", str(healthy)])
    assert left.value.code == 0
    assert "VALID" in capsys.readouterr().out
    page = (healthy / "report.html").read_text()
    assert "order of its rows" in page
    assert "Cannot be drawn" not in page
    assert "hand-over" not in page
    assert judging.coverage.__doc__ is not None
    assert judging.coverage.__doc__ in page


def rows(change: Callable[[list[object]], list[object]], step: int) -> Callable[[Line], Line]:
    """Change the rows that rank 0 applied in a step of the last world."""

    def changed(line: Line) -> Line:
        is_meant = line["op"] == "step" and (line["term"], line["step"], line["rank"]) == (2, step, 0)
        return {**line, "ids": change(items(line, "ids"))} if is_meant else line

    return changed


def only(op: str, **fields: object) -> Callable[[Line], Line]:
    return lambda line: {**line, **fields} if line["op"] == op else line


def without(is_meant: Callable[[Line], bool]) -> Callable[[Line], Line | None]:
    return lambda line: None if is_meant(line) else line


PLANTED: dict[str, tuple[Callable[[Line], Line | None], str, str, str]] = {
    "repeat": (rows(lambda ids: [*ids, ids[0]], 30), "coverage", "false", "was applied 2 times, in step 30"),
    "skip": (
        rows(lambda ids: ids[1:], 30),
        "coverage",
        "false",
        "was never applied; in all 0 rows repeated, 1 skipped",
    ),
    "foreign row": (rows(lambda ids: [*ids, 1000], 30), "coverage", "false", "row 1000 of a dataset that has 128"),
    "unreported": (
        without(lambda line: (line["op"], line.get("rank"), line.get("step")) == ("step", 1, 30)),
        *("coverage", "unknown", "reported by 1 of 2 ranks"),
    ),
    "no hook": (without(lambda line: line["op"] in ("step", "restore")), "coverage", "unknown", "three lines"),
    "no hook, rto": (without(lambda line: line["op"] in ("step", "restore")), "rto", "unknown", "three lines"),
    "no hook, agreement": (without(lambda line: line["op"] in ("step", "restore")), "agreement", "unknown", "hook"),
    "older snapshot": (
        lambda line: {**line, "step": 7} if (line["op"], line.get("term")) == ("restore", 1) else line,
        *("coverage", "unknown", "snapshot of an older one"),
    ),
    "epochs apart": (
        lambda line: {**line, "epoch": 9} if (line["op"], line.get("rank")) == ("step", 1) else line,
        *("agreement", "false", "is of the epochs"),
    ),
    "a step left out": (
        without(lambda line: (line["op"], line.get("term"), line.get("step")) == ("step", 2, 25)),
        *("agreement", "false", "but not step 25"),
    ),
    "a step beyond the end": (
        lambda line: {**line, "step": 49} if (line["op"], line.get("step")) == ("step", 48) else line,
        *("rpo", "false", "no later world gave it up"),
    ),
    "nothing injected": (without(lambda line: line["op"] == "fault"), "faults", "unknown", "no fault"),
    "nothing injected, restarts": (without(lambda line: line["op"] == "fault"), "restarts", "unknown", "no fault"),
    "a world by itself": (without(lambda line: line["op"] == "fault"), "deaths", "unknown", "no fault"),
    "a fault too late": (
        lambda line: {**line, "t": 4e9} if line["op"] == "fault" else line,
        *("restarts", "unknown", "no process was started"),
    ),
    "not driven to its end": (
        lambda line: {**line, "op": "stuck", "why": "the job hung"} if line["op"] == "clean" else line,
        *("faults", "unknown", "the job hung"),
    ),
    "not looked for": (without(lambda line: line["op"] == "clean"), "cleanliness", "unknown", "it was not checked"),
    "orphan": (only("clean", orphans=[4711]), "cleanliness", "false", "4711"),
    "failed": (only("exit", code=1), "finished", "false", "node 0 with code 1"),
    "unreadable": (only("step", ids=3), "coverage", "unknown", "the check could not be made"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found(folder: Path, name: str) -> None:
    """Each is caught by its invariant, with a reason; and no such run is valid."""
    change, invariant, truth, words = PLANTED[name]
    edit(folder / "faulted", change)
    assert truths(folder)[invariant] == truth, why(folder, invariant)
    assert words in why(folder, invariant)
    assert not examine(folder).is_valid


def test_a_reference_shows_what_faults_did_not_cause(healthy: Path, folder: Path, tmp_path: Path) -> None:
    """Rows that count twice even without faults are listed as well; a last epoch cut short in both is not a skip."""
    pad = rows(lambda ids: [*ids, ids[0]], 30)
    edit(folder / "faulted", pad)
    edit(folder / "reference", lambda line: pad({**line, "term": 2}) if "term" in line else line)
    assert why(folder, "coverage").endswith(
        "in all 1 rows repeated, 0 skipped; without faults 1 rows repeated, 0 skipped"
    )
    shutil.copytree(healthy, tmp_path / "short")
    for part in ("faulted", "reference"):
        edit(
            tmp_path / "short" / part,
            lambda line: {**line, "ids": items(line, "ids")[1:]} if line.get("step") == 48 and "ids" in line else line,
        )
    assert truths(tmp_path / "short")["coverage"] == "true"
    shutil.rmtree(tmp_path / "short" / "reference")
    assert truths(tmp_path / "short")["coverage"] == "false"


def test_a_fault_without_a_restart_has_no_next_world(folder: Path) -> None:
    """A freeze that all survived has no next world: only the other faults' restarts are required and timed."""
    faulted = folder / "faulted"
    before = judging.restarts(collect(faulted))
    froze = {"op": "fault", "t": 4e9, "kind": "freeze_worker", "node": 0, "for_s": 1.0, "pids": []}
    (faulted / "history" / "froze.jsonl").write_text(json.dumps(froze) + "\n")
    assert judging.restarts(collect(faulted)) == before
    edit(faulted, lambda line: None if line.get("kind") == "kill_worker" else line)
    assert judging.restarts(collect(faulted)) == "no new world had to be started: 1 faults may be ridden out"


def test_epochs_that_begin_at_one_are_drawn(folder: Path) -> None:
    """A script may number its epochs freely; each has a strip under its own number."""
    for part in ("faulted", "reference"):
        edit(folder / part, lambda line: {**line, "epoch": int(str(line["epoch"])) + 1} if "epoch" in line else line)
    drawn = str(coverage_figure(collect(folder / "faulted")))
    assert [f"epoch {epoch}<" in drawn for epoch in range(5)] == [False, True, True, True, False]


def test_without_the_hook_restarts_are_timed_and_coverage_is_unknown(tmp_path: Path) -> None:
    """Of a script without the hook only its worlds and their restarts are known."""
    folder = broken(tmp_path / "run", "--silent")
    found = truths(folder)
    assert {name for name, truth in found.items() if truth == "true"} >= {"finished", "faults", "deaths", "restarts"}
    assert found["coverage"] == found["rto"] == found["rpo"] == "unknown"
    (seconds,) = judging.restarted_in(collect(folder / "faulted")).values()
    assert seconds > 0


def test_a_job_that_fails_is_a_finding(tmp_path: Path) -> None:
    """A script that ends with an error is judged, and the fault that never came is reported."""
    late = (Fault(kind="kill_node", node=0, at_step=5),)
    described = Scenario(name="x", description="y", nodes=Nodes(count=1), faults=late, reference=False)
    said: list[str] = []
    verdict = scripts.execute("false", described, 1, tmp_path / "run", replay="", say=said.append)
    assert not verdict.is_valid
    assert truths(tmp_path / "run")["finished"] == "false"
    assert "before kill_node on node 0 was due" in why(tmp_path / "run", "faults")
    assert any("before kill_node" in text for text in said)


def test_script_output_is_shown_verbatim(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets in a library's error are not markup, neither in a log's end nor in a verdict."""
    stuck = "[/w:7] Read error"
    edit(folder / "faulted", lambda line: {**line, "op": "stuck", "why": stuck} if line["op"] == "clean" else line)
    with pytest.raises(SystemExit):
        main(["check", str(folder)])
    assert "[/w:7]" in capsys.readouterr().out
    command = [sys.executable, "-c", "import sys; sys.exit('[/w:7] Read error')"]
    with pytest.raises(SystemExit):
        main(["run", "--command", shlex.join(command), "--out", str(tmp_path / "new"), "--no-reference"])
    assert "[/w:7]" in capsys.readouterr().out


def test_the_hook_imports_nothing_and_does_nothing_outside_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside a run it only reads the environment; inside, every call writes a line, from tensors, arrays and lists."""
    tree = ast.parse(Path(chaos.hook.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {str(name).partition(".")[0] for name in imported} <= sys.stdlib_module_names
    monkeypatch.delenv(VARIABLE, raising=False)
    log_ids([1], step=1, epoch=0, of=2)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    log_ids(np.array([3, 1]), step=1, epoch=0, of=4, loss=0.5)
    log_ids(range(2), step=2, epoch=0, of=4)
    lines = [json.loads(text) for text in (tmp_path / f"{os.getpid()}.jsonl").read_text().splitlines()]
    assert [(line["step"], line["ids"], line["loss"]) for line in lines] == [(1, [3, 1], 0.5), (2, [0, 1], None)]
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(OSError, match="No such file"):
        log_ids([1], step=1, epoch=0, of=2)


def test_nodes_get_their_rendezvous_from_torchruns_own_variables(tmp_path: Path) -> None:
    """The line is the user's, except for {dir}; the first node opens torchrun's own store."""
    nodes = nodes_of("torchrun train.py {dir}/a", Nodes(count=3, ranks=2, min=2), tmp_path, "id", Surroundings())
    assert [node.command for node in nodes] == [["torchrun", "train.py", f"{tmp_path}/dir/a"]] * 3
    environs = [node._environ for node in nodes]
    assert [environ["PET_RDZV_CONF"] for environ in environs] == ["is_host=1", "is_host=0", "is_host=0"]
    assert {environ["PET_NNODES"] for environ in environs} == {"2:3"}
    assert {environ["PET_NPROC_PER_NODE"] for environ in environs} == {"2"}
    (endpoint,) = {environ["PET_RDZV_ENDPOINT"] for environ in environs}
    assert endpoint.startswith("localhost:")
    own = "torchrun --rdzv-backend=etcd --rdzv-endpoint=mine:2379 a.py"
    (node, _) = nodes_of(own, Nodes(), tmp_path, "id", Surroundings())
    assert node._environ["PET_RDZV_CONF"] == "ttl=3", "our rendezvous takes no is_host, whichever etcd it uses"
    (first, last) = nodes_of("torchrun --rdzv-backend etcd a.py", Nodes(), tmp_path, "id", Surroundings(cable=Cable(7)))
    assert first._environ["PET_RDZV_CONF"] == "ttl=3"
    assert [node._environ["PET_LOCAL_ADDR"] for node in (first, last)] == ["10.213.7.1", "10.213.7.2"]
    assert last.command[:3] == ["ip", "netns", "exec"]


@pytest.mark.parametrize(
    ("command", "is_etcd"),
    [
        ("torchrun train.py", False),
        ("torchrun --rdzv_backend=etcd train.py", True),
        ("torchrun --rdzv-backend etcd train.py", True),
        ("torchrun --rdzv-backend='etcd' train.py", True),
        ('torchrun "--rdzv-backend" "etcd" train.py', True),
        ("torchrun --rdzv-backend=etcd-v2 train.py", False),
        ("torchrun --rdzv-backend=etcd --rdzv-endpoint=mine:2379 train.py", False),
        ("torchrun --rdzv-backend=c10d train.py", False),
    ],
)
def test_an_etcd_is_started_if_no_endpoint_is_given(command: str, is_etcd: bool) -> None:
    """`--rdzv-backend=etcd` alone gets one; a user's own endpoint is kept."""
    assert uses_etcd(command) is is_etcd


def test_mistakes_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error says why a command cannot run, and what to write instead."""
    for command, expected in (
        ("", "is empty"),
        ("a 'b", "cannot be read"),
        ("torchrun --standalone a", "leave it out"),
    ):
        with pytest.raises(ScenarioError, match=expected):
            check(command)
    for arguments, expected in (
        (["run"], "name a SCENARIO"),
        (["run", "any-script"], "give it one with --command"),
        (["run", "witness", "--command", "torchrun a.py"], "say at_step or after_s"),
        (["run", "soak", "--command", "torchrun a.py"], "a soak is for our own trainer"),
        (["run", "--command", "torchrun a.py", "--set", "epochs=1"], "a --command has none"),
        (["run", "--command", "torchrun a.py", "--nodes", "1"], "is for node 1, but there are 1"),
    ):
        with pytest.raises(SystemExit) as left:
            main([*arguments, "--out", str(tmp_path)])
        assert left.value.code == 2
        assert expected in capsys.readouterr().err
    assert scenarios.load(scenarios.find(scripts.DEFAULT)).config is None


@pytest.mark.parametrize(
    ("brought", "fault", "expected"),
    [
        ("", "{kind: cut_node, node: 0, at_step: 3, for_s: 2}", "only the last node, 1, has its own cable"),
        ("", "{kind: lose_node, node: 0, at_step: 3, for_s: 2}", "lose_node is for the simulator alone"),
        ("own_data: true", "{kind: bad_row_group, at_step: 3}", "bad_row_group is for our own trainer"),
        ("own_data: true", "{kind: kill_worker, node: 0, at_step: 3}", "own_data is for our own trainer"),
        ("tracker: true", "{kind: tracker_outage, at_step: 3, for_s: 2}", "tracker_outage is for our own trainer"),
    ],
)
def test_faults_that_a_script_cannot_have_are_refused(tmp_path: Path, brought: str, fault: str, expected: str) -> None:
    """Faults of other nodes' cables, of the simulator, or of parts that a script lacks: before anything starts."""
    (tmp_path / "x.yaml").write_text(f"name: x\ndescription: y\n{brought}\nfaults: [{fault}]\n")
    described = scenarios.load(tmp_path / "x.yaml")
    with pytest.raises(ScenarioError, match=expected):
        scripts.execute("false", described, 1, tmp_path / "run", replay="", say=lambda _: None)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rendezvous", ["", "--rdzv-backend=etcd"])
def test_a_stock_script_repeats_and_skips(tmp_path: Path, rendezvous: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It recovers under torchrun's own rendezvous and ours, but some rows count twice and others never."""
    with pytest.raises(SystemExit) as left:
        main(["run", "--command", f"torchrun {rendezvous} {STOCK} {{dir}}", "--out", str(tmp_path), "--json"])
    assert left.value.code == 1
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = {item["invariant"]: item for item in verdict["invariants"]}
    assert found["coverage"]["truth"] == "false", found
    assert verdict["coverage"]["samples"] == 2003
    assert len(verdict["recoveries"]) >= 1
    assert {name for name in ("agreement", "rpo", "cleanliness") if found[name]["truth"] != "true"} == set(), found


def test_a_worker_is_not_older_than_what_made_it_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports start times in ticks of 10 ms: rounded down, one would precede the fault that caused it."""
    monkeypatch.setattr(scripts, "booted_at", lambda: 0.0)
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    events = list[float]()
    for _ in range(20):
        events.append(time.clock_gettime(time.CLOCK_BOOTTIME))
        with subprocess.Popen(["sleep", "600"], env=environ) as process:
            try:
                while (worker := worker_of(process.pid, 0)) is None:
                    assert process.poll() is None, "it has an environment as soon as it runs"
            finally:
                process.kill()
        events.append(worker.started_at)
    assert all(cause <= worker for cause, worker in zip(events[::2], events[1::2], strict=True))
    assert events[1::2] == sorted(events[1::2])
    assert events[1] < events[-2], "a worker is not younger than the cause of a much later one"
