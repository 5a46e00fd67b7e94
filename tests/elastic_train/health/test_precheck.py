"""A node's check before it joins, and the links to the others."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from elastic_train.config.schema import Config
from elastic_train.errors import UnfitError
from elastic_train.health import precheck
from elastic_train.health.links import Link, judged, measured, neighbours
from elastic_train.health.precheck import Proof, begin_proof, tell_mates
from elastic_train.health.result import Finding, Planned, fail, ok, warn
from rendezvous.agent.link_speed import LinkSpeed
from rendezvous.context import LIVE_VARIABLE, LiveContext
from rendezvous.membership.memory_store import MemoryStore
from rendezvous.membership.records import Keys, Member, encode
from rendezvous.membership.store import Put
from rendezvous.membership.worlds import Seat, World
from tests.conftest import PATIENCE_S

CPU = torch.device("cpu")
LIVE = LiveContext(("127.0.0.1:9",), "job", "n", "host", "127.0.0.1", "127.0.0.1:9", 1, 2, 3.0, 1.0, 60.0)


def proof_of(*findings: Finding) -> Proof:
    return Proof({finding.check: Planned(lambda one=finding: [one], "", 10.0) for finding in findings})  # type: ignore[misc]


def never() -> bool:
    return False


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")


def test_what_fails_keeps_a_node_out_and_what_is_unwise_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The error names the machine, what was found, and what to do; it ends the process with a code of its own."""
    with caplog.at_level(logging.WARNING):
        proof_of(ok("memory", "well"), warn("clock", "60 s ahead", "set it")).demand(never)
    assert caplog.messages == ["health check: clock: 60 s ahead; set it"]
    with pytest.raises(UnfitError, match=r"does not join.*core 3 computes wrongly \(mend it\)") as raised:
        proof_of(fail("products", "core 3 computes wrongly", "mend it"), ok("memory", "well")).demand(never)
    assert raised.value.exit_code == 71


def test_who_is_asked_to_leave_waits_for_no_examination() -> None:
    """A memory that takes long does not keep a node that its scheduler takes back."""
    hold = threading.Event()

    def examine() -> Iterable[Finding]:
        hold.wait(PATIENCE_S)
        return []

    Proof({"memory": Planned(examine, "", PATIENCE_S)}).demand(lambda: True)
    hold.set()


def test_only_a_live_job_is_joined_with_a_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, or where the key says no, nothing is examined; otherwise this machine is, and is fit."""
    config = Config.model_validate({"data": {"train": "rows"}, "run": {"dir": str(tmp_path / "run")}})
    assert begin_proof(config, CPU) is None
    monkeypatch.setenv(LIVE_VARIABLE, LIVE.encode())
    unexamined = config.model_copy(update={"run": config.run.model_copy(update={"health_check": False})})
    assert begin_proof(unexamined, CPU) is None
    monkeypatch.setattr(precheck, "LINK_S", 0.0)  # no etcd answers
    proof = begin_proof(config, CPU)
    assert proof is not None
    proof.demand(never)


def test_workers_of_a_node_are_all_fit_or_none_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit one waits for what the others say, and hears it, also when it comes later, in a dead one's place."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")

    def told(rank: int, unfit: str) -> str:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("LOCAL_RANK", str(rank))
            return tell_mates(unfit)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(told, 0, "")
        while not store.check(["health/0"]):
            pass
        assert told(1, "core 1 computes wrongly") == "core 1 computes wrongly"
        assert told(2, "") == "core 1 computes wrongly"
        assert first.result(PATIENCE_S) == "core 1 computes wrongly"


def test_a_mate_that_says_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dead or stopped, which is its agent's affair; so it is without an agent's store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr("elastic_train.health.precheck.WITHIN_S", 0.2)
    for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    assert tell_mates("") == ""
    monkeypatch.delenv("MASTER_PORT")
    assert tell_mates("") == ""
    assert tell_mates("core 1 computes wrongly") == "core 1 computes wrongly"


KEYS = Keys("job")


def member(name: str, node: str) -> Member:
    return Member(id=name, host=f"host-{node}", address="a", num_workers=1, after=0, node=node, agent=f"{node}:7")


def link(host: str, takes: float, gives: float, *others: float) -> Link:
    """Return a link by its megabytes a second."""
    return Link(host, LinkSpeed(1e6 * takes, 1e6 * gives, 2e-4, *(1e6 * one for one in others)))


def test_other_nodes_of_the_standing_world_are_measured_with_one_worker_of_each() -> None:
    store = MemoryStore()
    members = [member(f"{node}-{rank}", node) for node in "abcdef" for rank in range(2)]
    for one in members:
        store.swap({KEYS.member(one.id): Put(encode(one), store.lease(10.0))}, {})
    assert neighbours(store, "job", "e") == [], "no world yet"
    seats = tuple(Seat(one.id, 1) for one in members if one.node != "f")
    store.swap({KEYS.world: Put(encode(World(1, seats, "start", "a", 1, 0.0)), None)}, {})
    found = neighbours(store, "job", "e")
    assert len({one.node for one in found}) == 3 and {one.node for one in found} <= set("abcd")
    assert found == neighbours(store, "job", "e"), "drawn by its name"
    assert {one.node for name in "abcdexyz" for one in neighbours(store, "job", name)} == set("abcde")


class Asked:
    """Measures links as given by node, one after another, and the last one again; None for a node that is busy."""

    def __init__(self, **speeds: list[Link | None]) -> None:
        self._speeds, self.nodes = speeds, list[str]()

    def __call__(self, endpoint: tuple[str, int], node: str) -> LinkSpeed | None:
        assert endpoint == (node, 7)
        self.nodes.append(node)
        left = self._speeds[node]
        found = left.pop(0) if len(left) > 1 else left[0]
        return None if found is None else found.speed


NODES = [member(f"{node}-0", node) for node in "abc"]


def test_as_many_nodes_are_asked_as_are_enough_where_all_is_well() -> None:
    asked = Asked(a=[link("a", 900, 900)], b=[link("b", 800, 900)])
    assert [one.host for one in measured(NODES, 0.1, asked)] == ["host-a", "host-b"]
    assert asked.nodes == ["a", "b"]
    assert len(measured(NODES[:1], 0.1, asked)) == 1 and asked.nodes == ["a", "b", "a"]


def test_a_stall_keeps_nobody_out_and_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several looks at a link the best counts."""
    monkeypatch.setattr("elastic_train.health.links.MEASURING_S", PATIENCE_S)
    asked = Asked(a=[link("a", 0.01, 900), link("a", 900, 0.01), link("a", 700, 700)])
    [found] = measured(NODES[:1], 0.1, asked)
    assert (found.speed.takes, found.speed.gives) == (9e8, 9e8) and asked.nodes == ["a", "a"]


