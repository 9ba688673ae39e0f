"""Vision models whose layers are divided answer about pictures as in one process, to the bit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from satchel.actors.model_files.processors import PictureProcessor
from satchel.actors.protocol.replica_messages import MediaSpan
from satchel.actors.replica.group.forming import Member
from satchel.actors.replica.group.loading import load_stage
from satchel.actors.replica.loading import models
from satchel.api.media.prompt import Medium
from tests.worlds.models.vision_families import write_model
from tests.worlds.replica.bench import Bench, Received
from tests.worlds.replica.group import GROUP, KEY, TIMES, Led, listener, on_a_thread

from ..execution.test_vision import noisy, written
from .test_group import follower, same

HOW: dict[str, Any] = {"context_tokens_max": None, "progress": lambda *_: None, "weights": "stored"}


class Album:
    """Prompts with pictures, and a clip if the model knows videos."""

    def __init__(self, folder: Path) -> None:
        self._processor = PictureProcessor.load(folder)
        self._noise, self._rng = np.random.default_rng(5), random.Random(3)
        self.pictures = [Medium([noisy(self._noise, *size)]) for size in ((200, 150), (64, 64))]
        if self._processor.video_placeholder:
            self.pictures.append(Medium([noisy(self._noise, 90, 70) for _ in range(4)], video=True))

    def prompt(self, *plan: int | Medium) -> tuple[list[int], list[MediaSpan]]:
        """Of so many tokens of text, and pictures."""
        prompt: list[int] = []
        media: list[MediaSpan] = []
        for part in plan:
            if isinstance(part, int):
                prompt += [self._rng.randrange(10, 3000) for _ in range(part)]
                continue
            words, found = written(self._processor, part)
            media += [replace(each, start=each.start + len(prompt)) for each in found]
            prompt += words
        return prompt, media


def look(bench: Bench, folder: Path) -> dict[str, Received]:
    """Sequences with pictures beside one of text: a picture, one across the end of a block, all in one prompt; and a
    turn that goes on from memory and brings a further picture."""
    album = Album(folder)
    first, other, *video = album.pictures
    prompts = {
        "one": album.prompt(5, first, 20),
        "text": album.prompt(70),
        "cut": album.prompt(250, other, 40, first, 9),
        "all": album.prompt(3, *video, 30, other, 2),
    }

    def submit(name: str, prompt: list[int], media: list[MediaSpan], seed: int) -> None:
        bench.submit(name, prompt, media=media, temperature=0.8, logprobs=2, seed=seed, max_tokens=8)

    for seed, (name, (prompt, media)) in enumerate(prompts.items()):
        submit(name, prompt, media, seed)
    bench.drain()
    for seed, name in enumerate(("one", "cut")):
        prompt, media = prompts[name]
        said = bench.sequences[name].tokens
        more, further = album.prompt(4, other, 6)
        moved = [replace(each, start=each.start + len(prompt) + len(said)) for each in further]
        submit(f"next {name}", [*prompt, *said, *more], [*media, *moved], 9 + seed)
    bench.drain()
    return dict(bench.sequences)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_two_stages_see_as_one_process(tmp_path: Path, family: str):
    """The encoder is the leader's alone; the embeddings of each picture are made once."""
    folder = write_model(tmp_path / family, family)
    whole = models.load(str(folder), numerics="reproducible", **HOW)
    single = Bench(whole)
    expected = look(single, folder)
    listens = listener()
    member = Member(GROUP, 0, KEY, listens, TIMES)
    with on_a_thread(lambda: follower(folder, member, start=0, stop=1)) as done:
        led = Led(load_stage(str(folder), 1, 2), listens.getsockname()[:2])
        try:
            same(expected, look(led.bench, folder))
            pictures = led.bench.engine.pictures.embeddings
            assert pictures.encodes == single.engine.pictures.embeddings.encodes > 1
        finally:
            led.member.close()
    assert done.exception() is None
