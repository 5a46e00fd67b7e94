"""A job on a real Ray cluster of this machine: actors and machines are lost, the others continue, one hash."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.judge.evidence.run_files import collect
from elastic_train import ElasticTrainer
from elastic_train.errors import ConfigError
from rendezvous.etcd.server import free_ports
from rendezvous.torchelastic.standby import ForkedWorker
from tests.conftest import ROOT, begin, eventually
from tests.deploy.jobs import first_step_s, steps_done_twice, until_ranks, write_patient_config
from tests.deploy.pages import command
from tests.elastic_train.training.live.test_live import ENDLESS, history, undisturbed, weights
from tests.processes import command_line_of, parent_of

pytestmark = [pytest.mark.deploy, pytest.mark.xdist_group("ray")]
__all__ = ["undisturbed"]
MORE_STEPS = 20
"""Which the job takes after it was left and resumed. Until then it has no end: in a fixed number of steps it was done
on a busy machine before a lost node was back."""
PATIENT = {
    "RAY_gcs_server_port_wait_time_s": "240",
    "RAY_gcs_server_request_timeout_seconds": "240",
    "RAY_worker_register_timeout_seconds": "240",
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Timeout for Ray's own parts: the default of 30 s is too short on a busy machine, and actors do not yield."""


def test_rays_own_command_line_takes_the_pages_command() -> None:
    """And leaves what follows it to `elastic-train ray`."""
    ray = pytest.importorskip("ray.scripts.scripts", reason="no Ray here: pip install 'elastic-train[ray]'")
    _, (program, *words) = command("ray.md", "ray job submit")
    group, name, *arguments = words
    parsed = ray.cli.commands[group].commands[name].make_context(name, arguments).params
    assert program == "ray" and parsed["working_dir"] == "."
    assert list(parsed["entrypoint"]) == command("ray.md", "elastic-train ray")[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A machine of Ray's with room for two nodes; tests add others."""
    pytest.importorskip("ray", reason="no Ray here: pip install 'elastic-train[ray]'")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets lie in it, and their names have to be short
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**PATIENT, "RAY_TMPDIR": folder, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}.items():
            patch.setenv(name, value)
        spare_the_wait_for_an_agent(patch)
        made = Cluster(initialize_head=True, head_node_args=machine(2))
        try:
            yield made
        finally:
            made.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def machine(num_cpus: int) -> dict[str, Any]:
    """Return what makes a small machine of Ray's, without the parts that scale a cluster and collect its logs."""
    small = {"object_store_memory": 80 << 20, "num_gpus": 0, "include_dashboard": False}
    small |= {"include_log_monitor": False, "no_monitor": True}
    return {"num_cpus": num_cpus, "runtime_env_agent_port": free_ports(1)[0], **small}


def spare_the_wait_for_an_agent(patch: pytest.MonkeyPatch) -> None:
    """Write for Ray's dashboard agent that it has no ports, as it would: Ray ends if it takes 15 s to be imported."""
    from ray import _raylet as raylet
    from ray._private.node import Node

    start = Node.start_raylet

    def start_raylet(self: Node, *given: Any, **named: Any) -> None:
        for kind in ("DASHBOARD_AGENT_LISTEN", "METRICS_AGENT", "METRICS_EXPORT"):
            name = getattr(raylet, f"{kind}_PORT_NAME")
            raylet.persist_port(self.get_session_dir_path(), self._node_id, name, -1)
        start(self, *given, **named)

    patch.setattr(Node, "start_raylet", start_raylet)


@pytest.fixture
def driver(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., ForkedWorker]]:
    """Starts `elastic-train ray` with what a node of a test takes."""
    begun: list[ForkedWorker] = []

    def start(config: str, nodes: str) -> ForkedWorker:
        command = [sys.executable, "-m", "elastic_train.command", "ray", config, "--nodes", nodes]
        begun.append(begin(command, tmp_path / "log", {"RAY_ADDRESS": cluster.address}))
        return begun[-1]

    yield start
    for each in begun:
        each.kill()
        each.wait()


