"""`elastic-train top --etcd` and `elastic-train leave`: the jobs that etcd knows, and requests to their nodes.

A request is a key below the job's prefix, on a lease that ends by itself. The workers of the node see it in the view of
the job that they follow anyway, and leave as if they had been sent SIGUSR1: after a step, with a commit if all leave.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated
from urllib.parse import unquote

from cyclopts import Parameter
from rich.console import Group
from rich.live import Live
from rich.text import Text

from elastic_train.cli.output import Json, console, narrow_table, print_json, print_table, print_text
from elastic_train.errors import ConfigError, TooFewNodesError, translated
from elastic_train.launch.options import TO_ETCD
from elastic_train.launch.schedulers import Found, said_to_torchrun
from elastic_train.system.wording import counted, did_you_mean, nearest
from rendezvous.etcd.options import EtcdOptions, etcd_options
from rendezvous.etcd.store import EtcdStore
from rendezvous.membership.records import JOBS, REQUEST_S, Keys, Member, View, read_view
from rendezvous.membership.store import MOST_GUARDS, Put, Snapshot, Store

Etcd = Annotated[str | None, Parameter(name="--etcd")]
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """One job."""

    id: str
    state: str
    """training, waiting (members without a world of all), done, or gone (nothing of it is alive)."""
    nodes: int
    workers: int
    world: int
    term: int
    commit: str | None


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a job: `ranks` are those that its workers have in the present world."""

    node: str
    host: str
    address: str
    workers: int
    ranks: tuple[int, ...]
    is_leaving: bool
    missed_by: int
    """Number of members that cannot reach it."""

    @property
    def plain_host(self) -> str:
        """The machine's own name, without the digits that tell machines of one name apart."""
        return self.host.rpartition("-")[0]


def etcd_of(flag: str | None, found: Found) -> EtcdOptions | None:
    """Return how etcd is reached, with certificates and user from PET_RDZV_CONF; None if nothing names one.

    Raises ConfigError with all that is wrong with these.
    """
    endpoint = flag or found.endpoint
    conf = {TO_ETCD[name]: value for name, value in found.conf.items() if name in TO_ETCD}
    with translated():
        return None if endpoint is None else etcd_options(endpoint, conf)


def list_jobs(etcd: str | None, *, is_json: bool) -> int:
    """Print the jobs that an etcd knows: state, size, newest commit."""
    with _store(etcd) as store:
        rows = [row_of(run_id, view) for run_id, view in _views(store.get(JOBS))]
    if is_json:
        return print_json([asdict(row) for row in rows])
    if not rows:
        return print_text("no jobs")
    print_table(
        ("job", "state", "nodes", "workers", "world", "term", "newest commit"),
        ([*asdict(row).values()] for row in rows),
    )
    return 0


def show(run_id: str, *, etcd: str | None, is_json: bool) -> int:
    """Show a job's nodes once: host, address, workers, ranks, which are leaving or cannot be reached."""
    with _store(etcd) as store:
        view = _view(store, run_id)
    row, nodes = row_of(run_id, view), nodes_of(view)
    if is_json:
        return print_json({**asdict(row), "members": [asdict(node) for node in nodes]})
    console().print(_drawn(row, nodes))
    return 0


