"""Audio through a whole server: heard, remembered after every process was killed, and written down."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from satchel.cluster.bring_up.ports import free_port
from tests.system.serving import RECALL, kill_everything, serving
from tests.worlds.sounds import input_audio, tone, wav
from tests.zoo.vision_types import write

MODEL = "omni"
FILE = wav(tone(440, 3.0))
QUESTION = {"type": "text", "text": "What is it?"}


def say(client: OpenAI, messages: list[Any], agent: str = "listener") -> tuple[str, int, int]:
    """Returns the answer, the number of prompt tokens, and how many of them were cached."""
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=8, extra_headers={"X-Agent-ID": agent}
    )
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return answer.choices[0].message.content or "", usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0


def wait_until_tested(port: int) -> None:
    """Waits until the self-tests of all models have ended: before, no media are taken."""
    ends = time.monotonic() + 180.0
    while any(each["proving"] for each in httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]):
        assert time.monotonic() < ends
        time.sleep(0.5)


@pytest.mark.slow
def test_audio_is_remembered_after_every_process_was_killed(tmp_path: Path) -> None:
    folder, home, port = write(tmp_path / "qwen3_omni_moe", "qwen3_omni_moe"), tmp_path / "home", free_port()
    home.mkdir()
    config = tmp_path / "config.json"
    models = [RECALL, {"name": MODEL, "source": str(folder)}]
    config.write_text(json.dumps({"models": models, "endpoint": {"port": port}}))
    messages: list[Any] = [{"role": "user", "content": [input_audio(FILE), QUESTION]}]
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    with serving(home, "--config", str(config)) as server:
        wait_until_tested(port)
        first, asked, cached = say(client, messages)
        assert cached == 0
        again, _, known = say(client, messages, "other")
        assert again == first and known == asked - 1, "all but the last token, which every answer begins with"
        louder = [{"role": "user", "content": [input_audio(wav(tone(550, 3.0))), QUESTION]}]
        assert say(client, louder, "third")[2] < 10, "other audio has other tokens"
        written = client.audio.transcriptions.create(model=MODEL, file=("speech.wav", FILE))
        assert written.usage is not None
        with pytest.raises(BadRequestError, match="this model does not support audio"):
            client.chat.completions.create(model="satchel/recall", messages=messages)
        time.sleep(2.0)
        kill_everything(server.pid)
        server.wait(timeout=10)
    with serving(home, "--config", str(config)):
        wait_until_tested(port)
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Sure?"}]
        assert say(client, messages)[2] >= asked, "its tokens come from the disk, and the answer"
