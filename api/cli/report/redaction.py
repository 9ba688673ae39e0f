"""Takes out of a text what its reader must not learn: keys, tokens, names and addresses of machines, the user's home.
Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_KEYS = re.compile(r"\b(sk-|hf_|ghp_|Bearer\s+)[\w.~+/=-]{4,}")
_IN_URLS = re.compile(r"(?<=://)[^\s/@]+@")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\w)")
_COLONS = re.compile(r"(?<![\w:.])[0-9a-fA-F:]*:[0-9a-fA-F:]*:[0-9a-fA-F:.]*(?:%\w+)?")
_MAC_ADDRESS = re.compile(r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b")
_HOMES = re.compile(r"(?<!\w)(/Users/|/home/)[^/\s\"'`:;,|]+")


@dataclass(frozen=True)
class Redaction:
    """What is replaced.

    Attributes:
        home: the user's folder, which becomes `~`.
        names: of machines, and what stands for each.
        secrets: values that must not appear.
    """

    home: str
    names: Mapping[str, str]
    secrets: Iterable[str] = ()

    def __call__(self, text: str) -> str:
        """Returns the text without them."""
        for secret in sorted({*self.secrets}, key=len, reverse=True):
            text = text.replace(secret, "<secret>")
        text = _KEYS.sub(lambda found: f"{found[1]}<secret>", text)
        text = _IN_URLS.sub("<secret>@", text)
        if len(self.home) > 1:
            text = re.sub(rf"{re.escape(self.home)}(?![\w.-])", "~", text)
        text = _HOMES.sub(r"\1<user>", text)
        for name in sorted(filter(None, self.names), key=len, reverse=True):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", self.names[name], text)
        text = _MAC_ADDRESS.sub("<address>", text)
        return _COLONS.sub(_address, _IPV4.sub(_address, text))


def _address(found: re.Match[str]) -> str:
    try:
        address = ipaddress.ip_address(found[0].partition("%")[0])
    except ValueError:
        # A time of day, or a version.
        return found[0]
    return found[0] if address.is_loopback or address.is_unspecified else "<address>"
