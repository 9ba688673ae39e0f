"""`satchel agents`, `satchel explain` and `satchel status` with a real server: what they do and print."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from satchel.actors.protocol.store_messages import Commit, Content
from satchel.api.cli.tables import size
from satchel.api.protocols.satchel import cluster_routes
from satchel.api.requests.backend import NodeState
from satchel.api.text.templates.habits import TemplateHabits
from satchel.cluster.errors import SatchelError
from satchel.cluster.keys import create_key, write_owner_key
from tests.worlds.api.served_models import served_model

from .conftest import Served


async def test_agents_are_listed_with_their_homes(served: Served) -> None:
    text = await served.says("agents")
    assert all(part in text for part in ("ann", "bob", "mac0", "mac1", "satchel/tiny"))
    assert "There are more" not in text
    text = await served.says("agents", "list", "--limit", "1")
    assert "ann" in text and "bob" not in text and "--after ann" in text
    (found,) = json.loads(await served.says("agents", "list", "--after", "ann", "--json"))
    assert (found["id"], found["home"], found["copies"]) == ("bob", "mac0", ["mac1"])


async def test_models_are_listed_with_what_their_templates_forget(served: Served) -> None:
    generator = served.endpoint.generator
    text = await generator.text_model(await generator.served("other"))
    text.template._habits["{}"] = TemplateHabits(dated=True)
    (line,) = [line for line in (await served.says("models")).splitlines() if "template" in line]
    assert line.startswith("other: the template shows the date")


async def test_models_and_doctor_say_how_kv_is_kept_and_why(served: Served, backend) -> None:
    """If a model's entry has no KV policy, as one that an earlier version loaded, nothing is printed for it."""
    why = "KL 0.0021 of at most 0.01 over 256 places"
    backend.served[0] = served_model(backend.served[0], kv="q4", kv_why=why)
    found = {model["id"]: model["kv"] for model in json.loads(await served.says("models", "--json"))}
    assert found["satchel/tiny"] == {"policy": "q4", "why": why}
    (line,) = [line for line in (await served.says("models")).splitlines() if "keeps its KV" in line]
    assert line == f"satchel/tiny keeps its KV as q4: {why}"
    # Other checks may fail on this machine.
    checks = json.loads((await served.run("doctor", "--json")).output)
    (check,) = [check for check in checks if check["name"].startswith("kv of ")]
    assert (check["name"], check["result"], check["found"]) == ("kv of satchel/tiny", "ok", f"q4: {why}")


async def test_an_agent_is_shown_with_its_home(served: Served) -> None:
    text = await served.says("agents", "show", "ann")
    assert text.startswith("ann on mac0, copies on mac1: cold")
    found = json.loads(await served.says("agents", "show", "ann", "--json"))
    assert (found["id"], found["object"], found["home"], len(found["branches"])) == ("ann", "agent", "mac0", 1)
    assert "picture" not in text and found["pictures"] == []


@pytest.mark.parametrize(("shown", "said"), [([7], "1 picture,"), ([7, 8, 7], "2 pictures,")])
async def test_of_an_agents_pictures_the_number_is_shown(served: Served, shown: list[int], said: str) -> None:
    """Each picture counts once, however often it is in the transcript."""
    parts = [{"type": "image_url", "image_url": {"url": f"picture:{number:064x}/8x6"}} for number in shown]
    transcript = json.dumps([{"role": "user", "content": parts}]).encode()
    await served.store.commit("default/eve", Commit(b"1" * 32, Content(bytes(4), "x", transcript), 1, 0))
    assert f" of words, {said} used " in await served.says("agents", "show", "eve")
    found = json.loads(await served.says("agents", "show", "eve", "--json"))["pictures"]
    assert found[0] == {"hash": f"{7:064x}", "width": 8, "height": 6}


async def test_an_agent_is_moved(served: Served) -> None:
    text = await served.says("agents", "move", "ann", "mac1")
    assert text == "ann has moved from mac0 to mac1: 300 tokens, 1 blocks, 5.0 kB in 0.25 s\n"
    assert served.store.moves == [("default/ann", "mac1")]
    assert await served.says("agents", "move", "ann", "mac1") == "ann already lives on mac1\n"
    assert json.loads(await served.says("agents", "move", "bob", "mac0", "--json"))["moved"] is False


