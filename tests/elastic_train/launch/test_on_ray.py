"""A job on Ray reacts to the ends of its nodes. Ray is a twin in memory here; tests/deploy has the real one."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError, TooFewNodesError
from elastic_train.launch import on_ray
from elastic_train.launch.on_ray import FINAL_CODES, RayJob, run_on_ray
from elastic_train.launch.ray_trainer import ElasticTrainer
from elastic_train.launch.schedulers import without_schedulers
from elastic_train.world.forming import DOMAIN

CONFIG = Config.model_validate({"run": {"dir": "/runs/one"}, "data": {"train": "/rows"}})
LOST = "lost"


class RayError(Exception):
    """The base class of Ray's errors."""


class OutOfMemoryError(RayError):
    """Of an actor that Ray's memory monitor has killed; it is no RayActorError."""


class RayTaskError(RayError):
    """An error raised by an actor's method."""

    cause = OSError(28, "No space left on device")


class ActorLost(RayError):  # noqa: N818 - Ray's name
    preempted = False


class Preempted(ActorLost):
    preempted = True


class Cluster:
    """A Ray whose actors end one after the other as a script says: with a code (and a result), or lost."""

    def __init__(self, ends: list[object], actors_at_once: int) -> None:
        self.ends, self.room = ends, actors_at_once
        self.options: dict[str, object] = {}
        self.given: tuple[Any, ...] = ()
        self.actors: list[SimpleNamespace] = []
        self.asked_to_leave = self.killed = 0
        self.exceptions = SimpleNamespace(RayError=RayError)

    def remote(self, kind: type) -> Any:
        def options(**given: object) -> Any:
            self.options = given
            return SimpleNamespace(remote=self._start)

        return SimpleNamespace(options=options)

    def _start(self) -> SimpleNamespace:
        number = len(self.actors)

        def leave() -> None:
            self.asked_to_leave += 1

        def run(*given: object) -> tuple[str, int]:
            self.given = given
            return "run", number

        methods = {"run": run, "host": lambda: ("host", number), "leave": leave}
        self.actors.append(SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in methods.items()}))
        return self.actors[-1]

    def wait(self, refs: list[tuple[str, int]], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        if not self.room:
            return [], refs
        ready = [(kind, number) for kind, number in sorted(refs) if kind == "host" or number < len(self.ends)]
        ready = ready[:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: tuple[str, int]) -> object:
        kind, number = ref
        if kind == "host":
            return "a"
        end = self.ends[number]
        if isinstance(end, type):
            raise end("the actor died")
        return end if isinstance(end, tuple) else (end, {"step": 5} if end == 0 else None)

    def kill(self, actor: object) -> None:
        self.killed += 1


def ended(monkeypatch: pytest.MonkeyPatch, ends: list[object], **job: Any) -> tuple[object, Cluster]:
    """Run a job of two nodes whose actors end that way; return its code and result, and the cluster."""
    cluster = Cluster(ends, 2)
    monkeypatch.setattr(on_ray, "_ray", lambda: cluster)
    return run_on_ray(RayJob(**{"config": CONFIG, "nodes": "1:2", "endpoint": "etcd:2379", **job})), cluster


def test_lost_and_failed_nodes_are_replaced_until_one_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is not to restart them, too."""
    found, cluster = ended(monkeypatch, [ActorLost, 75, 1, 76, Preempted, 0])
    assert found == (0, {"step": 5})
    assert len(cluster.actors) == 7 and cluster.asked_to_leave == 0
    assert cluster.options["max_restarts"] == 0
    assert cluster.options["scheduling_strategy"] == "SPREAD"


@pytest.mark.parametrize("first", [None, {"step": 5, "term": 2}])
def test_the_result_is_that_of_rank_0s_node_whichever_node_ends_first(
    monkeypatch: pytest.MonkeyPatch, first: object
) -> None:
    """With a `run.dir` of each node's own, the others have none, or that of an earlier start of fewer steps."""
    found, _ = ended(monkeypatch, [(0, first), (0, {"step": 9, "term": 4})])
    assert found == (0, {"step": 9, "term": 4})


def test_all_nodes_that_have_a_place_are_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One was taken note of each second, and the others were killed, and so was whoever had the result."""
    found, _ = ended(monkeypatch, [*[(0, None)] * 7, (0, {"step": 9, "term": 4})], nodes="1:8")
    assert found == (0, {"step": 9, "term": 4})


@pytest.mark.parametrize(
    ("kind", "why"), [(OutOfMemoryError, "the actor died"), (RayTaskError, "No space left on device")]
)
def test_a_node_that_is_killed_for_memory_or_cannot_write_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[RayError], why: str
) -> None:
    """Ray has other errors for these than for a lost actor: they once ended the whole job."""
    found, cluster = ended(monkeypatch, [kind, 0])
    assert found == (0, {"step": 5})
    assert len(cluster.actors) == 3 and why in caplog.text


@pytest.mark.parametrize("code", FINAL_CODES)
def test_what_would_end_the_same_way_again_ends_the_job(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    found, cluster = ended(monkeypatch, [code])
    assert found == (code, None)
    assert (len(cluster.actors), cluster.asked_to_leave, cluster.killed) == (2, 1, 1)


def test_nodes_are_replaced_so_often_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that left as asked, or with a machine that was taken away, does not count; 0 replaces none."""
    found, cluster = ended(monkeypatch, [75, Preempted, 1, 1, 1, ActorLost, 1], most_failures=3)
    assert found == (1, None) and len(cluster.actors) == 7
    assert len(ended(monkeypatch, [1, 76], most_failures=0)[1].actors) == 2
    assert len(ended(monkeypatch, [1] * 40 + [0], most_failures=-1)[1].actors) == 42


def test_all_nodes_are_asked_to_leave_with_the_one_who_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Cluster, ref: object) -> object:
        if isinstance(ref, tuple) and ref[0] == "run":
            os.kill(os.getpid(), signal.SIGTERM)
            return 1, None
        return "a"

    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "get", interrupt)
        found, cluster = ended(patch, [1])
    assert found == (75, None)
    assert (cluster.asked_to_leave, cluster.killed) == (2, 2)


