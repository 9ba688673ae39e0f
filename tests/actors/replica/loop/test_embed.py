"""Embeddings on an engine: they are right in every batch, and neither they nor answers hold each other up."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from satchel.actors.model_files.sentence_modules import SentenceModules
from satchel.actors.protocol.replica_messages import PooledTexts, PoolingRequest
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models
from satchel.actors.replica.loop.embed import LONG_TEXT_PART
from satchel.cluster.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    GenerationFailed,
    InvalidRequest,
    QueueFull,
    SatchelError,
    Unavailable,
)
from tests.worlds.models.families import write_model
from tests.worlds.replica.bench import Bench

MakeBench = Callable[..., Bench]

COSINE_MIN = 0.9999
"""The bound: a text beside any others, in chunks or not, has an embedding so close to that of it alone."""


class Asked:
    """What was replied to requests for vectors, by their ids."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.answers: dict[str, PooledTexts | SatchelError] = {}

    def ask(self, name: str, texts: list[list[int]], **fields: Any) -> None:
        request = PoolingRequest(name, "m", texts, **fields)
        self.bench.engine.pool(request, lambda answer: self.answers.update({name: answer}))

    def vectors(self, name: str) -> np.ndarray:
        answer = self.answers[name]
        assert isinstance(answer, PooledTexts), answer
        return np.frombuffer(answer.vectors, "<f4").reshape(-1, answer.dimensions)

    def drain(self) -> None:
        self.bench.drain()
        self.bench.engine.embed.queue.check()

    def run(self, texts: list[list[int]], **fields: Any) -> np.ndarray:
        self.ask("run", texts, **fields)
        self.drain()
        return self.vectors("run")


def texts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3000) for _ in range(length)] for length in lengths]


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_an_embedding_is_the_models_own_beside_others_in_chunks_and_in_a_batch(
    tmp_path: Path, family: str, pooling: str
):
    """Against mlx-lm's model alone and numpy. The longest text is longer than Gemma's windows; three tokens of each
    do not count for the mean."""
    folder = write_model(tmp_path / family, family)
    loaded = models.load(str(folder), context_tokens_max=None, progress=lambda what, fraction: None)
    loaded = dataclasses.replace(loaded, sentences=SentenceModules(pooling=pooling))
    model: Any = load_model(folder)[0]
    model.set_dtype(mx.float32)
    texts = texts_of(5, 700, 20, 21, 4, 300, 64)
    asked = Asked(Bench(loaded, prefill_chunk_tokens=256))
    for name, some in (("a", texts[:3]), ("b", texts[3:])):
        asked.ask(name, some, skipped=[3] * len(some))
    asked.bench.submit("one", texts[0], max_tokens=5)
    asked.drain()
    got = np.concatenate([asked.vectors("a"), asked.vectors("b")])
    for text, vector in zip(texts, got, strict=True):
        states = np.array(model.model(mx.array([text], mx.uint32))[0])
        expected = states[-1] if pooling == "last" else states[3:].mean(axis=0)
        assert np.abs(vector - expected / np.linalg.norm(expected)).max() < 1e-5
        alone = Asked(Bench(loaded)).run([text], skipped=[3])
        assert cosines(alone, vector[None])[0] > COSINE_MIN
    counters = asked.bench.engine.counters
    assert counters.embedded_tokens == sum(map(len, texts)) and counters.requests == 3


def test_scores_are_differences_of_the_models_own_logits(bench: MakeBench, loaded: LoadedModel):
    texts = texts_of(5, 600, 20)
    asked = Asked(bench(prefill_chunk_tokens=256))
    asked.ask("pair", texts, score=[5, 6])
    asked.ask("one", texts, score=[9])
    asked.ask("embeddings", texts)
    asked.drain()
    for index, text in enumerate(texts):
        logits = loaded.model(mx.array([text], mx.uint32), cache=make_prompt_cache(loaded.model))[0, -1]
        assert asked.vectors("pair")[index] == pytest.approx([float(logits[5] - logits[6])], abs=1e-3)
        assert asked.vectors("one")[index] == pytest.approx([float(logits[9])], abs=1e-3)
    assert asked.vectors("embeddings").shape == (3, loaded.embedding.dimensions)


