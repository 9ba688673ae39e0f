"""Agents' memory around a request: recalled before it, committed at its end, before its last event is sent.

Memory only saves work for a stateless turn, so such a turn waits for the store at most `brief_answer_s` before it
begins and `answer_s` at its end. A continuing turn needs the stored transcript, so it fails if that cannot be read. An
answer that was computed is always delivered, and says if it is not kept (`remembered.py`). Nothing here knows Ray: all
calls go through a `Store`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakSet

from cachetools import LRUCache

from ...actors.protocol.media_ids import media_tokens_in
from ...actors.protocol.store_messages import (
    Begun,
    BranchMemory,
    Commit,
    CommitOutcome,
    Content,
    Head,
    Limits,
    Moved,
    parent_at,
)
from ...cluster.config.timing import USUAL, Timing
from ...cluster.detached import DetachedTasks
from ...cluster.errors import (
    AgentBusy,
    AgentNotFound,
    InvalidRequest,
    MemoryFull,
    QuotaExceeded,
    SatchelError,
    Unavailable,
)
from ..requests.history import History, Message
from ..requests.remembered import FORGOTTEN, FULL, NO_ROOM, OVER_QUOTA, UNANSWERED, Remembered
from ..requests.requests import Past
from ..requests.sent import kept_of
from ..text.continuation import Continuation, IndexedLine, Match, StoredBranch
from ..text.model import TextModel
from .programs import Programs
from .store import Store

_log = logging.getLogger(__name__)

T = TypeVar("T")

LINES_BYTES_MAX = 64 * 2**20
_TOKEN_BYTES = 16
"""Bytes per token of an indexed line, for its id and its end offset. The text is counted separately."""


FOLLOWING_MAX = 4
"""How many agents may move at one time. The router repeats its advice at an agent's next turn."""

_NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class KnownLine:
    """A branch as cached by this process."""

    branch: int
    epoch: int
    turns: int
    line: IndexedLine
    history: History
    media_tokens: Sequence[int] = ()
    """The media token ids of its images; `line` has the model's own ids in their place."""
    created: float = 0.0
    """When it was opened, as Unix time."""

    @property
    def nbytes(self) -> int:
        return _TOKEN_BYTES * (len(self.line.tokens) + len(self.media_tokens)) + 2 * len(self.line.data) + 512


def past_of(lines: Sequence[KnownLine], date_s: float, messages: Sequence[Message] = ()) -> Past:
    """Returns an agent's memory as its prompt needs it.

    Args:
        date_s, messages: as in `Past`.
    """
    return Past(
        messages,
        [known.line for known in lines],
        [known.media_tokens for known in lines],
        [(known.history, known.created) for known in lines],
        date_s,
    )


class _Lines:
    """Recently used branches, by agent and `words_id`, within `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        self._agents: LRUCache[tuple[str, bytes], dict[int, KnownLine]] = LRUCache(
            bytes_max, getsizeof=lambda lines: sum(line.nbytes for line in lines.values())
        )

    def get(self, key: tuple[str, bytes]) -> dict[int, KnownLine]:
        return dict(self._agents.get(key, {}))

    def set(self, key: tuple[str, bytes], lines: dict[int, KnownLine]) -> None:
        # The old lines are out of date, even if the new ones are too large to cache.
        self._agents.pop(key, None)
        if lines:
            with suppress(ValueError):
                self._agents[key] = lines

    def forget(self, agent: str) -> None:
        for key in [key for key in self._agents if key[0] == agent]:
            del self._agents[key]


@dataclass(frozen=True)
class CommittedTurn:
    """What a turn commits: the tokens of prompt and answer, their text, the transcript, how the prompt continued the
    agent's memory (None if it had none), and the model id under which its KV is kept."""

    tokens: Sequence[int]
    text: str
    messages: list[Message]
    continuation: Continuation | None
    model_id: bytes
    injected: bool = False