def test_no_place_for_any_node_is_said_and_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster([], 0)
    monkeypatch.setattr(on_ray, "_ray", lambda: cluster)
    with pytest.raises(TooFewNodesError, match=r"no place for a node with {'CPU': 1.0} within 0 s"):
        run_on_ray(RayJob(CONFIG, "1:2", endpoint="etcd:2379", timeout_s=0.0))
    assert cluster.killed == 2


def test_all_mistakes_are_reported_at_once() -> None:
    """Paths of the driver's own folder would be others on each node."""
    config = Config.model_validate({"run": {"dir": "runs/one"}, "data": {"train": "rows", "validation": "s3://b/v"}})
    with pytest.raises(ConfigError) as refused:
        run_on_ray(RayJob(config, "3:2", {"CPU": -1.0, "a": math.nan}, ranks=0, grace_s=-1.0, timeout_s=math.nan))
    said = " ".join(refused.value.problems)
    parts = ("--nodes must be", "run.dir is runs/one", "data.train is rows", "--ranks", "-1 of CPU", "nan of a")
    assert all(part in said for part in (*parts, "--grace-s must be", "--timeout-s must be"))
    assert "data.validation" not in said


def test_a_node_is_told_all_by_flags() -> None:
    """One rank for each GPU; the variables of whoever has started Ray's services mean something else."""
    job = RayJob(CONFIG, "2:4", {"CPU": 8.0, "GPU": 4.0}, run_id="one")
    flags = dict(zip(*[iter(job.arguments("etcd:2379"))] * 2, strict=True))
    assert flags == {
        "--nodes": "2:4", "--ranks": "4", "--endpoint": "etcd:2379", "--id": "one",
        "--grace-s": "30.0", "--timeout-s": "900.0",
    }  # fmt: skip
    environ = {"PATH": "/bin", "SLURM_JOB_ID": "7", "PET_NNODES": "2", "SKYPILOT_NODE_IPS": "a", "WORLD_SIZE": "2"}
    assert without_schedulers(environ) == {"PATH": "/bin"}


def test_how_etcd_is_reached_is_said_to_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no flag: as the variable has it where the job is started, and else as each node's own has it."""
    started: list[tuple[object, ...]] = []

    def note(self: Cluster) -> SimpleNamespace:
        actor = start_actor(self)
        run = actor.run.remote
        actor.run = SimpleNamespace(remote=lambda *given: started.append(given) or run(*given))
        return actor

    start_actor = Cluster._start
    monkeypatch.setattr(Cluster, "_start", note)
    assert "secret" not in repr(RayJob(CONFIG, "1", endpoint="etcd:2379", conf="user=a,password=secret"))
    ended(monkeypatch, [0])
    monkeypatch.setenv("PET_RDZV_CONF", "ca_cert=/ca.pem")
    ended(monkeypatch, [0])
    assert [given[3] for given in started] == [{}] * 2 + [{"PET_RDZV_CONF": "ca_cert=/ca.pem"}] * 2
    assert RayJob(CONFIG, "1", conf=None).to_etcd() == {"PET_RDZV_CONF": ""}, "not what a node says of another"
    environ = {"PATH": "/bin", "PET_RDZV_CONF": "ttl=5", "PET_NNODES": "2"}
    assert without_schedulers(environ) == {"PATH": "/bin", "PET_RDZV_CONF": "ttl=5"}
    with pytest.raises(ConfigError, match=r"PET_RDZV_CONF says how to reach an etcd \(ca_cert\)"):
        run_on_ray(RayJob(CONFIG, "1:2"))