def test_logprobs_of_tokens_are_the_models_own(bench: MakeBench, loaded: LoadedModel):
    """Of texts beside each other and beside embeddings, and of one in chunks; with the likeliest tokens, best first."""
    texts = texts_of(1, 2, 600, 17)
    asked = Asked(bench(prefill_chunk_tokens=256))
    asked.ask("likeliest", texts, logprobs=3)
    asked.ask("embeddings", texts)
    asked.ask("alone", texts, logprobs=0)
    asked.drain()
    found = asked.vectors("likeliest")
    assert found.shape == (sum(map(len, texts)) - len(texts), 7)
    assert asked.vectors("alone")[:, 0] == pytest.approx(found[:, 0], abs=1e-3)
    for text in texts:
        rows, found = found[: len(text) - 1], found[len(text) - 1 :]
        logits = loaded.model(mx.array([text], mx.uint32), cache=make_prompt_cache(loaded.model))[0]
        own = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[:-1]
        best = -np.sort(-own, axis=-1)[:, :3]
        assert rows[:, 0] == pytest.approx(own[np.arange(len(own)), text[1:]], abs=1e-3)
        assert rows[:, 4:] == pytest.approx(best, abs=1e-3)
        assert np.take_along_axis(own, rows[:, 1:4].astype(int), axis=1) == pytest.approx(best, abs=1e-3)


def test_answers_and_embeddings_go_on_beside_each_other(bench: MakeBench, monkeypatch: pytest.MonkeyPatch):
    """Every step of the engine draws a running sequence's next token. Beside it a step either prefills or embeds, in
    turn, and neither more than prefill alone may."""
    engine = bench(prefill_chunk_tokens=512)
    engine.submit("runs", texts_of(40)[0], max_tokens=200)
    for _ in range(4):
        engine.turn()
    monkeypatch.setattr(engine.engine.pace, "budget", lambda decoding: 64)
    done: list[tuple[str, int]] = []
    prefill, batch = engine.engine.executor.prefill, engine.engine.embed._vectors
    monkeypatch.setattr(
        engine.engine.executor,
        "prefill",
        lambda work: (done.append(("prefill", sum(len(tokens) for _, tokens in work))), prefill(work)),
    )

    def embedded(picks: list[Any]) -> Any:
        done.append(("embed", sum(pick.stop - pick.start for pick in picks)))
        return batch(picks)

    monkeypatch.setattr(engine.engine.embed, "_vectors", embedded)
    asked = Asked(engine)
    asked.ask("texts", texts_of(*[30] * 10, 300))
    engine.submit("prompt", texts_of(500)[0], max_tokens=2)
    while "texts" not in asked.answers or engine.engine.scheduler.pending_tokens:
        before, steps = len(engine.sequences["runs"].tokens), len(done)
        engine.turn()
        assert len(engine.sequences["runs"].tokens) == before + 1
        assert len(done) <= steps + 1 and done[-1][1] <= 64
    kinds = [kind for kind, _ in done]
    both = min(kinds.count("prefill"), kinds.count("embed"))
    assert both >= 5 and kinds[: 2 * both] == ["prefill", "embed"] * both
    assert sum(tokens for kind, tokens in done if kind == "embed") == 600


def test_what_is_taken_back_or_late_ends_and_others_go_on(bench: MakeBench):
    asked = Asked(bench(prefill_chunk_tokens=256))
    engine = asked.bench.engine
    asked.ask("long", texts_of(3000))
    asked.ask("late", texts_of(20), deadline_s=0.0)
    asked.ask("goes", texts_of(30, 700))
    asked.bench.turn()
    assert isinstance(asked.answers["late"], DeadlineExceeded)
    assert engine.embed.held_bytes > 0 and engine.waiting == 2 and set(engine.active) == {"long", "goes"}
    engine.room.fit()
    assert engine.room.held().text == engine.embed.held_bytes
    engine.abort(("long", "unknown"))
    asked.bench.turn()
    assert isinstance(asked.answers["long"], Unavailable)
    asked.drain()
    assert len(asked.vectors("goes")) == 2
    assert engine.embed.held_bytes == engine.waiting == engine.pending_tokens == 0
    asked.ask("ends", texts_of(20))
    engine.end_all()
    asked.bench.turn()
    assert isinstance(asked.answers["ends"], Draining)
    engine.drain()
    asked.ask("new", texts_of(20))
    asked.bench.turn()
    assert isinstance(asked.answers["new"], Draining)


