"""`devices` in the config: which cards become nodes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from satchel.cluster.bring_up.doctor import check_cards
from satchel.cluster.bring_up.launch import JoinOrder
from satchel.cluster.bring_up.runtime import LocalCluster
from satchel.cluster.config.config import Config, load_config, parse_config
from satchel.cluster.config.nodes import Node
from satchel.cluster.devices.cards import Card
from satchel.cluster.devices.devices import with_devices
from satchel.cluster.environment import child_environment
from satchel.cluster.errors import ConfigError
from satchel.cluster.home import Home
from satchel.cluster.trust.invitations import Invitation
from tests.worlds.fake_cards import UUIDS, fake_nvidia_smi, path_with

CARDS = tuple(Card(number, uuid, 2**37, "NVIDIA H200") for number, uuid in enumerate(UUIDS))
EXAMPLE = Path(__file__).parents[3] / "configs" / "several-cards.yaml"


def config(*, model: dict[str, Any] | None = None, **fields: Any) -> Config:
    return parse_config({"models": [{"name": "a", "source": "b", **(model or {})}], **fields})


def placed(found: Config) -> dict[str, int | str | None]:
    assert found.devices is None
    return {node.name: node.device for node in found.machines}


@pytest.mark.parametrize(
    ("devices", "nodes"),
    [
        ("auto", {"local": UUIDS[0], "local-1": UUIDS[1]}),
        (2, {"local": UUIDS[0], "local-1": UUIDS[1]}),
        (1, {"local": UUIDS[0]}),
        ([1], {"local": UUIDS[1]}),
        ([1, 0], {"local": UUIDS[1], "local-1": UUIDS[0]}),
        ([UUIDS[1], 0], {"local": UUIDS[1], "local-1": UUIDS[0]}),
    ],
)
def test_each_card_becomes_a_node(devices: Any, nodes: dict[str, str]):
    assert placed(with_devices(config(devices=devices), CARDS)) == nodes


@pytest.mark.parametrize("cards", [(), CARDS[:1]])
def test_auto_is_one_node_as_ever_with_at_most_one_card(cards: tuple[Card, ...]):
    assert with_devices(config(devices="auto"), cards) == config()
    named = config(devices="auto", nodes=[{"name": "a"}, {"name": "b"}])
    if not cards:
        assert placed(with_devices(named, cards)) == {"a": None, "b": None}


def test_local_nodes_get_a_card_each_and_keep_what_is_theirs():
    nodes = [{"name": "a", "disk_bytes_max": 5}, {"name": "b", "memory_bytes_max": 7}]
    for devices in ("auto", 2, [0, 1]):
        found = with_devices(config(devices=devices, nodes=nodes), CARDS)
        assert placed(found) == {"a": UUIDS[0], "b": UUIDS[1]}
        assert found.nodes[0].disk_bytes_max == 5 and found.nodes[1].memory_bytes_max == 7


def test_the_example_has_a_node_for_each_card():
    assert placed(with_devices(load_config(EXAMPLE), CARDS)) == {"local": UUIDS[0], "local-1": UUIDS[1]}


@pytest.mark.parametrize(
    ("fields", "where", "why"),
    [
        ({"devices": 3}, "devices", "3 cards are asked for, and this machine has 2 cards"),
        ({"devices": [0, 2]}, "devices[1]", "there is no card 2"),
        ({"devices": [0, UUIDS[0]]}, "devices[1]", "card 0 (NVIDIA H200) is there twice"),
        ({"devices": "auto", "nodes": [{"name": "a"}]}, "devices", "1 nodes for 2 cards"),
        ({"devices": "auto", "model": {"nodes": ["local-2"]}}, "models[0].nodes[0]", "there is no node 'local-2'"),
    ],
)
def test_what_does_not_fit_the_machine_is_refused(fields: dict[str, Any], where: str, why: str):
    with pytest.raises(ConfigError) as refused:
        with_devices(config(**fields), CARDS)
    assert refused.value.param == where and f"{where}: " in refused.value.message and why in refused.value.message


def test_cards_are_asked_for_where_there_are_none():
    with pytest.raises(ConfigError, match="2 cards are asked for, and this machine has no card"):
        with_devices(config(devices=2), ())


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"devices": 0}, "devices"),
        ({"devices": []}, "devices"),
        ({"devices": "all"}, "devices"),
        ({"devices": [-1]}, "devices"),
        ({"devices": ["card 1"]}, "devices"),
        ({"devices": [1, 0, 1]}, "devices[2]"),
        ({"devices": 2, "nodes": [{"name": "a"}]}, "devices"),
        ({"devices": [0], "nodes": [{"name": "a"}, {"name": "b"}]}, "devices"),
        ({"devices": 2, "nodes": [{"name": "a", "device": 0}, {"name": "b"}]}, "nodes[0].device"),
        ({"nodes": [{"name": "a", "device": 0}, {"name": "b", "device": 0}]}, "nodes[1].device"),
        ({"devices": 1, "nodes": [{"name": "a", "address": "10.0.0.1"}]}, "devices"),
        ({"devices": 2, "model": {"nodes": ["local-2"]}}, "models[0].nodes[0]"),
    ],
)
def test_what_fits_no_machine_is_refused_when_it_is_read(fields: dict[str, Any], where: str):
    with pytest.raises(ConfigError) as refused:
        config(**fields)
    assert (refused.value.param or "").startswith(where), refused.value.message


def test_a_model_may_name_nodes_that_devices_makes():
    assert config(devices=2, model={"nodes": ["local-1"]}).models[0].nodes == ("local-1",)
    assert with_devices(config(devices="auto", model={"nodes": ["local-1"]}), CARDS).nodes[1].name == "local-1"


def test_other_machines_get_a_card_by_their_own_number_even_the_same():
    nodes = [{"name": "a", "address": "10.0.0.1", "device": 0}]
    nodes += [{"name": "b", "address": "10.0.0.2", "ssh": "b", "device": 0}]
    assert [node.device for node in config(nodes=nodes).nodes] == [0, 0]


def test_a_card_travels_with_the_order_to_join():
    for device in (1, UUIDS[1]):
        node = Node(name="mac1", device=device)
        order = JoinOrder(Invitation("127.0.0.1:1", "f" * 43, "s" * 32), node)
        assert JoinOrder.from_line(order.to_line()) == order
        assert json.loads(json.dumps(asdict(node)))["device"] == device


def test_processes_of_a_node_see_its_card_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("SATCHEL_CARD", UUIDS[1])
    alone = child_environment(Home(tmp_path), card=UUIDS[0])
    assert alone["CUDA_VISIBLE_DEVICES"] == alone["SATCHEL_CARD"] == UUIDS[0]
    assert alone["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "0", "Ray does not clear it"
    plain = child_environment(Home(tmp_path))
    assert plain["CUDA_VISIBLE_DEVICES"] == "0,1" and plain["SATCHEL_CARD"] == ""


def test_a_node_does_not_start_without_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", path_with(fake_nvidia_smi(tmp_path / "bin")))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    home = Home(tmp_path / "home")
    with pytest.raises(ConfigError, match="there is no card 2"):
        LocalCluster(home, node=Node(name="local", device=2)).start()
    assert not home.root.exists()


def test_doctor_says_which_node_has_which_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_cards(config()) == check_cards(config(devices="auto")) == []
    (none,) = check_cards(config(devices=2))
    assert none.result == "fail" and "this machine has no card" in none.found
    monkeypatch.setenv("PATH", path_with(fake_nvidia_smi(tmp_path / "bin")))
    (several,) = check_cards(config())
    assert several.result == "ok" and several.found.endswith("one of them is used: `devices: auto` gives each a node")
    (each,) = check_cards(config(devices="auto"))
    assert (each.result, each.found) == ("ok", "local has card 0 (NVIDIA H200); local-1 has card 1 (NVIDIA H200)")
    (wrong,) = check_cards(config(nodes=[{"name": "a", "device": 5}]))
    assert wrong.result == "fail" and "there is no card 5" in wrong.found
