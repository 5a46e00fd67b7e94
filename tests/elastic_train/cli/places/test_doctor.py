"""`elastic-train doctor`: one line for each thing that a node of a job needs, and a remedy for what it lacks."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest
import torch

from chaos.services.authority import Authority
from elastic_train.checkpoint.stores import local
from elastic_train.cli.main import main
from elastic_train.cli.places.doctor import command, machine
from elastic_train.cli.places.doctor import etcd as etcd_examination
from elastic_train.cli.places.doctor.etcd import examine_etcd
from elastic_train.cli.places.doctor.peers import Self, examine_peers
from elastic_train.cli.places.doctor.storage import examine_storage
from elastic_train.health import clock
from elastic_train.health.result import Finding, Planned, examine_all, ok
from rendezvous import EtcdServer, EtcdStore, etcd_options
from rendezvous.membership.store import Put
from tests.conftest import PATIENCE_S
from tests.rendezvous.rendezvous_sides import patient

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """Return the exit code, and the levels and texts by check."""
    with pytest.raises(SystemExit) as left:
        main(["doctor", *arguments, "--json"])
    assert isinstance(left.value.code, int)
    found: dict[str, list[tuple[str, str]]] = {}
    for finding in json.loads(capsys.readouterr().out)["findings"]:
        assert finding["level"] == "ok" or finding["remedy"], finding
        found.setdefault(finding["check"], []).append((finding["level"], finding["found"]))
    return left.value.code, found


def config_of(tmp_path: Path, uri: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(f"run: {{dir: {tmp_path}/run}}\ndata: {{train: nowhere}}\ntracking: {{mlflow_uri: '{uri}'}}\n")
    return str(path)


def test_a_machine_that_can_train_passes(
    etcd: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part of it is named; what is no more than unwise does not fail it; nothing but `store-id` is left."""
    monkeypatch.setattr(command, "TIMEOUT_S", 300.0)
    code, found = said(capsys, config_of(tmp_path, f"sqlite:///{tmp_path}/mlflow.db"), "--etcd", etcd.endpoint)
    assert code == 0, found
    assert not [name for name, lines in found.items() if "fail" in dict(lines)]
    assert {
        "python",
        "torch",
        "gpu",
        "products",
        "memory",
        "open files",
        "shared memory",
        "temporary files",
        "locked memory",
    } <= found.keys()
    assert {"etcd", "etcd's room", "etcd's latency", "etcd's leases", "clock"} <= found.keys()
    assert {"configuration", "storage", "storage's speed", "mlflow"} <= found.keys()
    assert found["etcd"] == [("warn", f"{etcd.endpoint}: 1 member, of which none may be lost")]
    assert [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()] == ["store-id"]


