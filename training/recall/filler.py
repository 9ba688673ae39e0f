"""Other talk: text that has nothing to remember in it, in as many shapes as possible.

Every function takes the random source and a wanted length in characters, and returns about that much text.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path

from .words import (
    ADJECTIVES,
    ADVERBS,
    ALL_WORDS,
    FIRST_NAMES,
    LATIN_WORDS,
    LETTERS,
    NOUNS,
    PAST_VERBS,
    any_code,
    any_name,
    number_in_words,
)

_CODE_MODULES = (
    "argparse ast calendar cmd configparser csv difflib heapq json.decoder queue random shlex statistics string"
)
_CODE_MODULES += " textwrap threading timeit tokenize traceback types uuid zipfile"
_UNICODE_RANGES = [
    (0x1F300, 0x1F64F, 4), (0x1F680, 0x1F6FF, 2), (0x1F900, 0x1F9FF, 1), (0x2600, 0x27BF, 2), (0x4E00, 0x9FFF, 4),
    (0x3041, 0x30FF, 2), (0xAC00, 0xD7A3, 1), (0x0410, 0x044F, 3), (0x03B1, 0x03C9, 1), (0x00C0, 0x017F, 4),
    (0x0621, 0x064A, 1), (0x05D0, 0x05EA, 1), (0x0904, 0x0939, 1), (0x2190, 0x22FF, 1), (0x00A1, 0x00BF, 1),
]  # fmt: skip
_UNICODE_WEIGHTS = [weight for _, _, weight in _UNICODE_RANGES]
_SENTENCES = [
    "The {a} {n} {v} the {m}.",
    "The {n} {v} a {a} {m}.",
    "{N} {v} the {a} {n} {d}.",
    "{N} and {M} {v} the {n} near the {m}.",
    "Every {n} has a {a} {m}.",
    "In the {n} there was a {a} {m}.",
    "It was {a} and {b}, so the {n} {v} nothing.",
    "A {a} {n} is better than a {b} {m}.",
    "Why is the {n} so {a}?",
    "Do you like the {a} {n}?",
    "Where did {N} go with the {n}?",
    "I {v} the {n} {d}, but the {m} was too {a}.",
    "We {v} the {a} {n} because {N} {d} {v} it.",
    "Please look at the {n}: it is {a}!",
    "My {n} is {a}; your {m} is {b}.",
    "When the {n} is {a}, the {m} becomes {b}.",
    "Nobody {v} the {m} before the {n} was {a}.",
    "Let us talk about the {a} {n} of {N}.",
    "What is the {n} of the {m}?",
    "According to {N}, the {n} and the {m} are both {a}.",
    "The name of the {n} is {N}.",
    "Remember to bring the {n}.",
    "{N} said: the {n} is {a}.",
]
_DIGIT_SENTENCES = [
    "The {n} costs {k} coins.",
    "In {k} the {n} was {a}.",
    "Call {N} at {k}-{l}.",
    "The number of {name} is {k}.",
    "The price of the {n} is {k}.",
    "Room {k} is {a}.",
    "{N} counted {j} of {k} {n}s.",
    "The {n} weighs {j}.{i} kg and the {m} {i} kg.",
    "Order {l}{k} was sent on 20{i}-0{o}-1{o}.",
    "At {i}:{j} the train number {k} leaves.",
    "The height of {name} is {k}.",
    "Version {o}.{i}.{j} fixes issue {k}.",
    "The year of {name} is {k}.",
]


@functools.cache
def _standard_library_prose() -> str:
    """Python's own help topics as one long string; empty where they are not installed."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return ""
    return "\n".join(topics[key] for key in sorted(topics))


@functools.cache
def _standard_library_code() -> str:
    """Some modules of Python's standard library as one long string."""
    texts: list[str] = []
    for name in _CODE_MODULES.split():
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None and found.origin.endswith(".py"):
            texts.append(Path(found.origin).read_text(encoding="utf-8"))
    return "\n".join(texts)


