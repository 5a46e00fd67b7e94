"""The launcher reads its options from flags, Kubernetes and Slurm."""

from __future__ import annotations

import math
import re
import socket
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from elastic_train.errors import ConfigError
from elastic_train.launch.options import Flags, Launch, count_gpus, parse_nodes, resolve
from elastic_train.launch.schedulers import READ, WITHOUT_EFFECT, first_host

SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "gpu[07-10]", "SLURM_NODEID": "2"}
SLURM |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NODELIST": "gpu[07-10]"}
SLURM |= {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}


KUBERNETES = {"PET_NNODES": "2:8", "PET_NPROC_PER_NODE": "4", "PET_RDZV_ENDPOINT": "etcd:2379", "PET_RDZV_ID": "k1"}


def resolved(flags: Flags, environ: dict[str, str], num_gpus: int = 0) -> Launch:
    return resolve(Path("c.yaml"), ["--epochs", "2"], flags, environ, num_gpus)


def test_one_node_needs_no_options() -> None:
    """One node, a rank for each GPU, its own etcd and a name."""
    plan = resolved(Flags(), {}, num_gpus=8)
    assert (plan.min_nodes, plan.max_nodes, plan.ranks, plan.endpoint, plan.is_etcd_host) == (1, 1, 8, None, True)
    assert plan.arguments() == ["-m", "elastic_train", "c.yaml", "--epochs", "2"]
    assert resolved(Flags(), {}).ranks == 1


def test_kubernetes_variables_are_read_and_flags_win() -> None:
    """PET_* variables mean what they mean to torchrun; the command line overrides them."""
    plan = resolved(Flags(ranks=2, run_id="mine"), KUBERNETES)
    assert (plan.min_nodes, plan.max_nodes, plan.ranks, plan.endpoint, plan.run_id) == (2, 8, 2, "etcd:2379", "mine")


def test_slurm_shares_the_first_nodes_etcd() -> None:
    """Without an endpoint the first host of the list has the job's etcd; only that node starts it."""
    plan = resolved(Flags(), SLURM)
    assert (plan.max_nodes, plan.run_id, plan.etcd_address, plan.is_etcd_host) == (4, "77", "gpu07", False)
    assert plan.min_nodes == 1, "one that is lost or late stops nobody"
    assert resolved(Flags(), {**SLURM, "SLURM_NODEID": "0"}).is_etcd_host


def test_a_step_of_a_slurm_job_is_what_was_started() -> None:
    """On some of the job's nodes: its etcd is on the first of these, and a later step has a name of its own."""
    step = {"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[08-09]"}
    plan = resolved(Flags(), {**SLURM, **step, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"})
    assert (plan.max_nodes, plan.run_id, plan.etcd_address) == (2, "77.1", "gpu08")


@pytest.mark.parametrize("tasks", ["2(x4)", "1(x3),2", "8"])
def test_several_launchers_on_a_node_are_refused(tasks: str) -> None:
    """One starts all ranks of its node: the others were idle, or in its way."""
    with pytest.raises(ConfigError, match=re.escape(f"SLURM_STEP_TASKS_PER_NODE={tasks} ")):
        resolved(Flags(), {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks})


def test_a_launcher_that_srun_has_not_started_is_refused_where_there_are_more_nodes() -> None:
    """A batch script runs on the first node alone; of a job of one node that is all."""
    batch = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}
    with pytest.raises(ConfigError, match=r"SLURM_JOB_NUM_NODES=4, but .* start it with srun"):
        resolved(Flags(), batch)
    alone = resolved(Flags(), {**batch, "SLURM_JOB_NUM_NODES": "1"})
    assert (alone.max_nodes, alone.run_id, alone.endpoint) == (1, "77", None)


TRAIN_JOB = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "1", "PET_MASTER_PORT": "29400"}
TRAIN_JOB |= {"PET_MASTER_ADDR": "witness-node-0-0.witness"}
PYTORCH_JOB = {"PET_NNODES": "1:3", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "job-worker-0:23456"}
PYTORCH_JOB |= {"PET_RDZV_ID": "job", "PET_MAX_RESTARTS": "10", "PET_RDZV_CONF": "timeout=60,ttl=5"}
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-9"}


