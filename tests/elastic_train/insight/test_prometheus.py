"""What is shipped for Prometheus and Grafana, with the real promtool, and a real Prometheus that scrapes a running job.

They are Debian's package prometheus; without it these tests are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from elastic_train.insight.detection import MEANINGS
from elastic_train.insight.page import PREFIX, Facts, _counters, _gauges, _parts
from elastic_train.insight.phases import MemoryFacts
from rendezvous.etcd.server import free_ports
from tests.conftest import PATIENCE_S, ROOT, begin, eventually
from tests.elastic_train.training.jobs import CLASSIFIER, PARAMS, config

pytestmark = pytest.mark.monitoring
SHIPPED = ROOT / "deploy" / "monitoring"
DASHBOARD = json.loads((SHIPPED / "dashboard.json").read_text())
QUERIES = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in DASHBOARD["panels"]}
RULES = [rule for group in yaml.safe_load((SHIPPED / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="no prometheus and promtool: apt-get install prometheus",
)
RUNBOOK = (ROOT / "docs" / "guides" / "on-call.md").read_text()


def promtool(*arguments: str, cwd: Path = SHIPPED) -> str:
    done = subprocess.run(
        ["promtool", *arguments], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return done.stdout + done.stderr if done.returncode else ""


@needs_prometheus
def test_rules_are_valid_and_fire_as_their_own_tests_say() -> None:
    assert promtool("check", "rules", "alerts.yaml") == ""
    assert promtool("check", "config", "prometheus.yml") == ""
    assert promtool("test", "rules", "alerts_test.yaml") == ""


@needs_prometheus
def test_a_rule_that_is_wrong_fails_them(tmp_path: Path) -> None:
    """Each alert has a test of its own: that fails if it never fires, and so does another if a threshold is wrong."""
    (tmp_path / "alerts_test.yaml").write_text((SHIPPED / "alerts_test.yaml").read_text())
    text = (SHIPPED / "alerts.yaml").read_text()

    def said_of(rules: str) -> str:
        (tmp_path / "alerts.yaml").write_text(rules)
        return promtool("test", "rules", "alerts_test.yaml", cwd=tmp_path)

    assert "TrainingStalled" in said_of(text.replace("> 600", "> 6000"))
    for rule in RULES:
        spoilt = yaml.safe_load(text)
        (mine,) = [each for group in spoilt["groups"] for each in group["rules"] if each["alert"] == rule["alert"]]
        mine["expr"] = f"({mine['expr']}) and on () vector(1) > 2"
        assert f"alertname:{rule['alert']}," in re.sub(r"[\s\"]", "", said_of(yaml.safe_dump(spoilt))), rule["alert"]


def test_panels_have_the_unit_of_what_they_show() -> None:
    """Failures were shown in seconds: only what is named in seconds, or made of it, is a time."""
    for panel in DASHBOARD["panels"]:
        if panel.get("fieldConfig", {}).get("defaults", {}).get("unit") == "s":
            assert all("_seconds" in query or "time()" in query for query in QUERIES[panel["title"]]), panel["title"]


def test_rules_and_dashboard_ask_for_what_a_page_has() -> None:
    """Every name, every phase and every kind of event that they speak of."""
    facts = Facts(num_failed_saves=0, num_skipped_saves=0, memory=MemoryFacts("cpu", 1, {}))
    known = {PREFIX + name for name, *_ in (*_gauges(facts), *_parts(facts))} | {
        f"{PREFIX}{name}_total" for name, *_ in _counters(facts)
    }
    asked = " ".join([*(rule["expr"] for rule in RULES), *(query for queries in QUERIES.values() for query in queries)])
    assert set(re.findall(rf"{PREFIX}\w+", asked)) <= known
    assert set(re.findall(r'kind="(\w+)"', asked)) <= set(MEANINGS)


def test_each_alert_leads_to_its_section_of_the_runbook() -> None:
    """Each section has a meaning, what to look at and what to do; no section is without an alert."""
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL))
    assert [*sections] == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"guides/on-call.html#{rule['alert'].lower()}"
        assert re.findall(r"^\* \*\*(.*?)\.\*\*", sections[rule["alert"]], re.MULTILINE) == ["Means", "Look at", "Do"]


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A Prometheus with the shipped configuration that scrapes, every second, a port of this machine; both ports."""
    ours, theirs = free_ports(2)
    settings = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(SHIPPED / "alerts.yaml")]
    settings["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{ours}"]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
    options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
    options += [f"--web.listen-address=127.0.0.1:{theirs}", "--log.level=warn"]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(["prometheus", *options], stdout=log, stderr=log) as run:
        yield ours, theirs
        run.kill()


def answers(port: int, query: str) -> list[object]:
    """Return what a Prometheus answers to a query; raises HTTPError if it is no query."""
    asked = query.replace("$run", ".*").replace("$__rate_interval", "30s")
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': asked})}"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        result: list[object] = json.loads(answer.read())["data"]["result"]
    return result


@needs_prometheus
@pytest.mark.slow
def test_a_prometheus_that_scrapes_a_running_job_answers_every_query_of_the_dashboard(
    tmp_path: Path, rows: Path, prometheus: tuple[int, int]
) -> None:
    """And no alert fires for a job in which nothing is wrong."""
    ours, theirs = prometheus
    task = {"path": "chaos.tasks.paced_classifier:PacedClassifier", "params": {**PARAMS, "lane_ms": 30.0}}
    path = config(
        tmp_path,
        rows,
        {**CLASSIFIER, "task": task, "max_steps": 100_000},
        monitoring={"port": ours},
        run={"dir": str(tmp_path / "r")},
    )
    job = begin([sys.executable, "-m", "elastic_train", path], tmp_path / "output")
    try:
        eventually(lambda: answers(theirs, "max(elastic_train_last_commit_step) > 0"))
        eventually(
            lambda: all(answers(theirs, QUERIES[title][0]) for title in ("Where the time goes", "Bytes exchanged"))
        )
        empty = [title for title, queries in QUERIES.items() for query in queries if not answers(theirs, query)]
        assert empty == []
        assert answers(theirs, 'ALERTS{alertstate="firing"}') == []
        assert answers(theirs, 'up{job="elastic-train"} == 1')
    finally:
        job.close(signal.SIGKILL)
