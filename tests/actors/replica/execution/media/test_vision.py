"""Pictures through the whole engine, for every family: a picture that is cached, restored, batched or cut into chunks
gives what a cold one gives.

As in `test_families.py` sequences are forced along scripts and their logits compared. With KV in full precision the
reference is mlx-vlm's own: all pictures encoded together, the whole prompt in one pass, no cache.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.utils import load_model
from PIL import Image

from satchel.actors.kv_store.transfer.node_blocks import NodeBlocks
from satchel.actors.model_files.media.media_layouts import SpanLayout
from satchel.actors.model_files.media.processors import PictureProcessor
from satchel.actors.protocol.block_ids import root_id
from satchel.actors.protocol.media_ids import is_media_token, picture_hash
from satchel.actors.protocol.replica_messages import MediaSpan
from satchel.actors.protocol.store_messages import Content, Head
from satchel.actors.replica.execution import executor
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.execution.media.bidirectional import runs_of
from satchel.actors.replica.execution.media.language_inputs import SequencePart, SequencePictures
from satchel.actors.replica.execution.media.vision import TOGETHER_TOKENS_MAX
from satchel.actors.replica.kv.caches import set_bidirectional
from satchel.actors.replica.loading import models
from satchel.actors.replica.memory.disk_tier import DiskTier
from satchel.actors.replica.scheduling.prefill_budget import PrefillPace
from satchel.actors.rpc.codec import encode
from satchel.api.media.prompt import Medium, place, with_media_tokens
from satchel.api.media.sources import Picture
from satchel.cluster.config.nodes import Node as ClusterNode
from tests.worlds.direct import carried
from tests.worlds.models.vision_families import FAMILIES, write_model
from tests.worlds.replica.bench import Bench, Forced, Logits
from tests.worlds.replica.bench_disk import Node, write_down

from ...memory.test_disk_tier import AGENT as ALICE
from ..test_families import TOLERANCE

UNBATCHED = {"internvl_chat"}
"""Families that take several pictures for parts of one."""

ANSWER = 8
SIZES = ((200, 150), (120, 130), (64, 64), (200, 150))
CLIPS = (range(8), range(4, 12))
"""Frames of two clips, of which the second begins with the second half of the first."""

KNOWS_VIDEOS = {"qwen2_5_vl", "qwen3_vl"}
CLIP_ENCODES = 6
"""How much of both is encoded: each two frames by themselves, and once."""

AGAIN, REWORDED, OTHER = (0, 1, 3, 6, 7), (0, 2, 6, 7), 100
"""Sequences that are asked elsewhere too, with all pictures; and those that are asked behind another first word
besides, as sequences from OTHER on."""


@dataclass
class Script:
    """A sequence: the prompt with words, its pictures, the answer that it is forced to give, and the same as the model
    gets it; `shown` is what its pictures are of."""

    prompt: list[int]
    media: list[MediaSpan]
    answer: list[int]
    given: list[int]
    shown: list[Medium]

    @property
    def tokens(self) -> list[int]:
        return [*self.given, *self.answer]

    def cuts(self, place: int) -> bool:
        """Whether a picture begins before this place and goes on behind it."""
        return any(one.start < place < one.start + len(one.tokens) for one in self.media)

    def behind(self, word: int) -> Script:
        media = [replace(one, start=one.start + 1) for one in self.media]
        return replace(self, prompt=[word, *self.prompt], media=media, given=[word, *self.given])


def frames_in(one: MediaSpan) -> list[Image.Image]:
    return [Image.frombytes("RGB", (one.width, one.height), frame) for frame in one.pixels]


class Scene:
    """A tiny model of a family and the sequences that it answers.

    Attributes:
        sequences: their numbers, without those from OTHER on.
        again, reworded: those of AGAIN and of REWORDED.
        expected: the logits of all of them.
        encodes: how many different things their pictures are.
    """

    def __init__(self, folder: Path, family: str, kv: str) -> None:
        self.family, self.folder = family, write_model(folder, family)
        self.loaded = models.load(
            str(self.folder), context_tokens_max=None, progress=lambda *_: None, kv=kv, numerics="reproducible"
        )
        assert self.loaded.kv == kv and self.loaded.vision is not None
        # As on a GPU.
        self.loaded.vision.together_tokens = TOGETHER_TOKENS_MAX
        self.processor = PictureProcessor.load(self.folder)
        noise = np.random.default_rng(5)
        self.media = [Medium([noisy(noise, *size)]) for size in SIZES]
        rng = random.Random(3)
        # Plain text, one picture, two of them, a long text with all, of which two lie across the ends of blocks, and
        # the first two sequences' pictures exchanged.
        plans = [(60,), (5, 0, 20), (3, 0, 7, 1, 30), (-253, 2, -500, 3, 15, 1, 9), (5, 3, 20), (60, 0, 300)]
        # The others are shown a video's frames as pictures.
        assert bool(self.processor.video_placeholder) == (family in KNOWS_VIDEOS)
        if family in KNOWS_VIDEOS:
            film = [noisy(noise, 90, 70) for _ in range(CLIPS[-1].stop)]
            for clip in CLIPS:
                frames = [replace(film[frame], seconds=at / 2) for at, frame in enumerate(clip)]
                self.media.append(Medium(frames, video=True))
            plans += [(250, 4, 20), (3, 5, 10, 0, 7)]
        self.encodes = len(SIZES) + (CLIP_ENCODES if family in KNOWS_VIDEOS else 0)
        self.sequences = range(len(plans))
        self.scripts = {sequence: self.script(rng, plan) for sequence, plan in enumerate(plans)}
        self.scripts |= {
            sequence + OTHER: self.scripts[sequence].behind(2999) for sequence in REWORDED if sequence in self.scripts
        }
        self.again = [sequence for sequence in AGAIN if sequence in self.scripts]
        self.reworded = [sequence for sequence in self.scripts if sequence >= OTHER]
        # Chunks of prompts end there.
        assert all(self.scripts[3].cuts(place) for place in (256, 512))
        self.expected = self._reference()

    def script(self, rng: random.Random, plan: Sequence[int]) -> Script:
        """Numbers of text tokens (negative: up to which place), between which are indexes of media."""
        prompt: list[int] = []
        media: list[MediaSpan] = []
        for index, number in enumerate(plan):
            if index % 2 == 0:
                prompt += [rng.randrange(3000) for _ in range(number if number >= 0 else -number - len(prompt))]
                continue
            words, found = written(self.processor, self.media[number])
            media += [replace(one, start=one.start + len(prompt)) for one in found]
            prompt += words
        given = list(prompt)
        for one in media:
            given[one.start : one.start + len(one.tokens)] = one.tokens
        answer = [rng.randrange(3000) for _ in range(ANSWER)]
        return Script(prompt, media, answer, given, [self.media[number] for number in plan[1::2]])

    def _reference(self) -> Logits:
        model: Any = load_model(self.folder)
        found: Logits = {}
        for sequence, script in self.scripts.items():
            # Of pictures together with videos some of mlx-vlm's models encode the pictures only.
            alone = self.loaded.kv == "fp16" and len({medium.video for medium in script.shown}) <= 1
            logits = by_mlx_vlm(self.processor, model, script) if alone else in_one_pass(self.loaded, script)
            for drawn in range(ANSWER):
                found[(sequence, drawn)] = logits[len(script.prompt) - 1 + drawn]
        return found


def by_mlx_vlm(processor: PictureProcessor, model: Any, script: Script) -> np.ndarray:
    """(tokens, vocabulary), of mlx-vlm's model with all pictures encoded together and all tokens at once."""
    tokens, given = mx.array([script.tokens]), dict[str, Any]()
    if script.shown:
        video = script.shown[0].video
        mark = processor.video_placeholder if video else processor.placeholder
        clips = [[image_of(frame) for frame in medium.frames] for medium in script.shown]
        images = [image for images in clips for image in images]
        films = [np.stack([np.asarray(image) for image in images]) for images in clips]
        pixels = {"videos": films} if video else {"images": images}
        given = dict(processor._processor(text=[" ".join([mark] * len(clips))], **pixels))
    named = {
        name: mx.array(value) if isinstance(value, np.ndarray) else value
        for name, value in given.items()
        if name not in ("input_ids", "attention_mask", "mm_token_type_ids", "position_ids")
    }
    every = mx.ones(tokens.shape, dtype=mx.int32)
    made = model.get_input_embeddings(tokens, named.pop("pixel_values", None), mask=every, **named).to_dict()
    # It looks at the mask where it has no cache to count by, and would take any for the prompt's.
    made = {name: value for name, value in made.items() if value is not None and name != "attention_mask_4d"}
    if "position_ids" in given and not hasattr(model.language_model, "get_rope_index"):
        model.language_model._position_ids = None
        alone, marks = np.array(given["position_ids"])[0], np.array(given["input_ids"])[0] == processor.token
        places = np.tile(np.arange(len(script.tokens)), (len(alone), 1))
        for here, there in zip(
            *(runs_of(flags.tolist(), [True]) for flags in (marks, np.array(script.tokens) == processor.token)),
            strict=True,
        ):
            # The first and the last one of a picture's are counted as text.
            places[1:, there[0] + 1 : there[1] - 1] = alone[1:, here[0] + 1 : here[1] - 1]
        made["position_ids"] = mx.array(places)[None]
    if "mm_token_type_ids" in given:
        # Which tokens are a picture's.
        made["mm_token_type_ids"] = (tokens == processor.token).astype(mx.int32)
    return np.array(model.language_model(tokens, **made).logits[0].astype(mx.float32))


