"""The executor: a node's processes die together, faults come when due and are recorded, nothing outlives a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.errors import RunError
from chaos.real.acts import ACTS
from chaos.real.acts.effects import stopped
from chaos.real.history_tail import Followed
from chaos.real.job import Job
from chaos.scenario.model import Nodes, Point, Scenario, Soak
from chaos.scenario.schedule import Due
from chaos.services.etcd_proxy import Proxies, Way
from chaos.services.s3_server import S3
from chaos.services.surroundings import folders
from chaos.services.torchrun_node import Node, clean_environ
from rendezvous.process_table import is_alive, is_stopped
from tests.chaos import fake_trainer
from tests.conftest import PATIENCE_S, eventually

pytestmark = pytest.mark.slow

FAKE = [sys.executable, fake_trainer.__file__]
ENDLESS = 10**9


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A started node with an agent, and a worker in another session."""
    node = Node(0, [*FAKE, str(tmp_path), "-1"], tmp_path / "node.log", dict(os.environ))
    node.start()
    eventually(lambda: len(node.pids()) == 2)
    yield node
    node.kill()


def job(
    folder: Path, num_steps: int, *faults: Due, timeout_s: float = PATIENCE_S, code: int = 0, **hooks: object
) -> Job:
    command = [*FAKE, str(folder), str(num_steps), str(code)]
    nodes = [Node(0, command, folder / "node-0.log", dict(os.environ))]
    scenario = Scenario(name="x", description="y", config="c", timeout_s=timeout_s)
    return Job(folder, nodes, scenario, list(faults), 1, hooks.get("look", lambda _: None), lambda _: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "ranks", "cell", "stage", "expected"),
    [(2, 3, 1, None, 6), (2, 3, 2, None, 4), (3, 2, 4, 2, 4), (5, 1, 2, 1, 4), (3, 3, 4, 2, 4)],
)
def test_all_are_well_once_as_many_train_as_make_whole_cells(
    tmp_path: Path, nodes: int, ranks: int, cell: int, stage: int | None, expected: int
) -> None:
    """Cells within a node, and cells of stages that may be on different nodes; the remaining workers are standbys."""
    of_cells = job(tmp_path, 1)
    of_cells.scenario = of_cells.scenario.model_copy(update={"nodes": Nodes(count=nodes, ranks=ranks)})
    of_cells.cell_size, of_cells.stage_size = cell, stage
    assert of_cells.full_size == expected


def recorded(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "history" / "chaos.jsonl").read_text().splitlines()]


def without_proofs(folder: Path) -> list[dict[str, object]]:
    """Return the lines without those that say whether a fault, by its number, took effect."""
    return [line for line in recorded(folder) if "fault" not in line]


def test_a_killed_node_leaves_nothing(node: Node) -> None:
    """Agent and worker, which is in another session, are killed together, and both are named."""
    found = node.pids()
    assert sorted(node.kill()) == sorted(found)
    assert node.pids() == []
    assert node.code == -signal.SIGKILL
    assert node.kill() == []


def test_only_a_rank_of_the_world_is_killed_as_a_worker(node: Node) -> None:
    """The highest rank that the node runs is hit; ranks of other nodes, and the agent, are not."""
    (worker,) = set(node.pids()) - {node.agent}
    assert node.hit_worker({0: worker, 1: os.getpid()}, signal.SIGKILL) == [worker]
    assert node.hit_worker({0: os.getpid()}, signal.SIGKILL) == []
    assert node.is_up


