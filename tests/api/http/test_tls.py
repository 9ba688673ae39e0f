"""HTTPS: handshakes, limits on unknown clients, and certificates that are replaced. On both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.api import patches
from satchel.api.app import create_app
from satchel.api.http import tls_listener
from satchel.api.http.server import HttpServer
from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.errors import NotRunning
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.trust.endpoint_certificate import client_context
from satchel.cluster.trust.shown_certificate import ShownCertificate
from tests.authority import Issued, authority, key_pem, new_key, write_pair
from tests.worlds.api.fake_backend import events_of
from tests.worlds.loopback import several_addresses
from tests.worlds.macos_sockets import accepts_as_macos, reset

BODY = {"messages": [{"role": "user", "content": "Hi"}]}
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
PLACES = 4

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy.")


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Ray's processes use uvloop if it is installed."""
    return request.param()


@dataclass
class Served:
    port: int
    home: Home
    root: Issued
    refused: list[str]
    server: HttpServer

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    @property
    def trusts(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.root.pem)

    def client(self, trusts: ssl.SSLContext | None = None) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, verify=trusts or self.trusts, timeout=20)

    async def connect(self, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, **options)

    async def greeted(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Returns a connection after its handshake and one answer."""
        reader, writer = await self.connect(ssl=self.trusts, server_hostname="localhost")
        writer.write(GET)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        return reader, writer


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    prepare_home(home)
    return home


@pytest.fixture
async def served(
    backend: Any, config: Any, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Served]:
    """A server with the certificate of an authority, for `localhost`, and few places for handshakes."""
    monkeypatch.setattr(tls_listener, "HANDSHAKES_MAX", PLACES)
    monkeypatch.setattr(tls_listener, "LOOK_S", 0.05)
    root, port = authority(), free_port()
    tls = root.intermediate().issue(["localhost"]).write(tmp_path)
    refused: list[str] = []
    server = HttpServer(
        create_app(backend, config),
        "127.0.0.1",
        port,
        connections_max=3,
        certificate=ShownCertificate(tls, home),
        refused=refused.append,
    )
    await server.start()
    yield Served(port, home, root, refused, server)
    assert server.failure is None
    await server.close(0.5)
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", port)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Returns the bytes that still come before the other side closes the connection."""
    async with asyncio.timeout(10):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def test_answers_and_streams_come_through(served: Served, backend: Any):
    encode = backend.text.tokenizer.encode
    backend.play(SequenceUpdate("r", encode("Hello"), cached_tokens=0), SequenceUpdate("r", encode(" you"), "stop"))
    async with served.client() as client:
        answer = await client.post("/v1/chat/completions", json={**BODY, "stream": True})
        assert events_of(answer.text)[-1] == "[DONE]" and "Hello" in answer.text
        assert (await client.post("/v1/chat/completions", json={**BODY, "user": "x" * 500_000})).status_code == 200


async def test_who_does_not_know_the_authority_does_not_talk(
    served: Served, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    for trusts in (ssl.create_default_context(), ssl.create_default_context(cadata=authority().pem)):
        async with served.client(trusts) as client:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await client.get("/health")
    async with served.client() as client:
        with pytest.raises(httpx.ConnectError, match="not valid for"):
            await client.get(f"https://127.0.0.1:{served.port}/health")
        assert (await client.get("/health")).status_code == 200
    assert not caplog.records


async def test_the_own_command_line_trusts_that_certificate_alone(served: Served, tmp_path: Path):
    """For any name. It trusts no other certificate of the same authority, nor those behind it in the file."""
    own = served.home.shown_certificate_file
    async with httpx.AsyncClient(verify=client_context(str(own))) as client:
        assert (await client.get(f"https://127.0.0.1:{served.port}/health")).status_code == 200
    above = served.root.intermediate()
    mine, others = above.issue(["chat.example.org"]), above.issue(["localhost", "127.0.0.1"])
    for first in (mine.chain, mine.chain + served.root.pem):
        bundle = write_pair(tmp_path, first, key_pem(mine.key), name="bundle").certificate
        assert not shakes_hands(client_context(bundle), others) and shakes_hands(client_context(bundle), mine)
    with pytest.raises(NotRunning, match="is not there"):
        client_context(str(tmp_path / "away"))


def shakes_hands(client: ssl.SSLContext, with_: Issued) -> bool:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        tls = with_.write(Path(folder))
        server.load_cert_chain(tls.certificate, tls.key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (near, far, near):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError:
            return False
    return True


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_newer_versions_are_spoken(served: Served, version: ssl.TLSVersion):
    trusts = served.trusts
    trusts.minimum_version = trusts.maximum_version = version
    trusts.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await served.connect(ssl=trusts, server_hostname="localhost")
    found = writer.get_extra_info("ssl_object")
    assert found.version() == version.name.replace("_", ".") and found.selected_alpn_protocol() == "http/1.1"
    writer.close()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
async def test_older_versions_are_not(served: Served, version: ssl.TLSVersion):
    trusts = served.trusts
    trusts.set_ciphers("ALL:@SECLEVEL=0")
    trusts.minimum_version = trusts.maximum_version = version
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await served.connect(ssl=trusts, server_hostname="localhost")


async def test_plain_http_is_told_what_is_spoken(served: Served):
    for path in ("/health", "/" + "x" * 5000):
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://127.0.0.1:{served.port}{path}")
        error = answer.json()["error"]
        assert answer.status_code == 400 and "https://" in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("said", [b"\x00\x00", b"\x16\x03\x01\x00\x05hello", b"\x16" + b"\xff" * 70_000, b"\r\n"])
async def test_what_is_neither_is_hung_up_on(served: Served, said: bytes, caplog: pytest.LogCaptureFixture):
    reader, writer = await served.connect()
    writer.write(said)
    assert b"HTTP" not in await ended(reader)
    writer.close()
    async with served.client() as client:
        assert (await client.get("/health")).status_code == 200
    assert not caplog.records


@pytest.mark.parametrize("said", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00"], ids=["nothing", "a byte", "a part"])
async def test_connections_without_a_handshake_keep_nobody_out_and_are_few(served: Served, said: bytes):
    """The oldest one is closed; new clients are answered, and so are earlier ones."""
    there = await served.greeted()
    silent = []
    for _ in range(5 * PLACES):
        silent.append(await served.connect())
        silent[-1][1].write(said)
        await asyncio.sleep(0.002)
    async with served.client() as client:
        assert (await client.get("/health")).status_code == 200
    async with asyncio.timeout(10):
        while sum(reader.at_eof() or reader.exception() is not None for reader, _ in silent) < 4 * PLACES:
            await asyncio.sleep(0.02)
    there[1].write(GET)
    async with asyncio.timeout(10):
        assert b"HTTP/1.1 200" in await there[0].readuntil(b"HTTP/1.1 200")
    for _, writer in (*silent, there):
        writer.close()


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01\x00"], ids=["nothing", "a part"])
async def test_a_handshake_that_does_not_end_is_ended(served: Served, said: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tls_listener, "HANDSHAKE_S", 0.3)
    reader, writer = await served.connect()
    writer.write(said)
    assert await ended(reader) == b""
    writer.close()


async def test_a_client_that_resets_its_connection_at_once_stops_no_mac(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    accepts_as_macos(monkeypatch)
    reset(("127.0.0.1", served.port))
    _, writer = await served.greeted()
    writer.close()


@several_addresses
async def test_one_address_does_not_take_the_places_of_others(served: Served):
    """The address with the most connections loses one."""
    other = socket.socket()
    other.setblocking(False)
    other.bind(("127.0.0.2", 0))
    await asyncio.get_running_loop().sock_connect(other, ("127.0.0.1", served.port))
    await asyncio.sleep(0.05)
    silent = [await served.connect() for _ in range(5 * PLACES)]
    await asyncio.sleep(0.1)
    reader, writer = await asyncio.open_connection(sock=other, ssl=served.trusts, server_hostname="localhost")
    writer.write(GET)
    async with asyncio.timeout(10):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    for _, each in [*silent, (reader, writer)]:
        each.close()


async def test_connections_that_agreed_and_ask_nothing_make_room(served: Served):
    """So do connections that had their last answer and do not close TLS."""
    idle = [await served.greeted() for _ in range(2)]
    raw, stays = [], b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for _ in range(5):
        near = LazyPeer(await served.connect(), served.trusts)
        await near.talk(stays)
        raw.append(near)
    for _ in range(6):
        idle.append(await served.greeted())
    assert not served.refused
    for _, writer in (*idle, *(near.streams for near in raw)):
        writer.close()


class LazyPeer:
    """A client that never answers the end of a TLS connection."""

    def __init__(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], trusts: ssl.SSLContext) -> None:
        self.streams = streams
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = trusts.wrap_bio(self._in, self._out, server_hostname="localhost")

    async def _step(self, what: Any, *arguments: Any) -> Any:
        reader, writer = self.streams
        while True:
            try:
                found = what(*arguments)
                writer.write(self._out.read())
                return found
            except ssl.SSLWantReadError:
                writer.write(self._out.read())
                async with asyncio.timeout(10):
                    self._in.write(await reader.read(2**16))

    async def talk(self, said: bytes) -> None:
        await self._step(self._tls.do_handshake)
        await self._step(self._tls.write, said)
        assert (await self._step(self._tls.read, 4096)).startswith(b"HTTP/1.1 200")


async def test_a_stopping_server_does_not_wait_until_idle_clients_agree(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(patches, "READ_S", 0.05)
    lazy = LazyPeer(await served.connect(), served.trusts)
    await lazy.talk(GET)
    await asyncio.sleep(0.1)
    async with asyncio.timeout(tls_listener.CLOSE_S / 2):
        await served.server.close(60)
    lazy.streams[1].close()


async def test_an_answer_that_is_not_read_is_not_piled_up(served: Served):
    """As without TLS: at most 64 KiB wait here, besides the system's buffer."""
    _, writer = await served.greeted()
    (protocol,) = served.server._server.server_state.connections
    assert protocol.transport.get_write_buffer_limits()[1] == 64 * 2**10
    writer.close()


async def test_a_lack_of_descriptors_passes(served: Served):
    """No connection is accepted meanwhile, and the server goes on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first, second = socket.socket(), socket.socket()
    loop = asyncio.get_running_loop()
    for each in (first, second):
        each.setblocking(False)
    highest = max(first.fileno(), second.fileno())
    spare = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                spare.append(socket.socket())
        await loop.sock_connect(first, ("127.0.0.1", served.port))
        async with asyncio.timeout(10):
            while not served.refused:
                await asyncio.sleep(0.02)
        assert "could not be taken" in served.refused[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in (first, second, *spare):
            each.close()
    async with served.client() as client:
        assert (await client.get("/health")).status_code == 200


async def test_a_renewed_certificate_is_shown_to_new_connections(served: Served, tmp_path: Path):
    """Old connections go on. A broken certificate file changes nothing."""
    there = await served.greeted()
    renewed = served.root.intermediate().issue(["localhost", "chat.example.org"])
    renewed.write(tmp_path)
    async with asyncio.timeout(10):
        while served.home.shown_certificate_file.read_text() != renewed.pem:
            await asyncio.sleep(0.02)
    for broken in (False, True):
        if broken:
            write_pair(tmp_path, "nothing", key_pem(new_key()))
            async with asyncio.timeout(10):
                while not served.home.incidents_file.exists():
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)
        _, writer = await served.connect(ssl=served.trusts, server_hostname="chat.example.org")
        writer.close()
    there[1].write(GET)
    async with asyncio.timeout(10):
        await there[0].readuntil(b"HTTP/1.1 200")
    there[1].close()
    assert json.loads(served.home.incidents_file.read_text())["kind"] == "certificate", "there is one"
