"""What stands for a picture in memory: its hash, its key, and the ids in place of its tokens. Pure.

All pictures of one size have the same tokens in a prompt. So wherever tokens decide what is the same (block ids, tails,
what an agent remembers) each token that stands for a picture is a *word* instead: 30 bits of its key, above all token
ids. Two prompts are alike where their words are, and nothing else has to know of pictures. Words are turned back into
tokens where a model is given them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from .blocks import digest

FIRST_WORD = 1 << 31
"""From here on an id is a word."""

_OF_VIDEO = 1 << 30
_BITS = _OF_VIDEO - 1


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
    return [kind | (word & _BITS) for word in struct.unpack(f"<{count}I", hashlib.shake_256(key).digest(4 * count))]


def is_word(token: int) -> bool:
    return token >= FIRST_WORD


def is_of_video(word: int) -> bool:
    return bool(word & _OF_VIDEO)


def words_in(tokens: Iterable[int]) -> list[int]:
    """The words among `tokens`, in order."""
    return [token for token in tokens if token >= FIRST_WORD]


NAME_WORDS = 8
"""As many of a key's first words name its features on the disk."""


def features_parent(root: bytes, name: Sequence[int]) -> bytes:
    """What the features of this name follow on the disk, where they are kept as a tail: of a model and for whom, as
    `root` says. One name has one parent, so that they are found without looking at others."""
    return digest(b"satchel.features.1", root, struct.pack(f"<{len(name)}I", *name))
