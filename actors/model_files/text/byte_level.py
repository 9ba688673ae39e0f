"""Byte-level tokenizers, which write bytes as GPT-2's printable characters: repairs wrong decoders in their files."""

from __future__ import annotations

import json
from typing import Any

_KIND = "ByteLevel"


def mend_decoder(backend: Any) -> None:
    """Gives a byte-level `tokenizers.Tokenizer` the matching decoder. Converted files have SentencePiece's decoder or
    none, and then decoded text shows the characters that stand for bytes."""
    from tokenizers import decoders

    if _has(backend.decoder):
        return
    if _has(backend.pre_tokenizer) or _has(backend.normalizer):
        backend.decoder = decoders.ByteLevel()


def _has(part: Any) -> bool:
    """Returns whether a part of a tokenizer, or a part of that, maps bytes to characters or back."""
    if part is None:
        return False
    try:
        left = [json.loads(part.__getstate__())]
    except (AttributeError, TypeError, ValueError):
        # It is written in Python.
        return False
    while left:
        one = left.pop()
        if isinstance(one, dict):
            if one.get("type") == _KIND:
                return True
            left += one.values()
        elif isinstance(one, list):
            left += one
    return False
