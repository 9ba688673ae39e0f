"""Pictures that differ a little are never taken for one another, wherever they are found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from satchel.actors.model_files.media.processors import PictureProcessor
from satchel.actors.replica.execution import executor
from satchel.actors.replica.loading import models
from satchel.api.media.prompt import Medium
from tests.worlds.models.vision_families import write_model
from tests.worlds.replica.bench import Bench

from ..test_families import TOLERANCE, Forced, Logits
from .test_vision import Script, in_one_pass, picture_of, written

PAIRS, SIDE, ANSWER = 130, 56, 1
PICTURES = 2 * PAIRS


def a_little_other(noise: np.random.Generator, pixels: np.ndarray, kind: int) -> np.ndarray:
    """One pixel is another, one shade of it is, the picture is mirrored, or it is moved by a pixel."""
    other, (sequence, column, shade) = pixels.copy(), noise.integers(0, (SIDE, SIDE, 3))
    if kind == 0:
        other[sequence, column] ^= 255
    elif kind == 1:
        other[sequence, column, shade] ^= 1
    return (other, other, pixels[:, ::-1], np.roll(pixels, 1, axis=int(sequence) % 2))[kind]


def scripts_of(processor: PictureProcessor, noise: np.random.Generator) -> dict[int, Script]:
    """2n and 2n + 1 are of twins."""
    scripts: dict[int, Script] = {}
    for pair in range(PAIRS):
        pixels = noise.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        for sequence, shown in enumerate((pixels, a_little_other(noise, pixels, pair % 4)), 2 * pair):
            medium = Medium([picture_of(shown)])
            words, (media,) = written(processor, medium)
            first = [replace(media, start=3)]
            scripts[sequence] = Script([5, 6, 7, *words, 8], first, [9], [5, 6, 7, *media.tokens, 8], [medium])
    return scripts


@pytest.mark.slow
def test_every_picture_gets_its_own_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However alike another one is that was asked about before or beside it, from its features and from its KV."""
    folder, noise, noted = write_model(tmp_path / "model", "qwen3_vl"), np.random.default_rng(11), Logits()
    loaded = models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, numerics="reproducible")
    scripts = scripts_of(PictureProcessor.load(folder), noise)
    cold = {sequence: in_one_pass(loaded, script)[-1 - ANSWER] for sequence, script in scripts.items()}
    tokens = {sequence: script.tokens for sequence, script in scripts.items()}
    monkeypatch.setattr(executor, "BatchSampler", lambda *_: Forced(tokens, noted))
    bench = Bench(loaded, prefill_sequences_max=8)
    bench.engine.executor.batched_prefill = True

    for what in ("cold", "warm"):
        for few in np.array_split(noise.permutation(PICTURES), PICTURES // 6):
            for sequence in few.tolist():
                script = scripts[sequence]
                bench.submit(f"{what}{sequence}", script.prompt, media=script.media, seed=sequence, max_tokens=ANSWER)
            bench.drain()
        for sequence in scripts:
            found = noted.pop((sequence, 0))
            off, from_twin = (np.abs(found - cold[other]).max() for other in (sequence, sequence ^ 1))
            assert off <= TOLERANCE * np.abs(found).max() and 2 * off < from_twin, f"{what}: sequence {sequence}"
    assert bench.engine.pictures.embeddings.encodes == PICTURES
    # Of so many continuations of one beginning the KV of some is kept.
    whole = sum(
        bench.sequences[f"warm{sequence}"].cached == len(script.prompt) - 1 for sequence, script in scripts.items()
    )
    assert PICTURES // 10 < whole < PICTURES