@pytest.mark.parametrize(
    ("environ", "nodes", "ranks", "run_id", "host"),
    [
        (TRAIN_JOB, (3, 3), 1, "witness-node-0-0.witness:29400", "witness-node-0-0.witness"),
        (PYTORCH_JOB, (1, 3), 1, "job", "job-worker-0"),
        (SKYPILOT, (1, 2), 8, "sky-9", "10.0.0.1"),
    ],
    ids=["TrainJob", "PyTorchJob", "SkyPilot"],
)
def test_the_first_node_of_other_schedulers_has_the_jobs_etcd(
    environ: dict[str, str], nodes: tuple[int, int], ranks: int, run_id: str, host: str
) -> None:
    """Each of them trained alone, or took another service for etcd."""
    rank = "SKYPILOT_NODE_RANK" if environ is SKYPILOT else "PET_NODE_RANK"
    plan = resolved(Flags(), {**environ, rank: "1"})
    assert ((plan.min_nodes, plan.max_nodes), plan.ranks, plan.run_id) == (nodes, ranks, run_id)
    assert (plan.endpoint, plan.etcd_address, plan.is_etcd_host) == (None, host, False)
    if environ is not PYTORCH_JOB:
        assert resolved(Flags(), {**environ, rank: "0"}).is_etcd_host


def test_a_node_of_skypilot_without_gpus_has_one_rank() -> None:
    """SkyPilot says 0 there, which was refused as a number of ranks."""
    assert resolved(Flags(), {**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}).ranks == 1


