"""The hidden states that are found are the model's own, for every family, in batches and in chunks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from satchel.actors.replica.execution.hidden_states import HiddenStates, find_hidden_states
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.execution.media.vision import load_weights
from satchel.actors.replica.execution.pooling import PoolingText, TextPooler
from satchel.actors.replica.loading import models
from satchel.cluster.errors import GenerationFailed, ModelLoadError
from tests.worlds.models import families, vision_families

TEXTS = [[7, 300, 20, 21, 22], [900, 5], [11, 12, 13, 14, 15, 16, 17, 18, 19]]


def load(folder: Path) -> LoadedModel:
    return models.load(str(folder), context_tokens_max=None, progress=lambda what, fraction: None)


def states_of(part: Any, text: list[int], **given: Any) -> np.ndarray:
    return np.array(part(mx.array([text], mx.uint32), **given)[0].astype(mx.float32))


def by_mlx_lm(folder: Path, name: str = "model") -> list[np.ndarray]:
    """The hidden states of every text, as the library's own model computes them."""
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    return [states_of(getattr(model, name), text) for text in TEXTS]


def by_mlx_vlm(folder: Path) -> list[np.ndarray]:
    model, _ = load_weights(folder)
    model.set_dtype(mx.float32)
    language = model.language_model
    # Smolvlm's has its layers beside the output layer.
    inner = getattr(language, "model", None)
    if inner is None:
        head = language.lm_head
        language.lm_head = nn.Identity()
        states = [np.array(language(mx.array([text], mx.uint32)).logits[0]) for text in TEXTS]
        language.lm_head = head
        return states
    return [states_of(inner, text) for text in TEXTS]


def test_of_the_embedded_model_and_of_tiny_ones_of_several_families(tmp_path: Path):
    cases = [("recall", models.EMBEDDED / "recall", by_mlx_lm(models.EMBEDDED / "recall"))]
    for family, name in (("qwen3", "model"), ("llama", "model"), ("gemma3_text", "model"), ("nemotron_h", "backbone")):
        folder = families.write_model(tmp_path / family, family)
        cases.append((family, folder, by_mlx_lm(folder, name)))
    for family in ("qwen3_vl", "smolvlm"):
        folder = vision_families.write_model(tmp_path / family, family)
        cases.append((family, folder, by_mlx_vlm(folder)))
    for family, folder, expected in cases:
        loaded = load(folder)
        hidden = loaded.hidden
        assert isinstance(hidden, HiddenStates), (family, hidden)
        assert hidden.batched and hidden.exact and hidden.dimensions == expected[0].shape[1]
        assert (loaded.embedding.dimensions, loaded.embedding.pooling) == (hidden.dimensions, "last")
        check_vectors(family, hidden, expected)


def check_vectors(family: str, hidden: HiddenStates, expected: list[np.ndarray]) -> None:
    """Poolings in a batch and in chunks of a few tokens, without the first token and with it, against numpy's."""
    for pooling, made in (
        ("last", lambda states, skipped: states[-1]),
        ("mean", lambda states, skipped: states[skipped:].mean(axis=0)),
        ("cls", lambda states, skipped: states[skipped]),
    ):
        for normalizes in (True, False):
            pooler = TextPooler(hidden, pooling, normalizes=normalizes)
            texts = [PoolingText(text, skipped) for text, skipped in zip(TEXTS, (0, 1, 4), strict=True)]
            batch = pooler.batch(texts)
            for text, states, vector in zip(texts, expected, batch, strict=True):
                reference = made(states, text.skipped)
                if normalizes:
                    reference = reference / np.linalg.norm(reference)
                long, chunked = pooler.begin(text), None
                for stop in (2, 5, 7, len(text.tokens)):
                    if long.done < stop <= len(text.tokens):
                        chunked = pooler.advance(long, stop)
                assert chunked is not None
                scale = np.abs(reference).max()
                for got in (vector, chunked):
                    assert got.dtype == np.float32
                    assert np.abs(got - reference).max() < 1e-4 * scale, (family, pooling, normalizes)
                assert not normalizes or np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        # Causal: the sum of what came before.
        keys, _ = cache.update_and_fetch(x[:, None], x[:, None]) if cache is not None else (x[:, None], x)
        return x + mx.tanh(self.mix(mx.cumsum(keys[:, 0], axis=1)[:, -x.shape[1] :]))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.blocks = [Block(), Block()]

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        x = self.embedding(tokens)
        for block, own in zip(self.blocks, cache or [None] * 2, strict=True):
            x = block(x, own)
        return x


