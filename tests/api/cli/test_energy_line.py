"""The line of `satchel status` about energy."""

from __future__ import annotations

from satchel.api.cli.views import energy_line


def test_each_counter_of_each_node_is_named():
    nodes = [{"name": "a", "joules": {"rapl": 500.0, "nvml": 12_340.0}}, {"name": "b", "joules": {}}, {"name": "c"}]
    assert energy_line(nodes) == "Energy: a 12.3 kJ (nvml), a 0.5 kJ (rapl)"
