"""The file of agents' memory: its tables, how it is opened, and how damage shows."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ...cluster.errors import ClusterError, HomeInUse, SatchelError

SCHEMA_VERSION = 3

_STATEMENTS = [
    "CREATE TABLE branches (agent TEXT, branch INTEGER, epoch INTEGER, model BLOB, root BLOB, turns INTEGER, "
    "injected INTEGER, messages INTEGER, created REAL, used REAL, digest BLOB, mac BLOB, "
    "PRIMARY KEY (agent, branch)) WITHOUT ROWID",
    "CREATE TABLE contents (agent TEXT, branch INTEGER, tokens BLOB, text BLOB, messages BLOB, "
    "PRIMARY KEY (agent, branch))",
    "CREATE TABLE agents (agent TEXT PRIMARY KEY, changed INTEGER) WITHOUT ROWID",
    "CREATE INDEX quiet ON agents (changed, agent)",
    "CREATE TABLE tombstones (agent TEXT PRIMARY KEY, sequence INTEGER, at REAL, mac BLOB) WITHOUT ROWID",
    "CREATE TABLE homes (agent TEXT PRIMARY KEY, epoch INTEGER, role INTEGER, mac BLOB) WITHOUT ROWID",
    "CREATE TABLE let_go (agent TEXT PRIMARY KEY, sequence INTEGER) WITHOUT ROWID",
]
"""The schema, as SQLite writes it down."""

_FROM_1 = [
    "ALTER TABLE contents RENAME TO before",
    _STATEMENTS[1],
    "INSERT INTO contents SELECT b.agent, c.* FROM before c JOIN branches b ON b.branch = c.branch",
    "DROP TABLE before",
    _STATEMENTS[-2],
]
"""From the first schema, in which branches of two nodes could not stand beside each other."""

_FROM_2 = [_STATEMENTS[-1]]
"""From the second one, which did not know who had to make room."""


def is_damage(error: Exception) -> bool:
    """Whether the file itself is at fault, and neither the disk, another process nor the caller."""
    if isinstance(error, UnicodeDecodeError):
        # SQLite's message cites a damaged name.
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def unusable(path: Path, error: Exception) -> SatchelError:
    """What to say of a file that cannot be opened and is not damaged."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return HomeInUse(f"another process uses {path}")
    return ClusterError(f"cannot use {path}: {error}")


class _Damaged(sqlite3.DatabaseError):
    """What SQLite reads without an error and is wrong all the same."""

    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


def prepare(db: sqlite3.Connection) -> None:
    """Make a connection durable and this process's own, and the tables there and whole.

    Raises:
        ClusterError: a newer version wrote it.
        sqlite3.Error: it cannot be used, or `is_damage`.
    """
    db.text_factory = lambda data: data.decode("utf-8", "replace")
    # One process for the file's whole life, so no shared memory beside it, and a second opener is told so.
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    db.execute("PRAGMA cell_size_check = ON")
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA journal_mode = WAL").fetchone()
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA fullfsync = ON")
    db.execute("PRAGMA checkpoint_fullfsync = ON")
    db.execute("PRAGMA secure_delete = ON").fetchone()
    db.execute("BEGIN IMMEDIATE")
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise ClusterError(f"agents' memory was written by a newer version of Satchel (its schema is {version})")
        if version == 0:
            if db.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0]:
                raise _Damaged("tables without a version")
            for statement in _STATEMENTS:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        else:
            if version < SCHEMA_VERSION:
                for statement in [*(_FROM_1 if version == 1 else ()), *_FROM_2]:
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            # SQLite would take a damaged name for a name.
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
