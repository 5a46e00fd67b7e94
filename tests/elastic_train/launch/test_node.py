"""The launcher with real agents and workers: the exit codes that a scheduler sees."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
import yaml
from torch.distributed.elastic.rendezvous import RendezvousParameters

import elastic_train as et
from elastic_train.cli import main
from elastic_train.launch import departure, job_etcd
from elastic_train.launch.options import Flags, Launch, resolve
from rendezvous import EtcdServer, EtcdStore, ServerError, TooFewNodesError, outage_log
from rendezvous.etcd.server import free_ports
from rendezvous.membership.participant import Participant
from rendezvous.membership.records import Keys
from rendezvous.membership.store import Put
from rendezvous.process_table import children_of, is_alive, name_of
from rendezvous.torchelastic import entry_point
from rendezvous.torchelastic.conf import Conf
from tests.conftest import PATIENCE_S, Finished, begin, eventually, run, start
from tests.elastic_train.training.live.test_live import ENDLESS, PARAMS, history, until_whole, write_config
from tests.rendezvous.rendezvous_sides import patient

pytestmark = pytest.mark.process


def ended(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> tuple[int, str]:
    """Launch in this process something that gets no worker started; return the exit code and stderr."""
    (folder / "c.yaml").write_text("data: {train: nowhere}")
    with pytest.raises(SystemExit) as left:
        main.main(["launch", str(folder / "c.yaml"), *flags])
    assert isinstance(left.value.code, int)
    return left.value.code, capsys.readouterr().err


def test_more_ranks_than_lanes_are_refused_once_before_workers_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node cannot use them; those of several nodes stand by."""
    code, printed = ended(capsys, tmp_path, "--ranks", "8", "--batch.global-batch", "8", "--batch.micro-batch", "2")
    assert code == 2 and printed.startswith("error: 8 ranks, but only 4 lanes") and printed.count("\n") == 1


@pytest.mark.parametrize("recovery", ["live", "restart"])
def test_a_missing_control_plane_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, recovery: str
) -> None:
    """An invalid endpoint ends with 2, no etcd to start with 1, one that does not answer in time with 77: one line."""
    monkeypatch.setitem(EtcdStore.__init__.__kwdefaults__, "give_up_after_s", 0.2)
    how = ("--recovery", recovery)
    code, printed = ended(capsys, tmp_path, *how, "--endpoint", "a:b")
    assert (code, printed) == (2, "error: etcd's endpoint 'a:b' is not HOST:PORT\n")
    code, printed = ended(capsys, tmp_path, *how, "--endpoint", "127.0.0.1:1", "--timeout-s", "0.2")
    assert code == 77 and "no etcd answers at 127.0.0.1:1" in printed
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    code, printed = ended(capsys, tmp_path, *how)
    assert code == 1 and printed.startswith("error: no etcd found")


