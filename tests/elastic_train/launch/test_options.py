"""What the launcher takes from flags, Kubernetes and Slurm."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from elastic_train.errors import ConfigError
from elastic_train.launch.options import Flags, Launch, first_host, resolve

SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "gpu[07-10]", "SLURM_NODEID": "2"}


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
    assert resolved(Flags(), {**SLURM, "SLURM_NODEID": "0"}).is_etcd_host


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
        (Flags(ttl_s=math.inf), "--ttl-s must be a number of seconds"),
        (Flags(grace_s=math.nan), "--grace-s must be a number of seconds"),
        (Flags(grace_s=-1.0), "--grace-s must be a number of seconds"),
    ],
)
def test_numbers_out_of_range_are_refused(flags: Flags, message: str) -> None:
    """A count of ranks below 1 is refused, and so is an invalid time before it reaches etcd."""
    with pytest.raises(ConfigError, match=message):
        resolved(flags, {}, num_gpus=8)
