"""Pulls KV blocks from another node into this node's store.

A pull that fails brings fewer blocks than wanted, but never wrong ones, and it always ends by its deadline.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ....cluster.errors import InvalidRecord, QueueFull
from ...protocol.entries import BLOCK_TOKENS, ID_BYTES, TAIL_TOKENS_MAX, pack_tokens
from ..disk.io import DiskIO
from ..disk.store import DiskStore
from .machine.block_messages import CHAIN_MAX, TAILS_MAX
from .machine.link_auth import NONCE_BYTES, Initiator
from .machine.pull_terms import Event, PullLimits
from .machine.pull_wire import Wanted
from .pull_session import Address, PullCancel, PullResult, PullSession
from .pull_writer import Keeper, PullWriter


@dataclass(eq=False)
class _Running:
    owner: str
    cancel: PullCancel


class BlockPuller:
    """Pulls blocks into one node's store. All methods are safe from any thread.

    Args:
        store: this node's; close it after this.
        cluster_key: at least 16 bytes, equal on all nodes.
        node: this node's name.
        session: of the store's writers, under which uncommitted files are kept.
        limits: of each pull.
        pulls_max: at the same time, including those whose last file is still being written.
        wall_clock: seconds since 1970, written into files.
        io: the disk.
        keeper: commits pulled segments and decides on their owners; None for the store itself.

    Raises:
        LinkError: the key is too short, or the name is invalid.
    """

    def __init__(
        self,
        store: DiskStore,
        cluster_key: bytes,
        node: str,
        session: str,
        *,
        limits: PullLimits | None = None,
        pulls_max: int = 4,
        wall_clock: Callable[[], float] = time.time,
        io: DiskIO | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self._keeper = keeper
        Initiator(cluster_key, node, node, bytes(NONCE_BYTES))
        self._store, self._session = store, session
        self._limits = limits or PullLimits()
        self._wall_clock, self._io = wall_clock, io
        self._key, self._node, self._pulls_max = cluster_key, node, pulls_max
        self._changed = threading.Condition()
        self._running: set[_Running] = set()
        self._closed = False

    def pull(
        self,
        wanted: Wanted,
        source: str,
        addresses: Sequence[Address],
        *,
        deadline_s: float,
        owner: str = "",
        cancel: PullCancel | None = None,
    ) -> PullResult:
        """Fetches and commits the wanted entries that this node lacks. Blocks for at most `deadline_s` seconds.

        Args:
            wanted: what to fetch.
            source: the name of the node that has it.
            addresses: where its `BlockServer` listens, numeric, the fastest link first.
            deadline_s: when to stop; what has not arrived by then is left.
            owner: the agent whose tokens these are, "" for none.
            cancel: ends the pull from another thread.

        Raises:
            InvalidRecord: `wanted` is malformed.
            QueueFull: there are `pulls_max` pulls already, or this was closed.
            DiskError: this node's store fails.
        """
        wanted = _checked(wanted)
        running = _Running(owner, cancel or PullCancel())
        with self._changed:
            if self._closed or len(self._running) >= self._pulls_max:
                raise QueueFull("too many blocks are being fetched already")
            self._running.add(running)

        def initiator() -> Initiator:
            return Initiator(self._key, self._node, source, secrets.token_bytes(NONCE_BYTES))

        def writer(tell: Callable[[Event], None]) -> PullWriter:
            nonlocal ended_by_writer
            created = PullWriter(
                self._store,
                self._session,
                wanted,
                owner,
                wall_clock=self._wall_clock,
                tell=tell,
                ended=lambda: self._end(running),
                io=self._io,
                keeper=self._keeper,
            )
            ended_by_writer = True
            return created

        ended_by_writer = False
        try:
            initiator()
            session = PullSession(
                self._store,
                wanted,
                owner,
                addresses,
                self._limits,
                running.cancel,
                initiator,
                writer,
                self._keeper,
            )
            return session.run(deadline_s)
        finally:
            # Otherwise the writer calls `_end`, perhaps later.
            if not ended_by_writer:
                self._end(running)

    def pulling(self) -> int:
        """Returns the number of running pulls."""
        with self._changed:
            return len(self._running)

    def cancel_owner(self, owner: str, wait_s: float) -> bool:
        """Ends the pulls for `owner`. Once they have ended, nothing more is committed and the store can forget it.

        Returns:
            Whether they all ended within `wait_s`.
        """
        return self._cancel(lambda running: running.owner == owner, wait_s)

    def close(self, wait_s: float = 5.0) -> bool:
        """Ends all pulls and refuses new ones. Returns whether all ended, so that the store may be closed."""
        with self._changed:
            self._closed = True
        return self._cancel(lambda running: True, wait_s)

    def _cancel(self, chosen: Callable[[_Running], bool], wait_s: float) -> bool:
        with self._changed:
            mine = {running for running in self._running if chosen(running)}
        for running in mine:
            running.cancel.cancel()
        with self._changed:
            return self._changed.wait_for(lambda: not mine & self._running, wait_s)

    def _end(self, running: _Running) -> None:
        with self._changed:
            self._running.discard(running)
            self._changed.notify_all()


def _checked(wanted: Wanted) -> Wanted:
    """Returns `wanted` with `rest` cut to the longest possible tail. Raises `InvalidRecord` if it is malformed."""
    ids = (wanted.model, wanted.root, *wanted.chain)
    if not all(isinstance(value, bytes) and len(value) == ID_BYTES for value in ids):
        raise InvalidRecord(f"ids have {ID_BYTES} bytes")
    if len(wanted.chain) > CHAIN_MAX or len(set(wanted.chain)) != len(wanted.chain):
        raise InvalidRecord(f"a chain is up to {CHAIN_MAX} blocks, each once")
    if wanted.tokens is not None and len(wanted.tokens) < len(wanted.chain) * BLOCK_TOKENS:
        raise InvalidRecord("the tokens end before the chain")
    if not 0 <= wanted.tails_max <= TAILS_MAX:
        raise InvalidRecord(f"a pull has up to {TAILS_MAX} tails")
    # No tail is longer.
    rest = wanted.rest[:TAIL_TOKENS_MAX]
    pack_tokens(rest)
    return replace(wanted, rest=rest)
