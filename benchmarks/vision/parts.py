"""What a request with a picture consists of, timed on an engine without Ray and HTTP, and what that lets one expect."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from PIL import Image

from satchel.actors.protocol.media_ids import picture_hash
from satchel.api.media.prompt import Medium, place, with_media_tokens
from satchel.api.media.sources import Picture
from satchel.api.text.model import load_text_model

from .. import parts
from ..memory import desk

NAP_S = 0.0005


def warm_ups() -> int:
    """Rounds that do not count, before those that do."""
    return desk.WARM_UP_ROUNDS if desk.on_gpu() else 1


@dataclass(frozen=True)
class Costs:
    """Seconds until a first token: to encode what is seen (with all that the engine does for it), to prefill the
    prompt, to answer a prompt that is known to the last token, and what is outside of the engine.

    Attributes:
        tokens: of the prompt, of which `seen` stand for what is seen.
        new_tokens: of the prompt, that nobody can have kept: what a turn adds.
        over_http_s: what all of it took together where a client measured it, which may be more than its parts.
    """

    encode_s: float
    prefill_s: float
    step_s: float
    tokens: int = 0
    seen: int = 0
    fixed_s: float = 0.0
    new_tokens: int = 0
    over_http_s: float = 0.0

    @property
    def cold_s(self) -> float:
        return self.fixed_s + self.encode_s + self.prefill_s + self.step_s

    @property
    def cached_s(self) -> float:
        """Where all that was computed is kept, at the prompt's rate of prefill."""
        return self.fixed_s + self.new_s + self.step_s

    @property
    def new_s(self) -> float:
        return self.prefill_s * self.new_tokens / max(1, self.tokens)

    @property
    def slower_s(self) -> float:
        """The longer one of a cold one's times."""
        return max(self.cold_s, self.over_http_s)

    @property
    def ratio(self) -> float:
        """How many times sooner the first token comes where only this is left to do."""
        return self.slower_s / self.cached_s

    def verdict(self, what: str, wanted: Sequence[float]) -> str:
        """The arithmetic, and how long the cached one could take for each of the wanted ratios."""
        seconds = (self.fixed_s, self.encode_s, self.prefill_s, self.step_s, self.cold_s, self.cached_s)
        fixed, encode, prefill, step, cold, cached = (f"{each * 1e3:,.1f}" for each in seconds)
        new = f" + prefill of {self.new_tokens} new tokens {self.new_s * 1e3:,.1f}" if self.new_tokens else ""
        measured = f" ({self.over_http_s * 1e3:,.1f} over HTTP)" if self.over_http_s > self.cold_s else ""
        allowed = (f"for {each:g}x it could take {self.slower_s / each * 1e3:,.1f} ms" for each in wanted)
        return (
            f"{what}: cold = fixed {fixed} + encode {encode} + prefill {prefill} + first step {step} = {cold} ms"
            f"{measured}, cached at least fixed {fixed}{new} + first step {step} = {cached} ms, which would be "
            f"{self.ratio:.1f}x; {', '.join(allowed)}."
        )


def median_costs(found: Sequence[Costs], fixed_s: float = 0.0) -> Costs:
    """The medians of each part; all are of the same prompt."""
    encode_s, prefill_s, step_s = (
        parts.median([getattr(each, name) for each in found]) for name in ("encode_s", "prefill_s", "step_s")
    )
    return Costs(encode_s, prefill_s, step_s, found[0].tokens, found[0].seen, fixed_s)


class Sight(desk.Desk):
    """An engine turned by hand that is shown pictures.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: Path) -> None:
        self.text: Any = load_text_model(folder)
        self._prefill_s = 0.0
        super().__init__(str(folder))

    def clear(self) -> None:
        """Begin with a new engine, which knows nothing, and times its prefill."""
        super().clear()
        prefill = self.engine.executor.prefill

        def timed(work: Sequence[tuple[str, Sequence[int]]]) -> None:
            started = time.perf_counter()
            prefill(work)
            mx.synchronize()
            self._prefill_s += time.perf_counter() - started

        self.engine.executor.prefill = timed

    def turn_until(self, done: Callable[[], bool]) -> None:
        """As a desk, but without taking the processor from an encoder on a thread of its own."""
        super().turn_until(lambda: done() or self._nap())

    def _nap(self) -> bool:
        if len(self.engine.pictures):
            time.sleep(NAP_S)
        return False

    def costs(self, rounds: int, frames: Callable[[], Sequence[Image.Image]], question: str, *, video: bool) -> Costs:
        """The medians of `look` at what `frames` makes anew each time."""
        found = [self.look(frames(), question, video=video) for _ in range(rounds + warm_ups())]
        return median_costs(found[warm_ups() :])

    def look(self, frames: Sequence[Image.Image], question: str, *, video: bool) -> Costs:
        """What the first token of the answer to a question about a picture, or a video, costs an engine that has seen
        nothing."""
        self.clear()
        prompt, media = self._prompt(frames, question, video)
        self._prefill_s = 0.0
        cold_s = self._first_s(prompt, media)
        prefill_s = self._prefill_s
        hot_s = self._first_s(prompt, media)
        return Costs(cold_s - prefill_s - hot_s, prefill_s, hot_s, len(prompt), sum(len(one.tokens) for one in media))

    def _first_s(self, prompt: list[int], media: Any) -> float:
        """Until the first token of the answer."""
        answer = self.ask(prompt, media=media)
        return answer.first - answer.sent

    def _prompt(self, frames: Sequence[Image.Image], question: str, video: bool) -> tuple[list[int], Any]:
        part = {"type": "video" if video else "image"}
        rendered = self.text.template.render([{"role": "user", "content": [part, {"type": "text", "text": question}]}])
        shown = [
            Picture(*frame.size, pixels, picture_hash(*frame.size, pixels), at / 2)
            for at, frame in enumerate(frames)
            if (pixels := frame.tobytes())
        ]
        placed = place(self.text.pictures, rendered, [Medium(shown, video)])
        return with_media_tokens(self.text.pictures, self.text.tokenizer.encode(placed.text), placed)
