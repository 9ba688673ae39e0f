"""Where pictures may be fetched from, within which limits, and what is cached."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import gzip
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from satchel.api.media import fetch as picture_fetch
from satchel.api.media import files as picture_files
from satchel.api.media import web as picture_http
from satchel.api.media.fetch import PictureLoader, PictureShelf, Workshop
from satchel.api.media.sources import Picture, PictureSource, VideoSource
from satchel.api.media.web import is_public
from satchel.cluster.config.config import Media, parse_config
from satchel.cluster.errors import ConfigError, InvalidRequest, Unavailable

from .test_pixels import few_colours, packed, png

HERE = "messages[2].content[0]"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def said(body: bytes, status: str = "200 OK", *headers: str) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        head = [f"HTTP/1.1 {status}", "Connection: close", *headers]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)

    return answer


class Site:
    """A web server on loopback that answers exactly what a test wants, and records its requests."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.heads: list[str] = []
        self.port = 0
        self.left = asyncio.Event()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.heads.append(head)
            await self.answers[head.split()[1]](writer)
            await writer.drain()
        writer.close()
        self.left.set()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    server = await asyncio.start_server(site.serve, "127.0.0.1", 0)
    site.port = server.sockets[0].getsockname()[1]
    yield site
    server.close()


@asynccontextmanager
async def loading(**limits: Any) -> AsyncIterator[PictureLoader]:
    loader = PictureLoader(Media(**{"allowed_hosts": ("127.0.0.1",), **limits}))
    try:
        yield loader
    finally:
        await loader.close()


async def refusal(loader: PictureLoader, url: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await loader.load(PictureSource(HERE, url))
    assert caught.value.param == HERE
    assert caught.value.message.startswith(HERE + " ")
    return caught.value.message


def inline(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def a_png(seed: int = 1, width: int = 8, height: int = 6) -> bytes:
    return packed(few_colours(width, height, seed), "PNG")


def named(monkeypatch: pytest.MonkeyPatch, addresses: dict[str, list[str]]) -> list[str]:
    """Makes these the only host names; returns the list of look-ups."""
    asked: list[str] = []

    def look_up(host: str, port: int) -> list[str]:
        asked.append(host)
        return addresses[host]

    monkeypatch.setattr(picture_http, "_look_up", look_up)
    return asked


async def test_one_picture_however_it_is_sent(site: Site, tmp_path: Path) -> None:
    data = a_png()
    # The server's content type is not trusted.
    site.answers["/cat"] = said(data, "200 OK", "Content-Type: text/html")
    (tmp_path / "a cat.png").write_bytes(packed(few_colours(8, 6, 1), "BMP"))
    wrapped = inline(data).replace("+", "-").replace("/9", "_9").rstrip("=") + "\r\n"
    urls = [
        site.url("/cat"),
        inline(data),
        "data:," + "".join(f"%{byte:02x}" for byte in data),
        wrapped.replace("image-png", "image/png"),
        str(tmp_path / "a cat.png"),
        f"file://{tmp_path}/a%20cat.png",
        f"file://localhost{tmp_path}/../{tmp_path.name}/a cat.png",
    ]
    async with loading(file_roots=(str(tmp_path),)) as loader:
        pictures = [await loader.load(PictureSource(HERE, url)) for url in urls]
        other = await loader.load(PictureSource(HERE, inline(a_png(seed=2))))
    assert len({picture.hash for picture in pictures}) == 1
    assert {(picture.width, picture.height, len(picture.pixels)) for picture in pictures} == {(8, 6, 144)}
    assert other.hash != pictures[0].hash


async def test_detail_and_limits_of_a_part_change_what_is_shown() -> None:
    url = inline(a_png(width=1200, height=600))
    async with loading() as loader:
        low = await loader.load(PictureSource(HERE, url, "low"))
        high = await loader.load(PictureSource(HERE, url, "high"))
        small = await loader.load(PictureSource(HERE, url, "auto", None, 20_000))
        large = await loader.load(PictureSource(HERE, url, "auto", 2_880_000, None))
    sizes = [(picture.width, picture.height) for picture in (low, high, small, large)]
    assert sizes == [(512, 256), (1200, 600), (200, 100), (2400, 1200)]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64", "comma"),
        ("data:image/png;base64,!!!!", "base64 is damaged"),
        ("data:image/png;base64,A", "base64 is damaged"),
        ("data:image/png;base64,ä", "base64 is damaged"),
        ("data:image/png;base64,", "no picture"),
        (inline(b"<html>"), "no picture that can be read; known are PNG, JPEG"),
        (inline(a_png()[:60]), "damaged or cut off"),
        (inline(packed(Image.new("1", (2000, 1000)), "PNG")), "2000 x 1000 pixels: more than 1000000 pixels"),
        (inline(png(2**31 - 1, 2**31 - 1, 8, 2, b"")), f"{HERE} has more than 1000000 pixels (media.pixels_max)"),
        (inline(bytes(3001)), "more than 3000 bytes (media.source_bytes_max)"),
        ("data:," + "a" * 3001, "more than 3000 bytes (media.source_bytes_max)"),
        *(
            (url, "is no URL with a host")
            for url in ("http://", "http:///cat.png", "http://.", "http://[", "https:///")
        ),
        ("http://[::1", "is no URL"),
        ("http://exa mple.invalid/", "is no URL with a host"),
        ("http://example.invalid/", "public address"),
        ("http://[fe80::1%25eth0]/", "public address"),
        ("http://a:b@127.0.0.1/", "user or password"),
    ],
)
async def test_what_a_caller_got_wrong_is_said(url: str, reason: str) -> None:
    async with loading(source_bytes_max=3000, pixels_max=10**6) as loader:
        assert reason in await refusal(loader, url)


