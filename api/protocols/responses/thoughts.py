"""Reasoning in `encrypted_content`, which clients send back unread in the next turn.

Here it is base64 and not encrypted: the client can read the same in `content`. Some clients, such as Codex, drop
`content` before they send an item back; the model still gets its reasoning from this field.
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
