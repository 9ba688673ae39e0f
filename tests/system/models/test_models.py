"""Several models behind one endpoint: from the config, loaded and unloaded while others answer, and slow clients."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image
from safetensors.numpy import save_file

from satchel.actors.protocol.replica_messages import ImageRequest
from satchel.actors.protocol.speech_messages import SpeechRequest
from satchel.actors.replica.audio.listening import ListeningModel
from satchel.actors.replica.images.pipeline import ImagePipeline
from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.processes import session_members
from tests.system.serving import COMMAND, serving
from tests.worlds.models.families import write_model
from tests.worlds.models.image_families import write_image_model
from tests.worlds.models.speech_families import noise, write_speech_model
from tests.worlds.sounds import wav

UNREAD_MAX = 64
ADAPTED = "adapted-" + "x" * 190
"""As long as a name may be: every piece of a streamed answer repeats it, and so fills a socket sooner."""

NAMES = ("plain", "wild", "tame", ADAPTED)

STORY = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0}
CONFIG = """
models:
  - {{name: plain, source: "embedded:recall", adapters: {{wild: "{adapter}", tame: "{tame}"}}}}
  - {{name: {adapted}, source: "embedded:recall", adapter: "{adapter}"}}
endpoint: {{port: {port}, unread_tokens_max: {unread}}}
"""

IMAGE: dict[str, Any] = {"model": "painter", "prompt": "a red cube", "size": "48x32", "steps": 4, "seed": 7}


def write_adapter(folder: Path, rank: int = 4, strength: float = 1.0) -> Path:
    """A random LoRA adapter of the last layer, which at its usual strength leaves nothing of what the model has
    learned."""
    rng = np.random.default_rng(rank)
    folder.mkdir()
    tensors = {
        "model.layers.5.mlp.up_proj.lora_a": rng.normal(size=(256, rank)).astype(np.float32),
        "model.layers.5.mlp.up_proj.lora_b": strength * rng.normal(size=(rank, 768)).astype(np.float32),
    }
    save_file(tensors, folder / "adapters.safetensors")
    parameters = {"rank": rank, "scale": 2.0, "dropout": 0.0, "keys": ["mlp.up_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Server:
    """A running `satchel serve`."""

    process: subprocess.Popen[bytes]
    home: Path
    port: int
    http: httpx.Client

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *arguments, "--home", str(self.home)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    def python(self, script: str) -> subprocess.CompletedProcess[str]:
        """A driver with handles in a process of its own, `cluster` its connection."""
        script = f"from satchel.api import connect\ncluster = connect({str(self.home)!r})\n{script}"
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)

    def models(self) -> list[str]:
        return [model["id"] for model in json.loads(self.command("models", "--json").stdout)]

    def replica_processes(self) -> int:
        session = json.loads((self.home / "run" / "cluster.json").read_text())["ray_sid"]
        names = [process_name(pid) for pid in session_members(session)]
        return sum(name.startswith(("ray::ReplicaActor", "ray::Hasty")) for name in names)

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def process_name(pid: int) -> str:
    try:
        return next(iter(psutil.Process(pid).cmdline()), "")
    except psutil.NoSuchProcess:
        return ""


def wait_until(what: Callable[[], object], timeout_s: float = 30.0) -> None:
    ends = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < ends, "it did not come true in time"
        time.sleep(0.1)


def said(server: Server, model: str, **fields: Any) -> str:
    answer = server.http.post("/v1/chat/completions", json={**STORY, "model": model, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home, port = tmp_path_factory.mktemp("home"), free_port()
    adapter = write_adapter(tmp_path_factory.mktemp("adapters") / "wild")
    tame = write_adapter(tmp_path_factory.mktemp("adapters") / "tame", rank=7, strength=0.3)
    given = {"adapted": ADAPTED, "adapter": adapter, "tame": tame, "port": port, "unread": UNREAD_MAX}
    (home / "config.yaml").write_text(CONFIG.format(**given))
    with (
        serving(home, "--config", str(home / "config.yaml")) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http,
    ):
        yield Server(process, home, port, http)


def test_two_models_of_one_config_answer_each_in_its_own_way(server: Server):
    """They do not share KV, although their weights are the same file."""
    assert server.models() == [*NAMES]
    plain, adapted = (said(server, model, max_tokens=20) for model in ("plain", ADAPTED))
    assert plain != adapted
    unnamed = server.http.post("/v1/chat/completions", json={**STORY, "max_tokens": 20}).json()
    assert (unnamed["model"], unnamed["choices"][0]["message"]["content"]) == ("plain", plain)
    usage = {}
    for model in ("plain", ADAPTED, ADAPTED):
        body = {**STORY, "model": model, "max_tokens": 1, "agent_id": "reader"}
        body["messages"] = [{"role": "user", "content": "Remember: the code of dora is 7777."}]
        answer = server.http.post("/v1/chat/completions", json=body).json()
        usage.setdefault(model, []).append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert usage[ADAPTED][0] == usage["plain"][0] < 10 < usage[ADAPTED][1], "but for the template's first words"


def test_adapters_of_one_model_answer_as_models_of_their_own(server: Server):
    """Each as the same adapter beside a source of its own, also in one batch with the others, with KV of its own."""
    listed = {each["id"]: each for each in server.http.get("/v1/models").json()["data"]}
    assert {name: each["parent"] for name, each in listed.items()} == {
        "plain": None,
        "wild": "plain",
        "tame": "plain",
        ADAPTED: None,
    }
    alone = {model: said(server, model, max_tokens=30) for model in ("plain", "wild", "tame", ADAPTED)}
    assert alone["wild"] == alone[ADAPTED] and len({*alone.values()}) == 3
    with ThreadPoolExecutor(12) as threads:
        asked = ["plain", "wild", "tame", "wild"] * 3
        together = list(threads.map(lambda model: said(server, model, max_tokens=30), asked))
    assert together == [alone[model] for model in asked]
    cached = []
    for model in ("wild", "tame", "wild", "plain"):
        body = {**STORY, "model": model, "max_tokens": 1, "agent_id": "adapted-reader"}
        body["messages"] = [{"role": "user", "content": "Remember: the code of zora is 4444."}]
        answer = server.http.post("/v1/chat/completions", json=body).json()
        assert answer["model"] == model
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[2] > 10 > max(cached[0], cached[1]), "but for the template's first words"
    message = {"model": "tame", "max_tokens": 30, "temperature": 0, "messages": STORY["messages"]}
    assert server.http.post("/v1/messages", json=message).json()["content"][0]["text"] == alone["tame"]
    refused = server.http.post("/v1/embeddings", json={"model": "wild", "input": "text"})
    assert refused.status_code == 400 and "adapters by request do not embed texts" in refused.json()["error"]["message"]
    health = server.http.get("/health").json()
    assert "wild" in str(health)
    (replica,) = (each for each in server.http.get("/v1/cluster").json()["replicas"] if each["model"] == "plain")
    assert replica["adapters"] == ["wild", "tame"]


def test_a_model_is_loaded_and_unloaded_while_others_answer(server: Server):
    """Its running answer is finished, and its replicas are gone afterwards."""
    arguments = ("embedded:recall", "--name", "extra/one", "--context-tokens-max", "512", "--replicas", "2")
    arguments = (*arguments, "--no-trial")
    before = said(server, "plain", max_tokens=20)
    loaded = server.command("models", "load", *arguments)
    assert loaded.returncode == 0, loaded.stderr
    *_, note, last = loaded.stdout.splitlines()
    assert last == "Loaded extra/one" and note.startswith("extra/one: its self-test was skipped (self_test: false)")
    assert server.models() == [*NAMES, "extra/one"], "the default stays the default"
    assert {"extra-one-0", "extra-one-1"} <= json.loads(server.command("status", "--json").stdout)["replicas"].keys()
    assert said(server, "extra/one", max_tokens=20) == before
    long = [{"role": "user", "content": "word " * 600}]
    refused = server.http.post("/v1/chat/completions", json={"model": "extra/one", "messages": long})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    again = server.command("models", "load", "embedded:recall", "--name", "extra-one")
    assert again.returncode == 1 and "'extra/one'" in again.stderr and "Traceback" not in again.stderr

    body = {**STORY, "model": "extra/one", "stream": True, "ignore_eos": True, "max_tokens": 300}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        unloading = subprocess.Popen([*COMMAND, "models", "unload", "extra/one", "--home", str(server.home)])
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert unloading.wait(timeout=60) == 0
    gone = server.http.post("/v1/chat/completions", json={**STORY, "model": "extra/one"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert server.models() == [*NAMES]
    wait_until(lambda: server.replica_processes() == 2)
    unknown = server.command("models", "unload", "extra/one")
    assert unknown.returncode == 1
    assert unknown.stderr == f"satchel: the model 'extra/one' is not served; there are: plain, {ADAPTED}\n"
    assert "Finishing" not in unknown.stdout, "it says at once that there is none"


def without_tokenizer(folder: Path) -> Path:
    """A model that computes, but has no tokenizer for requests."""
    write_model(folder, "llama")
    (folder / "tokenizer.json").unlink()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_image_model(tmp_path / "tiny", "z_image")


@pytest.fixture
def painter(server: Server, folder: Path) -> Iterator[Server]:
    loaded = server.command("models", "load", str(folder), "--name", "painter")
    assert loaded.returncode == 0, loaded.stderr
    yield server
    assert server.command("models", "unload", "painter").returncode == 0


def test_images_and_texts_are_made_side_by_side(painter: Server, folder: Path):
    http = painter.http
    made = http.post("/v1/images/generations", json=IMAGE)
    assert made.status_code == 200, made.text
    (image,) = made.json()["data"]
    shown = Image.open(io.BytesIO(base64.b64decode(image["b64_json"])))
    request = ImageRequest("", "", "a red cube", 48, 32, 7, steps=4)
    own = ImagePipeline.load(folder, "tiny").make(request, lambda step: None).pixels
    assert np.asarray(shown).tobytes() == own.data
    assert made.headers["x-satchel-replica"] == "painter-0"

    # A text is answered while an image of many steps is made: nothing waits for the whole image.
    long = {**IMAGE, "steps": 250, "size": "256x256", "stream": True, "timeout_s": 120}
    with http.stream("POST", "/v1/images/generations", json=long) as stream:
        lines = stream.iter_lines()
        # Before the first step it says 0.
        first = next(line for line in lines if line.startswith(": step ") and int(line.split()[2]))
        assert int(first.split()[2]) < 20
        answer = http.post("/v1/chat/completions", json={**STORY, "model": "plain", "max_tokens": 8})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
        assert painter.metric("vllm:num_requests_running") == 1
    # The caller has hung up.
    wait_until(lambda: not painter.metric("vllm:num_requests_running"))
    assert painter.metric("satchel_images_total") == 1
    # A report comes later.
    wait_until(lambda: 4 <= painter.metric("satchel_image_steps_total") < 250)

    refused = http.post("/v1/chat/completions", json={**STORY, "model": "painter"})
    assert refused.status_code == 400 and "/v1/images/generations" in refused.json()["error"]["message"]
    assert "painter" in painter.models()


@pytest.mark.slow
def test_speech_is_written_down_and_made_beside_texts(server: Server, tmp_path: Path):
    http = server.http
    for name, family in (("ear", "whisper"), ("mouth", "soprano")):
        loaded = server.command("models", "load", str(write_speech_model(tmp_path / name, family)), "--name", name)
        assert loaded.returncode == 0, loaded.stderr
    samples = (16_000 * noise(3)).astype("<i2")
    form = {"model": "ear", "response_format": "verbose_json", "temperature": "0.5", "seed": "1"}
    made = http.post("/v1/audio/transcriptions", data=form, files={"file": ("a.wav", wav(samples))})
    assert made.status_code == 200, made.text
    heard = (samples.astype(np.float32) / 32_768).astype("<f4").tobytes()
    request = SpeechRequest("", "", "transcribe", heard, temperature=0.5, seed=1)
    own = ListeningModel.load(tmp_path / "ear", "ear").transcribe(request, lambda done: None, lambda piece: None)
    assert made.json()["text"] == own.text.strip() != "" and made.headers["x-satchel-replica"] == "ear-0"

    # The caller of a long text hangs up.
    body = {"model": "mouth", "input": "\n".join(["Hello there."] * 300), "response_format": "pcm"}
    with http.stream("POST", "/v1/audio/speech", json={**body, "stream_format": "audio", "timeout_s": 120}) as stream:
        assert len(next(stream.iter_bytes())) > 0
        answer = http.post("/v1/chat/completions", json={**STORY, "model": "plain", "max_tokens": 8})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
    wait_until(lambda: not server.metric("vllm:num_requests_running"))
    assert server.metric("satchel_speeches_total") == 0 and server.metric("satchel_transcripts_total") == 1
    short = http.post("/v1/audio/speech", json={**body, "input": "Hello."})
    assert short.status_code == 200 and len(short.content) > 1000
    refused = http.post("/v1/chat/completions", json={**STORY, "model": "ear"})
    assert refused.status_code == 400 and "/v1/audio/transcriptions" in refused.json()["error"]["message"]
    for name in ("ear", "mouth"):
        assert server.command("models", "unload", name).returncode == 0


@pytest.mark.slow
def test_a_load_that_fails_leaves_nothing_behind(server: Server, tmp_path: Path):
    for arguments, says in [
        (["embedded:recall", "--name", "x", "--adapter", str(tmp_path)], f"satchel: {tmp_path} has no adapter_config"),
        (["embedded:recall", "--name", "two words"], "satchel: model: name: "),
        ([str(without_tokenizer(tmp_path / "m")), "--name", "mute"], "satchel: the tokenizer of 'mute' "),
    ]:
        failed = server.command("models", "load", *arguments)
        assert failed.returncode == 1 and failed.stderr.startswith(says), failed.stderr
    wait_until(lambda: server.replica_processes() == 2)
    assert server.models() == [*NAMES]


@pytest.mark.slow
def test_a_load_whose_driver_is_killed_leaves_nothing_behind(server: Server):
    """Nobody serves the replica and nobody asks about it any more, so it ends by itself and its name is free."""
    script = """