def sentence(rng: random.Random) -> str:
    """One plain English sentence."""
    return rng.choice(_SENTENCES).format(
        a=rng.choice(ADJECTIVES), b=rng.choice(ADJECTIVES), n=rng.choice(NOUNS), m=rng.choice(NOUNS),
        v=rng.choice(PAST_VERBS), d=rng.choice(ADVERBS),
        N=rng.choice(FIRST_NAMES).capitalize(), M=rng.choice(FIRST_NAMES).capitalize(),
    )  # fmt: skip


def digit_sentence(rng: random.Random) -> str:
    """One sentence with digits in it that is no code to remember."""
    return rng.choice(_DIGIT_SENTENCES).format(
        a=rng.choice(ADJECTIVES), n=rng.choice(NOUNS), m=rng.choice(NOUNS), N=rng.choice(FIRST_NAMES).capitalize(),
        name=any_name(rng), k=any_code(rng), l=rng.randrange(1000), i=rng.randrange(10, 24), j=rng.randrange(10, 60),
        o=rng.randrange(10),
    )  # fmt: skip


def _until(length: int, piece: Callable[[], str], joint: str) -> str:
    pieces: list[str] = []
    total = 0
    while total < length:
        text = piece()
        pieces.append(text)
        total += len(text) + len(joint)
    return joint.join(pieces)


def sentences(rng: random.Random, length: int) -> str:
    joint = rng.choice([" ", " ", " ", "\n", "\n\n"])
    return _until(length, lambda: sentence(rng), joint)


def digit_sentences(rng: random.Random, length: int) -> str:
    return _until(length, lambda: digit_sentence(rng) if rng.random() < 0.7 else sentence(rng), " ")