async def test_an_agent_is_copied_and_forgotten(served: Served) -> None:
    assert await served.says("agents", "fork", "ann", "carl") == "carl is a copy of ann (1 branches)\n"
    assert await served.says("agents", "forget", "ann") == "ann is erased\n"
    assert [each["id"] for each in json.loads(await served.says("agents", "--json"))] == ["bob", "carl"]


async def test_agents_of_keys_are_reached_by_the_name_of_the_key(served: Served) -> None:
    sentence = "there is no key 'carol'; `satchel keys list` names them"
    assert sentence in await served.refuses("agents", "give", "bob", "--to", "carol")
    create_key(served.home, "carol")
    write_owner_key(served.home)
    assert "now belongs to carol" in await served.says("agents", "give", "bob", "--to", "carol")
    assert "bob" not in await served.says("agents")
    text = await served.says("agents", "--all")
    assert "carol" in text and "default" in text and "ann" in text
    found = json.loads(await served.says("agents", "list", "--all", "--json"))
    assert [(each["tenant"], each["id"], each["home"]) for each in found] == [
        ("carol", "bob", "mac0"),
        ("default", "ann", "mac0"),
    ]
    assert "bob on mac0" in await served.says("agents", "show", "bob", "--tenant", "carol")
    assert "is a copy of bob" in await served.says("agents", "fork", "bob", "dan", "--tenant", "carol")
    assert "dan is erased" in await served.says("agents", "forget", "dan", "--tenant", "carol")
    assert "there is no agent 'bob'" in await served.refuses("agents", "show", "bob")
    assert "is no key's name" in await served.refuses("agents", "--tenant", "no/body")
    assert "give one of them" in await served.refuses("agents", "--tenant", "carol", "--all")


async def test_an_agent_is_carried_in_a_file(served: Served, tmp_path: Path) -> None:
    satchel, transcript = tmp_path / "ann.satchel", await served.store.transcript("default/ann")
    text = await served.says("agents", "pack", "ann", str(satchel))
    first, last = text.splitlines()
    assert re.fullmatch(r"ann: [\d.]+ k?B", first), "its size, before anything comes"
    assert last.startswith(f"ann is packed into {satchel} (") and satchel.stat().st_mode & 0o777 == 0o600
    assert await served.refuses("agents", "pack", "ann", str(satchel)) == f"{satchel} exists already"
    there = await served.run("agents", "unpack", str(satchel))
    assert "409: there is an agent 'ann' already" in str(there.exception)
    assert "eve is here: branches: 1, entries of KV: 0 of 0" in await served.says(
        "agents", "unpack", str(satchel), "--as", "eve"
    )
    assert json.loads(await served.says("agents", "unpack", str(satchel), "--replace", "--json"))["replaced"]
    assert await served.store.transcript("default/eve") == await served.store.transcript("default/ann") == transcript
    assert not [*(tmp_path / "kv" / "satchels").iterdir()], "nothing stays on the way"


async def test_a_passphrase_locks_a_satchel(served: Served, tmp_path: Path) -> None:
    satchel, right, wrong = tmp_path / "ann.satchel", tmp_path / "right", tmp_path / "wrong"
    right.write_text("correct horse\n")
    wrong.write_text("battery staple\n")
    await served.says("agents", "pack", "ann", str(satchel), "--passphrase-file", str(right))
    assert b"Hi" not in satchel.read_bytes()
    unpack = ["agents", "unpack", str(satchel), "--as", "eve", "--passphrase-file"]
    assert "passphrase is another one" in await served.refuses(*unpack, str(wrong))
    assert "no terminal" in await served.refuses(*unpack[:-1])
    locked = await served.endpoint.client.put("/v1/agents/eve/satchel", content=satchel.read_bytes())
    assert (locked.status_code, locked.json()["error"]["code"]) == (400, "invalid_satchel")
    assert await served.refuses("agents", "show", "eve") == "the endpoint answered 404: there is no agent 'eve'"
    assert "eve is here" in await served.says(*unpack, str(right))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["agents", "show", "nobody"], "the endpoint answered 404: there is no agent 'nobody'"),
        (["agents", "forget", "nobody"], "the endpoint answered 404: there is no agent 'nobody'"),
        (["agents", "move", "ann", "mac7"], "the endpoint answered 400: there is no node 'mac7'"),
        (["agents", "fork", "ann", "bob"], "the endpoint answered 409: "),
        (["agents", "show", "../cluster"], "agent_id must be 1 to 128 of the characters"),
        (["agents", "show", "zoë"], "agent_id must be 1 to 128 of the characters"),
        (["agents", "show", ""], "agent_id must be 1 to 128 of the characters"),
        (["agents", "forget", ".."], "the endpoint answered 404: there is no agent '..'"),
        (["explain", "nothing"], "the endpoint answered 404: no decision about request 'nothing' is remembered"),
    ],
)
async def test_what_cannot_be_is_one_sentence(served: Served, arguments: list[str], sentence: str) -> None:
    assert (await served.refuses(*arguments)).startswith(sentence)
    assert len(json.loads(await served.says("agents", "--json"))) == 2, "nobody has come or gone"