def test_too_few_nodes_end_with_77(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In restart mode it is the agent that waits in vain, and says so in TorchElastic's words."""

    def wait_in_vain(*_: object) -> None:
        raise TooFewNodesError("1 of 2 nodes came")

    monkeypatch.setattr(Participant, "next_world", wait_in_vain)
    code, printed = ended(capsys, tmp_path, "--recovery", "restart")
    assert (code, printed.splitlines()[-1]) == (77, "error: 1 of 2 nodes came")


def command(config: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "elastic_train.cli.main", "launch", config, *flags]


def test_ctrl_c_ends_with_75_and_the_same_command_resumes(tmp_path: Path, rows: Path) -> None:
    """Asked to leave, the launcher ends with 75, committed; started again, with 0, from where it was."""
    left, log = tmp_path / "left", tmp_path / "log"
    config = write_config(tmp_path, rows, 80, lane_ms=60.0, until=left)
    job = begin(command(config, "--ranks", "2"), log)
    until_whole(tmp_path / "run", 2)
    eventually(lambda: applied(tmp_path / "run") > 1, "a step")
    job.send_signal(signal.SIGINT)
    assert job.wait(PATIENCE_S) == 75
    said = re.findall(r"asked to leave; step \d+ is committed: the same command resumes from it", log.read_text())
    assert len(said) == 1 and "asked to leave by SIGINT: the workers have" in log.read_text()
    assert "Traceback" not in log.read_text() and "by SIGTERM" not in log.read_text()
    left.touch()
    assert run(command(config, "--ranks", "1")).code == 0
    restores = [line for line in history(tmp_path / "run") if line["op"] == "restore"]
    assert max(line["step"] for line in restores) > 0


def test_a_step_that_outlasts_the_grace_is_dropped_and_the_applied_state_committed(tmp_path: Path, rows: Path) -> None:
    """A step of ten minutes, 20 s from SIGTERM to SIGKILL: the job leaves in time and loses no applied step."""
    config, marker = Path(write_config(tmp_path, rows, 40)), tmp_path / "stall"
    tree = yaml.safe_load(config.read_text())
    tree["task"] = {"path": "tests.tasks:Stalls", "params": {**PARAMS, "marker": str(marker)}}
    config.write_text(yaml.safe_dump(tree | {"hang_timeout_s": 600.0}))
    job = begin(command(str(config), "--ranks", "2", "--grace-s", "20"))
    until_whole(tmp_path / "run", 2)
    eventually(lambda: applied(tmp_path / "run") > 3, "some steps")
    marker.touch()
    eventually(lambda: list(tmp_path.glob("stall.*")) != [], "a long step, of both ranks or of the one that came last")
    job.send_signal(signal.SIGTERM)
    assert job.wait(PATIENCE_S) == 75
    lines = history(tmp_path / "run")
    assert max(line["step"] for line in lines if line["op"] == "commit") == applied(tmp_path / "run")


def test_a_second_ctrl_c_ends_a_job_at_once(tmp_path: Path, rows: Path) -> None:
    """In the middle of a step that would keep it for a long time, and with what that costs."""
    log = tmp_path / "log"
    config = write_config(tmp_path, rows, ENDLESS, lane_ms=1500.0, until=tmp_path / "never")
    job = begin(command(config, "--ranks", "1", "--grace-s", "600"), log)
    until_whole(tmp_path / "run", 1, least=0)

    def ended() -> bool:
        job.send_signal(signal.SIGINT)
        return job.poll() is not None

    eventually(ended, "its end")
    assert job.poll() == 130
    assert re.search(r"ended at once by SIGINT: \d+ steps? (is|are) lost", log.read_text())


def poisoned(folder: Path, rows: Path, how: str = "kill", **data: object) -> str:
    """Write the configuration of a job of 40 steps, one of whose samples ends the process that computes it."""
    config = Path(write_config(folder, rows, 40))
    tree = yaml.safe_load(config.read_text())
    tree["task"] = {"path": "tests.tasks:Poisoned", "params": {**PARAMS, "ids": [POISON], "how": how}}
    tree["data"] |= data
    config.write_text(yaml.safe_dump(tree | {"hang_timeout_s": 60.0}))
    return str(config)


POISON = 177  # not a sample of the validation set


def test_a_sample_that_ends_its_process_is_found_and_left_out(tmp_path: Path, rows: Path) -> None:
    """A rank dies of it twice; then it alone is tried, recorded as a hole, and all other samples are trained on.

    Its processes end with 0, which neither the job nor the trial takes for an end in good order.
    """
    line = command(poisoned(tmp_path, rows, "leave", quarantine=["deadly"]), "--ranks", "1")
    done = run(line)
    assert done.code == 0, done.output
    assert "exited with 0 without finishing: another is started in its place" in done.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    (hole,) = result["holes"]
    assert (result["step"], hole["lo"], hole["hi"]) == (40, POISON, POISON + 1)
    assert hole["why"] == "ends its process with code 0"
    assert result["num_left_out"] >= 1
    audited = et.open_store(str(tmp_path / "run"))
    head = et.discover(audited).head
    assert head is not None and head.account is not None and [h.lo for h in head.account.holes] == [POISON]


def test_a_row_that_ends_every_process_that_inspects_it_keeps_no_job_from_training(tmp_path: Path, rows: Path) -> None:
    """The job begins without an inspection once the worlds of several have ended, and the row's turn comes."""
    config = Path(write_config(tmp_path, rows, 10))
    tree = yaml.safe_load(config.read_text())
    tree["task"] = {"path": "tests.tasks:Uninspectable", "params": PARAMS}
    config.write_text(yaml.safe_dump(tree | {"hang_timeout_s": 60.0}))
    done = run(command(str(config), "--ranks", "1"))
    assert done.code == 0, done.output
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == 10
    assert "3 worlds in a row did not get past step 0" in done.output


def test_a_node_that_ends_with_0_has_finished(tmp_path: Path, rows: Path) -> None:
    """Not one whose workers leave in the middle of the job, and whose restarts are used up."""
    line = command(poisoned(tmp_path, rows, "leave"), "--recovery", "restart", "--max-restarts", "0")
    done = run(line)
    assert done.code == 1, done.output
    assert "worker 0 exited with 0 without finishing" in done.output


def test_code_that_quits_does_not_end_a_run_in_good_order(tmp_path: Path, rows: Path) -> None:
    """A task or a library that raises SystemExit: the error says at which step and where."""
    done = start([poisoned(tmp_path, rows, "quit")])
    assert done.code == 1, done.output
    said = r"error: the process was to end with None at step \d+ of 40 without finishing, .*tests/tasks.py, line \d+,"
    assert re.search(said, done.output)


def test_a_job_that_gets_nowhere_ends_with_93(tmp_path: Path, rows: Path) -> None:
    """Before any restart is spent that could not help."""
    config = Path(poisoned(tmp_path, rows))
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"give_up_after": "2 worlds"}))
    done = run(command(str(config), "--ranks", "2"))
    assert done.code == 93, done.output
    assert "the last 2 worlds, up to term" in done.output and "got no further than step" in done.output


