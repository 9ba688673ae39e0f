"""`devices: auto` on a machine with two CUDA cards, which only a stand-in for `nvidia-smi` knows of: the model computes
on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.home import Home
from tests.worlds.fake_cards import UUIDS, fake_nvidia_smi, path_with

from ..hosts.hosts import Talk
from ..serving import COMMAND, RECALL, serving

CARDS = dict(zip(["local", "local-1"], UUIDS, strict=True))

ASK = """
import json, os, sys
from pathlib import Path
from satchel.cluster.connection import connect_ray, find_cluster
from satchel.cluster.home import Home

connect_ray(find_cluster(Home(Path(sys.argv[1]))))
import ray
from satchel.actors.protocol import registry
from satchel.actors.protocol.names import ROUTER, replica_actor_name, store_actor_name
from satchel.actors.rpc.client import actor_handle

def shown(actor):
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("SATCHEL_CARD")

(entry,) = registry.entries()
actors = {replica_actor_name(replica): node for replica, node in entry.replicas.items()}
actors |= {store_actor_name(node.name): node.name for node in registry.nodes()} | {ROUTER: "local"}
print(json.dumps([[node, *ray.get(actor_handle(name).__ray_call__.remote(shown))] for name, node in actors.items()]))
"""


@pytest.mark.slow
def test_each_card_has_a_node_whose_processes_see_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", path_with(fake_nvidia_smi(tmp_path / "bin")))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    home, port = tmp_path / "home", free_port()
    home.mkdir()
    config = home / "config.yaml"
    # JSON is YAML.
    config.write_text(json.dumps({"models": [RECALL], "devices": "auto", "replication": 0}))
    with serving(home, "--config", str(config), "--port", str(port)):
        talk = Talk(f"http://127.0.0.1:{port}")
        assert talk.answering() == {*CARDS}
        asked = subprocess.run([sys.executable, "-c", ASK, str(home)], capture_output=True, text=True, timeout=120)
        assert asked.returncode == 0, asked.stderr
        seen = json.loads(asked.stdout.splitlines()[-1])
        # Two replicas, two stores and the router.
        assert len(seen) == 5 and {node for node, *_ in seen} == {*CARDS}
        assert [each for each in seen if each[1:] != [CARDS[each[0]]] * 2] == []
        command = [*COMMAND, "status", "--json", "--home", str(home)]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        cards = {node["name"]: node["card"] for node in json.loads(told.stdout)["nodes"]}
        assert cards == {"local": "card 0 (NVIDIA H200)", "local-1": "card 1 (NVIDIA H200)"}
        assert all(Home(each).kv.is_dir() for each in (home, home / "nodes" / "local-1"))
