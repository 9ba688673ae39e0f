"""The spans of a process, sent to an OpenTelemetry collector: OTLP over HTTP, by a thread of OpenTelemetry's own.

Nothing waits for the collector. Spans that do not fit the queue are dropped, and so are those that the collector does
not take in time.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Mapping

from opentelemetry.context.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span as Recorded
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .context import NO_SPAN, Attributes, Span, Value

SPANS_MAX = 4096
"""Spans that wait to be sent; 1 to 2 KiB each."""

BATCH_SPANS_MAX = 512
SEND_EVERY_S = 0.25
SEND_TIMEOUT_S = 2.0

FLUSH_S = 0.9
"""How long a process that ends waits until its spans are sent."""

COMPLAINT_S = 60.0
"""How often at most it is logged that the collector takes nothing."""

_W3C = TraceContextTextMapPropagator()


class CollectorTracer:
    """`context.Tracer` whose spans go to a collector. `close` it before the process ends.

    Args:
        process: which process of its node this is, such as `replica:m-0`.
        endpoint: the collector's URL without `/v1/traces`.
        sample: the share of traces that begin here and are recorded.
    """

    def __init__(self, process: str, endpoint: str, sample: float) -> None:
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=SEND_TIMEOUT_S)
        self._sender = BatchSpanProcessor(
            exporter,
            max_queue_size=SPANS_MAX,
            schedule_delay_millis=SEND_EVERY_S * 1000,
            max_export_batch_size=BATCH_SPANS_MAX,
        )
        self._complaints, self._seldom = logging.getLogger(OTLPSpanExporter.__module__), _Seldom()
        self._complaints.addFilter(self._seldom)
        service = process.partition(":")[0]
        resource = Resource.create({"service.name": f"satchel-{service}", "service.instance.id": process})
        provider = TracerProvider(ParentBasedTraceIdRatio(sample), resource, shutdown_on_exit=False)
        provider.add_span_processor(self._sender)
        self._tracer = provider.get_tracer("satchel")
        atexit.register(self.close)

    def begin(self, name: str, headers: Mapping[str, str], attributes: Attributes | None) -> Span:
        """As `Tracer.begin`."""
        return self.started(name, _W3C.extract(dict(headers), Context()), attributes, SpanKind.SERVER)

    def started(
        self, name: str, within: Context, attributes: Attributes | None, kind: SpanKind = SpanKind.INTERNAL
    ) -> Span:
        """Begins a span."""
        made = self._tracer.start_span(name, within, kind, _given(attributes))
        return CollectorSpan(self, made) if made.is_recording() else NO_SPAN

    def close(self) -> None:
        """As `Tracer.close`."""
        sending = threading.Thread(target=self._sender.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(FLUSH_S)
        self._complaints.removeFilter(self._seldom)


class CollectorSpan(Span):
    """A recorded span."""

    def __init__(self, tracer: CollectorTracer, recorded: Recorded) -> None:
        self._tracer, self._recorded = tracer, recorded
        self._within = set_span_in_context(recorded, Context())
        headers: dict[str, str] = {}
        _W3C.inject(headers, self._within)
        self.parent = headers["traceparent"]
        self._counts: dict[str, int] = {}
        self._lists: dict[str, list[str]] = {}

    def child(self, name: str, attributes: Attributes | None = None) -> Span:
        return self._tracer.started(name, self._within, attributes)

    def set(self, attributes: Attributes) -> None:
        if self._recorded.is_recording():
            self._recorded.set_attributes(_given(attributes))

    def add(self, name: str, number: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + number
        self.set({name: self._counts[name]})

    def append(self, name: str, text: str) -> None:
        self._lists.setdefault(name, []).append(text)
        self.set({name: self._lists[name]})

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        if self._recorded.is_recording():
            self._recorded.add_event(name, _given(attributes))

    def rename(self, name: str) -> None:
        if self._recorded.is_recording():
            self._recorded.update_name(name)

    def end(self, error: str = "") -> None:
        if not self._recorded.is_recording():
            return
        if error:
            self._recorded.set_attribute("error.type", error)
            self._recorded.set_status(StatusCode.ERROR)
        self._recorded.end()


class _Seldom(logging.Filter):
    """Lets a line pass every `COMPLAINT_S`."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_at = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created - self._passed_at < COMPLAINT_S:
            return False
        self._passed_at = record.created
        return True


def _given(attributes: Attributes | None) -> dict[str, Value]:
    return {name: value for name, value in (attributes or {}).items() if value is not None}
