"""A worker's proof: who is examined, what keeps a node out, and that a node's workers join together or not at all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from elastic_train.config.schema import Config
from elastic_train.errors import UnfitError
from elastic_train.health.precheck import Proof, begin_proof, tell_mates
from elastic_train.health.result import Finding, Planned, fail, ok, warn
from rendezvous.context import LIVE_VARIABLE, LiveContext
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
