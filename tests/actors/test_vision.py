"""Pictures through the whole engine, for every family: a picture that is cached, restored, batched or cut into chunks
gives what a cold one gives.

As in `test_families.py` rows are forced along scripts and their logits compared. With KV in full precision the
reference is mlx-vlm's own: all pictures encoded together, the whole prompt in one pass, no cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.utils import load_model
from PIL import Image

from satchel.actors.kv_store.media import media_key, picture_hash, words_of
from satchel.actors.messages import Media
from satchel.actors.replica import executor, models
from satchel.actors.replica.pictures import PictureProcessor
from satchel.actors.replica.vision import Part, RowPictures
from tests.vision_families import FAMILIES, write_model

from .conftest import Bench
from .test_disk_tier import Node, process, write_down
from .test_families import TOLERANCE, Forced, Logits

ANSWER = 12
SIZES = ((200, 150), (120, 130), (64, 64), (200, 150))


@dataclass
class Script:
    """A row: the prompt with words, its pictures, the answer that it is forced to give, and the same as the model gets
    it."""

    prompt: list[int]
    media: list[Media]
    answer: list[int]
    given: list[int]


class Scene:
    """A tiny model of a family and the rows that it answers."""

    def __init__(self, folder: Path, family: str, kv: str) -> None:
        self.folder = write_model(folder, family)
        self.loaded = models.load(
            str(self.folder), context_tokens_max=None, progress=lambda *_: None, kv=kv, numerics="reproducible"
        )
        assert self.loaded.kv == kv and self.loaded.vision is not None
        self.processor = PictureProcessor.load(self.folder)
        noise = np.random.default_rng(5)
        self.pictures = [
            Image.fromarray(noise.integers(0, 255, (height, width, 3), dtype=np.uint8)) for width, height in SIZES
        ]
        rng = random.Random(3)
        # Plain text, one picture, two of them, a long text with all, and the first two rows' pictures exchanged.
        plans = [(60,), (5, 0, 20), (3, 0, 7, 1, 30), (240, 2, 40, 3, 150, 1, 9), (5, 3, 20), (60, 0, 300)]
        self.scripts = {row: self.script(rng, plan) for row, plan in enumerate(plans)}

    def script(self, rng: random.Random, plan: Sequence[int]) -> Script:
        """Numbers of text tokens, between which are indexes of pictures."""
        prompt: list[int] = []
        media: list[Media] = []
        for index, number in enumerate(plan):
            if index % 2 == 0:
                prompt += [rng.randrange(3000) for _ in range(number)]
                continue
            picture = self.pictures[number]
            layout = self.processor.layout(*picture.size).span
            key = media_key([picture_hash(*picture.size, picture.tobytes())])
            media.append(
                Media(len(prompt), list(layout.tokens), key, list(layout.grid), *picture.size, picture.tobytes())
            )
            words = iter(words_of(key, len(layout.places)))
            prompt += [next(words) if at in layout.places else token for at, token in enumerate(layout.tokens)]
        given = list(prompt)
        for one in media:
            given[one.start : one.start + len(one.tokens)] = one.tokens
        answer = [rng.randrange(3000) for _ in range(ANSWER)]
        return Script(prompt, media, answer, given)

    def other(self, row: int) -> Script:
        """The row's pictures behind another text."""
        script = self.scripts[row]
        media = [replace(one, start=one.start + 1) for one in script.media]
        return replace(script, prompt=[2999, *script.prompt], media=media, given=[2999, *script.given])

    def reference(self) -> Logits:
        return self._by_mlx_vlm() if self.loaded.kv == "fp16" else self._in_one_pass()

    def _by_mlx_vlm(self) -> Logits:
        model: Any = load_model(self.folder)
        found: Logits = {}
        for row, script in self.scripts.items():
            tokens = mx.array([[*script.given, *script.answer]])
            made: dict[str, Any] = {}
            if script.media:
                images = [Image.frombytes("RGB", (one.width, one.height), one.pixels) for one in script.media]
                given = dict(
                    self.processor._processor(
                        text=[" ".join([self.processor.placeholder] * len(images))], images=images
                    )
                )
                named = {name: value for name, value in given.items() if name not in ("input_ids", "attention_mask")}
                pixels = mx.array(named.pop("pixel_values"))
                made = model.get_input_embeddings(
                    tokens, pixels, mask=mx.ones(tokens.shape, dtype=mx.int32), **named
                ).to_dict()
            # It looks at the mask where it has no cache to count by, and would take any for the prompt's.
            made = {name: value for name, value in made.items() if value is not None and name != "attention_mask_4d"}
            logits = model.language_model(tokens, **made).logits[0]
            self._note(found, row, script, logits)
        return found

    def _in_one_pass(self) -> Logits:
        vision = self.loaded.vision
        assert vision is not None
        found: Logits = {}
        for row, script in self.scripts.items():
            pictures = RowPictures([(one.start, len(one.tokens)) for one in script.media])
            vision.place(pictures, script.given, [(one.grid, False) for one in script.media])
            for index, one in enumerate(script.media):
                image = Image.frombytes("RGB", (one.width, one.height), one.pixels)
                span = self.processor.layout(*image.size).span
                pictures.features[index] = vision.encode(span, [image], video=False)
            tokens = [*script.given, *script.answer]
            beside = vision.inputs([Part(tokens, 0, pictures)], len(tokens))
            logits = self.loaded.model(mx.array([tokens]), cache=self.loaded.new_caches(), **beside)[0]
            self._note(found, row, script, logits)
        return found

    @staticmethod
    def _note(found: Logits, row: int, script: Script, logits: mx.array) -> None:
        values = np.array(logits.astype(mx.float32))
        for drawn in range(ANSWER):
            found[(row, drawn)] = values[len(script.prompt) - 1 + drawn]


