"""Measures the embedded vision model with MLX: greedy, in float32, on pictures it has not seen.

    python -m benchmarks.embedded.shapes [--model DIR] [--count 25] [--rows TEXT] [--json]

Pictures go through the processor and the model of mlx-vlm. A reply counts only if it is right from the first character
to its end. The model reads a chat once, with the right replies in it, and must find each of their tokens the most
likely: then it is what greedy decoding says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_vlm.utils import load
from PIL import ImageColor

from training.shapes.drawing import frames_of, shown
from training.shapes.palette import COLOURS, WHITE
from training.shapes.questions import ask, ask_film, ask_list, directed, listed
from training.shapes.scenes import SHAPES, Film, Look, Scene, Thing, any_film, any_scene
from training.shapes.talk import PictureChat, any_chat

MODEL = Path(__file__).resolve().parents[2] / "actors" / "model_files" / "embedded" / "shapes"
SIDES = (64, 96, 128, 160, 224, 256, 320, 448, 1024)
FORMATS = ("png", "jpeg", "webp")
PURE_SIDES = (224, 256, 512)


class PictureSpeaker:
    """The model in float32 with its processor."""

    def __init__(self, folder: Path) -> None:
        model, processor = load(str(folder))
        model.set_dtype(mx.float32)
        self.model, self.processor = model, cast(Any, processor)

    def inputs(self, chat: PictureChat) -> dict[str, mx.array]:
        """What the processor makes of the chat: token ids (1, length), pixels and grids."""
        text = self.processor.tokenizer.apply_chat_template(chat.messages, tokenize=False)
        films = [medium for medium in chat.media if isinstance(medium, Film)]
        videos: dict[str, Any] = {}
        if films:
            videos["videos"] = [frames_of(film) for film in films]
            videos["video_metadata"] = [_metadata(film) for film in films]
        pictures = [shown(scene) for scene in chat.scenes]
        return self.processor(text=text, images=pictures or None, add_special_tokens=False, **videos)

    def judge(self, chat: PictureChat) -> list[tuple[str, bool]]:
        """For every reply its labels, and whether the model says it."""
        inputs = dict(self.inputs(chat))
        inputs.pop("attention_mask", None)
        ids = np.array(inputs["input_ids"])[0]
        logits = self.model(inputs.pop("input_ids"), **inputs).logits[0]
        hits = np.array(mx.argmax(logits, axis=-1))[:-1] == ids[1:]
        start, end = (self.processor.tokenizer.convert_tokens_to_ids(f"<|im_{name}|>") for name in ("start", "end"))
        starts, ends = np.flatnonzero(ids == start), np.flatnonzero(ids == end)
        judged = []
        for first, last, kind in zip(starts, ends, chat.kinds, strict=True):
            if kind:
                judged.append((kind, bool(hits[first + 2 : last].all())))
        return judged


def _metadata(film: Film) -> dict[str, Any]:
    rate = (len(film.times) - 1) / film.times[-1]
    return {"fps": rate, "frames_indices": list(range(len(film.times)))}


def single(medium: Scene | Film, text: str, answer: str, labels: str) -> PictureChat:
    """One picture or video and one question about it."""
    kind = "video" if isinstance(medium, Film) else "image"
    chat = PictureChat(media=[medium])
    chat.say("user", [{"type": kind}, {"type": "text", "text": text.replace("{p}", "")}])
    chat.say("assistant", answer, labels)
    return chat


def pure(rng: random.Random) -> Iterator[PictureChat]:
    """Every colour by its own name and every shape, alone on white, with hard edges."""
    for side, colour, shape in itertools.product(PURE_SIDES, COLOURS, SHAPES):
        red, green, blue = ImageColor.getrgb(colour)[:3]
        share = rng.uniform(0.2, 0.8)
        x, y = (rng.uniform(share / 2, 1 - share / 2) for _ in range(2))
        thing = Thing(colour, shape, (red, green, blue), x, y, share * side)
        scene = Scene(side, side, Look(WHITE), [thing])
        yield single(scene, "What is in the picture?", listed([thing]), f"{side} pixels")


def fresh(rng: random.Random, count: int) -> Iterator[PictureChat]:
    """`count` pictures of every side and file format, and what is in them."""
    for side, kind, _ in itertools.product(SIDES, FORMATS, range(count)):
        asked = None
        while asked is None:
            scene = any_scene(rng, sides=(side, side))
            asked = ask_list(rng, scene)
        scene = replace(scene, look=replace(scene.look, kind=kind))
        labels = f"{side} pixels; {kind}; {len(scene.things)} objects"
        yield single(scene, "What is in the picture?", asked.answer, labels)


def any_question(rng: random.Random) -> PictureChat:
    """A picture of any size, and any question about it."""
    scene = any_scene(rng)
    asked = ask(rng, scene)
    return single(scene, directed(rng, asked, 0, 1), asked.answer, asked.kind.partition(",")[0])


def video(rng: random.Random) -> PictureChat:
    """A video, and any question about it."""
    film = any_film(rng)
    asked = ask_film(rng, film)
    return single(film, asked.text, asked.answer, asked.kind.removeprefix("video: "))


def evaluate(folder: Path, count: int, seed: int, rows: str, every: int) -> Iterator[tuple[str, int, int]]:
    """The rows of the table whose title has `rows` in it, and what they are made of: title, right replies, all.

    Of the chats of each row only every `every`th is asked.
    """
    speaker = PictureSpeaker(folder)
    made: dict[str, Callable[[random.Random], Iterator[PictureChat]]] = {
        "pure colours on white": pure,
        "what is in it": lambda rng: fresh(rng, count),
        "any question": lambda rng: (any_question(rng) for _ in range(4 * count)),
        "video": lambda rng: (video(rng) for _ in range(4 * count)),
        "chat": lambda rng: (any_chat(rng) for _ in range(4 * count)),
    }
    for title, make in made.items():
        if rows not in title:
            continue
        right: Counter[str] = Counter()
        total: Counter[str] = Counter()
        chats = itertools.islice(make(random.Random(f"{seed}/{title}")), 0, None, every)
        for labels, hit in itertools.chain.from_iterable(speaker.judge(chat) for chat in chats):
            for label in ("", *(f": {label}" for label in labels.split("; "))):
                total[title + label] += 1
                right[title + label] += hit
        yield from ((row, right[row], total[row]) for row in sorted(total))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the embedded vision model with MLX.")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model")
    parser.add_argument("--count", type=int, default=25, help="pictures of each size and format; of other kinds four")
    parser.add_argument("--every", type=int, default=1, help="ask only every so many of them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", default="", help="only rows with this in their title")
    parser.add_argument("--cpu", action="store_true", help="use the CPU")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if options.cpu:
        mx.set_default_device(mx.cpu)
    found: dict[str, list[int]] = {}
    for title, right, total in evaluate(options.model, options.count, options.seed, options.rows, options.every):
        found[title] = [right, total]
        if not options.json:
            print(f"{title:46} {right:5} of {total:5} {right / total:7.1%}", flush=True)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
