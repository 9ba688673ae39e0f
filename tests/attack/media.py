"""Pictures and films with some of their bytes changed: each is shown, or refused with its place in the message."""

from __future__ import annotations

import base64
import io
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from .http import AttackOutcome, ask, at_a_time
from .scene import AttackScene

_SHARE = 20
_FILMS_SHARE = 10
_SIZES = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f")


def _pictures() -> list[bytes]:
    noise = Image.effect_noise((80, 60), 80).convert("RGB")
    found: list[bytes] = []
    how: list[tuple[str, dict[str, Any]]] = [
        *(("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("BMP", {}), ("TIFF", {})),
        *(("TIFF", {"compression": "tiff_lzw"}), ("GIF", {}), ("PNG", {"save_all": True}), ("GIF", {"save_all": True})),
    ]
    for kind, options in how:
        more = {"append_images": [noise.rotate(90), noise.rotate(180)]} if "save_all" in options else {}
        written = io.BytesIO()
        noise.save(written, kind, **options, **more)
        found.append(written.getvalue())
    return found


def _films() -> list[bytes]:
    import cv2
    import numpy as np

    found: list[bytes] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, code in (("a.mp4", "mp4v"), ("a.avi", "MJPG")):
            path = Path(folder, name)
            film = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*code), 10, (64, 48))
            for shade in range(12):
                film.write(np.full((48, 64, 3), 20 * shade, np.uint8))
            film.release()
            if path.exists():
                found.append(path.read_bytes())
    return found


def _changed(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        if not changed:
            break
        at = chance.randrange(min(len(changed), chance.choice((40, 200, 10**9))))
        kind = chance.random()
        if kind < 0.5:
            changed[at] = chance.randrange(256)
        elif kind < 0.7:
            changed[at : at + 4] = chance.choice(_SIZES)
        elif kind < 0.8:
            del changed[at:]
        else:
            changed[at:at] = changed[at : at + chance.randrange(1, 30)]
    return bytes(changed)


def run(scene: AttackScene) -> AttackOutcome:
    """Four at a time, and every tenth a film."""
    outcome, chance = AttackOutcome(allowed=(503,)), random.Random(scene.seed)
    pictures, films = _pictures(), _films()
    if not films:
        outcome.notes.append("no film could be written here")

    def one(kind: str, data: bytes) -> None:
        address = "data:;base64," + base64.b64encode(data).decode()
        part = {"type": f"{kind}_url", f"{kind}_url": {"url": address}}
        content = [part, {"type": "text", "text": "What is this?"}]
        body = {"model": "satchel/shapes", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
        outcome.count(ask(scene.port, "/v1/chat/completions", body), f"{kind} {data[:40]!r}, {len(data)} bytes")

    for kind, base, count in (
        ("image", pictures, scene.bodies // _SHARE),
        ("video", [*films, *pictures[-3:]], scene.bodies // _SHARE // _FILMS_SHARE),
    ):
        drawn = [_changed(chance.choice(base), chance) for _ in range(max(2, count))]
        at_a_time(4, partial(one, kind), drawn, float("inf"))
    return outcome
