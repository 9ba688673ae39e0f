"""Reasoning as clients carry it from turn to turn: `encrypted_content`, which they send back unread.

Here it is reasoning in base64 and no secret: whoever gets it may read the same in `content`. Clients that drop
`content` before they send an item back, as Codex does, keep the model's memory of its thoughts by it.
"""

from __future__ import annotations

import base64
import binascii

_OURS = "satchel1."


def sealed(text: str) -> str:
    """Returns reasoning as `encrypted_content`."""
    return _OURS + base64.b64encode(text.encode("utf-8", "replace")).decode("ascii")


def opened(content: str) -> str:
    """Returns the reasoning in `encrypted_content`, "" if it is another server's or damaged."""
    if not content.startswith(_OURS):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_OURS), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
