"""Recoveries as traces: the parts tile the whole, a collector gets them, and one that is away costs nothing else."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from elastic_train.insight.recovery_traces import Recovery, RecoveryTraces, open_traces
from tests.conftest import start
from tests.elastic_train.training.jobs import CLASSIFIER, config, history, succeed

PARTS = ["detect", "form", "restore", "first step"]


def sent(recovery: Recovery, first_step_at: float) -> list[tuple[str, float, float]]:
    """Return the spans of a recovery, in seconds, the whole one last."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = RecoveryTraces(provider)
    traces.send(recovery, first_step_at)
    traces.close()
    *parts, whole = exporter.get_finished_spans()
    assert whole.parent is None and whole.attributes == dict(recovery.facts)
    assert {part.parent.span_id for part in parts if part.parent} == {whole.context.span_id}
    return [(span.name, (span.start_time or 0) / 1e9, (span.end_time or 0) / 1e9) for span in (*parts, whole)]


def test_the_parts_of_a_recovery_tile_it() -> None:
    """From the last step before the fault to the first after it; who has no rendezvous knows not when it let go."""
    facts = {"term": 4, "cause": "lost", "steps_lost": 0}
    assert sent(Recovery(100.0, 100.5, 101.0, 101.25, facts), 102.0) == [
        ("detect", 100.0, 100.5),
        ("form", 100.5, 101.0),
        ("restore", 101.0, 101.25),
        ("first step", 101.25, 102.0),
        ("recovery", 100.0, 102.0),
    ]
    assert [name for name, *_ in sent(Recovery(100.0, None, 101.0, 101.25, {}), 102.0)] == [*PARTS[1:], "recovery"]
    spans = sent(Recovery(100.0, 99.0, 101.0, 101.25, {}), 102.0)
    assert spans[0] == ("detect", 100.0, 100.0), "another machine's clock is late"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Span]]]:
    """An OTLP collector over HTTP: its address, and the spans that it got."""
    spans = list[Span]()

    class Post(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            assert self.path == "/v1/traces"
            spans.extend(span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Post) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", spans
        server.shutdown()


@pytest.mark.slow
def test_a_job_that_goes_on_sends_its_recovery(tmp_path: Path, rows: Path, collector: tuple[str, list[Span]]) -> None:
    """A run's beginning is none; what is sent is what the history says. A collector that is away holds nothing up."""
    endpoint, spans = collector
    made = config(tmp_path, rows, CLASSIFIER, monitoring={"otlp": endpoint}, validation={})
    succeed(start([made, "--max-steps", "3"]))
    assert spans == []
    succeed(start([made, "--max-steps", "5"]))
    assert [span.name for span in spans] == ["form", "restore", "first step", "recovery"]
    steps = {line["step"]: line["t"] for line in history(tmp_path, "step")}
    whole = spans[-1]
    assert whole.start_time_unix_nano == int(steps[3] * 1e9)  # type: ignore[operator]
    assert steps[3] < whole.end_time_unix_nano / 1e9 < steps[5]  # type: ignore[operator]
    assert {one.key: one.value.int_value for one in whole.attributes}.items() >= {"step": 3, "steps_lost": 0}.items()
    succeed(start([made, "--max-steps", "6", "--monitoring.otlp", "http://127.0.0.1:1"]))


def test_missing_packages_are_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING):
        assert open_traces("http://collector:4318", "run", "n1") is None
    (record,) = caplog.records
    assert "training continues; pip install 'elastic-train[otel]'" in record.getMessage()
