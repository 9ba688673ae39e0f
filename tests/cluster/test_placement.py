"""Which replica runs where."""

from __future__ import annotations

import pytest

from satchel.cluster.config.config import Model
from satchel.cluster.errors import InvalidRequest
from satchel.cluster.placement import place

NODES = ["mac0", "mac1", "mac2"]


def model(**more) -> Model:
    return Model(name="m", source="embedded:recall", **more)


def test_one_replica_a_node_by_default():
    assert place(model(), NODES) == {"m-0": "mac0", "m-1": "mac1", "m-2": "mac2"}
    assert place(model(), NODES, taken={"m-1"}) == {"m-0": "mac0", "m-2": "mac1", "m-3": "mac2"}


def test_fewer_replicas_go_where_most_memory_is_free():
    """A node that has not said comes last; more replicas than nodes begin again with the first."""
    free = {"mac0": 1, "mac2": 9}
    assert place(model(replicas=1), NODES, free_bytes=free) == {"m-0": "mac2"}
    assert list(place(model(replicas=4), NODES, free_bytes=free).values()) == ["mac2", "mac0", "mac1", "mac2"]
    assert list(place(model(replicas=8), NODES, free_bytes=free).values()) == ["mac2", "mac0", "mac1"] * 2 + [
        "mac2",
        "mac0",
    ]
    assert place(model(replicas=1), NODES, free_bytes={}) == {"m-0": "mac0"}


def test_a_model_stays_on_the_nodes_that_it_names():
    assert place(model(nodes=("mac1",)), NODES, free_bytes={"mac0": 9}) == {"m-0": "mac1"}
    with pytest.raises(InvalidRequest, match="mac7"):
        place(model(nodes=("mac7",)), NODES)
