"""Begins the logs and traces of an actor's process."""

from __future__ import annotations

from dataclasses import replace

from pydantic import ValidationError

from ..config.config import Config, Logs, Traces
from ..environment import default_home, trace_collector
from ..errors import ConfigError
from .context import TRACING
from .logs import begin_logs


def begin_telemetry(process: str, logs: Logs, traces: Traces) -> None:
    """Writes logs to the actor's file in the home of its node, and sends spans if there is a collector.

    Args:
        process: the actor's name in the cluster, such as `router` or `replica:m-0`.
    """
    begin_logs(process, logs, default_home())
    if traces.endpoint is None:
        return
    # Without traces none of this is loaded.
    from .traces import CollectorTracer

    TRACING.use(CollectorTracer(process, traces.endpoint, traces.sample))


def with_collector(config: Config) -> Config:
    """Returns the config with the collector that the environment names, unless the config names one.

    Raises:
        ConfigError: the environment's is no URL.
    """
    endpoint = trace_collector()
    if config.traces.endpoint is not None or endpoint is None:
        return config
    try:
        return replace(config, traces=replace(config.traces, endpoint=endpoint))
    except ValidationError:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_ENDPOINT is no URL of a collector: {endpoint!r}") from None