NOT_PUBLIC = """
127.0.0.1 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 224.0.0.1 255.255.255.255 240.0.0.1
192.0.2.1 198.18.0.1 ::1 :: ::ffff:127.0.0.1 ::ffff:10.0.0.1 fe80::1 fec0::1 fd00::1 ff02::1 2002:7f00:1::
64:ff9b::a00:1 2001:0:1::1 2001:db8::1 ::7f00:1
"""
PUBLIC = "8.8.8.8 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::"
THIS_MACHINE = "127.0.0.1 localhost 127.1 2130706433 0x7f.1 0 [::1] [::ffff:7f00:1] LOCALHOST."


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", PUBLIC.split())
def test_addresses_that_are(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize("host", THIS_MACHINE.split())
async def test_this_machine_is_refused_in_every_spelling(site: Site, host: str) -> None:
    site.answers["/cat"] = said(a_png())
    async with loading(allowed_hosts=()) as loader:
        assert "public address" in await refusal(loader, site.url("/cat", host))
    assert not site.heads


@pytest.mark.parametrize("allowed", ["127.0.0.1", "127.0.0.0/8", "pictures.test", "Pictures.Test"])
async def test_hosts_are_allowed_by_name_address_and_network(
    site: Site, monkeypatch: pytest.MonkeyPatch, allowed: str
) -> None:
    asked = named(monkeypatch, {"pictures.test": ["127.0.0.1"]})
    site.answers["/cat"] = said(a_png())
    async with loading(allowed_hosts=parse_media({"allowed_hosts": [allowed]}).allowed_hosts) as loader:
        await loader.load(PictureSource(HERE, site.url("/cat", "pictures.test")))
    # Looked up once: a later change of the name's address has no effect.
    assert asked == ["pictures.test"]
    assert f"\r\nHost: pictures.test:{site.port}\r\n" in site.heads[0]


async def test_one_private_address_among_public_ones_is_enough_to_refuse(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, {"mixed.test": ["8.8.8.8", "127.0.0.1"], "none.test": []})
    async with loading(allowed_hosts=()) as loader:
        messages = {await refusal(loader, site.url("/cat", host)) for host in ("mixed.test", "none.test")}
    assert len(messages) == 1 and "public address" in messages.pop()


async def test_a_host_that_does_not_answer_at_one_address_is_asked_at_the_next(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, {"pictures.test": ["127.0.0.2", "127.0.0.1"]})
    site.answers["/cat"] = said(a_png())
    async with loading(allowed_hosts=("pictures.test",)) as loader:
        picture = await loader.load(PictureSource(HERE, site.url("/cat", "pictures.test")))
    assert (picture.width, picture.height) == (8, 6) and len(site.heads) == 1


async def test_redirects_are_followed_and_checked_each(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, {"pictures.test": ["127.0.0.1"], "127.0.0.1": ["127.0.0.1"]})
    moved = {
        "/here": "/there",
        "/there": f"//pictures.test:{site.port}/cat",
        "/inward": f"http://127.0.0.1:{site.port}/secret",
        "/round": "/round",
        "/file": "file:///etc/passwd",
        "/user": f"http://a:b@pictures.test:{site.port}/cat",
        "/nowhere": "http://pictures.test:99999999/",
        "/hostless": "http://[",
    }
    for path, to in moved.items():
        site.answers[path] = said(b"", "302 Found", f"Location: {to}", "Set-Cookie: who=you")
    site.answers["/cat"] = said(a_png())
    async with loading(allowed_hosts=("pictures.test",), redirects_max=2) as loader:
        await loader.load(PictureSource(HERE, site.url("/here", "pictures.test")))
        reasons = {
            path: await refusal(loader, site.url(path, "pictures.test"))
            for path in ("/inward", "/round", "/file", "/user", "/nowhere", "/hostless")
        }
    asked = [head.split()[1] for head in site.heads]
    assert "public address" in reasons["/inward"] and "/secret" not in asked
    assert "more than 2 times" in reasons["/round"] and asked.count("/round") == 3
    assert "no http or https URL" in reasons["/file"]
    assert "user or password" in reasons["/user"]
    assert "is no URL, or leads to none" in reasons["/nowhere"]
    assert "is no URL with a host, or leads to one without" in reasons["/hostless"]
    assert not any("cookie" in head.lower() for head in site.heads)


async def test_what_comes_is_limited(site: Site) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not writer.is_closing():
            writer.write(bytes(2**14))
            await writer.drain()

    site.answers["/announced"] = said(b"", "200 OK", "Content-Length: 5001")
    site.answers["/endless"] = endless
    site.answers["/exact"] = said(a_png() + bytes(5000 - len(a_png())))
    async with loading(source_bytes_max=5000) as loader:
        for path in ("/announced", "/endless"):
            assert "more than 5000 bytes (media.source_bytes_max)" in await refusal(loader, site.url(path))
        await loader.load(PictureSource(HERE, site.url("/exact")))
    # The connection was closed; the endless body was not read.
    async with asyncio.timeout(10):
        await site.left.wait()


async def test_a_slow_answer_ends_at_the_limit(site: Site) -> None:
    gone = asyncio.Event()

    async def silent(writer: asyncio.StreamWriter) -> None:
        await gone.wait()

    site.answers["/slow"] = silent
    async with loading(timeout_s=0.3) as loader:
        async with asyncio.timeout(60):
            assert "within 0.3 s (media.timeout_s)" in await refusal(loader, site.url("/slow"))
    gone.set()


async def test_other_answers_are_refused(site: Site) -> None:
    async def torn(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")

    site.answers["/missing"] = said(b"", "404 Not Found")
    site.answers["/page"] = said(b"<html>")
    site.answers["/torn"] = torn
    async with loading() as loader:
        assert "answers 404" in await refusal(loader, site.url("/missing"))
        assert "no picture" in await refusal(loader, site.url("/page"))
        assert "could not be fetched" in await refusal(loader, site.url("/torn"))
        site.port = 1
        assert "could not be fetched" in await refusal(loader, site.url("/page"))


async def test_a_compressed_answer_is_refused_as_such(site: Site) -> None:
    for number, names in enumerate(("gzip", "BR", "identity, zstd")):
        site.answers[f"/{number}"] = said(gzip.compress(a_png()), "200 OK", f"Content-Encoding: {names}")
    site.answers["/upload"] = said(a_png(), "200 OK", "Content-Encoding: aws-chunked")
    async with loading() as loader:
        for number in range(3):
            assert "comes compressed from its host" in await refusal(loader, site.url(f"/{number}"))
        await loader.load(PictureSource(HERE, site.url("/upload")))
    assert all("\r\nAccept-Encoding: identity\r\n" in head for head in site.heads)


async def test_a_certificate_is_asked_for_by_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, {"pictures.test": ["127.0.0.1"]})
    hello: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello.set_result(await reader.read(4096))
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with loading(allowed_hosts=("pictures.test",)) as loader:
        await refusal(loader, f"https://pictures.test:{port}/cat")
    server.close()
    assert b"pictures.test" in await hello


async def test_files_are_read_only_from_the_configured_folders(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "below", outside):
        folder.mkdir(parents=True)
        (folder / "cat.png").write_bytes(a_png())
    (root / "link.png").symlink_to(root / "below" / "cat.png")
    (root / "escape.png").symlink_to(outside / "cat.png")
    (root / "door").symlink_to(outside)
    (root / "large.png").write_bytes(bytes(3001))
    os.mkfifo(root / "pipe.png")
    async with loading(file_roots=(str(root),), source_bytes_max=3000) as loader:
        for path in ("below/cat.png", "link.png"):
            await loader.load(PictureSource(HERE, str(root / path)))
        refused = {
            path: await refusal(loader, f"{root}/{path}")
            for path in ("escape.png", "door/cat.png", "../outside/cat.png", "../outside/none", "a\0b")
        }
        other = await refusal(loader, f"file://other{root}/below/cat.png")
        assert await refusal(loader, "/etc/passwd") == other
        assert "outside" in other and set(refused.values()) == {other}
        assert "not there" in await refusal(loader, str(root / "none.png"))
        assert "no regular file" in await refusal(loader, str(root / "pipe.png"))
        assert "no regular file" in await refusal(loader, str(root))
        assert "more than 3000 bytes" in await refusal(loader, str(root / "large.png"))
    async with loading() as loader:
        assert "media.file_roots" in await refusal(loader, str(root / "link.png"))


def test_a_link_that_is_put_there_after_the_check_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(a_png())
    (tmp_path / "door").symlink_to(tmp_path)
    (tmp_path / "link.png").symlink_to(tmp_path / "cat.png")
    assert picture_files._read(tmp_path, ["cat.png"], 10_000) == a_png()
    for parts in (["door", "cat.png"], ["link.png"]):
        with pytest.raises(OSError):
            picture_files._read(tmp_path, parts, 10_000)


async def test_the_same_content_is_decoded_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    original = picture_fetch.decode

    def counted(data: bytes, *arguments: Any) -> Picture:
        decoded.append(data)
        return original(data, *arguments)

    monkeypatch.setattr(picture_fetch, "decode", counted)
    site.answers["/cat"] = said(a_png())
    async with loading() as loader:
        first, again = [await loader.load(PictureSource(HERE, inline(a_png()))) for _ in range(2)]
        fetched = await loader.load(PictureSource(HERE, site.url("/cat")))
        assert len(decoded) == 1 and first is again is fetched
        smaller = await loader.load(PictureSource(HERE, inline(a_png()), "auto", None, 12))
        assert len(decoded) == 2 and smaller.width < first.width
        # The content at a URL may have changed.
        site.answers["/cat"] = said(a_png(seed=2))
        assert (await loader.load(PictureSource(HERE, site.url("/cat")))).hash != fetched.hash


async def test_what_requests_hold_is_limited() -> None:
    pictures = [PictureSource(HERE, inline(a_png(seed, 100, 100))) for seed in range(6)]
    async with loading(held_bytes_max=100_000, audio_seconds_max=0.5) as loader:
        held = [await loader.load(source) for source in pictures[:3]]
        with pytest.raises(Unavailable, match=r"media\.held_bytes_max"):
            await loader.load(pictures[3])
        held.pop()
        gc.collect()
        held.append(await loader.load(pictures[3]))
        # Cached pictures are evicted to make room.
        held.clear()
        gc.collect()
        for source in pictures:
            await loader.load(source)


async def test_what_is_being_decoded_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    original = picture_fetch.decode

    def slow(*arguments: Any) -> Picture:
        time.sleep(0.05)
        return original(*arguments)

    monkeypatch.setattr(picture_fetch, "decode", slow)
    broken = inline(a_png(9, 100, 100)[:-40])
    async with loading(held_bytes_max=100_000, audio_seconds_max=0.5) as loader, asyncio.timeout(30):
        for _ in range(4):
            await refusal(loader, broken)
        pictures = [PictureSource(HERE, inline(a_png(seed, 100, 100))) for seed in range(6)]
        loaded = await asyncio.gather(*map(loader.load, pictures), return_exceptions=True)
        assert sorted(type(each).__name__ for each in loaded) == ["Picture"] * 3 + ["Unavailable"] * 3
        # A picture that is still being decoded may turn out small, so it is waited for.
        loaded.clear()
        gc.collect()
        small = [PictureSource(HERE, picture.url, "auto", None, 100) for picture in pictures]
        assert len(await asyncio.gather(*map(loader.load, small))) == 6


async def test_pictures_do_not_wait_for_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    def endless(*arguments: Any) -> list[Picture]:
        assert end.wait(60)
        return []

    monkeypatch.setattr(picture_fetch, "decode_video", endless)
    async with loading() as loader:
        videos = [asyncio.create_task(loader.load_video(VideoSource(HERE, inline(a_png(seed))))) for seed in range(10)]
        await asyncio.sleep(0.1)
        try:
            async with asyncio.timeout(10):
                await loader.load(PictureSource(HERE, inline(a_png())))
        finally:
            end.set()
            await asyncio.gather(*videos)


async def test_many_are_loaded_together_and_the_first_error_ends_all(site: Site) -> None:
    waiting, gone = asyncio.Event(), asyncio.Event()

    async def silent(writer: asyncio.StreamWriter) -> None:
        waiting.set()
        await gone.wait()

    async def wrong(writer: asyncio.StreamWriter) -> None:
        await waiting.wait()
        await said(b"", "404 Not Found")(writer)

    site.answers |= {"/slow": silent, "/wrong": wrong}
    good = PictureSource("messages[0].content[0]", inline(a_png()))
    async with loading(pictures_max=2, timeout_s=60) as loader:
        loaded = await loader.load_all([good, good])
        assert [len(each) for each in loaded] == [1, 1]
        with pytest.raises(InvalidRequest) as caught:
            await loader.load_all([PictureSource("a", site.url("/slow")), PictureSource("b", site.url("/wrong"))])
        assert caught.value.param == "b"
        with pytest.raises(InvalidRequest, match=r"at most 2 pictures.*media\.pictures_max"):
            await loader.load_all([good] * 3)
    gone.set()


async def test_room_is_taken_until_the_work_ends_though_its_caller_has_gone() -> None:
    begun, end, order = threading.Event(), threading.Event(), []

    def work(name: str) -> str:
        order.append(name)
        begun.set()
        assert end.wait(30)
        return name

    workshop = Workshop(4, 10, "test")
    first = asyncio.create_task(workshop.run(6, work, "first"))
    await asyncio.to_thread(begun.wait, 30)
    first.cancel()
    others = [asyncio.create_task(workshop.run(pixels, work, name)) for name, pixels in (("large", 99), ("small", 1))]
    with pytest.raises(asyncio.CancelledError):
        await first
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == ["first"]
    others[0].cancel()
    end.set()
    assert await others[1] == "small" and order == ["first", "small"]
    assert await workshop.run(10, work, "all") == "all"
    workshop.close()


def a_picture(nbytes: int) -> list[Picture]:
    return [Picture(nbytes // 3, 1, bytes(nbytes), b"h" * 32)]


async def test_of_what_is_kept_for_later_the_least_recently_used_goes_first() -> None:
    shelf = PictureShelf(4 * 60)
    for key in (b"a", b"b"):
        shelf.keep(key, a_picture(30))
    assert shelf.find(b"a") is not None
    shelf.keep(b"c", a_picture(30))
    assert [shelf.find(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]


async def test_what_is_too_large_to_be_kept_drives_nothing_out() -> None:
    shelf = PictureShelf(4 * 60)
    for key, nbytes in ((b"small", 30), (b"large", 63), (b"as large as can be", 60)):
        shelf.keep(key, a_picture(nbytes))
        assert (shelf.find(b"small") is not None) == (key != b"as large as can be")
        assert (shelf.find(key) is not None) == (key != b"large")


def parse_media(media: dict[str, Any]) -> Media:
    return parse_config({"models": [{"name": "a", "source": "b"}], "media": media}).media


@pytest.mark.parametrize(
    ("media", "place"),
    [
        ({"allowed_hosts": ["10.0.0.0/33"]}, "media.allowed_hosts[0]"),
        ({"allowed_hosts": ["a", "http://b"]}, "media.allowed_hosts[1]"),
        ({"allowed_hosts": [" "]}, "media.allowed_hosts[0]"),
        ({"file_roots": ["pictures"]}, "media.file_roots[0]"),
        ({"pixels_max": 10**9}, "media.pixels_max"),
        ({"redirects_max": -1}, "media.redirects_max"),
    ],
)
def test_mistakes_in_the_config_are_named(media: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_media(media)
    assert caught.value.param == place
