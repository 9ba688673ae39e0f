"""What stands for a picture in memory: its hash, its key, and the ids in place of its tokens. Pure.

All pictures of one size have the same tokens in a prompt. So wherever tokens decide what is the same (block ids, tails,
what an agent remembers) each token that stands for a picture is a *word* instead: 29 bits of its key, above all token
ids. Two prompts are alike where their words are, and nothing else has to know of pictures. Words are turned back into
tokens where a model is given them.

What an encoder made of a picture, its *features*, is named by the picture's first words. So tokens alone tell which
features go with them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from .block_ids import digest
from .entries import tail_id

FIRST_WORD = 1 << 31
"""From here on an id is a word."""

_OF_VIDEO = 1 << 30
_FIRST = 1 << 29
"""Marks the first word of each picture: two may follow each other with nothing between."""

_BITS = _FIRST - 1

NAME_WORDS = 8
"""As many of a picture's words, if it has so many, are the name of its features."""

Name = tuple[int, ...]


def picture_hash(width: int, height: int, pixels: bytes) -> bytes:
    """32 bytes that name a picture, however it was sent or compressed.

    Args:
        pixels: RGB, a byte a channel, row by row.
    """
    if len(pixels) != 3 * width * height:
        raise ValueError(f"{len(pixels)} bytes are no RGB picture of {width} x {height}")
    return digest(b"satchel.picture.1", width.to_bytes(4, "big"), height.to_bytes(4, "big"), pixels)


def media_key(pictures: Sequence[bytes], processing: bytes = b"") -> bytes:
    """32 bytes that name what an encoder is given.

    Args:
        pictures: their hashes, in order: one for a picture, several for frames that are encoded together.
        processing: what was asked for besides, such as a resolution.
    """
    return digest(b"satchel.media.1", processing, *pictures)


def words_of(key: bytes, count: int, *, video: bool = False) -> list[int]:
    """The ids in place of the `count` tokens that stand for the media with this key, which are a video's or not."""
    kind = FIRST_WORD | (_OF_VIDEO if video else 0)
    words = [kind | (word & _BITS) for word in struct.unpack(f"<{count}I", hashlib.shake_256(key).digest(4 * count))]
    return [words[0] | _FIRST, *words[1:]] if words else []


def is_word(token: int) -> bool:
    return token >= FIRST_WORD


def is_of_video(word: int) -> bool:
    return bool(word & _OF_VIDEO)


def words_in(tokens: Iterable[int]) -> list[int]:
    """The words among `tokens`, in order."""
    return [token for token in tokens if token >= FIRST_WORD]


def names_in(tokens: Iterable[int]) -> Iterator[Name]:
    """The names of the features of all pictures in `tokens`, in order."""
    words = words_in(tokens)
    firsts = [place for place, word in enumerate(words) if word & _FIRST]
    for place, end in pairwise([*firsts, len(words)]):
        yield tuple(words[place : min(end, place + NAME_WORDS)])


def name_at(prompt: Sequence[int], start: int, count: int) -> Name:
    """The name of the features of the picture whose `count` tokens, some of them words, begin at `start`."""
    return next(names_in(prompt[start : start + count]))


def features_parent(root: bytes, name: Name) -> bytes:
    """What the features of this name follow on the disk, where they are kept as a tail: of a model and for whom, as
    `root` says. One name has one parent, so that they are found without looking at others."""
    return digest(b"satchel.features.1", root, struct.pack(f"<{len(name)}I", *name))


def features_id(root: bytes, name: Name) -> bytes:
    """What features are known by, in memory and on the disk."""
    return tail_id(features_parent(root, name), name)


def features_needed(
    root: bytes, prompt: Sequence[int], spans: Iterable[tuple[int, int]]
) -> list[tuple[bytes, int, int]]:
    """(id, where it ends in the prompt, its tokens) of the features of pictures; `spans` are (start, count) of each."""
    return [(features_id(root, name_at(prompt, start, count)), start + count, count) for start, count in spans]
