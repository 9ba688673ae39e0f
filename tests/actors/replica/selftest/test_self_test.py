"""The self-test at load finds what a model does wrong when batched, in chunks or from cached KV, and that is not
used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.device.device import on_gpu
from satchel.actors.replica.execution.decode_way import DEQUANTIZED, DecodeWay
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.kernels.sealing import POLICIES
from satchel.actors.replica.kv import caches as kv_cache
from satchel.actors.replica.kv.paged_cache import PagedKVCache, Reads
from satchel.actors.replica.kv.unbatched import UnbatchedSequences
from satchel.actors.replica.loading import models
from satchel.actors.replica.loading.models import resealed
from satchel.actors.replica.selftest import self_test
from satchel.actors.replica.selftest.self_test import Proven, prove
from satchel.cluster.config.config import Model, Scheduling
from satchel.cluster.errors import ModelLoadError
from tests.worlds.models.families import PECULIAR, UNBATCHED, write_model
from tests.worlds.replica.bench import load_tiny

ASKED = Model(name="tiny", source="somewhere/tiny")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


class Faulty:
    """A model that computes something else, or fails, if its inputs meet a condition."""

    def __init__(self, inner: Any, fault: Callable[[mx.array, list[Any], mx.array], mx.array]) -> None:
        self._inner, self._fault = inner, fault
        self.layers = inner.layers
        if hasattr(inner, "make_cache"):
            self.make_cache = inner.make_cache

    def __call__(self, tokens: mx.array, cache: list[Any], **given: Any) -> mx.array:
        return self._fault(tokens, cache, self._inner(tokens, cache=cache, **given))


def with_fault(loaded: LoadedModel, fault: Callable[[mx.array, list[Any], mx.array], mx.array]) -> LoadedModel:
    return replace(loaded, model=Faulty(loaded.model, fault))


def tried(loaded: LoadedModel, known: Path | None = None) -> Proven:
    return prove(loaded, ASKED, lambda what, fraction: None, known)


def batched(tokens: mx.array, cache: list[Any], logits: mx.array) -> mx.array:
    return logits if tokens.shape[0] == 1 else mx.roll(logits, 1, -1)


def by_the_first_sequences_position(tokens: mx.array, cache: list[Any], logits: mx.array) -> mx.array:
    first = mx.array(cache[0].offset).reshape(-1)[0]
    return logits + mx.floor(first / 1000) * mx.arange(logits.shape[-1])


def if_quantized(tokens: mx.array, cache: list[Any], logits: mx.array) -> mx.array:
    return logits * mx.nan if isinstance(cache[0], PagedKVCache) and cache[0].policy.quantizes else logits


def if_sealed(tokens: mx.array, cache: list[Any], logits: mx.array) -> mx.array:
    return logits + cache[0].keys.sum() * 0


def in_parts(tokens: mx.array, cache: list[Any], logits: mx.array) -> mx.array:
    if tokens.shape[1] > 1 and int(mx.array(cache[0].offset).max()) > tokens.shape[1]:
        raise ValueError("takes prompts in one piece. Always")
    return logits


def test_a_right_model_is_served_as_asked(loaded: LoadedModel):
    proven = tried(loaded)
    assert (proven.loaded, proven.together, list(proven.notes)) == (loaded, True, [])
    assert loaded.pool is not None
    assert proven.scheduling(Scheduling(sequences_max=9)).sequences_max == 9
    loaded.pool.check()


def test_wrong_answers_when_batched_make_decode_unbatched(loaded: LoadedModel):
    proven = tried(with_fault(loaded, batched))
    assert (proven.loaded.unbatched, proven.together, proven.loaded.kv) == (True, True, "q4")
    assert proven.notes == [note for note in proven.notes if "unbatched" in note and "something else" in note]


def test_wrong_answers_when_unbatched_make_sequences_run_alone(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    step = UnbatchedSequences.step
    monkeypatch.setattr(UnbatchedSequences, "step", lambda *given: mx.roll(step(*given), 1, -1))
    proven = tried(with_fault(resealed(loaded, None), batched))
    assert (proven.loaded.unbatched, proven.together) == (False, False)
    assert proven.scheduling(Scheduling(sequences_max=9)).sequences_max == 1
    assert any("one after the other" in note and "something else" in note for note in proven.notes)


def test_a_position_that_is_taken_for_all_sequences_is_found_though_it_is_far(loaded: LoadedModel):
    proven = tried(with_fault(loaded, by_the_first_sequences_position))
    assert proven.loaded.unbatched
    assert "position" in proven.notes[0]


def test_numbers_that_overflow_in_few_bits_are_kept_as_computed(loaded: LoadedModel):
    proven = tried(with_fault(loaded, if_quantized))
    assert (proven.loaded.kv, proven.loaded.pool is None, proven.together) == ("fp16", False, True)
    assert proven.loaded.model_id != loaded.model_id, "its KV is another"
    assert "failed its self-test" in proven.loaded.kv_why
    assert proven.notes == ["KV is kept as computed: otherwise it computes numbers that are not finite"]


def test_a_model_that_looks_into_its_caches_keeps_its_own(loaded: LoadedModel):
    proven = tried(with_fault(loaded, if_sealed))
    assert (proven.loaded.kv, proven.loaded.pool) == ("fp16", None)
    assert "the model's own way" in proven.notes[0]


def test_a_way_of_decoding_that_does_not_hold_is_not_used(loaded: LoadedModel):
    def in_place(tokens: mx.array, cache: list[Any], logits: mx.array) -> mx.array:
        batch = getattr(cache[0], "batch", None)
        return logits if batch is None or batch.reads is Reads.DEQUANTIZED else mx.roll(logits, 1, -1)

    fast = replace(with_fault(loaded, in_place), way=DecodeWay(Reads.IN_PLACE))
    proven = tried(fast)
    assert (proven.loaded.way, proven.loaded.kv) == (DEQUANTIZED, "q4")
    assert len(proven.notes) == 1


def test_wrong_answers_from_cached_kv_make_every_turn_be_prefilled(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    restore = kv_cache.restore

    def doubled(spec: Any, caches: Any, blocks: Any, tail: Any, used: int) -> None:
        restore(spec, caches, blocks, tail, used)
        if blocks:
            keys, values = caches[0].state
            caches[0].state = (keys, 2 * values)

    monkeypatch.setattr(kv_cache, "restore", doubled)
    proven = tried(resealed(loaded, None))
    assert not proven.loaded.spec.reusable
    assert proven.together
    assert any("no KV is reused" in note for note in proven.notes)


def test_a_model_that_fails_on_prompts_in_chunks_is_refused(loaded: LoadedModel):
    with pytest.raises(ModelLoadError, match=r"somewhere/tiny cannot be served: .*in one piece"):
        tried(with_fault(loaded, in_parts))


@pytest.mark.parametrize("context", [18, 19, 100, 300])
def test_a_short_context_is_no_fault(loaded: LoadedModel, context: int):
    proven = tried(replace(loaded, context_tokens=context))
    assert (proven.together, proven.loaded.kv) == (True, "q4")
    assert len(proven.notes) == (context == 18)


def test_a_failure_only_with_kv_as_computed_is_named(loaded: LoadedModel):
    def plain(tokens: mx.array, cache: list[Any], logits: mx.array) -> mx.array:
        if isinstance(cache[0], PagedKVCache) and not cache[0].policy.quantizes:
            raise ValueError("no such blocks")
        return logits

    assert "(no such blocks)" in tried(with_fault(loaded, plain)).notes[0]


@pytest.mark.variants(2)
@pytest.mark.parametrize("family", PECULIAR)
def test_families_of_other_masks_and_caches_are_served_as_asked(family: str, tmp_path: Path):
    model = models.load(str(write_model(tmp_path, family)), context_tokens_max=None, progress=lambda *_: None)
    proven = tried(model)
    assert (proven.loaded.kv, proven.together, list(proven.notes)) == ("q4", True, [])
    assert proven.loaded.spec.reusable
    assert family == "gemma3n" or not proven.loaded.embedding.refusal


@pytest.mark.parametrize("family", UNBATCHED)
def test_families_without_batches_are_unbatched_and_reused(family: str, tmp_path: Path):
    model = models.load(str(write_model(tmp_path, family)), context_tokens_max=None, progress=lambda *_: None)
    proven = tried(model)
    assert (proven.loaded.unbatched, proven.together, proven.loaded.spec.reusable) == (True, True, True)
    assert [note for note in proven.notes if "unbatched" in note] == list(proven.notes)


def with_key_bias(folder: Path, bias: float, dtype: str) -> LoadedModel:
    """A model whose keys are offset, in some channels more than in others."""
    path = write_model(folder, "qwen2") / "model.safetensors"
    weights: Any = mx.load(str(path))
    for name in [name for name in weights if name.endswith("k_proj.bias")]:
        channels = mx.arange(weights[name].size)
        weights[name] = bias * mx.where(channels % 7 == 0, 1.0, 0.1)
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    return models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, dtype=dtype)


def test_keys_too_large_for_the_scales_of_few_bits_are_kept_as_computed(tmp_path: Path):
    proven = tried(with_key_bias(tmp_path, 1e5, "float32"))
    assert (proven.loaded.kv, proven.loaded.pool is None, proven.together) == ("fp16", False, True)
    assert proven.loaded.spec.reusable


def test_numbers_too_large_for_the_dtype_are_refused_with_its_name(tmp_path: Path):
    with pytest.raises(ModelLoadError, match=r"in float16 .* not finite; try another `dtype`"):
        tried(with_key_bias(tmp_path, 1e5, "float16"))


@pytest.mark.skipif(on_gpu(), reason="kernels read blocks there")
def test_offset_keys_in_16_bits_are_read_as_prefill_does(tmp_path: Path):
    model = with_key_bias(tmp_path, 200.0, "bfloat16")
    assert "differs from the reference" in model.way.reason
    proven = tried(model)
    assert (proven.loaded.kv, proven.together, list(proven.notes)) == ("q4", True, [])


@pytest.mark.parametrize("kv", ["q4", "fp16"])
def test_blocks_are_read_in_place_in_16_bits_too(kv: str, tmp_path: Path):
    model = replace(with_key_bias(tmp_path, 0.0, "bfloat16"), way=DecodeWay(Reads.IN_PLACE))
    proven = tried(replace(resealed(model, POLICIES[kv]), way=model.way))
    assert (proven.loaded.kv, list(proven.notes)) == (kv, [])


def test_a_sequence_is_longer_than_the_windows_of_a_model(tmp_path: Path):
    folder = write_model(tmp_path, "gemma3_text", sliding_window=400)
    model = resealed(models.load(str(folder), context_tokens_max=None, progress=lambda *_: None), None)

    def past_windows(tokens: mx.array, cache: list[Any], logits: mx.array) -> mx.array:
        return batched(tokens, cache, logits) if int(mx.array(cache[0].offset).max()) > 400 else logits

    assert tried(with_fault(model, past_windows)).loaded.unbatched


def test_findings_are_stored(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    known = tmp_path / "trials.json"
    first = tried(with_fault(loaded, batched), known)
    monkeypatch.setattr(self_test, "_try", lambda loaded: pytest.fail("it was tried before"))
    again = tried(with_fault(loaded, batched), known)
    assert (again.loaded.unbatched, list(again.notes)) == (True, list(first.notes))
    known.write_text("{")
    monkeypatch.undo()
    assert not tried(loaded, known).loaded.unbatched


def test_a_model_without_a_self_test_says_so(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(self_test, "_try", lambda loaded: pytest.fail("it is tried"))
    proven = prove(loaded, replace(ASKED, self_test=False), lambda what, fraction: None)
    assert proven.together
    assert "self-test was skipped" in proven.notes[0]
