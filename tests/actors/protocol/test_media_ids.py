"""What stands for pictures in prompts, and what their features are called."""

from __future__ import annotations

import pytest

from satchel.actors.protocol.media_ids import (
    NAME_TOKENS,
    embeddings_id,
    embeddings_needed,
    is_media_token,
    is_of_video,
    media_tokens,
    media_tokens_in,
    name_at,
    names_in,
    picture_hash,
)

KEYS = [bytes([number]) * 32 for number in range(3)]
ROOT, OTHER = b"r" * 32, b"o" * 32


def test_words_are_no_tokens_and_say_what_they_stand_for():
    for video in (False, True):
        words = media_tokens(KEYS[0], 300, video=video)
        assert len(set(words)) == 300 and all(is_media_token(word) and is_of_video(word) is video for word in words)
        assert max(words) < 1 << 32 and media_tokens(KEYS[0], 20, video=video) == words[:20]
    assert media_tokens(KEYS[0], 0) == []


@pytest.mark.parametrize("count", [1, NAME_TOKENS - 1, NAME_TOKENS, 40])
def test_features_are_named_by_the_first_words_of_their_picture(count: int):
    """Whatever lies between the words, and where nothing lies between two pictures."""
    one, two, three = (media_tokens(key, count) for key in KEYS)
    prompt = [5, 6, *one, *two, 7, *[token for word in three for token in (word, 9)]]
    assert list(names_in(prompt)) == [tuple(words[:NAME_TOKENS]) for words in (one, two, three)]
    assert name_at(prompt, 2, count) == tuple(one[:NAME_TOKENS])
    assert name_at(prompt, 3 + 2 * count, 2 * count) == tuple(three[:NAME_TOKENS])
    assert media_tokens_in(prompt) == [*one, *two, *three]
    assert list(names_in([1, 2, 3])) == list(names_in([])) == []


def test_features_are_of_a_picture_a_model_and_for_whom():
    prompts = [[5, *media_tokens(key, 12), 5] for key in (*KEYS[:2], KEYS[0])]
    ids = [embeddings_needed(root, prompt, [(1, 12)]) for root in (ROOT, OTHER) for prompt in prompts]
    assert ids[0] == ids[2] == [(embeddings_id(ROOT, name_at(prompts[0], 1, 12)), 13, 12)]
    assert len({entry for ((entry, _, _),) in ids}) == 4


@pytest.mark.parametrize("token", [0, 31, 200_000, 2**31 - 1])
def test_a_models_own_ids_are_no_words(token: int):
    assert not is_media_token(token) and list(names_in([token, token])) == []


def test_a_picture_is_named_by_its_pixels_and_its_size():
    pixels = bytes(range(3 * 4 * 2))
    assert len({picture_hash(4, 2, pixels), picture_hash(2, 4, pixels), picture_hash(4, 2, bytes(24))}) == 3
    for width, height in ((4, 3), (5, 2), (4, 0), (24, 1), (12, 4)):
        with pytest.raises(ValueError, match="no RGB picture"):
            picture_hash(width, height, pixels)
