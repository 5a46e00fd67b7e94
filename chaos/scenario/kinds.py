"""The kinds of fault by name: one vocabulary for scenarios, executors and the judge.

A kind targets a worker, a node (agent and workers), etcd, or checkpoint storage; at a failpoint it hits the process
that reaches it. Some always end a world that they hit; the others may be ridden out, and prove only that the job
continues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Aim = Literal["worker", "node", "job", "etcd", "storage", "tracker", "data", "point"]
Lasting = Literal["never", "may", "must"]
Need = Literal["s3", "tracker", "own_data", "freezing_disk", "tls", "orders"]
"""Resources that a kind may require of a scenario, named as in its file."""
Passage = Literal["proxy", "cable", "relay"]
"""Device in a node's traffic that a real run uses to disturb it: a proxy before etcd, a separate cable for the node, or
a cable with a relay, which can delay and drop packets."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind: its target, whether `for_s` undoes it, whether it must end a world, and where it is possible."""

    name: str
    meaning: str
    aim: Aim
    lasts: Lasting = "must"
    ends_world: bool = False
    local: bool = True
    sim: bool = True
    slurm: bool = False
    """True if it can be done to a job on Slurm (`executor: slurm`)."""
    needs: Need | None = None
    through: Passage | None = None
    """Place where a real run disturbs a node's traffic."""
    damages: bool = False
    """True if it damages intact commits."""
    cuts_off: bool = False
    """True if an agent may be without etcd for so long that it gives up."""
    parts: bool = False
    """True if a node and the others cannot reach each other while both live: of two nodes, either may be left out."""
    crowds: bool = False
    """True if there are more nodes than seats while it lasts: any of them may replace a member in the next world."""
    leaves_alive: bool = False
    """True if it ends a world but no process: a node joins, or a member counts as lost."""
    is_drawn: bool = True
    """True if a soak draws it; otherwise it needs a job to itself, as other faults may hide or undo its effect."""


