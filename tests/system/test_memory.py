"""An agent's memory outlives every process: told codes, killed without warning, started again, asked."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from satchel.cluster.ports import free_port
from satchel.cluster.processes import session_members
from tests.system.serving import serving

CODES = {"Anna": "6305", "Ben": "3471", "Carla": "7468", "David": "1791", "Emma": "2186", "Felix": "9779"}
SETTLE_S = 5.0


class Alice:
    """The agent as an OpenAI client sees it."""

    def __init__(self, port: int) -> None:
        self.client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

    def say(self, messages: list[Any], **extra: Any) -> tuple[str, int, int]:
        """The answer, and how many tokens of the prompt there were and were found."""
        answer = self.client.chat.completions.create(
            model="satchel/recall",
            messages=messages,
            temperature=0,
            max_tokens=40,
            extra_headers={"X-Agent-ID": "alice"},
            extra_body=extra,
        )
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        return answer.choices[0].message.content or "", usage.prompt_tokens, cached


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def kill_everything(server_pid: int) -> None:
    """The server, its Ray and all actors, as a power cut would."""
    members = [member for sid in sessions_of(server_pid) for member in session_members(sid)]
    os.kill(server_pid, signal.SIGKILL)
    for member in members:
        try:
            os.kill(member, signal.SIGKILL)
        except ProcessLookupError:
            continue


def sessions_of(server_pid: int) -> set[int]:
    """The Unix sessions of the server's children; Ray leads one of its own."""
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    return {os.getsid(int(child)) for child in children} | {os.getsid(server_pid)}


def test_an_agent_goes_on_after_every_process_was_killed(tmp_path: Path):
    home, port = tmp_path / "home", free_port()
    home.mkdir()
    messages: list[dict[str, str]] = []
    with serving(home, "--port", str(port)) as process:
        alice = Alice(port)
        for name, code in CODES.items():
            # Long enough for several blocks.
            filler = " ".join(f"The code of {name}{letter} is {int(code) - i}." for i, letter in enumerate("xyz", 1))
            messages.append(user(f"The code of {name} is {code}. {filler}"))
            content, prompt, cached = alice.say(messages)
            messages.append({"role": "assistant", "content": content})
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http:
            ends = time.monotonic() + SETTLE_S
            while "satchel_written_bytes_total" not in (text := http.get("/metrics").text) or " 0.0" in next(
                line for line in text.splitlines() if line.startswith("satchel_written_bytes_total")
            ):
                assert time.monotonic() < ends, "KV is written within a second or so"
                time.sleep(0.1)
        time.sleep(1.0)
        kill_everything(process.pid)
        process.wait(timeout=10)
    assert prompt > 256, "the conversation crosses a block"

    with serving(home, "--port", str(port)):
        alice = Alice(port)
        # What the client sends is the whole conversation, as OpenAI has it.
        question = user("What is the code of Carla?")
        content, asked, cached = alice.say([*messages, question])
        assert CODES["Carla"] in content
        assert cached >= prompt, "all that was said before comes from the disk, the last answer included"
        assert asked - cached < 30
        # And the agent knows the conversation itself.
        content, _, cached = alice.say([user("What is the code of Felix?")], agent_continue=True)
        assert CODES["Felix"] in content and cached >= asked
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http:
            info = http.get("/v1/agents/alice").json()
            assert info["tier"] == "hot" and info["blocks"] >= 1 and info["turns"] == len(CODES) + 2
            assert http.delete("/v1/agents/alice").status_code == 200
            assert http.get("/v1/agents/alice").status_code == 404
            ends = time.monotonic() + 60
            while list((home / "kv").rglob("*.safetensors")):
                assert time.monotonic() < ends, "what is forgotten is off the disk within a minute"
                time.sleep(0.2)
