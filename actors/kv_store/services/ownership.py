"""Which agents may own KV on the disk. A forgotten agent owns only what it has learned again since.

A replica writes an agent's KV some time after the turn that computed it. If the agent is forgotten meanwhile, that KV
comes late, and a file does not say in which of its owner's lives it was computed. The agent's branches do: they have
the tokens of all KV that it may own. So KV of owners with a tombstone is accepted only if a branch claims it
(`claims.Claims`). A turn's KV may come just before its branch, so a living agent's KV waits a moment for the branch.

Erasing has an order: the tombstone is written, the owner is barred here, running commits end, and then its KV is erased
from the disk. So nothing is committed after an erasure.

A fork of an agent owns the same KV: what is on the disk, and what its original computed before the fork and writes
after it (`copied`).

After a start, owners that were added to a file later are not known. They are found from the branches of all agents
before anything is erased.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ....cluster.config.timing import USUAL
from ....cluster.errors import SatchelError, Unavailable
from ...protocol.entries import EntryRecord, SegmentRecord, owner_tag
from ..agents.agents import Agents
from ..agents.claims import Branch, Census, Claims
from ..disk.changes import SegmentPlacement
from ..disk.store import DiskStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEPT_WITHIN_S = 30.0
"""How long the event loop may take to commit pulled KV."""

BARRED_MAX = 10_000
"""As many as tombstones."""

HEIRS_S = 600.0
"""How long after a fork KV that the original's replica writes may be from before the fork."""

HEIRS_MAX = 10_000
"""How many forks are remembered for that."""

ERASE_TRIES = 3
ERASE_RETRY_S = 1.0
"""How often erasing is tried at once, and how soon again. After that it is tried whenever the disk is tidied."""

_AGENTS_A_PAGE = 16
_SETTLED_TOGETHER = 512

Ask = Callable[[Callable[[Agents], Any]], Awaitable[Any]]
"""Calls its argument in the one thread that may use `Agents`."""


Elsewhere = Callable[[str, Sequence[bytes], Sequence[EntryRecord]], Awaitable[set[bytes]]]
"""As `Claiming.elsewhere`."""


