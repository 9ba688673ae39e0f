"""The store actor of a node: agents' memory, on disk. A thin shell: Ray outside, `Agents` over `AgentDatabase` inside.

All work on the database is done by one thread, so the event loop answers meanwhile and no two changes meet. Every
answer is `{"result": ...}` or `{"error": ...}` with an error on the wire.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ...cluster.config import Config
from ...cluster.errors import AgentBusy, AgentElsewhere, AgentNotFound, MemoryFull, SatchelError
from ...cluster.keys import OWNER
from ..protocol.block_ids import BLOCK_TOKENS, is_shared, root_id, scope_of
from ..protocol.entries import TOKEN_BYTES
from .agents.agents import Agents
from .agents.branches import AgentLimits, Commit, Content, Head, Outcome, main_branch
from .agents.claims import Branch, Claims
from .agents.database import AgentDatabase
from .agents.homes import Homes, Place, Role
from .disk.quotas import Limits, Quotas, tenant_of
from .disk.shelf import DiskLimits
from .disk.store import DiskStore
from .disk_calls import DiskCalls, kept_on
from .ownership import Ownership, branches_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

WAITING_MAX = 64
"""How many turns of one agent may wait for the one before them."""

TOGETHER_MAX = 64
"""How many turns may share one transaction."""

LOCK_WAIT_S = 10.0
"""How long a dying predecessor may still hold the folder of KV."""

OPEN_RETRY_S, OPEN_RETRY_S_MAX = 0.5, 15.0
"""How soon a disk tier that could not be opened is tried again: every time later, and this late at most."""

ROOM_TRIES = 3
"""How often a full disk is given room for agents' words, at the cost of KV, before they are refused."""

COPIED_MAX = 10_000
"""How many copies of agents may wait for a disk tier."""

Answer = dict[str, Any]

KEPT = ("replaced", "opened")


@dataclass
class _Waiting:
    """Somebody in line for an agent's turn. A caller that gives up cannot cancel its call, but abandons the turn."""

    turn: str
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    gone: bool = False


@dataclass
class _Ending:
    """A turn that waits to be committed."""

    agent: str
    commit: Commit
    outcome: Answer | None = None
    failure: Exception | None = None


