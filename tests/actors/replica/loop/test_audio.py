"""Audio in an engine: it is computed as mlx-vlm does, found again in memory and on disk, and kept apart from other
audio."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.cache import make_prompt_cache

from satchel.actors.protocol.media_ids import audio_hash, media_key, media_tokens
from satchel.actors.protocol.replica_messages import MediaSpan
from satchel.actors.replica.device.device import as_numpy
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.execution.media.audio import as_arrays
from satchel.actors.replica.loading import models
from satchel.actors.replica.memory.disk_tier import DiskTier
from satchel.actors.replica.selftest import audio as audio_test
from satchel.actors.replica.selftest import self_test
from satchel.cluster.config.config import Model
from satchel.cluster.errors import InvalidRequest, PictureLost
from tests.worlds.replica.bench import Bench
from tests.worlds.sounds import tone
from tests.zoo.vision_types import write

from ..memory.test_disk_tier import AGENT, Node, write_down

TEXT, MORE = list(range(100, 140)), [7, 8, 9]
DRAWN = 6


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write(tmp_path_factory.mktemp("model") / "qwen3_omni_moe", "qwen3_omni_moe")
    return models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, kv="fp16")


def samples_of(hertz: float, seconds: float = 1.5) -> np.ndarray:
    return tone(hertz, seconds).astype(np.float32) / 32768


def asked(loaded: LoadedModel, samples: np.ndarray) -> tuple[list[int], list[MediaSpan]]:
    """A prompt with audio."""
    assert loaded.vision is not None and loaded.vision.audio is not None
    processor = loaded.vision.audio.processor
    span, content = processor.layout(samples.size).span, samples.astype("<f4").tobytes()
    key = media_key([audio_hash(processor.rate, content)])
    ids = iter(media_tokens(key, len(span.places), audio=True))
    shown = [next(ids) if at in span.places else token for at, token in enumerate(span.tokens)]
    media = MediaSpan(len(TEXT), list(span.tokens), key, [], 0, 0, [content], audio_rate=processor.rate)
    return [*TEXT, *shown, *MORE], [media]


def by_mlx_vlm(loaded: LoadedModel, samples: np.ndarray) -> list[int]:
    """What mlx-vlm's own model answers, greedily, for the whole prompt and its audio."""
    assert loaded.vision is not None and loaded.vision.audio is not None
    model, processor = loaded.vision.model, loaded.vision.audio.processor
    given = {name: as_arrays(value) for name, value in processor.inputs(samples).items()}
    ids = mx.array([[*TEXT, *processor.layout(samples.size).span.tokens, *MORE]])
    made = model.get_input_embeddings(ids, None, mask=mx.ones(ids.shape, mx.int32), **given).to_dict()
    language, caches, drawn = model.language_model, make_prompt_cache(model.language_model), list[int]()
    logits = language(ids, cache=caches, **{name: value for name, value in made.items() if value is not None}).logits
    for _ in range(DRAWN):
        drawn.append(int(np.argmax(as_numpy(logits[0, -1].astype(mx.float32)))))
        logits = language(mx.array([drawn[-1:]]), cache=caches).logits
    loaded.vision.forget()
    return drawn


def test_answers_are_mlx_vlms(loaded: LoadedModel) -> None:
    """Alone, and in a batch with other audio and text."""
    bench, wanted = Bench(loaded), {}
    bench.submit("text", TEXT, max_tokens=DRAWN)
    for hertz in (440, 550):
        prompt, media = asked(loaded, samples_of(hertz))
        bench.submit(str(hertz), prompt, media=media, max_tokens=DRAWN)
        wanted[str(hertz)] = by_mlx_vlm(loaded, samples_of(hertz))
    bench.drain()
    assert {name: bench.sequences[name].tokens for name in wanted} == wanted
    assert wanted["440"] != wanted["550"]
    assert bench.engine.pictures.embeddings.encodes == 2


