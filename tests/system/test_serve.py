"""`satchel serve` with the real model, as a newcomer runs it: start, talk, hang on, Ctrl-C, nothing left.

It serves the default config, and continues after every process of an earlier server was killed: agents' memory
survives, pictures too.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI

from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.connection import find_cluster
from satchel.cluster.home import Home
from satchel.cluster.processes import OPEN_FILES, session_members
from tests.system.serving import COMMAND, RECALL, kill_everything, listens_at, serving, sessions_of
from tests.worlds.pictures import red_circle

CODES = {"Anna": "6305", "Ben": "3471", "Carla": "7468", "David": "1791", "Emma": "2186", "Felix": "9779"}
SETTLE_S = 5.0
CONFIG = {
    "models": [RECALL, {"name": "satchel/shapes", "source": "embedded:shapes"}],
    "media": {"allowed_hosts": ["127.0.0.1"]},
}


class Agent:
    """An agent as an OpenAI client sees it."""

    def __init__(self, port: int, name: str, model: str = "satchel/recall") -> None:
        self.client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        self.name, self.model = name, model

    def say(self, messages: list[Any], **extra: Any) -> tuple[str, int, int]:
        """Returns the answer, the number of prompt tokens, and how many of them were cached."""
        answer = self.client.chat.completions.create(
            model=self.model,
            messages=messages,
            temperature=0,
            max_tokens=40,
            extra_headers={"X-Agent-ID": self.name},
            extra_body=extra,
        )
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        return answer.choices[0].message.content or "", usage.prompt_tokens, cached


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def asked_of(url: str) -> dict[str, Any]:
    picture = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [picture, {"type": "text", "text": "What is in the picture?"}]}


def data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


@contextmanager
def site(png: bytes) -> Iterator[tuple[str, list[str]]]:
    """A picture's URL on this machine, and the paths that were fetched."""
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            fetched.append(self.path)
            self.send_response(200)
            self.send_header("content-type", "image/png")
            self.send_header("content-length", str(len(png)))
            self.end_headers()
            self.wfile.write(png)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/circle.png", fetched
        finally:
            server.shutdown()
            thread.join()


@dataclass(frozen=True)
class Seen:
    """One picture, shown to two agents: to the first in a data URL, to the second by the URL of a site.

    Attributes:
        said: to each, with the tokens of its prompt and how many of them were found.
        counted: after each, how many pictures had been encoded and how many been known.
        fetched: the paths that the site was asked for.
    """

    said: list[tuple[str, int, int]]
    counted: list[tuple[float, float]]
    fetched: list[str]


def show_to_two(port: int, http: httpx.Client) -> Seen:
    said, counted = [], []
    with site(red_circle()) as (url, fetched):
        for name, shown in (("first", data_url(red_circle())), ("second", url)):
            said.append(Agent(port, name, "satchel/shapes").say([asked_of(shown)]))
            counted.append(pictures_counted(http, len(said)))
    return Seen(said, counted, fetched)


def pictures_counted(http: httpx.Client, in_all: int) -> tuple[float, float]:
    """How many pictures were encoded and how many were known, as soon as the metrics tell of `in_all`."""
    ends = time.monotonic() + SETTLE_S
    while True:
        text = http.get("/metrics").text
        encodes, hits = (
            sum(each(text, name)) for name in ("satchel_vision_encodes_total", "satchel_vision_cache_hits_total")
        )
        if encodes + hits >= in_all:
            return encodes, hits
        assert time.monotonic() < ends, "a picture is encoded or known"
        time.sleep(0.05)


def each(metrics: str, name: str) -> list[float]:
    """A metric of every replica."""
    return [float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name + "{")]