class KVStoreActor(DiskCalls):
    """Keeps what agents said and heard. Named `kv_store` in the cluster's namespace.

    Args:
        folder: where it is kept (`<home>/kv`); None keeps it in memory, for as long as this process lives.
        disk: the node's KV, where it is not to be opened in `folder`.

    Raises:
        ClusterError: the folder cannot be used, or belongs to a newer version.
    """

    def __init__(self, config: Config, folder: str | Path | None = None, disk: DiskStore | None = None) -> None:
        self._timing = config.timing
        self._turn_wait_s = config.timeouts.turn_wait_s
        session = f"s{uuid.uuid4().hex}"
        self._folder = Path(folder) if folder is not None else None
        self._disk_limits = DiskLimits(
            bytes_max=config.disk_bytes_max,
            reserve_bytes=config.disk_reserve_bytes,
            lease_s_max=config.timing.block_lease_s,
        )
        self._disk_error = ""
        self._disk: DiskStore | None = None
        self._owned: Ownership | None = None
        self._tending_disk: asyncio.Task[None] | None = None
        # Agents that were copied while no KV was kept on disk.
        self._copied: dict[tuple[str, str], None] = {}
        self._session = session
        if disk is None and self._folder is not None:
            disk = self._open_folder(LOCK_WAIT_S)
        self._database = AgentDatabase(Path(folder) if folder is not None else None)

        def root_of(agent: str, model: bytes) -> bytes:
            tenant, _, name = agent.partition("/")
            # A scope of one request is shared with nobody, so no later turn finds its blocks.
            scope = scope_of(config.share, tenant, name, "")
            return root_id(model, scope) if is_shared(scope) else b""

        self._agents = Agents(
            self._database,
            AgentLimits(branches_max=config.branches_max, bytes_max=config.transcripts_bytes_max),
            root_of,
            # A million changes a second behind the clock, however often the file begins anew.
            start=int(time.time()) << 20,
            on_let_go=_say_let_go,
        )
        self._quotas = Quotas(self._agents.nbytes_of, OWNER)
        self._homes = Homes(self._database, self._agents.end_turn)
        self._worker = ThreadPoolExecutor(1, "agents")
        self._endings: deque[_Ending] = deque()
        self._lines: dict[str, deque[_Waiting]] = {}
        if disk is not None:
            self._take_disk(disk)

    def _open_folder(self, lock_wait_s: float) -> DiskStore | None:
        """The disk tier, or None where that cannot be now: agents' words are kept all the same."""
        folder = self._folder
        assert folder is not None
        try:
            store = DiskStore(folder, session=self._session, limits=self._disk_limits, lock_wait_s=lock_wait_s)
        except SatchelError as error:
            if error.message != self._disk_error:
                logger.error("no KV is kept on disk: %s", error.message)
            self._disk_error = error.message
            return None
        self._disk_error = ""
        try:
            # Before agents' words are opened, which may want some of it.
            store.keep_reserve()
        except SatchelError as error:
            logger.warning("KV gives nothing of the disk back: %s", error.message)
        # Where KV lay before it shared its key with agents' memory; nobody can read it any more.
        shutil.rmtree(folder / "blocks", ignore_errors=True)
        return store

    def _take_disk(self, disk: DiskStore) -> Ownership:
        """Answer for the disk tier from now on. Who may have what in it."""
        self._disk = disk
        self._owned = Ownership(disk, self._ask, self._timing.claim_wait_s)
        self.open_disk(disk, self._session, self._owned)
        return self._owned

    def _disk_came(self, disk: DiskStore, owned: Ownership) -> None:
        """The disk tier has been opened after all."""

    def _tend_disk_too(self) -> None:
        """Have the disk tier looked after, and opened where it is not. Cheap after the first call."""
        if self._tending_disk is None and (self._folder is not None or self._disk is not None):
            self._tending_disk = asyncio.create_task(self._open_and_tend())

    async def _open_and_tend(self) -> None:
        wait_s = OPEN_RETRY_S
        while self._disk is None:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, OPEN_RETRY_S_MAX)
            disk = await asyncio.to_thread(self._open_folder, 0.0)
            if disk is not None:
                logger.warning("KV is kept on disk from now on")
                self._disk_came(disk, self._take_disk(disk))
        assert self._owned is not None
        copied, self._copied = self._copied, {}
        with suppress(SatchelError):
            # At once: what was forgotten meanwhile goes now, but for what copies stand on.
            await asyncio.gather(self._owned.ready(), *(self._owned.copied(*pair) for pair in copied))
        await self.tend_disk(self._disk)

    async def recall(self, agent: str, words: bytes, known: dict[int, int], limits: Limits | None = None) -> Answer:
        """What a stateless turn begins with.

        Args:
            words: what the model's token ids belong to; see `Head`.
            known: epochs by branch of what the caller has.
            limits: of the tenant, where the turn is to add words.

        Returns:
            `{"since": n, "branches": [...], "let_go": bool}`, each branch the fields of `Head` and, where it is not
            known, `token_ids`, `text` and `transcript` (JSON). `let_go` is whether it said something before and had to
            make room for others. Or an error (`QuotaExceeded`).
        """
        self._quotas.note(limits)

        def work() -> Answer:
            self._homes.check(agent)
            if limits:
                self._quotas.check(agent)
            since, found = self._agents.recall(agent, words, known)
            branches = [_branch(head, content) for head, content in found]
            return {"since": since, "branches": branches, "let_go": self._agents.let_go(agent)}

        return await self._answer(work)

    async def begin(
        self, agent: str, turn: str, words: bytes, known: dict[int, int], limits: Limits | None = None
    ) -> Answer:
        """Take the agent's turn, in the order of asking.

        Returns:
            `{"since": n, "branch": {...} | None, "let_go": bool}`: the main branch as `recall` has it, its tokens only
            if they are `words`, its transcript always; or an error (`AgentBusy` after `turn_wait_s`, `QuotaExceeded`).
        """
        self._quotas.note(limits)
        line = self._lines.setdefault(agent, deque())
        busy = {"error": AgentBusy(f"agent {_id(agent)!r} is still busy with another turn").to_wire()}
        if len(line) >= WAITING_MAX:
            return busy
        waiting = _Waiting(turn)
        line.append(waiting)
        ends = time.monotonic() + self._turn_wait_s
        try:
            while not waiting.gone:
                if line[0] is waiting:
                    answer = await self._answer(lambda: self._begin(agent, turn, words, known, adds=bool(limits)))
                    if answer.get("result", True) is not None:
                        return answer
                left = ends - time.monotonic()
                if left <= 0:
                    break
                # Woken when the turn before it ends; a lease that runs out wakes nobody.
                try:
                    await asyncio.wait_for(waiting.woken.wait(), min(1.0, left))
                except TimeoutError:
                    continue
                waiting.woken.clear()
            return busy
        finally:
            line.remove(waiting)
            self._wake(agent)

    def _begin(self, agent: str, turn: str, words: bytes, known: dict[int, int], *, adds: bool) -> Answer | None:
        self._homes.check(agent)
        if adds:
            self._quotas.check(agent)
        begun = self._agents.begin(agent, turn, time.monotonic(), self._timing.turn_lease_s)
        if begun is None:
            return None
        since, main = begun
        answer = {"since": since, "branch": None, "let_go": self._agents.let_go(agent)}
        if main is None:
            return answer
        head, content = main
        if head.words == words and known.get(head.branch) != head.epoch:
            return answer | {"branch": _branch(head, content)}
        return answer | {"branch": _branch(head, None) | {"transcript": content.messages}}

    async def renew(self, agent: str, turn: str) -> Answer:
        """A sign of life of a long turn. False when the turn was lost."""
        return await self._answer(lambda: self._agents.renew(agent, turn, time.monotonic(), self._timing.turn_lease_s))

    async def commit(
        self,
        agent: str,
        *,
        token_ids: bytes,
        text: str,
        transcript: bytes,
        limits: Limits | None = None,
        **fields: Any,
    ) -> Answer:
        """End a turn; it is on the disk when this returns.

        Args:
            transcript: the messages as JSON.
            limits: of the tenant, whose KV makes room for the words.
            fields: those of `Commit`, except its content.

        Returns:
            The fields of `Outcome`, and `copied`: whether as many other nodes have it as should.
        """
        self._quotas.note(limits)
        ending = _Ending(agent, Commit(content=Content(token_ids, text, transcript), **fields))
        self._endings.append(ending)
        try:
            # Whoever comes first takes all that wait with it: one sync of the disk ends many turns.
            await self._answer(self._end_turns)
            if ending.failure is not None:
                raise ending.failure
            assert ending.outcome is not None
            found = ending.outcome.get("result")
            if found is not None:
                await self._make_room_for(agent)
                found["copied"] = found["kind"] not in KEPT or await self._kept(agent)
            return ending.outcome
        finally:
            self._wake(agent)
            if self._owned is not None:
                self._owned.committed(agent)

    async def _kept(self, agent: str) -> bool:
        """A turn of the agent is on the disk; its commit returns after this. Whether the copies that should be are
        made."""
        return True

    def _end_turns(self) -> None:
        endings: list[_Ending] = []
        while self._endings and len(endings) < TOGETHER_MAX:
            endings.append(self._endings.popleft())
        if not endings:
            return

        def end_all() -> None:
            with self._database.transaction():
                for ending in endings:
                    self._end_turn(ending)

        try:
            self._though_full(end_all)
        except SatchelError as error:
            for ending in endings:
                ending.outcome = {"error": error.to_wire()}
                if ending.commit.turn:
                    self._agents.retake(ending.agent, ending.commit.turn, time.monotonic(), self._timing.turn_lease_s)

    def _end_turn(self, ending: _Ending) -> None:
        ending.failure = None
        try:
            self._homes.check(ending.agent)
        except AgentElsewhere as error:
            # Its own: others' turns that share the transaction are kept, and this one is not given back.
            ending.outcome = {"error": error.to_wire()}
            return
        if self._quotas.is_over(ending.agent):
            # It began before another one took them over it.
            self._agents.abandon(ending.agent, ending.commit.turn)
            ending.outcome = {"result": asdict(Outcome("over quota"))}
            return
        try:
            outcome = self._agents.commit(ending.agent, ending.commit, time.monotonic(), time.time())
            if outcome.kept:
                self._homes.settle(ending.agent)
            ending.outcome = {"result": asdict(outcome)}
        except SatchelError:
            raise
        except Exception as error:
            # What nobody can write is its caller's own trouble, and not that of the others.
            ending.failure = error

    async def abandon(self, agent: str, turn: str) -> Answer:
        """End the turn without a word, or stop waiting for it."""
        for waiting in self._lines.get(agent, ()):
            if waiting.turn == turn:
                waiting.gone = True
                waiting.woken.set()
        # After a `begin` that is under way: the worker takes both in order.
        answer = await self._answer(lambda: self._agents.abandon(agent, turn))
        self._wake(agent)
        return answer

    async def transcript(self, agent: str) -> Answer:
        """What the agent said and heard on its main branch: OpenAI messages as JSON."""
        return await self._answer(lambda: self._agents.transcript(agent))

    async def info(self, agent: str) -> Answer:
        """The agent's branches (see `agents`), or an error (`AgentNotFound`)."""

        def work() -> Answer:
            heads = self._agents.heads(agent)
            if not heads:
                raise AgentNotFound(f"there is no agent {_id(agent)!r}", param="id")
            return _described(agent, heads, self._homes.place(agent))

        return await self._answer(work)

    async def agents(self, tenant: str, after: str, limit: int) -> Answer:
        """Agents of the tenant in the order of their keys, those after the key `after`.

        Returns:
            `{"agent": key, "main": branch | None, "branches": [fields of Head, ...], "place": [home epoch, is home]}`
            each.
        """

        def work() -> Any:
            found = self._agents.list(f"{tenant}/", after, limit)
            return [_described(agent, heads, self._homes.place(agent)) for agent, heads in found]

        return await self._answer(work)

    async def blocks(self, agent: str, replicas: Sequence[Sequence[bytes]] = ()) -> Answer:
        """What each of the agent's branches stands on: `[model id, root id, [block ids], first block's tokens, [ids of
        features]]`.

        Of a branch that is shorter than a block the tokens (packed) are all that there is.

        Args:
            replicas: (files id, model id) of those that may have computed the same words under an id of their own, of
                which is told too then.
        """

        def hashed(branches: list[Branch]) -> list[Any]:
            shared = [branch for branch in branches if branch.root]
            size = BLOCK_TOKENS * TOKEN_BYTES
            stood = ((each, Claims([each])) for each in shared)
            return [[at.model, at.root, [*on.blocks], at.tokens[:size], on.features] for at, on in stood]

        return await self._of_branches(agent, hashed, replicas)

    async def disk_kept(self, agent: str) -> Answer:
        """How many entries of KV on the disk, blocks and tails, the agent's branches stand on."""
        disk = self._disk
        return {"result": 0} if disk is None else await self._of_branches(agent, lambda found: kept_on(disk, found))

    async def _of_branches(
        self, agent: str, work: Callable[[list[Branch]], Any], replicas: Sequence[Sequence[bytes]] = ()
    ) -> Answer:
        """What follows from the agent's token ids, not by the worker: it takes a while, and commits wait for that."""
        answer = await self._answer(lambda: branches_of(self._agents, agent, replicas))
        try:
            return answer if "error" in answer else {"result": await asyncio.to_thread(work, answer["result"])}
        except SatchelError as error:
            return {"error": error.to_wire()}

    async def fork(self, source: str, target: str, limits: Limits | None = None) -> Answer:
        """Copy an agent; an error (`AgentNotFound`, `AgentExists`, `QuotaExceeded`) where that cannot be. The number of
        branches."""
        self._quotas.note(limits)

        def work() -> int:
            self._homes.check(source)
            self._homes.check(target)
            with self._database.transaction():
                count = self._agents.fork(source, target, time.monotonic(), time.time())
                self._homes.settle(target)
                self._quotas.check(target)
            return count

        answer = await self._answer(work)
        if "result" not in answer:
            return answer
        await self._make_room_for(target)
        if self._owned is None:
            if len(self._copied) < COPIED_MAX:
                self._copied[source, target] = None
            return answer
        try:
            # Before anybody hears of the copy, and so may forget the source.
            await self._owned.copied(source, target)
        except SatchelError as error:
            logger.warning("agent %s computes anew what %s has on disk: %s", target, source, error.message)
        return answer

    async def forget(self, agent: str) -> Answer:
        """Erase the agent's memory; turns under way cannot commit. Returns whether there was any.

        The transcript is off the disk when this returns, and KV blocks soon after.
        """

        known = begun = False

        def work() -> bool:
            nonlocal known, begun
            with self._database.transaction():
                if begun:
                    # The rest has failed, and the agent need not be known any more.
                    self._agents.bury(agent, time.time())
                else:
                    begun = self._agents.lives(agent)
                    known = self._agents.forget(agent, time.time())
                if known:
                    self._homes.bury(agent, 0)
            self._database.scrub()
            return known

        try:
            return await self._answer(work)
        finally:
            # Even where the answer is an error: the tombstone may be there. What still has branches keeps its KV.
            self._wake(agent)
            if self._owned is not None:
                self._owned.forgotten(agent)

    async def stats(self) -> Answer:
        """Bytes and counts of the memory on this node."""

        def work() -> Answer:
            return {
                "agents_bytes": self._agents.nbytes,
                "agents_evicted_total": self._agents.evicted,
                "rows_damaged_total": self._database.damaged_total,
                "files_set_aside_total": self._database.set_aside_total,
                "disk": self._disk.stats() if self._disk is not None else {},
                "disk_error": self._disk_error,
            }

        return await self._answer(work)

    async def disk_session(self) -> Answer:
        self._tend_disk_too()
        return await super().disk_session()

    async def _limit_kv(self, limits: Limits | None) -> None:
        self._quotas.note(limits)
        for tenant in limits or ():
            await self._make_room_for(f"{tenant}/")

    async def _make_room_for(self, agent: str) -> None:
        """KV of the agent's tenant has the room that its words leave. Nothing to do for one that never had a limit."""
        tenant, disk = tenant_of(agent), self._disk
        if disk is None or not self._quotas.knows(tenant):
            return
        try:
            await self._in_thread(disk.limit, tenant, self._quotas.kv_bytes_max(tenant))
        except SatchelError as error:
            logger.warning("KV of %s stays beyond its limit for now: %s", tenant, error.message)

    async def _answer(self, work: Callable[[], Any]) -> Answer:
        self._tend_disk_too()
        try:
            if self._owned is not None:
                await self._owned.ready()
            return {"result": await self._in_order(work)}
        except SatchelError as error:
            return {"error": error.to_wire()}

    async def _in_order(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._though_full, work)

    def _though_full(self, work: Callable[[], T]) -> T:
        """Do what may write agents' words. On a full disk KV, which can be computed again, makes room for it.

        `work` may be done several times; where it raises, it has changed nothing.
        """
        for _ in range(ROOM_TRIES):
            try:
                return work()
            except MemoryFull as error:
                logger.warning("%s: KV makes room", error.message)
                self._make_room()
        return work()

    def _make_room(self) -> None:
        self._database.shorten()
        if self._disk is not None:
            try:
                self._disk.make_room()
            except SatchelError as error:
                logger.warning("KV makes no room: %s", error.message)

    async def _ask(self, work: Callable[[Agents], T]) -> T:
        return await self._in_order(lambda: work(self._agents))

    def _wake(self, agent: str) -> None:
        line = self._lines.get(agent)
        if line:
            line[0].woken.set()
        elif line is not None:
            del self._lines[agent]


def _branch(head: Head, content: Content | None) -> Answer:
    fields = asdict(head)
    if content is not None:
        fields |= {"token_ids": content.tokens, "text": content.text, "transcript": content.messages}
    return fields


def _say_let_go(agent: str) -> None:
    logger.warning("what agent %s said is let go: others need the room (transcripts_bytes_max)", agent)


def _described(agent: str, heads: list[Head], place: Place) -> Answer:
    main = main_branch(heads)
    branches = [asdict(head) for head in heads]
    return {
        "agent": agent,
        "main": main.branch if main else None,
        "branches": branches,
        "place": [place.epoch, place.role is Role.HOME],
    }


def _id(agent: str) -> str:
    return agent.partition("/")[2]