_LEAVING_AT_SLURMS_WISH: tuple[tuple[str, str, Lasting], ...] = (
    ("preempt_job", "an urgent job takes all nodes of a Slurm job, and gives them back after for_s", "must"),
    ("requeue_job", "`scontrol requeue`: a Slurm job is asked to leave, and starts again", "never"),
    ("hold_job", "`scontrol requeuehold`: a Slurm job is asked to leave, and starts again after for_s", "must"),
    ("end_time_limit", "the time limit of a Slurm job is near: it is asked to leave, and starts again", "never"),
)
_ALL = (
    Kind(
        "kill_worker", "SIGKILL to one worker; its agent starts another", "worker", "never", ends_world=True, slurm=True
    ),
    Kind(
        "kill_node",
        "SIGKILL to agent and workers at once; started again after for_s. On Slurm: its machine loses power",
        "node",
        "may",
        ends_world=True,
        slurm=True,
    ),
    Kind("kill_job", "SIGKILL to all nodes at once, started again after for_s", "node", "must", ends_world=True),
    *(
        Kind(name, meaning, "job", lasts, ends_world=True, local=False, sim=False, slurm=True)
        for name, meaning, lasts in _LEAVING_AT_SLURMS_WISH
    ),
    Kind(
        "preempt_node",
        "an urgent job takes the node of one job of an array on Slurm, and gives it back after for_s",
        "node",
        ends_world=True,
        local=False,
        sim=False,
        slurm=True,
    ),
    Kind(
        "drain_node",
        "Slurm gives a node to no other job for for_s; the job on it continues",
        "node",
        local=False,
        sim=False,
        slurm=True,
    ),
    Kind("lose_node", "the machine is gone: its ports do not even refuse", "node", ends_world=True, local=False),
    Kind(
        "private_storage",
        "a node comes back without its mount of the storage, and sees a folder of its own for for_s",
        "node",
        local=False,
    ),
    Kind("readonly_dir", "a node sees the storage of checkpoints and cannot write there", "node"),
    Kind("other_limits", "a node comes back with another --nnodes for for_s", "node", local=False),
    Kind("other_code", "a node comes back with another version of the package for for_s", "node", local=False),
    Kind("wrong_address", "a node comes back with an address that refuses everybody for for_s", "node", local=False),
    Kind("unfit_node", "a node comes back with a processor that computes wrongly for for_s", "node", needs="orders"),
    Kind(
        "stop_node",
        "SIGTERM to the agent; started again after for_s. Of an array on Slurm: its job is cancelled, another joins",
        "node",
        "may",
        ends_world=True,
        slurm=True,
    ),
    Kind(
        "start_node",
        "a node that was lost comes back. On Slurm: one joins by a job of its own",
        "node",
        "never",
        ends_world=True,
        sim=False,
        slurm=True,
        leaves_alive=True,
    ),
    Kind(
        "start_twin", "the same job is launched a second time under the same run id, then killed", "node", crowds=True
    ),
    Kind("twin_dir", "another job, with a run id of its own, is started in the job's folder", "node", is_drawn=False),
    Kind("kill_rack", "kill_node for several nodes", "node", ends_world=True, local=False),
    Kind("flap_node", "a node is lost and comes back, again and again", "node", ends_world=True, local=False),
    Kind("scale_down", "half of the nodes leave, and come back much later", "node", ends_world=True, local=False),
    Kind("hang_worker", "a worker waits for ever", "worker", local=False),
    Kind("freeze_worker", "SIGSTOP to one worker, SIGCONT after for_s", "worker"),
    Kind("freeze_node", "SIGSTOP to agent and workers, SIGCONT after for_s", "node"),
    Kind(
        "freeze_agent",
        "SIGSTOP to the agent alone, SIGCONT after for_s: its node does not answer, and its workers train on",
        "node",
        cuts_off=True,
    ),
    Kind("freeze_standby", "SIGSTOP to a node's standby process, SIGCONT after for_s", "node", sim=False),
    Kind("kill_standby", "SIGKILL to a node's standby process, on which no worker depends", "node", "never", sim=False),
    Kind("slow_worker", "one worker gets a fraction of its CPU time", "worker"),
    Kind("slow_cpu", "a node's workers share one core with busy programs", "node", sim=False),
    Kind(
        "memory_pressure",
        "a program takes a part of the memory that is left, and writes to all of it, over and over",
        "node",
        sim=False,
    ),
    Kind("cap_fds", "a worker may open no more files and connections than it has open", "worker", sim=False),
    Kind(
        "flip_memory",
        "a bit of a weight flips in the memory of one worker",
        "worker",
        "never",
        ends_world=True,
        is_drawn=False,
    ),
    Kind(
        "flip_gradient",
        "a bit of the gradient of one worker's next lane flips; audits find that (run.audit_lanes)",
        "worker",
        "never",
        sim=False,
        is_drawn=False,
    ),
    Kind("nan_loss", "the loss of one worker's next lane is not a number", "worker", "never", is_drawn=False),
    Kind("cut_off_etcd", "a node's requests and etcd's answers are lost", "node", through="proxy", cuts_off=True),
    Kind("lose_requests", "a node's requests do not reach etcd", "node", through="proxy", cuts_off=True),
    Kind("lose_answers", "etcd's answers do not reach a node", "node", through="proxy", cuts_off=True),
    Kind("slow_etcd", "everything between a node and etcd is delayed", "node", through="proxy", cuts_off=True),
    Kind("slow_network", "what nodes send each other is delayed", "node", through="relay"),
    Kind(
        "slow_link",
        "packets between nodes are some milliseconds late: the job continues, slowly",
        "node",
        sim=False,
        through="relay",
    ),
    Kind("lose_packets", "some packets between nodes are lost", "node", through="relay"),
    Kind("cut_node", "a node is cut off the network, etcd included", "node", sim=False, through="cable", cuts_off=True),
    Kind("cut_link", "a node and the others do not reach each other; all reach etcd", "node", through="cable"),
    Kind("cut_one_way", "what a node sends to others is lost; what they send arrives", "node", through="cable"),
    Kind(
        "refuse_address",
        "what a node sends to others is refused, and theirs does not arrive",
        "node",
        through="cable",
        parts=True,
    ),
    Kind("same_address", "a node's address leads every machine to itself", "node", local=False, parts=True),
    Kind(
        "hosts_file",
        "a node's hosts file gives its own name a loopback address, as Debian's does",
        "node",
        sim=False,
        through="cable",
    ),
    Kind("sever_link", "cut_link, for longer than worlds without one of the nodes take to form", "node", local=False),
    Kind("block_ports", "nodes say who they are, but no world's connections are let through", "node", local=False),
    Kind("kill_etcd_member", "SIGKILL to a member of etcd that does not lead", "etcd"),
    Kind("kill_etcd_leader", "SIGKILL to the member of etcd that leads", "etcd"),
    Kind("freeze_etcd_member", "SIGSTOP to a member of etcd", "etcd", sim=False),
    Kind("etcd_outage", "all members of etcd are down, and come back with their data", "etcd"),
    Kind("lose_etcd_data", "all members of etcd are down, and come back without their data", "etcd"),
    Kind("etcd_refuses", "etcd answers and refuses: an alarm (NOSPACE, CORRUPT), or no user may log in", "etcd"),
    Kind("alien_record", "an unreadable record is written below the job's prefix", "etcd", "never"),
    Kind(
        "rotate_cert",
        "etcd's certificates and its clients' are renewed by another authority, and etcd starts again with them",
        "etcd",
        "never",
        sim=False,
        needs="tls",
    ),
    Kind(
        "lose_lease",
        "etcd ends the lease of a worker that renewed it in time",
        "worker",
        "never",
        ends_world=True,
        leaves_alive=True,
    ),
    Kind("break_watch", "a watch falls silent", "worker", "never", local=False),
    Kind("skew_clocks", "the clock of a node is seconds ahead of the others', or late", "node", "never", local=False),
    Kind("jump_clock", "the wall clock of a node is set", "node", local=False),
    Kind("storage_full", "no space is left for checkpoints", "storage"),
    Kind(
        "freeze_fs",
        "the file system of commits' files and of metrics takes no writes, as one whose server is away",
        "storage",
        sim=False,
        needs="freezing_disk",
    ),
    Kind(
        "slow_disk",
        "the file system of commits' files and of metrics takes writes for a fifth of the time",
        "storage",
        sim=False,
        needs="freezing_disk",
    ),
    Kind("storage_outage", "the storage of checkpoints does not answer", "storage", local=False),
    Kind("storage_slow", "the storage of checkpoints is slow", "storage", needs="s3"),
    Kind("storage_lossy", "answers of the storage are lost, requests arrive late", "storage", local=False),
    Kind("storage_errors", "some requests to the storage fail", "storage", needs="s3"),
    Kind("storage_conflict", "the storage answers a create with a conflict", "storage", needs="s3"),
    Kind("storage_taken", "the storage claims that a free name is taken", "storage", needs="s3"),
    Kind("stale_listing", "listings of the storage lack what others have written last", "storage", local=False),
    Kind("slow_sync", "syncing bytes to disk takes long", "storage", local=False),
    Kind("tear_write", "a file is left half written", "storage", local=False, damages=True),
    Kind("flip_bit", "a bit of the newest commit flips", "storage", "never", damages=True),
    Kind("truncate_file", "a file of the newest commit loses its end", "storage", "never", damages=True),
    Kind("delete_file", "a file of the newest commit is deleted", "storage", "never", damages=True),
    Kind("tracker_outage", "the tracker is killed or frozen, and comes back", "tracker", needs="tracker"),
    Kind("bad_row_group", "a row group of the training set becomes unreadable", "data", "never", needs="own_data"),
    Kind(
        "data_outage",
        "the storage of the training set is away for for_s",
        "data",
        sim=False,
        needs="own_data",
        is_drawn=False,
    ),
    Kind(
        "flip_data",
        "bits of a row group of the training set flip: it is read without an error, with other values",
        "data",
        "never",
        sim=False,
        needs="own_data",
    ),
    Kind("kill", "SIGKILL to the process that comes there", "point", "never", ends_world=True),
    Kind("stop", "SIGSTOP to the process that comes there, SIGCONT after for_s", "point"),
    Kind("raise", "an unexpected exception", "point", "never", ends_world=True),
    Kind("oom", "the device has no memory left", "point", "never", ends_world=True, sim=False),
    Kind("hang", "an endless wait", "point", "never", sim=False),
    Kind("hang-native", "the same, holding the interpreter's lock", "point", "never", sim=False),
    Kind("slow", "a second's wait", "point", "never", sim=False),
    Kind("full", "OSError: no space left on device", "point", "never", sim=False),
    Kind("eio", "OSError: input/output error", "point", "never", sim=False),
)
KINDS = {kind.name: kind for kind in _ALL}
LOCAL = tuple(kind.name for kind in _ALL if kind.local)
PROXIED = tuple(kind.name for kind in _ALL if kind.through == "proxy")
RELAYED = tuple(kind.name for kind in _ALL if kind.through == "relay")
FREEZING = tuple(kind.name for kind in _ALL if kind.needs == "freezing_disk")
CABLED = tuple(kind.name for kind in _ALL if kind.through in ("cable", "relay"))
ALIEN_RECORDS = (
    ("world", "garbage"),
    ("failure", "[]"),
    ("closed", "{}"),
    ("over", "garbage"),
    ("notes", "5"),
    ("members/alien", "garbage"),
    ("members/alien-newer", '{"format": 2}'),
)
"""Keys below the job's prefix that `alien_record` writes, with texts that this version cannot read."""
ALIENS = tuple(f"/{key}" for key, _ in ALIEN_RECORDS if key.startswith("members/"))
"""Suffixes of member keys that nobody in the job wrote, hence nobody deletes."""
SPARES_OTHERS = (
    *("private_storage", "other_limits", "other_code", "wrong_address", "unfit_node", "hosts_file"),
    *("start_node", "start_twin", "twin_dir", "alien_record", "skew_clocks", "freeze_standby", "kill_standby"),
)
"""Kinds with one bad or additional node: the others keep all they need, so the cost to them must be next to nothing.

Not among them: kinds that end, freeze, slow or cut off a member, whose work is lost and noticed only when its lease
expires; and kinds that affect etcd, storage or data, which all nodes use.
"""
BY_TASKS = ("flip_memory", "flip_gradient", "nan_loss", "unfit_node")
"""Kinds that a task of `chaos.tasks` does to its own process, as they are impossible from outside."""
IN_LIVE_JOBS = ("unfit_node",)
"""Kinds that `restart` mode does not notice: its workers start in a sealed world."""
IN_PLAIN = (*(kind.name for kind in _ALL if kind.aim == "etcd" and not kind.needs), "lose_lease")
"""Kinds for which the executor talks to etcd in plain text."""
ADVICE = {"nothing": 0, "start": 75, "leave out": 71, "fix": 65}
"""Advice of `elastic-train status --why`, with its exit code."""
_TO_FIX = ("raise", "oom")
"""Kinds that would recur after a restart, as nobody knows that they were planted."""
_NOT_ASKED = ("flip_memory",)
"""Ranks vote on differing weights: the one that was hit need not end first."""
ON_DISK = ("full", "eio")
"""Only at failpoint `sync`, where an operating system would report them."""


