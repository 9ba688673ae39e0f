"""The machines of a cluster, as the config names them."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass as validated

from .units import STRICT, Bytes

Kind = Literal["thunderbolt", "ethernet", "wifi"]

ASSUMED_BYTES_PER_S: dict[Kind, float] = {"thunderbolt": 1.0e9, "ethernet": 1.0e8, "wifi": 2.0e7}
"""Assumed throughput of a link until it has been measured."""


def host_port(host: str, port: str | int) -> str:
    """Returns `HOST:PORT`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ip(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError("an IP address, such as 192.168.1.10") from None


Address = Annotated[str, AfterValidator(_ip)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Device = Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=r"^GPU-[0-9a-f-]+$")]
"""A CUDA card: its number as `nvidia-smi` counts, or its UUID or the begin of it."""


@validated(frozen=True, config=STRICT)
class Link:
    """An address at which other nodes fetch this node's KV; a Thunderbolt bridge has its own."""

    address: Address
    """This node's address on that link."""
    kind: Kind = "ethernet"
    """The kind of link, from which its rate is assumed until it has been measured."""


@validated(frozen=True, config=STRICT)
class Node:
    """One machine."""

    name: Name
    """What `satchel status` calls it."""
    address: Address = "127.0.0.1"
    """The address that Ray uses."""
    ssh: Annotated[str, Field(min_length=1, pattern=r"^[^-\s][^\s]*$")] | None = None
    """Its host name for the ssh client; the first node, on which the server is started, has none."""
    links: tuple[Link, ...] = ()
    """Links for KV, in any order; if empty, KV uses `address`."""
    home: Annotated[str, Field(min_length=1)] | None = None
    """Its SATCHEL_HOME; None is the default one (`~/.satchel`)."""
    command: Annotated[str, Field(min_length=1)] = "satchel"
    """The command that runs Satchel there. A name without a folder is also looked for in `~/.local/bin` and
    `/opt/homebrew/bin`, where uv, pipx and Homebrew put it."""
    memory_bytes_max: Bytes | None = None
    """The memory of all of its replicas; None takes the config's `scheduling.memory_bytes_max`."""
    kv_bytes_max: Bytes | None = None
    """Deprecated, use `memory_bytes_max`. None takes the config's `scheduling.kv_bytes_max`."""
    disk_bytes_max: Bytes | None = None
    """Agents' KV on its disk; None takes the config's."""
    device: Device | None = None
    """The CUDA card on which it computes, if its machine has several: a number as `nvidia-smi` lists them, or a UUID.
    None takes the first one that CUDA sees."""
    keep_awake: bool = True
    """Whether a Mac stays awake while Satchel runs on it, with its lid open."""
    give_bytes_per_s_max: Bytes | None = None
    """How fast all other nodes together may fetch its KV; None means no limit."""

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def resource(self) -> str:
        """The Ray resource that only this node has; every actor that must run here asks for it."""
        return f"satchel-node-{self.name}"

    @property
    def data_links(self) -> tuple[Link, ...]:
        """The links by which others fetch KV, the fastest kind first."""
        links = self.links or (Link(address=self.address),)
        return tuple(sorted(links, key=lambda link: -ASSUMED_BYTES_PER_S[link.kind]))
