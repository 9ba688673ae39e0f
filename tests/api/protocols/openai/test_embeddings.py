"""Embeddings and rankings: what clients see, what a replica gets, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import openai
import pytest
import pytest_asyncio
from mlx_lm.utils import load_model

from satchel.actors.protocol.replica_messages import EmbeddingInfo
from satchel.actors.replica.loading.models import EMBEDDED
from satchel.api.app import create_app
from satchel.api.pipeline.vectors import TEXTS_MAX
from satchel.api.text.model import load_text_model
from satchel.cluster.config.config import Config, parse_config
from satchel.cluster.errors import QueueFull
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import KeyRing, create_key
from tests.worlds.api.engine_backend import remembering_app
from tests.worlds.api.fake_backend import DIMENSIONS, FakeBackend
from tests.worlds.api.served_models import served_model
from tests.worlds.models.tiny_tokenizers import write_tokenizer


@pytest.fixture
def post(api):
    async def post(path: str = "embeddings", status: int = 200, **body: Any) -> Any:
        response = await api.client.post(f"/v1/{path}", json=body)
        assert response.status_code == status, response.text
        return response.json()

    return post


def vectors_of(answer: dict[str, Any]) -> np.ndarray:
    assert [entry["index"] for entry in answer["data"]] == [*range(len(answer["data"]))]
    return np.array([entry["embedding"] for entry in answer["data"]])


def bag(backend: FakeBackend, text: str | list[int]) -> np.ndarray:
    tokens = backend.text.tokenizer.encode(text) if isinstance(text, str) else text
    counts = np.bincount([token % DIMENSIONS for token in tokens], minlength=DIMENSIONS).astype(np.float32)
    return counts / np.linalg.norm(counts)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/v1/embeddings/"])
async def test_texts_and_tokens_have_embeddings_in_their_order(api, backend: FakeBackend, path: str):
    for given, texts in (
        ("Hello", ["Hello"]),
        (["Hello", "a much longer text", "b"], ["Hello", "a much longer text", "b"]),
        ([5, 6, 5], [[5, 6, 5]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ):
        response = await api.client.post(path, json={"model": "satchel/tiny", "input": given, "user": "me"})
        answer = response.json()
        expected = np.array([bag(backend, text) for text in texts])
        assert np.abs(vectors_of(answer) - expected).max() < 1e-7
        asked = backend.pooled[-1]
        tokens = sum(map(len, asked.texts))
        assert (answer["object"], answer["model"]) == ("list", "satchel/tiny")
        assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert (asked.model, asked.score, asked.skipped, asked.tenant) == ("satchel/tiny", [], [], "default")
        headers = response.headers
        assert headers["x-satchel-replica"] == "satchel/tiny#0" and headers["x-satchel-node"] == "mac0"
        assert headers["x-satchel-why"] == "test: the first" and "x-satchel-model" not in headers
    assert not backend.requests


async def test_base64_has_the_same_numbers(post):
    plain = vectors_of(await post(input=["Hello", "b"])).astype("<f4")
    encoded = (await post(input=["Hello", "b"], encoding_format="base64"))["data"]
    for vector, entry in zip(plain, encoded, strict=True):
        assert base64.b64decode(entry["embedding"]) == vector.tobytes()


async def test_fewer_dimensions_are_the_first_ones_made_long_again(post):
    whole = vectors_of(await post(input=["Hello", "b"]))
    short = vectors_of(await post(input=["Hello", "b"], dimensions=5))
    expected = whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True)
    assert short.shape == (2, 5) and np.abs(short - expected).max() < 1e-6
    assert (vectors_of(await post(input=["Hello", "b"], dimensions=DIMENSIONS)) == whole).all()


async def test_vectors_of_any_length_are_only_cut(post, backend: FakeBackend):
    backend.served[0] = served_model(backend.served[0], embedding=EmbeddingInfo(DIMENSIONS, "mean", False, True, ""))
    whole = vectors_of(await post(input="Hello"))
    assert (vectors_of(await post(input="Hello", dimensions=5)) == whole[:, :5]).all()


async def test_several_hundred_inputs_are_one_request(post, backend: FakeBackend):
    answer = await post(input=[f"text {number}" for number in range(700)])
    assert len(answer["data"]) == 700 and len(backend.pooled) == 1
    assert np.abs(vectors_of(answer)[699] - bag(backend, "text 699")).max() < 1e-7


async def test_a_text_that_is_too_long_is_refused_or_cut(post, backend: FakeBackend):
    long = "word " * 900
    error = (await post(status=400, input=["a", long]))["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    tokens = len(backend.text.tokenizer.encode(long))
    assert f"context length is 1000 tokens. However, your input[1] resulted in {tokens}" in error["message"]
    assert "at least" in (await post(status=400, input="word " * 40_000))["error"]["message"]
    assert (await post(status=400, input=[5] * 1001))["error"]["code"] == "context_length_exceeded"
    assert (await post(input=[5] * 1000))["usage"]["prompt_tokens"] == 1000
    for kept, count in ((-1, 1000), (7, 7)):
        for given in (long, "word " * 100_000, [*range(5, 10)] * 300):
            assert (await post(input=given, truncate_prompt_tokens=kept))["usage"]["prompt_tokens"] == count
            whole = given if isinstance(given, list) else backend.text.tokenizer.encode(given[:9000])
            assert backend.pooled[-1].texts == [whole[:count]]
    error = (await post(status=400, input=long, truncate_prompt_tokens=1001))["error"]
    assert error["code"] == "context_length_exceeded", "as many are kept, and do not fit"


WRONG: list[tuple[dict[str, Any], str | None]] = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", ""]}, "input"),
    ({"input": [[5], []]}, "input"),
    ({"input": ["a", 5]}, "input[1]"),
    ({"input": [5, "a"]}, "input[1]"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": [5, -1]}, "input[1]"),
    ({"input": [[5], [10**6]]}, "input[1][0]"),
    ({"input": [True]}, "input[0]"),
    ({"input": ["a"] * (TEXTS_MAX + 1)}, "input"),
    ({"input": "a\ud800"}, None),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": DIMENSIONS + 1}, "dimensions"),
    ({"input": "a", "dimensions": "5"}, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
    ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ({"input": "a", "normalize": False}, "normalize"),
    ({"input": "a", "chat_template": "x"}, "chat_template"),
    ({"input": "a", "model": "nobody"}, "model"),
    ({"input": "a", "model": "other"}, "model"),
    ({"input": "a", "priority": "high"}, "priority"),
]


async def test_what_is_wrong_is_named(api, backend: FakeBackend):
    for path, cases in (("embeddings", WRONG), ("rerank", WRONG_RANKINGS)):
        for body, param in cases:
            response = await api.client.post(f"/v1/{path}", content=json.dumps(body))
            assert response.status_code in (400, 404), (body, response.text)
            assert response.json()["error"]["param"] == param, body
    assert not backend.pooled


async def test_what_changes_nothing_is_taken(post, backend: FakeBackend):
    await post(input="a", normalize=True, embed_dtype="float32", invented=5, dimensions=None, timeout_s=5.0, priority=2)
    assert backend.pooled[-1].priority == 2 and backend.pooled[-1].deadline_s < 5.1


async def test_a_model_whose_embedding_is_still_tried_is_to_be_asked_again(post, backend: FakeBackend):
    """Whether it supports embeddings is not known before its self-test ends."""
    tried = EmbeddingInfo(refusal="its hidden states were not looked for")
    backend.served[1] = served_model(backend.served[1], embedding=tried, proving="how it is computed")
    error = (await post(status=503, input="a", model="other"))["error"]
    assert error["code"] == "unavailable" and "has not ended" in error["message"] and not backend.pooled


async def test_a_model_that_embeds_nothing_says_why(post, backend: FakeBackend):
    backend.served[1] = served_model(backend.served[1], embedding=EmbeddingInfo(refusal="its head is odd"))
    error = (await post(status=400, input="a", model="other"))["error"]
    assert error["message"] == "the model 'other' does not support embeddings: its head is odd"
    models = (await post_models(post, backend))["data"]
    assert models[0]["embedding"] == {
        "supported": True,
        "dimensions": DIMENSIONS,
        "pooling": "last",
        "normalized": True,
        "from_model_files": False,
    }
    assert models[1]["embedding"] == {"supported": False, "reason": "its head is odd"}


async def post_models(post: Any, backend: FakeBackend) -> Any:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(backend, parse_config({"models": [{"name": "x", "source": "x"}]}))),
        base_url="http://localhost",
    ) as client:
        return (await client.get("/v1/models")).json()


async def test_a_full_queue_and_a_limit_of_time_are_told(api, backend: FakeBackend):
    backend.refusal = QueueFull("full")
    response = await api.client.post("/v1/embeddings", json={"input": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
    assert response.headers["retry-after"] == "1"
    backend.refusal, backend.pooling = None, asyncio.Event()
    response = await api.client.post("/v1/embeddings", json={"input": "a", "timeout_s": 0.05})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_an_unknown_model_is_answered_by_the_default_if_the_config_says_so(backend: FakeBackend):
    given = {"models": [{"name": "satchel/tiny", "source": "x"}], "endpoint": {"unknown_model": "default"}}
    transport = httpx.ASGITransport(create_app(backend, parse_config(given)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("/v1/embeddings", json={"model": "text-embedding-3-small", "input": "a"})
    assert answer.json()["model"] == answer.headers["x-satchel-model"] == "satchel/tiny"


async def test_a_keys_tokens_count_and_its_models_bind(backend: FakeBackend, tmp_path: Path, config: Config):
    home = Home(tmp_path)
    prepare_home(home)
    secret = create_key(home, "t", tokens_per_minute=4, models=("satchel/tiny",))[1]
    transport = httpx.ASGITransport(create_app(backend, config, keys=KeyRing(home, required=True)))
    headers = {"Authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        statuses = [
            (await client.post("/v1/embeddings", json={"input": given, "model": model})).status_code
            for given, model in (("a", "other"), ([5] * 9, "satchel/tiny"), ("a", "satchel/tiny"))
        ]
    assert statuses == [404, 200, 429]
    assert backend.pooled[0].tenant == "t"


# Rankings.

DOCUMENTS = ["aaaa", {"text": "Hello"}, "Hello there", {"text": "Hello", "title": "ignored"}]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank", "/v2/rerank/"])
async def test_documents_are_ranked_by_the_cosine_of_embeddings(api, backend: FakeBackend, path: str):
    response = await api.client.post(path, json={"query": "Hello", "documents": DOCUMENTS, "model": "satchel/tiny"})
    answer, texts = response.json(), ["aaaa", "Hello", "Hello there", "Hello"]
    cosines = np.array([bag(backend, text) @ bag(backend, "Hello") for text in texts])
    assert [result["index"] for result in answer["results"]] == [1, 3, *sorted((0, 2), key=lambda i: -cosines[i])]
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(cosines[result["index"]], abs=1e-6)
        shown = None if path.startswith("/v2") else {"text": texts[result["index"]]}
        assert result.get("document") == shown
    tokens = sum(map(len, backend.pooled[-1].texts))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert answer["meta"] == {"tokens": {"input_tokens": tokens}} and answer["id"].startswith("rerank-")
    assert response.headers["x-satchel-replica"] == "satchel/tiny#0"
    body = {"query": "Hello", "documents": DOCUMENTS, "top_n": 2, "return_documents": path.startswith("/v2")}
    best = (await api.client.post(path, json=body)).json()["results"]
    assert [result["index"] for result in best] == [1, 3]
    assert ("document" in best[0]) is path.startswith("/v2")


WRONG_RANKINGS: list[tuple[dict[str, Any], str | None]] = [
    ({"documents": ["a"]}, "query"),
    ({"query": "a"}, "documents"),
    ({"query": "", "documents": ["a"]}, "query"),
    ({"query": "a", "documents": []}, "documents"),
    ({"query": "a", "documents": ["b", ""]}, "documents[1]"),
    ({"query": "a", "documents": [5]}, "documents[0]"),
    ({"query": "a", "documents": [{"image": "x"}]}, "documents[0].text"),
    ({"query": "a", "documents": ["b"] * (TEXTS_MAX + 1)}, "documents"),
    ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ({"query": "a", "documents": ["b"], "return_documents": "yes"}, "return_documents"),
    ({"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    ({"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
    ({"query": "a", "documents": ["b"], "model": "other"}, "model"),
    ({"query": "a", "documents": ["word " * 900]}, "documents"),
]


PAIR_TEMPLATE = """\
{%- for message in messages if message.role == 'system' %}{{ message.content + ': ' }}{% endfor -%}
{%- for message in messages if message.role == "query" %}{{ 'Q ' + message.content }}{% endfor -%}
{%- for message in messages if message.role == "document" %}{{ ' D ' + message.content }}{% endfor -%}
{%- if add_generation_prompt %} A{% endif -%}
"""


def reranker(backend: FakeBackend, folder: Path, *, template: str = "", score: list[int | None] | None = None) -> None:
    """Makes the default model one that scores pairs."""
    write_tokenizer(folder, markers="added")
    if template:
        (folder / "chat_template.jinja").write_text(template)
    if score is not None:
        (folder / "1_LogitScore").mkdir()
        ids = dict(zip(("true_token_id", "false_token_id"), score, strict=True))
        (folder / "1_LogitScore" / "config.json").write_text(json.dumps(ids))
        module = {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"}
        (folder / "modules.json").write_text(json.dumps([module]))
    backend.text = load_text_model(folder)
    backend.served[0] = served_model(backend.served[0], folder=folder, files_id=str(folder).encode())


async def test_a_model_with_a_score_ranks_by_the_probability_of_pairs(post, backend: FakeBackend, tmp_path: Path):
    reranker(backend, tmp_path / "m", template=PAIR_TEMPLATE, score=[5, 6])
    answer = await post("rerank", query="Hello", documents=["aa", "a much longer document", "b"])
    asked = backend.pooled[-1]
    said = [backend.text.tokenizer.decode(text) for text in asked.texts]
    assert said == ["Q Hello D aa A", "Q Hello D a much longer document A", "Q Hello D b A"]
    assert asked.score == [5, 6]
    logits = [len(text) / 8 - 4 for text in asked.texts]
    assert [result["index"] for result in answer["results"]] == [1, 0, 2]
    for result in answer["results"]:
        expected = 1 / (1 + np.exp(-logits[result["index"]]))
        assert result["relevance_score"] == pytest.approx(expected, rel=1e-6)
    config = {"prompts": {"web": "Find"}, "default_prompt_name": "web"}
    (tmp_path / "m" / "config_sentence_transformers.json").write_text(json.dumps(config))
    (tmp_path / "m" / "sentence_bert_config.json").write_text("{}")
    (tmp_path / "m" / "1_LogitScore" / "config.json").write_text('{"true_token_id": 5, "false_token_id": null}')
    await post("rerank", query="Hello", documents=["aa"])
    assert backend.text.tokenizer.decode(backend.pooled[-1].texts[0]) == "Find: Q Hello D aa"
    assert backend.pooled[-1].score == [5]
    long = "word " * 900
    assert (await post("rerank", 400, query="Hello", documents=["a", long]))["error"]["param"] == "documents"
    await post("rerank", query="Hello", documents=["a", long], truncate_prompt_tokens=50)
    short, cut = backend.pooled[-1].texts
    assert len(short) < 50 and 48 <= len(cut) <= 50
    assert backend.text.tokenizer.decode(cut).startswith("Find: Q Hello D word word")


async def test_a_qwen3_reranker_is_known_by_its_name_and_shown_its_cards_form(
    post, backend: FakeBackend, tmp_path: Path
):
    reranker(backend, tmp_path / "models--Qwen--Qwen3-Reranker-0.6B" / "snapshots")
    text = backend.text
    # In the tiny vocabulary these words are not one token each.
    assert text.tokenizer.token_of("yes") is None
    await post("rerank", query="Hello", documents=["aa"])
    assert backend.pooled[-1].score == [], "so it can only embed"
    add_words(tmp_path / "models--Qwen--Qwen3-Reranker-0.6B" / "snapshots")
    backend.served[0] = served_model(backend.served[0], files_id=b"new")
    await post("rerank", query="Hello", documents=["a {document}"])
    backend.text = load_text_model(backend.served[0].info.folder)
    asked = backend.pooled[-1]
    assert asked.score == [backend.text.tokenizer.token_of("yes"), backend.text.tokenizer.token_of("no")]
    assert backend.text.tokenizer.decode(asked.texts[0]) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: Hello\n<Document>: a {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def add_words(folder: Path) -> None:
    """Makes `yes` and `no` tokens."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    first = max(entry["id"] for entry in tokenizer["added_tokens"]) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for word in ("yes", "no"):
        tokenizer["added_tokens"].append({"id": first, "content": word, **flags})
        first += 1
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


