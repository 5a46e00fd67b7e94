"""What a recovery asks of etcd: real members without training, four a node, of which the last is killed.

Only a few members are told who is ready, so events grow with the ranks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import threading
import time
import urllib.request
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import NamedTuple

from rendezvous.agent.identity import IdentityPort
from rendezvous.etcd.options import etcd_options
from rendezvous.etcd.server import EtcdServer
from rendezvous.etcd.store import EtcdStore
from rendezvous.membership.own_record import Place
from rendezvous.membership.participant import Participant
from rendezvous.membership.reachability import Reachability
from rendezvous.membership.rules.admission import Policy

RANKS = 4
"""Per node."""
TTL_S = 10.0
TIMEOUT_S = 120.0
QUIET_S = 1.0
"""After a world has formed, and after a recovery, so that every member has been told."""
LOCAL = "127.0.0.1"
_COUNTERS = {
    "writes": ("etcd_mvcc_put_total", "etcd_mvcc_delete_total"),
    "events": ("etcd_debugging_mvcc_events_total",),
    "messages": ("grpc_server_msg_sent_total",),
    "bytes": ("etcd_network_client_grpc_sent_bytes_total",),
}


class Node(NamedTuple):
    """A process with a node's members: each word to it is answered with a member's core seconds for the next world."""

    process: multiprocessing.process.BaseProcess
    pipe: Pipe


def load_of(size: int) -> dict[str, float]:
    """Return what a recovery of so many ranks took: keys written, events, etcd's messages, bytes and core seconds.

    `member_s` are the core seconds of a survivor's membership.
    """
    with EtcdServer() as server, contextlib.ExitStack() as stack:
        nodes = [_start(server.endpoint, number, size // RANKS, stack) for number in range(size // RANKS)]
        _form(nodes)
        before, cpu_before = _counted(server), _cpu_s(server)
        killed = nodes.pop()
        killed.process.kill()
        killed.process.join()
        seconds = _form(nodes)
        after, cpu_after = _counted(server), _cpu_s(server)
    found = {name: after[name] - before[name] for name in after}
    return {**found, "etcd_s": round(cpu_after - cpu_before, 4), "member_s": round(sum(seconds) / len(seconds), 5)}


def _start(endpoint: str, number: int, num_nodes: int, stack: contextlib.ExitStack) -> Node:
    """Start a node; a gRPC client cannot be forked."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_be_node, args=(endpoint, f"node-{number}", num_nodes, theirs), daemon=True)
    process.start()
    stack.callback(process.join)
    stack.callback(process.kill)
    return Node(process, ours)


def _form(nodes: list[Node]) -> list[float]:
    """Let all nodes leave their world and wait for the next; return a member's core seconds on each."""
    for node in nodes:
        node.pipe.send("next")
    found = [float(node.pipe.recv()) for node in nodes]
    time.sleep(QUIET_S)
    return found


def _be_node(endpoint: str, name: str, num_nodes: int, pipe: Pipe) -> None:
    port = IdentityPort(LOCAL, name)
    members = [_join(endpoint, name, number, num_nodes, port.endpoint) for number in range(RANKS)]
    while pipe.recv():
        started = time.process_time()
        threads = [threading.Thread(target=_enter, args=member) for member in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pipe.send((time.process_time() - started) / RANKS)


def _join(endpoint: str, node: str, number: int, num_nodes: int, agent: str) -> tuple[Participant, Reachability]:
    place = Place("host", LOCAL, 1, f"{node}.{number}", node, RANKS, agent)
    policy = Policy(1, num_nodes, TIMEOUT_S)
    member = Participant(EtcdStore(etcd_options([endpoint], {})), "load", policy, place, ttl_s=TTL_S)
    reach = Reachability(member)
    reach.look_ahead()
    return member, reach


def _enter(member: Participant, reach: Reachability) -> None:
    member.join(TIMEOUT_S)
    member.next_world(lambda _: (LOCAL, 1), TIMEOUT_S)
    reach.notice()


def _counted(server: EtcdServer) -> dict[str, float]:
    """Return etcd's counters."""
    with urllib.request.urlopen(f"http://{server.endpoint}/metrics", timeout=10.0) as answer:
        lines = answer.read().decode().splitlines()
    values = [(re.split(r"[{ ]", line)[0], float(line.rsplit(" ", 1)[1])) for line in lines if not line.startswith("#")]
    return {name: sum(value for key, value in values if key in keys) for name, keys in _COUNTERS.items()}


def _cpu_s(server: EtcdServer) -> float:
    """Return the core seconds of etcd's threads so far."""
    threads = Path(f"/proc/{server.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