class AgentMemory:
    """The memory of all agents, for one event loop.

    Attributes:
        store: where it is stored.
        matches: prompts by how they continued their agent's memory.
        recomputed: remembered tokens that could not be reused, by reason.
        commits: turns by outcome.
        unkept: turns that were not committed, by reason.
        uncopied: turns with fewer secondaries than configured.
        moves: of agents to other nodes.
        programs: how agents' programs rewrite their histories.
    """

    def __init__(
        self,
        store: Store,
        *,
        copy_wait_s: float = 1.0,
        lines_bytes_max: int = LINES_BYTES_MAX,
        timing: Timing = USUAL,
    ) -> None:
        """
        Args:
            copy_wait_s: how long the store may wait for copies on other nodes before it answers.
            timing: how long turns wait for the store, and how often they are renewed.
        """
        self.store = store
        self.copy_wait_s = copy_wait_s
        self.timing = timing
        self.matches: Counter[str] = Counter()
        self.recomputed: Counter[str] = Counter()
        self.commits: Counter[str] = Counter()
        self.unkept: Counter[str] = Counter()
        self.uncopied = 0
        self.moves = AgentMoves(store, self.background)
        self.programs = Programs()
        self.lines = _Lines(lines_bytes_max)
        self._tasks = DetachedTasks()
        self._open: WeakSet[Turn] = WeakSet()
        self._held: set[str] = set()

    @asynccontextmanager
    async def held(self, agent: str) -> AsyncIterator[None]:
        """Blocks an agent's turns: none may be running here, and none begins until this ends.

        Raises:
            AgentBusy: a turn of it runs, or it is already held.
            Unavailable: the store does not answer.
        """
        if agent in self._held or any(turn.agent == agent for turn in self._open):
            raise _busy(agent)
        self._held.add(agent)
        name = uuid.uuid4().hex
        try:
            # For turns that do not come through this process.
            await self.store.begin(agent, name, b"", {})
            yield
        finally:
            self._held.discard(agent)
            with suppress(SatchelError):
                await self.store.abandon(agent, name)

    def enter(self, turn: Turn) -> None:
        """Notes a turn that begins. Raises `AgentBusy` if its agent is held."""
        if turn.agent in self._held:
            raise _busy(turn.agent)
        self._open.add(turn)

    def exit(self, turn: Turn) -> None:
        """Notes that a turn has ended."""
        self._open.discard(turn)

    def background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._tasks.begin(work)

    def count(self, continuation: Continuation | None, lines: Sequence[KnownLine]) -> None:
        """Counts how a prompt continued the agent's lines."""
        if continuation is None or continuation.line is None or continuation.match is None:
            self.matches["new"] += 1
            return
        self.matches[continuation.match.value] += 1
        lost = len(lines[continuation.line].line.tokens) - continuation.kept_tokens
        if lost > 0:
            self.recomputed[continuation.reason or "other"] += lost


