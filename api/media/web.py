"""Fetches callers' URLs without giving them access to this machine's network.

A host is resolved once, all of its addresses must be public or allowed, and the connection goes to one of exactly these
addresses, so that a later DNS answer (rebinding) has no effect. Redirects are checked the same way. Proxies of the
environment are not used, because they would resolve hosts themselves.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import httpx

from ...cluster.config.config import Media

Address = IPv4Address | IPv6Address
_PORTS = {"http": 80, "https": 443}
_PORT_MAX = 65535
_LOOK_UPS_MAX = 4
_ADDRESSES_MAX = 3
_COMPRESSIONS = {"br", "compress", "deflate", "gzip", "x-compress", "x-gzip", "zstd"}
_NAT64 = ip_network("64:ff9b::/96")
_HEADERS = {"User-Agent": "satchel", "Accept": "image/*, video/*, */*;q=0.1", "Accept-Encoding": "identity"}


class Unfetchable(Exception):
    """A URL that is refused. Its message continues after the URL's position: "is on a host ..."."""


@dataclass(frozen=True)
class _Allowed:
    """Hosts and networks that are allowed without a public address."""

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
    """Returns the IPv4 address embedded in an IPv6 address, if there is one, else the address."""
    if isinstance(address, IPv4Address):
        return address
    embedded = address.ipv4_mapped or address.sixtofour
    if embedded is None and address in _NAT64:
        embedded = IPv4Address(int(address) & 0xFFFFFFFF)
    return embedded or address


def is_public(address: Address) -> bool:
    """Returns whether it is a unicast address on the public internet."""
    address = plain(address)
    if isinstance(address, IPv6Address) and (address.is_site_local or address.teredo is not None):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


@cache
def _authorities() -> ssl.SSLContext:
    """Returns a context with the trusted certificate authorities. Reading them takes long."""
    return httpx.create_ssl_context(trust_env=False)


class Fetcher:
    """Fetches files over HTTP, for one event loop."""

    def __init__(self, limits: Media) -> None:
        self._limits = limits
        self._allowed = _Allowed.of(limits.allowed_hosts)
        # Its own threads, because a DNS look-up may take half a minute and cannot be cancelled.
        self._look_ups = ThreadPoolExecutor(_LOOK_UPS_MAX, thread_name_prefix="look-up")
        # No keep-alive: the pool identifies connections by address, but one address may serve many hosts.
        self._client = httpx.AsyncClient(
            headers=_HEADERS,
            limits=httpx.Limits(max_keepalive_connections=0),
            # `fetch` limits the total time.
            timeout=None,
            trust_env=False,
            verify=_authorities(),
            # No cookies: they would leak information between hosts and between callers.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )

    async def fetch(self, url: str) -> bytes:
        """Fetches a URL.

        Raises:
            Unfetchable: it is not allowed, not found, too large, or takes longer than `timeout_s`.
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
        """Returns the content, or the URL of a redirect."""
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
        # Other encodings, such as "aws-chunked" left over from uploads, do not change the content.
        if _COMPRESSIONS & {name.strip().lower() for name in response.headers.get("Content-Encoding", "").split(",")}:
            raise Unfetchable("comes compressed from its host, though uncompressed was asked for; that is not read")
        too_large = Unfetchable(f"has more than {self._limits.source_bytes_max} bytes (media.source_bytes_max)")
        announced = response.headers.get("Content-Length", "")
        if announced.isdecimal() and int(announced) > self._limits.source_bytes_max:
            raise too_large
        content = bytearray()
        # Raw bytes, because decompressed content could have any size.
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > self._limits.source_bytes_max:
                raise too_large
        return bytes(content)

    async def _addresses(self, url: httpx.URL) -> list[Address]:
        """Returns addresses to connect to, after checking that all addresses of the host are public or allowed."""
        if url.scheme not in _PORTS:
            raise Unfetchable("is no http or https URL, or leads to another one")
        if url.userinfo:
            raise Unfetchable("has a user or password in it, or leads to a URL that has")
        port = url.port or _PORTS[url.scheme]
        if port > _PORT_MAX:
            raise Unfetchable("is no URL, or leads to none")
        host = url.raw_host.decode("ascii").strip("[]").rstrip(".").lower()
        # httpx escapes invalid characters of a name ("http://["). An IPv6 address may have an escaped zone.
        if not host or ("%" in host and ":" not in host):
            raise Unfetchable("is no URL with a host, or leads to one without")
        # One message for all reasons, so that callers learn nothing about names in this network.
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
        addresses = await loop.run_in_executor(self._look_ups, _look_up, host, port)
        return [ip_address(address) for address in dict.fromkeys(addresses)]

    async def close(self) -> None:
        self._look_ups.shutdown(wait=False, cancel_futures=True)
        await self._client.aclose()


def _look_up(host: str, port: int) -> list[str]:
    """Returns a host's addresses, without zones (`fe80::1%eth0`)."""
    return [str(each[4][0]).split("%")[0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
