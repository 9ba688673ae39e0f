"""Agents' memory on disk: one crash-safe SQLite file. Implements `RoleStorage`.

A commit is synced; an uncommitted change leaves no trace. Every row has a MAC with the home folder's key, and a row
that does not verify is absent: damage may lose memory but never alters it. A file that SQLite cannot read is set aside
(`agents.damaged-N`) and replaced by a new one with the rows that still verify. Erased bytes are overwritten.

Not thread-safe: one thread at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import sqlite3
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from ....cluster.errors import ClusterError, DiskError, MemoryFull, Unavailable
from ...protocol.entries import KEY_BYTES
from ...protocol.store_messages import Content, Head
from ..disk.io import DiskIO
from ..disk.segments import read_key
from .branches import ROW_BYTES, CommitActions
from .roles import Place, Role
from .schema import is_damage, prepare, says_full, unusable

logger = logging.getLogger(__name__)

NAME = "agents.sqlite"
LOCK_WAIT_S = 5.0
"""How long to wait for a killed process's locks: the kernel releases them when it has removed the process."""

_SEQUENCE_MAX = 2**61
"""Far above any real sequence. A damaged number above it must not become the clock."""

_BYTES = f"LENGTH(tokens) + LENGTH(text) + LENGTH(messages) + {ROW_BYTES}"

_ONE = "agent = ? AND branch = ?"
_CHANGED = "INSERT INTO agents VALUES (?, ?) ON CONFLICT (agent) DO UPDATE SET changed = MAX(changed, excluded.changed)"

_EMPTY_LOG = "PRAGMA wal_checkpoint(TRUNCATE)"
_OUTER = "BEGIN IMMEDIATE", "COMMIT", ("ROLLBACK",)
_INNER = "SAVEPOINT inner", "RELEASE inner", ("ROLLBACK TO inner", "RELEASE inner")

Connect = Callable[..., sqlite3.Connection]

_ID_BYTES = 32
"""The column `model` holds the model's id, followed by the id of its files if that is known."""

HEADS = """
SELECT b.agent, b.branch, b.epoch, b.model, b.root, b.turns, b.injected, b.messages, b.created, b.used, b.digest, b.mac,
    b.program, b.parent, LENGTH(c.tokens), LENGTH(c.text), LENGTH(c.messages)
FROM branches b JOIN contents c ON c.agent = b.agent AND c.branch = b.branch
"""


