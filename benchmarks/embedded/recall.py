"""Measures the embedded text model with MLX: greedy, in float32, with names it has not seen.

    python -m benchmarks.embedded.recall [--model DIR] [--questions 60] [--json]

A reply counts only if it is right from the first character to its end. Where one reply is right, the model reads it
once and must find each of its tokens the most likely: then it is what greedy decoding says. Stories are decoded.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_tokenizer

from satchel.actors.replica.loading.models import load
from training.recall.talk import Message

from .recall_questions import LONG, SHORT, QuestionCase, asked, long_talk, story_asked

MODEL = Path(__file__).resolve().parents[2] / "actors" / "model_files" / "embedded" / "recall"
CHUNK = 512  # tokens read at once
STORY = "story of 60 words or more"


class TextSpeaker:
    """The model with its tokenizer.

    Args:
        folder: the model's.
        model: the model, loaded already; None for one in float32.
    """

    def __init__(self, folder: Path, model: Any = None) -> None:
        self.model = _load(folder) if model is None else model
        self.tokenizer: Any = load_tokenizer(folder)

    def tokens(self, messages: list[Message], tools: list[Any] | None = None, ask: bool = True) -> list[int]:
        """Token ids of the conversation, with the beginning of a reply if `ask`."""
        text = self.tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=ask, tokenize=False
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def size_of(self, messages: list[Message]) -> int:
        """Tokens of these messages."""
        return len(self.tokens(messages, ask=False))

    def read(self, tokens: list[int], cache: list[Any] | None = None) -> list[Any]:
        """A cache that holds these tokens: `cache`, which was empty, or a new one."""
        cache = make_prompt_cache(self.model) if cache is None else cache
        for start in range(0, len(tokens), CHUNK):
            self.model(mx.array([tokens[start : start + CHUNK]]), cache=cache)
            mx.eval([layer.state for layer in cache])
        return cache

    def whole_reply(self, text: str) -> list[int]:
        """Token ids of a reply with its end."""
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def would_say(self, tokens: list[int], wanted: str, cache: list[Any] | None = None) -> bool:
        """Whether `wanted` and the end of the reply is what follows greedily."""
        right = self.whole_reply(wanted)
        if cache is None:
            cache = self.read(tokens[:-1])
            tokens = tokens[-1:]
        logits = self.model(mx.array([tokens + right[:-1]]), cache=cache)[0, -len(right) :]
        return mx.argmax(logits, axis=-1).tolist() == right

    def is_right(self, case: QuestionCase) -> bool:
        return self.would_say(self.tokens(case.messages, case.tools), case.wanted)

    def reply(self, messages: list[Message], most: int = 400) -> str:
        """The greedy reply to a conversation."""
        parts = stream_generate(self.model, self.tokenizer, self.tokens(messages), max_tokens=most)
        return "".join(part.text for part in parts)


def _load(folder: Path) -> Any:
    def ignore(what: str, fraction: float | None) -> None:
        """Progress is not shown."""

    # No time is measured here, so nothing has to be warm.
    return load(str(folder), dtype="float32", context_tokens_max=None, progress=ignore, warm=False).model


def recall_row(speaker: TextSpeaker, rng: random.Random, count: int, facts: int, length: int) -> tuple[float, float]:
    """Share of told codes that come back, and share of names never told that are not known."""
    right = {True: 0, False: 0}
    for number in range(count):
        if number % facts == 0:
            messages, codes = long_talk(rng, facts, length, speaker.size_of)
            cache = speaker.read(speaker.tokens(messages, ask=False))
        for known in (True, False):
            message, wanted = asked(rng, codes, known)
            right[known] += speaker.would_say(speaker.tokens([message]), wanted, copy.deepcopy(cache))
    return right[True] / count, right[False] / count


def story_row(speaker: TextSpeaker, rng: random.Random, count: int) -> float:
    """Share of stories that have 60 words or more and come to an end."""
    stories = [speaker.reply(story_asked(rng)) for _ in range(count)]
    return sum(len(text.split()) >= 60 and text.endswith(".") for text in stories) / count


def evaluate(folder: Path, questions: int, seed: int, rows: str) -> Iterator[tuple[str, float]]:
    """The rows of the table whose title has `rows` in it: title and share of right replies."""
    speaker = TextSpeaker(folder)
    context = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    for facts, length in LONG:
        title = f"{facts} codes in {length:,} tokens"
        if rows in title and length < context:
            known, unknown = recall_row(speaker, random.Random(f"{seed}/{title}"), questions, facts, length)
            yield title, known
            yield f"{title}, never told", unknown
    for title, make in SHORT:
        if rows in title:
            rng = random.Random(f"{seed}/{title}")
            right = sum(all(speaker.is_right(case) for case in make(rng)) for _ in range(questions))
            yield title, right / questions
    if rows in STORY:
        yield STORY, story_row(speaker, random.Random(f"{seed}/{STORY}"), max(1, questions // 6))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the embedded text model with MLX.")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model")
    parser.add_argument("--questions", type=int, default=60, help="questions for each row of the table")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", default="", help="only rows with this in their title")
    parser.add_argument("--cpu", action="store_true", help="use the CPU")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if options.cpu:
        mx.set_default_device(mx.cpu)
    found: dict[str, float] = {}
    for title, share in evaluate(options.model, options.questions, options.seed, options.rows):
        found[title] = share
        if not options.json:
            print(f"{title:46} {share:6.1%}", flush=True)
    if options.json:
        print(json.dumps({"questions": options.questions, "right": found}))


if __name__ == "__main__":
    main()