def applied(run: Path) -> int:
    return max((line["step"] for line in history(run) if line["op"] == "step"), default=0)


def test_sigterm_before_a_worker_listens_ends_with_75(tmp_path: Path, rows: Path) -> None:
    """A scheduler that reclaims a node right after the start requeues it, and does not count it as failed."""
    config = write_config(tmp_path, rows, 300)
    job = begin(command(config, "--ranks", "1"))
    eventually(lambda: has_a_worker(job.pid), "its worker is there")
    job.send_signal(signal.SIGTERM)
    assert job.wait(PATIENCE_S) == 75


def has_a_worker(launcher: int) -> bool:
    """Say whether a launcher that is a fork has started a worker: a fork as well, or, if none came in time, a program.

    The launcher is called a worker itself here, and so is its standby process at first.
    """
    names = {name_of(pid) for pid in children_of(launcher)}
    return {"worker", "standby"} <= names or any(name.startswith("python") for name in names)


def test_a_worker_that_stays_longer_than_its_grace_is_killed_and_the_node_ends_with_75(
    tmp_path: Path, rows: Path
) -> None:
    """A scheduler starts it again for no other code, and its steps since the last commit are the only ones lost."""
    config, log = write_config(tmp_path, rows, ENDLESS), tmp_path / "log"
    job = begin(command(config, "--ranks", "1", "--grace-s", "3"), log)
    _, workers = until_whole(tmp_path / "run", 1)
    os.kill(workers[0], signal.SIGSTOP)
    job.send_signal(signal.SIGTERM)
    assert job.wait(PATIENCE_S) == 75, log.read_text()
    assert "1 of 1 workers had not left after 3 s (--grace-s) and were killed" in log.read_text()


def test_a_done_job_without_its_result_ends_with_74_and_is_not_started_over(tmp_path: Path, rows: Path) -> None:
    """The rank that could not write it is not replaced; another start writes it, and trains nothing."""
    config = write_config(tmp_path, rows, 20, lane_ms=0.0)
    (tmp_path / "run" / "result.json").mkdir(parents=True)
    done = run(command(config, "--ranks", "2"))
    assert done.code == 74, done.output
    assert (
        f"error: step 20 is committed, but the result could not be written: {tmp_path}/run/result.json" in done.output
    )
    assert "another is started in its place" not in done.output
    assert sorted(line["rank"] for line in history(tmp_path / "run") if line["op"] == "form") == [0, 1]
    (tmp_path / "run" / "result.json").rmdir()
    assert start([config]).code == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == 20
    assert len([line for line in history(tmp_path / "run") if line["op"] == "step"]) == 2 * 20