def test_a_node_that_is_up_is_not_started_twice(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a running node is an error, not a second node under its name."""
    monkeypatch.setattr("chaos.services.torchrun_node._GRACE_S", 0.05)
    with pytest.raises(RunError, match="still up"):
        node.start()


def test_a_stopped_node_comes_back_under_its_own_name(node: Node) -> None:
    """SIGTERM ends the agent; the node can be started again, and its mark finds all of its processes."""
    before = node.pids()
    assert node.stop() == before
    node.start()
    eventually(lambda: len(node.pids()) >= 2)
    assert node.is_up


def test_a_node_dies_with_the_executor(tmp_path: Path) -> None:
    """SIGKILL of the executor itself leaves no agent running."""
    program = (
        "import os, sys, time; from pathlib import Path; from chaos.services.torchrun_node import Node\n"
        f"node = Node(0, {[*FAKE, str(tmp_path), '-1']!r}, Path({str(tmp_path / 'log')!r}), dict(os.environ))\n"
        "print(node.start()[0], flush=True); time.sleep(600)"
    )
    executor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert executor.stdout is not None
    agent = int(executor.stdout.readline())
    eventually(lambda: (tmp_path / "log").exists() and "worker" in (tmp_path / "log").read_text())
    worker = int((tmp_path / "log").read_text().split()[1])
    try:
        executor.kill()
        executor.wait()
        eventually(lambda: not is_alive(agent))
    finally:
        os.kill(worker, signal.SIGKILL)  # a real worker is bound to its agent; this one is not


def test_a_nodes_environment_has_no_launcher_variables() -> None:
    """An outer torchrun's variables do not reach the nodes; all others do."""
    outer = {"RANK": "3", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "y", "PET_NNODES": "2", "ELASTIC_RENDEZVOUS": "{}"}
    assert clean_environ({**outer, "PATH": "/bin", "ELASTIC_TRAIN__EPOCHS": "2"}) == {
        "PATH": "/bin",
        "ELASTIC_TRAIN__EPOCHS": "2",
    }


def test_faults_come_when_due_and_are_recorded(tmp_path: Path) -> None:
    """A drawn fault hits an applied step that is in no commit; the record names step, seen step, node, signal, pids."""
    kill = Due("kill_worker", "leader", 17, None, interval=fake_trainer.COMMIT_EVERY)
    held = tmp_path / fake_trainer.HELD
    held.touch()

    def let_go(_: Followed) -> None:
        if any(line["op"] == "fault" and line["kind"] == "start_node" for line in recorded(tmp_path)):
            held.unlink(missing_ok=True)

    faults = (kill, Due("stop_node", 0, None, 0.05), Due("start_node", "lost", None, 0.0))
    job(tmp_path, 300, *faults, look=let_go).run()
    lines = without_proofs(tmp_path)
    scenario, worker, stop, start, *ends = [line for line in lines if line["op"] != "node"]
    assert {"kill_worker", "stop_node"} <= set(scenario["kinds"])  # type: ignore[call-overload]
    assert worker["pids"] in [line["pids"] for line in lines if line["op"] == "node" and line["node"] == 0]
    assert (worker["kind"], worker["at_step"], worker["is_drawn"], worker["signal"]) == (
        "kill_worker",
        17,
        True,
        "SIGKILL",
    )
    assert isinstance(worker["seen_step"], int)
    assert worker["seen_step"] >= 17
    assert worker["seen_commit"] == worker["seen_step"] // 12 * 12 != worker["seen_step"]
    assert (worker["target"], worker["node"], stop["signal"]) == ("leader", 0, "SIGTERM")
    assert (start["target"], start["node"]) == ("lost", 0)
    assert [end["op"] for end in ends] == ["exit", "clean"]
    assert ends[-1]["orphans"] == []


def test_a_job_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    """A fault that never came due is reported, with the end of the node's log."""
    with pytest.raises(RunError, match=r"(?s)the job ended before kill_node on node 0 was due; .*worker \d+"):
        job(tmp_path, 3, Due("kill_node", 0, 20, None)).run()


def test_a_job_that_hangs_is_an_error(tmp_path: Path) -> None:
    """The deadline ends a job that does not finish, and its processes."""
    hung = job(tmp_path, -1, timeout_s=0.5)
    with pytest.raises(RunError, match="did not reach its end within"):
        hung.run()
    assert hung.nodes[0].pids() == []


def test_a_job_in_which_every_node_failed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no node ended well"):
        job(tmp_path, 1, code=1).run()
    assert [line["code"] for line in recorded(tmp_path) if line["op"] == "exit"] == [1]


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C during a job ends all of its processes; nothing is recorded as clean."""

    def interrupt(followed: Followed) -> None:
        if followed.step >= 3:
            raise KeyboardInterrupt

    interrupted = job(tmp_path, ENDLESS, look=interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run()
    assert interrupted.nodes[0].pids() == []
    assert "clean" not in {line["op"] for line in recorded(tmp_path)}


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt, which background processes of a shell ignore by default."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_soak_between_two_faults(tmp_path: Path) -> None:
    """Ctrl-C ends an endless job cleanly: no fault is left half done, planned ones are dropped, and the log says so.

    A second Ctrl-C aborts: no process is left.
    """
    for num_signals in (1, 2):
        folder = tmp_path / str(num_signals)
        folder.mkdir()
        events: list[str] = []

        def press(followed: Followed, folder: Path = folder, events: list[str] = events) -> None:
            if followed.step >= 3 and not events:
                os.kill(os.getpid(), signal.SIGINT)

        def land(job: Job, folder: Path = folder, again: bool = num_signals == 2) -> None:
            if again:
                os.kill(os.getpid(), signal.SIGINT)
            job.inject(Due("kill_node", 0, None, 0.0))

        soak = job(folder, ENDLESS, Due("kill_worker", "leader", ENDLESS - 1, None), look=press)
        soak.land, soak.on_event = land, events.append
        with pytest.raises(
            KeyboardInterrupt if num_signals == 2 else RunError, match=None if num_signals == 2 else "no node"
        ):
            soak.run()
        assert soak.nodes[0].pids() == []
        ops = [line["op"] for line in recorded(folder)]
        assert "stopping after 0 faults" in events[0] and ("stopped" in ops)
        assert [line["kind"] for line in recorded(folder) if line["op"] == "fault"] == ["kill_node"][: 2 - num_signals]


def test_histories_are_followed_line_by_line(tmp_path: Path) -> None:
    """Half a line is waited for; a restore sets the step back; lines of an older term are skipped.

    A step without a target has no loss.
    """
    path = tmp_path / "history" / "00000001-00000-1.jsonl"
    path.parent.mkdir()
    followed = Followed()

    def follow(text: str) -> tuple[int, int, int | None]:
        with path.open("a") as file:
            file.write(text)
        followed.look(tmp_path)
        return followed.term, followed.step, followed.commit

    form = {"op": "form", "t": 1, "term": 1, "rank": 0, "world": 2, "pid": 7}
    step = {"op": "step", "t": 1, "term": 1, "rank": 0, "world": 2, "epoch": 0, "num_samples": 8, "loss": 1.5}
    whole = [json.dumps(line) + "\n" for line in (form, {**step, "step": 5}, {"op": "commit", "term": 1, "step": 5})]
    assert follow(whole[0] + whole[1][:40]) == (1, 0, None)
    assert follow(whole[1][40:] + whole[2]) == (1, 5, 5)
    assert (followed.pids, followed.loss) == ({0: 7}, 1.5)
    assert follow(json.dumps({**step, "step": 6, "loss": None}) + "\n") == (1, 6, 5)
    assert followed.loss is None
    newer = {"op": "restore", "t": 1, "term": 2, "step": 3, "resumed": None}
    (tmp_path / "history" / "00000002-00000-2.jsonl").write_text(json.dumps(newer) + "\n")
    assert follow(json.dumps({**step, "step": 7}) + "\n") in {(2, 3, 5), (1, 7, 5)}
    assert follow("") == (2, 3, 5)


@pytest.mark.parametrize("kind", ["kill_worker", "freeze_worker", "slow_worker", "start_twin"])
def test_a_role_that_nobody_has_is_not_an_error(tmp_path: Path, kind: str) -> None:
    """Without a world there is no leader: a fault for the leader is skipped, and the executor continues."""
    assert ACTS[kind](job(tmp_path, 1), Due(kind, "leader", None, None)) is None


def test_an_agent_is_frozen_without_its_workers(node: Node, tmp_path: Path) -> None:
    """Its proof is the agent's state; a frozen worker would be another fault."""
    waiting = job(tmp_path, 1)
    waiting.nodes = [node]
    struck = ACTS["freeze_agent"](waiting, Due("freeze_agent", 0, None, None))
    assert struck is not None and struck.undo is not None and struck.pids == [node.agent]
    proof = stopped(struck.pids)
    eventually(lambda: proof() is not None)
    assert not any(is_stopped(pid) for pid in node.pids() if pid != node.agent)
    struck.undo()
    eventually(lambda: proof() is None)


def test_the_end_of_a_fault_does_not_end_a_later_one(node: Node, tmp_path: Path) -> None:
    """Two faults of one path to etcd overlap: undoing the first leaves the second in place."""
    waiting, way = job(tmp_path, 1), Way()
    waiting.nodes = [node]
    waiting.around.proxies = Proxies("127.0.0.1", [], [way])
    late, away = (ACTS[kind](waiting, Due(kind, 0, None, None)) for kind in ("slow_etcd", "cut_off_etcd"))
    assert late is not None and late.undo is not None and away is not None and away.undo is not None
    late.undo()
    assert way.requests_are_held and way.answers_are_held
    away.undo()
    assert not way.requests_are_held and not way.answers_are_held


def answered(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_end_of_an_s3s_fault_does_not_end_a_later_one(tmp_path: Path) -> None:
    """Two faults of the S3 overlap: undoing the first leaves the second, whose own end restores everything."""
    waiting = job(tmp_path, 1)
    with S3() as s3:
        waiting.around.s3 = s3

        def fails() -> bool:
            return 500 in (answered(s3.environ["AWS_ENDPOINT_URL"]), answered(s3.environ["AWS_ENDPOINT_URL"]))

        taken, errors = (
            ACTS[kind](waiting, Due(kind, None, None, None)) for kind in ("storage_taken", "storage_errors")
        )
        assert taken is not None and taken.undo is not None and errors is not None and errors.undo is not None
        taken.undo()
        assert fails()
        errors.undo()
        assert not fails()


def at_form(kind: str, target: str | int = "leader", nth: int = 1) -> Due:
    return Due(kind, target, None, None, point=Point(name="form", nth=nth))


def waits_at_points(folder: Path, node: Node) -> Job:
    """A job of one node that is up and leads no world; an armed failpoint is a file in its folder of failpoints."""
    waiting = job(folder, 1)
    (folder / "history").mkdir()
    waiting.nodes, waiting.around.points = [node], folders(folder, 1)
    return waiting


def armed(waiting: Job) -> list[str]:
    return [path.read_text() for path in waiting.around.points[0].iterdir()]


def come(waiting: Job) -> None:
    """Act as a process that reaches the failpoint."""
    (waiting.around.points[0] / "form").rename(waiting.around.points[0] / "form.4711")


def test_a_failpoint_is_armed_once_somebody_has_the_role(node: Node, tmp_path: Path) -> None:
    """After a leader is killed nobody leads for a while: a fault for the next leader is not lost."""
    waiting = waits_at_points(tmp_path, node)
    waiting._points.arm(waiting, at_form("kill"))
    assert armed(waiting) == []
    waiting.followed.pids = {0: next(pid for pid in node.pids() if pid != node.agent)}
    eventually(lambda: [waiting._points.look(waiting), armed(waiting)][1] == ["kill 1"])
    come(waiting)
    waiting._points.look(waiting)
    waiting._points.give_up(waiting)
    assert [(line["op"], line["kind"], line["pids"]) for line in without_proofs(tmp_path)] == [
        ("fault", "kill", [4711])
    ]


def test_a_failpoint_is_armed_for_one_of_a_nodes_workers(node: Node, tmp_path: Path) -> None:
    """The n-th of them in the present world, by rank: while there is none, the fault waits."""
    waiting = waits_at_points(tmp_path, node)
    fault = at_form("kill", 0)
    assert fault.point is not None
    waiting._points.arm(waiting, replace(fault, point=fault.point.model_copy(update={"worker": 1})))
    agent, worker = sorted(node.pids(), key=lambda pid: pid != node.agent)[:2]
    waiting.followed.pids = {0: worker}
    waiting._points.look(waiting)
    assert armed(waiting) == []
    waiting.followed.pids = {0: worker, 1: -1, 2: agent}
    eventually(lambda: [waiting._points.look(waiting), armed(waiting)][1] == [f"kill 1 {agent}"])


def test_a_second_fault_at_a_place_waits_for_the_first(node: Node, tmp_path: Path) -> None:
    """Both come, in the scenario's order; one still waiting at the end is reported, with the reason."""
    waiting = waits_at_points(tmp_path, node)
    for kind, nth in (("raise", 1), ("slow", 2), ("kill", 1)):
        waiting._points.arm(waiting, at_form(kind, 0, nth))
    assert armed(waiting) == ["raise 1"]
    come(waiting)
    eventually(lambda: [waiting._points.look(waiting), armed(waiting)][1] == ["slow 2"])
    waiting._points.give_up(waiting)
    ends = [(line["op"], line["kind"], line.get("why", "")) for line in without_proofs(tmp_path)]
    assert [(op, kind) for op, kind, _ in ends] == [("fault", "raise"), ("missed", "slow"), ("missed", "kill")]
    assert "came there 2 times" in str(ends[1][2]) and "another fault waited there, on node 0" in str(ends[2][2])


def test_a_role_that_nobody_ever_has_is_reported(node: Node, tmp_path: Path) -> None:
    """A fault that could not be armed until the job ended is recorded as missed, with the reason."""
    waiting = waits_at_points(tmp_path, node)
    waiting._points.arm(waiting, at_form("kill"))
    waiting._points.give_up(waiting)
    (missed,) = recorded(tmp_path)
    assert (missed["op"], missed["kind"], missed["point"], missed["node"]) == ("missed", "kill", "form", None)
    assert "no node was 'leader'" in str(missed["why"])


def test_a_soak_replaces_a_fault_that_cannot_be_armed(node: Node, tmp_path: Path) -> None:
    """It draws another fault: nothing waits, and nothing is reported."""
    waiting = waits_at_points(tmp_path, node)
    waiting.scenario = waiting.scenario.model_copy(update={"soak": Soak()})
    waiting._points.arm(waiting, at_form("kill"))
    waiting._points.give_up(waiting)
    assert not (tmp_path / "history" / "chaos.jsonl").exists()
