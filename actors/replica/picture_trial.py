"""The trial of a model's pictures before it is served: what it sees must be what mlx-vlm shows it.

An encoder may look for its pixels under another name, make another number of embeddings than a picture has tokens,
want inputs of its language part that nobody gives, or see a picture otherwise inside a prompt than alone. All of that
loads, and then describes pictures that nobody sent. So two pictures are encoded, compared with each other and with what
mlx-vlm makes of whole prompts, and rows with them are forced through an engine as those of text are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from PIL import Image

from ..model_files.processors import SpanLayout
from ..model_files.source import first_sentence
from ..protocol.block_ids import BLOCK_TOKENS
from .execution.levels import levels_of
from .execution.models import LoadedModel
from .execution.vision import ImageEmbeddings, RowPart, RowPictures, Vision
from .forced_rows import DRAWN, MORE_TOKENS, Faults, ForcedRow, ForcedRows, Logits, Shown, difference, rounding
from .kv.device import multiplies_exactly

SIZE = (224, 168)
"""Width and height of the pictures."""

NEAR, NEAR_16 = 1e-3, 5e-2
"""How far embeddings may be off, of the largest one, in float32 and in 16 bits."""

LATE_S = 20.0
"""How long an encoder may take until what is tried is cut short: on a CPU large ones take a minute for a picture."""

REPEATS = 4
"""How often a picture is encoded again, with other numbers in freed memory: some encoders read past an array's end."""

DIFFERING = 0.5
"""The part of a picture's places that must differ between two pictures of noise: some stand for the ends of lines."""

_FEW = 12
_SENTENCE = "The boats came back to the harbour in the morning, and nobody had seen the storm. "


class _Unseen(Exception):
    """Why pictures are not taken, as the end of a sentence."""


def faults(loaded: LoadedModel) -> Faults:
    """Tries a model that sees. Whatever its modules note meanwhile is taken back.

    Returns:
        What does not hold of rows with pictures, as of those of text; if `alone` does not, it cannot take pictures.
    """
    vision = loaded.vision
    assert vision is not None
    try:
        before = _plain(loaded)
        found = _Trial(loaded, vision).faults()
        if not found.alone and (changed := difference(before, _plain(loaded), rounding(loaded))):
            found.alone = f"after a picture, text is not computed as before: {changed}"
    except _Unseen as reason:
        found = Faults(alone=str(reason))
    except Exception as error:
        # Encoders and processors raise anything.
        found = Faults(alone=f"a picture fails ({first_sentence(error)})")
    vision.forget()
    return found


def _plain(loaded: LoadedModel) -> Logits:
    """What a prompt of text gives with the model's own caches."""
    tokens = mx.array([[2, 3, 5, 7, 11, 13]], mx.uint32) % loaded.vocabulary_size
    logits = loaded.model(tokens, cache=make_prompt_cache(loaded.model))[0, -1]
    return {(0, 0): np.array(logits.astype(mx.float32))}


@dataclass(frozen=True)
class _Prompt:
    """A prompt with pictures as mlx-vlm reads it: what its processor made of it, where the pictures' spans begin, and
    which of the two pictures they are."""

    tokens: list[int]
    given: dict[str, Any]
    starts: list[int]
    pictures: Sequence[int]


