"""Lone surrogates: halves of surrogate pairs without the other half. JSON can write them as escapes, but they are not
characters: no encoding and no tokenizer accepts them, and guarded text uses one as its break. Pure; large texts belong
in a worker thread."""

from __future__ import annotations

import codecs
import re
from itertools import islice

# Matches escapes one by one, so that an escaped backslash does not begin one; the group is a lone surrogate.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_ESCAPE_BYTES = re.compile(_ESCAPE.pattern.encode("ascii"), re.DOTALL)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_LONE = re.compile("[\ud800-\udfff]")
_ESCAPES_MAX = 1_000_000
"""How many escapes are checked to explain what is wrong with a body."""
_REPLACEMENT = "\\ufffd"


def with_whole_characters(written: str) -> str:
    """Returns JSON with the replacement character for every lone surrogate."""
    if _HALF.search(written) is None:
        return written
    return _ESCAPE.sub(lambda escape: _REPLACEMENT if escape[1] else escape[0], written)


def of_characters(text: str) -> str:
    """Returns a text with the replacement character for every lone surrogate."""
    if text.isascii() or _LONE.search(text) is None:
        return text
    return _LONE.sub("\ufffd", text)


def not_characters(data: bytes | bytearray) -> str:
    """Returns a sentence that says why JSON that cannot be parsed is not valid Unicode; "" if it is valid."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "the body is UTF-16; JSON is sent as UTF-8"
    alone = "which is no character: clients must not cut a character in two"
    for escape in islice(_ESCAPE_BYTES.finditer(data), _ESCAPES_MAX):
        if escape[1]:
            half = escape[0].decode("ascii")
            return f"the body has half of a surrogate pair, {half} at byte {escape.start()}, {alone}"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        if data[error.start] == 0xED:
            return f"the body has half of a surrogate pair at byte {error.start}, {alone}"
        return f"the body is not UTF-8 at byte {error.start}"
    return ""
