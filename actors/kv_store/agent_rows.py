"""The rows of agents' memory, each under a MAC with the home's key: written, read, and known for damaged."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .branches import ROW_BYTES, Content, Head

logger = logging.getLogger(__name__)

_ID_BYTES = 32
"""The column `model` has the model's id, and behind it that of its files, where it is known."""

HEADS = """
SELECT b.agent, b.branch, b.epoch, b.model, b.root, b.turns, b.injected, b.messages, b.created, b.used, b.digest, b.mac,
    LENGTH(c.tokens), LENGTH(c.text), LENGTH(c.messages)
FROM branches b JOIN contents c ON c.agent = b.agent AND c.branch = b.branch
"""


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def salvage(path: Path, key: bytes) -> Iterator[tuple[Head, Content]]:
    """The branches that still verify in a damaged file, as far as SQLite finds them."""
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error:
        return
    with contextlib.closing(db):
        for order in ("ASC", "DESC"):
            # From both ends: a broken page ends the reading, and what lies behind it may be whole.
            try:
                db.text_factory = lambda data: data.decode("utf-8", "replace")
                for row in db.execute(f"{HEADS} ORDER BY b.agent {order}, b.branch {order}"):
                    head = read_head(row, key)
                    if head is not None and (content := read_content(db, head, key)) is not None:
                        yield head, content
                return
            except (sqlite3.Error, UnicodeDecodeError) as error:
                logger.error("reading the damaged file: %s", error)


def read_content(db: sqlite3.Connection, head: Head, key: bytes) -> Content | None:
    query = (
        "SELECT c.tokens, c.text, c.messages, b.digest, b.mac FROM contents c "
        "JOIN branches b ON b.agent = c.agent AND b.branch = c.branch "
        "WHERE b.agent = ? AND b.branch = ?"
    )
    row = db.execute(query, (head.agent, head.branch)).fetchone()
    if row is None:
        return None
    tokens, text, messages, digest, mac = row
    try:
        if not hmac.compare_digest(mac_of(key, *head_fields(head, digest)), mac):
            return None
        if content_digest(tokens, text, messages) != digest:
            return None
        return Content(tokens, text.decode(), messages)
    except (TypeError, AttributeError, UnicodeDecodeError):
        return None


def read_head(row: tuple[Any, ...], key: bytes) -> Head | None:
    """The head in a row of `HEADS`, None where it does not verify."""
    agent, branch, epoch, model, root, turns, injected, messages, created, used, digest, mac, *lengths = row
    try:
        head = Head(
            agent=agent,
            branch=branch,
            epoch=epoch,
            model=model[:_ID_BYTES],
            root=root,
            turns=turns,
            injected=bool(injected),
            messages=messages,
            tokens=lengths[0] // 4,
            nbytes=sum(lengths) + ROW_BYTES,
            created=created,
            used=used,
            files=model[_ID_BYTES:],
        )
        return head if hmac.compare_digest(mac_of(key, *head_fields(head, digest)), mac) else None
    except (TypeError, AttributeError, UnicodeEncodeError, struct.error):
        return None


def head_fields(head: Head, digest: bytes) -> tuple[bytes, ...]:
    numbers = struct.pack("<qqqqq", head.branch, head.epoch, head.turns, head.injected, head.messages)
    times = struct.pack("<dd", head.created, head.used)
    return b"branch", head.agent.encode(), numbers, times, head.model + head.files, head.root, digest


def mac_of(key: bytes, *fields: bytes) -> bytes:
    """Every field is written with its length, so no two different rows give the same bytes."""
    hasher = hmac.new(key, b"satchel.agents.1", hashlib.sha256)
    for field in fields:
        hasher.update(len(field).to_bytes(8, "big"))
        hasher.update(field)
    return hasher.digest()


def content_digest(*parts: bytes) -> bytes:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()