def test_each_thing_that_is_missing_fails_with_its_remedy(
    etcd: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent etcd, storage that cannot be written; MLflow that is away is no more than a warning."""
    monkeypatch.setattr(command, "TIMEOUT_S", 300.0)
    (tmp_path / "run").write_text("a file where the folder would be")
    code, found = said(capsys, config_of(tmp_path, "http://127.0.0.1:9"), "--etcd", "127.0.0.1:9")
    assert code == 1
    assert [level for level, _ in found["etcd"]] == ["fail"]
    assert "127.0.0.1:9" in found["etcd"][0][1]
    assert found["storage"][-1][0] == "fail"
    assert [level for level, _ in found["mlflow"]] == ["warn"]
    (tmp_path / "bad.yaml").write_text("runn: {}\nbatch: {micro_batch: none}\n")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, found = said(capsys, str(tmp_path / "bad.yaml"))
    assert code == 1
    assert len(found["configuration"]) >= 2
    assert "WORLD_SIZE" in found["variables"][0][1]


def test_limits_that_are_too_low_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "raise_limit", lambda: 1024)
    monkeypatch.setattr(machine, "LEAST_SHM", 1 << 60)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    levels = {finding.check: finding for finding in machine.examine_limits()}
    assert levels["open files"].level == levels["shared memory"].level == "warn"
    assert "384 ranks" in levels["open files"].found
    monkeypatch.setattr(machine, "SHM", tmp_path / "nowhere")
    assert {finding.check: finding.level for finding in machine.examine_limits()}["shared memory"] == "fail"


def test_gpus_that_torch_does_not_use_fail() -> None:
    """A build for CPUs on a machine with GPUs would train on the CPU, in silence."""
    assert [finding.level for finding in machine.examine_gpus(2)] == ["fail"]


def test_what_does_not_answer_is_a_finding() -> None:
    """And what it had to say before is kept apart from it; no examination waits for another."""

    is_over = threading.Event()

    def stuck() -> Iterator[Finding]:
        yield ok("disk", "there")
        is_over.wait(PATIENCE_S)

    def broken() -> Iterator[Finding]:
        yield ok("wire", "there")
        raise OSError("cut")

    planned = {"disk": Planned(stuck, "unplug it", 0.2), "wire": Planned(broken, "mend it", PATIENCE_S)}
    assert examine_all(planned) == [
        Finding("disk", "fail", "no answer in 0 s", "unplug it"),
        ok("wire", "there"),
        Finding("wire", "fail", "cut", "mend it"),
    ]
    is_over.set()


def test_a_store_that_creates_a_key_twice_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(self: local.LocalStore, key: str, content: bytes) -> None:
        path = Path(self.url) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    monkeypatch.setattr(local.LocalStore, "create", create)
    found = examine_all({"storage": Planned(lambda: examine_storage(str(tmp_path), has_peers=False), "", PATIENCE_S)})
    assert "created store-id twice" in next(finding.found for finding in found if finding.level == "fail")


def test_a_folder_of_this_machine_is_no_storage_for_several(tmp_path: Path) -> None:
    """Unless it is on a network's file system, each node would see one of its own."""
    alone = [finding.found for finding in examine_storage(str(tmp_path), has_peers=False)]
    several = [finding.found for finding in examine_storage(str(tmp_path), has_peers=True)]
    assert [text for text in several if text not in alone and "of this machine alone" in text]


def test_etcd_is_examined_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an alarm it fails; a clock that is wrong, and leases longer than asked for, are warned of."""
    authority = Authority(tmp_path)
    files = authority.issue("server", seconds=90 * 86400.0)
    with EtcdServer(tls=files, flags={"election-timeout": "5000"}) as server:
        options = etcd_options(server.endpoint, authority.issue("client"))
        found = {finding.check: finding for finding in examine_etcd(options, "job", 3.0)}
        assert found["etcd's TLS"].level == "ok"
        assert "certificate holds for" in found["etcd's TLS"].found
        assert found["clock"].level == "ok"
        assert found["etcd's leases"].level == "warn"
        with closing(EtcdStore(options)) as store:
            store._connection.call(lambda client: client.create_alarm(), give_up_after_s=PATIENCE_S)
        late = timedelta(seconds=100)
        monkeypatch.setattr(clock, "parsedate_to_datetime", lambda text: parsedate_to_datetime(text) + late)
        monkeypatch.setattr(etcd_examination, "SOON_S", 100 * 86400.0)
        found = {finding.check: finding for finding in examine_etcd(options, "job", 8.0)}
        assert found["etcd's TLS"].level == "warn"
        assert found["etcd's leases"].level == "fail"
        assert (found["etcd's room"].level, "NOSPACE" in found["etcd's room"].found) == ("fail", True)
        assert (found["clock"].level, "100 s behind" in found["clock"].found) == ("warn", True)


VERSIONS = {"elastic-train": "1", "torch": "2", "python": "3"}


def meet(etcd: EtcdServer, run_id: str, *doctors: Self) -> list[list[Finding]]:
    """Let doctors meet, each on a thread and a connection of its own."""

    def examine(own: Self) -> list[Finding]:
        with closing(patient(etcd.endpoint)) as store:
            return list(examine_peers(store, run_id, own, len(doctors) - 1, PATIENCE_S))

    with ThreadPoolExecutor(len(doctors)) as pool:
        return list(pool.map(examine, doctors))


def test_doctors_meet_and_see_each_other_both_ways(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose clock is 30 s ahead, and that sees another storage, is told from the others by all."""
    monkeypatch.setattr("elastic_train.cli.places.doctor.peers.is_loopback", lambda address: False)
    for _ in range(2):  # nothing of the first meeting is in the way of the next
        first = Self("127.0.0.1", VERSIONS, lambda: "one")
        second = Self("127.0.0.1", VERSIONS, lambda: "one")
        odd = Self("127.0.0.1", {**VERSIONS, "torch": "2.1"}, lambda: "other", clock=lambda: time.time() + 30)
        found = meet(etcd, "meet", first, second, odd)
        for findings in found[:2]:
            by_check = {check: [f.level for f in findings if f.check == check] for check in ("connection", "storage")}
            assert by_check == {"connection": ["ok"] * 4, "storage": by_check["storage"]}
            assert sorted(by_check["storage"]) == ["fail", "ok"]
            clocks = [f for f in findings if f.check == "clock"]
            assert sorted(f.level for f in clocks) == ["ok", "warn"]
            assert any("30 s behind" in f.found for f in clocks)
            assert next(f.found for f in findings if f.check == "versions").endswith("torch 2 here, 2.1 there")
        assert [f.level for f in found[2] if f.check == "storage"] == ["fail", "fail"]
        assert all("30 s ahead" in f.found for f in found[2] if f.check == "clock")


def test_a_peer_that_cannot_be_reached_or_cannot_reach_us_fails(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the two together see both directions of a way."""
    monkeypatch.setattr("elastic_train.cli.places.doctor.peers.is_loopback", lambda address: False)
    own = Self("127.0.0.1", VERSIONS, lambda: None)
    here = {"host": "n2", "agent": "127.0.0.1:9", "word": None, **VERSIONS}
    seen = {"answers": {own.name: "silent"}, "late_s": {own.name: 0.0}}
    with closing(patient(etcd.endpoint)) as store:
        for kind, what in (("here", here), ("now", {"at": time.time()}), ("seen", seen)):
            store.swap({f"/elastic/reach/doctor/{kind}/n2": Put(json.dumps(what))}, {})
        found = list(examine_peers(store, "reach", own, 1, PATIENCE_S))
    ways = [(f.level, f.found) for f in found if f.check == "connection"]
    assert [level for level, _ in ways] == ["fail", "fail"]
    assert "nothing listens there" in ways[0][1]
    assert "from n2" in ways[1][1]
    assert "a firewall drops it" in ways[1][1]


def test_who_is_missing_is_said(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time to wait; an address that means another machine elsewhere is refused before that."""
    own = Self("127.0.0.1", VERSIONS, lambda: None)
    with closing(patient(etcd.endpoint)) as store:
        assert [f.level for f in examine_peers(store, "lonely", own, 2, 60.0)] == ["fail"]
        monkeypatch.setattr("elastic_train.cli.places.doctor.peers.is_loopback", lambda address: False)
        found = list(examine_peers(store, "lonely", own, 2, 0.1))
        assert found[-1].found == "2 peers expected within 0 s, and came: nobody"
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--peers", "1"])
    assert left.value.code == 2


def test_a_torch_that_cannot_be_imported_is_a_line_and_the_others_are_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "torch.distributed"):
        monkeypatch.setitem(sys.modules, name, None)
    code, found = said(capsys)
    assert code == 1
    assert [level for level, _ in found["torch"]] == ["fail"]
    assert found["open files"] and found["temporary files"]


def test_a_gpu_that_does_not_answer_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: int) -> str:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", broken)
    code, found = said(capsys)
    assert code == 1
    assert ("fail", "RuntimeError: CUDA error: uncorrectable ECC error encountered") in found["gpu"]
    assert found["open files"]


@pytest.mark.parametrize(
    ("arguments", "conf", "message"),
    [
        (["--etcd", "h:99999"], "", "etcd's endpoint 'h:99999' is not HOST:PORT"),
        (["--etcd", "h:2379"], "ca_cert=/nope", "ca_cert: no such file: /nope"),
    ],
)
def test_wrong_options_of_etcd_are_said_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], conf: str, message: str
) -> None:
    """By the doctor as a finding, and by commands that need etcd as an error of usage."""
    if conf:
        monkeypatch.setenv("PET_RDZV_CONF", conf)
    _, found = said(capsys, *arguments)
    assert found["etcd"][0] == ("fail", message)
    for command_line in (["top"], ["top", "a-job"]):
        with pytest.raises(SystemExit) as left:
            main([*command_line, *arguments])
        assert left.value.code == 2
        assert message in capsys.readouterr().err