import asyncio, os, signal
from satchel.actors import start
from satchel.cluster.config.timing import Timing
class Hasty(start.ReplicaActor):
    def __init__(self, name, model, scheduling, node, timing, *more):
        super().__init__(name, model, scheduling, node, Timing(unwanted_s=2.0), *more)
start.ReplicaActor = Hasty
def die(what, fraction):
    os.kill(os.getpid(), signal.SIGKILL)
cluster.load_sync("embedded:recall", name="orphan", report=die)
"""
    killed = server.python(script)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    wait_until(lambda: server.replica_processes() == 2)
    assert server.command("models", "load", "embedded:recall", "--name", "orphan").returncode == 0
    assert server.command("models", "unload", "orphan").returncode == 0


@pytest.mark.slow
def test_python_handles_load_and_unload_too(server: Server):
    script = """
import asyncio
from satchel.cluster.errors import InvalidRequest, ModelNotFound
seen = []
print(cluster.load_sync("embedded:recall", report=lambda what, fraction: seen.append(what)), bool(seen))
print(cluster.generate_sync("one, two,", model="recall", max_tokens=3, temperature=0).completion_tokens)
print(sorted(cluster.replicas()))
async def main():
    for work in (cluster.load("embedded:recall"), cluster.unload("nothing")):
        try:
            await work
        except (InvalidRequest, ModelNotFound) as error:
            print(type(error).__name__)
    await cluster.unload("recall")
    loading = asyncio.create_task(cluster.load("embedded:recall", name="cancelled"))
    await asyncio.sleep(1.0)
    loading.cancel()
    print((await asyncio.gather(loading, return_exceptions=True))[0].__class__.__name__)