@pytest.fixture(
    scope="module", params=[(name, kv) for name in FAMILIES for kv in ("fp16", "q4")], ids=lambda param: "-".join(param)
)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("vision"), *request.param)


Make = Callable[..., tuple[Bench, Logits]]


@pytest.fixture
def forced(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(**scheduling: Any) -> tuple[Bench, Logits]:
        noted: Logits = {}
        scripts = {row: [*script.given, *script.answer] for row, script in scene.scripts.items()}
        monkeypatch.setattr(executor, "BatchSampler", lambda *_: Forced(scripts, noted))
        return Bench(scene.loaded, **scheduling), noted

    return make


def submit(bench: Bench, scene: Scene, row: int, name: str) -> None:
    script = scene.scripts[row]
    bench.submit(name, script.prompt, media=script.media, seed=row, max_tokens=ANSWER)


def compare(noted: Logits, expected: Logits, what: str) -> None:
    assert noted.keys() >= expected.keys(), what
    for key, wanted in expected.items():
        scale = np.abs(wanted).max()
        assert np.abs(noted[key] - wanted).max() <= TOLERANCE * scale, f"{what}: row {key[0]}, draw {key[1]}"


def test_pictures_alone_in_company_cached_and_in_chunks(scene: Scene, forced: Make) -> None:
    expected = scene.reference()
    alone: Logits = {}
    for row in scene.scripts:
        bench, noted = forced()
        submit(bench, scene, row, "row")
        bench.drain()
        assert bench.rows["row"].finish == "length", bench.rows["row"].error
        alone |= noted
    compare(alone, expected, "alone")
    rng = random.Random(1)
    for chunk, together in ((256, False), (1024, True)) if scene.loaded.kv == "q4" else ((512, True),):
        bench, noted = forced(prefill_chunk_tokens=chunk, prefill_rows_max=3)
        for round_name in ("cold", "cached"):
            bench.engine.executor.batched_prefill = together
            for row in rng.sample(list(scene.scripts), len(scene.scripts)):
                submit(bench, scene, row, f"{round_name}{row}")
                for _ in range(rng.randrange(4)):
                    bench.turn()
            bench.drain()
            compare(noted, expected, f"{round_name}, chunks of {chunk}")
            noted.clear()
        # Four pictures, of which every one is encoded once however many rows have it.
        assert bench.engine.pictures.features.encodes == len(SIZES)
        for row, script in scene.scripts.items():
            assert bench.rows[f"cached{row}"].cached == len(script.prompt) - 1


def test_features_outlive_their_process(scene: Scene, tmp_path: Path) -> None:
    """A picture of an agent is encoded once, whatever is asked about it, by whom, and in which process."""
    if scene.loaded.kv != "q4":
        pytest.skip("how KV is kept does not matter here")
    node = Node(tmp_path / "kv")
    try:
        for number, row in enumerate((1, 2, 1)):
            bench, disk = process(scene.loaded, node)
            script = scene.scripts[row]
            if number:
                # Another text before it, so that no KV is of use.
                script = scene.other(row)
            bench.submit("row", script.prompt, media=script.media, agent=f"default/agent{number}", max_tokens=2)
            bench.drain()
            assert bench.rows["row"].finish == "length" and (bench.rows["row"].cached or 0) <= 1
            new = {one.key for one in script.media} - ({one.key for one in scene.scripts[1].media} if number else set())
            assert bench.engine.pictures.features.encodes == len(new if number < 2 else ())
            write_down(bench, disk)
            node.restart()
        # What was asked before has its KV there: of that picture nothing else is needed.
        bench, disk = process(scene.loaded, node)
        bench.submit("row", script.prompt, media=script.media, agent="default/again", max_tokens=2)
        bench.drain()
        assert bench.rows["row"].cached == len(script.prompt) - 1
        counted = bench.engine.pictures.features
        assert (counted.encodes, counted.hits) == (0, 1)
    finally:
        node.store.close()
