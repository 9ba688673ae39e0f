"""The documentation and the dashboard name the metrics that `/metrics` has, with their types and labels."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from satchel.api.requests.backend import NodeState, ReplicaStats
from tests.worlds.api.remembering import Remembering

ROOT = Path(__file__).parents[3]
OF_PROMETHEUS = {"le", "__name__"}
"""Labels that Prometheus adds."""

_ROW = re.compile(r"^\| `([a-z_:0-9]+)` \| (\w+) \| [^|]+ \|([^|]*)\| [^|]", re.MULTILINE)
_SELECTED = re.compile(r"((?:vllm:|satchel_)\w+)(?:\{([^}]*)\})?")
_GROUPED = re.compile(r"by \(([^)]*)\)")
DASHBOARD = json.loads((ROOT / "configs/grafana.json").read_text(encoding="utf-8"))


@pytest.fixture
async def families(backend: Any, config: Any) -> AsyncIterator[dict[str, Metric]]:
    """All metrics of an endpoint that has had each of their labels."""
    backend.replicas = [ReplicaStats("r0", "m", True, decode_token_j=0.5)]
    figures: dict[str, Any] = {"disk_bytes": 5, "disk_free_bytes": 7, "agents_let_go": 0, "joules": {"rapl": 8.5}}
    backend.machines = [NodeState("a", "127.0.0.1", (), True, **figures)]
    endpoint = Remembering(backend, config)
    await endpoint.say("Hi")
    await endpoint.say("Hi", "Hello", "And?")
    endpoint.memory.unkept["disk full"] += 1
    text = (await endpoint.client.get("/metrics")).text
    await endpoint.client.aclose()
    yield {
        f"{each.name}_total" if each.type == "counter" else each.name: each
        for each in text_string_to_metric_families(text)
        if not each.name.endswith("_created")
    }


def labels_of(family: Metric) -> set[str]:
    return {label for sample in family.samples for label in sample.labels} - OF_PROMETHEUS


def expressions() -> Iterator[str]:
    """Returns the dashboard's queries, those of its variables included."""
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query")


def test_the_documentation_has_every_metric_with_its_type_and_labels(families: dict[str, Metric]):
    rows = _ROW.findall((ROOT / "docs/metrics.md").read_text(encoding="utf-8"))
    said = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(said) == len(rows), "no metric has two rows"
    assert said == {name: (family.type, labels_of(family)) for name, family in families.items()}


def test_the_dashboard_asks_only_for_metrics_and_labels_that_there_are(families: dict[str, Metric]):
    asked = 0
    for expression in expressions():
        labels = {label.strip() for found in _GROUPED.findall(expression) for label in found.split(",")}
        for name, selectors in _SELECTED.findall(expression):
            family = families[name.removesuffix("_bucket")]
            assert name.endswith("_bucket") is (family.type == "histogram"), expression
            wanted = labels | set(re.findall(r"(\w+)=~?\"", selectors))
            assert wanted - OF_PROMETHEUS <= labels_of(family), expression
            asked += 1
    assert asked > 60


def test_every_panel_of_the_dashboard_has_a_place_and_a_question():
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert all(panel["targets"] and panel["title"] and panel["description"] for panel in panels)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