def test_a_bad_configuration_is_reported_once(tmp_path: Path, rows: Path) -> None:
    """An unknown key ends the launcher with 2 before any worker starts."""
    done = run(command(write_config(tmp_path, rows, 9), "--ranks", "2", "--batch.micro_bach", "3"))
    assert done.code == 2
    assert done.output.count("unknown key") == 1
    assert not (tmp_path / "run").exists()


def test_a_run_id_that_was_just_used_by_another_job_is_refused(tmp_path: Path, rows: Path) -> None:
    """It ended with 0, without a step and without a word; the same job again has nothing left to do, and says so."""
    with EtcdServer() as server:
        flags = ("--endpoint", server.endpoint, "--id", "twice", "--ranks", "1")

        def launched(folder: str) -> Finished:
            config = write_config(tmp_path / folder, rows, 5, lane_ms=0.0)
            asked = command(config, *flags)
            return run(asked)

        assert launched("a").code == 0
        other = launched("b")
        assert other.code == 2 and "the run id 'twice' was finished" in other.output.replace("job of ", ""), other
        assert str(tmp_path / "a") in other.output and "a run id of its own (--id, --rdzv_id)" in other.output
        assert not (tmp_path / "b" / "run" / "history").exists()
        again = launched("a")
        assert again.code == 0 and "nothing" in again.output, again


def test_two_slurm_jobs_on_one_first_node_have_an_etcd_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one used the first one's, which ended with it. A node of either finds its own job's."""

    def plan(run_id: str, *, is_first: bool) -> Launch:
        job = {"SLURM_JOB_ID": run_id, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "127.0.0.1"}
        job["SLURM_STEP_ID"] = "0"
        return resolve(tmp_path / "c.yaml", [], Flags(), {**job, "SLURM_NODEID": "0" if is_first else "1"}, 0)

    ports = free_ports(7)
    monkeypatch.setattr(job_etcd, "ETCD_PORTS", ports)
    etcd = job_etcd.job_etcd
    with etcd(plan("71", is_first=True)), etcd(plan("72", is_first=True)):
        for run_id in ("71", "72"):
            with etcd(plan(run_id, is_first=False)) as found:
                patient(found.endpoint).swap({f"/{run_id}": Put("")}, {})
                assert len(patient(found.endpoint).get("/").entries) == 1
    monkeypatch.setattr(job_etcd, "ETCD_PORTS", ports[:1])
    with etcd(plan("71", is_first=True)):
        with pytest.raises(ServerError, match="is taken"), etcd(plan("72", is_first=True)):
            pass
        with pytest.raises(ServerError, match="is not this job's"), etcd(plan("72", is_first=False)):
            pass


def first_node(tmp_path: Path, **more: str) -> Launch:
    """The first node of a job of two that Slurm has started on this machine."""
    job = {"SLURM_JOB_ID": tmp_path.name, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "127.0.0.1"}
    return resolve(tmp_path / "c.yaml", [], Flags(timeout_s=0.5), {**job, "SLURM_STEP_ID": "0", **more}, 0)


def test_the_jobs_etcd_outlives_the_signals_of_its_job_until_the_last_worker_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is signalled with all others, when these need it to commit; and the first node may be done before they are."""
    monkeypatch.setattr(job_etcd, "ETCD_PORTS", free_ports(1))
    plan, before = first_node(tmp_path), set(children_of(os.getpid()))
    order: list[str] = []

    def work(member: EtcdStore) -> None:
        eventually(lambda: "this node is done" in order, "the first node waits")
        order.append("last worker leaves")
        member.swap({Keys(plan.run_id).member("other"): None}, {})

    with job_etcd.job_etcd(plan) as found:
        found.keep()
        store = patient(found.endpoint.replace(socket.gethostname(), "127.0.0.1"))
        store.swap({Keys(plan.run_id).member("other"): Put("here")}, {})
        (etcd,) = [pid for pid in {*children_of(os.getpid())} - before if name_of(pid) == "etcd"]
        os.kill(etcd, signal.SIGTERM)
        eventually(lambda: not is_alive(etcd), "it ends")
        assert len(store.get(Keys(plan.run_id).members).entries) == 1, "it is there again, and has its data"
        others = threading.Thread(target=work, args=(store,))
        others.start()
        order.append("this node is done")
    order.append("this node ends")
    others.join()
    assert order == ["this node is done", "last worker leaves", "this node ends"]


