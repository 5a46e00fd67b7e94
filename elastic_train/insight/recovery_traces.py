"""A recovery as an OpenTelemetry trace: from the last step before a fault to the first one after it, in parts.

Times are those of the history, as in the banner and the report. It is sent by a thread of the SDK: without a collector
only the trace is lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_train.system.wording import without_passwords

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)
SEND_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """Times of a recovery in unix seconds; `joined_at` is None if unknown."""

    last_step_at: float
    joined_at: float | None
    formed_at: float
    restored_at: float
    facts: Mapping[str, str | int]

    def parts(self, first_step_at: float) -> Iterator[tuple[str, float, float]]:
        """Yield name, start and end of each part; they tile the whole, whatever the clocks say."""
        moments = {"detect": self.joined_at, "form": self.formed_at, "restore": self.restored_at}
        lo = self.last_step_at
        for name, at in {**moments, "first step": first_step_at}.items():
            if at is not None:
                yield name, lo, max(lo, at)
                lo = max(lo, at)


class RecoveryTraces:
    """Sends recoveries through a provider, which it shuts down."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider, self._tracer = provider, provider.get_tracer("elastic_train")

    def send(self, recovery: Recovery, first_step_at: float) -> None:
        """Send a recovery that the first step has just ended."""
        from opentelemetry.trace import set_span_in_context

        whole = self._tracer.start_span(
            "recovery", start_time=_ns(recovery.last_step_at), attributes=dict(recovery.facts)
        )
        end = recovery.last_step_at
        for name, lo, end in recovery.parts(first_step_at):
            self._tracer.start_span(name, set_span_in_context(whole), start_time=_ns(lo)).end(_ns(end))
        whole.end(_ns(end))

    def close(self) -> None:
        """Send what is left, waiting a bounded time."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(SEND_TIMEOUT_S)


def open_traces(endpoint: str, run: str, host: str) -> RecoveryTraces | None:
    """Return a sender of traces to an OTLP endpoint over HTTP; None, logged once, if packages are missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning(
            "monitoring.otlp is %s, and OpenTelemetry is not installed: no traces are sent, training continues; "
            "pip install 'elastic-train[otel]'",
            without_passwords(endpoint),
        )
        return None
    resource = Resource.create({"service.name": "elastic-train", "service.instance.id": run, "host.name": host})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=SEND_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RecoveryTraces(provider)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