_UNKNOWN = Kind("", "", "worker", ends_world=True, leaves_alive=True)


def kind_of(kind: object) -> Kind:
    """Return a kind by name, with or without a failpoint; an unknown one ends worlds, but no process."""
    return KINDS.get(str(kind).partition("@")[0], _UNKNOWN)


def asks_all_to_leave(kind: object) -> bool:
    """Return True if a kind makes a scheduler ask all nodes of a job to leave."""
    return kind_of(kind).aim == "job" and kind_of(kind).ends_world


def ends_world(kind: object) -> bool:
    """Return True if a kind always ends a world; also for unknown kinds."""
    return kind_of(kind).ends_world


def ends_processes(kind: object) -> bool:
    """Return True if a kind ends the processes that it names; False for unknown kinds."""
    return kind_of(kind).ends_world and not kind_of(kind).leaves_alive


def advised(kind: object) -> str | None:
    """Return the right advice of `status --why` for a job that a kind ended; None if the kind ends no process."""
    name = kind_of(kind).name
    if not ends_processes(kind) or name in _NOT_ASKED:
        return None
    return "fix" if name in _TO_FIX else "start"


def is_over_at_once(kind: object) -> bool:
    """Return True if a kind acts instantly: `for_s` is then how long its target stays away, or unused."""
    known = kind_of(kind)
    return known is not _UNKNOWN and (known.ends_world or known.lasts == "never")


def affects_all(kind: object) -> bool:
    """Return True if a kind affects all members of a world: through etcd or storage, or by lack of seats."""
    known = kind_of(kind)
    return known.crowds or (known.aim in ("etcd", "storage") and not known.damages)


def spares_others(kind: object) -> bool:
    """Return True if a kind affects or adds one node only, and takes nothing from the others."""
    return kind_of(kind).name in SPARES_OTHERS