def actor_of(worker: int) -> int:
    """Return the process id of Ray's worker below which a rank runs."""
    pid = worker
    while not "".join(command_line_of(pid)[:1]).startswith("ray::"):
        pid = parent_of(pid)
        assert pid > 1, f"{worker} is not a descendant of an actor"
    return pid


def test_actors_and_machines_are_lost_and_the_job_goes_on(
    cluster: Any,
    driver: Callable[..., ForkedWorker],
    tmp_path: Path,
    rows: Path,
    undisturbed: Callable[[int], object],
    record_property: Callable[[str, object], None],
) -> None:
    """An actor is killed and replaced, a machine goes and another comes, the driver leaves, ElasticTrainer resumes."""
    done, run = tmp_path / "done", tmp_path / "run"
    config = write_patient_config(tmp_path, rows, ENDLESS, lane_ms=500.0, until=done)
    second = cluster.add_node(**machine(1))
    job = driver(config, "1:3")
    term, ranks = until_ranks(run, 3)

    lost_at_s = time.time()
    os.kill(actor_of(ranks[1]), signal.SIGKILL)
    term, left = until_ranks(run, 2, above=term)
    took_s = first_step_s(run, term) - lost_at_s
    assert set(left.values()) == {ranks[0], ranks[2]}, "the others continue in their processes"
    record_property("Ray: seconds from an actor's death to the next step", took_s)
    term, ranks = until_ranks(run, 3, above=term)

    cluster.remove_node(second, allow_graceful=False)
    term, left = until_ranks(run, 2, above=term)
    assert set(left.values()) < set(ranks.values())
    cluster.add_node(**machine(1))
    term, _ = until_ranks(run, 3, above=term)

    job.send_signal(signal.SIGTERM)
    assert job.wait(400) == 75, (tmp_path / "log").read_text()
    steps = max(line["step"] for line in history(run) if line["op"] == "step") + MORE_STEPS
    done.touch()
    result = trained_on(cluster, write_patient_config(tmp_path, rows, steps, lane_ms=500.0, until=done))
    assert result.metrics["step"] == steps and result.path == str(run)
    assert steps_done_twice(run) == []
    assert weights(collect(run)) == result.metrics["weights_sha256"] == undisturbed(steps)


def trained_on(cluster: Any, config: str) -> Any:
    """Train on by ElasticTrainer, with Ray Train's own configurations; return its result."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    ray.init(address=cluster.address)
    try:
        scaling = ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1}, placement_strategy="SPREAD")
        for refused in (
            {"scaling_config": scaling, "run_config": RunConfig(storage_path="/elsewhere")},
            {"scaling_config": ScalingConfig(num_workers=2, placement_strategy="STRICT_PACK")},
        ):
            with pytest.raises(ConfigError, match=r"storage_path has no effect here|placement_strategy has to be"):
                ElasticTrainer(config, **refused)
        run = RunConfig(name="quality-1", failure_config=FailureConfig(max_failures=3))
        return ElasticTrainer(config, scaling_config=scaling, run_config=run).fit()
    finally:
        ray.shutdown()


def test_waiting_for_a_place_has_an_end(cluster: Any, tmp_path: Path, rows: Path) -> None:
    """A cluster without the GPUs that a node asks for: the job says so, and ends with 77."""
    config = write_patient_config(tmp_path, rows, 5)
    command = [sys.executable, "-m", "elastic_train.command", "ray", config, "--nodes", "1", "--gpus", "8"]
    (tmp_path / "log").touch()
    job = begin([*command, "--timeout-s", "7"], tmp_path / "log", {"RAY_ADDRESS": cluster.address})
    try:
        eventually(lambda: "waiting for Ray" in (tmp_path / "log").read_text(), "it says so", 400)
        assert job.wait(400) == 77, (tmp_path / "log").read_text()
    finally:
        job.kill()
    assert "`ray status` says" in (tmp_path / "log").read_text()