def test_the_same_audio_is_encoded_once_and_its_kv_is_reused(loaded: LoadedModel) -> None:
    bench, (prompt, media) = Bench(loaded), asked(loaded, samples_of(440, 12.0))
    first = bench.run("first", prompt, media=media, max_tokens=DRAWN)
    again = bench.run("again", prompt, media=[replace(one, pixels=[]) for one in media], max_tokens=DRAWN)
    assert first.cached == 0 and again.cached and again.cached >= 128 and again.tokens == first.tokens
    assert bench.engine.pictures.embeddings.encodes == 1
    # Elsewhere in a prompt only its embeddings are known.
    moved = [replace(one, start=one.start + 1, pixels=[]) for one in media]
    assert bench.run("moved", [5, *prompt], media=moved).cached == 0
    assert bench.engine.pictures.embeddings.encodes == 1
    other, heard = asked(loaded, samples_of(550, 12.0))
    # Up to the token before its places, which is the same for all audio.
    assert (bench.run("other", other, media=heard, max_tokens=DRAWN).cached or 0) <= len(TEXT) + 1
    assert bench.engine.pictures.embeddings.encodes == 2


def test_after_a_restart_it_is_read_from_disk(loaded: LoadedModel, tmp_path: Path) -> None:
    node, (prompt, media) = Node(tmp_path), asked(loaded, samples_of(440, 12.0))
    known = [replace(one, pixels=[]) for one in media]
    try:
        bench = Bench(loaded, disk=(disk := DiskTier(loaded.spec, loaded.model_id, node.client)))
        first = bench.run("first", prompt, media=media, agent=AGENT, max_tokens=DRAWN)
        write_down(bench, disk)
        node.restart()
        bench = Bench(loaded, disk=DiskTier(loaded.spec, loaded.model_id, node.client))
        again = bench.run("again", prompt, media=known, agent=AGENT, max_tokens=DRAWN)
        assert again.tokens == first.tokens and again.read > 0
        moved = [replace(one, start=one.start + 1) for one in known]
        assert bench.run("moved", [5, *prompt], media=moved, agent=AGENT).finish == "length"
        assert bench.engine.pictures.embeddings.encodes == 0
    finally:
        node.store.close()


def test_audio_that_nobody_has_any_more_is_asked_for_again(loaded: LoadedModel) -> None:
    bench, (prompt, media) = Bench(loaded), asked(loaded, samples_of(660))
    bench.submit("lost", prompt, media=[replace(one, pixels=[]) for one in media])
    bench.drain()
    assert isinstance(bench.refused["lost"], PictureLost)


def test_a_model_without_audio_refuses_it(loaded: LoadedModel) -> None:
    assert loaded.vision is not None
    without = replace(loaded, vision=loaded.vision.without_audio("audio fails"))
    assert (without.media["audio"], without.media["no_audio"]) == (False, "audio fails")
    bench, (prompt, media) = Bench(without), asked(loaded, samples_of(660))
    bench.submit("audio", prompt, media=media)
    bench.drain()
    assert isinstance(bench.refused["audio"], InvalidRequest)
    assert "does not support audio" in str(bench.refused["audio"])


def test_the_self_test_passes(loaded: LoadedModel) -> None:
    assert audio_test.fault_of_audio(loaded) == ""


def test_an_encoder_that_gives_the_same_for_any_audio_is_found(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loaded.vision is not None
    thinker = type(loaded.vision.model.thinker)
    usual = thinker.get_audio_features
    monkeypatch.setattr(thinker, "get_audio_features", lambda *given, **named: usual(*given, **named) * 0)
    assert "does not use audio" in audio_test.fault_of_audio(loaded)


def test_a_model_that_fails_with_audio_is_served_without_it(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "_try", lambda *_: self_test.Verdict(no_audio="audio fails"))
    proven = self_test.prove(loaded, Model(name="m", source="m"), lambda *_: None)
    assert proven.notes == ["it does not support audio: audio fails"]
    assert proven.loaded.vision is not None and proven.loaded.vision.audio is None
    assert loaded.vision is not None and loaded.vision.audio is not None
