"""The same figures as the cluster's view and the commands' `--json` write them, by replica: node, whether it is up,
running, waiting, bytes of KV and pictures, and the most of them."""

from __future__ import annotations

from typing import Any

Figures = dict[str, tuple[Any, ...]]


def of_view(view: dict[str, Any]) -> Figures:
    """Of `GET /v1/cluster` and of `satchel top --json`."""
    return {
        each["id"]: (
            each["node"],
            each["up"],
            each["running"],
            each["waiting"],
            each["memory_bytes"],
            each["memory_bytes_max"],
        )
        for each in view["replicas"]
    }


def of_ps(entries: list[dict[str, Any]]) -> Figures:
    """Of `satchel ps --json`."""
    return {
        each["replica"]: (
            each["node"],
            each["up"],
            each["running"],
            each["waiting"],
            each["kv_bytes"],
            each["kv_bytes_max"],
        )
        for each in entries
        if each["replica"]
    }


def of_status(found: dict[str, Any]) -> Figures:
    """Of `satchel status --json`."""
    return {
        name: (
            each["node"],
            each["up"],
            each["vllm:num_requests_running"],
            each["vllm:num_requests_waiting"],
            each["memory_bytes"],
            each["memory_bytes_max"],
        )
        for name, each in found["replicas"].items()
    }
