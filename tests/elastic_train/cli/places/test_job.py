"""`elastic-train top --etcd` and `leave`: what etcd says of a running job, and requests that its nodes follow."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from chaos.services.authority import Authority
from elastic_train.cli.main import main
from elastic_train.cli.places.job import _asked, etcd_of, nodes_of, row_of
from elastic_train.launch.schedulers import Found
from rendezvous import EtcdServer, MemoryStore
from rendezvous.membership.records import Keys, Member, View, encode, read_view
from rendezvous.membership.store import Put
from rendezvous.membership.worlds import Seat, World
from tests.conftest import PATIENCE_S, begin, eventually
from tests.elastic_train.training.live.test_live import ENDLESS, history, until_whole, write_config
from tests.rendezvous.rendezvous_sides import patient


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return the exit code, and what was printed."""
    with pytest.raises(SystemExit) as left:
        main([*arguments])
    assert isinstance(left.value.code, int)
    printed = capsys.readouterr()
    return left.value.code, printed.out, printed.err


def worlds(run: Path) -> list[int]:
    """Return the sizes of the worlds in which steps were taken."""
    lines = history(run) if (run / "history").is_dir() else []
    sizes = {line["term"]: line["world"] for line in lines if line["op"] == "form"}
    return [sizes[term] for term in sorted({line["term"] for line in lines if line["op"] == "step"} & sizes.keys())]


