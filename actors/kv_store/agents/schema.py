"""The schema of the agents' database: its tables, their migrations, and what is damage."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from ....cluster.errors import ClusterError, HomeInUse, SatchelError

SCHEMA_VERSION = 4

_STATEMENTS = [
    "CREATE TABLE branches (agent TEXT, branch INTEGER, epoch INTEGER, model BLOB, root BLOB, turns INTEGER, "
    "injected INTEGER, messages INTEGER, created REAL, used REAL, digest BLOB, mac BLOB, "
    "program TEXT, parent TEXT, PRIMARY KEY (agent, branch)) WITHOUT ROWID",
    "CREATE TABLE contents (agent TEXT, branch INTEGER, tokens BLOB, text BLOB, messages BLOB, "
    "PRIMARY KEY (agent, branch))",
    "CREATE TABLE agents (agent TEXT PRIMARY KEY, changed INTEGER) WITHOUT ROWID",
    "CREATE INDEX quiet ON agents (changed, agent)",
    "CREATE TABLE tombstones (agent TEXT PRIMARY KEY, sequence INTEGER, at REAL, mac BLOB) WITHOUT ROWID",
    "CREATE TABLE homes (agent TEXT PRIMARY KEY, epoch INTEGER, role INTEGER, mac BLOB) WITHOUT ROWID",
    "CREATE TABLE let_go (agent TEXT PRIMARY KEY, sequence INTEGER) WITHOUT ROWID",
]
"""The schema, exactly as SQLite stores it."""

_FROM_1 = [
    "ALTER TABLE contents RENAME TO before",
    _STATEMENTS[1],
    "INSERT INTO contents SELECT b.agent, c.* FROM before c JOIN branches b ON b.branch = c.branch",
    "DROP TABLE before",
    _STATEMENTS[-2],
]
"""Migrates schema 1, in which branches of two nodes could collide."""

_FROM_2 = [_STATEMENTS[-1]]
"""Migrates schema 2, which did not record evicted agents."""

_FROM_3 = [
    "ALTER TABLE branches RENAME TO before",
    _STATEMENTS[0],
    "INSERT INTO branches SELECT *, '', '' FROM before",
    "DROP TABLE before",
]
"""Migrates schema 3, which did not record programs and parents."""


# One process keeps the file, so SQLite needs no shared memory, and a second process gets SQLITE_BUSY.
_SETTINGS = ["locking_mode = EXCLUSIVE", "cell_size_check = ON", "trusted_schema = OFF", "journal_mode = WAL"]
_SETTINGS += ["synchronous = FULL", "fullfsync = ON", "checkpoint_fullfsync = ON", "secure_delete = ON"]


def is_damage(error: Exception) -> bool:
    """Returns whether the file itself is at fault, not the disk, another process or the caller."""
    if isinstance(error, UnicodeDecodeError):
        # Python cannot decode a damaged name in SQLite's message.
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def says_full(error: sqlite3.Error) -> bool:
    """Returns whether SQLite reports a full disk, for the database or for its shared memory, which is a file too."""
    code = getattr(error, "sqlite_errorcode", None) or 0
    return code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE


def unusable(path: Path, error: Exception) -> SatchelError:
    """Returns the error for a file that cannot be opened and is not damaged."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return HomeInUse(f"another process uses {path}")
    return ClusterError(f"cannot use {path}: {error}")


class _Damaged(sqlite3.DatabaseError):
    """Damage that SQLite does not report itself."""

    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


def prepare(db: sqlite3.Connection) -> None:
    """Makes a connection durable and exclusive, and creates, migrates and checks the tables.

    Raises:
        ClusterError: a newer version wrote the file.
        sqlite3.Error: the file cannot be used, or is damaged (`is_damage`).
    """
    db.text_factory = lambda data: data.decode("utf-8", "replace")
    for setting in _SETTINGS:
        db.execute(f"PRAGMA {setting}").fetchone()
    db.execute("BEGIN IMMEDIATE")
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise ClusterError(f"agents' memory was written by a newer version of Satchel (its schema is {version})")
        if version == 0:
            if db.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0]:
                raise _Damaged("tables without a version")
            _upgrade(db, _STATEMENTS)
        else:
            if version < SCHEMA_VERSION:
                _upgrade(db, [*(_FROM_1 if version == 1 else ()), *(_FROM_2 if version < 3 else ()), *_FROM_3])
            # SQLite would accept a damaged table name.
            statements = [sql for (sql,) in db.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")]
            if sorted(statements) != sorted(_STATEMENTS):
                raise _Damaged("other tables than there should be")
            if (verdict := db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
                raise _Damaged(str(verdict))
        db.execute("DELETE FROM contents WHERE (agent, branch) NOT IN (SELECT agent, branch FROM branches)")
        db.execute("DELETE FROM agents WHERE agent NOT IN (SELECT agent FROM branches)")
        db.execute("INSERT OR IGNORE INTO agents SELECT agent, MAX(epoch) FROM branches GROUP BY agent")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _upgrade(db: sqlite3.Connection, statements: Iterable[str]) -> None:
    for statement in statements:
        db.execute(statement)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
