"""Compressed bodies are decoded within the limits, or refused with a fitting error."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest

from satchel.api.app import create_app

BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}).encode()


def bare(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


WAYS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "an old name": ("x-gzip", gzip.compress),
    "in capitals": ("GZIP", gzip.compress),
    "several members": ("gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]) + bytes(7)),
    "deflate": ("deflate", zlib.compress),
    "deflate without a head": ("deflate", bare),
    "two codings": ("deflate, gzip", lambda data: gzip.compress(zlib.compress(data))),
    "none": ("identity", bytes),
    "nothing": ("", bytes),
}


async def post(
    client: httpx.AsyncClient, coding: str, data: bytes, path: str = "/v1/chat/completions"
) -> httpx.Response:
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    return await client.post(path, content=data, headers=headers)


@pytest.mark.parametrize("way", WAYS)
async def test_a_body_is_decoded(client: httpx.AsyncClient, way: str) -> None:
    coding, pack = WAYS[way]
    answer = await post(client, coding, pack(BODY))
    assert answer.status_code == 200 and answer.json()["choices"], answer.text


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, br", "x" * 500])
async def test_another_coding_is_refused_by_its_name(client: httpx.AsyncClient, coding: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/agents/ann/inject"):
        answer = await post(client, coding, BODY, path)
        assert answer.status_code == 415 and len(answer.text) < 300
        error = answer.json()["error"]
        assert error["code"] == "unsupported_media_type" and "content encoding" in error["message"]
    answer = await post(client, coding, BODY, "/v1/messages")
    assert answer.status_code == 415 and answer.json()["type"] == "error"
    assert "content encoding" in answer.json()["error"]["message"]
    answer = await post(client, coding, BODY, "/api/chat")
    assert answer.status_code == 415 and "content encoding" in answer.json()["error"]


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", BODY),
        ("deflate", b"\xff" + BODY),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9]),
        ("deflate", zlib.compress(BODY)[:-5]),
        ("gzip", gzip.compress(BODY, mtime=0) + b"more"),
        ("gzip, deflate", gzip.compress(BODY, mtime=0)),
    ],
)
async def test_what_is_not_what_it_says_is_a_clear_error(client: httpx.AsyncClient, coding: str, data: bytes) -> None:
    answer = await post(client, coding, data)
    assert answer.status_code == 400 and "as Content-Encoding says" in answer.json()["error"]["message"]


async def test_a_small_body_that_grows_is_refused_before_it_does(backend, config) -> None:
    limited = replace(config, endpoint=replace(config.endpoint, body_bytes_max=100_000))
    transport = httpx.ASGITransport(create_app(backend, limited))
    async with httpx.AsyncClient(transport=transport, base_url="http://satchel") as client:
        for coding, data in (
            ("gzip", gzip.compress(bytes(10**7))),
            ("gzip, gzip", gzip.compress(gzip.compress(bytes(10**7)) * 8)),
        ):
            answer = await post(client, coding, data)
            assert answer.status_code == 413 and "body_bytes_max" in answer.text
        assert (await post(client, "gzip", gzip.compress(BODY, mtime=0))).status_code == 200
