"""The rest of the page: keys, what runs, moves, requests with abort, decisions, and a node that goes down."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from satchel.api.cli.tables import size
from satchel.cluster.connection import find_cluster
from satchel.cluster.home import Home
from satchel.cluster.processes import session_members
from tests.system.hosts.hosts import named
from tests.system.serving import COMMAND
from tests.worlds.api import figures

from .conftest import NODES, World
from .test_chat import from_memory, say

pytestmark = pytest.mark.page

HELLO = {"model": "satchel/recall", "messages": [{"role": "user", "content": "Remember: the code of yak is 4242."}]}
LONG = {
    "model": "satchel/recall",
    "messages": [{"role": "user", "content": "Say the numbers from one to sixty."}],
    "ignore_eos": True,
    "max_tokens": 4000,
}


def test_a_refused_key_is_said_and_a_right_one_opens_the_page(open_page: Callable[..., Any], world: World):
    page = open_page(key="")
    dialog = page.locator("dialog")
    dialog.wait_for()
    assert "needs a key" in dialog.inner_text()
    page.keyboard.type("sk-satchel-wrong")
    page.keyboard.press("Enter")
    page.locator("dialog [role=alert]").get_by_text("This key was refused").wait_for()
    dialog.locator("input").fill(world.keys["default"])
    page.keyboard.press("Enter")
    dialog.wait_for(state="detached")
    page.get_by_text("live", exact=True).wait_for()
    page.locator("#chat-model option").first.wait_for(state="attached")
    assert world.keys["default"] not in page.url
    assert page.evaluate("[sessionStorage.getItem('satchel-key'), localStorage.length, document.cookie]") == [
        world.keys["default"],
        0,
        "",
    ]


def test_a_key_without_admin_sees_its_own_agents_and_no_cluster(open_page: Callable[..., Any], world: World):
    world.ask("POST", "/v1/chat/completions", {**HELLO, "agent_id": "of-default"})
    world.ask("POST", "/v1/chat/completions", {**HELLO, "agent_id": "of-bob"}, key="bob")
    page = open_page("agents", key="bob")
    page.locator("#agents tr").first.wait_for()
    assert page.locator("#agents th").all_inner_texts() == ["of-bob"]
    assert page.locator("#agents-all").is_hidden() and page.get_by_role("button", name="Move").count() == 0
    page.click("text=Cluster")
    page.get_by_text("This needs a key made with --admin.").first.wait_for()
    assert page.locator("#nodes tr").count() == 0


def _rows(view: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """What the page shows of the replicas."""
    rows = {}
    for each in view["replicas"]:
        slots = ", ".join(f"{each['slots'][use]:,} {use}" for use in ("running", "kept", "free"))
        memory = f"{size(each['memory_bytes'])} of {size(each['memory_bytes_max'])}"
        rows[each["id"]] = each["node"], str(each["running"]), str(each["waiting"]), slots, memory
    return rows


def _tiles(view: dict[str, Any], totals: dict[str, Any]) -> list[str]:
    """What the page shows of the whole cluster."""
    tiers = [node["tiers"] for node in view["nodes"]]
    kept = [size(sum(each[tier] or 0 for each in tiers)) for tier in ("memory_bytes", "disk_bytes")]
    up = sum(node["up"] for node in view["nodes"])
    busy = [f"{totals['tokens_per_s']:g}", str(totals["running"]), str(totals["waiting"])]
    return [f"{up} of {len(tiers)}", *busy, *kept]


def test_the_page_and_the_command_line_agree(open_page: Callable[..., Any], world: World):
    world.whole()
    page = open_page("cluster")
    page.locator("#replicas tr").nth(2).wait_for()

    def says(command: str) -> Any:
        whole = [*COMMAND, command, "--json", "--home", str(world.home)]
        return json.loads(subprocess.run(whole, capture_output=True, check=True, timeout=60).stdout)

    def pairs() -> list[tuple[Any, Any]]:
        """What must be equal."""
        view, top, ps, status = world.view(), says("top"), says("ps"), says("status")
        shown = [row.locator("th, td").all_inner_texts() for row in page.locator("#replicas tr").all()]
        expected, states = figures.of_view(view), {model["id"]: model["state"] for model in view["models"]}
        named = [f"{node['name']} {node['address']}" for node in status["nodes"]]
        return [
            (len(expected), 3),
            (figures.of_view(top), expected),
            (figures.of_ps(ps), expected),
            (figures.of_status(status), expected),
            ({row[0]: (row[1], row[3], row[4], row[6], row[7]) for row in shown}, _rows(view)),
            (
                {each["model"]: each["state"] for each in ps},
                {name: states[name] for name in ("satchel/recall", "satchel/shapes")},
            ),
            ([node["name"] for node in top["nodes"]], NODES),
            (page.locator("#nodes th").all_inner_texts(), named),
            (page.locator("#tiles dd").all_inner_texts(), _tiles(view, top["totals"])),
        ]

    ends = time.monotonic() + 60
    while any(left != right for left, right in pairs()) and time.monotonic() < ends:
        pass
    for left, right in pairs():
        assert left == right
    page.locator("#plots canvas").nth(3).wait_for()
    assert page.locator("#plots figcaption").count() == 4
    page.get_by_text(re.compile(r"Now: running \d+, waiting \d+")).wait_for()


def test_an_agent_moves_and_its_memory_goes_with_it(open_page: Callable[..., Any], world: World):
    world.whole()
    # Words that no other test has left in the memory of the other node.
    agent, other = named("page", "mac0", NODES), "mac1"
    page = open_page(f"chat/{agent}")
    say(page, "Remember: the code of zebra is 3141.")
    say(page, "Tell me a story.")
    page.get_by_text(re.compile("on mac0, copied to mac1")).wait_for()
    page.click(f'button[aria-label="Move {agent}"]')
    dialog = page.locator("dialog")
    assert dialog.locator("option").all_inner_texts() == [other]
    dialog.get_by_role("button", name="Move").click()
    dialog.wait_for(state="detached")
    page.get_by_text(re.compile("on mac1, copied to mac0")).wait_for()
    answer = say(page, "What is the code of zebra?")
    assert "3141" in answer.inner_text() and "On mac1: this node has the agent's memory" in answer.inner_text()
    assert from_memory(answer)[0] > 100
    answer.locator(".chip.disk").wait_for()
    page.click("text=Requests")
    latest = page.locator("#decisions li").filter(has_text=agent).first
    latest.get_by_text(re.compile(r"\(\d+%\) from memory, [\d,]+ of them from disk; first token after")).wait_for()
    assert f"{agent} → mac1" in latest.inner_text()
    latest.locator("summary").click()
    assert "(chosen)" in latest.locator("table").inner_text()
    page.click("text=Agents")
    row = page.locator("#agents tr").filter(has_text=agent)
    row.wait_for()
    assert row.locator('[data-title="Primary"]').inner_text() == "mac1"
    assert row.locator('[data-title="Copies"]').inner_text() == "mac0"


def test_an_agent_is_forked_packed_and_forgotten(open_page: Callable[..., Any], world: World):
    world.ask("POST", "/v1/chat/completions", {**HELLO, "agent_id": "scribe"})
    page = open_page("agents")
    page.click('button[aria-label="Fork scribe"]')
    page.locator("dialog input").fill("scribe")
    page.keyboard.press("Enter")
    page.locator("dialog [role=alert]").get_by_text("scribe").wait_for()
    page.locator("dialog input").fill("scribe-copy")
    page.keyboard.press("Enter")
    page.locator('button[aria-label="Pack scribe-copy"]').click()
    with page.expect_download() as downloading:
        page.locator("dialog").get_by_role("button", name="Download").click()
    assert downloading.value.suggested_filename == "scribe-copy.satchel"
    assert downloading.value.path().stat().st_size > 1000
    for name in ("scribe", "scribe-copy"):
        page.click(f'button[aria-label="Forget {name}"]')
        page.locator("dialog").get_by_role("button", name="Forget").click()
        page.locator(f'button[aria-label="Forget {name}"]').wait_for(state="detached")
        assert world.ask("GET", f"/v1/agents/{name}").status_code == 404


def test_a_running_request_is_shown_and_aborted(open_page: Callable[..., Any], world: World):
    page = open_page("requests")
    page.get_by_text("Nothing runs now.").wait_for()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(world.ask, "POST", "/v1/chat/completions", {**LONG, "agent_id": "talker"}, "root")
        page.click('button[aria-label="Abort talker"]')
        assert not asking.done()
        page.locator("dialog").get_by_role("button", name="Abort").click()
        answer = asking.result(30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "request_aborted")
    page.get_by_text("Nothing runs now.").wait_for()


def test_the_models_are_shown(open_page: Callable[..., Any]):
    page = open_page("models")
    page.locator("#models li h3").nth(2).wait_for()
    assert page.locator("#models h3").all_inner_texts() == ["satchel/recall", "satchel/shapes", "satchel/script"]
    page.locator("#models > li").nth(1).get_by_text("text, image, video").wait_for()


def test_a_model_that_comes_and_goes_is_loaded_and_unloaded(open_page: Callable[..., Any], world: World):
    page = open_page("models")
    card = page.locator("#models > li").nth(2)
    card.get_by_text("unloaded", exact=True).wait_for()
    assert "poet" in card.inner_text() and page.get_by_role("button", name="Load satchel/recall").count() == 0
    page.get_by_role("button", name="Load satchel/script").click()
    card.get_by_text("loaded", exact=True).wait_for()
    card.get_by_text("satchel-script-0 on mac0").wait_for()
    card.get_by_text("tokens", exact=False).first.wait_for()
    page.get_by_role("button", name="Unload satchel/script").click()
    card.get_by_text("unloaded", exact=True).wait_for()
    assert page.get_by_role("button", name="Load satchel/script").is_visible()
    plain = open_page("models", key="bob")
    plain.locator("#models > li").nth(2).wait_for()
    assert plain.get_by_role("button", name="Load satchel/script").count() == 0
    assert world.ask("POST", "/v1/models/poet/load", key="bob").status_code == 403


def test_the_chat_says_what_a_model_cannot_do_during_its_self_test(open_page: Callable[..., Any], world: World):
    world.whole()
    # The models that ship with Satchel have none.
    view = world.view()
    for each in view["replicas"]:
        each["proving"] = {"what": "testing how it reads its KV", "since": 0}
    caller = {"admin": True, "tenant": "default", "version": "0"}
    told = "".join(
        f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in (("caller", caller), ("cluster", view))
    )
    page = open_page()
    page.get_by_text("live", exact=True).wait_for()
    assert page.locator("#chat-proving").is_hidden()
    page.route("**/v1/cluster/events", lambda route: route.fulfill(content_type="text/event-stream", body=told))
    page.reload()
    page.get_by_text("satchel/recall sees no pictures and keeps no KV until its self-test ends").wait_for()


def test_the_description_of_the_api_is_shown(open_page: Callable[..., Any], world: World):
    page = open_page()
    page.goto(f"{world.url}/docs")
    page.fill("#find", "chat completions")
    page.locator("li[data-text]:not([hidden]) summary").first.click()
    assert "agent_continue" in page.locator("li[data-text]:not([hidden]) table").first.inner_text()


def test_a_node_that_goes_down_is_said_and_the_chat_goes_on(open_page: Callable[..., Any], world: World):
    world.whole()
    agent = named("stays", "mac1", NODES)
    page = open_page(f"chat/{agent}")
    say(page, "Remember: the code of ada is 1815.")
    page.get_by_text(re.compile("on mac1, copied to mac0")).wait_for()
    page.click("text=Cluster")
    row = page.locator("#nodes tr").nth(1)
    row.get_by_text("up", exact=True).wait_for()
    killed = find_cluster(Home(world.home / "nodes" / "mac1"))
    # What is killed is started again, perhaps before anybody has seen it: first it stands still.
    processes = [killed.pid, *session_members(killed.ray_sid)]
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    row.get_by_text("down", exact=True).wait_for()
    page.get_by_text("1 of 2", exact=True).wait_for()
    for process in processes:
        os.kill(process, signal.SIGKILL)
    page.click("text=Chat")
    answer = say(page, "What is the code of ada?")
    # The node may be back by now.
    assert "1815" in answer.inner_text() and re.search("On mac[01]: ", answer.inner_text())
    assert from_memory(answer)[0] > 0
    page.click("text=Cluster")
    page.set_default_timeout(90_000)
    row.get_by_text("up", exact=True).wait_for()