def test_a_node_waits_for_the_one_that_starts_the_jobs_etcd_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It gave up after 15 s; now with --timeout-s, and with the code for too few nodes."""
    monkeypatch.setattr(job_etcd, "ETCD_PORTS", free_ports(1))
    monkeypatch.setattr(outage_log, "FIRST_WORD_S", 0.0)
    waits = job_etcd.job_etcd(first_node(tmp_path, SLURM_NODEID="1"))
    with pytest.raises(et.ElasticTrainError, match="the first node of the job starts it") as raised, waits:
        pass
    assert raised.value.exit_code == 77
    assert "waiting for the first node, which starts the job's etcd" in caplog.text


def test_a_launch_leaves_nothing_in_the_temporary_folder(tmp_path: Path, rows: Path) -> None:
    """TorchElastic makes a folder for each launch; so does an etcd."""
    (tmp_path / "tmp").mkdir()
    config = write_config(tmp_path, rows, 3, lane_ms=0.0)
    environ = {"TMPDIR": str(tmp_path / "tmp")}
    assert begin(command(config, "--ranks", "1"), tmp_path / "log", environ).wait(PATIENCE_S) == 0
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGUSR1, "imports"), (signal.SIGTERM, "etcd"), (signal.SIGUSR1, "standby"), (signal.SIGTERM, "worker")],
)
def test_a_request_to_leave_at_any_moment_of_a_start_ends_with_75(
    tmp_path: Path, rows: Path, number: signal.Signals, moment: str
) -> None:
    """It ended by the signal while it was imported, and later with 1; its standby process with a traceback."""
    config, log = write_config(tmp_path, rows, ENDLESS), tmp_path / "log"
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "elastic_train.command", "launch", config, "--ranks", "1"]
    job = begin(command, log, {"TMPDIR": str(tmp_path / "tmp")})
    eventually(lambda: listens(job.pid, number), "it listens")
    if moment != "imports":
        eventually(lambda: moment in map(name_of, children_of(job.pid)), f"its {moment} is there")
    job.send_signal(number)
    assert job.wait(PATIENCE_S) == 75, log.read_text()
    assert "Traceback" not in log.read_text(), log.read_text()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_worker_begins_without_what_its_launcher_had_in_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a launcher that raises at a request: the worker has nothing to lose yet, and ends with 75."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise InterruptedError

    monkeypatch.setattr(os, "_exit", leave)
    with departure.raising(departure.asked_by):
        departure.listen()
        with pytest.raises(InterruptedError):
            os.kill(os.getpid(), signal.SIGTERM)
    assert codes == [75]


def listens(pid: int, number: signal.Signals) -> bool:
    """Say whether a process has a function for a signal."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


@pytest.mark.parametrize(("flags", "compacts"), [((), True), (("--compact",), True), (("--no-compact",), False)])
def test_an_etcd_of_others_can_be_left_uncompacted(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    compacts: bool,
) -> None:
    """The flag is what `--rdzv_conf compact=0` is to torchrun."""
    found = []

    def read(parameters: RendezvousParameters) -> None:
        found.append(Conf.read(parameters).compacts)
        raise TooFewNodesError("none came")

    monkeypatch.setattr(entry_point, "create_handler", read)
    ended(capsys, tmp_path, "--endpoint", "127.0.0.1:1", *flags)
    assert found == [compacts]