async def test_a_score_without_a_form_for_pairs_is_refused(post, backend: FakeBackend, tmp_path: Path):
    reranker(backend, tmp_path / "m", score=[5, 6])
    error = (await post("rerank", 400, query="a", documents=["b"]))["error"]
    assert "no place for a query and a document" in error["message"] and error["param"] == "model"


async def test_prompts_of_the_models_files_go_before_texts(post, backend: FakeBackend, folders, tmp_path: Path):
    folder = tmp_path / "prompted"
    shutil.copytree(folders["added"], folder)
    prompts = {"query": "find: ", "passage": "text: ", "any": "it: "}
    config = {"prompts": prompts, "default_prompt_name": "any"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps([{"path": "1_Pooling", "type": "x.Pooling"}]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean", "include_prompt": false}')
    backend.served[0] = served_model(backend.served[0], folder=folder, files_id=b"p")
    text = backend.text
    await post(input=["Hello", "b"])
    assert [text.tokenizer.decode(tokens) for tokens in backend.pooled[-1].texts] == ["it: Hello", "it: b"]
    assert backend.pooled[-1].skipped == [len(text.tokenizer.encode("it: "))] * 2
    await post(input=[[5, 6], [7]])
    assert backend.pooled[-1].texts == [[5, 6], [7]] and backend.pooled[-1].skipped == []
    await post("rerank", query="Hello", documents=["b", "c"])
    assert [text.tokenizer.decode(tokens) for tokens in backend.pooled[-1].texts] == [
        "find: Hello",
        "text: b",
        "text: c",
    ]
    assert backend.pooled[-1].skipped == [
        len(text.tokenizer.encode("find: ")),
        *[len(text.tokenizer.encode("text: "))] * 2,
    ]


async def test_special_tokens_are_the_tokenizers_and_survive_a_cut(post, backend: FakeBackend, folders, tmp_path: Path):
    """As Qwen3-Embedding's tokenizer, which puts <|endoftext|> behind a text."""
    folder = tmp_path / "ends"
    shutil.copytree(folders["added"], folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    end = backend.text.tokenizer.token_of("<|endoftext|>")
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [end], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    backend.served[0] = served_model(backend.served[0], folder=folder, files_id=b"e")
    hello = backend.text.tokenizer.encode("Hello")
    for fields, expected in (
        ({"input": "Hello"}, [*hello, end]),
        ({"input": "Hello", "add_special_tokens": False}, hello),
        ({"input": hello}, hello),
        ({"input": "Hello" * 500, "truncate_prompt_tokens": len(hello) + 1}, [*hello, end]),
        ({"input": "Hello" * 500, "truncate_prompt_tokens": 1}, [end]),
    ):
        await post(**fields)
        assert backend.pooled[-1].texts == [expected]


async def test_a_client_that_goes_takes_its_request_back(server: str, backend: FakeBackend):
    backend.pooling = asyncio.Event()
    came, gone = asyncio.Event(), asyncio.Event()
    pool = backend.pool

    async def watched(*args: Any) -> Any:
        came.set()
        try:
            return await pool(*args)
        except asyncio.CancelledError:
            gone.set()
            raise

    backend.pool = watched  # type: ignore[method-assign]
    async with httpx.AsyncClient(base_url=server) as client:
        asking = asyncio.create_task(client.post("/v1/embeddings", json={"input": "a"}, timeout=60))
        async with asyncio.timeout(60):
            await came.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await gone.wait()


# With a model that computes.


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def computing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.ASGITransport]:
    config = parse_config({"models": [{"name": "satchel/recall", "source": "embedded:recall"}]})
    async with remembering_app(config, tmp_path_factory.mktemp("kv")) as app:
        yield httpx.ASGITransport(app)


@pytest.mark.asyncio(loop_scope="module")
async def test_openais_client_unmodified_gets_what_the_model_alone_computes(computing: httpx.ASGITransport):
    texts = ["The code of ada is 1815.", "Once upon a time there was a quiet robot.", "one, two"]
    model: Any = load_model(EMBEDDED / "recall")[0]
    model.set_dtype(mx.float32)
    text = load_text_model(EMBEDDED / "recall")
    states = [np.array(model.model(mx.array([text.tokenizer.encode(each)], mx.uint32))[0, -1]) for each in texts]
    expected = np.array([state / np.linalg.norm(state) for state in states])
    http: Any = httpx.AsyncClient(transport=computing)
    async with openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http) as client:
        # It asks for base64 by itself.
        answer = await client.embeddings.create(model="satchel/recall", input=texts)
        floats = await client.embeddings.create(model="satchel/recall", input=texts, encoding_format="float")
        short = await client.embeddings.create(model="satchel/recall", input=texts[0], dimensions=32)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model="satchel/recall", input="word " * 40_000)
        listed = [entry async for entry in await client.models.list()]
    got = np.array([entry.embedding for entry in answer.data])
    assert np.abs(got - expected).max() < 1e-5
    assert np.abs(np.array([entry.embedding for entry in floats.data]) - got).max() < 1e-9
    first = got[0][:32] / np.linalg.norm(got[0][:32])
    assert np.abs(np.array(short.data[0].embedding) - first).max() < 1e-6
    assert answer.usage.total_tokens == sum(len(text.tokenizer.encode(each)) for each in texts)
    assert caught.value.code == "context_length_exceeded"
    assert listed[0].model_dump()["embedding"]["dimensions"] == 256


@pytest.mark.asyncio(loop_scope="module")
async def test_a_ranking_of_a_model_that_computes(computing: httpx.ASGITransport):
    async with httpx.AsyncClient(transport=computing, base_url="http://localhost") as client:
        body = {"query": "What is the code of ada?", "documents": ["one, two", "What is the code of ada?"]}
        answer = (await client.post("/v2/rerank", json=body)).json()
    assert [result["index"] for result in answer["results"]] == [1, 0]
    assert answer["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-4)
    assert answer["results"][1]["relevance_score"] < 0.999
