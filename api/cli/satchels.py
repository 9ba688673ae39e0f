"""`satchel agents pack` and `unpack`: an agent as a file. A passphrase never leaves this machine."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Optional

import typer

from ...cluster.errors import InvalidRequest, SatchelError
from .agents import AgentArgument, app, endpoint, json_of, path_of, print_json
from .models import HomeOption, JsonOption

if TYPE_CHECKING:
    import httpx

_TRANSFER_S = 600.0
"""How long the server may pack or take in a satchel before it answers."""

_PIECE_BYTES = 2**20

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The satchel, such as alice.satchel.")]
PassphraseOption = Annotated[bool, typer.Option("--passphrase", help="Encrypt it; the passphrase is asked for.")]
PassphraseFileOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--passphrase-file", metavar="PATH", help="Read the passphrase from a file's first line."),
]


@app.command()
def pack(
    context: typer.Context,
    agent: AgentArgument,
    file: FileArgument,
    passphrase: PassphraseOption = False,
    passphrase_file: PassphraseFileOption = None,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Pack an agent into a file: what was said, token ids, KV and what pictures became."""
    from ...cluster.trust import locked

    if file.exists():
        raise InvalidRequest(f"{file} is there already")
    secret = _secret(passphrase_file, again=True) if passphrase or passphrase_file is not None else None
    with (
        endpoint(home or context.obj, _TRANSFER_S) as session,
        session.stream("GET", path_of(agent, "/satchel")) as answer,
    ):
        if not answer.is_success:
            answer.read()
            json_of(answer)
        nbytes = int(answer.headers["content-length"])
        with _shown(f"{agent}: {_size(nbytes)}", nbytes, quiet=json) as advance:
            pieces = _counted(answer.iter_bytes(_PIECE_BYTES), advance)
            _write(file, pieces if secret is None else locked.lock(pieces, secret))
    if json:
        print_json({"id": agent, "object": "agent.satchel", "file": str(file), "bytes": file.stat().st_size})
    else:
        print(f"{agent} is packed into {file} ({_size(file.stat().st_size)}{', encrypted' if secret else ''})")


@app.command()
def unpack(
    context: typer.Context,
    file: FileArgument,
    new: Annotated[str, typer.Option("--as", metavar="AGENT", help="Another id than the one it was packed with.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace the agent of that id.")] = False,
    passphrase_file: PassphraseFileOption = None,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Bring an agent in from a file. An encrypted one asks for its passphrase."""
    from ...actors.kv_store.satchels.layout import read_manifest
    from ...cluster.trust import locked

    with _opened(file) as source:
        nbytes = os.fstat(source.fileno()).st_size
        is_locked = locked.is_locked(source.read(len(locked.MAGIC)))
        source.seek(0)
        plain: Iterable[bytes] = iter(lambda: source.read(_PIECE_BYTES), b"")
        if is_locked:
            secret = _secret(passphrase_file, again=False)
            plain, nbytes = locked.unlock(source, secret), locked.unlocked_size(nbytes)
        begun = _Begun(plain)
        packed = read_manifest(begun, nbytes)
        agent = new or packed.agent
        with (
            endpoint(home or context.obj, _TRANSFER_S) as session,
            _shown(f"{agent}: {_size(nbytes)}", nbytes, quiet=json) as advance,
        ):
            done = _put(session, agent, _counted(begun.all(), advance), nbytes, replace=replace)
    if json:
        print_json(done)
        return
    kv = done["kv"]
    print(f"{agent} is here: branches: {done['branches']}, entries of KV: {kv['entries']} of {kv['of']}")
    if kv["why_not"]:
        print(f"The rest is computed again when it is needed: {kv['why_not']}")


def _put(session: httpx.Client, agent: str, pieces: Iterator[bytes], nbytes: int, *, replace: bool) -> Any:
    answer = session.put(
        path_of(agent, "/satchel"),
        params={"replace": "true"} if replace else {},
        headers={"Content-Length": str(nbytes), "Content-Type": "application/octet-stream"},
        content=pieces,
    )
    return json_of(answer)


class _Begun:
    """Pieces of which the first bytes are read before all of them are sent."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._held, self._place = iter(pieces), bytearray(), 0

    def read(self, count: int) -> bytes:
        while len(self._held) < self._place + count and (piece := next(self._pieces, b"")):
            self._held += piece
        self._place += count
        return bytes(self._held[self._place - count : self._place])

    def all(self) -> Iterator[bytes]:
        """Yields all pieces, those that were read too."""
        yield bytes(self._held)
        yield from self._pieces


def _write(file: Path, pieces: Iterable[bytes]) -> None:
    """Writes a new file for this user alone. It has its name only when all of it is there."""
    unfinished = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                for piece in pieces:
                    opened.write(piece)
                opened.flush()
                os.fsync(opened.fileno())
            # Unlike a renaming this replaces nothing.
            os.link(unfinished, file)
        finally:
            unfinished.unlink()
    except OSError as error:
        raise SatchelError(f"{file} cannot be written: {error.strerror or error}") from None


def _opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror or error}") from None


def _secret(file: Path | None, *, again: bool) -> bytes:
    """Returns the passphrase, from a file or the terminal, where a new one is asked for twice."""
    if file is not None:
        with _opened(file) as opened:
            found = opened.readline(4096).rstrip(b"\r\n")
    elif not sys.stdin.isatty():
        raise InvalidRequest("there is no terminal to ask for the passphrase: --passphrase-file has it")
    else:
        found = getpass.getpass("Passphrase: ").encode()
        if again and getpass.getpass("Again: ").encode() != found:
            raise InvalidRequest("these are two passphrases")
    if not found:
        raise InvalidRequest("the passphrase is empty")
    return found


def _counted(pieces: Iterable[bytes], advance: Any) -> Iterator[bytes]:
    for piece in pieces:
        advance(len(piece))
        yield piece


@contextlib.contextmanager
def _shown(what: str, nbytes: int, *, quiet: bool) -> Iterator[Any]:
    """Shows the size first, then in a terminal a bar."""
    from .progress import ProgressDisplay

    if quiet:
        yield lambda count: None
        return
    display, done = ProgressDisplay(), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        display.report(what, min(1.0, done / max(1, nbytes)))

    display.report(what, 0.0)
    try:
        yield advance
    finally:
        display.close()


def _size(nbytes: int) -> str:
    from .views import size

    return size(nbytes)
