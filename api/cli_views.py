"""The commands that look and change nothing: `status`, `models`, `doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..cluster.config import Config, Home
from .cli_http import client, error_of, get_json, running_endpoint

_COLUMNS = {
    "satchel_requests_running": "runs",
    "satchel_requests_waiting": "waits",
    "satchel_requests_total": "requests",
    "satchel_prompt_tokens_total": "tokens in",
    "satchel_cached_tokens_total": "cached",
    "satchel_generated_tokens_total": "out",
}
"""A replica's numbers, by their names in `/metrics`."""


def _replicas(metrics: str) -> dict[str, dict[str, Any]]:
    """The replicas in Prometheus' text: name -> model, up, and the numbers of `_COLUMNS` by metric name."""
    replicas: dict[str, dict[str, Any]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            name = sample.labels.get("replica")
            if name is None:
                continue
            entry = replicas.setdefault(name, {})
            if sample.name == "satchel_replica_up":
                entry.update(model=sample.labels.get("model", ""), up=sample.value == 1.0)
            elif sample.name in _COLUMNS:
                entry[sample.name] = int(sample.value)
    return replicas


def _table(*titles: str) -> Table:
    """A table that shows long paths whole, on several lines."""
    table = Table(box=SIMPLE_HEAD)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def show_status(home: Home, *, as_json: bool) -> None:
    """Prints the server, its models and its replicas.

    Raises:
        NotRunning: no server runs on the home, or it does not answer.
    """
    record, url = running_endpoint(home)
    with client(url, timeout_s=15.0) as session:
        health = get_json(session, "/health", also=(503,))
        metrics = session.get("/metrics")
        if not metrics.is_success:
            raise error_of(metrics)
    replicas = _replicas(metrics.text)
    if as_json:
        found = {
            "home": str(home.root),
            "url": url,
            "pid": record.pid,
            "version": record.version,
            "logs": str(record.log_dir),
            "status": health.get("status"),
            "models": health.get("models", {}),
            "replicas": replicas,
        }
        print(json.dumps(found, indent=2))
        return
    console = Console()
    console.print(f"{url}  {health.get('status', 'unknown')}  (process {record.pid}, version {record.version})")
    table = _table("replica", "model", "up", *_COLUMNS.values())
    for name, entry in sorted(replicas.items()):
        numbers = [str(entry.get(metric, "")) for metric in _COLUMNS]
        table.add_row(Text(name), Text(entry.get("model", "")), "yes" if entry.get("up") else "no", *numbers)
    for name, answers in health.get("models", {}).items():
        if not any(entry.get("model") == name for entry in replicas.values()):
            table.add_row("", Text(name), "yes" if answers else "no")
    console.print(table)


def show_models(home: Home, *, as_json: bool) -> None:
    """Prints the models.

    Raises:
        NotRunning: no server runs on the home, or it does not answer.
    """
    _, url = running_endpoint(home)
    with client(url, timeout_s=15.0) as session:
        found = get_json(session, "/v1/models")
    if as_json:
        print(json.dumps(found.get("data", []), indent=2))
        return
    table = _table("model", "context", "memory")
    for model in found.get("data", []):
        table.add_row(model.get("id", ""), f"{model.get('max_model_len', 0):,} tokens", model.get("memory", ""))
    Console().print(table)


def show_doctor(config: Config, home: Home, *, as_json: bool) -> None:
    """Prints what the doctor found. Exits with 1 where something failed."""
    from ..cluster.doctor import examine

    checks = examine(config, home)
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        table = _table("check", "", "found", "how to mend it")
        for check in checks:
            table.add_row(
                check.name, Text(check.result, style=colours[check.result]), Text(check.found), Text(check.mend)
            )
        Console().print(table)
    if any(check.result == "fail" for check in checks):
        raise typer.Exit(1)
