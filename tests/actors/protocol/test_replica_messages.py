"""Messages survive the wire, and another version is refused."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from satchel.actors.protocol.replica_messages import (
    EmbeddingInfo,
    GenerateRequest,
    PooledTexts,
    PoolingRequest,
    ReplicaStats,
    Sampling,
    SequenceUpdate,
)
from satchel.actors.protocol.router_messages import (
    AgentPlace,
    Chain,
    Decision,
    Explanation,
    NodeReport,
    Places,
    ReplicaReport,
    RouteRequest,
    StoreReport,
)
from satchel.actors.rpc.codec import decode, encode
from satchel.cluster import errors
from tests.worlds.direct import model_info

# Pairs and triples come out of msgpack as lists.
CLAIMS: Any = [["t/a", 3, True]]
TOMBSTONES: Any = [["t/c", 2]]
PICTURES: Any = [[b"p", 3, 2, True]]

MESSAGES = [
    GenerateRequest("r", "c", "m", "t/a", [1, 2], [b"x" * 32], b"r" * 32, Sampling(seed=2**63 - 1), 3, 1.5, 4),
    SequenceUpdate("r", [1, 2], None, 5),
    SequenceUpdate("s", [], "error", None, {"kind": "QueueFull"}),
    RouteRequest("r", "m", "", [b"x"], 7, ["a"]),
    RouteRequest("r", "m", "", [b"x"], 7, model_id=b"m", others=[Chain(b"n", [b"y"], PICTURES)]),
    Decision("b", "prefix", model_id=b"m", model_ids=[b"m", b"n"]),
    Decision("a", "prefix", 512, ["a"], {"queue": [0.5]}, "mac0", "mac1", 256),
    ReplicaReport("a", "m", "i", 1, 2, 3, 4, 5, 6.0, ["r"], [b"x"], [], True, "mac0", 0.02, 3e9, 36864.0, -1),
    Places([AgentPlace("t/a", "mac0", True, 3, ["mac1"]), AgentPlace("t/b", "", False, 1)], ["mac2"]),
    NodeReport("mac0", True, 0.5, links={"mac1": 1e9}, replicas=["a"]),
    NodeReport("mac1", True),
    Explanation("a", "prefix", costs_s={"a": {"queue": 0.5}}),
    ReplicaStats("a", "m", True, 1, computing={"device": "cpu"}),
    PoolingRequest("r", "m", [[1, 2], [3]], [1, 0], [5, 6], 2, 1.5, "t", "f"),
    PooledTexts(2, b"12345678"),
    model_info(embedding=EmbeddingInfo(64, "mean", False, True, "")),
    StoreReport("mac0", "i", 1, [b"x"], [], False, CLAIMS, ["t/b"], TOMBSTONES, {"mac1": 1e9}, 5, 6, True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: object):
    assert decode(type(message), encode(message)) == message


def test_another_version_is_refused():
    with pytest.raises(ValueError, match="version 99"):
        decode(SequenceUpdate, bytes(msgpack.packb([99, [[]]]) or b""))


def test_every_error_of_the_tree_survives_the_wire():
    def tree(cls: type[errors.SatchelError]) -> list[type[errors.SatchelError]]:
        return [cls, *(found for child in cls.__subclasses__() for found in tree(child))]

    for cls in tree(errors.SatchelError):
        sent = cls("why", param="temperature", retry_after_s=2.0)
        got = errors.from_wire(sent.to_wire())
        assert (type(got), got.message, got.param, got.retry_after_s) == (cls, "why", "temperature", 2.0)
        assert cls.__name__ in (errors.__doc__ or ""), "the tree in the docstring is complete"
    assert type(errors.from_wire({"kind": "Unheard", "message": "x"})) is errors.SatchelError