@dataclass(frozen=True)
class Killed:
    """A server that was killed without warning, the conversation that it had with alice, and what two others saw."""

    home: Path
    messages: list[Any]
    prompt_tokens: int
    seen: Seen


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    home, port = tmp_path_factory.mktemp("home"), free_port()
    messages: list[dict[str, str]] = []
    config = home / "config.yaml"
    # JSON is YAML.
    config.write_text(json.dumps(CONFIG))
    with (
        serving(home, "--config", str(config), "--port", str(port)) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http,
    ):
        seen = show_to_two(port, http)
        alice = Agent(port, "alice")
        for name, code in CODES.items():
            # Long enough for several blocks.
            filler = " ".join(f"The code of {name}{letter} is {int(code) - i}." for i, letter in enumerate("xyz", 1))
            messages.append(user(f"The code of {name} is {code}. {filler}"))
            content, prompt, _ = alice.say(messages)
            messages.append({"role": "assistant", "content": content})
        ends = time.monotonic() + SETTLE_S
        while not all(each(http.get("/metrics").text, "satchel_written_bytes_total")):
            assert time.monotonic() < ends, "KV is written within a second or so"
            time.sleep(0.1)
        time.sleep(1.0)
        kill_everything(process.pid)
        process.wait(timeout=10)
    return Killed(home, messages, prompt, seen)


@pytest.fixture(scope="module")
def server(killed: Killed) -> Iterator[tuple[subprocess.Popen, Path, int]]:
    port = free_port()
    with serving(killed.home, "--port", str(port)) as process:
        yield process, killed.home, port


def test_all_processes_may_open_many_files(server: tuple[subprocess.Popen, Path, int]):
    """Though the server was started where 256 are usual."""
    process, _, _ = server
    members = {member for sid in sessions_of(process.pid) for member in session_members(sid)}
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(OPEN_FILES, hard) if hard != resource.RLIM_INFINITY else OPEN_FILES
    few = {}
    for member in members:
        with suppress(psutil.Error):
            soft, _ = psutil.Process(member).rlimit(psutil.RLIMIT_NOFILE)
            if soft != resource.RLIM_INFINITY and soft < most:
                few[" ".join(psutil.Process(member).cmdline())[:100]] = soft
    assert len(members) > 5 and not few


def test_nothing_on_loopback_is_reached_from_elsewhere(server: tuple[subprocess.Popen, Path, int]):
    """Neither Ray's processes, nor Serve's, nor the store."""
    _, home, _ = server
    assert listens_at(find_cluster(Home(home))) == {"127.0.0.1"}