@pytest.mark.slow
def test_the_node_runs_a_launcher_and_returns_its_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Here one that refuses its flags, and what it is told of etcd."""
    said = {"PET_RDZV_CONF": "ttl"}
    code, result = on_ray.Node().run(str(tmp_path / "run"), CONFIG.to_yaml(), ["--nodes", "0"], said)
    assert (code, result) == (2, None)
    assert "PET_RDZV_CONF: 'ttl' is not KEY=VALUE" in capfd.readouterr().err
    assert (tmp_path / "run" / "ray.yaml").read_text() == CONFIG.to_yaml()


def test_a_nodes_own_variables_change_no_key_but_its_failure_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Set where `ray start` ran on all nodes, one once changed what was trained, without a word."""
    given: list[dict[str, str]] = []

    def popen(command: object, env: dict[str, str]) -> SimpleNamespace:
        given.append(env)
        return SimpleNamespace(wait=lambda: 2)

    monkeypatch.setattr(on_ray.subprocess, "Popen", popen)
    for name in ("MAX_STEPS", "RUN__DIR", "TRACKING__MLFLOW_URI"):
        monkeypatch.setenv(f"ELASTIC_TRAIN__{name}", "3")
    monkeypatch.setenv(DOMAIN, "3")
    on_ray.Node().run(str(tmp_path), "", [], {"ELASTIC_TRAIN__TRACKING__MLFLOW_URI": "http://of-the-job"})
    of_keys = {name: value for name, value in given[0].items() if name.startswith("ELASTIC_TRAIN_")}
    assert of_keys == {"ELASTIC_TRAIN_DOMAIN": "3", "ELASTIC_TRAIN__TRACKING__MLFLOW_URI": "http://of-the-job"}
    assert "ELASTIC_TRAIN__MAX_STEPS, ELASTIC_TRAIN__RUN__DIR, ELASTIC_TRAIN__TRACKING__MLFLOW_URI of" in caplog.text


def test_an_address_with_a_password_reaches_the_launcher_and_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes get it as a variable, and give it to their launchers as one, as the test above shows."""
    tracking = CONFIG.tracking.model_copy(update={"mlflow_uri": "http://me:planted@host:4318"})
    secret = CONFIG.model_copy(update={"tracking": tracking})
    _, cluster = ended(monkeypatch, [0], config=secret)
    _, text, _, left_out = cluster.given
    assert left_out == {"ELASTIC_TRAIN__TRACKING__MLFLOW_URI": "http://me:planted@host:4318"}
    assert "planted" not in text


@dataclass
class Scaling:
    """The attributes of Ray Train's ScalingConfig that the trainer reads."""

    num_workers: int = 1
    use_gpu: bool = False
    resources_per_worker: dict[str, float] | None = None
    placement_strategy: str = "PACK"
    accelerator_type: str | None = None
    label_selector: dict[str, str] | None = None


@pytest.mark.parametrize(
    ("scaling", "resources"),
    [
        (Scaling(use_gpu=True), {"CPU": 1.0, "GPU": 1.0}),
        (Scaling(use_gpu=True, resources_per_worker={"CPU": 8}), {"CPU": 8, "GPU": 1.0}),
        (Scaling(use_gpu=True, resources_per_worker={"CPU": 8, "GPU": 4}), {"CPU": 8, "GPU": 4}),
        (Scaling(resources_per_worker={"CPU": 8}), {"CPU": 8}),
        (Scaling(), {"CPU": 1.0}),
    ],
)
def test_a_worker_of_ray_train_that_uses_a_gpu_has_one(
    tmp_path: Path, scaling: Scaling, resources: dict[str, float]
) -> None:
    """Also where CPUs are asked for: it trained on these, as Ray shows a node no GPU that it has not asked for."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.to_yaml())
    assert ElasticTrainer(path, scaling_config=scaling)._job.resources == resources  # type: ignore[arg-type]
