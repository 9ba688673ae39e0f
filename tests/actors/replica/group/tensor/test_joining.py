"""Each backend is told by the environment what MLX reads, for as long as MLX forms its group."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.group.forming import Rank, why_not
from satchel.actors.replica.group.link.connection import Connection
from satchel.actors.replica.group.tensor import joining, member
from satchel.actors.replica.group.tensor.joining import join, refuse_missing
from satchel.actors.replica.group.tensor.member import Joining
from satchel.actors.replica.group.tensor.ranks import Ranks
from satchel.cluster.config.stages import Split
from satchel.cluster.errors import ModelLoadError
from tests.worlds.replica.group import KEY, listener, on_a_thread

ADDRESSES = [("10.0.0.1", 4001), ("10.0.0.2", 4002)]
JACCL = Split(tensor=2, backend="jaccl", rdma=((None, "rdma_en5"), ("rdma_en4", None)))


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What MLX was told, each time that it was asked for a group."""
    told: list[dict[str, Any]] = []

    def init(**given: Any) -> Any:
        found = {name: value for name, value in os.environ.items() if name.startswith(("MLX_", "NCCL_"))}
        files = {name: json.loads(Path(value).read_text()) for name, value in found.items() if value.endswith(".json")}
        told.append({**given, **found, **files})
        rank = int(os.environ["MLX_RANK"])
        return SimpleNamespace(rank=lambda: rank, size=lambda: 2)

    monkeypatch.setattr(mx.distributed, "init", init)
    monkeypatch.setattr(joining, "meet", lambda group: None)
    return told


def test_mlx_is_told_where_the_ranks_are(formed: list[dict[str, Any]]):
    before = dict(os.environ)
    join(Ranks(1, 2), Split(tensor=2, backend="ring", trusted_wires=True), ADDRESSES, bytes)
    join(Ranks(1, 2), Split(tensor=2, backend="nccl", trusted_wires=True), ADDRESSES, bytes)
    join(Ranks(1, 2), JACCL, ADDRESSES, lambda data: data * 2)
    ring, nccl, jaccl = formed
    assert ring["MLX_HOSTFILE"] == [["10.0.0.1:4001"], ["10.0.0.2:4002"]] and ring["backend"] == "ring"
    assert nccl["NCCL_HOST_IP"] == "10.0.0.1" and nccl["NCCL_PORT"] == "4001" and nccl["MLX_WORLD_SIZE"] == "2"
    assert jaccl["MLX_IBV_DEVICES"] == [[None, "rdma_en5"], ["rdma_en4", None]]
    # MLX would open a port without it.
    assert jaccl["all_gather_factory"](1, 2)(b"abc", 3) == b"abcabc"
    assert {each["MLX_RANK"] for each in formed} == {"1"} and all(each["strict"] for each in formed)
    assert dict(os.environ) == before


def test_ranks_agree_on_addresses_and_exchange_bytes_on_their_own_connections(monkeypatch: pytest.MonkeyPatch):
    """Also what JACCL has to say, so nobody else can take part in it."""
    found: dict[int, Any] = {}

    def joined(ranks: Ranks, split: Split, addresses: Any, gather: Any) -> None:
        said = bytes([ranks.rank()]) * 3
        found[ranks.rank()] = [tuple(each) for each in addresses], gather(said), gather(said)

    monkeypatch.setattr(member, "join", joined)
    until = time.monotonic() + 20
    listens = [listener() for _ in range(2)]

    def follow(rank: int) -> None:
        sock, _ = listens[rank].accept()
        calls, way = Connection.accept(sock, KEY, str(rank)), Joining(JACCL, 0.2, 20.0, 200.0)
        way.follow(Ranks(rank, 3), calls, "127.0.0.1", until)
        way.end()
        calls.close()

    with on_a_thread(lambda: follow(0)) as one, on_a_thread(lambda: follow(1)) as two:
        calls = [Connection.connect(each.getsockname()[:2], KEY, str(rank), until) for rank, each in enumerate(listens)]
        way = Joining(JACCL, 0.2, 20.0, 200.0)
        way.lead(Ranks(2, 3), calls, "127.0.0.1", until)
        way.end()
    for connection in (*calls, *listens):
        connection.close()
    assert one.exception() is None and two.exception() is None
    assert found[0] == found[1] == found[2]
    addresses, data, _ = found[0]
    assert data == b"\0\0\0\1\1\1\2\2\2" and len({port for _, port in addresses}) == 3


def test_a_machine_without_the_backend_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mx.distributed, "is_available", lambda backend: backend == "ring")
    refuse_missing(Split(tensor=2, backend="ring", trusted_wires=True))
    with pytest.raises(ModelLoadError, match="no backend jaccl: it needs macOS"):
        refuse_missing(JACCL)
    with pytest.raises(ModelLoadError, match="no backend nccl: it needs NVIDIA cards"):
        refuse_missing(Split(tensor=2, backend="nccl", trusted_wires=True))


SHARE = Rank(0, 4, 4, {"dtype": "float32"}, 0, 2)


@pytest.mark.parametrize(
    "other, why",
    [
        (Rank(0, 4, 4, {"dtype": "float32"}, 1, 2), ""),
        (Rank(0, 4, 4, {"dtype": "float32"}, 0, 2), "their shares are [(0, 2), (0, 2)]"),
        (Rank(0, 4, 4, {"dtype": "float32"}, 1, 3), "their shares are"),
        (Rank(0, 4, 4, {"dtype": "float32"}), "their shares are"),
        (Rank(0, 4, 4, {"dtype": "bfloat16"}, 1, 2), "stage 0 has dtype 'float32'"),
    ],
)
def test_shares_make_a_model_if_each_is_there_once_and_all_compute_alike(other: Rank, why: str):
    found = why_not([SHARE, other])
    assert why in found and bool(found) == bool(why)