def written(processor: PictureProcessor, medium: Medium) -> tuple[list[int], list[MediaSpan]]:
    """What stands for it in a prompt."""
    placed = place(processor, processor.video_placeholder if medium.video else processor.placeholder, [medium])
    tokens = processor._tokenizer.encode(placed.text, add_special_tokens=False)
    return with_media_tokens(processor, tokens, placed)


def noisy(noise: np.random.Generator, width: int, height: int) -> Picture:
    return picture_of(noise.integers(0, 255, (height, width, 3), dtype=np.uint8))


def picture_of(pixels: np.ndarray) -> Picture:
    """Of (height, width, 3) bytes."""
    height, width, _ = pixels.shape
    return Picture(width, height, pixels.tobytes(), picture_hash(width, height, pixels.tobytes()))


def image_of(picture: Picture) -> Image.Image:
    return Image.frombytes("RGB", (picture.width, picture.height), picture.pixels)


def in_one_pass(loaded: LoadedModel, script: Script) -> np.ndarray:
    """(tokens, vocabulary), with pictures that are encoded for it."""
    vision = loaded.vision
    assert vision is not None
    pictures = SequencePictures([(one.start, len(one.tokens)) for one in script.media])
    vision.set_positions(pictures, script.given, [(one.grid, one.video) for one in script.media])
    for index, one in enumerate(script.media):
        words = script.prompt[one.start : one.start + len(one.tokens)]
        places = frozenset(at for at, word in enumerate(words) if is_media_token(word))
        span = SpanLayout(tuple(one.tokens), places, tuple(one.grid))
        pictures.embeddings[index] = vision.encode(span, [frames_in(one)], video=one.video)[0]
    beside = vision.language_inputs.of_parts([SequencePart(script.tokens, 0, pictures)], len(script.tokens))
    caches = loaded.new_caches()
    set_bidirectional(caches, [pictures.bidirectional])
    logits = loaded.model(mx.array([script.tokens]), cache=caches, **beside)[0]
    return np.array(logits.astype(mx.float32))


