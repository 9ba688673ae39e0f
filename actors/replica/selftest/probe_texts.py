"""The texts of a probe: conversations in the model's template, with codes to remember in between; or plain text if a
model has no template.

Prose comes from Python's own documentation, or is made of common words if an installation lacks it. Equal random
sources give equal conversations.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....cluster.errors import ModelLoadError
from ...model_files.source import first_sentence
from ..loading.real_text import paragraphs

Message = dict[str, str]

NOTED = "Noted."
SEEN = "I see."
PROSE_WORDS = (20, 120)
QUESTION_SHARE = 8
"""On average one exchange in this many asks for a code."""

_CONSONANTS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"
_COMMON_WORDS = (
    "about above across after again against all almost along already also although always among and animal another "
    "answer any around ask away back because become been before began behind being below best better between big "
    "black book both bridge bring brought build but call came can carry cause change city clear close cold come "
    "common could country course cut dark day did different does done door down draw drive during each early earth "
    "east easy either end enough even evening ever every example eye face family far farm father feel few field "
    "find first five fly follow food for form found four friend from front full game garden gave general get girl "
    "give glass good great green ground group grow half hand hard has have head hear heart help here high hill hold "
    "home horse hot hour house how hundred idea if important in inside into island "
)


def load_tokenizer(folder: Path) -> Any:
    """Loads the tokenizer in a model's folder.

    Raises:
        ModelLoadError: it is missing or cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise ModelLoadError(f"the tokenizer in {folder} cannot be loaded: {first_sentence(error)}") from error


@dataclass(frozen=True)
class Quiz:
    """A conversation that ends with questions and their right answers; `codes` are the spans of the codes' tokens in
    those answers, and `depths` how far into the conversation (0 to 1) each code was told."""

    tokens: list[int]
    codes: list[tuple[int, int]]
    depths: list[float]


class Texts:
    """A generator of texts for one tokenizer.

    Attributes:
        chats: whether the tokenizer has a chat template that takes conversations; else texts are prose only.
        source: where the prose comes from, as readable text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._paragraphs = paragraphs()
        self.source = "Python's documentation" if self._paragraphs else "common words"
        self._frame = self._frame_tokens()
        self.chats = self._frame is not None

    @property
    def quizzes(self) -> bool:
        """Whether quizzes are possible: they need the token positions of the answers."""
        return bool(getattr(self._tokenizer, "is_fast", False))

    def talk(self, rng: random.Random, tokens: int) -> list[int]:
        """Returns the first `tokens` tokens of a conversation, or of prose if the model has no chat template."""
        size, told = 0, {}
        pairs: list[tuple[str, str]] = []
        while size < tokens:
            pairs.append(self._exchange(rng, told))
            size += self._size(*pairs[-1])
        while True:
            # A template writes the special tokens itself.
            encoded = self._tokenizer.encode(self._render(pairs), add_special_tokens=not self.chats)
            if len(encoded) >= tokens:
                return encoded[:tokens]
            # Sizes are estimates: a template may drop a part of a pair.
            pairs.append(self._exchange(rng, told))

    def quiz(self, rng: random.Random, tokens: int, questions: int) -> Quiz:
        """Returns a conversation of at most about `tokens` tokens. `questions` codes are spread evenly over it, and its
        end asks for each of them. It has fewer questions if they do not fit."""
        assert self.quizzes
        codes: dict[str, str] = {}
        while len(codes) < questions:
            codes[_name(rng)] = f"{rng.randrange(10_000):04d}"
        asked = rng.sample(list(codes), len(codes))
        while True:
            told = [(f"Remember: the code of {name} is {code}.", NOTED) for name, code in codes.items()]
            asking = [self._asking(name, codes[name]) for name in asked]
            room = tokens - sum(self._size(*pair) for pair in [*told, *asking])
            if room >= 0 or len(codes) == 1:
                break
            codes.pop(asked.pop())
        filler: list[tuple[str, str]] = []
        while room > 0:
            pair = (self._prose(rng), SEEN)
            room -= self._size(*pair)
            if room >= 0:
                filler.append(pair)
        return self._quiz_of(self._render([*_spread(told, filler), *asking]), [(name, codes[name]) for name in asked])

    def _asking(self, name: str, code: str) -> tuple[str, str]:
        # Without a template there are no roles: the answer follows the question in one text.
        question, answer = _question(name, code)
        return (question, answer) if self.chats else (answer, "")

    def _quiz_of(self, text: str, asked: Sequence[tuple[str, str]]) -> Quiz:
        encoded = self._tokenizer(text, add_special_tokens=not self.chats, return_offsets_mapping=True)
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        spans, depths, at = [], [], 0
        for name, code in asked:
            # "The" is capitalized only in an answer.
            answer = f"The code of {name} is {code}"
            at = text.index(answer, at) + len(answer)
            start = next(index for index, (_, stop) in enumerate(offsets) if stop > at - len(code))
            spans.append((start, next(index for index, (_, stop) in enumerate(offsets) if stop >= at) + 1))
            depths.append(text.index(f"the code of {name} is") / len(text))
        return Quiz(list(encoded["input_ids"]), spans, depths)

    def _exchange(self, rng: random.Random, told: dict[str, str]) -> tuple[str, str]:
        draw = rng.randrange(QUESTION_SHARE) if self.chats else 2
        if draw == 0 or (draw == 1 and not told):
            name = _name(rng)
            told[name] = f"{rng.randrange(10_000):04d}"
            return f"Remember: the code of {name} is {told[name]}.", NOTED
        if draw == 1:
            name = rng.choice(list(told))
            return _question(name, told[name])
        return self._prose(rng), SEEN

    def _prose(self, rng: random.Random) -> str:
        count = rng.randint(*PROSE_WORDS)
        if not self._paragraphs:
            return " ".join(rng.choices(_COMMON_WORDS.split(), k=count)).capitalize() + "."
        words = rng.choice(self._paragraphs).split()
        start = rng.randrange(max(1, len(words) - count))
        return " ".join(words[start : start + count])

    def _render(self, pairs: Sequence[tuple[str, str]]) -> str:
        if not self.chats:
            return "\n\n".join(text for text, _ in pairs)
        return self._apply(pairs)

    def _apply(self, pairs: Sequence[tuple[str, str]]) -> str:
        messages: list[Message] = []
        for said, reply in pairs:
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _size(self, said: str, reply: str) -> int:
        return len(self._encode(said)) + (len(self._encode(reply)) + (self._frame or 0) if self.chats else 2)

    def _frame_tokens(self) -> int | None:
        """Returns how many tokens the template adds to an exchange; None if it takes no conversations."""
        from jinja2 import TemplateError

        pair = ("Hello there.", SEEN)
        try:
            sizes = [len(self._encode(self._apply([pair] * count))) for count in (1, 2)]
        except (ValueError, TypeError, KeyError, AttributeError, ImportError, TemplateError):
            return None
        return max(0, sizes[1] - sizes[0] - len(self._encode(pair[0])) - len(self._encode(pair[1])))


def _question(name: str, code: str) -> tuple[str, str]:
    return f"What is the code of {name}?", f"The code of {name} is {code}."


def _name(rng: random.Random) -> str:
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(2, 4)))


def _spread(told: Sequence[tuple[str, str]], filler: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Spreads the told pairs evenly among the filler, beginning with a told one."""
    pairs: list[tuple[str, str]] = []
    for index, pair in enumerate(told):
        start, stop = (len(filler) * number // len(told) for number in (index, index + 1))
        pairs += [pair, *filler[start:stop]]
    return pairs
