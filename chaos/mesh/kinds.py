"""Kinds of fault, one by one: the Chaos Mesh object that does the same in a cluster, or why there is none.

A node is a pod. Chaos Mesh works on pods, containers and volumes: it sees no rank, no step, no leader, no failpoint.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from chaos.mesh.models import (
    Chaos,
    CPUStressor,
    Delay,
    IOChaos,
    Labels,
    Loss,
    Mode,
    NetworkChaos,
    PodChaos,
    Selector,
    StressChaos,
    Stressors,
    Target,
    TimeChaos,
)

GRACE_S = 60
"""A pod that is told to stop has this long to commit, as Kubernetes' own drains give."""
SLOW, CLOCK_JUMP, LATENCY, SHARE = 8, "-300s", "500ms", 20
"""CPU workers beside a slowed pod's own; what a clock is set back by; how late packets are; percent of what fails."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """How a job's parts are found: its namespace, and the labels of its pods, of one pod, and of etcd's."""

    namespace: str
    pods: Labels
    index_label: str
    etcd: Labels
    volume: str
    """Where the checkpoints' volume is mounted in the pods."""

    def selector(self, labels: Labels) -> Selector:
        return Selector(namespaces=(self.namespace,), label_selectors=labels)

    def target(self, labels: Labels) -> Target:
        return Target(selector=self.selector(labels), mode="all")


