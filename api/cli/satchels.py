"""`satchel agents pack` and `unpack`: an agent as a file. A passphrase never leaves this machine."""

from __future__ import annotations

import contextlib
import getpass
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ...cluster.errors import InvalidRequest
from .agents import AgentArgument, TenantOption, app, endpoint, json_of, path_of
from .options import HomeOption, JsonOption
from .printing import print_json

if TYPE_CHECKING:
    import httpx

_TRANSFER_S = 600.0
"""How long the server may pack or unpack a satchel before it answers."""

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The satchel, such as alice.satchel.")]
PassphraseOption = Annotated[bool, typer.Option("--passphrase", help="Encrypt the file; the passphrase is asked for.")]
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
    tenant: TenantOption = "",
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Pack an agent into a file: transcripts, token ids, KV and image embeddings."""
    from ..agents import satchel_files

    satchel_files.check_new(file)
    secret = _secret(passphrase_file, again=True) if passphrase or passphrase_file is not None else None
    with (
        endpoint(home or context.obj, _TRANSFER_S, tenant) as session,
        session.stream("GET", path_of(agent, "/satchel")) as answer,
    ):
        if not answer.is_success:
            answer.read()
            json_of(answer)
        nbytes = int(answer.headers["content-length"])
        with _shown(f"{agent}: {_size(nbytes)}", nbytes, quiet=json) as advance:
            satchel_files.write_new(file, _counted(answer.iter_bytes(satchel_files.PIECE_BYTES), advance), secret)
    if json:
        print_json({"id": agent, "object": "agent.satchel", "file": str(file), "bytes": file.stat().st_size})
    else:
        print(f"{agent} is packed into {file} ({_size(file.stat().st_size)}{', encrypted' if secret else ''})")


@app.command()
def unpack(
    context: typer.Context,
    file: FileArgument,
    new: Annotated[
        str, typer.Option("--as", metavar="AGENT", help="A new id (else the one that it was packed with).")
    ] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace an existing agent of that id.")] = False,
    passphrase_file: PassphraseFileOption = None,
    tenant: TenantOption = "",
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Unpack an agent from a file. If the file is encrypted, the passphrase is asked for."""
    from ..agents.satchel_files import opened_satchel

    with opened_satchel(file, lambda: _secret(passphrase_file, again=False)) as packed:
        agent, nbytes = new or packed.agent, packed.nbytes
        with (
            endpoint(home or context.obj, _TRANSFER_S, tenant) as session,
            _shown(f"{agent}: {_size(nbytes)}", nbytes, quiet=json) as advance,
        ):
            done = _put(session, agent, _counted(packed.pieces, advance), nbytes, replace=replace)
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


def _secret(file: Path | None, *, again: bool) -> bytes:
    """Returns the passphrase from a file, or from the terminal, which asks for a new one twice."""
    if file is not None:
        from ..agents.satchel_files import open_file

        with open_file(file) as opened:
            found = opened.readline(4096).rstrip(b"\r\n")
    elif not sys.stdin.isatty():
        raise InvalidRequest("there is no terminal to ask for the passphrase: use --passphrase-file")
    else:
        found = getpass.getpass("Passphrase: ").encode()
        if again and getpass.getpass("Again: ").encode() != found:
            raise InvalidRequest("the two passphrases differ")
    if not found:
        raise InvalidRequest("the passphrase is empty")
    return found


def _counted(pieces: Iterable[bytes], advance: Any) -> Iterator[bytes]:
    for piece in pieces:
        advance(len(piece))
        yield piece


@contextlib.contextmanager
def _shown(what: str, nbytes: int, *, quiet: bool) -> Iterator[Any]:
    """Prints the size, then shows a progress bar if the output is a terminal."""
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
    from .tables import size

    return size(nbytes)
