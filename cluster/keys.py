"""API keys of the endpoint. Each is a tenant of its own.

A key is shown once, when it is made; the home keeps only its scrypt hash. Once the file of keys exists every caller
needs a key, even if all of them have been revoked.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from .config.units import STRICT, Bytes, Count
from .errors import ConfigError, InvalidRequest, KeysDamaged
from .home import Home, prepare_home, read_json, write_private, write_private_json

OWNER = "default"
"""The tenant of the user who runs the server: the command line, Python handles, and every caller if there are no
keys."""

KEY_BEGINS = "sk-satchel-"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_SECRET = re.compile(KEY_BEGINS + r"([0-9a-f]{8})-([A-Za-z0-9_-]{43})", re.ASCII)
_AGENT = re.compile(r"[A-Za-z0-9._:@-]{1,128}", re.ASCII)
_OWNER_ID = "0" * 8

_SCRYPT = {"n": 2**14, "r": 8, "p": 1, "dklen": 32}
"""A hash takes about 50 ms and 16 MiB."""

_CHECKED_MAX = 1024
"""Capacity of each cache of checked secrets, the right and the wrong ones."""


@validated(frozen=True, config=STRICT)
class KeyLimits:
    """A tenant's limits; None is no limit of its own.

    `rows_max` counts answers that are being computed. `memory_bytes_max` limits its KV that each replica keeps in
    memory for reuse, `disk_bytes_max` its agents' transcripts and KV on each node's disk. If `models` is empty it may
    use all.
    """

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Of prompts and answers together, including cached tokens."""
    rows_max: Count | None = None
    priority_max: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    memory_bytes_max: Bytes | None = None
    disk_bytes_max: Bytes | None = None
    models: tuple[str, ...] = ()


@validated(frozen=True, config=STRICT)
class Key:
    """One key. `id` is the secret's public part; `salt` and `digest` are hexadecimal; times are Unix time."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    salt: str
    digest: str
    admin: bool
    limits: KeyLimits
    created: float
    revoked: float | None = None


_KEYS = TypeAdapter(tuple[Key, ...])


def read_keys(home: Home) -> tuple[Key, ...] | None:
    """Returns every key that was ever made, None if none was.

    Raises:
        KeysDamaged: the file is not what was written.
    """
    if not home.keys_file.exists():
        return None
    try:
        return _KEYS.validate_python((read_json(home.keys_file) or {})["keys"])
    except (KeyError, ValidationError):
        message = f"{home.keys_file} is damaged; restore it, or remove it and make new keys"
        raise KeysDamaged(message) from None


def create_key(home: Home, name: str, *, admin: bool = False, **limits: Any) -> tuple[Key, str]:
    """Makes a key. Returns it with its secret, which is stored nowhere.

    Args:
        limits: the fields of `KeyLimits`.

    Raises:
        ConfigError: the name is invalid or taken, or a limit is out of range.
    """
    if NAME.fullmatch(name) is None:
        raise ConfigError("a key's name is 1 to 64 of A-Z a-z 0-9 . _ - and begins with a letter or a digit")
    try:
        checked = KeyLimits(**limits)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if name == OWNER and (checked.memory_bytes_max is not None or checked.disk_bytes_max is not None):
        raise ConfigError(
            f"{OWNER!r} is the tenant of whoever runs the server, whose memory and disk have no such limit"
        )
    with _changing(home) as keys:
        if any(key.name.lower() == name.lower() and key.revoked is None for key in keys):
            raise ConfigError(f"there is a key {name!r} already; revoke it first, or choose another name")
        taken = {_OWNER_ID, *(key.id for key in keys)}
        while (key_id := secrets.token_hex(4)) in taken:
            pass
        secret, salt = f"{KEY_BEGINS}{key_id}-{secrets.token_urlsafe(32)}", secrets.token_bytes(16)
        key = Key(
            name=name,
            id=key_id,
            salt=salt.hex(),
            digest=_digest(secret, salt).hex(),
            admin=admin,
            limits=checked,
            created=time.time(),
        )
        keys.append(key)
    return key, secret


def revoke_key(home: Home, name: str) -> Key:
    """Revokes a key by its name or id. A running endpoint refuses it from the next request on.

    Raises:
        ConfigError: there is no such key.
    """
    with _changing(home) as keys:
        for index, key in enumerate(keys):
            if name in (key.name, key.id) and key.revoked is None:
                keys[index] = replace(key, revoked=time.time())
                return keys[index]
    raise ConfigError(f"there is no key {name!r} that is not revoked")


def remove_keys(home: Home) -> None:
    """Removes all keys. Then callers of an endpoint that only this machine can reach need none. The tenants' memory
    stays; a new key of the same name gets it back.

    Raises:
        InvalidRequest: there are none.
    """
    with _locked(home):
        try:
            home.keys_file.unlink()
        except FileNotFoundError:
            raise InvalidRequest("there are no keys") from None


def _locked(home: Home) -> FileLock:
    prepare_home(home)
    return FileLock(home.run / "keys.lock", mode=0o600, fallback_to_soft=False)


@contextmanager
def _changing(home: Home) -> Iterator[list[Key]]:
    """Yields the keys for changes; writes them back if the block ends without an error. One process at a time."""
    with _locked(home):
        before = read_keys(home) or ()
        keys = list(before)
        yield keys
        if tuple(keys) != before:
            write_private_json(home.keys_file, {"keys": [asdict(key) for key in keys]})


def _digest(secret: str, salt: bytes) -> bytes:
    return hashlib.scrypt(secret.encode(), salt=salt, **_SCRYPT)


def check_agent_id(agent: str) -> None:
    """Checks the name that a tenant gives an agent.

    Raises:
        InvalidRequest: the name is not a valid agent id.
    """
    if _AGENT.fullmatch(agent) is None:
        raise InvalidRequest("agent_id must be 1 to 128 of the characters A-Z a-z 0-9 . _ : @ -", param="agent_id")


def write_owner_key(home: Home) -> None:
    """Makes the secret by which the endpoint recognizes this user's command line; a new one at every start."""
    write_private(home.owner_key_file, f"{KEY_BEGINS}{_OWNER_ID}-{secrets.token_urlsafe(32)}")


