"""Sequences that are forced along given tokens, and what the bare models compute of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from satchel.actors.model_files.media.processors import PictureProcessor, with_all_tiles
from satchel.actors.protocol.media_ids import picture_hash
from satchel.actors.protocol.replica_messages import MediaSpan
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.api.media.prompt import Medium, place, with_media_tokens
from satchel.api.media.sources import Picture
from tests.worlds.replica.bench import Bench, Logits

ANSWER, SAID = 6, 2
"""How many tokens a sequence says, and how many of them in the first of two turns."""

PROMPTS = (30, 300, 520)
BRIEF = (30, 300)
SIZES = ((200, 150), (120, 130))
"""Pictures, in pixels."""

DIFFERS = "the library's processor gives its prompts other tokens"

_WORDS = ("code", "of", "the", "ada", "story", "robot", "quiet", "remember", "numbers", "nine")
_PLANS = ((3, "0", 8), (4, "0", 5, "1", 120), (160, "1", 9))
"""Prompts with pictures: numbers of words, and which picture is between them."""

_FILM, _FILM_SIZE, _FILM_S = "video", (140, 112), (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
_FILM_PLAN = (150, _FILM, 7)
"""A prompt with a video, for models that are shown one."""


@dataclass
class Sequences:
    """Sequences of a model.

    Attributes:
        prompts: tokens of each, with a media token where a picture's tokens are.
        media: its pictures.
        scripts: by sequence what the model gets, and the answer that it is forced to give.
        own: what the bare model computes of it.
        whole: the same in one piece, without steps.
        normalized: whether `own` has logarithms of probabilities.
        notes: what of them is not as the library has it.
    """

    prompts: list[list[int]]
    media: list[list[MediaSpan]]
    scripts: dict[int, list[int]]
    own: Logits
    whole: Logits = field(default_factory=dict)
    normalized: bool = False
    notes: list[str] = field(default_factory=list)

    def submit(self, bench: Bench, sequence: int, name: str, agent: str = "", said: int | None = None) -> None:
        """Submits a sequence.

        Args:
            said: how many tokens of its answer its prompt has; 0 for the first of two turns. None for one turn.
        """
        whole = self.scripts[sequence][len(self.prompts[sequence]) :]
        prompt, count = [*self.prompts[sequence], *whole[: said or 0]], ANSWER - (said or 0) if said != 0 else SAID
        bench.submit(name, prompt, media=self.media[sequence], seed=sequence, max_tokens=count, agent=agent)

    def error(self, sequence: tuple[int, int], logits: np.ndarray, expected: np.ndarray) -> float:
        """How far logits are off, of the largest one."""
        if self.normalized:
            logits, expected = _normalized(logits), _normalized(expected)
        return float(np.abs(logits - expected).max() / np.abs(expected).max())


def text_sequences(loaded: LoadedModel, folder: Path, *, brief: bool = False) -> Sequences:
    """Sequences of random tokens, one of them longer than the windows of the models."""
    sequences = _random_sequences(loaded, BRIEF if brief else PROMPTS)
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    for sequence, script in sequences.scripts.items():
        caches, prompt = make_prompt_cache(model), script[:-ANSWER]
        model(mx.array([prompt[:-1]]), cache=caches)
        for drawn, token in enumerate(script[-ANSWER - 1 : -1]):
            step = model(mx.array([[token]]), cache=caches)[0, -1]
            sequences.own[(sequence, drawn)] = np.array(step.astype(mx.float32))
        whole = model(mx.array([script[:-1]]), cache=make_prompt_cache(model))[0, -ANSWER:].astype(mx.float32)
        sequences.whole |= {(sequence, drawn): np.array(one) for drawn, one in enumerate(whole)}
    return sequences


def _random_sequences(loaded: LoadedModel, lengths: Sequence[int]) -> Sequences:
    draw, longest = random.Random(3).randrange, loaded.context_tokens - ANSWER - 1
    scripts = [[draw(20, loaded.vocabulary_size) for _ in range(min(length, longest) + ANSWER)] for length in lengths]
    prompts = [script[:-ANSWER] for script in scripts]
    return Sequences(prompts, [[] for _ in prompts], dict(enumerate(scripts)), {})


def seeing_sequences(loaded: LoadedModel, folder: Path, *, brief: bool = False) -> Sequences:
    """Sequences of text, and, if the model takes pictures, sequences with them. What mlx-vlm computes of each is what
    its own programs would say."""
    from mlx_vlm.utils import load_model as load_seeing_model

    sequences = _random_sequences(loaded, BRIEF[: 1 if loaded.vision else None] if brief else PROMPTS)
    sequences.normalized = True
    model: Any = load_seeing_model(folder)
    model.set_dtype(mx.float32)
    for sequence, script in sequences.scripts.items():
        _note_own(sequences, sequence, model, script, {"mask": mx.ones((1, len(script) - ANSWER), dtype=mx.int32)})
    if loaded.vision is None:
        return sequences
    ours, films = PictureProcessor.load(folder), [] if loaded.stills else [_FILM_PLAN]
    plans = [*(_PLANS[1:2] if brief else _PLANS), *(films if ours.video_placeholder else [])]
    _add_pictures(sequences, model, folder, ours, plans)
    return sequences


def _add_pictures(
    sequences: Sequences, model: Any, folder: Path, ours: PictureProcessor, plans: Sequence[Sequence[int | str]]
) -> None:
    from mlx_vlm.utils import load_image_processor, load_processor

    own: Any = load_processor(folder, False)
    if (images := load_image_processor(folder)) is not None:
        own.image_processor = images
    tokenizer = getattr(own, "tokenizer", own)
    draw, noise = random.Random(3), np.random.default_rng(5)
    things = {str(index): Medium([_noisy(noise, *size)]) for index, size in enumerate(SIZES)}
    frames = [replace(_noisy(noise, *_FILM_SIZE), seconds=second) for second in _FILM_S]
    things[_FILM] = Medium(frames, video=True)
    for plan in plans:
        parts: list[dict[str, str]] = []
        for part in plan:
            words = " ".join(draw.choice(_WORDS) for _ in range(part)) if isinstance(part, int) else ""
            parts.append({"type": "text", "text": words} if words else things[str(part)].part)
        shown = [things[part] for part in plan if isinstance(part, str)]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        answer = [draw.randrange(20, 3000) for _ in range(ANSWER)]
        placed = place(ours, text, shown)
        tokens = ours._tokenizer.encode(placed.text, add_special_tokens=False)
        prompt, media = with_media_tokens(ours, tokens, placed)
        sequence, script = len(sequences.prompts), [*_filled(prompt, media), *answer]
        try:
            inputs = _film_of(own, text, shown[0]) if shown[0].video else _inputs_of(own, model, text, _images(shown))
            # Without this the library reads memory that is not the array's.
            inputs = with_all_tiles(inputs)
            given = np.array(inputs.pop("input_ids")).reshape(-1).tolist()
            marked = ours.marked(script)
            inputs["mask"] = inputs.pop("attention_mask", None)
            if marked[:-ANSWER] != given:
                sequences.notes += [DIFFERS] if DIFFERS not in sequences.notes else []
                inputs = _for_tokens(inputs, given, marked[:-ANSWER], int(np.argmax(np.array(script) == ours.token)))
                inputs["mask"] = mx.ones((1, len(marked) - ANSWER), dtype=mx.int32)
            _note_own(sequences, sequence, model, marked, inputs)
        except Exception:
            if len(shown) == 1:
                raise
            sequences.notes.append("the library does not take two pictures in a prompt; here it does")
            continue
        sequences.prompts.append(prompt)
        sequences.media.append(media)
        sequences.scripts[sequence] = script


def _for_tokens(inputs: dict[str, Any], given: Sequence[int], wanted: Sequence[int], first: int) -> dict[str, Any]:
    """Returns inputs of the `given` tokens for the `wanted` ones, which begin or end otherwise. What says something of
    each token, such as which are a picture's, would else say it of others; it is left out where no picture was given.

    Args:
        first: the place of the first picture's first token in the wanted ones.
    """
    if wanted[first] not in given:
        return {name: value for name, value in inputs.items() if getattr(value, "shape", None) != (1, len(given))}
    before = first - list(given).index(wanted[first])

    def moved(value: Any) -> Any:
        if getattr(value, "shape", None) != (1, len(given)):
            return value
        array, places = np.zeros((1, len(wanted)), np.array(value).dtype), np.arange(len(wanted)) - before
        inside = (places >= 0) & (places < len(given))
        array[0, inside] = np.array(value)[0, places[inside]]
        return mx.array(array)

    return {name: moved(value) for name, value in inputs.items()}


def _film_of(processor: Any, text: str, film: Medium) -> dict[str, Any]:
    """Returns what the processor makes of a text with one video."""
    milliseconds = [round(1000 * frame.seconds) for frame in film.frames]
    metadata = {"frames_indices": milliseconds, "fps": 1000.0, "total_num_frames": milliseconds[-1] + 1}
    frames = np.stack([np.asarray(image) for image in _images([Medium([frame]) for frame in film.frames])])
    made = dict(processor(text=[text], videos=[frames], fps=[2.0], video_metadata=[metadata]))
    return {name: mx.array(each) if isinstance(each, np.ndarray) else each for name, each in made.items()}


def _inputs_of(processor: Any, model: Any, text: str, images: list[Any]) -> dict[str, Any]:
    from mlx_vlm.utils import prepare_inputs, should_add_special_tokens

    try:
        return prepare_inputs(
            processor,
            images=images,
            prompts=text,
            image_token_index=getattr(model.config, "image_token_index", None),
            add_special_tokens=should_add_special_tokens(model.config.model_type, processor),
        )
    except (TypeError, ValueError):
        # Some processors take less than it gives them.
        made = dict(processor(text=[text], images=images))
        return {name: mx.array(each) if isinstance(each, np.ndarray) else each for name, each in made.items()}


def _note_own(sequences: Sequences, sequence: int, model: Any, script: Sequence[int], inputs: dict[str, Any]) -> None:
    from mlx_vlm.generate.ar import generate_step

    tokens = iter(script[-ANSWER:])
    steps = generate_step(
        mx.array([script[:-ANSWER]]),
        model,
        inputs.pop("pixel_values", None),
        inputs.pop("mask", None),
        max_tokens=ANSWER,
        temperature=0.0,
        sampler=lambda logits: mx.array([next(tokens, 5)]),
        **inputs,
    )
    for drawn, (_, logits) in zip(range(ANSWER), steps, strict=False):
        sequences.own[(sequence, drawn)] = np.array(logits.astype(mx.float32)).reshape(-1)


def _filled(prompt: Sequence[int], media: Sequence[MediaSpan]) -> list[int]:
    given = list(prompt)
    for one in media:
        given[one.start : one.start + len(one.tokens)] = one.tokens
    return given


def _noisy(noise: np.random.Generator, width: int, height: int) -> Picture:
    pixels = noise.integers(0, 255, (height, width, 3), dtype=np.uint8).tobytes()
    return Picture(width, height, pixels, picture_hash(width, height, pixels))


def _images(shown: Sequence[Medium]) -> list[Any]:
    from PIL import Image

    first = [medium.frames[0] for medium in shown]
    return [Image.frombytes("RGB", (picture.width, picture.height), picture.pixels) for picture in first]


def _normalized(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
