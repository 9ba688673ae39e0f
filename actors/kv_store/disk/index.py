"""The index of segment files: SQLite, with a MAC over every row that describes an entry.

All methods need the store's lock. An entry's row is *live* if lookups of its id return it. Other rows (second or
replaced copies) are kept so that their bytes can be found and erased.

Rows change only inside `transaction`. SQLite's errors pass unchanged, for `folder.typed`. A row whose MAC does not
verify is counted and never returned.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....cluster.errors import DamagedIndex, InvalidRecord
from ...protocol.entries import NOBODY, OWNER_BYTES, EntryRecord, Location, mac, same_mac, split_owners, tenant_of_tag
from .folder import primary_code
from .io import DiskIO
from .tenant_files import TenantFiles

SCHEMA = 2
"""2: owner tags include the tenant. KV of schema 1 is recomputed."""
BUSY_WAIT_S = 5.0

_TABLES = (
    "CREATE TABLE numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL, mac BLOB NOT NULL) STRICT",
    "CREATE TABLE segments (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, model BLOB NOT NULL,"
    " bytes INTEGER NOT NULL, used INTEGER NOT NULL, erase INTEGER NOT NULL) STRICT",
    "CREATE TABLE entries (segment INTEGER NOT NULL, slot INTEGER NOT NULL, id BLOB NOT NULL, parent BLOB NOT NULL,"
    " tail INTEGER NOT NULL, live INTEGER NOT NULL, certain INTEGER NOT NULL, facts BLOB NOT NULL,"
    " owners BLOB NOT NULL, mac BLOB NOT NULL, PRIMARY KEY (segment, slot)) STRICT",
    "CREATE TABLE doomed (name TEXT PRIMARY KEY, model BLOB NOT NULL, bytes INTEGER NOT NULL) STRICT",
    "CREATE INDEX segments_by_use ON segments (used)",
    "CREATE UNIQUE INDEX live_ids ON entries (id) WHERE live = 1",
    "CREATE INDEX dead_ids ON entries (id) WHERE live = 0",
    "CREATE INDEX live_tails ON entries (parent) WHERE live = 1 AND tail = 1",
)

_ROW = (
    "SELECT s.number, s.name, s.model, e.slot, e.id, e.parent, e.tail, e.live, e.certain, e.facts, e.owners, e.mac"
    " FROM entries e JOIN segments s ON s.number = e.segment "
)

_DAMAGE = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_FORMAT,
)


@dataclass(frozen=True, slots=True)
class IndexRow:
    """An entry in a segment. `certain` says whether `record.owners` is complete."""

    segment: int
    name: str
    model: bytes
    slot: int
    live: bool
    certain: bool
    record: EntryRecord

    @property
    def location(self) -> Location:
        entry = self.record
        return Location(
            entry.id,
            entry.parent,
            self.model,
            self.name,
            self.slot,
            entry.tail,
            entry.tokens,
            entry.digest,
            entry.window_from,
            entry.snapshot,
            entry.nbytes,
        )


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """A file in the index. `used` orders files by their last use. `erase` says that its dead entries must be erased."""

    number: int
    name: str
    model: bytes
    nbytes: int
    used: int
    erase: bool


class Index:
    """An open index.

    Args:
        path: of the database.
        key: for the MACs.
        io: told of every commit, for tests.

    Attributes:
        empty: whether `create` must still make the tables.
        tenants: the files of each tenant as of the last transaction, filled by `count_tenants`.

    Raises:
        DamagedIndex: it is damaged or of another version, and must be rebuilt.
        sqlite3.Error: it cannot be opened now.
    """

    def __init__(self, path: Path, key: bytes, io: DiskIO) -> None:
        self._path = path
        self._key = key
        self._io = io
        self.bad_rows_total = 0
        # Segments in which an entry died since the last call of `lonely`.
        self._died: set[int] = set()
        self.tenants = TenantFiles()
        # Files that the open transaction adds and removes.
        self._moved: list[tuple[int, bytes, int, int] | int] = []
        # Created here, because SQLite would make it readable for others.
        if not path.exists():
            path.touch(mode=0o600)
        self._database = sqlite3.connect(path, timeout=BUSY_WAIT_S, isolation_level=None, check_same_thread=False)
        try:
            self.empty = self._prepare()
        except sqlite3.Error as error:
            self._database.close()
            if primary_code(error) in _DAMAGE:
                raise DamagedIndex(f"{path}: {error}") from error
            raise
        except UnicodeDecodeError as error:
            self._database.close()
            raise DamagedIndex(f"{path}: {error}") from error
        except BaseException:
            self._database.close()
            raise

    def _prepare(self) -> bool:
        """Configures and checks the database. Returns whether it has no tables yet."""
        run = self._database.execute
        run("PRAGMA trusted_schema = OFF")
        run("PRAGMA cell_size_check = ON")
        run("PRAGMA secure_delete = ON")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        # On macOS only this makes SQLite's own syncs reach the drive.
        run("PRAGMA fullfsync = ON")
        run("PRAGMA temp_store = MEMORY")
        tables = run("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY rowid").fetchall()
        if not tables:
            return True
        if [sql for (sql,) in tables] != list(_TABLES):
            raise DamagedIndex(f"{self._path} has other tables")
        problems = [text for (text,) in run("PRAGMA integrity_check(1)").fetchall()]
        if problems != ["ok"]:
            raise DamagedIndex(f"{self._path}: {problems[:1]}")
        if self.number("schema") != SCHEMA:
            raise DamagedIndex(f"{self._path} has another version")
        self.number("epoch")
        return False

    def close(self) -> None:
        self._database.close()

    def checkpoint(self) -> None:
        """Moves the write-ahead log into the database and empties it, so that deleted rows are gone from the disk."""
        self._io.step("sql checkpoint", self._path)
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits all changes of the block durably, or none."""
        self._io.step("sql begin", self._path)
        self._moved.clear()
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._io.step("sql commit", self._path)
            self._database.execute("COMMIT")
            for file in self._moved:
                if isinstance(file, int):
                    self.tenants.remove(file)
                else:
                    self.tenants.add(*file)
        except BaseException:
            # SQLite rolls back by itself if the disk is full.
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def create(self, epoch: int) -> None:
        """Creates the tables."""
        for sql in _TABLES:
            self._database.execute(sql)
        self.set_number("schema", SCHEMA)
        self.set_number("epoch", epoch)

    def number(self, name: str) -> int:
        """Returns a stored number.

        Raises:
            DamagedIndex: it is absent or does not verify.
        """
        row = self._database.execute("SELECT value, mac FROM numbers WHERE name = ?", (name,)).fetchone()
        if row is None or not same_mac(row[1], self._number_mac(name, row[0])):
            raise DamagedIndex(f"{self._path} has no {name}")
        return row[0]

    def set_number(self, name: str, value: int) -> None:
        row = (name, value, self._number_mac(name, value))
        self._database.execute("INSERT OR REPLACE INTO numbers VALUES (?, ?, ?)", row)

    def _number_mac(self, name: str, value: int) -> bytes:
        return mac(self._key, b"number", name.encode(), str(value).encode())

    def segments(self) -> list[SegmentRow]:
        """Returns all segments, the least recently used first."""
        rows = self._database.execute(
            "SELECT number, name, model, bytes, used, erase FROM segments ORDER BY used, number"
        )
        return [_segment(row) for row in rows]

    def segment(self, name: str) -> SegmentRow | None:
        query = "SELECT number, name, model, bytes, used, erase FROM segments WHERE name = ?"
        row = self._database.execute(query, (name,)).fetchone()
        return _segment(row) if row else None

    def numbered(self, number: int) -> SegmentRow | None:
        query = "SELECT number, name, model, bytes, used, erase FROM segments WHERE number = ?"
        row = self._database.execute(query, (number,)).fetchone()
        return _segment(row) if row else None

    def before(self, number: int) -> int | None:
        """Returns the number of the segment with the parent of this segment's first entry."""
        query = "SELECT parent FROM entries WHERE segment = ? ORDER BY slot LIMIT 1"
        row = self._database.execute(query, (number,)).fetchone()
        return self.segment_of(row[0]) if row else None

    def count_tenants(self) -> None:
        """Fills `tenants` from all segments."""
        self.tenants.load(self.files_of_tenants())

    def files_of_tenants(self) -> list[tuple[int, bytes, int, int]]:
        """Returns (number, tenant, bytes, order of use) of all segments."""
        owner = f"substr(owners, 1, {OWNER_BYTES})"
        first = f"SELECT {owner} FROM entries WHERE segment = s.number AND {owner} <> ? ORDER BY slot LIMIT 1"
        query = f"SELECT s.number, ({first}), s.bytes, s.used FROM segments s"
        rows = self._database.execute(query, (NOBODY,)).fetchall()
        return [(number, tenant_of_tag(tag or NOBODY), nbytes, used) for number, tag, nbytes, used in rows]

    def add_segment(self, name: str, model: bytes, nbytes: int, used: int, tenant: bytes = b"") -> int:
        """Adds a segment and returns its number.

        Args:
            tenant: `SegmentRecord.tenant`.
        """
        values = (name, model, nbytes, used)
        cursor = self._database.execute(
            "INSERT INTO segments (name, model, bytes, used, erase) VALUES (?, ?, ?, ?, 0)", values
        )
        assert cursor.lastrowid is not None
        self._moved.append((cursor.lastrowid, tenant, nbytes, used))
        return cursor.lastrowid

    def set_used(self, used: Mapping[int, int]) -> None:
        values = ((counter, number) for number, counter in used.items())
        self._database.executemany("UPDATE segments SET used = ? WHERE number = ?", values)

    def set_erase(self, numbers: Iterable[int], erase: bool = True) -> None:
        values = ((int(erase), number) for number in numbers)
        self._database.executemany("UPDATE segments SET erase = ? WHERE number = ?", values)

    def remove_segment(self, segment: SegmentRow, *, doom: bool = True) -> None:
        """Removes a segment and its entries; with `doom` its file is listed as still to be unlinked."""
        self._database.execute("DELETE FROM entries WHERE segment = ?", (segment.number,))
        self._database.execute("DELETE FROM segments WHERE number = ?", (segment.number,))
        self._moved.append(segment.number)
        if doom:
            row = (segment.name, segment.model, segment.nbytes)
            self._database.execute("INSERT OR REPLACE INTO doomed VALUES (?, ?, ?)", row)

    def doomed(self) -> list[tuple[str, bytes, int]]:
        """Returns (name, model, bytes) of the files that are still to be unlinked."""
        return self._database.execute("SELECT name, model, bytes FROM doomed ORDER BY name").fetchall()

    def undoom(self, names: Iterable[str]) -> None:
        self._database.executemany("DELETE FROM doomed WHERE name = ?", ((name,) for name in names))

    def add(self, row: IndexRow) -> None:
        """Inserts the row, or replaces the one in its slot."""
        if not row.live:
            self._died.add(row.segment)
        entry = row.record
        facts, owners = entry.facts(), b"".join(entry.owners)
        values = (row.segment, row.slot, entry.id, entry.parent, int(entry.tail), int(row.live), int(row.certain))
        seal = self._row_mac(row.name, row.model, row.slot, row.live, row.certain, facts, owners)
        # Not OR REPLACE, which would also remove another live row of the same id.
        query = (
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (segment, slot) DO UPDATE SET"
            " live = excluded.live, certain = excluded.certain, facts = excluded.facts, owners = excluded.owners,"
            " mac = excluded.mac"
        )
        self._database.execute(query, (*values, facts, owners, seal))

    def kill(self, row: IndexRow) -> IndexRow:
        """Makes the row dead, and returns the new row."""
        dead = replace(row, live=False)
        self.add(dead)
        return dead

    def live(self, entry_id: bytes) -> IndexRow | None:
        """Returns the live row of an id."""
        rows = self._rows("WHERE e.id = ? AND e.live = 1", (entry_id,))
        return rows[0] if rows and rows[0].record.id == entry_id else None

    def live_ids(self) -> list[bytes]:
        """Returns the ids of all live entries."""
        return [entry for (entry,) in self._database.execute("SELECT id FROM entries WHERE live = 1")]

    def live_tails(self, parent: bytes) -> list[IndexRow]:
        return self._rows("WHERE e.parent = ? AND e.live = 1 AND e.tail = 1", (parent,))

    def dead(self, entry_id: bytes) -> list[IndexRow]:
        return self._rows("WHERE e.id = ? AND e.live = 0", (entry_id,))

    def of_segment(self, number: int) -> list[IndexRow]:
        return self._rows("WHERE e.segment = ? ORDER BY e.slot", (number,))

    def owned(self, tag: bytes) -> list[IndexRow]:
        """Returns the rows of an owner, and those whose owners may be incomplete."""
        rows = self._rows("WHERE instr(e.owners, ?) > 0 OR e.certain = 0", (tag,))
        return [row for row in rows if not row.certain or tag in row.record.owners]

    def owners(self) -> set[bytes]:
        """Returns the tags of all owners, including those of rows that do not verify."""
        tags: set[bytes] = set()
        for (packed,) in self._database.execute("SELECT DISTINCT owners FROM entries"):
            # The owners of a damaged row may be unreadable.
            with contextlib.suppress(InvalidRecord):
                tags.update(split_owners(packed))
        return tags

    def uncertain(self) -> list[int]:
        """Returns the numbers of segments with live entries whose owners may be incomplete."""
        query = "SELECT DISTINCT segment FROM entries WHERE certain = 0 AND live = 1 ORDER BY segment"
        return [number for (number,) in self._database.execute(query)]

    def segment_of(self, entry_id: bytes) -> int | None:
        """Returns the number of the segment with the live entry of an id."""
        row = self._database.execute("SELECT segment FROM entries WHERE id = ? AND live = 1", (entry_id,)).fetchone()
        return row[0] if row else None

    def size(self) -> tuple[int, int, int]:
        """Returns (bytes, files, entry rows), including files that are still to be unlinked."""
        query = (
            "SELECT (SELECT total(bytes) FROM segments) + (SELECT total(bytes) FROM doomed),"
            " (SELECT count(*) FROM segments) + (SELECT count(*) FROM doomed), (SELECT count(*) FROM entries)"
        )
        nbytes, files, rows = self._database.execute(query).fetchone()
        return int(nbytes), files, rows

    def counts(self) -> tuple[int, int, int]:
        """Returns (rows, live entries, live tails)."""
        query = "SELECT count(*), total(live), total(live AND tail) FROM entries"
        rows, live, tails = self._database.execute(query).fetchone()
        return rows, int(live), int(tails)

    def lonely(self) -> list[SegmentRow]:
        """Returns the segments that lost their last live entry since the last call."""
        query = (
            "SELECT number, name, model, bytes, used, erase FROM segments WHERE number = ? AND NOT EXISTS"
            " (SELECT 1 FROM entries WHERE segment = number AND live = 1)"
        )
        died, self._died = sorted(self._died), set()
        rows = (self._database.execute(query, (number,)).fetchone() for number in died)
        return [_segment(row) for row in rows if row]

    def sparse(self) -> list[SegmentRow]:
        """Returns the segments with fewer live than dead entries, or marked for erasing."""
        query = (
            "SELECT s.number, s.name, s.model, s.bytes, s.used, s.erase FROM segments s"
            " LEFT JOIN entries e ON e.segment = s.number"
            " GROUP BY s.number HAVING s.erase OR total(e.live) < total(NOT e.live) ORDER BY s.number"
        )
        return [_segment(row) for row in self._database.execute(query).fetchall()]

    def bad_segments(self) -> set[int]:
        """Returns the numbers of segments without rows or with a row that does not verify. Reads every row."""
        bad = {number for (number,) in self._database.execute("SELECT number FROM segments")}
        sound: dict[int, bool] = {}
        for values in self._database.execute(_ROW):
            sound[values[0]] = self._row(values) is not None and sound.get(values[0], True)
        return {number for number in bad if not sound.get(number, False)}

    def remove_strangers(self) -> None:
        """Deletes rows whose segment does not exist."""
        self._database.execute("DELETE FROM entries WHERE segment NOT IN (SELECT number FROM segments)")

    def remove_unreadable(self, entry_id: bytes) -> None:
        """Deletes a live row that does not verify, before a good one is added, and marks its segment for erasing."""
        rows = self._database.execute("SELECT segment FROM entries WHERE id = ? AND live = 1", (entry_id,)).fetchall()
        self.set_erase(number for (number,) in rows)
        self._died.update(number for (number,) in rows)
        self._database.execute("DELETE FROM entries WHERE id = ? AND live = 1", (entry_id,))

    def integrity(self) -> list[str]:
        """Returns the problems that SQLite's integrity check reports."""
        problems = [text for (text,) in self._database.execute("PRAGMA integrity_check(10)")]
        return [] if problems == ["ok"] else problems

    def _rows(self, where: str, values: tuple[Any, ...]) -> list[IndexRow]:
        rows = [self._row(row) for row in self._database.execute(_ROW + where, values).fetchall()]
        self.bad_rows_total += rows.count(None)
        return [row for row in rows if row is not None]

    def _row(self, values: tuple[Any, ...]) -> IndexRow | None:
        number, name, model, slot, entry_id, parent, tail, live, certain, facts, owners, seal = values
        if not same_mac(seal, self._row_mac(name, model, slot, live == 1, certain == 1, facts, owners)):
            return None
        try:
            record = EntryRecord.from_facts(facts, split_owners(owners))
        except InvalidRecord:
            return None
        if (record.id, record.parent, record.tail) != (entry_id, parent, tail == 1):
            return None
        return IndexRow(number, name, model, slot, live == 1, certain == 1, record)

    def _row_mac(
        self, name: str, model: bytes, slot: int, live: bool, certain: bool, facts: bytes, owners: bytes
    ) -> bytes:
        place = f"{slot} {int(live)} {int(certain)}".encode()
        return mac(self._key, b"row", name.encode(), model, place, facts, owners)


def _segment(values: tuple[Any, ...]) -> SegmentRow:
    number, name, model, nbytes, used, erase = values
    return SegmentRow(number, name, model, nbytes, used, bool(erase))
