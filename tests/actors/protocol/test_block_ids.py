"""Block identity: equal ids mean equal histories, models and scopes, and nothing else does."""

from __future__ import annotations

import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_id, block_ids, root_id, scope_of
from satchel.actors.protocol.media_ids import media_tokens

TOKENS = list(range(3 * BLOCK_TOKENS + 17))
ROOT = root_id(b"m" * 32, "tenant:a")


def test_ids_of_a_prefix_are_a_prefix_of_the_ids():
    ids = block_ids(ROOT, TOKENS)
    assert len(ids) == 3
    assert all(len(block) == 32 for block in ids)
    for length in (0, 1, 255, 256, 257, 512, 768):
        assert block_ids(ROOT, TOKENS[:length]) == ids[: length // BLOCK_TOKENS]


def test_one_changed_token_changes_its_block_and_every_later_one():
    ids = block_ids(ROOT, TOKENS)
    changed = TOKENS.copy()
    changed[300] += 1
    other = block_ids(ROOT, changed)
    assert other[0] == ids[0]
    assert not set(other[1:]) & set(ids[1:])


def test_model_scope_and_pictures_are_part_of_the_identity():
    block = TOKENS[:BLOCK_TOKENS]
    roots = {root_id(model, scope) for model in (b"m" * 32, b"n" * 32) for scope in ("tenant:a", "tenant:b")}
    assert len(roots) == 4
    assert len({block_id(root, block) for root in roots}) == 4
    keys = [b"x" * 32, b"y" * 32]
    shown = [[*block[:216], *media_tokens(one, 20), *media_tokens(two, 20)] for one in keys for two in keys]
    assert len({block_id(ROOT, tokens) for tokens in shown}) == 4, "their order too"


def test_a_part_of_a_block_has_no_id():
    with pytest.raises(ValueError, match="256"):
        block_id(ROOT, TOKENS[:255])


def test_scopes_separate_whom_the_policy_separates():
    assert scope_of("tenant", "t", "a", "r1") == scope_of("tenant", "t", "b", "r2")
    assert scope_of("tenant", "t", "a", "r1") != scope_of("tenant", "u", "a", "r1")
    assert scope_of("agent", "t", "a", "r1") == scope_of("agent", "t", "a", "r2")
    assert scope_of("agent", "t", "a", "r1") != scope_of("agent", "t", "b", "r1")
    assert scope_of("agent", "t", "", "r1") != scope_of("agent", "t", "", "r2")
    assert scope_of("none", "t", "a", "r1") != scope_of("none", "t", "a", "r2")