PLAIN = ("qwen2_5_vl", "qwen3_vl", "gemma3")
"""Those whose KV is also kept in full precision every time: videos, DeepStack, windows."""


def _params() -> Iterator[Any]:
    for name in FAMILIES:
        for kv in ("fp16", "q4"):
            marks = [pytest.mark.slow] if kv == "fp16" and name not in PLAIN else []
            yield pytest.param((name, kv), marks=marks, id=f"{name}-{kv}")


@pytest.fixture(scope="module", params=_params())
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("vision"), *request.param)


Make = Callable[..., tuple[Bench, Logits]]


@pytest.fixture
def forced(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(**fields: Any) -> tuple[Bench, Logits]:
        noted: Logits = {}
        scripts = {sequence: script.tokens for sequence, script in scene.scripts.items()}
        monkeypatch.setattr(executor, "BatchSampler", lambda *_: Forced(scripts, noted))
        return Bench(scene.loaded, **fields), noted

    return make


def submit(bench: Bench, scene: Scene, sequence: int, name: str, agent: str = "") -> None:
    script = scene.scripts[sequence]
    bench.submit(name, script.prompt, media=script.media, seed=sequence, max_tokens=ANSWER, agent=agent)


def compare(noted: Logits, expected: Logits, sequences: Sequence[int], what: str) -> None:
    """And forget what was noted."""
    for key in ((sequence, drawn) for sequence in sequences for drawn in range(ANSWER)):
        scale = np.abs(expected[key]).max()
        assert np.abs(noted[key] - expected[key]).max() <= TOLERANCE * scale, (
            f"{what}: sequence {key[0]}, draw {key[1]}"
        )
    noted.clear()


@pytest.mark.variants(4)
def test_positions_are_those_that_the_model_counts_for_the_whole_prompt(scene: Scene) -> None:
    """Also of tokens behind the last picture, which are not counted with it."""
    vision = scene.loaded.vision
    assert vision is not None
    counts = getattr(vision._language, "get_rope_index", None)
    for script in scene.scripts.values() if counts is not None else ():
        grids = [(one.grid, one.video) for one in script.media]
        if not grids:
            continue
        pictures = SequencePictures([(one.start, len(one.tokens)) for one in script.media])
        vision.set_positions(pictures, script.given, grids)
        stills, videos = ([list(grid) for grid, video in grids if video == kind] for kind in (False, True))
        if scene.family == "qwen2_5_vl" and videos:
            # Its clips have one grid each, as nothing stands between their frames.
            videos = [[len(videos) // (clips := sum(shown.video for shown in script.shown)), *videos[0][1:]]] * clips
        assert counts is not None
        wanted, shift = counts(
            mx.array([script.given]), mx.array(stills) if stills else None, mx.array(videos) if videos else None, None
        )
        given = vision.language_inputs._positions(SequencePart(script.given, 0, pictures), len(script.given) + 3)
        assert np.array_equal(given[:, :-3], np.array(wanted)[:, 0])
        assert pictures.shift == int(shift.reshape(-1)[0].item())
        behind = len(script.given) + pictures.shift + np.arange(3)
        assert np.array_equal(given[:, -3:], np.tile(behind, (3, 1)))


def test_pictures_encoded_together_are_what_they_are_alone(scene: Scene) -> None:
    """Where the model takes several: else they are encoded one by one."""
    vision = scene.loaded.vision
    assert vision is not None
    span, noise = scene.processor.layout(90, 70).span, np.random.default_rng(8)
    shown = [[Image.fromarray(noise.integers(0, 256, (70, 90, 3), dtype=np.uint8))] for _ in range(4)]
    alone = [vision.encode(span, [one], video=False)[0] for one in shown]
    together = vision.encode(span, shown, video=False)
    assert len(together) == len(alone) and (False in vision.unbatched) == (scene.family in UNBATCHED)
    for one, other in zip(alone, together, strict=True):
        for left, right in zip(one.arrays(), other.arrays(), strict=True):
            assert left.shape == right.shape and np.allclose(np.array(left), np.array(right), atol=TOLERANCE)


@pytest.mark.variants(5)
def test_pictures_alone_batched_cached_and_in_chunks(scene: Scene, forced: Make) -> None:
    for sequence in scene.sequences:
        bench, noted = forced()
        submit(bench, scene, sequence, "one")
        bench.drain()
        assert bench.sequences["one"].finish == "length", bench.sequences["one"].error
        compare(noted, scene.expected, [sequence], "alone")
    rng = random.Random(1)
    for chunk, together in ((64, False), (1024, True)) if scene.loaded.kv == "q4" else ((64, True),):
        bench, noted = forced(prefill_chunk_tokens=max(chunk, 256), prefill_sequences_max=3)
        bench.engine.prefill.pace = PrefillPace(chunk, pause_s=0.1)
        bench.engine.executor.batched_prefill = together
        for round_name in ("cold", "cached"):
            for sequence in rng.sample(scene.sequences, len(scene.sequences)):
                submit(bench, scene, sequence, f"{round_name}{sequence}")
                for _ in range(rng.randrange(4)):
                    bench.turn()
            bench.drain()
            compare(noted, scene.expected, scene.sequences, f"{round_name}, chunks of {chunk}")
        # Every picture is encoded once however many sequences have it, and of clips what their frames have in common.
        assert bench.engine.pictures.embeddings.encodes == scene.encodes
        for sequence in scene.sequences:
            assert bench.sequences[f"cached{sequence}"].cached == len(scene.scripts[sequence].prompt) - 1


def fetch(scene: Scene, source: Node, target: Node) -> None:
    """What a store does for an agent that moves to its node: `target` gets all that the agent has on the other."""
    branches: list[tuple[Head, Content]] = []
    for number, sequence in enumerate(scene.again):
        tokens = [*scene.scripts[sequence].prompt, *scene.scripts[sequence].answer]
        root = root_id(scene.loaded.model_id, "tenant:test")
        head = Head(ALICE, number, 1, scene.loaded.model_id, root, 1, False, 1, len(tokens), 0, 0.0, 0.0)
        branches.append((head, Content(array("I", tokens).tobytes(), "", b"[]")))
    peers: Any = SimpleNamespace()
    giver, taker = (
        NodeBlocks(node.store, bytes(range(32)), ClusterNode(name=name), peers, node.store)
        for name, node in (("mac0", source), ("mac1", target))
    )

    async def where(method: str, asked: bytes, timeout_s: float) -> bytes:
        return encode(giver.addresses)

    peers.client = lambda node: carried(node, where)
    try:
        asyncio.run(taker.fetch(ALICE, branches, "mac0", 20.0))
    finally:
        taker.close()
        giver.close()


@pytest.mark.variants(4)
def test_pictures_of_others_restored_and_moved(scene: Scene, forced: Make, tmp_path: Path) -> None:
    """A picture is encoded once, whatever is asked about it, by whom, in which process and on which node; and where a
    prompt has its KV there, nothing of its pictures is needed."""
    nodes = [Node(tmp_path / name) for name in ("first", "second")]

    def start(node: Node) -> tuple[Bench, Logits, DiskTier]:
        disk = DiskTier(scene.loaded.spec, scene.loaded.model_id, node.client)
        return *forced(disk=disk), disk

    def ask(bench: Bench, noted: Logits, sequences: Sequence[int], agent: str, what: str) -> list[int]:
        """How much of each prompt need not be computed."""
        for sequence in sequences:
            submit(bench, scene, sequence, f"{what}{sequence}", agent)
        bench.drain()
        compare(noted, scene.expected, sequences, what)
        return [bench.sequences[f"{what}{sequence}"].cached or 0 for sequence in sequences]

    try:
        bench, noted, disk = start(nodes[0])
        assert max(ask(bench, noted, scene.again, ALICE, "cold")) == 0
        # Nobody's KV stays, so that there is none of these words on the disk.
        assert max(ask(bench, noted, scene.reworded, "", "seen by an agent")) <= 1
        assert bench.engine.pictures.embeddings.encodes == scene.encodes
        write_down(bench, disk)
        fetch(scene, *nodes)
        for node, where in zip(nodes, ("restored", "moved"), strict=True):
            node.restart()
            bench, noted, disk = start(node)
            known = ask(bench, noted, scene.again, "default/bob", f"{where}, with KV")
            assert known == [len(scene.scripts[sequence].prompt) - 1 for sequence in scene.again]
            assert max(ask(bench, noted, scene.reworded, "default/bob", f"{where}, features alone")) <= 1
            assert bench.engine.pictures.embeddings.encodes == disk.counters.corrupt_blocks == 0
            write_down(bench, disk)
    finally:
        for node in nodes:
            node.store.check()
            node.store.close()