class _Trial:
    """Two pictures of noise, and prompts with them."""

    def __init__(self, loaded: LoadedModel, vision: Vision) -> None:
        self._loaded, self._vision, self._processor = loaded, vision, vision.processor
        self._near = NEAR if multiplies_exactly(getattr(mx, loaded.dtype)) else NEAR_16
        noise = np.random.default_rng(1).integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
        self._pictures = [Image.fromarray(pixels) for pixels in (noise, 255 - noise)]
        self._span: SpanLayout = self._processor.layout(*SIZE).span
        self._seen: list[ImageEmbeddings] = []
        self._late = time.monotonic() + LATE_S

    def faults(self) -> Faults:
        """Returns what does not hold.

        Raises:
            _Unseen: the pictures do not reach the model as they should.
        """
        self._encode()
        prompts = self._prompts()[: 1 if self._is_late() else None]
        rows = [self._row(prompt) for prompt in prompts]
        own: Logits = {}
        for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            logits = self._by_mlx_vlm(prompt, row)
            for drawn, one in enumerate(logits or self._in_one_piece(row)):
                own[(number, drawn)] = one
        self._vision.forget()
        return self._in_engine(rows, own)

    def _is_late(self) -> bool:
        return time.monotonic() > self._late

    def _encode(self) -> None:
        """Encodes both pictures, and compares them."""
        encoded = [self._vision.encode(self._span, [[picture]], video=False)[0] for picture in self._pictures]
        places = mx.array(sorted(self._span.places))
        one, other = (each.inputs[places].astype(mx.float32) for each in encoded)
        differing = mx.abs(one - other).max(-1) > self._near * mx.abs(one).max()
        if float(differing.astype(mx.float32).mean()) < DIFFERING:
            raise _Unseen("its encoder does not look at pictures: two different ones are the same to it")
        for _ in range(REPEATS):
            if self._is_late():
                break
            _leave_noise()
            again = self._vision.encode(self._span, [[self._pictures[0]]], video=False)[0].inputs
            if not float(mx.abs(again - encoded[0].inputs).max()) <= self._near * float(mx.abs(again).max()):
                raise _Unseen("its encoder makes something else of the same picture every time")
        self._seen = encoded

    def _prompts(self) -> list[_Prompt]:
        """Returns prompts of one picture, of one that the end of a block cuts, and of two, as far as the model's
        context allows.

        Raises:
            _Unseen: not even one fits; or the processor writes a picture otherwise inside a prompt.
        """
        few, mark, length = self._words(_FEW), self._processor.placeholder, len(self._span.tokens)
        cut = self._words(max(_FEW, BLOCK_TOKENS - 2 * _FEW - length // 2))
        texts = [(f"{few}{mark}{few}", [0]), (f"{cut}{mark}{few}", [1]), (f"{few}{mark}{cut}{mark}{few}", [0, 1])]
        prompts = [self._prompt(text, pictures) for text, pictures in texts]
        prompts = [each for each in prompts if len(each.tokens) + MORE_TOKENS < self._loaded.context_tokens]
        if not prompts:
            raise _Unseen("its context has no room for a picture")
        return prompts

    def _words(self, count: int) -> str:
        """Returns a text of about so many tokens."""
        return _SENTENCE * max(1, round(count / len(self._processor.tokens(_SENTENCE))))

    def _prompt(self, text: str, pictures: list[int]) -> _Prompt:
        laid = self._processor.layout(*SIZE)
        placed = self._processor.tokens(text.replace(self._processor.placeholder, laid.text))
        try:
            given = self._processor.read(text, [self._pictures[picture] for picture in pictures])
            tokens = np.array(given.pop("input_ids")).reshape(-1).tolist()
        except Exception:
            if len(pictures) == 1:
                raise
            # Some processors take one picture at a time, as prompts are written here.
            given, tokens = {}, placed
        starts, at = [], 0
        for _ in pictures:
            starts.append(_find(self._span.tokens, tokens, starts[-1] + 1 if starts else 0))
            at = _find(self._span.tokens, placed, at) + 1
        return _Prompt(tokens, given, starts, pictures)

    def _row(self, prompt: _Prompt) -> ForcedRow:
        draw, vocabulary = random.Random(1).randrange, self._loaded.vocabulary_size
        more = [draw(min(256, vocabulary // 2), vocabulary) for _ in range(MORE_TOKENS)]
        shown = [
            Shown(start, self._span, self._pictures[picture], self._seen[picture])
            for start, picture in zip(prompt.starts, prompt.pictures, strict=True)
        ]
        # The last token of a picture or behind it may be special.
        more = [token if token != self._processor.token else token - 1 for token in more]
        return ForcedRow([*prompt.tokens, *more], len(prompt.tokens), shown)

    def _by_mlx_vlm(self, prompt: _Prompt, row: ForcedRow) -> list[np.ndarray]:
        """What mlx-vlm computes of a prompt and the tokens behind it; empty where it does not take two pictures as it
        takes each of them.

        Raises:
            _Unseen: it makes something else of a picture.
        """
        from mlx_vlm.models.cache import make_prompt_cache as own_caches

        if not prompt.given:
            return []
        model, ids = self._vision.model, mx.array([prompt.tokens])
        try:
            given = {name: _as_arrays(value) for name, value in prompt.given.items() if name != "attention_mask"}
            marked = mx.array([self._processor.marked(prompt.tokens)])
            pixels, mask = given.pop("pixel_values", None), mx.ones(marked.shape, dtype=mx.int32)
            made = model.get_input_embeddings(marked, pixels, mask=mask, **given).to_dict()
            self._compare(made, row)
        except Exception:
            if len(prompt.pictures) == 1:
                raise
            return []
        given |= {name: value for name, value in made.items() if value is not None}
        language, caches = model.language_model, own_caches(model.language_model)
        logits = [language(ids, cache=caches, **given).logits[0, -1]]
        for token in row.tokens[row.prompt : row.prompt + DRAWN - 1]:
            logits.append(language(mx.array([[token]]), cache=caches).logits[0, -1])
        return [np.array(each.astype(mx.float32)) for each in logits]

    def _compare(self, made: dict[str, Any], row: ForcedRow) -> None:
        """Compares the embeddings of a whole prompt with those that are put together of a picture's own."""
        whole, tokens = made["inputs_embeds"][0], row.tokens[: row.prompt]
        if whole.shape[0] != len(tokens):
            raise _Unseen(f"mlx-vlm makes {whole.shape[0]} embeddings of a prompt of {len(tokens)} tokens")
        beside = self._vision.inputs([RowPart(tokens, 0, self._known(row))], len(tokens))
        pairs = [(whole, beside["inputs_embeds"][0])]
        ours, theirs = levels_of(beside), levels_of(made)
        if len(ours) != len(theirs):
            raise _Unseen("the picture reaches other layers inside a prompt than alone")
        for one, other in zip(ours, theirs, strict=True):
            pairs.append((_spread(other, made["visual_pos_masks"]), _spread(one, beside["visual_pos_masks"])))
        for expected, got in pairs:
            off = float(mx.abs(expected - got).max() / mx.abs(expected).max())
            if not off <= self._near:
                raise _Unseen(f"inside a prompt mlx-vlm sees a picture otherwise than alone, off by {off:.2g}")

    def _known(self, row: ForcedRow) -> RowPictures:
        """The pictures of a row, with their embeddings and positions."""
        pictures = RowPictures([(each.start, len(each.span.tokens)) for each in row.pictures])
        for index, each in enumerate(row.pictures):
            pictures.embeddings[index] = each.embeddings
        grids = [(each.span.grid, False) for each in row.pictures]
        self._vision.set_positions(pictures, row.tokens[: row.prompt], grids)
        return pictures

    def _in_one_piece(self, row: ForcedRow) -> list[np.ndarray]:
        """What the bare model computes with the pictures' own embeddings and its own caches."""
        model, pictures, caches = self._loaded.model, self._known(row), make_prompt_cache(self._loaded.model)
        tokens, beside = row.tokens[: row.prompt], self._vision.inputs
        logits = [model(mx.array([tokens]), cache=caches, **beside([RowPart(tokens, 0, pictures)], len(tokens)))[0, -1]]
        for place in range(row.prompt, row.prompt + DRAWN - 1):
            further = self._vision.steps([place], [pictures])
            logits.append(model(mx.array([[row.tokens[place]]]), cache=caches, **further)[0, -1])
        return [np.array(each.astype(mx.float32)) for each in logits]

    def _in_engine(self, rows: list[ForcedRow], own: Logits) -> Faults:
        """Forces the rows through an engine: alone, in company, and once more with what it keeps of them."""
        loaded, found, forced = self._loaded, Faults(), ForcedRows(self._loaded, rows)
        alone, plain, wrong = forced.alone(loaded)
        if wrong := wrong or forced.difference(own, plain):
            found.alone = f"with a picture in its prompt {wrong}"
            return found
        found.together = forced.in_company(loaded, alone)
        if loaded.spec.reusable:
            found.again = forced.again(loaded, [len(rows) - 1])
        return found


def _leave_noise() -> None:
    """Leaves numbers other than zero in memory that small arrays had."""
    sizes = [2**power for power in range(1, 10) for _ in range(16)]
    mx.eval([mx.random.randint(1, 1000, (size,), dtype=mx.int32) for size in sizes])


def _find(span: Sequence[int], tokens: Sequence[int], at: int) -> int:
    """Returns where a picture's span begins.

    Raises:
        _Unseen: it is not there.
    """
    wanted = list(span)
    for place in range(at, len(tokens) - len(wanted) + 1):
        if list(tokens[place : place + len(wanted)]) == wanted:
            return place
    raise _Unseen("inside a prompt its processor writes a picture otherwise than alone")


def _as_arrays(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_arrays(each) for each in value]
    return mx.array(value) if isinstance(value, np.ndarray) else value


def _spread(level: mx.array, mask: mx.array) -> mx.array:
    """Returns a level as `(tokens, dim)`, zero for tokens outside the mask `(1, tokens)`."""
    places = np.flatnonzero(np.array(mask).reshape(-1))
    spread = mx.zeros((mask.size, level.shape[-1]), level.dtype)
    spread[mx.array(places)] = level
    return spread
