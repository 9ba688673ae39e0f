"""Block ids: they name 256 tokens, the history before them, the model, and who may share them. Pure.

Block ids form a SHA-256 chain, so equal ids mean equal histories, and a prefix of n blocks is found by n dictionary
look-ups. Every hashed field is tagged and length-prefixed: no two different inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 256


def digest(tag: bytes, *parts: bytes) -> bytes:
    """Returns the SHA-256 of a tag and parts. Different inputs are never hashed as the same bytes."""
    hasher = hashlib.sha256(len(tag).to_bytes(2, "big") + tag)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()


def _token_bytes(tokens: Sequence[int]) -> bytes:
    packed = array("I", tokens)
    if packed.itemsize != 4:
        raise AssertionError("block ids need 32-bit token ids")
    return packed.tobytes()


def root_id(model_id: bytes, scope: str) -> bytes:
    """Returns the parent of every first block: 32 bytes that name the model and who may share.

    Args:
        model_id: 32 bytes, `models.model_id`.
        scope: who may reuse the block; see `scope_of`.
    """
    return digest(b"satchel.root.1", model_id, scope.encode())


def block_id(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the id (32 bytes) of the block of `tokens` after `parent` (32 bytes, `root_id` for the first).

    Args:
        tokens: exactly `BLOCK_TOKENS` token ids, with media token ids in place of pictures' tokens (`media_ids`).

    Raises:
        ValueError: another number of tokens.
    """
    if len(tokens) != BLOCK_TOKENS:
        raise ValueError(f"a block is {BLOCK_TOKENS} tokens, got {len(tokens)}")
    return digest(b"satchel.block.1", parent, _token_bytes(tokens))


def block_ids(root: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Returns the ids of the whole blocks of `tokens`, in order; the open tail has none."""
    ids: list[bytes] = []
    parent = root
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = block_id(parent, tokens[start : start + BLOCK_TOKENS])
        ids.append(parent)
    return ids


def is_shared(scope: str) -> bool:
    """Returns whether other requests may reuse blocks of this scope."""
    return not scope.startswith("request:")


def scope_of(share: str, tenant: str, agent: str, request_id: str, salt: str = "") -> str:
    """Returns who may reuse a request's blocks under the policy `share`: the tenant, this agent, or nobody else.

    A request without an agent under `share: agent` shares with nobody. Within a tenant only requests with the same
    `salt` share.
    """
    if share == "tenant":
        return f"tenant:{tenant}/{salt}" if salt else f"tenant:{tenant}"
    if share == "agent" and agent:
        return f"agent:{tenant}/{agent}"
    return f"request:{request_id}"