class Turn:
    """One turn of an agent, from `open` to `commit` or `leave`.

    Args:
        agent: its key.
        files_id: of the model's files, to which its token ids belong.
        text: the model's text side.
        continues: whether it is appended to the stored transcript.
        limits: the tenant's limit on a node's disk.
        program, parent: as in `Head`.

    Attributes:
        lines: the branches that it may continue.
        messages: the stored transcript that it is appended to, in OpenAI's form.
        remembered: the state of its memory so far, for the client.
    """

    def __init__(
        self,
        memory: AgentMemory,
        agent: str,
        files_id: bytes,
        text: TextModel,
        *,
        continues: bool,
        limits: Limits | None = None,
        program: str = "",
        parent: str = "",
    ) -> None:
        self.agent = agent
        self.continues = continues
        self.lines: list[KnownLine] = []
        self.messages: list[Message] = []
        self.remembered = Remembered()
        self._memory = memory
        self._files_id = files_id
        self._text = text
        self._limits = limits
        self._program, self._parent = program, parent
        self._name = ""
        self._since = 0
        self._main: tuple[int, int, int] | None = None
        self._renewing: asyncio.Task[Any] | None = None
        self._over = False

    async def open(self) -> None:
        """Recalls the agent's memory; a continuing turn waits for the one before it.

        Raises:
            AgentBusy: the turn before it takes too long, or the agent is held (`AgentMemory.held`).
            QuotaExceeded: the agent's tenant is over its limit.
            Unavailable: a continuing turn cannot get its transcript.
        """
        self._memory.enter(self)
        if self.continues:
            await self._begin()
            return
        try:
            async with asyncio.timeout(self._memory.timing.brief_answer_s):
                known = self._known()
                epochs = {line.branch: line.epoch for line in known.values()}
                recalled = await self._memory.store.recall(self.agent, self._files_id, epochs, self._limits)
        except QuotaExceeded:
            raise
        except (SatchelError, TimeoutError) as error:
            self._memory.commits["not recalled"] += 1
            _log.warning("agent %s is not recalled: %s", self.agent, error or "the store takes too long")
            return
        self._since = recalled.since
        self.remembered = Remembered(let_go=recalled.let_go)
        await self._learn(recalled.branches, known)
        if self._parent and not recalled.branches:
            await self._find_parent()

    async def _find_parent(self) -> None:
        """Notes which branch the parent of a new subagent is on: the branch that it used last."""
        tenant, parent = self.agent.partition("/")[0], self._parent
        # It is only shown to people; nothing else depends on it.
        with suppress(SatchelError, TimeoutError):
            async with asyncio.timeout(self._memory.timing.brief_answer_s):
                described = await self._memory.store.info(f"{tenant}/{parent}")
            last = max(described.branches, key=lambda head: head.epoch)
            self._parent = parent_at(parent, last.branch)

    async def _begin(self) -> None:
        self._renewing = self._memory.background(self._renew())
        known = self._known()
        epochs = {line.branch: line.epoch for line in known.values()}
        store = self._memory.store

        async def begin() -> Begun:
            # An attempt without an answer may be ended late; its end must not end this turn.
            self._name = uuid.uuid4().hex
            return await store.begin(self.agent, self._name, self._files_id, epochs, self._limits)

        begun = await self._insist(begin)
        self._since = begun.since
        self.remembered = Remembered(let_go=begun.let_go)
        if begun.branch is None:
            return
        head = begun.branch.head
        self._main = head.branch, head.epoch, head.turns
        self.messages = await asyncio.to_thread(json.loads, begun.transcript)
        # A branch of another model has no tokens for this one.
        await self._learn([begun.branch], known, all_of_them=False)

    def _known(self) -> dict[int, KnownLine]:
        return self._memory.lines.get((self.agent, self._files_id))

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Returns the answer, and asks again while there is none: the store may be restarting."""
        timing = self._memory.timing
        ends = time.monotonic() + timing.turn_answer_s
        while True:
            try:
                return await ask()
            except MemoryFull:
                # The store has evicted what it can already.
                raise
            except Unavailable:
                if time.monotonic() > ends - timing.retry_s:
                    raise
            await asyncio.sleep(timing.retry_s)

    async def _learn(
        self, branches: list[BranchMemory], known: dict[int, KnownLine], *, all_of_them: bool = True
    ) -> None:
        """Takes the lines of `branches`; those without content are already cached."""
        new = [(branch.head, branch.content) for branch in branches if branch.content is not None]
        prepared = await asyncio.to_thread(lambda: [_known_line(*each, self._text) for each in new])
        learned = {line.branch: line for line in prepared}
        for head in (branch.head for branch in branches):
            line = learned.get(head.branch) or known.get(head.branch)
            if line is not None and line.epoch == head.epoch:
                self.lines.append(replace(line, created=head.created))
        if all_of_them:
            known = {}
        self._memory.lines.set((self.agent, self._files_id), known | {line.branch: line for line in self.lines})

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._memory.timing.turn_renewal_s)
            # A restarted store has lost its leases; the commit finds that out.
            with suppress(SatchelError):
                await self._memory.store.renew(self.agent, self._name)

    async def commit(self, kept: CommittedTurn) -> None:
        """Commits the turn. A failure is logged, counted and noted in `remembered`.

        Raises:
            AgentBusy: a continuing turn was lost, or its agent was forgotten during it.
        """
        self._over = True
        try:
            # The store may wait for copies on other nodes.
            more_s = max(0.0, self._memory.copy_wait_s - 1.0)
            timing = self._memory.timing
            # Keeping the turn is worth a short wait: if the agent's home has just been lost, another one is found
            # meanwhile.
            async with asyncio.timeout((2 * timing.turn_answer_s if self.continues else timing.answer_s) + more_s):
                outcome = await self._commit(kept)
        except (SatchelError, TimeoutError) as error:
            self._memory.commits["failed"] += 1
            _log.warning("a turn of agent %s is not kept: %s", self.agent, error or "the store takes too long")
            if self.continues:
                self._abandon()
            self._not_kept(FULL if isinstance(error, MemoryFull) else UNANSWERED)
            return
        except asyncio.CancelledError:
            # The store may not have been called yet. If it was called, abandoning the turn does no harm.
            if self.continues:
                self._abandon()
            raise
        finally:
            self._stop_renewing()
            self._memory.exit(self)
        self._memory.commits[outcome.kind] += 1
        if outcome.kept:
            self.remembered = replace(self.remembered, copied=outcome.copied)
            self._memory.uncopied += not outcome.copied
            return
        _log.warning("a turn of agent %s is not kept: %s", self.agent, outcome.kind)
        if self.continues and outcome.kind not in ("no room", "over quota"):
            raise _refusal(self.agent, outcome.kind)
        self._not_kept({"no room": NO_ROOM, "over quota": OVER_QUOTA}.get(outcome.kind, FORGOTTEN))

    def _not_kept(self, reason: str) -> None:
        self.remembered = replace(self.remembered, unkept=reason)
        self._memory.unkept[reason] += 1

    async def _commit(self, kept: CommittedTurn) -> CommitOutcome:
        def pack() -> tuple[tuple[int, int, int] | None, bytes, bytes, IndexedLine, History]:
            transcript = json.dumps(kept.messages, ensure_ascii=False, separators=(",", ":")).encode()
            tokens = array("I", kept.tokens)
            line = self._text.spelling.index(StoredBranch(kept.text, self._text.plain(tokens)))
            return self._base(kept), tokens.tobytes(), transcript, line, History(kept.messages, kept_of(kept.messages))

        base, token_ids, transcript, line, history = await asyncio.to_thread(pack)
        turns = 1 if base is None else base[2] + 1
        commit = Commit(
            model=kept.model_id,
            content=Content(token_ids, kept.text, transcript),
            messages=len(kept.messages),
            since=self._since,
            branch=base[0] if base else None,
            epoch=base[1] if base else 0,
            turns=turns,
            injected=kept.injected,
            turn=self._name,
            files=self._files_id,
            program=self._program,
            parent=self._parent,
        )
        # If the answer to a first attempt was lost with the store's process, a second attempt opens a branch of its
        # own. If a stateless turn was kept but the answer lost, it opens another branch, which does no harm.
        outcome = await self._insist(lambda: self._memory.store.commit(self.agent, commit, self._limits))
        if outcome.kept:
            new = KnownLine(outcome.branch, outcome.epoch, turns, line, history, media_tokens_in(kept.tokens))
            self._memory.lines.set((self.agent, self._files_id), self._known() | {new.branch: new})
        return outcome

    def _base(self, kept: CommittedTurn) -> tuple[int, int, int] | None:
        """Returns the branch that the turn continues, its epoch and its turns."""
        if self.continues:
            return self._main
        continuation = kept.continuation
        if continuation is None or continuation.line is None:
            return None
        line = self.lines[continuation.line]
        # Templates that omit earlier reasoning change the text of the same conversation, so compare messages too.
        if continuation.match in (Match.EXACT, Match.EXTEND) or line.history.begins(kept.messages):
            return line.branch, line.epoch, line.turns
        return None

    def move_after(self, node: str) -> None:
        """Schedules the move of the agent's memory to `node` after the turn; "" for none."""
        if node:
            self._memory.moves.follow(self.agent, node)

    def leave(self) -> None:
        """Abandons the turn unless it is over. Does not wait."""
        if not self._over:
            self._over = True
            self._stop_renewing()
            self._memory.exit(self)
            if self.continues:
                self._abandon()

    def _abandon(self) -> None:
        async def abandon() -> None:
            # If this fails, the turn's lease expires.
            with suppress(SatchelError, TimeoutError):
                async with asyncio.timeout(self._memory.timing.turn_answer_s):
                    await self._memory.store.abandon(self.agent, self._name)

        self._memory.background(abandon())

    def _stop_renewing(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()


def _known_line(head: Head, content: Content, text: TextModel) -> KnownLine:
    tokens = array("I")
    tokens.frombytes(content.tokens)
    messages = json.loads(content.messages)
    line = text.spelling.index(StoredBranch(content.text, text.plain(tokens)))
    history = History(messages, kept_of(messages))
    return KnownLine(head.branch, head.epoch, head.turns, line, history, media_tokens_in(tokens))


def _busy(agent: str) -> AgentBusy:
    return AgentBusy(f"agent {agent.partition('/')[2]!r} is busy with a turn; try again when that has ended")


def _refusal(agent: str, outcome: str) -> AgentBusy:
    name = agent.partition("/")[2]
    return AgentBusy(f"agent {name!r} was {'forgotten' if outcome == 'forgotten' else 'changed'} during this turn")


class AgentMoves:
    """The moves of agents that one endpoint starts.

    Args:
        background: runs a coroutine as a task.

    Attributes:
        total, bytes_total: moved agents, and the bytes of KV that moved with them.
    """

    def __init__(self, store: Store, background: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self.total = self.bytes_total = 0
        self._store = store
        self._background = background
        self._following: set[str] = set()

    async def move(self, key: str, to: Any) -> dict[str, Any]:
        """Makes the node `to` the agent's primary, unless it is already.

        Returns:
            `from` ("" if unknown), `to`, `moved` (False if nothing was done), and what was copied: `tokens`, `blocks`,
            `bytes`, `seconds`.

        Raises:
            InvalidRequest: there is no such node.
            AgentNotFound, AgentBusy, Unavailable: the agent was not moved.
        """
        if not isinstance(to, str) or not _NODE_NAME.fullmatch(to):
            raise InvalidRequest("to must be the name of a node, as GET /v1/cluster shows it", param="to")
        try:
            home = (await self._store.where(key)).home
        except AgentNotFound:
            # A new agent may not have been reported to the router yet.
            home = ""
        done = Moved(to, 0, moved=False)
        if home != to:
            try:
                done = await self._store.move(key, to)
            except InvalidRequest as error:
                raise InvalidRequest(error.message, param=error.param or "to") from None
            self.total += done.moved
            self.bytes_total += done.nbytes
        counts = {"tokens": done.tokens, "blocks": done.blocks, "bytes": done.nbytes, "seconds": done.seconds}
        identity = {"id": key.partition("/")[2], "object": "agent.move"}
        return {**identity, "from": home if done.moved else to, "to": to, "moved": done.moved, **counts}

    def follow(self, key: str, to: str) -> None:
        """Moves an agent's memory in the background to the node that answers it. Failures are only logged."""
        if key not in self._following and len(self._following) < FOLLOWING_MAX:
            self._following.add(key)
            self._background(self._follow(key, to))

    async def _follow(self, key: str, to: str) -> None:
        try:
            await self.move(key, to)
            _log.info("agent %s moved to %s, where it is answered", key, to)
        except SatchelError as error:
            _log.warning("agent %s does not move to %s yet: %s", key, to, error.message)
        finally:
            self._following.discard(key)