def random_words(rng: random.Random, length: int) -> str:
    pool = rng.choice([ALL_WORDS, ALL_WORDS, LATIN_WORDS, FIRST_NAMES, NOUNS])
    return rng.choice([" ", " ", " ", ", ", "\n"]).join(rng.choices(pool, k=max(1, length // 6)))


def made_up_words(rng: random.Random, length: int) -> str:
    return _until(length, lambda: any_name(rng), " ")


def latin(rng: random.Random, length: int) -> str:
    def one() -> str:
        words = " ".join(rng.choices(LATIN_WORDS, k=rng.randint(4, 14)))
        return words.capitalize() + "."

    return _until(length, one, " ")


def repeated(rng: random.Random, length: int) -> str:
    """The same short text again and again, sometimes with a running number in it."""
    draw = rng.random()
    if draw < 0.5:
        unit = sentence(rng)
    elif draw < 0.65:
        unit = digit_sentence(rng)
    elif draw < 0.8:
        unit = rng.choice(ALL_WORDS)
    elif draw < 0.9:
        unit = rng.choice(
            ["a", "x", "-", "=", ".", "*", "ab", "blah", "la la", "ha", "word", "filler", "\u2026", "\U0001f600"]
        )
    else:
        unit = unicode_text(rng, 12)
    joint = rng.choice([" ", " ", " ", "\n", ""]) if len(unit) < 4 else rng.choice([" ", " ", " ", "\n"])
    count = max(1, length // (len(unit) + len(joint)))
    if rng.random() < 0.25:
        head = rng.choice(["Line", "Sentence", "Item", "filler", "Paragraph", "note", "step", ""])
        start = rng.choice([0, 1, 1, rng.randrange(2000)])
        mark = rng.choice([": ", ". ", " - ", ") "])
        return joint.join(f"{head} {start + index}{mark}{unit}".strip() for index in range(max(1, count * 2 // 3)))
    return joint.join([unit] * count)


def numbers(rng: random.Random, length: int) -> str:
    joint = rng.choice([" ", ", ", "\n", "; ", ","])
    largest = rng.choice([10, 100, 10000, 10000, 10**6, 10**9])
    count = max(1, length // (len(str(largest)) + len(joint)))
    draw = rng.random()
    if draw < 0.2:
        start = rng.randrange(largest)
        return joint.join(str(start + index) for index in range(count))
    if draw < 0.35:
        return joint.join(number_in_words(rng.randrange(100)) for _ in range(max(1, count // 2)))
    if draw < 0.5:
        return joint.join(f"{rng.uniform(-largest, largest):.{rng.randint(1, 4)}f}" for _ in range(count))
    return joint.join(str(int(rng.random() * largest)) for _ in range(count))


def _slice_of(rng: random.Random, text: str, length: int) -> str:
    start = rng.randrange(max(1, len(text) - length))
    return text[start : start + length].strip() or "nothing"


def prose(rng: random.Random, length: int) -> str:
    text = _standard_library_prose()
    return _slice_of(rng, text, length) if text else sentences(rng, length)


def code(rng: random.Random, length: int) -> str:
    text = _standard_library_code()
    return _slice_of(rng, text, length) if text else records(rng, length)


def records(rng: random.Random, length: int) -> str:
    """Lines of data: JSON, a table, a log or a list with bullets."""
    draw = rng.random()
    keys = rng.sample(NOUNS, 3)

    def one() -> str:
        values = [rng.choice(ALL_WORDS), any_code(rng), rng.randrange(1000)]
        if draw < 0.3:
            return json.dumps(dict(zip(keys, values, strict=True)))
        if draw < 0.5:
            return "| " + " | ".join(str(value) for value in values) + " |"
        if draw < 0.75:
            day = f"2024-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
            stamp = f"{day}T{rng.randrange(24):02d}:{rng.randrange(60):02d}"
            return f"{stamp} {rng.choice(['INFO', 'WARN', 'DEBUG', 'ERROR'])} {keys[0]}: {sentence(rng)}"
        return f"{rng.choice('-*')} {sentence(rng)}"

    return _until(length, one, "\n")


def unicode_text(rng: random.Random, length: int) -> str:
    """Characters of many scripts and emoji; about a third of `length` characters, since each takes several bytes."""
    low, high, _ = rng.choices(_UNICODE_RANGES, _UNICODE_WEIGHTS)[0]
    characters: list[str] = []
    for _ in range(max(1, length // 3)):
        draw = rng.random()
        if draw < 0.12:
            low, high, _ = rng.choices(_UNICODE_RANGES, _UNICODE_WEIGHTS)[0]
        characters.append(" " if draw > 0.85 else chr(rng.randint(low, high)))
    return "".join(characters).strip() or "\u00e9"


def printable(rng: random.Random, length: int) -> str:
    """Random printable ASCII, or random lower-case letters and spaces."""
    if rng.random() < 0.5:
        return bytes(rng.choices(range(33, 127), k=max(1, length // 2))).decode("ascii")
    return "".join(rng.choices(LETTERS + "    ", k=max(1, length // 2))).strip() or "z"


_KINDS: list[tuple[Callable[[random.Random, int], str], float]] = [
    (sentences, 5), (digit_sentences, 2), (random_words, 3), (made_up_words, 1), (latin, 1), (repeated, 4),
    (numbers, 1), (prose, 4), (code, 1.5), (records, 1.5), (unicode_text, 0.6), (printable, 0.4),
]  # fmt: skip
_KIND_FUNCTIONS = [kind for kind, _ in _KINDS]
_KIND_WEIGHTS = [weight for _, weight in _KINDS]


def any_filler(rng: random.Random, length: int) -> str:
    """About `length` characters of other talk of one or more kinds; never a special token's text."""
    if length > 200 and rng.random() < 0.3:
        share = rng.randint(50, length - 50)
        joint = rng.choice([" ", "\n", "\n\n"])
        return any_filler(rng, share) + joint + any_filler(rng, length - share)
    text = rng.choices(_KIND_FUNCTIONS, _KIND_WEIGHTS)[0](rng, length)
    return text.replace("<|", "< |").replace("<tool", "< tool").replace("</tool", "< /tool")