class Odd(nn.Module):
    """A model whose logits are `change` of its output layer's."""

    def __init__(self, change: Any = lambda logits: logits) -> None:
        super().__init__()
        self.inside, self.change = Inner(), change
        self.layers = self.inside.blocks

    def make_cache(self) -> list[Any]:
        return [KVCache(), KVCache()]

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self.change(self.inside.embedding.as_linear(self.inside(tokens, cache)))


def test_capped_and_scaled_logits_are_recognized_and_others_refused():
    mx.random.seed(3)
    assert find_hidden_states(model := Odd(), model, 40).exact
    for change in (lambda logits: 3 * mx.tanh(logits / 3), lambda logits: logits / 16):
        found = find_hidden_states(model := Odd(change), model, 40)
        assert not found.exact and found.batched and found.dimensions == 16
    for change in (mx.abs, lambda logits: -logits, lambda logits: logits * 0, lambda logits: logits[..., ::-1]):
        with pytest.raises(ValueError, match="no part of the model"):
            find_hidden_states(model := Odd(change), model, 40)


def test_a_model_that_needs_caches_or_looks_ahead_in_a_batch_computes_texts_alone(monkeypatch: pytest.MonkeyPatch):
    mx.random.seed(3)
    model = Odd()
    own = Inner.__call__

    def needs(self: Inner, tokens: mx.array, cache: Any = None) -> mx.array:
        if cache is None:
            raise TypeError("no cache")
        return own(self, tokens, cache)

    def looks(self: Inner, tokens: mx.array, cache: Any = None) -> mx.array:
        states = own(self, tokens, cache)
        return states if cache is not None else states + states.mean(axis=1, keepdims=True)

    for call in (needs, looks):
        monkeypatch.setattr(Inner, "__call__", call)
        hidden = find_hidden_states(model, model, 40)
        assert not hidden.batched
        texts = [PoolingText([1, 2, 3]), PoolingText([4, 5])]
        together = TextPooler(hidden, "mean", normalizes=True).batch(texts)
        monkeypatch.setattr(Inner, "__call__", own)
        expected = [states_of(model.inside, list(text.tokens)).mean(axis=0) for text in texts]
        for vector, states in zip(together, expected, strict=True):
            assert vector == pytest.approx(states / np.linalg.norm(states), abs=1e-5)


def test_what_is_no_number_is_an_error():
    nan = mx.full((1, 2, 4), float("nan"))

    class Hidden(SimpleNamespace):
        def __call__(self, tokens: mx.array) -> mx.array:
            return nan

    hidden = Hidden(batched=True)
    with pytest.raises(GenerationFailed, match="not a number"):
        TextPooler(hidden, "last", normalizes=True).batch([PoolingText([1, 2])])  # type: ignore[arg-type]


def test_an_encoder_is_refused_with_a_sentence(tmp_path: Path):
    for kind in ("bert", "xlm-roberta", "modernbert", "mpnet"):
        folder = families.write_model(tmp_path / kind, "llama")
        config = (folder / "config.json").read_text().replace('"llama"', f'"{kind}"')
        (folder / "config.json").write_text(config)
        with pytest.raises(ModelLoadError, match=f"is a bidirectional encoder .{kind}."):
            load(folder)