def test_the_host_of_c10ds_address_knows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorchJob gives all pods the same address, and no number of their own."""
    monkeypatch.setattr(socket, "gethostname", lambda: "job-worker-0")
    plan = resolved(Flags(), PYTORCH_JOB)
    assert plan.is_etcd_host
    assert plan.max_restarts == 10
    assert plan.rendezvous_options() == {"recovery": "live", "compact": True, "timeout": "60", "ttl": "5"}
    own = resolved(Flags(timeout_s=7.0, max_restarts=0), PYTORCH_JOB)
    assert (own.max_restarts, own.rendezvous_options()["timeout"]) == (0, 7.0)


def test_c10ds_address_may_be_one_of_the_machines_own() -> None:
    """By its number nobody knew itself: all nodes waited for the first one, which waited for itself."""
    for address, is_own in (("127.0.0.2", True), ("198.51.100.7", False)):
        plan = resolved(Flags(), {**PYTORCH_JOB, "PET_RDZV_ENDPOINT": f"{address}:23456"})
        assert (plan.etcd_address, plan.is_etcd_host) == (address, is_own)


def test_all_of_torchruns_variables_are_known_and_no_other() -> None:
    """A variable that would change nothing is named in a warning; one that torchrun does not have is refused."""
    named = {f"PET_{action.dest.upper()}" for action in get_args_parser()._actions if action.option_strings}
    assert named - {"PET_HELP"} <= READ | WITHOUT_EFFECT  # other versions of torch have others of these
    assert resolved(Flags(), {"PET_ROLE": "x", "PET_TEE": "3"}).warnings == ("PET_ROLE, PET_TEE: without effect here",)
    with pytest.raises(ConfigError, match="PET_NODES: not known"):
        resolved(Flags(), {"PET_NODES": "2"})
    with pytest.raises(ConfigError, match="PET_RDZV_BACKEND=zeus"):
        resolved(Flags(), {"PET_RDZV_BACKEND": "zeus"})
    with pytest.raises(ConfigError, match="PET_RDZV_CONF: 'ttl' is not KEY=VALUE"):
        resolved(Flags(), {"PET_RDZV_CONF": "ttl"})


@pytest.mark.parametrize("more", ["RDZV_CONF=timeout=60", "MAX_RESTARTS=7", "LOG_DIR=/logs", "LOCAL_ADDR=10.0.0.9"])
@pytest.mark.parametrize(
    ("scheduled", "run_id", "host"),
    [(SLURM, "77", "gpu07"), (SKYPILOT, "sky-9", "10.0.0.1")],
    ids=["Slurm", "SkyPilot"],
)
def test_what_is_said_to_torchrun_beside_a_scheduler_is_added_to_what_that_says(
    scheduled: dict[str, str], run_id: str, host: str, more: str
) -> None:
    """Any of these variables left each node of the job alone, with an etcd and a name of its own."""
    name, _, value = more.partition("=")
    beside = {**scheduled, "SKYPILOT_NODE_RANK": "1", f"PET_{name}": value}
    plain, plan = resolved(Flags(), {**beside, f"PET_{name}": ""}), resolved(Flags(), beside)
    assert plan.max_nodes > 1
    assert (plan.min_nodes, plan.max_nodes, plan.ranks) == (plain.min_nodes, plain.max_nodes, plain.ranks)
    assert (plan.run_id, plan.etcd_address, plan.is_etcd_host) == (run_id, host, False)
    changed = {
        "RDZV_CONF": plan.rendezvous_options()["timeout"] == "60",
        "MAX_RESTARTS": plan.max_restarts == 7,
        "LOG_DIR": plan.warnings == ("PET_LOG_DIR: without effect here",),
        "LOCAL_ADDR": plan.local_addr == "10.0.0.9",
    }
    assert changed[name]


@pytest.mark.parametrize("scheduled", [SLURM, SKYPILOT], ids=["Slurm", "SkyPilot"])
def test_an_etcd_with_tls_is_that_of_all_nodes_of_a_scheduler(scheduled: dict[str, str]) -> None:
    """PET_RDZV_CONF alone says how it is reached; where it is, a flag or a variable does."""
    tls = {**scheduled, "PET_RDZV_CONF": "ca_cert=/ca.pem,user=me"}
    by_flag = resolved(Flags(endpoint="etcd:2379"), tls)
    by_variable = resolved(Flags(), {**tls, "PET_RDZV_ENDPOINT": "etcd:2379", "PET_RDZV_ID": "mine"})
    assert by_flag.max_nodes == by_variable.max_nodes == resolved(Flags(), scheduled).max_nodes
    assert (by_flag.endpoint, by_variable.endpoint, by_variable.run_id) == ("etcd:2379", "etcd:2379", "mine")
    assert by_flag.conf == by_variable.conf == {"ca_cert": "/ca.pem", "user": "me"}
    with pytest.raises(ConfigError, match=r"PET_RDZV_CONF says how to reach an etcd \(ca_cert, user\)"):
        resolved(Flags(), tls)


def test_flags_win_over_what_is_said_to_torchrun() -> None:
    """Those with another value than the default, which nobody need have given."""
    said = {"PET_RDZV_CONF": "recovery=live,compact=true"}
    options = resolved(Flags(recovery="restart", compact=False), said).rendezvous_options()
    assert (options["recovery"], options["compact"]) == ("restart", False)
    said = {"PET_RDZV_CONF": "recovery=restart,compact=false"}
    options = resolved(Flags(), said).rendezvous_options()
    assert (options["recovery"], options["compact"]) == ("restart", "false")


def test_what_is_said_to_torchrun_wins_over_what_a_scheduler_says() -> None:
    said = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "3", "PET_MASTER_ADDR": "gpu09", "PET_NODE_RANK": "0"}
    plan = resolved(Flags(), {**SLURM, **said})
    assert (plan.min_nodes, plan.max_nodes, plan.ranks) == (2, 2, 3)
    assert (plan.etcd_address, plan.is_etcd_host) == ("gpu09", True)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"PET_MASTER_ADDR": "h", "PET_NODE_RANK": "1"}, "PET_NODE_RANK=1"),
        ({"PET_MASTER_ADDR": "h", "PET_NODE_RANK": "0"}, "PET_MASTER_ADDR=h"),
        ({"PET_NODE_RANK": "2", "PET_RDZV_ENDPOINT": "etcd:2379"}, "PET_NODE_RANK=2"),
        ({"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "h:29400"}, "PET_RDZV_ENDPOINT=h:29400"),
        ({"WORLD_SIZE": "4", "PET_RDZV_ENDPOINT": "etcd:2379"}, "WORLD_SIZE=4"),
        ({"PET_NNODES": "4", "PET_MASTER_ADDR": "h"}, "PET_MASTER_ADDR=h"),
    ],
)
def test_nobody_trains_alone_beside_nodes_that_nothing_counts_or_tells_apart(
    environ: dict[str, str], name: str
) -> None:
    """Each was a world of one; without a rank each was the host of an etcd of its own."""
    with pytest.raises(ConfigError, match=f"^{name} says"):
        resolved(Flags(), environ)
    assert resolved(Flags(nodes="1"), environ).max_nodes == 1, "asked for"
    assert resolved(Flags(), {"PET_MASTER_ADDR": "localhost", "PET_NODE_RANK": "0"}).max_nodes == 1


@pytest.mark.parametrize("count", ["²", "٣", "many", "0", "-1"])
def test_a_count_is_of_plain_digits(count: str) -> None:
    """Others ended with a traceback."""
    with pytest.raises(ConfigError, match=f"has to be a number, 1 or more, not '{count}'"):
        resolved(Flags(), {"PET_NPROC_PER_NODE": count})


@pytest.mark.parametrize("nodes", ["2:", ":2", " 2:8", "2:8 ", "2_0", "２", "٣", "+2", "2:8:9", "", "8:2"])
def test_numbers_of_nodes_are_plain_digits(nodes: str) -> None:
    """They are passed on as they are, to manifests and to batch scripts."""
    problems: list[str] = []
    parse_nodes(nodes, problems)
    assert problems == [f"--nodes must be N or MIN:MAX with 1 <= MIN <= MAX, not {nodes!r}"]
    assert parse_nodes("2:8", []) == (2, 8)
    assert parse_nodes("3", []) == (3, 3)


@pytest.mark.parametrize(
    ("listed", "visible", "count"),
    [
        (8, None, 8),
        (8, "0,1,2,3,4,5,6,7", 8),
        (8, "4,5", 2),
        (2, "0,1", 2),
        (8, "GPU-5a,GPU-9b,GPU-7c", 3),
        (8, "", 0),
        (0, None, 0),
    ],
    ids=["by node", "by node, named", "by task of all", "by task, others hidden", "by uuid", "of CPUs", "no driver"],
)
def test_the_gpus_of_a_node_are_those_that_its_task_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: int, visible: str | None, count: int
) -> None:
    """With --gpus-per-task Slurm names the task's own, and cgroups may hide others; with --gpus-per-node all are."""
    if listed:
        said = "\n".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-{i})\n  MIG 1g.10gb (UUID: MIG-{i})" for i in range(listed))
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count
    assert resolved(Flags(), SLURM, count_gpus()).ranks == max(1, count)


