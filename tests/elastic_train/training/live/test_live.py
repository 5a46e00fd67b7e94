"""Live recovery from the outside: real etcd, real torchrun, faults in every phase, and one hash at the end."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from chaos.judge.evidence.run_files import Evidence, collect
from chaos.judge.invariants.whole_run import check_kept
from chaos.services.etcd_cluster import EtcdCluster
from elastic_train.system.failpoints import VARIABLE, arm
from rendezvous import EtcdServer
from rendezvous.process_table import children_of, is_alive, name_of
from rendezvous.torchelastic.standby import ForkedWorker
from tests.conftest import PATIENCE_S, begin, eventually, start

pytestmark = pytest.mark.process

PARAMS: dict[str, object] = {"max_tokens": 16, "dim": 16, "depth": 1, "heads": 2, "dropout": 0.2, "vocabulary": 64}
PARAMS |= {"numeric": ["size"], "categorical": ["kind"]}
JOB: dict[str, object] = {
    "batch": {"global_batch": 24, "micro_batch": 6},
    "optimizer": {"lr": 0.01, "warmup_steps": 3, "schedule": "constant"},
    "validation": {"every": "40 steps"},
    "checkpoint": {"every": "15 steps", "keep_last": 2},
    "tracking": {"mlflow_uri": None},
    "hang_timeout_s": 3.0,
}
LANES = 4
"""Lanes per step of these jobs."""
ENDLESS = 100_000
"""Steps of a job that a test ends."""
NO_HANG_S = 200.0
"""The `hang_timeout_s` of a job that must not look hung even on a busy machine."""
LONGER_THAN_A_HANG_S = 12.0
"""Longer than these jobs' `hang_timeout_s`, also in native code, and than a lease of two seconds."""
STARTED: list[ForkedWorker] = []


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdCluster(num_members=1) as cluster:
        yield cluster.members[0]


def write_config(folder: Path, rows: Path, steps: int, lane_ms: float | None = None, until: Path | None = None) -> str:
    """Write a job's configuration; each lane takes `lane_ms` longer, in all steps or until a file exists.

    A job with such a file may have slow lanes and never counts as hung.

    Without `lane_ms` steps are quick; the steps of an endless job leave the CPU to others while the job waits.
    """
    lane_ms = lane_ms if lane_ms is not None else 40.0 if steps == ENDLESS else 10.0
    data = {"train": str(rows / "train"), "validation": str(rows / "validation"), "too_long": "truncate"}
    tree = {"run": {"dir": str(folder / "run"), "seed": 5}, "data": data, "max_steps": steps, **JOB}
    tree["task"] = {"path": "chaos.tasks.paced_classifier:PacedClassifier", "params": {**PARAMS, "lane_ms": lane_ms}}
    if until is not None:
        params = {**PARAMS, "lane_ms": lane_ms, "until": str(until)}
        tree |= {"task": {"path": "tests.tasks:PacedUntil", "params": params}, "hang_timeout_s": NO_HANG_S}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "config.yaml")


def launch(
    folder: Path, etcd: EtcdServer, config: str, *, ranks: int, nnodes: str = "1:2", conf: str = "", **environ: str
) -> ForkedWorker:
    """Start one live node under torchrun; its output goes to `node.log`.

    Leases are too long to expire on a busy machine; a test that waits for an expiry sets that in `conf`.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv_backend=etcd"]
    command += [
        f"--rdzv_endpoint={etcd.endpoint}",
        f"--rdzv_id={folder.name}",
        f"--rdzv_conf=recovery=live,ttl=60{conf}",
    ]
    command += [f"--nnodes={nnodes}", f"--nproc-per-node={ranks}", "--max-restarts=50", "-m", "elastic_train", config]
    STARTED.append(begin(command, folder / "node.log", environ))
    return STARTED[-1]


def launch_alone(
    folder: Path, etcd: EtcdServer, config: str, name: str, *own: str, ranks: int = 1, **environ: str
) -> ForkedWorker:
    """Start a node with the launcher and its own options; its output goes to `<name>.log`."""
    command = [sys.executable, "-m", "elastic_train.cli.main", "launch", config, "--ranks", f"{ranks}", "--ttl-s", "60"]
    command += ["--nodes", "1:2", "--endpoint", etcd.endpoint, "--id", folder.name, *own]
    STARTED.append(begin(command, folder / f"{name}.log", environ))
    return STARTED[-1]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Kill the processes of a failed test, so that they do not slow later tests."""
    yield
    while STARTED:
        node = STARTED.pop()
        node.kill()  # its workers die with it
        node.wait()


