"""Spans as a collector gets them, and what happens without a collector."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.config.config import Config, default_config, parse_config
from satchel.cluster.errors import ConfigError
from satchel.cluster.telemetry.context import NO_SPAN, TRACING, answering, carried, request_id, span, working_for
from satchel.cluster.telemetry.process import with_collector
from satchel.cluster.telemetry.traces import CollectorTracer
from tests.worlds.collector import collecting, traced

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"


def test_a_span_has_its_parents_attributes_and_events():
    with traced("replica:m-0") as collector:
        first = TRACING.begin("a request", {}, {"a": "text", "left out": None})
        second = first.child("a phase", {"number": 3})
        second.event("first token")
        for number in (2, 5):
            first.add("tokens", number)
            first.append("reasons", f"stop {number}")
        second.end("QueueFull")
        first.rename("another name")
        first.end()
        first.set({"too": "late"})
        first.event("too late")
        TRACING.close()
        root, phase = collector.named("another name"), collector.named("a phase")
    assert root.attributes == {"a": "text", "tokens": 7, "reasons": ["stop 2", "stop 5"]}
    assert root.process == "replica:m-0" and not root.parent and not root.failed and root.events == []
    assert (phase.parent, phase.trace, phase.events, phase.failed) == (root.id, root.trace, ["first token"], True)
    assert phase.attributes == {"number": 3, "error.type": "QueueFull"}


def test_what_is_carried_makes_a_child_elsewhere():
    with traced() as collector:
        with working_for("req-1", TRACING.begin("here", {})):
            came = carried()
            span().end()
        assert carried() == [] and came[0] == "req-1"
        with answering("there", came):
            assert request_id() == "req-1"
            span().set({"found": 1})
        with pytest.raises(KeyError), answering("failing there", came):
            raise KeyError
        with answering("untraced", ["req-2", ""]):
            assert request_id() == "req-2" and span() is NO_SPAN
        assert request_id() == "" and span() is NO_SPAN
        TRACING.close()
        here, there, failing = (collector.named(name) for name in ("here", "there", "failing there"))
    assert there.parent == here.id and there.attributes == {"found": 1}
    assert failing.parent == here.id and failing.failed and failing.attributes == {"error.type": "KeyError"}
    assert len(collector.spans) == 3


def test_a_callers_decision_to_trace_counts():
    with traced(sample=0.0) as collector:
        assert TRACING.begin("own", {}) is NO_SPAN
        assert TRACING.begin("not wanted", {"traceparent": f"{CALLER}-00"}) is NO_SPAN
        TRACING.begin("wanted", {"traceparent": f"{CALLER}-01"}).end()
        TRACING.close()
    (found,) = collector.spans
    assert (found.name, f"00-{found.trace}-{found.parent}") == ("wanted", CALLER)


def test_a_malformed_parent_is_none():
    with traced() as collector:
        TRACING.begin("a request", {"traceparent": "00-nonsense"}).end()
        TRACING.close()
    assert collector.named("a request").parent == ""


def test_nothing_waits_for_a_collector_that_hangs():
    """`close` gives up, too: the collector still hangs when it has returned."""
    with collecting() as collector:
        collector.open.clear()
        hung = CollectorTracer("router", collector.url, 1.0)
        for number in range(5000):
            hung.begin(f"{number}", {}, None).end()
        assert collector.asked.wait(20)
        hung.begin("another", {}, None).end()
        hung.close()
        assert not collector.open.is_set() and collector.spans == []
        collector.open.set()
        for thread in threading.enumerate():
            if thread.name.startswith("OtelBatch"):
                thread.join(20)


def test_a_collector_that_is_dead_costs_one_line_of_the_log(caplog: pytest.LogCaptureFixture):
    dead = CollectorTracer("router", f"http://127.0.0.1:{free_port()}", 1.0)
    for _ in range(2):
        dead.begin("a request", {}, None).end()
        dead._sender.force_flush()
    dead.close()
    assert len(caplog.records) == 1, caplog.text


def test_without_a_collector_nothing_of_opentelemetry_is_loaded(tmp_path: Path):
    program = (
        "import sys, os; os.environ['SATCHEL_HOME'] = sys.argv[1]\n"
        "from satchel.cluster.config.config import Logs, Traces\n"
        "from satchel.cluster.telemetry.process import begin_telemetry\n"
        "from satchel.cluster.telemetry.context import TRACING, NO_SPAN\n"
        "begin_telemetry('router', Logs(), Traces())\n"
        "assert TRACING.begin('a request', {}) is NO_SPAN and NO_SPAN.child('a phase') is NO_SPAN\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("[]\n", "")


def test_the_environment_names_a_collector_if_the_config_does_not(monkeypatch: pytest.MonkeyPatch):
    config, url = default_config(), "https://collector.lan:4318/otlp"
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert with_collector(config) is config and config.traces.endpoint is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    assert with_collector(config).traces.endpoint == url
    own = _traced("http://here:4318")
    assert with_collector(own) is own
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector.lan")
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT is no URL of a collector: 'collector\.lan'"):
        with_collector(config)


def _traced(endpoint: str) -> Config:
    return parse_config({"models": [{"name": "m", "source": "s"}], "traces": {"endpoint": endpoint}})


def test_a_wrong_url_of_a_collector_is_named_by_its_key():
    with pytest.raises(ConfigError, match=r"traces\.endpoint: "):
        _traced("collector:4318")