def test_a_text_that_fails_ends_its_request_and_no_other(bench: MakeBench, monkeypatch: pytest.MonkeyPatch):
    asked = Asked(bench())
    pooler = asked.bench.engine.embed._pooler
    assert pooler is not None
    batch = pooler.batch

    def fails(texts: Any) -> Any:
        if any(text.tokens[0] == 13 for text in texts):
            raise RuntimeError("out of memory")
        return batch(texts)

    monkeypatch.setattr(pooler, "batch", fails)
    asked.ask("good", [[1, 2, 3], [4, 5]])
    asked.ask("bad", [[7, 8, 9], [13, 2]])
    asked.drain()
    failed = asked.answers["bad"]
    assert isinstance(failed, GenerationFailed) and failed.message == "the device failed while it was embedded, twice"
    assert np.abs(asked.vectors("good") - Asked(bench()).run([[1, 2, 3], [4, 5]])).max() < 1e-6


def test_what_cannot_be_taken_is_refused(bench: MakeBench, loaded: LoadedModel):
    def refusal(where: Asked, texts: list[list[int]], name: str = "r", **fields: Any) -> tuple[type, str]:
        where.ask(name, texts, **fields)
        where.bench.engine._take_commands()
        error = where.answers[name]
        assert isinstance(error, SatchelError)
        return type(error), error.message

    asked = Asked(bench())
    assert refusal(asked, [], score=[5])[0] is InvalidRequest
    for texts in ([], [[]], [[1], []], [[loaded.vocabulary_size]], [[-1]]):
        assert refusal(asked, texts)[0] is InvalidRequest
    assert refusal(asked, [[1]], score=[loaded.vocabulary_size])[0] is InvalidRequest
    assert refusal(asked, [[1], [2]], skipped=[1])[0] is InvalidRequest
    assert refusal(asked, texts_of(loaded.context_tokens + 1))[0] is ContextLengthExceeded
    few = Asked(bench(queue_requests_max=5))
    for number in range(4):
        few.ask(str(number), [[1]], flow="f")
    assert refusal(few, [[1]], flow="f") == (
        QueueFull,
        "the queue is full for this caller: the rest of it is reserved for others",
    )
    few.ask("5", [[1]], flow="g")
    assert refusal(few, [[1]])[0] is QueueFull
    few.drain()
    assert all(isinstance(few.answers[name], PooledTexts) for name in ("0", "3", "5"))

    hidden = loaded.hidden
    assert not isinstance(hidden, str)
    small = Asked(bench(memory_bytes_max=LONG_TEXT_PART * hidden.cache_bytes(1000), prefill_chunk_tokens=256))
    kind, message = refusal(small, texts_of(1100))
    assert (kind, message) == (ContextLengthExceeded, "a text has 1100 tokens; memory holds 1000 here")

    odd = dataclasses.replace(loaded, sentences=SentenceModules(refusal="it is odd"))
    assert refusal(Asked(Bench(odd)), [[1]]) == (InvalidRequest, "the model embeds no texts: it is odd")
    blind = dataclasses.replace(loaded, hidden="nothing agrees")
    assert refusal(Asked(Bench(blind)), [[1]])[1] == "the model embeds no texts: nothing agrees"
    capped = dataclasses.replace(loaded, hidden=dataclasses.replace(hidden, exact=False))
    assert refusal(Asked(Bench(capped)), [[1]], score=[5])[1].startswith("the model scores no texts")
    assert Asked(Bench(capped)).run([[1]]).shape == (1, 64)


def test_an_idle_engine_stays_responsive_while_it_embeds_much(bench: MakeBench):
    """Several hundred texts in one request, and one that comes a moment later from somebody else."""
    asked = Asked(bench(prefill_chunk_tokens=256))
    rng = random.Random(5)
    asked.ask("many", texts_of(*[rng.randint(1, 30) for _ in range(300)]), tenant="a")
    asked.bench.turn()
    asked.ask("few", texts_of(10), tenant="b")
    turns = 0
    while "few" not in asked.answers:
        asked.bench.turn()
        turns += 1
    assert turns <= 3
    asked.drain()
    assert asked.vectors("many").shape == (300, 64)
