"""A tiny tokenizer, a backend that plays scripts, and the application over both."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from satchel.actors.messages import RowUpdate, Sampling, TokenLogprobs
from satchel.api.app import create_app
from satchel.api.backend import NodeState, ReplicaStats, RowRequest, ServedModel
from satchel.api.server import HttpServer
from satchel.api.text import TextModel, load_text_model
from satchel.cluster.config import Config, parse_config
from satchel.cluster.ports import free_port

CONTEXT_TOKENS = 1000

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' + (tools | tojson) + '</tools><|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{%- if message.content == 'refuse me' %}{{- raise_exception('no such message, please') }}{% endif -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content -}}
{%- for tool_call in message.tool_calls or [] -%}
{%- set call = tool_call.function -%}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\\n</tool_call>' -}}
{#- tool_call.name -#}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif -%}
"""

THINKING_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif -%}
{{- message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if reasoning_effort %}{{- 'effort: ' + reasoning_effort + '\\n' }}{% endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if open_thought %}{{- '<think>\\n' }}{% elif not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{#- <tool_call> tool_call.name -#}
"""

CORPUS = ["the quick brown fox jumps over the lazy dog", "héllo wörld, 日本語 текст 😀 emoji", '{"name": "f"}'] * 8


def write_tokenizer(folder: Path, *, markers: str, thinking: bool = False) -> Path:
    """A byte-level BPE model folder. `markers` of tool calls and, where it knows `thinking`, of reasoning: `added` as
    plain added tokens, `special`, or `none`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    if markers != "none":
        special = markers == "special"
        names = ["<tool_call>", "</tool_call>", *(["<think>", "</think>"] if thinking else [])]
        entries = [AddedToken(t, special=special, normalized=False) for t in names]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(entries)
    return write_folder(folder, tokenizer, THINKING_TEMPLATE if thinking else TEMPLATE)


def write_sentencepiece(folder: Path) -> Path:
    """A SentencePiece-like model folder: `▁` for spaces, `<0x..>` for bytes, the first space stripped."""
    words = ["<unk>", "▁Hello", "▁world", "▁", *"!abc", "<|endoftext|>", "<|im_end|>"]
    vocabulary = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_end|>")])
    return write_folder(folder, tokenizer, TEMPLATE)


def write_folder(folder: Path, tokenizer: Tokenizer, template: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": eos}))
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {markers: write_tokenizer(root / markers, markers=markers) for markers in ("added", "special", "none")}


@pytest.fixture(scope="session")
def thinking_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("thinking")
    return {m: write_tokenizer(root / m, markers=m, thinking=True) for m in ("added", "special")}


@pytest.fixture(scope="session")
def texts(folders: dict[str, Path]) -> dict[str, TextModel]:
    return {markers: load_text_model(folder, name=markers) for markers, folder in folders.items()}


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(write_sentencepiece(tmp_path_factory.mktemp("sentencepiece")))


@pytest.fixture(scope="session")
def text(texts: dict[str, TextModel]) -> TextModel:
    return texts["added"]


class FakeGeneration:
    """Plays a script: updates are yielded, exceptions raised, events waited for, numbers slept."""

    def __init__(self, request_id: str, script: list[Any], replica: str, sampling: Sampling) -> None:
        self.sampling = sampling
        self.replica = replica
        self.node = ""
        self.why = "test: scripted"
        self.move_to = ""
        self.model_id = b""
        self.request_id = request_id
        self.script = script
        self.aborts = 0
        self.aborted = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[RowUpdate]:
        for item in self.script:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, asyncio.Event):
                await item.wait()
            elif isinstance(item, float):
                await asyncio.sleep(item)
            elif self.sampling.logprobs is not None and item.logprobs is None:
                top = self.sampling.logprobs
                yield replace(item, logprobs=[FakeBackend.logprobs_of(token, top) for token in item.tokens])
            else:
                yield item

    async def abort(self) -> None:
        self.aborts += 1
        # An abort that takes a while shows whether it survives the cancellation of its caller.
        await asyncio.sleep(0.01)
        self.aborted.set()


class FakeBackend:
    """Records what it is asked and plays one script a row, the last one again and again."""

    def __init__(self, text: TextModel, served: list[ServedModel]) -> None:
        self.text = text
        self.served = served
        self.configured = [model.name for model in served]
        self.requests: list[dict[str, Any]] = []
        self.generations: list[FakeGeneration] = []
        self.scripts: deque[list[Any]] = deque()
        self.refusal: BaseException | None = None
        self.answering: dict[str, bool] = {model.name: True for model in served}
        self.replicas: list[ReplicaStats] = []
        self.machines = [NodeState("local", "127.0.0.1", (("127.0.0.1", "ethernet"),), True)]
        self.placed: dict[str, str] = {}
        self.move_to = ""
        self.computes_as = b""
        """The model id where rows run; that of the served model where it is empty."""
        self.processes: dict[str, int] = {}
        self.decisions: dict[str, dict[str, Any]] = {}
        self.failovers = 0
        self.asked = 0
        self.say("Hello there")

    def row(self, text: str, *, finish: str = "stop", cached: int = 0, step: int = 1) -> list[Any]:
        tokens = self.text.encode(text)
        cuts = [tokens[i : i + step] for i in range(0, len(tokens), step)]
        updates = [RowUpdate("row", cut, cached_tokens=cached if i == 0 else None) for i, cut in enumerate(cuts)]
        return [*updates, RowUpdate("row", [], finish=finish, cached_tokens=None if cuts else cached)]

    def say(self, *texts: str, **how: Any) -> None:
        self.scripts = deque(self.row(text, **how) for text in texts)

    def play(self, *items: Any) -> None:
        self.scripts = deque([list(items)])

    @staticmethod
    def logprobs_of(token: int, top: int) -> TokenLogprobs:
        """What the replica says of a token where the request asks; different for different tokens."""
        drawn = -0.25 - token / 1024
        return drawn, [(token + i, drawn - i) for i in range(top)]

    async def names(self) -> list[str]:
        return self.configured

    async def models(self) -> list[ServedModel]:
        return self.served

    async def generate(self, model: ServedModel, row: RowRequest) -> FakeGeneration:
        self.requests.append({"model": model.name, **vars(row)})
        if self.refusal is not None:
            raise self.refusal
        script = self.scripts.popleft() if len(self.scripts) > 1 else self.scripts[0]
        generation = FakeGeneration(row.request_id, script, f"{model.name}#{len(self.generations) % 2}", row.sampling)
        generation.node = self.placed.get(generation.replica, "")
        generation.move_to = self.move_to
        generation.model_id = self.computes_as or model.model_id
        self.generations.append(generation)
        return generation

    async def health(self) -> dict[str, bool]:
        return self.answering

    async def stats(self) -> list[ReplicaStats]:
        self.asked += 1
        return self.replicas

    async def pids(self) -> dict[str, int]:
        return self.processes

    async def nodes(self) -> list[NodeState]:
        return self.machines

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        return self.decisions.get(request_id)

    @property
    def sampling(self) -> Sampling:
        return self.requests[-1]["sampling"]

    @property
    def prompt(self) -> str:
        return self.text.decode(self.requests[-1]["prompt"])


@pytest.fixture
def config() -> Config:
    return parse_config(
        {
            "models": [{"name": "satchel/tiny", "source": "x"}, {"name": "other", "source": "y"}],
            "endpoint": {"body_bytes_max": "1 MiB", "bodies_bytes_max": "2 MiB", "hosts": ["satchel"]},
            "timeouts": {"request_s": 20},
        }
    )


@pytest.fixture
def backend(folders: dict[str, Path], text: TextModel) -> FakeBackend:
    size = len(text.encode("")) + 512
    served = [
        ServedModel("satchel/tiny", b"1" * 32, str(folders["added"]), CONTEXT_TOKENS, size, 1_700_000_000),
        ServedModel("other", b"2" * 32, str(folders["none"]), CONTEXT_TOKENS, size, 1_700_000_001),
    ]
    return FakeBackend(text, served)


@pytest.fixture(params=["added", "special"])
def thinker(request: pytest.FixtureRequest, backend: FakeBackend, thinking_folders: dict[str, Path]) -> FakeBackend:
    """The backend with a default model that knows reasoning, its markers plain or special tokens."""
    folder = thinking_folders[request.param]
    backend.text = load_text_model(folder)
    backend.served[0] = ServedModel("satchel/tiny", b"3" * 32, str(folder), CONTEXT_TOKENS, 512, 1_700_000_000)
    return backend


@pytest.fixture
async def client(backend: FakeBackend, config: Config) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(backend, config))
    json_only = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=json_only) as client:
        yield client


@pytest.fixture
async def server(backend: FakeBackend, config: Config) -> AsyncIterator[str]:
    """The base URL of a real server on a free port."""
    port = free_port()
    server = HttpServer(create_app(backend, config), "127.0.0.1", port)
    await server.start()
    yield f"http://127.0.0.1:{port}"
    await server.close(10)


def events_of(body: str) -> list[Any]:
    """The data of every server-sent event; `[DONE]` stays a string."""
    assert body.endswith("\n\n")
    out: list[Any] = []
    for event in body.removesuffix("\n\n").split("\n\n"):
        assert event.startswith("data: "), event
        data = event.removeprefix("data: ")
        out.append(data if data == "[DONE]" else json.loads(data))
    return out


class Chat:
    """Shorthand for requests to the two generation routes."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def post(self, body: dict[str, Any], *, path: str = "chat/completions", **how: Any) -> httpx.Response:
        return await self.client.post(f"/v1/{path}", json=body, **how)

    async def chat(self, content: Any = "Hi", **fields: Any) -> httpx.Response:
        return await self.post({"messages": [{"role": "user", "content": content}], **fields})

    async def stream(self, content: Any = "Hi", **fields: Any) -> list[Any]:
        response = await self.chat(content, stream=True, **fields)
        assert response.status_code == 200, response.text
        return events_of(response.text)

    async def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return await self.post({"prompt": prompt, **fields}, path="completions")

    async def complete_stream(self, prompt: Any, **fields: Any) -> list[Any]:
        response = await self.complete(prompt, stream=True, **fields)
        assert response.status_code == 200, response.text
        return events_of(response.text)


@pytest.fixture
def api(client: httpx.AsyncClient) -> Chat:
    return Chat(client)