@pytest.mark.process
def test_a_node_leaves_when_it_is_asked_and_a_job_stops_as_a_whole(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher of the node ends with 75, and the others train on, in a world without it; then all end with 75.

    Etcd lets in whom its authority has signed, and `PET_RDZV_CONF` has the files. A lost worker is replaced.
    """
    config, run = write_config(tmp_path, rows, ENDLESS), tmp_path / "run"
    authority = Authority(tmp_path)
    monkeypatch.setenv("PET_RDZV_CONF", ",".join(f"{key}={path}" for key, path in authority.issue("job").items()))
    with EtcdServer(tls=authority.issue("etcd")) as etcd:
        where = ("--etcd", etcd.endpoint)
        line = [sys.executable, "-m", "elastic_train.command", "launch", config, "--ranks", "1"]
        line += ["--nodes", "1:2", "--id", "a job", "--endpoint", etcd.endpoint, "--ttl-s", "60"]
        jobs = [begin(line, tmp_path / f"log{i}") for i in range(2)]
        term, pids = until_whole(run, 2)
        os.kill(pids[1], signal.SIGKILL)
        until_whole(run, 2, above=term)
        eventually(lambda: worlds(run)[-1:] == [2], "a world of 2")
        (row,) = json.loads(said(capsys, "top", *where, "--json")[1])
        assert (row["id"], row["state"], row["nodes"], row["world"]) == ("a job", "training", 2, 2)
        shown = json.loads(said(capsys, "top", "a job", *where, "--json")[1])
        assert sorted(node["ranks"] for node in shown["members"]) == [[0], [1]]
        with pytest.raises(SystemExit) as left:
            main(["top", "a job", *where])
        frame = capsys.readouterr().out
        assert left.value.code == 0 and "a job: training, term" in frame
        assert all(node["node"] in frame for node in shown["members"])
        first, second = (node["node"] for node in shown["members"])

        assert said(capsys, "leave", "a job", shown["members"][0]["host"], *where)[0] == 2, "both are on this machine"
        code, printed, _ = said(capsys, "leave", "a job", first, *where)
        assert (code, printed) == (0, f"1 node left: {first}\n")
        eventually(lambda: [job.poll() for job in jobs].count(75) == 1, "its launcher ends")
        eventually(lambda: worlds(run)[-1:] == [1], "the other trains on")
        (row,) = json.loads(said(capsys, "top", *where, "--json")[1])
        assert (row["state"], row["nodes"]) == ("training", 1)

        assert json.loads(said(capsys, "leave", "a job", "--all", *where, "--json")[1])["left"] == [second]
        assert [job.wait(PATIENCE_S) for job in jobs] == [75, 75], (tmp_path / "log0").read_text()
        (row,) = json.loads(said(capsys, "top", *where, "--json")[1])
        assert (row["state"], row["nodes"]) == ("gone", 0)
        assert row["commit"] is not None


@pytest.mark.process
def test_a_slow_node_is_dropped_and_the_others_train_on(tmp_path: Path, rows: Path) -> None:
    """Its launcher ends with 75, as if it had been asked by hand, and the other trains on; the event says so."""
    tree = yaml.safe_load(Path(write_config(tmp_path, rows, ENDLESS)).read_text())
    tree["task"]["path"], tree["monitoring"] = "tests.tasks:SlowHere", {"on_event": {"slow_compute": "drop"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    with EtcdServer() as etcd:
        line = [sys.executable, "-m", "elastic_train.command", "launch", str(tmp_path / "config.yaml"), "--ranks", "1"]
        line += ["--nodes", "1:2", "--id", "a job", "--endpoint", etcd.endpoint, "--ttl-s", "60"]
        jobs = [begin(line, tmp_path / f"log{ms}", {"TESTED_LANE_MS": str(ms)}) for ms in (10, 60)]
        try:
            eventually(lambda: jobs[1].poll() == 75, "the slow node's launcher ends")
            eventually(lambda: worlds(tmp_path / "run")[-2:] == [2, 1], "the other trains on")
            (event,) = [
                line for line in history(tmp_path / "run") if line["op"] == "event" and line["of_rank"] is not None
            ]  # type: ignore[comparison-overlap]
            assert event["kind"] == "slow_compute" and "is asked to leave" in event["then"]  # type: ignore[comparison-overlap, operator]
            assert any("; dropped: node" in path.read_text() for path in tmp_path.glob("log*"))
            assert jobs[0].poll() is None
        finally:
            for job in jobs:
                job.terminate()
            assert [job.wait(PATIENCE_S) for job in jobs] == [75, 75]


def member(node: str, *, own: str = "", missed: tuple[str, ...] = ()) -> Member:
    return Member(f"{node}.0", f"host-of-{node}", "10.0.0.1", 1, 0, node=own or node, missed=missed)


def test_a_view_says_who_leaves_and_who_is_out_of_reach() -> None:
    """And a world of which a member is missing does not train."""
    seats = (Seat("a.0", 1), Seat("b.0", 1))
    world = World(3, seats, "start", "10.0.0.1", 1, 0.0)
    view = View(1, (member("a"), member("b", missed=("a",))), world, leaving=frozenset({"b"}))
    assert [(node.ranks, node.is_leaving, node.missed_by) for node in nodes_of(view)] == [
        ((0,), False, 1),
        ((1,), True, 0),
    ]
    assert row_of("j", view).state == "training"
    assert row_of("j", View(1, (member("a"),), world)).state == "waiting"
    assert row_of("j", View(1, (), world)).state == "gone"


def test_etcds_certificates_may_have_torchs_names(tmp_path: Path) -> None:
    """As for `launch`: without them the connection was in plain text, which an etcd with TLS does not answer."""
    paths = {name: tmp_path / name for name in ("cacert", "ssl_cert", "ssl_cert_key")}
    for path in paths.values():
        path.touch()
    options = etcd_of("etcd:2379", Found(conf={name: str(path) for name, path in paths.items()}))
    assert options is not None
    assert [options.ca_cert, options.cert, options.key] == [str(path) for path in paths.values()]


def test_a_request_is_read_from_the_store() -> None:
    store, keys = MemoryStore(), Keys("a/b")
    store.swap({keys.leave("n1"): Put(""), keys.member("n1.0"): Put(encode(member("n1")))}, {})
    assert read_view(store.get(keys.prefix), keys).leaving == {"n1"}


def test_all_nodes_of_a_large_job_are_asked_to_leave(capsys: pytest.CaptureFixture[str]) -> None:
    """Etcd refuses a transaction of so many requests, and so none was asked."""
    store, nodes = MemoryStore(), [f"n{number}" for number in range(300)]
    assert _asked(store, "j", nodes, 0.0, is_json=False) == 0
    assert len(store.get(Keys("j").leaves).entries) == 300
    assert "300 nodes left" in capsys.readouterr().out


@pytest.mark.process
def test_what_cannot_be_asked_for_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A job that etcd does not know, a node that it does not have, and nodes that would not hear it."""
    assert "--etcd" in said(capsys, "top")[2]
    for named in ((), ("n1", "--all")):
        assert "name a NODE, or give --all" in said(capsys, "leave", "j", *named)[2]
    with EtcdServer() as etcd, closing(patient(etcd.endpoint)) as store:
        where = ("--etcd", etcd.endpoint)
        assert said(capsys, "top", *where)[:2] == (0, "no jobs\n")
        code, _, errors = said(capsys, "leave", "nobody", "--all", *where)
        assert (code, "knows no job 'nobody'" in errors) == (2, True)
        keys = Keys("j")
        store.swap({keys.member("n1.0"): Put(encode(member("n1")))}, {})
        code, _, errors = said(capsys, "leave", "j", "n1x", *where)
        assert (code, "did you mean 'n1'" in errors) == (2, True)
        code, printed, _ = said(capsys, "leave", "j", "host-of-n1", *where, "--wait-s", "0")
        assert (code, "still there" in printed) == (77, True)
        store.swap({keys.member("old"): Put(encode(Member("old", "h", "10.0.0.2", 1, 0)))}, {})
        code, _, errors = said(capsys, "leave", "j", "--all", *where)
        assert (code, "send SIGTERM" in errors) == (2, True)
