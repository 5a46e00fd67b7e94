"""A node's page: what a scrape gets, and what happens where it cannot be served."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_train.insight import page as page_module
from elastic_train.insight.page import Facts, Page
from elastic_train.insight.phases import MemoryFacts, RankFacts, Utilisation
from rendezvous import EtcdServer
from rendezvous.etcd.server import free_ports
from rendezvous.etcd.tally import Tally
from tests.conftest import PATIENCE_S, begin, eventually, no_thread
from tests.elastic_train.training.live.test_live import ENDLESS, STARTED, etcd, nothing_left, write_config

__all__ = ["etcd", "nothing_left"]  # fixtures

ROW = RankFacts(0.5, 0.0, 1.0, 2.0, 0.25, 0.25, 0.5, 0.0, 0.5, 0.125, 64, 0.001)


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page(Facts(), "words", "n1")
    yield page
    page.close()


def scraped(page: Page) -> dict[str, float]:
    """Return the samples of a page by name and the values of labels, without the run's and the node's."""
    with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=PATIENCE_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = dict(sample.labels)
        assert (labels.pop("run"), labels.pop("node")) == ("words", "n1")
        found["/".join([sample.name.removeprefix("elastic_train_"), *labels.values()])] = sample.value
    return found


def test_a_scrape_gets_what_the_process_knows(page: Page) -> None:
    """Phases add up; what only rank 0 knows is there on rank 0's node alone."""
    page.open("127.0.0.1", 0)
    facts = page.facts
    facts.enter_world(4, 3, 0, 100, is_leader=False)
    for step in (1, 2):
        facts.add_step(step, 0.25, 2.5, 0.5, 64)
        facts.add_row(ROW)
    found = scraped(page)
    known = {"step": 2, "total_steps": 100, "loss": 0.25, "gradient_norm": 2.5, "samples_per_second": 128, "term": 4}
    known |= {"world_size": 3, "phase_seconds_total/backward": 4.0, "exchanged_bytes_total": 128, "leader": 0}
    assert found.items() >= known.items()
    assert not any(name.startswith(("events", "last_commit", "failed_saves")) for name in found)
    facts.etcd = Tally()
    facts.etcd.add_answer(0.25)
    facts.etcd.add_answer(0.5)
    facts.etcd.add_failure()
    known = {"etcd_answers_total": 2, "etcd_answer_seconds_total": 0.75, "etcd_failures_total": 1}
    assert scraped(page).items() >= known.items()
    facts.num_failed_saves, facts.num_skipped_saves, facts.last_commit_at = 2, 1, 1e9
    facts.events = {"slow_link": 3}
    found = scraped(page)
    assert "mfu_ratio" not in found, "the FLOPs of a sample are unknown"
    assert not any("memory" in name for name in found), "nobody has looked at it"
    facts.memory = MemoryFacts("cpu", 1000, {"weights": 300, "sums": 100}, program=450)
    known = {"memory_peak_bytes": 1000, "memory_bytes/weights": 300, "memory_bytes/sums": 100}
    known |= {"memory_bytes/program": 450, "memory_bytes/rest": 150}
    assert scraped(page).items() >= known.items() and "memory_reserved_peak_bytes" not in scraped(page)
    facts.memory = MemoryFacts("cuda:0", 1000, {"weights": 300}, reserved=1200, host=50, host_peak=7000)
    known = {"memory_peak_bytes": 1000, "memory_bytes/rest": 700, "memory_reserved_peak_bytes": 1200}
    assert scraped(page).items() >= {**known, "host_memory_peak_bytes": 7000}.items()
    facts.utilisation = Utilisation(3e9, 0.0, 1e12)
    assert scraped(page)["mfu_ratio"] == pytest.approx(128 * 3e9 / (3 * 1e12))
    facts.utilisation = Utilisation(3e9, 1e9, 1e12)
    assert scraped(page)["hfu_ratio"] == pytest.approx(128 * 4e9 / (3 * 1e12))
    known = {"failed_saves_total": 2, "skipped_saves_total": 1, "last_commit_timestamp_seconds": 1e9}
    known |= {"events_total/slow_link": 3, "events_total/nonfinite": 0}
    assert found.items() >= known.items()


def test_a_fault_costs_steps_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """RPO: what the next world's state lacks. RTO: until its first step. Goodput leaves out what was lost."""
    now = 1000.0
    monkeypatch.setattr(page_module.time, "time", lambda: now)
    facts = Facts(started_at=now)
    facts.enter_world(1, 2, 0, 100, is_leader=True)
    for step in range(1, 11):
        facts.add_step(step, 1.0, 1.0, 1.0, 8)
        facts.add_row(ROW)
    assert (facts.recovery_s, facts.lost_steps) == (0.0, 0), "the first world recovers from nothing"
    now = 1010.0
    facts.enter_world(2, 1, 8, 100, is_leader=True)
    facts.add_step(9, 1.0, 1.0, 1.0, 8)
    now = 1100.0
    facts.add_step(10, 1.0, 1.0, 1.0, 8)
    assert (facts.recovery_s, facts.lost_steps, facts.num_worlds) == (10.0, 2, 2)
    assert facts.goodput == pytest.approx(10 / 12 * 10 * ROW.total_s / 100)


def test_a_port_that_is_taken_costs_the_page_and_nothing_else(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken, caplog.at_level(logging.WARNING):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        page.open("127.0.0.1", taken.getsockname()[1])
    assert page.port is None
    (said,) = caplog.messages
    assert "training continues without" in said and "Set monitoring.port to a free one" in said


def test_a_page_without_a_thread_costs_the_page_and_nothing_else(
    page: Page, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    page.open("127.0.0.1", 0)
    assert page.port is None and "(can't start new thread): training continues without" in caplog.text


def test_a_missing_package_costs_the_page_and_nothing_else(
    page: Page, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with caplog.at_level(logging.WARNING):
        page.open("127.0.0.1", 9109)
    assert page.port is None and "pip install 'elastic-train[monitoring]'" in caplog.messages[0]


@pytest.mark.slow
def test_a_node_that_waits_for_others_has_its_page(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """What asks whether a node is alive, such as a probe of Kubernetes, does not take it for dead meanwhile."""
    (port,) = free_ports(1)
    config, log = write_config(tmp_path, rows, ENDLESS), tmp_path / "node.log"
    command = [sys.executable, "-m", "elastic_train.cli.main", "launch", config, "--nodes", "2", "--ranks", "1"]
    command += ["--endpoint", etcd.endpoint, "--id", tmp_path.name, "--monitoring.port", str(port)]
    STARTED.append(begin(command, log))
    pages: list[str] = []

    def has_page() -> bool:
        with suppress(urllib.error.URLError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            pages.append(answer.read().decode())
        return bool(pages)

    eventually(has_page, "a page")
    families = text_string_to_metric_families(pages[-1])
    worlds = [one.value for family in families for one in family.samples if one.name == "elastic_train_worlds_total"]
    assert worlds == [0.0]
    eventually(lambda: "1 of at least 2 nodes are there" in log.read_text(), "a node that waits")