def test_nodes_of_one_job_may_have_different_numbers_of_gpus() -> None:
    """Each starts its own ranks; what they have to agree about is the same."""
    plans = [
        resolved(Flags(), {**SLURM, "SLURM_NODEID": f"{node}"}, num_gpus) for node, num_gpus in enumerate((8, 8, 4, 0))
    ]
    assert [plan.ranks for plan in plans] == [8, 8, 4, 1]
    assert [plan.is_etcd_host for plan in plans] == [True, False, False, False]
    agreed = {(plan.min_nodes, plan.max_nodes, plan.run_id, plan.etcd_address) for plan in plans}
    assert agreed == {(1, 4, "77", "gpu07")}


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_nobody_trains_alone_where_others_were_started(name: str) -> None:
    """A plain PyTorchJob, or mpirun, starts a process a node, and says only how many there are."""
    with pytest.raises(ConfigError, match=f"{name}=3 says"):
        resolved(Flags(), {name: "3"})
    assert resolved(Flags(nodes="1"), {name: "3"}).max_nodes == 1, "asked for"
    assert resolved(Flags(), {name: "1"}).max_nodes == 1


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("a1", "a1"), ("a1,b[2-3]", "a1"), ("gpu[07-10,12]", "gpu07"), ("r1n[3,5]", "r1n3"), ("x[1-2],y4", "x1")],
)
def test_the_first_host_of_a_list(nodelist: str, first: str) -> None:
    """Slurm's short forms name the same host first as `scontrol show hostnames`."""
    assert first_host(nodelist) == first


def test_all_mistakes_are_reported_at_once() -> None:
    """Nodes, recovery, endpoint and name: one error with everything that is wrong."""
    with pytest.raises(ConfigError) as raised:
        resolved(Flags(nodes="0", recovery="life"), {"PET_NPROC_PER_NODE": "many"})
    assert len(raised.value.problems) == 3
    with pytest.raises(ConfigError) as raised:
        resolved(Flags(nodes="2"), {})
    assert [problem.split()[0] for problem in raised.value.problems] == ["--endpoint", "--id"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (Flags(ranks=0), "--ranks must be at least 1, not 0"),
        (Flags(ranks=-1), "--ranks must be at least 1, not -1"),
        (Flags(max_restarts=-1), "--max-restarts must be at least 0, not -1"),
        (Flags(timeout_s=-1.0), "--timeout-s must be a number of seconds"),
        (Flags(ttl_s=math.inf), "--ttl-s must be a number of seconds"),
        (Flags(grace_s=math.nan), "--grace-s must be a number of seconds"),
        (Flags(grace_s=-1.0), "--grace-s must be a number of seconds"),
        (Flags(grace_s=1e10), "--grace-s must be a number of seconds"),  # no timer takes it, when SIGTERM comes
    ],
)
def test_numbers_out_of_range_are_refused(flags: Flags, message: str) -> None:
    """A count of ranks below 1 is refused, and so is an invalid time before it reaches etcd."""
    with pytest.raises(ConfigError, match=message):
        resolved(flags, {}, num_gpus=8)


@pytest.mark.parametrize("run_id", ["a/b", "x" * 300, "", "..", ".", "a\tb", " a", "b ", " ", "a\x07"])
def test_an_id_that_is_no_part_of_a_key_is_refused(run_id: str) -> None:
    """Given by a flag or by torchrun's variables; an empty one would be shared by jobs."""
    for flags, environ in ((Flags(run_id=run_id), {}), (Flags(), {**KUBERNETES, "PET_RDZV_ID": run_id})):
        if environ and not run_id:
            continue  # not set
        with pytest.raises(ConfigError, match=r"the run id .* cannot be used"):
            resolved(flags, environ)


def test_a_component_of_a_heterogeneous_job_is_refused() -> None:
    """Unless it is given what Slurm says of its own component alone."""
    environ = {**SLURM, "SLURM_HET_SIZE": "2"}
    with pytest.raises(ConfigError, match="SLURM_HET_SIZE=2"):
        resolved(Flags(), environ)
    assert resolved(Flags(nodes="1:8", endpoint="e:1", run_id="h"), environ).max_nodes == 8