asyncio.run(main())
print(sorted(cluster.replicas()))
"""
    done = server.python(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "recall True",
        "3",
        f"['{ADAPTED}-0', 'plain-0', 'recall-0']",
        "InvalidRequest",
        "ModelNotFound",
        "CancelledError",
        f"['{ADAPTED}-0', 'plain-0']",
    ]
    wait_until(lambda: server.replica_processes() == 2)


@pytest.mark.slow
def test_ray_s_own_commands_and_programs_reach_the_cluster(server: Server, tmp_path: Path):
    printed = server.command("ray-env")
    assert printed.returncode == 0, printed.stderr
    (tmp_path / "env.sh").write_text(printed.stdout)
    usage = "python -m ray.scripts.scripts status"
    program = "python -c 'import ray; ray.init(); print(len(ray.nodes()), \"node\")'"
    for command, says in ((usage, "Total Usage"), (program, "1 node")):
        line = f". {tmp_path / 'env.sh'} && {command.replace('python', sys.executable, 1)}"
        ran = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
        assert says in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.slow
def test_a_client_that_never_reads_holds_no_sequence(server: Server):
    """Only a limited number of tokens waits for it in the server, besides those in the system's socket buffers. All
    sequences end long before they are complete, and no other client is disturbed."""
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    before = server.metric("vllm:generation_tokens_total")
    prompts, each = 16, 8000
    body = json.dumps(
        {
            "model": ADAPTED,
            "prompt": ["Once upon a time"] * prompts,
            "max_tokens": each,
            "ignore_eos": True,
            # Longer pieces fill sockets with fewer tokens.
            "logprobs": 5,
            "stream": True,
        }
    ).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(body)}",
    )
    head = "\r\n".join([*lines, "", ""])
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(head.encode() + body)
        wait_until(lambda: server.metric("vllm:num_requests_running") == prompts)
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0, timeout_s=120)
        taken = server.metric("vllm:generation_tokens_total") - before
        assert taken < prompts * each / 2, "they were not simply finished"
        assert said(server, "plain", max_tokens=3)


@pytest.mark.slow
def test_stopping_the_server_finishes_the_answers_of_loaded_models_too(server: Server):
    """The model has a name that another one had before."""
    assert server.command("models", "load", "embedded:recall", "--name", "orphan").returncode == 0
    session = json.loads((server.home / "run" / "cluster.json").read_text())["ray_sid"]
    body = {**STORY, "model": "orphan", "stream": True, "ignore_eos": True, "max_tokens": 200}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        os.killpg(server.process.pid, signal.SIGINT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(timeout=30) == 0
    assert session_members(session) == []