class AgentDatabase:
    """The database in `folder`, or in memory without a folder.

    Methods without a docstring are those of `Storage` and `RoleStorage`. They raise `Unavailable` if SQLite fails, and
    `MemoryFull` if the disk is full.

    Args:
        cache_bytes_max: recently used contents kept in memory.
        connect: `sqlite3.connect`; tests replace it.

    Attributes:
        damaged_total: rows read that did not verify.
        set_aside_total: files that could not be read.

    Raises:
        HomeInUse: another process uses the file.
        ClusterError: a newer version wrote it, or the folder cannot be used.
    """

    def __init__(
        self, folder: Path | None = None, *, cache_bytes_max: int = 64 * 2**20, connect: Connect = sqlite3.connect
    ) -> None:
        self._folder = folder
        self._connect = connect
        self._cache: LRUCache[tuple[str, int, int], Content] = LRUCache(cache_bytes_max, getsizeof=_size)
        self._nbytes = 0
        self._tenants: Counter[str] = Counter()
        # Changes of both counts by the open transactions, for rollback.
        self._counted: list[tuple[str, int]] = []
        self._actions = CommitActions()
        self._inside = False
        self.damaged_total = 0
        self.set_aside_total = 0
        if folder is None:
            self._key = secrets.token_bytes(KEY_BYTES)
            self._db = self._open(None)
            return
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
            self._key = read_key(folder)
            self._db = self._open_or_begin_anew(folder / NAME)
        except OSError as error:
            raise ClusterError(f"cannot use {folder}: {error.strerror or error}") from None
        except DiskError as error:
            # The key is unreadable. No row verifies without it, so the file must not be replaced.
            raise ClusterError(error.message) from None

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def nbytes_of(self, tenant: str) -> int:
        return self._tenants[tenant]

    def _count(self, agent: str, nbytes: int) -> None:
        tenant = agent.partition("/")[0]
        self._nbytes += nbytes
        self._tenants[tenant] += nbytes
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        if self._inside:
            self._counted.append((tenant, nbytes))

    def _uncount(self, since: int) -> None:
        for tenant, nbytes in reversed(self._counted[since:]):
            self._nbytes -= nbytes
            self._tenants[tenant] -= nbytes
        del self._counted[since:]

    def close(self) -> None:
        self._db.close()

    # Storage.

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits all changes of the block or none. A nested one rolls back alone, and is synced with the outer one.

        Raises:
            MemoryFull: the disk is full. Nothing has changed.
            Unavailable: the file fails. Nothing has changed.
        """
        before, actions, db, inner = len(self._counted), len(self._actions), self._db, self._inside
        self._inside = True
        begin, commit, undo = _INNER if inner else _OUTER
        try:
            with self._guard():
                db.execute(begin)
                yield
                db.execute(commit)
        except BaseException:
            self._actions.take_back(actions)
            # If a damaged file was replaced, its counts were replaced too.
            if db is self._db:
                self._uncount(before)
                with contextlib.suppress(sqlite3.Error):
                    if db.in_transaction:
                        for statement in undo:
                            db.execute(statement)
            raise
        finally:
            self._inside = inner
            if not inner:
                self._counted.clear()
        if not inner:
            self._actions.run()

    def after_commit(self, action: Callable[[], object]) -> None:
        if self._inside:
            self._actions.add(action)
        else:
            action()

    def sequence(self) -> int:
        with self._guard():
            branches = self._one("SELECT MAX(epoch) FROM branches WHERE epoch < ?", _SEQUENCE_MAX)
            tombstones = self._one("SELECT MAX(sequence) FROM tombstones WHERE sequence < ?", _SEQUENCE_MAX)
        return max(branches or 0, tombstones or 0)

    def heads(self, agent: str) -> list[Head]:
        with self._guard():
            rows = self._db.execute(f"{HEADS} WHERE b.agent = ?", (agent,)).fetchall()
        heads = [head for row in rows if (head := read_head(row, self._key)) is not None]
        if len(heads) < len(rows):
            self.damaged_total += len(rows) - len(heads)
            logger.error("branches of agent %s do not verify: they are left out", agent)
        return heads

    def content(self, head: Head) -> Content | None:
        key = (head.agent, head.branch, head.epoch)
        if (content := self._cache.get(key)) is not None:
            return content
        with self._guard():
            content = read_content(self._db, head, self._key)
        if content is None:
            self.damaged_total += 1
            logger.error("branch %d of agent %s does not verify: it is left out", head.branch, head.agent)
        else:
            self._remember(key, content)
        return content

    def put(self, head: Head, content: Content) -> None:
        text = content.text.encode()
        digest = content_digest(content.tokens, text, content.messages)
        with self._guard():
            before = self._one(f"SELECT {_BYTES} FROM contents WHERE {_ONE}", head.agent, head.branch) or 0
            self._db.execute(
                "INSERT OR REPLACE INTO contents VALUES (?, ?, ?, ?, ?)",
                (head.agent, head.branch, content.tokens, text, content.messages),
            )
            mac = mac_of(self._key, *head_fields(head, digest))
            fields = (head.epoch, head.model + head.files, head.root, head.turns, int(head.injected), head.messages)
            row = (head.agent, head.branch, *fields, head.created, head.used, digest, mac, head.program, head.parent)
            self._db.execute(f"INSERT OR REPLACE INTO branches VALUES ({','.join('?' * len(row))})", row)
            self._db.execute(_CHANGED, (head.agent, head.epoch))
            self._db.execute("DELETE FROM let_go WHERE agent = ?", (head.agent,))
            self._count(head.agent, len(content.tokens) + len(text) + len(content.messages) + ROW_BYTES - before)
        self._remember((head.agent, head.branch, head.epoch), content)

    def drop(self, head: Head) -> None:
        with self._guard():
            before = self._one(f"SELECT {_BYTES} FROM contents WHERE {_ONE}", head.agent, head.branch) or 0
            self._count(head.agent, -before)
            for table in ("contents", "branches"):
                self._db.execute(f"DELETE FROM {table} WHERE {_ONE}", (head.agent, head.branch))

    def erase(self, agent: str) -> None:
        with self._guard():
            self._count(agent, -(self._one(f"SELECT SUM({_BYTES}) FROM contents WHERE agent = ?", agent) or 0))
            for table in ("contents", "branches", "agents"):
                self._db.execute(f"DELETE FROM {table} WHERE agent = ?", (agent,))

    def let_go(self, agent: str, sequence: int, keep: int) -> None:
        self.erase(agent)
        with self._guard():
            # No MAC: the mark only changes what a client is told, never an answer.
            self._db.execute("INSERT OR REPLACE INTO let_go VALUES (?, ?)", (agent, sequence))
            older = "SELECT agent FROM let_go ORDER BY sequence DESC, agent LIMIT -1 OFFSET ?"
            self._db.execute(f"DELETE FROM let_go WHERE agent IN ({older})", (keep,))

    def was_let_go(self, agent: str) -> bool:
        with self._guard():
            return self._one("SELECT 1 FROM let_go WHERE agent = ?", agent) is not None

    def quietest(self, after: int, limit: int) -> list[tuple[int, str]]:
        with self._guard():
            query = "SELECT changed, agent FROM agents WHERE changed > ? ORDER BY changed, agent LIMIT ?"
            return self._db.execute(query, (after, limit)).fetchall()

    def agents(self, prefix: str, after: str, limit: int) -> list[str]:
        with self._guard():
            query = "SELECT agent FROM agents WHERE agent > ? AND agent >= ? AND agent < ? ORDER BY agent LIMIT ?"
            rows = self._db.execute(query, (after, prefix, prefix + "\U0010ffff", limit)).fetchall()
        return [agent for (agent,) in rows]

    def bury(self, agent: str, sequence: int, at: float) -> None:
        with self._guard():
            mac = self._mac(b"tombstone", agent, "<qd", sequence, at)
            self._db.execute("INSERT OR REPLACE INTO tombstones VALUES (?, ?, ?, ?)", (agent, sequence, at, mac))
            self._db.execute("DELETE FROM let_go WHERE agent = ?", (agent,))

    def buried(self, agent: str) -> int:
        with self._guard():
            row = self._db.execute("SELECT sequence, at, mac FROM tombstones WHERE agent = ?", (agent,)).fetchone()
        return row[0] if row is not None and self._signed(row[2], b"tombstone", agent, "<qd", row[0], row[1]) else 0

    def tombstones(self) -> list[str]:
        with self._guard():
            return [agent for (agent,) in self._db.execute("SELECT agent FROM tombstones ORDER BY sequence")]

    def prune(self, before: float, keep: int) -> int:
        with self._guard():
            least = self._one("SELECT sequence FROM tombstones ORDER BY sequence DESC LIMIT 1 OFFSET ?", keep) or 0
            gone = self._one("SELECT MAX(sequence) FROM tombstones WHERE at < ? OR sequence <= ?", before, least)
            self._db.execute("DELETE FROM tombstones WHERE at < ? OR sequence <= ?", (before, least))
        return gone or 0

    def place(self, agent: str) -> Place | None:
        with self._guard():
            row = self._db.execute("SELECT epoch, role, mac FROM homes WHERE agent = ?", (agent,)).fetchone()
        return self._place(agent, *row) if row is not None else None

    def set_place(self, agent: str, place: Place) -> None:
        with self._guard():
            mac = self._mac(b"home", agent, "<qq", *place)
            self._db.execute("INSERT OR REPLACE INTO homes VALUES (?, ?, ?, ?)", (agent, *place, mac))

    def heard_of(self, after: str, limit: int) -> list[str]:
        with self._guard():
            query = "SELECT agent FROM agents WHERE agent > ?1 UNION SELECT agent FROM homes WHERE agent > ?1 LIMIT ?2"
            return [agent for (agent,) in self._db.execute(query, (after, limit))]

    def _place(self, agent: str, epoch: int, role: int, mac: bytes) -> Place:
        if self._signed(mac, b"home", agent, "<qq", epoch, role):
            return Place(epoch, Role(role))
        logger.error("the place of agent %s does not verify: this node must be promoted again", agent)
        return Place(0, Role.SECONDARY)

    def _signed(self, mac: bytes, tag: bytes, agent: str, layout: str, *values: float) -> bool:
        """Returns whether a row's MAC verifies, and counts it as damaged if not."""
        with contextlib.suppress(TypeError, struct.error):
            if hmac.compare_digest(self._mac(tag, agent, layout, *values), mac):
                return True
        self.damaged_total += 1
        return False

    def _mac(self, tag: bytes, agent: str, layout: str, *values: float) -> bytes:
        return mac_of(self._key, tag, agent.encode(), struct.pack(layout, *values))

    # Maintenance and internals.

    def scrub(self) -> None:
        """Makes erased data unreadable: empties the write-ahead log and removes files that were set aside."""
        self._cache.clear()
        if self._folder is None:
            return
        with self._guard():
            self._db.execute(_EMPTY_LOG)
        for path in self._folder.glob("agents.damaged-*"):
            path.unlink(missing_ok=True)

    def shorten(self) -> None:
        """Truncates the write-ahead log, if that is possible now."""
        if self._folder is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute(_EMPTY_LOG)

    def _remember(self, key: tuple[str, int, int], content: Content) -> None:
        # A rolled back epoch may stay in the cache: it is never looked up.
        self._cache.pop(key, None)
        # A content larger than the whole cache is read each time.
        with contextlib.suppress(ValueError):
            self._cache[key] = content

    def _one(self, query: str, *values: Any) -> Any:
        row = self._db.execute(query, values).fetchone()
        return row[0] if row else None

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Translates SQLite's errors, and replaces a damaged file."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if self._folder is not None and is_damage(error):
                logger.error("agents' memory is damaged: %s", error)
                self._db.close()
                self._cache.clear()
                self._db = self._begin_anew(self._folder / NAME)
                raise Unavailable("agents' memory was damaged and has been recreated") from error
            full = isinstance(error, sqlite3.Error) and says_full(error)
            kind = MemoryFull if full else Unavailable
            raise kind(f"agents' memory cannot be used now: {error}") from error

    def _open_or_begin_anew(self, path: Path) -> sqlite3.Connection:
        try:
            return self._open(path)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if not is_damage(error):
                raise unusable(path, error) from error
            logger.error("%s is damaged: %s", path, error)
        return self._begin_anew(path)

    def _begin_anew(self, path: Path) -> sqlite3.Connection:
        """Sets the file aside, opens a new one, and copies the branches that verify."""
        self.set_aside_total += 1
        aside = _free_name(path.parent, "agents.damaged")
        for old in path.parent.glob("agents.damaged-*"):
            old.unlink(missing_ok=True)
        for suffix in ("-wal", ""):
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
        path.with_name(path.name + "-shm").unlink(missing_ok=True)
        try:
            db = self._db = self._open(path)
        except sqlite3.Error as error:
            raise unusable(path, error) from error
        saved = 0
        # An open transaction on the old file is over.
        self._inside = False
        self._actions.take_back(0)
        for head, content in salvage(aside, self._key):
            with self.transaction():
                self.put(head, content)
            saved += 1
        logger.error("the old file is %s; %d branches were taken over from it", aside, saved)
        return db

    def _open(self, path: Path | None) -> sqlite3.Connection:
        if path is not None:
            # Created here, because SQLite would make it readable for others. SQLite's other files copy its mode.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            path.chmod(0o600)
            DiskIO().sync_folder(path.parent)
        db = self._connect(path or ":memory:", timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
        try:
            prepare(db)
            try:
                # Data erased just before the last process died may still be in the log.
                db.execute(_EMPTY_LOG)
            except sqlite3.Error as error:
                if not says_full(error):
                    raise
                logger.warning("the log of agents' memory stays until the disk has room: %s", error)
            tenant = "substr(agent, 1, instr(agent || '/', '/') - 1)"
            held = db.execute(f"SELECT {tenant}, TOTAL({_BYTES}) FROM contents GROUP BY 1").fetchall()
            self._tenants = Counter({name: int(nbytes) for name, nbytes in held if nbytes})
            self._nbytes = sum(self._tenants.values())
            self._counted.clear()
        except BaseException:
            db.close()
            raise
        return db


def _free_name(folder: Path, stem: str) -> Path:
    return next(path for number in count(1) if not (path := folder / f"{stem}-{number}").exists())


def _size(content: Content) -> int:
    return len(content.tokens) + len(content.text) + len(content.messages) + ROW_BYTES


def salvage(path: Path, key: bytes) -> Iterator[tuple[Head, Content]]:
    """Yields the branches in a damaged file that SQLite can read and that verify."""
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error:
        return
    with contextlib.closing(db):
        for order in ("ASC", "DESC"):
            # From both ends: a broken page ends the scan, and the rows behind it may be whole.
            try:
                db.text_factory = lambda data: data.decode("utf-8", "replace")
                columns = {name for _, name, *_ in db.execute("PRAGMA table_info(branches)")}
                # The file may be of an earlier schema.
                heads = HEADS if "program" in columns else HEADS.replace("b.program, b.parent", "'', ''")
                for row in db.execute(f"{heads} ORDER BY b.agent {order}, b.branch {order}"):
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
        verified = hmac.compare_digest(mac_of(key, *head_fields(head, digest)), mac)
        same = verified and content_digest(tokens, text, messages) == digest
        return Content(tokens, text.decode(), messages) if same else None
    except (TypeError, AttributeError, UnicodeDecodeError):
        return None


def read_head(row: tuple[Any, ...], key: bytes) -> Head | None:
    """Returns the head in a row of `HEADS`, None if it does not verify."""
    (
        agent,
        branch,
        epoch,
        model,
        root,
        turns,
        injected,
        messages,
        created,
        used,
        digest,
        mac,
        program,
        parent,
        *lengths,
    ) = row
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
            program=program,
            parent=parent,
        )
        return head if hmac.compare_digest(mac_of(key, *head_fields(head, digest)), mac) else None
    except (TypeError, AttributeError, UnicodeEncodeError, struct.error):
        return None


def head_fields(head: Head, digest: bytes) -> tuple[bytes, ...]:
    numbers = struct.pack("<qqqqq", head.branch, head.epoch, head.turns, head.injected, head.messages)
    times = struct.pack("<dd", head.created, head.used)
    # Rows of schema 3 have neither, and keep their MACs.
    origin = (head.program.encode(), head.parent.encode()) if head.program or head.parent else ()
    return b"branch", head.agent.encode(), numbers, times, head.model + head.files, head.root, digest, *origin


def mac_of(key: bytes, *fields: bytes) -> bytes:
    """Returns a MAC over the fields. Lengths are included, so two different rows never give the same input."""
    return _digest(hmac.new(key, b"satchel.agents.1", hashlib.sha256), fields)


def content_digest(*parts: bytes) -> bytes:
    return _digest(hashlib.sha256(), parts)


def _digest(hasher: Any, parts: Iterable[bytes]) -> bytes:
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()