class Ownership:
    """Bars and erases owners of the KV in `store`, and finds unknown ones. For one event loop.

    Attributes:
        elsewhere: returns which entries an agent's branches on other nodes claim, of an agent that was forgotten here;
            None if only branches here count.
        end_pulls: called in a thread before an owner's KV is erased, to end what fetches more of it.
        settled_total: entries whose owners were found out from the agents' branches.
    """

    def __init__(self, store: DiskStore, ask: Ask, claim_wait_s: float = USUAL.claim_wait_s) -> None:
        self._store = store
        self._ask = ask
        self._claim_wait_s = claim_wait_s
        self._begun = False
        self._beginning = asyncio.Lock()
        # Agents with a tombstone, by their tags, the latest last.
        self._barred: OrderedDict[bytes, str] = OrderedDict()
        # Running calls that may give an owner something.
        self._under_way: set[asyncio.Task[Any]] = set()
        self._news = asyncio.Event()
        self._to_erase: OrderedDict[str, None] = OrderedDict()
        # Forks: (original's tag, fork), and until when the original's new KV may be the fork's too.
        self._heirs: OrderedDict[tuple[bytes, str], float] = OrderedDict()
        # What agents got that came back before they were erased.
        self._since: dict[str, set[bytes]] = {}
        # Agents that could not be erased.
        self._owed: OrderedDict[str, None] = OrderedDict()
        self._work: asyncio.Task[None] | None = None
        self.end_pulls: Callable[[str], object] | None = None
        self.elsewhere: Elsewhere | None = None
        self.settled_total = 0

    async def ready(self) -> None:
        """Reads which agents were forgotten before this process began, and goes on with unfinished erasures. Cheap
        after the first call.

        Raises:
            SatchelError: the tombstones cannot be read now; the next call tries again.
        """
        if self._begun:
            return
        async with self._beginning:
            if not self._begun:
                for agent in await self._ask(lambda agents: agents.forgotten()):
                    self._bar(agent)
                self._begun = True
                self._work = asyncio.create_task(self._go_on())

    async def idle(self) -> None:
        """Waits until nothing is left to settle or to erase."""
        while self._work is not None and not self._work.done():
            await asyncio.wait([self._work])

    def forgotten(self, agent: str) -> None:
        """Bars the agent, whose tombstone has been written, and begins to erase its KV."""
        self._bar(agent)
        self._to_erase[agent] = None
        self._to_erase.move_to_end(agent)
        self._since[agent] = set()
        self._begin_erasing()

    def again(self) -> None:
        """Retries failed erasures."""
        if self._owed:
            self._to_erase.update(self._owed)
            self._owed.clear()
            self._begin_erasing()

    async def let_go(self, agent: str, kept: Collection[bytes]) -> None:
        """Erases the agent's entries on the disk except `kept`. The agent may own them again later.

        Raises:
            DiskFull, DiskError: not all bytes are gone; tidying up tries again.
        """
        if self.end_pulls is not None:
            await asyncio.to_thread(self.end_pulls, agent)
        if under_way := list(self._under_way):
            await asyncio.wait(under_way)
        await asyncio.to_thread(self._store.forget, agent, lambda record: record.id in kept)

    def _begin_erasing(self) -> None:
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._erase_all())

    def committed(self, agent: str) -> None:
        """Wakes what waits for the agent's branch: a turn has been committed."""
        if self._tag(agent) in self._barred:
            self._news.set()
            self._news = asyncio.Event()

    async def copied(self, source: str, target: str) -> None:
        """Makes `target`, a fork of `source`, an owner of the KV of `source`."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._heirs and (next(iter(self._heirs.values())) < now or len(self._heirs) >= HEIRS_MAX):
            self._heirs.popitem(last=False)
        # KV that the source itself inherits late comes to the fork too.
        origins = [tag for tag, heir in self._heirs if heir == source]
        for tag in (*origins, self._tag(source)):
            self._heirs[tag, target] = now + HEIRS_S
            self._heirs.move_to_end((tag, target))
        await self.fenced(self._give(target))

    def heirs_of(self, agent: str) -> list[str]:
        """Returns forks of the agent that may own KV that is written for it now."""
        return self._copies_of(self._tag(agent))

    def _copies_of(self, tag: bytes) -> list[str]:
        now = asyncio.get_running_loop().time()
        return [heir for (origin, heir), ends in self._heirs.items() if origin == tag and ends > now]

    async def _give(self, agent: str) -> None:
        await self.ready()
        claims = await self.claims(agent)
        since = self._since.get(agent)

        def has(record: EntryRecord) -> bool:
            if claims.holds(record):
                if since is not None:
                    since.add(record.id)
                return True
            return False

        await asyncio.to_thread(self._store.give, agent, list(claims.blocks), claims.parents(), has)

    async def inherited(self, entries: Sequence[EntryRecord], model: bytes = b"") -> dict[bytes, set[bytes]]:
        """Returns, by entry id, the tags of forks that own the entries too. Call it `fenced`. `model` as for
        `unclaimed`."""
        found: dict[bytes, set[bytes]] = {}
        for tag in {tag for entry in entries for tag in entry.owners}:
            for heir in self._copies_of(tag):
                claims = await self.claims(heir, [model] if model else [])
                theirs = [entry.id for entry in entries if tag in entry.owners and claims.holds(entry)]
                if (since := self._since.get(heir)) is not None:
                    since.update(theirs)
                for entry in theirs:
                    found.setdefault(entry, set()).add(self._tag(heir))
        return found

    async def fenced(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work that may give an owner something. It goes on if the caller is cancelled, and erasing waits for
        it."""
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    async def unclaimed(self, entries: Sequence[EntryRecord], model: bytes = b"") -> dict[bytes, set[bytes]]:
        """Returns, by entry id, the tags of owners that may not have the entry. Call it `fenced`.

        Args:
            model: whose entries they are, if the disk may not have any of it yet.
        """
        await self.ready()
        without: dict[bytes, set[bytes]] = {}
        for tag in {tag for entry in entries for tag in entry.owners}:
            if (agent := self._barred.get(tag)) is None:
                continue
            since = self._since.get(agent, set())
            theirs = [entry for entry in entries if tag in entry.owners]
            models = [model] if model else []
            left = {entry.id for entry in await self._left_anywhere(agent, theirs, self._claim_wait_s, models)}
            for entry in left:
                without.setdefault(entry, set()).add(tag)
            since.update(entry.id for entry in theirs if entry.id not in left)
        return without

    async def ownable(self, ids: Sequence[bytes], agent: str, *, wait: bool) -> list[bytes]:
        """Returns those of the entries that the agent may own. Call it `fenced`.

        Args:
            wait: whether their branch is about to be committed.
        """
        await self.ready()
        if self._tag(agent) not in self._barred:
            return list(ids)
        since = self._since.get(agent, set())
        records = await asyncio.to_thread(self._store.records, ids)
        left = await self._left_anywhere(agent, records, self._claim_wait_s if wait else 0.0, [])
        theirs = {record.id for record in records} - {record.id for record in left}
        since.update(theirs)
        return [entry for entry in ids if entry in theirs]

    async def claims(self, agent: str, models: Sequence[bytes] = ()) -> Claims:
        """Returns what the agent's branches claim, under all models that the disk has, and `models`: the same tokens
        have KV of several models if a model is divided, because each stage is one, and if nodes compute otherwise."""
        return (await self._claims(agent, models))[1]

    async def claimed(self, agent: str, models: Sequence[bytes], entries: Sequence[EntryRecord]) -> list[bytes]:
        """Returns the ids of those entries of these models that the agent's branches claim, or soon will."""
        left = {entry.id for entry in await self._left(agent, entries, self._claim_wait_s, models)}
        return [entry.id for entry in entries if entry.id not in left]

    async def _left_anywhere(
        self, agent: str, entries: Sequence[EntryRecord], wait_s: float, models: Sequence[bytes]
    ) -> list[EntryRecord]:
        """As `_left`, and asks other nodes about those entries that no branch here claims."""
        left = await self._left(agent, entries, wait_s, models)
        if not left or self.elsewhere is None:
            return left
        theirs = await self.elsewhere(agent, models or await asyncio.to_thread(self._store.models), left)
        return [entry for entry in left if entry.id not in theirs]

    async def _left(
        self, agent: str, entries: Sequence[EntryRecord], wait_s: float, models: Sequence[bytes] = ()
    ) -> list[EntryRecord]:
        """Returns the entries that no branch of the agent claims. If the agent lives, waits for a branch first."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + wait_s
        while True:
            news = self._news
            alive, claims = await self._claims(agent, models)
            left = [entry for entry in entries if not claims.holds(entry)]
            rest = ends - loop.time()
            if not left or not alive or rest <= 0:
                return left
            with suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await news.wait()

    async def _claims(self, agent: str, models: Sequence[bytes]) -> tuple[bool, Claims]:
        """Returns whether the agent lives or may soon, and what its branches claim."""
        every = {*await asyncio.to_thread(self._store.models), *models}
        alive, branches = await self._ask(lambda agents: (agents.lives(agent), branches_under(agents, agent, every)))
        # Not in the agents' thread: hashing takes a while, and commits wait for that one.
        return alive, await asyncio.to_thread(Claims, branches)

    def _tag(self, agent: str) -> bytes:
        return owner_tag(self._store.key, agent)

    def _bar(self, agent: str) -> None:
        tag = self._tag(agent)
        self._barred[tag] = agent
        self._barred.move_to_end(tag)
        if len(self._barred) > BARRED_MAX:
            self._barred.popitem(last=False)

    async def _go_on(self) -> None:
        """Finishes what the last process may have left undone, before anything else is erased."""
        try:
            await self._settle()
            there = await asyncio.to_thread(self._store.owners)
        except (SatchelError, OSError) as error:
            logger.error("owners of KV could not be settled: %s", error)
            self._to_erase.update(dict.fromkeys(self._barred.values()))
        else:
            # An erasure may have been interrupted.
            self._to_erase.update(dict.fromkeys(agent for tag, agent in self._barred.items() if tag in there))
        await self._erase_all()

    async def _settle(self) -> None:
        census = await asyncio.to_thread(lambda: Census(self._store.uncertain(), self._store.key))
        if not census.entries:
            return
        models = await asyncio.to_thread(self._store.models)
        page = await self._ask(lambda agents: _page(agents, "", models))
        while page:
            await asyncio.to_thread(_count, census, page)
            after = page[-1][0]
            page = await self._ask(lambda agents, after=after: _page(agents, after, models))
        owners = list(census.owners.items())
        for start in range(0, len(owners), _SETTLED_TOGETHER):
            batch = dict(owners[start : start + _SETTLED_TOGETHER])
            self.settled_total += await asyncio.to_thread(self._store.settle, batch)
        logger.info("of %d entries without known owners agents have %d", census.entries, self.settled_total)

    async def _erase_all(self) -> None:
        while self._to_erase:
            # The latest first: what an earlier process has left must not hold it up.
            agent, _ = self._to_erase.popitem()
            since = self._since.setdefault(agent, set())
            for _ in range(ERASE_TRIES):
                try:
                    await self._erase(agent, since)
                    break
                except (SatchelError, OSError) as error:
                    logger.error("the KV of agent %s cannot be erased now: %s", agent, error)
                    await asyncio.sleep(ERASE_RETRY_S)
            else:
                # Other erasures must not wait for this one any longer.
                self._owed[agent] = None
            if self._since.get(agent) is since:
                del self._since[agent]

    async def _erase(self, agent: str, since: set[bytes]) -> None:
        if self.end_pulls is not None:
            await asyncio.to_thread(self.end_pulls, agent)
        if under_way := list(self._under_way):
            await asyncio.wait(under_way)
        # It may have come back already, get more while this is going on, and even be forgotten and come back again.
        claims = await self.claims(agent)
        elsewhere: set[bytes] = set()
        if self.elsewhere is not None:
            owned = await asyncio.to_thread(lambda: self._store.records([*self._store.owned(agent)]))
            theirs = [record for record in owned if record.id not in since and not claims.holds(record)]
            if theirs:
                elsewhere = await self.elsewhere(agent, await asyncio.to_thread(self._store.models), theirs)

        def keep(record: EntryRecord) -> bool:
            known = record.id in since or record.id in self._since.get(agent, ()) or record.id in elsewhere
            return known or claims.holds(record)

        await asyncio.to_thread(self._store.forget, agent, keep)


class OwnedKeeper:
    """Commits pulled KV as `disk_commit` commits computed KV. For threads other than that of `loop`.

    Args:
        loop: the one of `owned`.
    """

    def __init__(self, store: DiskStore, owned: Ownership, loop: asyncio.AbstractEventLoop) -> None:
        self._store, self._owned, self._loop = store, owned, loop

    def commit(self, record: SegmentRecord) -> SegmentPlacement:
        async def work() -> SegmentPlacement:
            without = await self._owned.unclaimed(record.entries, record.model)
            heirs = await self._owned.inherited(record.entries, record.model)
            return await asyncio.to_thread(self._store.commit, record, without, heirs)

        return self._fenced(work())

    def touch(self, ids: Sequence[bytes], owner: str = "") -> None:
        async def work() -> None:
            theirs = await self._owned.ownable(ids, owner, wait=False) if owner else list(ids)
            if len(theirs) < len(ids):
                await asyncio.to_thread(self._store.touch, ids, "")
            await asyncio.to_thread(self._store.touch, theirs, owner)

        self._fenced(work())

    def _fenced(self, work: Coroutine[Any, Any, T]) -> T:
        done = asyncio.run_coroutine_threadsafe(self._owned.fenced(work), self._loop)
        try:
            return done.result(KEPT_WITHIN_S)
        except TimeoutError:
            raise Unavailable("what was pulled cannot be kept now") from None


def branches_of(agents: Agents, agent: str, replicas: Sequence[Sequence[bytes]] = ()) -> list[Branch]:
    """Returns the agent's branches, the oldest first. For the agents' thread.

    Args:
        replicas: (files id, model id) of replicas. A branch with this files id is also returned under the model id.
    """
    found = []
    for head in agents.heads(agent):
        if (content := agents.content(head)) is not None:
            found.append(Branch(head.model, head.root, content.tokens))
            others = {model for files, model in replicas if files == head.files} - {head.model}
            found += [Branch(model, agents.root_of(agent, model), content.tokens) for model in sorted(others)]
    return found


def branches_under(agents: Agents, agent: str, models: Collection[bytes]) -> list[Branch]:
    """Returns the agent's branches as they are, and each also under these models. For the agents' thread."""
    found = []
    for head in agents.heads(agent):
        if (content := agents.content(head)) is not None:
            found.append(Branch(head.model, head.root, content.tokens))
            found += [
                Branch(model, agents.root_of(agent, model), content.tokens) for model in models if model != head.model
            ]
    return found


def _page(agents: Agents, after: str, models: Collection[bytes]) -> list[tuple[str, list[Branch]]]:
    return [(agent, branches_under(agents, agent, models)) for agent, _ in agents.list("", after, _AGENTS_A_PAGE)]


def _count(census: Census, page: Iterable[tuple[str, list[Branch]]]) -> None:
    for agent, branches in page:
        census.count(agent, Claims(branches))
