"""Two hosts, one of which prefills fast and decodes for many: the router splits a long prompt between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cluster import uneven
from benchmarks.parts import Budget
from tests.system.hosts import hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(hosts.missing() is not None, reason=str(hosts.missing())),
]


def test_the_router_splits_by_what_it_has_measured_and_the_words_are_those_of_each_node_alone(tmp_path: Path):
    rounds, split, fell_back = uneven.asked_in_turns(3000, 1, tmp_path, Budget(600.0), print)
    (asked,) = rounds
    together, second = asked[uneven.ROUTER], asked["second alone"]
    assert together.why == uneven.SPLIT and (split, fell_back) == (1, 0)
    assert uneven.same(asked) and together.said.text
    # The second node takes five times as long for the prompt.
    assert together.said.first_s < second.said.first_s / 1.5