def owner_key(home: Home) -> str:
    """Returns the secret of this user's command line, "" if there is none."""
    try:
        return home.owner_key_file.read_text(encoding="ascii")
    except OSError:
        return ""


_OWNER_KEY = Key(name=OWNER, id=_OWNER_ID, salt="", digest="", admin=True, limits=KeyLimits(), created=0.0)


class KeyRing:
    """The keys as the endpoint sees them, read again as soon as the file changes.

    Args:
        required: whether callers need a key even if none was ever made.
    """

    def __init__(self, home: Home, *, required: bool) -> None:
        self._home = home
        self._required = required
        self._keys: dict[str, Key] | None = None
        self._damaged = False
        self._version: tuple[int, int, int] | None = None
        # Secrets are looked up by keyed hashes, so that timing does not tell how close a guess was.
        self._blind = secrets.token_bytes(32)
        # Plain dictionaries, as they are read without the guard.
        self._right: OrderedDict[bytes, str] = OrderedDict()
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        self._guard = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether callers need no key."""
        self._look()
        return self._keys is None and not self._required and not self._damaged

    def has(self, name: str) -> bool:
        """Whether there is a key of this name that is not revoked."""
        self._look()
        return any(key.name == name for key in (self._keys or {}).values())

    def find(self, key_id: str) -> Key | None:
        """Returns the key with this id, None if there is none or it is revoked."""
        self._look()
        return _OWNER_KEY if key_id == _OWNER_ID else (self._keys or {}).get(key_id)

    def remembered(self, secret: str) -> Key | Literal[False] | None:
        """Returns the key of a secret that was checked before; False for a wrong one, None if `check` must decide.
        Takes microseconds."""
        self._look()
        parts = _SECRET.fullmatch(secret)
        if parts is None or parts[1] not in {_OWNER_ID, *(self._keys or ())}:
            return False
        if parts[1] == _OWNER_ID:
            # It has 256 random bits, so it needs no slow hash.
            right = hmac.compare_digest(secret.encode(), owner_key(self._home).encode())
            return _OWNER_KEY if right else False
        blind = self._blinded(secret)
        if (key_id := self._right.get(blind)) is not None:
            return (self._keys or {}).get(key_id, False)
        return False if blind in self._wrong else None

    def check(self, secret: str) -> Key | None:
        """Returns the key of a secret, None for a wrong one. Takes 50 ms; one caller at a time."""
        with self._guard:
            known = self.remembered(secret)
            if known is not None:
                return known if isinstance(known, Key) else None
            key = (self._keys or {}).get(secret.split("-")[2])
            blind = self._blinded(secret)
            if key is None:
                return None
            right = hmac.compare_digest(_digest(secret, bytes.fromhex(key.salt)), bytes.fromhex(key.digest))
            if right:
                _remember(self._right, blind, key.id)
            else:
                _remember(self._wrong, blind, None)
            return key if right else None

    def _blinded(self, secret: str) -> bytes:
        return hashlib.blake2b(secret.encode(), key=self._blind, digest_size=16).digest()

    def _look(self) -> None:
        version = _version(self._home.keys_file)
        if version == self._version:
            return
        try:
            keys = read_keys(self._home)
            self._damaged = False
        except KeysDamaged:
            # Only the owner is let in.
            keys, self._damaged = (), True
        self._keys = None if keys is None else {key.id: key for key in keys if key.revoked is None}
        self._version = version
        self._wrong.clear()


def _remember(table: OrderedDict[bytes, Any], blind: bytes, value: Any) -> None:
    table[blind] = value
    if len(table) > _CHECKED_MAX:
        table.popitem(last=False)


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError:
        return (0, 0, 0)
    return found.st_ino, found.st_mtime_ns, found.st_size