def finish(job: ForkedWorker, folder: Path, timeout_s: float = 280) -> tuple[Evidence, str]:
    """Wait for a job; return its result and its log."""
    try:
        code = job.wait(timeout_s)
    except subprocess.TimeoutExpired:
        job.kill()
        code = None
    log = (folder / "node.log").read_text()
    assert code == 0, log
    return collect(folder / "run"), log


def weights(run: Evidence) -> object:
    assert run.result is not None
    return run.result["weights_sha256"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Callable[[int], object]:
    """Train the same job for a number of steps in one process; return the weights' hash."""

    @functools.cache
    def hash_after(steps: int) -> object:
        folder = tmp_path_factory.mktemp("alone")
        assert start([write_config(folder, rows, steps, lane_ms=0.0)]).code == 0
        return weights(collect(folder / "run"))

    return hash_after


PHASES_OF_A_NEW_WORLD = ("form", "restore", "hand-over")


def leave(job: ForkedWorker, folder: Path) -> Evidence:
    """Ask a job's node to leave; return its result, which includes every applied step."""
    job.send_signal(signal.SIGTERM)
    job.wait(PATIENCE_S)
    run = collect(folder / "run")
    assert run.result is not None, (folder / "node.log").read_text()
    check_kept(run)
    return run


def steps_of(run: Evidence) -> int:
    assert run.result is not None
    return int(str(run.result["step"]))


def lose_ranks(folder: Path, points: Path, size: int, faults: Sequence[tuple[str, str]]) -> tuple[int, dict[int, int]]:
    """Inject each fault (place and kind) once a world of `size` ranks trains.

    A place may have a number: "forward 8" is the eighth time that any rank reaches it. For places in a new world's
    formation, the last rank is killed first. Return the final world's term and its processes by rank.
    """
    term, ranks = until_whole(folder / "run", size, least=2)
    for place, kind in faults:
        point, _, nth = place.partition(" ")
        arm(points, point, kind, int(nth or 1))
        if point in PHASES_OF_A_NEW_WORLD:
            os.kill(ranks[size - 1], signal.SIGKILL)
        eventually(lambda: not (points / point).exists(), f"a fault at {point}")  # noqa: B023 - called at once
        term, ranks = until_whole(folder / "run", size, above=term, least=2)
    return term, ranks


def lose_peers(job: ForkedWorker, folder: Path, points: Path, names: Sequence[str]) -> Evidence:
    """Kill one of three ranks at each of these points of a step, freeze one for a while, and ask all to leave."""
    term, ranks = lose_ranks(folder, points, 3, [(point, "kill") for point in names])
    os.kill(ranks[1], signal.SIGSTOP)
    term, _ = until_whole(folder / "run", 2, above=term)
    os.kill(ranks[1], signal.SIGCONT)
    _, again = until_whole(folder / "run", 3, above=term)
    assert set(again.values()) == set(ranks.values()), "survivors keep their processes, and so does the frozen one"
    return leave(job, folder)


def until_whole(
    run: Path, size: int, *, above: int = 0, least: int = 5, timeout_s: float = PATIENCE_S
) -> tuple[int, dict[int, int]]:
    """Wait until a world of `size` ranks with a term above `above` has taken a few steps, `least` on each rank.

    Return the term, and the processes by rank.
    """
    newest: dict[int, int] = {}
    found = [0]

    def is_whole() -> bool:
        lines = history(run)
        term = max((int(line["term"]) for line in lines), default=0)
        found[0] = term
        newest.clear()
        newest.update({line["rank"]: line["pid"] for line in lines if line["op"] == "form" and line["term"] == term})
        steps = [line for line in lines if line["op"] == "step" and line["term"] == term]
        return term > above and len(newest) == size and len(steps) > least * size

    eventually(is_whole, f"a world of {size}", timeout_s)
    return found[0], newest


def history(run: Path) -> list[dict[str, int]]:
    texts = [path.read_text() for path in (run / "history").glob("*.jsonl")]
    whole = [text.rpartition("\n")[0] for text in texts]  # the last line may be incomplete
    return [json.loads(line) for text in whole for line in text.splitlines() if line.endswith("}")]


def test_a_hanging_rank_is_ended_and_the_others_continue(
    tmp_path: Path, rows: Path, etcd: EtcdServer, undisturbed: Callable[[int], object]
) -> None:
    """The hung process dumps its stacks and exits, although it holds the interpreter lock; no bit differs."""
    points = tmp_path / "points"
    points.mkdir()
    arm(points, "forward", "hang-native", LANES * 12 + 1)  # before the job starts: it may end before a test looks
    config = write_config(tmp_path, rows, 60, lane_ms=0.0)
    run, log = finish(launch(tmp_path, etcd, config, ranks=2, **{VARIABLE: str(points)}), tmp_path)
    assert {line["world"] for line in run.of("form") if line["term"] == 1} == {2}
    assert "in _look" in log
    assert weights(run) == undisturbed(60)


def test_a_stopped_worker_is_left_out_and_a_dead_one_replaced(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """A stopped worker is left out without waiting for a lease; once continued, the same process rejoins.

    A dead worker is replaced by a fork of the standby process, like the first workers, and none outlives the agent.
    """
    config = write_config(tmp_path, rows, ENDLESS)
    job = launch(tmp_path, etcd, config, ranks=2)
    try:
        _, ranks = until_whole(tmp_path / "run", 2)
        os.kill(ranks[1], signal.SIGSTOP)
        stopped_at = time.monotonic()
        term, alone = until_whole(tmp_path / "run", 1)
        assert alone == {0: ranks[0]}
        eventually(lambda: time.monotonic() > stopped_at + LONGER_THAN_A_HANG_S, "a stop that is longer than any hang")
        os.kill(ranks[1], signal.SIGCONT)
        term, again = until_whole(tmp_path / "run", 2, above=term)
        assert set(again.values()) == set(ranks.values())
        os.kill(again[1], signal.SIGKILL)
        _, again = until_whole(tmp_path / "run", 2, above=term)
        assert again[1] not in ranks.values()
        everyone = [*ranks.values(), *again.values(), *children_of(job.pid)]
        assert {name_of(pid) for pid in again.values()} == {"worker"}
    finally:
        job.kill()
    eventually(lambda: not any(is_alive(pid) for pid in everyone), "the end of all that the agent has started")


def test_ranks_with_shards_that_die_cost_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, undisturbed: Callable[[int], object]
) -> None:
    """The survivors keep their shards, and the replacement receives its own; `test_lost_ranks` has all shard modes."""
    points, places = tmp_path / "points", ["backward", "applied"]
    points.mkdir()
    environ = {VARIABLE: str(points), "ELASTIC_TRAIN__PARALLEL__SHARDS": "parameters"}
    job = launch(tmp_path, etcd, write_config(tmp_path, rows, ENDLESS), ranks=3, **environ)
    try:
        term, _ = until_whole(tmp_path / "run", 3)
        lose_ranks(tmp_path, points, 3, [(place, "raise" if place == "backward" else "kill") for place in places])
        run = leave(job, tmp_path)
    finally:
        job.kill()
    assert "is held 2 times" in (tmp_path / "node.log").read_text()
    restored = [line for line in run.of("restore") if int(str(line["term"])) > term]
    assert len({line["term"] for line in restored}) >= len(places)
    assert all(int(str(line["step"])) > 0 for line in restored)
    assert weights(run) == undisturbed(steps_of(run))


def test_a_suspended_job_goes_on_where_it_was(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """All its processes are stopped, as a scheduler does, for longer than the leases and the hang timeout.

    No process exits, and no step is lost.
    """
    job = launch(tmp_path, etcd, write_config(tmp_path, rows, ENDLESS), ranks=2, conf=",ttl=2")
    term, ranks = until_whole(tmp_path / "run", 2)
    everybody = processes_below(job.pid)
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    stopped_at = time.monotonic()
    eventually(lambda: time.monotonic() > stopped_at + LONGER_THAN_A_HANG_S, "a stop that is longer than any hang")
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    _, again = until_whole(tmp_path / "run", 2, above=term)
    assert set(again.values()) == set(ranks.values())
    leave(job, tmp_path)


def processes_below(pid: int) -> list[int]:
    """Return a process and all its descendants, parents before children."""
    found = [pid]
    for one in found:
        found += children_of(one)
    return found


def test_survivors_below_the_minimum_commit_and_leave(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """With too few nodes for too long, the survivor commits its state and exits with 77."""
    config = write_config(tmp_path, rows, ENDLESS)
    nodes = [launch(tmp_path, etcd, config, ranks=1, nnodes="2", conf=",ttl=2,timeout=30") for _ in range(2)]
    until_whole(tmp_path / "run", 2)
    os.kill(nodes[1].pid, signal.SIGKILL)
    assert nodes[0].wait(280) == 1  # torchrun's exit code
    left = collect(tmp_path / "run")
    last = max(int(str(line["step"])) for line in left.of("step"))
    assert left.commits[-1].fields is not None and left.commits[-1].fields["step"] == last
    assert "exitcode  : 77" in (tmp_path / "node.log").read_text()
