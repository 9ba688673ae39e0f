"""Ids of pictures and audio: a medium's hash, its key, and the ids in place of its tokens. Pure.

All pictures of one size have the same tokens in a prompt. So wherever tokens are compared (block ids, tails, an agent's
memory) each token of a picture is replaced by a *media token id*: 29 bits of the picture's key, above all token ids of
a model. Two prompts are equal if these ids are, and no other code needs to know about pictures. The model itself gets
its own tokens (`processors.token_of`).

A picture's *image embeddings*, the output of its encoder, are named by its first media token ids. So the token ids of a
prompt are enough to find them. All this is the same for audio: its *audio embeddings* are the output of its encoder.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from .block_ids import digest
from .entries import tail_id

FIRST_MEDIA_TOKEN = 1 << 31
"""The least media token id."""

_OF_VIDEO = 1 << 30
_FIRST = 1 << 29
"""Marks the first id of each picture: one picture may directly follow another."""

_OF_AUDIO = 1 << 28
"""Marks audio, together with `_OF_VIDEO`. In ids of pictures this bit is one of the key's."""

_BITS = _FIRST - 1
_BITS_OF_TIMED = _OF_AUDIO - 1

NAME_TOKENS = 8
"""This many of a picture's media token ids, or all if it has fewer, name its image embeddings."""

Name = tuple[int, ...]


def picture_hash(width: int, height: int, pixels: bytes) -> bytes:
    """Returns 32 bytes that name a picture, however it was sent or compressed.

    Args:
        pixels: RGB, a byte a channel, row by row.

    Raises:
        ValueError: `pixels` has another size.
    """
    if len(pixels) != 3 * width * height:
        raise ValueError(f"{len(pixels)} bytes are no RGB picture of {width} x {height}")
    return digest(b"satchel.picture.1", width.to_bytes(4, "big"), height.to_bytes(4, "big"), pixels)


def audio_hash(rate: int, samples: bytes) -> bytes:
    """Returns 32 bytes that name audio, however it was sent or compressed without loss.

    Args:
        rate: samples a second.
        samples: one channel, float32 little-endian.
    """
    return digest(b"satchel.audio.1", rate.to_bytes(4, "big"), samples)


def media_key(pictures: Sequence[bytes], processing: bytes = b"") -> bytes:
    """Returns 32 bytes that name an encoder's input.

    Args:
        pictures: their hashes, in order: one for a picture, several for frames that are encoded together.
        processing: further settings of the request, such as a resolution.
    """
    return digest(b"satchel.media.1", processing, *pictures)


def media_tokens(key: bytes, count: int, *, video: bool = False, audio: bool = False) -> list[int]:
    """Returns the `count` media token ids of the picture, of the frames of a `video`, or of the `audio`, with this
    key."""
    kind = FIRST_MEDIA_TOKEN | (_OF_VIDEO if video or audio else 0) | (_OF_AUDIO if audio else 0)
    bits = _BITS_OF_TIMED if video or audio else _BITS
    ids = [kind | (token & bits) for token in struct.unpack(f"<{count}I", hashlib.shake_256(key).digest(4 * count))]
    return [ids[0] | _FIRST, *ids[1:]] if ids else []


def is_media_token(token: int) -> bool:
    return token >= FIRST_MEDIA_TOKEN


def is_of_video(token: int) -> bool:
    return token & (_OF_VIDEO | _OF_AUDIO) == _OF_VIDEO


def is_of_audio(token: int) -> bool:
    return token & (_OF_VIDEO | _OF_AUDIO) == _OF_VIDEO | _OF_AUDIO


def media_tokens_in(tokens: Iterable[int]) -> list[int]:
    """Returns the media token ids in `tokens`, in order."""
    return [token for token in tokens if token >= FIRST_MEDIA_TOKEN]


def names_in(tokens: Iterable[int]) -> Iterator[Name]:
    """Yields the names of the image embeddings of all pictures in `tokens`, in order."""
    ids = media_tokens_in(tokens)
    firsts = [place for place, token in enumerate(ids) if token & _FIRST]
    for place, end in pairwise([*firsts, len(ids)]):
        yield tuple(ids[place : min(end, place + NAME_TOKENS)])


def name_at(prompt: Sequence[int], start: int, count: int) -> Name:
    """Returns the name of the image embeddings of the picture whose span has `count` tokens from `start`; not all of
    these are media token ids."""
    return next(names_in(prompt[start : start + count]))


def embeddings_parent(root: bytes, name: Name) -> bytes:
    """Returns the parent id of image embeddings on disk, where they are kept as a tail; `root` names the model and who
    may share them. Each name has its own parent, so a look-up finds no others."""
    return digest(b"satchel.features.1", root, struct.pack(f"<{len(name)}I", *name))


def embeddings_id(root: bytes, name: Name) -> bytes:
    """Returns the id of image embeddings in memory and on disk."""
    return tail_id(embeddings_parent(root, name), name)


def embeddings_needed(
    root: bytes, prompt: Sequence[int], spans: Iterable[tuple[int, int]]
) -> list[tuple[bytes, int, int]]:
    """Returns (id of the embeddings, end in the prompt, tokens) of each picture; `spans` are (start, count) of each."""
    return [(embeddings_id(root, name_at(prompt, start, count)), start + count, count) for start, count in spans]