def test_a_client_that_hangs_up_disturbs_no_other(server: tuple[subprocess.Popen, Path, int]):
    """The first request ever opens the endpoint's connection to the replica, which must not end with it."""
    _, _, port = server
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, "ignore_eos": True}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client, ExitStack() as stack:
        first = stack.enter_context(client.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": 5000}))
        next(first.iter_raw())
        second = stack.enter_context(client.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": 200}))
        lines = second.iter_lines()
        next(lines)
        first.close()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_picture_is_encoded_once_for_all_agents_and_all_servers(
    server: tuple[subprocess.Popen, Path, int], killed: Killed
):
    """However it is sent: two agents show it to a server that is killed, and the second goes on with the next one."""
    _, _, port = server
    (first, asked, new), (second, again, known) = killed.seen.said
    assert first == second == "A red circle."
    assert killed.seen.fetched == ["/circle.png"], "the second time it came from elsewhere"
    assert (asked, new) == (again, 0)
    assert known == again - 1, "all but the last token, which every answer begins with"
    assert killed.seen.counted == [(1, 0), (1, 1)]
    # The next server knows nothing of that site, and may not go there.
    shown = asked_of(data_url(red_circle()))
    messages = [shown, {"role": "assistant", "content": second}, user("What colour is it?")]
    content, _, cached = Agent(port, "second", "satchel/shapes").say(messages)
    assert content == "Red."
    assert cached >= again, "the picture's tokens come from the disk, and what was asked and answered"
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http:
        assert pictures_counted(http, 1) == (0, 1), "the counters have begun anew"


def test_an_agent_goes_on_after_every_process_was_killed(server: tuple[subprocess.Popen, Path, int], killed: Killed):
    _, home, port = server
    alice = Agent(port, "alice")
    assert killed.prompt_tokens > 256, "the conversation crosses a block"
    # What the client sends is the whole conversation, as OpenAI has it.
    content, asked, cached = alice.say([*killed.messages, user("What is the code of Carla?")])
    assert CODES["Carla"] in content
    assert cached >= killed.prompt_tokens, "all that was said before comes from the disk, the last answer included"
    assert asked - cached < 30
    # And the agent knows the conversation itself.
    content, _, cached = alice.say([user("What is the code of Felix?")], agent_continue=True)
    assert CODES["Felix"] in content and cached >= asked
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http:
        info = http.get("/v1/agents/alice").json()
        assert info["tier"] == "hot" and info["blocks"] >= 1 and info["turns"] == len(CODES) + 2
        assert http.delete("/v1/agents/alice").status_code == 200
        assert http.get("/v1/agents/alice").status_code == 404
        # Nobody else has anything there.
        assert [http.delete(f"/v1/agents/{name}").status_code for name in ("first", "second")] == [200, 200]
        ends = time.monotonic() + 60
        while list((home / "kv").rglob("*.kv")):
            assert time.monotonic() < ends, "what is forgotten is off the disk within a minute"
            time.sleep(0.2)


def test_a_stream_outlives_the_only_replica(server: tuple[subprocess.Popen, Path, int]):
    """The stream waits for the replica to start again, and continues with the same text."""
    _, _, port = server
    body = {"messages": [{"role": "user", "content": "Say the numbers from one to forty."}]}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
        whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        pids = {replica["id"]: replica["pid"] for replica in client.get("/v1/cluster").json()["replicas"]}
        text = ""
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            for count, line in enumerate(line for line in response.iter_lines() if line.startswith("data: {")):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["delta"].get("content") or ""
                if count == 15:
                    os.kill(pids["satchel-recall-0"], signal.SIGKILL)
    assert text == whole


def test_a_newcomer_talks_through_the_command_line(server: tuple[subprocess.Popen, Path, int]):
    _, home, _ = server
    said = subprocess.run(
        [*COMMAND, "chat", "--home", str(home), "--agent", "ann"],
        input="Remember: the code of otto is 5150.\nWhat is the code of otto?\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout.splitlines() == ["Noted.", "The code of otto is 5150."]
    status = subprocess.run([*COMMAND, "status", "--json", "--home", str(home)], capture_output=True, check=True)
    assert list(json.loads(status.stdout)["replicas"]) == ["satchel-recall-0", "satchel-shapes-0"]


def test_a_newcomer_shows_a_picture(server: tuple[subprocess.Popen, Path, int]):
    """The model that sees is served beside the one for text, which is the default."""
    _, home, port = server
    body = {"model": "satchel/shapes", "agent_id": "scout", "messages": [asked_of(data_url(red_circle()))]}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
        served = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in served] == ["satchel/recall", "satchel/shapes"]
        said = client.post("/v1/chat/completions", json=body).json()
    assert said["choices"][0]["message"]["content"] == "A red circle."
    show = [*COMMAND, "agents", "show", "scout", "--home", str(home)]
    assert " 1 picture," in subprocess.run(show, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "arguments", [pytest.param("home=sys.argv[1]", marks=pytest.mark.slow), "home=sys.argv[1], address=sys.argv[2]"]
)
def test_another_driver_connects_though_it_imported_ray_first(
    server: tuple[subprocess.Popen, Path, int], arguments: str
):
    _, home, _ = server
    address = json.loads((home / "run" / "cluster.json").read_text())["address"]
    script = (
        "import ray, sys; from satchel.api import connect\n"
        f"with connect({arguments}) as cluster: print(cluster.agent('eve').ask_sync('Hello.'))"
    )
    said = subprocess.run(
        [sys.executable, "-c", script, str(home), address],
        # A driver from outside: nothing of this process's Ray settings.
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout.strip() == "Hello! What shall I remember for you?"


def test_an_interrupt_in_mid_answer_lets_it_end_and_leaves_nothing(server: tuple[subprocess.Popen, Path, int]):
    """The answer that runs is finished, a new one is refused, and every process of the server is gone."""
    process, home, port = server
    session = json.loads((home / "run" / "cluster.json").read_text())["ray_sid"]
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, "temperature": 0}
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        os.killpg(process.pid, signal.SIGINT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(timeout=20) == 0
    assert session_members(session) == []
    assert not (home / "run" / "cluster.json").exists()
    # Also after a replica was killed: only sentences for a person.
    shown = (home / "output").read_text()
    assert shown.splitlines()[-2].startswith("Finishing running requests") and shown.splitlines()[-1] == "Stopped"
    assert "raylet" not in shown and "Traceback" not in shown
    assert "server begins as process" in (home / "run" / "logs" / "server.log").read_text()