async def test_a_decision_is_shown_the_cheapest_first(served: Served, backend) -> None:
    backend.explained["r/1"] = {
        "replica": "m-0",
        "node": "mac0",
        "why": "hot: 512 tokens",
        "cached_tokens": 512,
        "pull_from": "mac1",
        "pull_tokens": 256,
        "costs_s": {"m-1": {"total": 0.5, "queue": 0.25}, "m-0": {"total": 0.125, "queue": 0.0}},
    }
    text = await served.says("explain", "r/1")
    assert text.startswith("m-0 on mac0: hot: 512 tokens\n512 tokens of the prompt need not be computed there, 256 of")
    assert "pulled from mac1" in text and text.index("0.1250") < text.index("0.5000")
    assert json.loads(await served.says("explain", "r/1", "--json"))["pull_from"] == "mac1"
    assert "The actual values are shown once the request has ended." in text
    backend.explained["r/1"] |= {"actual_cached_tokens": 256, "actual_first_token_s": 0.375}
    text = await served.says("explain", "r/1")
    assert "Cached tokens: 512 estimated, 256 actual." in text
    assert "Seconds to the first token: 0.1250 estimated, 0.3750 actual." in text


async def test_a_split_request_says_what_both_do(served: Served, backend) -> None:
    backend.explained["r/2"] = {
        "replica": "m-0",
        "node": "air",
        "why": "prefill on studio, decode on air",
        "cached_tokens": 256,
        "pull_from": "studio",
        "pull_tokens": 3999,
        "prefill_on": "m-1",
        "split_costs_s": {"prefill": 1.5, "total": 2.25, "alone": 9.0},
    }
    text = " ".join((await served.says("explain", "r/2")).split())
    assert text.startswith(
        "m-0 on air: prefill on studio, decode on air 3999 tokens of the prompt come from m-1, which"
    )
    assert "has 256 already" in text and "prefill 1.5000, total 2.2500, alone 9.0000" in text


async def test_status_shows_nodes(served: Served) -> None:
    text = await served.says("status")
    assert all(part in text for part in ("mac0", "mac1", "2.5 MB", "mac1 thunderbolt 1.5 GB/s"))
    assert "mac0 ethernet rate unknown" in text, "nothing has measured it"
    found = json.loads(await served.says("status", "--json"))
    assert [node["name"] for node in found["nodes"]] == ["mac0", "mac1"]
    assert (found["replicas"]["m-0"]["node"], found["replicas"]["m-0"]["pid"]) == ("mac0", 4711)


async def test_status_and_doctor_say_whose_disk_is_full(served: Served, backend) -> None:
    async def checks() -> dict[str, dict[str, str]]:
        found = json.loads((await served.run("doctor", "--json")).output)
        return {check["name"]: check for check in found if check["name"].startswith("disk of")}

    assert await checks() == {} and "disk is full" not in await served.says("status")
    backend.machines[1] = replace(backend.machines[1], disk_full=True)
    assert "mac1 cannot write KV to disk, and tries again: its disk is full" in await served.says("status")
    (check,) = (await checks()).values()
    assert (check["name"], check["result"]) == ("disk of mac1", "warn")
    assert check["found"] == "KV is not written: its disk is full"
    assert "make room" in check["mend"]


async def test_status_shows_the_rest_where_the_cluster_cannot_be_asked(served: Served, backend, monkeypatch) -> None:
    async def fails() -> list[NodeState]:
        raise SatchelError("no")

    monkeypatch.setattr(cluster_routes, "FRESH_S", -1.0)
    monkeypatch.setattr(backend, "nodes", fails)
    assert "m-0" in await served.says("status")
    assert json.loads(await served.says("status", "--json"))["nodes"] == []


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, ""),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9_949, "9.9 kB"),
        (999_600, "1.0 MB"),
        (15 * 10**9, "15 GB"),
    ],
)
def test_sizes_are_for_people(count: int | None, text: str) -> None:
    assert size(count) == text
