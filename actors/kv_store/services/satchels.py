"""Packs agents into files, and unpacks such files. A file is verified as a whole before anything in it is used."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ....cluster.config.config import Config
from ....cluster.errors import (
    AgentExists,
    AgentNotFound,
    DiskFull,
    InvalidRequest,
    QuotaExceeded,
    RequestTooLarge,
    SatchelError,
    Unavailable,
)
from ...protocol.store_messages import AskUnpack, Content, Head, Limits, Packed, Unpacked
from ..agents.claims import Branch
from ..disk.folder import typed
from ..disk.io import DiskIO
from ..disk.quotas import tenant_of
from ..satchels.layout import CarriedBranch, SatchelReader
from ..satchels.packing import kv_of, manifest_of, write_satchel
from ..satchels.unpacking import KVTaker, Renamed, TakenKV, check_words
from .node_memory import NodeMemory
from .ownership import OwnedKeeper

logger = logging.getLogger(__name__)

AT_A_TIME = 4
"""Satchels that are packed or unpacked at the same time."""

STALE_S = 3600.0

LOANS_MAX = 64
"""Agents of other nodes that are borrowed for packing at the same time."""

FORGED = "another cluster has packed it, and only a key made with --admin may bring in its KV"


@dataclass
class _Loan:
    """A borrowed agent. `had` are its entries that were here before, None if the agent stays here; `since` is a time of
    the event loop."""

    had: frozenset[bytes] | None
    since: float
    users: int = 0


class Satchels:
    """Made on the event loop that it lives on.

    Args:
        cluster_key: the key by which the cluster recognizes satchels that it packed.
        belongs_here: whether this node should have a copy of an agent, given the node where that lives.
        kept: awaited with an unpacked agent once it is on the disk.
        forgotten: awaited with each agent that was replaced.
        changed: called with an agent that is no longer here.
    """

    def __init__(
        self,
        config: Config,
        memory: NodeMemory,
        cluster_key: bytes,
        *,
        belongs_here: Callable[[str, str], Awaitable[bool]],
        kept: Callable[[str], Awaitable[object]],
        forgotten: Callable[[str], Awaitable[object]],
        changed: Callable[[str], object],
    ) -> None:
        self._config, self._timing, self._cluster_key = config, memory.timing, cluster_key
        self._work, self._database, self._agents = memory.work, memory.database, memory.agents
        self._roles, self._quotas, self._disk = memory.roles, memory.quotas, memory.disk
        self._belongs_here, self._kept, self._forgotten, self._changed = belongs_here, kept, forgotten, changed
        self._loans: dict[str, _Loan] = {}
        self._lending = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._under_way = 0
        self._io = DiskIO()
        self._folder = None if memory.folder is None else memory.folder / "satchels"
        if self._folder is not None:
            # Files that an earlier process left.
            shutil.rmtree(self._folder, ignore_errors=True)

    def room(self, agent: str, nbytes: int, limits: Limits | None = None) -> str:
        """Returns the path of a new file for a satchel of `nbytes`. The caller removes the file.

        Raises:
            DiskFull: it does not fit.
            RequestTooLarge, QuotaExceeded: it is larger than any satchel, or this tenant's satchel, may be.
            Unavailable: this node keeps nothing on disk.
        """
        folder, most = self._folder, self._config.satchel_bytes_max
        if folder is None:
            raise Unavailable("this node keeps nothing on disk", retry_after_s=None)
        if nbytes > most:
            raise RequestTooLarge(f"a satchel of {nbytes:,} bytes is over {most:,} (satchel_bytes_max)")
        quota = (limits or {}).get(tenant_of(agent))
        if quota is not None and nbytes > quota:
            raise QuotaExceeded(f"a satchel of {nbytes:,} bytes is more than the {quota:,} that the key may keep here")
        with typed(f"making room for a satchel in {folder}"):
            self._io.folder(folder.parent)
            self._io.folder(folder)
            self._sweep(folder)
            space = self._io.space(folder)
        reserve = min(self._config.disk_reserve_bytes, space.total // 8)
        if nbytes > space.free - reserve:
            free = f"{max(0, space.free - reserve):,} are free besides the reserve (disk_reserve_bytes)"
            raise DiskFull(f"a satchel of {nbytes:,} bytes does not fit on the disk of {folder}: {free}")
        return str(folder / secrets.token_hex(16))

    def _sweep(self, folder: Path) -> None:
        """Removes files that were not written to for long: the process that asked for them has ended."""
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_S:
                    self._io.unlink(path)

    # Agents of other nodes that are packed here.

    async def borrow(self, agent: str, home: str) -> None:
        """Begins to borrow an agent that lives on `home`. `give_back` removes what comes of it from now on, unless a
        copy belongs here.

        Raises:
            Unavailable: too many are borrowed.
        """
        async with self._lending:
            now = self._loop.time()
            for name in [name for name, loan in self._loans.items() if now - loan.since > STALE_S]:
                # The process that asked for it has ended.
                await self._end(name)
            loan = self._loans.get(agent)
            if loan is None:
                if len(self._loans) >= LOANS_MAX:
                    raise Unavailable(f"{LOANS_MAX} agents are being packed now", retry_after_s=5.0)
                here = await self._belongs_here(agent, home)
                here = here or bool(await self._work.answer(lambda: self._agents.heads(agent)))
                store = self._disk.store
                had = frozenset() if store is None else await asyncio.to_thread(store.owned, agent)
                loan = self._loans[agent] = _Loan(None if here else had, now)
            loan.users += 1

    async def give_back(self, agent: str) -> None:
        """Ends the loan: the satchel is packed, or will not be."""
        async with self._lending:
            if (loan := self._loans.get(agent)) is not None:
                loan.users -= 1
                if loan.users <= 0:
                    await self._end(agent)

    async def _end(self, agent: str) -> None:
        had = self._loans[agent].had
        try:
            # The agent may have moved here meanwhile.
            if had is not None and await self._work.answer(lambda: self._roles.let_go_copy(agent)):
                self._changed(agent)
                if self._disk.owned is not None:
                    await self._disk.owned.let_go(agent, had)
        finally:
            del self._loans[agent]

    # Packing.

    async def pack(self, agent: str, replicas: Sequence[Sequence[bytes]] = ()) -> Packed:
        """Writes what this node has of the agent into a new file, which the caller removes.

        Args:
            replicas: (files id, model id) of further replicas whose KV of the same tokens is packed too.

        Raises:
            AgentNotFound: this node has nothing of it.
            DiskFull, RequestTooLarge: as `room`.
        """

        def work() -> list[tuple[Head, Content]]:
            heads = self._agents.heads(agent)
            return [(head, content) for head in heads if (content := self._agents.content(head)) is not None]

        with self._one_more():
            branches = await self._work.answer(work)
            if not branches:
                raise AgentNotFound(f"there is no agent {agent.partition('/')[2]!r}", param="id")
            return await asyncio.to_thread(self._pack, agent, branches, replicas)

    def _pack(
        self, agent: str, branches: Sequence[tuple[Head, Content]], replicas: Sequence[Sequence[bytes]]
    ) -> Packed:
        chains: list[tuple[int, Branch]] = []
        store = self._disk.store
        there = {*(store.models() if store is not None else [])}
        for number, (head, content) in enumerate(branches):
            chains.append((number, Branch(head.model, head.root, content.tokens)))
            others = there & {model for files, model in replicas if files == head.files} - {head.model}
            for model in sorted(others):
                chains.append((number, Branch(model, self._agents.root_of(agent, model), content.tokens)))
        locations = [] if store is None else kv_of(store, [branch for _, branch in chains])
        name, now_s = agent.partition("/")[2], time.time()
        manifest = manifest_of(name, branches, chains, locations, now_s)
        contents = [content for _, content in branches]
        words = sum(head.nbytes for head, _ in branches)
        path = Path(self.room(agent, words + manifest.entries_bytes))
        try:
            with typed("writing a satchel"), _created(self._io, path) as file:
                lease_s = self._timing.block_lease_s
                write_satchel(file.write, self._cluster_key, manifest, contents, store, locations, lease_s)
            return Packed(str(path), path.stat().st_size, len(branches), len(locations))
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    # Taking in.

    async def unpack(self, asked: AskUnpack) -> Unpacked:
        """Unpacks an agent from a file of `room`. The file stays.

        Raises:
            InvalidSatchel: the file is no satchel, or damaged. Nothing has changed.
            AgentExists: there is such an agent, and the request does not replace it.
            QuotaExceeded, InvalidRequest, MemoryFull: there is no room for its transcripts.
        """
        if self._folder is None or Path(asked.path).parent != self._folder:
            raise InvalidRequest("a satchel is taken in from its folder")
        self._quotas.note(asked.limits)
        with self._one_more():
            branches, renamed, native = await asyncio.to_thread(self._verified, asked.path, asked.agent)
            replaced = await self._take_words(asked, branches)
            await self._disk.make_room_for(asked.agent)
            if replaced:
                self._disk.forgotten(asked.agent)
                await self._forgotten(asked.agent)
            taken = TakenKV(why_not=FORGED)
            if native or asked.trusted:
                taken = await asyncio.to_thread(self._take_kv, asked, renamed)
            await self._kept(asked.agent)
            self._disk.on_touched(asked.agent)
        return Unpacked(len(branches), taken.entries, taken.of, taken.nbytes, taken.why_not, replaced)

    def _verified(self, path: str, agent: str) -> tuple[list[tuple[Head, Content]], Renamed, bool]:
        """Reads and checks the whole file."""
        with self._reading(path) as reader:
            check_words(reader.manifest, reader.contents)
            renamed = Renamed(reader.manifest, reader.contents, lambda model: self._agents.root_of(agent, model))
            for entry in reader.entries():
                renamed.of(entry.model, entry.record)
            pairs = zip(reader.manifest.branches, reader.contents, strict=True)
            heads = [
                (_head_of(agent, number, branch, content), content) for number, (branch, content) in enumerate(pairs)
            ]
            return heads, renamed, reader.native

    @contextmanager
    def _reading(self, path: str) -> Iterator[SatchelReader]:
        with typed("reading a satchel"), Path(path).open("rb", buffering=0) as file:
            size = Path(path).stat().st_size
            most = self._config.transcripts_bytes_max
            yield SatchelReader(file, size, self._cluster_key, words_bytes_max=most)

    async def _take_words(self, asked: AskUnpack, branches: Sequence[tuple[Head, Content]]) -> bool:
        """Returns whether it replaced an agent."""
        agent = asked.agent
        existed = False

        def work() -> None:
            nonlocal existed
            self._roles.check(agent)
            with self._database.transaction():
                existed = bool(self._agents.heads(agent)) or self._agents.busy(agent, "", time.monotonic())
                if existed and not asked.replace:
                    raise AgentExists(f"there is an agent {agent.partition('/')[2]!r} already", param="replace")
                if existed:
                    # So that running turns cannot add to the old agent's branches.
                    self._agents.bury(agent, time.time())
                    self._roles.bury(agent, 0)
                self._agents.bring(agent, branches, time.monotonic())
                self._roles.settle(agent)
                self._quotas.check(agent)

        await self._work.answer(work)
        return existed

    def _take_kv(self, asked: AskUnpack, renamed: Renamed) -> TakenKV:
        store, owned = self._disk.store, self._disk.owned
        if store is None or owned is None:
            return TakenKV(why_not="this node keeps no KV on disk")
        keeper = OwnedKeeper(store, owned, self._loop)
        taker = KVTaker(store, asked.agent, frozenset(asked.models), keeper.commit, keeper.touch)
        try:
            with self._reading(asked.path) as reader:
                return taker.take(reader, renamed)
        except SatchelError as error:
            # The transcripts are unpacked, and KV can be computed.
            logger.warning("KV of agent %s stays in its satchel: %s", asked.agent, error.message)
            taker.taken.why_not = error.message
            return taker.taken

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        if self._under_way >= AT_A_TIME:
            raise Unavailable(f"{AT_A_TIME} satchels are being packed or unpacked now", retry_after_s=5.0)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1


def _head_of(agent: str, number: int, branch: CarriedBranch, content: Content) -> Head:
    return Head(
        agent=agent,
        branch=number,
        epoch=branch.use,
        model=branch.model,
        root=b"",
        turns=branch.turns,
        injected=branch.injected,
        messages=branch.messages,
        tokens=len(content.tokens) // 4,
        nbytes=0,
        created=branch.created,
        used=branch.used,
        files=branch.files,
        program=branch.program,
        parent=branch.parent,
    )


@contextmanager
def _created(io: DiskIO, path: Path) -> Iterator[BinaryIO]:
    """Creates a file that only this user can read."""
    with open(io.create(path), "wb", buffering=2**20) as file:  # noqa: PTH123
        yield file