def watch(run_id: str, etcd: str | None, *, is_once: bool, every_s: float) -> int:
    """Show a job's nodes again and again, until it is done or Ctrl-C is pressed; once where nobody looks."""
    terminal = console()
    with _store(etcd) as store:
        view = _view(store, run_id)
        shown = _drawn(row_of(run_id, view), nodes_of(view))
        if is_once or not terminal.is_terminal:
            terminal.print(shown)
            return 0
        with Live(shown, console=terminal, auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
            while view.closed is None:
                time.sleep(every_s)
                view = _view(store, run_id)
                live.update(_drawn(row_of(run_id, view), nodes_of(view)), refresh=True)
    return 0


def _drawn(row: Row, nodes: Sequence[Node]) -> Group:
    world = f"a world of {counted(row.world, 'rank')}"
    head = f"{row.id}: {row.state}, term {row.term}, {world}; newest commit {row.commit or '-'}"
    table = narrow_table("node", "address", "workers", "ranks", "notes")
    hosts = Counter(node.plain_host for node in nodes)
    for node in nodes:
        notes = ["leaving"] * node.is_leaving + [f"{node.missed_by} cannot reach it"] * bool(node.missed_by)
        ranks = ",".join(map(str, node.ranks)) or "-"
        name = node.plain_host if hosts[node.plain_host] == 1 else node.node  # both name it for `leave`
        table.add_row(name, node.address, str(node.workers), ranks, "; ".join(notes))
    return Group(Text(head), table)


def leave(
    run_id: str,
    node: str | None = None,
    *,
    all_: Annotated[bool, Parameter(name="--all", negative="")] = False,
    etcd: Etcd = None,
    wait_s: float = 300.0,
    json_: Json = False,
) -> int:
    """Ask one NODE of the job RUN_ID, or --all, to leave after a step. NODE is its name, or its host.

    The other nodes continue; if all leave, they commit. Launchers of nodes that leave end with 75, upon which a
    scheduler starts them again: to end a job, end it there as well. Exit code 0 once the nodes are gone, 77 if they are
    not within --wait-s seconds.
    """
    if all_ == (node is not None):
        raise ConfigError("name a NODE, or give --all")
    with _store(etcd) as store:
        view = _view(store, run_id)
        nodes = sorted({member.node_id for member in _members(view)}) if node is None else [_named(view, node)]
        return _asked(store, run_id, nodes, wait_s, is_json=json_)


def row_of(run_id: str, view: View) -> Row:
    """Say where a job stands."""
    nodes = {member.node_id for member in view.members}
    is_training = view.is_whole and bool(view.mates)
    state = "done" if view.closed is not None else "training" if is_training else "waiting" if nodes else "gone"
    commit = view.head.commit if view.head is not None else None
    size = len(view.mates) if is_training else 0
    return Row(run_id, state, len(nodes), sum(m.num_workers for m in view.members), size, view.term, commit)


def nodes_of(view: View) -> list[Node]:
    """Return a job's nodes, in the order in which they registered."""
    by_node: dict[str, list[Member]] = defaultdict(list)
    for member in view.members:
        by_node[member.node_id].append(member)
    return [_node(view, name, members) for name, members in by_node.items()]


def _node(view: View, name: str, members: Sequence[Member]) -> Node:
    ranks = [view.world.rank_of(member.id) for member in members] if view.world is not None else []
    return Node(
        node=name,
        host=members[0].host,
        address=members[0].address,
        workers=sum(member.num_workers for member in members),
        ranks=tuple(sorted(rank for rank in ranks if rank is not None)),
        is_leaving=name in view.leaving,
        missed_by=sum(name in member.missed for member in view.members),
    )


@contextlib.contextmanager
def _store(etcd: str | None) -> Iterator[Store]:
    problems: list[str] = []
    options = etcd_of(etcd, said_to_torchrun(os.environ, problems, []))
    if problems:
        raise ConfigError(*problems)
    if options is None:
        raise ConfigError("--etcd HOST:PORT[,HOST:PORT...] is needed: the etcd where the job's nodes meet")
    with translated(), contextlib.closing(EtcdStore(options)) as store:
        yield store


def _views(snapshot: Snapshot) -> Iterator[tuple[str, View]]:
    """Yield each job that has any key, with its view."""
    names = sorted({key.removeprefix(JOBS).partition("/")[0] for key in snapshot.entries})
    for name in names:
        keys = Keys(unquote(name))
        entries = {key: entry for key, entry in snapshot.entries.items() if key.startswith(keys.prefix)}
        yield keys.run_id, read_view(Snapshot(snapshot.revision, entries), keys)


def _view(store: Store, run_id: str) -> View:
    keys = Keys(run_id)
    snapshot = store.get(keys.prefix)
    if not snapshot.entries:
        raise ConfigError(f"etcd knows no job {run_id!r}: `elastic-train top --etcd` lists those that it knows")
    return read_view(snapshot, keys)


def _members(view: View) -> Sequence[Member]:
    """Return a job's members; ConfigError if they are none that follow requests."""
    if any(not member.node for member in view.members):
        raise ConfigError(
            "this job's recovery is `restart`, which cannot be asked to leave through etcd: send SIGTERM to a launcher"
        )
    return view.members


def _named(view: View, node: str) -> str:
    """Return the id of the node that has this name or host; ConfigError if there is none, or several."""
    names = {member.node_id: member.host for member in _members(view)}
    found = [name for name, host in names.items() if node in (name, host) or host.rpartition("-")[0] == node]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{node!r} is {counted(len(found), 'node')}: name one of {', '.join(sorted(found))}")
    known = sorted({*names, *names.values()})
    otherwise = f"; it has {', '.join(known)}" if known else "; it has none"
    raise ConfigError(f"the job has no node {node!r}{did_you_mean(nearest(node, known), otherwise)}")


def _asked(store: Store, run_id: str, nodes: Sequence[str], wait_s: float, *, is_json: bool) -> int:
    """Write the requests, as many in a transaction as etcd takes, and wait until the nodes are gone."""
    keys = Keys(run_id)
    if nodes:
        lease = store.lease(REQUEST_S, renew=False)
        for first in range(0, len(nodes), MOST_GUARDS):
            store.swap({keys.leave(node): Put("", lease) for node in nodes[first : first + MOST_GUARDS]}, {})
    left = _await_gone(store, keys, set(nodes), wait_s)
    if is_json:
        print_json({"asked": list(nodes), "left": sorted(set(nodes) - left), "still_there": sorted(left)})
    elif left:
        print_text(f"still there after {wait_s:.0f} s: {', '.join(sorted(left))}; send SIGTERM to their launchers")
    else:
        print_text(f"{counted(len(nodes), 'node')} left: {', '.join(nodes) or 'none was running'}")
    return TooFewNodesError.exit_code if left else 0


def _await_gone(store: Store, keys: Keys, nodes: set[str], wait_s: float) -> set[str]:
    """Return which nodes still have members after so many seconds."""
    deadline = time.monotonic() + wait_s
    with contextlib.closing(store.watch(keys.members)) as watch:
        snapshot = watch.snapshot
        while True:
            there = nodes & {member.node_id for member in read_view(snapshot, keys).members}
            if not there or time.monotonic() >= deadline:
                return there
            snapshot = watch.wait(snapshot, LOOK_S) or snapshot
