"""The last hour in samples: what is counted between two, and that no more than an hour is kept."""

from __future__ import annotations

from typing import Any

from satchel.api.views.history import EVERY_S, KEPT_S, History

NODE = {"tiers": {"memory_bytes": 10, "disk_bytes": None}}


def view(*replicas: dict[str, Any], nodes: tuple[dict[str, Any], ...] = (NODE,)) -> dict[str, Any]:
    return {"nodes": list(nodes), "replicas": list(replicas)}


def replica(id: str, generated: int | None, *, prompt: int = 0, cached: int = 0, running: int = 0) -> dict[str, Any]:
    totals = {"requests": 0, "prompt_tokens": prompt, "cached_tokens": cached, "generated_tokens": generated}
    return {
        "id": id,
        "running": running,
        "waiting": 1,
        "memory_bytes": 7,
        "totals": None if generated is None else totals,
    }


def test_a_sample_counts_what_came_since_the_one_before():
    history = History()
    history.add(view(replica("a", 100), replica("b", 50)), 1000.0)
    history.add(view(replica("a", 150, prompt=40, cached=30, running=2), replica("b", 60)), 1005.0)
    (first,), (second,) = history.after(0)[:1], history.after(1)
    assert (first["tokens_per_s"], first["prompt_tokens"]) == (0.0, 0)
    assert (second["tokens_per_s"], second["prompt_tokens"], second["cached_tokens"]) == (12.0, 40, 30)
    assert (second["running"], second["waiting"], second["memory_bytes"]) == (2, 2, 14)
    assert (second["kept_bytes"], second["disk_bytes"]) == (10, 0)


def test_a_replica_that_restarts_or_is_silent_takes_nothing_away():
    history = History()
    history.add(view(replica("a", 100), replica("b", 100)), 0.0)
    history.add(view(replica("a", 5), replica("b", None)), 10.0)
    history.add(view(replica("a", 25), replica("b", 130)), 20.0)
    assert [sample["tokens_per_s"] for sample in history.after(0)] == [0.0, 0.0, 2.0]


def test_an_hour_is_kept_and_readers_get_what_they_have_not_seen():
    history, most = History(), int(KEPT_S / EVERY_S)
    for number in range(most + 10):
        history.add(view(), number * EVERY_S)
    columns = history.columns()
    assert len(columns["at"]) == len(columns["tokens_per_s"]) == most and columns["count"] == most + 10
    assert columns["at"][-1] - columns["at"][0] == KEPT_S - EVERY_S
    assert [sample["at"] for sample in history.after(most + 8)] == columns["at"][-2:]
    assert history.after(history.count) == [] and len(history.after(0)) == most
