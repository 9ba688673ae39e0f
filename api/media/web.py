"""Fetches what URLs of callers name, without becoming their way into this machine's network.

A host is looked up once, every address of it must be public or allowed, and the connection goes to one of those very
addresses, so that a later answer of its name server changes nothing. Redirects are checked the same way. Proxies that
the environment names are not used: they would look hosts up themselves.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import httpx

from ...cluster.config import Media

Address = IPv4Address | IPv6Address
_PORTS = {"http": 80, "https": 443}
_PORT_MAX = 65535
_LOOK_UPS_MAX = 4
_ADDRESSES_MAX = 3
_COMPRESSIONS = {"br", "compress", "deflate", "gzip", "x-compress", "x-gzip", "zstd"}
_NAT64 = ip_network("64:ff9b::/96")
_HEADERS = {"User-Agent": "satchel", "Accept": "image/*, video/*, */*;q=0.1", "Accept-Encoding": "identity"}


class Unfetchable(Exception):
    """What is not fetched. Its text goes on after the URL's place: "is on a host ..."."""


@dataclass(frozen=True)
class _Allowed:
    """Hosts that need no public address."""

    names: frozenset[str]
    networks: tuple[IPv4Network | IPv6Network, ...]

    @classmethod
    def of(cls, hosts: Sequence[str]) -> _Allowed:
        names, networks = set(), []
        for host in hosts:
            try:
                networks.append(ip_network(host.strip("[]"), strict=False))
            except ValueError:
                names.add(host)
        return cls(frozenset(names), tuple(networks))

    def permits(self, host: str, address: Address) -> bool:
        return host in self.names or is_public(address) or any(plain(address) in network for network in self.networks)


def plain(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, where it does."""
    if isinstance(address, IPv4Address):
        return address
    embedded = address.ipv4_mapped or address.sixtofour
    if embedded is None and address in _NAT64:
        embedded = IPv4Address(int(address) & 0xFFFFFFFF)
    return embedded or address


def is_public(address: Address) -> bool:
    """Whether it is a single host's address in the open internet."""
    address = plain(address)
    if isinstance(address, IPv6Address) and (address.is_site_local or address.teredo is not None):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


class Fetcher:
    """Fetches files over HTTP; belongs to one event loop."""

    def __init__(self, limits: Media) -> None:
        self._limits = limits
        self._allowed = _Allowed.of(limits.allowed_hosts)
        # Name servers may take half a minute, and a thread that waits for one cannot be stopped: they have their own.
        self._look_ups = ThreadPoolExecutor(_LOOK_UPS_MAX, thread_name_prefix="look-up")
        # No connection is kept: the pool knows them by address, and one address may have many hosts' certificates.
        self._client = httpx.AsyncClient(
            headers=_HEADERS,
            limits=httpx.Limits(max_keepalive_connections=0),
            # `fetch` limits the whole of it.
            timeout=None,
            trust_env=False,
            # Nor a cookie: it would tell one host, or one caller, of another.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )

    async def fetch(self, url: str) -> bytes:
        """What the URL names.

        Raises:
            Unfetchable: it may not be fetched, is not there, is too large, or does not come within `timeout_s`.
        """
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await self._follow(httpx.URL(url))
        except TimeoutError:
            raise Unfetchable(f"was not fetched within {self._limits.timeout_s:g} s (media.timeout_s)") from None
        except (httpx.InvalidURL, UnicodeError):
            raise Unfetchable("is no URL") from None
        except httpx.HTTPError as error:
            raise Unfetchable(f"could not be fetched ({type(error).__name__})") from None

    async def _follow(self, url: httpx.URL) -> bytes:
        for _ in range(self._limits.redirects_max + 1):
            answer = await self._ask(url)
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise Unfetchable(f"is redirected more than {self._limits.redirects_max} times (media.redirects_max)")

    async def _ask(self, url: httpx.URL) -> bytes | httpx.URL:
        """The content, or where it is instead."""
        addresses = await self._addresses(url)
        for last, address in ((address is addresses[-1], address) for address in addresses):
            request = self._client.build_request(
                "GET",
                url.copy_with(host=str(address), fragment=None),
                headers={"Host": url.netloc.decode("ascii")},
                extensions={"sni_hostname": url.raw_host.decode("ascii")},
            )
            try:
                response = await self._client.send(request, stream=True)
            except httpx.ConnectError:
                if last:
                    raise
                continue
            try:
                return await self._answer(url, response)
            finally:
                await response.aclose()
        raise AssertionError("a host has an address")

    async def _answer(self, url: httpx.URL, response: httpx.Response) -> bytes | httpx.URL:
        if response.has_redirect_location:
            return url.join(response.headers["Location"])
        if response.status_code != 200:
            raise Unfetchable(f"could not be fetched: its host answers {response.status_code}")
        # Others, such as what uploads leave behind ("aws-chunked"), change nothing in the content.
        if _COMPRESSIONS & {name.strip().lower() for name in response.headers.get("Content-Encoding", "").split(",")}:
            raise Unfetchable("comes compressed from its host, though uncompressed was asked for; that is not read")
        too_large = Unfetchable(f"has more than {self._limits.source_bytes_max} bytes (media.source_bytes_max)")
        announced = response.headers.get("Content-Length", "")
        if announced.isdecimal() and int(announced) > self._limits.source_bytes_max:
            raise too_large
        content = bytearray()
        # Raw: what an answer unpacks to could have any size.
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > self._limits.source_bytes_max:
                raise too_large
        return bytes(content)

    async def _addresses(self, url: httpx.URL) -> list[Address]:
        """Where to connect; every address that the host has is public or allowed."""
        if url.scheme not in _PORTS:
            raise Unfetchable("is no http or https URL, or leads to another one")
        if url.userinfo:
            raise Unfetchable("has a user or password in it, or leads to a URL that has")
        port = url.port or _PORTS[url.scheme]
        if port > _PORT_MAX:
            raise Unfetchable("is no URL, or leads to none")
        host = url.raw_host.decode("ascii").strip("[]").rstrip(".").lower()
        # httpx escapes what cannot be in a name ("http://["); an IPv6 address may have an escaped zone.
        if not host or ("%" in host and ":" not in host):
            raise Unfetchable("is no URL with a host, or leads to one without")
        # One sentence for all reasons: whoever asks learns nothing about names in this network.
        refused = Unfetchable("is on a host without a public address; others need media.allowed_hosts")
        try:
            addresses = await self._look_up(host, port)
        except OSError:
            raise refused from None
        if not addresses or not all(self._allowed.permits(host, address) for address in addresses):
            raise refused
        return addresses[:_ADDRESSES_MAX]

    async def _look_up(self, host: str, port: int) -> list[Address]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._look_ups, _look_up, host, port)
        return [ip_address(address) for address in dict.fromkeys(found)]

    async def close(self) -> None:
        self._look_ups.shutdown(wait=False, cancel_futures=True)
        await self._client.aclose()


def _look_up(host: str, port: int) -> list[str]:
    """A host's addresses; one with a zone (`fe80::1%eth0`) reaches only neighbours and loses it."""
    return [str(each[4][0]).split("%")[0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
