"""An OpenTelemetry collector in this process: takes spans by OTLP over HTTP, and keeps them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from satchel.cluster.telemetry.context import TRACING
from satchel.cluster.telemetry.traces import CollectorTracer


@dataclass(frozen=True)
class SeenSpan:
    """A span that has ended. `parent` is the id of its parent, "" for none."""

    process: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    events: list[str]
    failed: bool


@dataclass
class Collector:
    """`open` is set while it answers."""

    url: str
    spans: list[SeenSpan] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)

    def of(self, request_id: str, whole: Callable[[list[SeenSpan]], bool], within_s: float = 20.0) -> list[SeenSpan]:
        """The spans of a request's trace, once they are `whole`."""
        ends = time.monotonic() + within_s
        while True:
            spans = list(self.spans)
            roots = [one for one in spans if one.attributes.get("satchel.request.id") == request_id]
            found = [one for one in spans if roots and one.trace == roots[0].trace]
            if found and whole(found):
                return found
            assert time.monotonic() < ends, found
            time.sleep(0.05)

    def named(self, name: str) -> SeenSpan:
        (found,) = [one for one in self.spans if one.name == name]
        return found


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind or "string_value")


def _seen(body: bytes) -> Iterator[SeenSpan]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        about = {each.key: _value(each.value) for each in resource.resource.attributes}
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            yield SeenSpan(
                about["service.instance.id"],
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                {each.key: _value(each.value) for each in span.attributes},
                [event.name for event in span.events],
                span.status.code == span.status.STATUS_CODE_ERROR,
            )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.asked.set()
            collector.open.wait()
            if self.path == "/v1/traces":
                collector.spans += _seen(body)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    collector.open.set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collector
    finally:
        collector.open.set()
        server.shutdown()
        server.server_close()


@contextmanager
def traced(process: str = "endpoint", sample: float = 1.0) -> Iterator[Collector]:
    """This process's spans, sent to a collector. They are there once the tracer is closed: `TRACING.close()`."""
    with collecting() as collector:
        tracer = CollectorTracer(process, collector.url, sample)
        TRACING.use(tracer)
        try:
            yield collector
        finally:
            TRACING.use(None)
            tracer.close()