@dataclass(frozen=True, slots=True)
class Aim:
    """The pods that a fault hits."""

    labels: Labels
    mode: Mode
    value: str | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Why Chaos Mesh cannot do it, and what to do instead."""

    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.why}; {self.instead}"


Make = Callable[[Cluster, Aim, bool], Chaos]
"""From cluster, aim, and whether the fault is undone after a while, to the object."""


def _pods(action: str, grace_s: int | None = None) -> Make:
    def make(cluster: Cluster, aim: Aim, is_undone: bool) -> Chaos:
        # A pod that is killed comes back at once; one that fails stays away as long as the fault lasts.
        does = "pod-failure" if is_undone and action == "pod-kill" and grace_s == 0 else action
        grace = grace_s if does == "pod-kill" else None
        return PodChaos.model_validate({**_aimed(cluster, aim), "action": does, "grace_period": grace})

    return make


def _etcd(action: str, mode: Mode) -> Make:
    def make(cluster: Cluster, aim: Aim, is_undone: bool) -> Chaos:
        return _pods(action, 0 if action == "pod-kill" else None)(cluster, Aim(cluster.etcd, mode), is_undone)

    return make


def _cut(direction: str, *, from_etcd: bool = False, from_pods: bool = False) -> Make:
    def make(cluster: Cluster, aim: Aim, is_undone: bool) -> Chaos:
        labels = cluster.etcd if from_etcd else cluster.pods
        target = cluster.target(labels) if from_etcd or from_pods else None
        what = {"action": "partition", "direction": direction, "target": target}
        return NetworkChaos.model_validate({**_aimed(cluster, aim), **what})

    return make


def _late(*, to_etcd: bool) -> Make:
    def make(cluster: Cluster, aim: Aim, is_undone: bool) -> Chaos:
        target = cluster.target(cluster.etcd if to_etcd else cluster.pods)
        what = {"action": "delay", "direction": "both", "target": target, "delay": Delay(latency=LATENCY)}
        return NetworkChaos.model_validate({**_aimed(cluster, aim), **what})

    return make


def _lossy(cluster: Cluster, aim: Aim, is_undone: bool) -> Chaos:
    what = {"action": "loss", "direction": "both", "target": cluster.target(cluster.pods)}
    return NetworkChaos.model_validate({**_aimed(cluster, aim), **what, "loss": Loss(loss=str(SHARE))})


def _volume(**what: object) -> Make:
    def make(cluster: Cluster, aim: Aim, is_undone: bool) -> Chaos:
        everybody = Aim(cluster.pods, "all")
        return IOChaos.model_validate({**_aimed(cluster, everybody), "volume_path": cluster.volume, **what})

    return make


def _clock(cluster: Cluster, aim: Aim, is_undone: bool) -> Chaos:
    return TimeChaos.model_validate({**_aimed(cluster, aim), "time_offset": CLOCK_JUMP})


def _slow(cluster: Cluster, aim: Aim, is_undone: bool) -> Chaos:
    stressors = Stressors(cpu=CPUStressor(workers=SLOW))
    return StressChaos.model_validate({**_aimed(cluster, aim), "stressors": stressors})


def _aimed(cluster: Cluster, aim: Aim) -> dict[str, object]:
    return {"selector": cluster.selector(aim.labels), "mode": aim.mode, "value": aim.value}


_ONE_RANK = "Chaos Mesh kills pods and containers, not one rank of them"
_FROZEN = "Chaos Mesh stops no process without ending it"
_LEASES = "Chaos Mesh does not speak to etcd"
_S3 = "Chaos Mesh does not speak S3"
_FILES = "Chaos Mesh fails and delays what a pod reads and writes, but changes no file that lies there"
_POINTS = "Chaos Mesh knows no failpoints"
_CONTROLLERS = "how many pods there are is their controller's to say"
_HERE, _SIMULATED = "use `elastic-chaos run`", "use `elastic-chaos sim`"

EMITTED: Mapping[str, Make] = {
    "kill_node": _pods("pod-kill", 0),
    "kill_job": _pods("pod-kill", 0),
    "kill_rack": _pods("pod-kill", 0),
    "stop_node": _pods("pod-kill", GRACE_S),
    "slow_worker": _slow,
    "cut_off_etcd": _cut("both", from_etcd=True),
    "lose_requests": _cut("to", from_etcd=True),
    "lose_answers": _cut("from", from_etcd=True),
    "slow_etcd": _late(to_etcd=True),
    "cut_node": _cut("to"),
    "cut_link": _cut("both", from_pods=True),
    "cut_one_way": _cut("to", from_pods=True),
    "sever_link": _cut("both", from_pods=True),
    "slow_network": _late(to_etcd=False),
    "lose_packets": _lossy,
    "kill_etcd_member": _etcd("pod-kill", "one"),
    "etcd_outage": _etcd("pod-failure", "all"),
    "jump_clock": _clock,
    "storage_full": _volume(action="fault", errno=errno.ENOSPC, methods=("create", "write", "mkdir")),
    "storage_outage": _volume(action="fault", errno=errno.EIO),
    "storage_errors": _volume(action="fault", errno=errno.EIO, percent=SHARE),
    "storage_slow": _volume(action="latency", delay="1s"),
    "slow_sync": _volume(action="latency", delay="1s", methods=("fsync", "flush")),
}
REFUSED: Mapping[str, Refused] = {
    "kill_worker": Refused(_ONE_RANK, "kill_node kills the pod"),
    "freeze_worker": Refused(_FROZEN, "cut_node makes a node silent, slow_worker slow"),
    "freeze_node": Refused(_FROZEN, "cut_node makes a node silent"),
    "hang_worker": Refused(_FROZEN, "cut_node makes a node silent, slow_worker slow"),
    "start_node": Refused("a pod that was killed is started by its Job or StatefulSet", "leave the line out"),
    "lose_node": Refused("it is two faults in Chaos Mesh", "write cut_node, and kill_node after_s: 0"),
    "scale_down": Refused(_CONTROLLERS, "change the job's parallelism or the set's replicas"),
    "flap_node": Refused("it is several faults in Chaos Mesh", "write kill_node as often, after_s apart"),
    "start_twin": Refused("Chaos Mesh starts no job", "apply the job's manifest once more, under another name"),
    "kill_etcd_leader": Refused("Chaos Mesh does not know which member leads", "kill_etcd_member kills any of them"),
    "freeze_etcd_member": Refused(_FROZEN, "kill_etcd_member kills one"),
    "lose_etcd_data": Refused(_FILES, "delete etcd's volumes while etcd_outage lasts"),
    "lose_lease": Refused(_LEASES, "cut_off_etcd for longer than a lease ends it"),
    "break_watch": Refused(_LEASES, f"lose_answers comes nearest, or {_SIMULATED}"),
    "storage_lossy": Refused(_S3, f"storage_errors fails a volume, or {_SIMULATED}"),
    **{
        kind: Refused(_S3, f"storage_errors fails a volume, or {_HERE}")
        for kind in ("storage_conflict", "storage_taken")
    },
    "tear_write": Refused(_FILES, _SIMULATED),
    **{kind: Refused(_FILES, _HERE) for kind in ("flip_bit", "truncate_file", "delete_file", "bad_row_group")},
    **{kind: Refused(_POINTS, _HERE) for kind in ("kill", "stop", "raise", "hang", "hang-native", "slow")},
    "tracker_outage": Refused("the tracker is no part of the job's pods", f"kill its pod by hand, or {_HERE}"),
    "full": Refused(_POINTS, "storage_full fails every write for a while"),
    "eio": Refused(_POINTS, "storage_outage fails everything for a while"),
}


def maker_of(kind: str) -> Make | Refused:
    """Return how a kind is made, or why it is refused; a kind of which nothing is known is refused, too."""
    known = EMITTED.get(kind) or REFUSED.get(kind)
    return known or Refused(f"no Chaos Mesh object is known for '{kind}'", _HERE)