def test_a_link_that_is_slower_than_others_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.health.links.BUSY_S", 0.0)
    monkeypatch.setattr("elastic_train.health.links.MEASURING_S", PATIENCE_S)
    asked = Asked(a=[link("a", 5, 5)], b=[link("b", 900, 900)], c=[None])
    found = measured(NODES, 0.1, asked)
    assert [one.host for one in found] == ["host-a", "host-b"] and asked.nodes == ["a", "b", "c"] * 3
    assert measured(NODES[2:], 0.1, asked) == []


def test_who_is_kept_out_was_looked_at_until_the_time_was_over(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(100))
    monkeypatch.setattr("elastic_train.health.links.time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr("elastic_train.health.links.MEASURING_S", 20)
    asked = Asked(a=[link("a", 0.01, 0.01)])
    assert len(measured(NODES[:1], 0.1, asked)) == 1 and len(asked.nodes) == 20


@pytest.mark.parametrize(
    ("links", "least", "level", "said"),
    [
        ([link("a", 1100, 900)], 0.1, "ok", "1.1 GB/s from a, 900 MB/s to it, there and back in 0.2 ms"),
        (
            [link("a", 0.09, 900)],
            0.1,
            "fail",
            "its links are too slow: 90 kB/s from a, .*health_check asks for 0.1 MB/s",
        ),
        ([link("a", 900, 0.09)], 0.1, "fail", "its links are too slow"),
        ([link("a", 0.01, 0.01)], 0.0, "ok", "10 kB/s from a"),
        ([link("a", 0.01, 0.01), link("b", 40, 50)], 0.1, "warn", "that to a is slow"),
        ([link("a", 40, 50), link("b", 40, 50)], 45, "fail", "its links are too slow"),
        ([link("a", 11, 90, 110, 90)], 0.1, "warn", "this node's are slow: .*; others had 110 MB/s from and 90 MB/s"),
        ([link("a", 11, 90, 50, 90)], 0.1, "ok", "11 MB/s from a"),
        ([link("a", 100, 90, 950, 90)], 0.1, "ok", "100 MB/s from a"),
    ],
)
def test_links_are_judged_by_their_best_by_each_other_and_by_others(
    links: list[Link], least: float, level: str, said: str
) -> None:
    """Only the limit keeps a node out: it is far below what any link has that is of use, unless somebody sets it."""
    [finding] = judged(links, least)
    assert finding.level == level and re.search(said, finding.found), finding


def test_nothing_measured_is_no_finding() -> None:
    assert list(judged([], 0.1)) == []
