"""Agents' memory as a request sees it: recalled before it, kept when it ends, before its last event leaves.

Memory only saves work for a stateless turn, so a store that does not answer holds none up for longer than
`brief_answer_s` before it and `answer_s` at its end. A continuing turn rests on the stored transcript, so it fails
where that cannot be had. An answer that was computed is delivered in any case, and says where it is not kept
(`remembered.py`). Nothing here knows Ray: a `Store` stands between.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import re
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from cachetools import LRUCache

from ...actors.kv_store.disk.quotas import Limits
from ...actors.protocol.media_ids import words_in
from ...cluster.errors import (
    AgentBusy,
    AgentNotFound,
    InvalidRequest,
    MemoryFull,
    QuotaExceeded,
    SatchelError,
    Unavailable,
)
from ...cluster.timing import USUAL, Timing
from ..generation.history import History, Message
from ..generation.remembered import FORGOTTEN, FULL, NO_ROOM, OVER_QUOTA, UNANSWERED, Remembered
from ..text.continuation import Continuation, IndexedLine, Line, Match, index_line
from ..text.model import TextModel
from .store import Store

_log = logging.getLogger(__name__)

LINES_BYTES_MAX = 64 * 2**20
_TOKEN_BYTES = 16
"""Of a prepared line: its id, where it ends, and the text in characters and bytes, which are counted apart."""


FOLLOWING_MAX = 4
"""How many agents may follow at one time; the router says it again at another one's next turn."""

_NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class KnownLine:
    """A branch as this process knows it."""

    branch: int
    epoch: int
    turns: int
    line: IndexedLine
    history: History
    words: Sequence[int] = ()
    """Those in the place of its pictures' tokens, of which `line` has the model's own."""

    @property
    def nbytes(self) -> int:
        return _TOKEN_BYTES * (len(self.line.tokens) + len(self.words)) + 2 * len(self.line.data) + 512


class _Lines:
    """Branches used lately, by agent and what their words belong to, within `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        self._agents: LRUCache[tuple[str, bytes], dict[int, KnownLine]] = LRUCache(
            bytes_max, getsizeof=lambda lines: sum(line.nbytes for line in lines.values())
        )

    def get(self, key: tuple[str, bytes]) -> dict[int, KnownLine]:
        return dict(self._agents.get(key, {}))

    def set(self, key: tuple[str, bytes], lines: dict[int, KnownLine]) -> None:
        # What was there is out of date, also where these are more than all may take.
        self._agents.pop(key, None)
        if lines:
            with suppress(ValueError):
                self._agents[key] = lines

    def forget(self, agent: str) -> None:
        for key in [key for key in self._agents if key[0] == agent]:
            del self._agents[key]


@dataclass(frozen=True)
class Kept:
    """What a turn leaves: the prompt's and the answer's tokens, the text they spell, the transcript, how the prompt
    continued what was there (None where there was nothing), and the model id under which its KV is kept."""

    tokens: Sequence[int]
    text: str
    messages: list[Message]
    continuation: Continuation | None
    model_id: bytes
    injected: bool = False


class AgentMemory:
    """The memory of all agents, for one event loop.

    Attributes:
        store: what keeps it.
        matches: prompts by how they continued their agent's memory.
        recomputed: tokens that memory had and that were not kept, by reason.
        commits: turns by what became of them.
        unkept: turns whose words are not kept, by reason.
        uncopied: turns of which fewer nodes have the words than should.
        moves: of agents to other nodes.
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
        self.lines = _Lines(lines_bytes_max)
        self._tasks: set[asyncio.Task[Any]] = set()

    def turn(
        self, agent: str, words_id: bytes, text: TextModel, *, continues: bool, limits: Limits | None = None
    ) -> Turn:
        """A turn of the agent (its key) that has not begun yet, with a model of those words.

        Args:
            limits: what the agent's tenant may have on a node's disk.
        """
        return Turn(self, agent, words_id, text, continues, limits)

    def background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        # In a context of its own: Ray cancels the calls that it takes for a request's children with the request.
        task = asyncio.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def count(self, continuation: Continuation | None, lines: Sequence[KnownLine]) -> None:
        """Count how a prompt continued the agent's lines."""
        if continuation is None or continuation.line is None or continuation.match is None:
            self.matches["new"] += 1
            return
        self.matches[continuation.match.value] += 1
        lost = len(lines[continuation.line].line.tokens) - continuation.kept_tokens
        if lost > 0:
            self.recomputed[continuation.reason or "other"] += lost


class Turn:
    """One turn of an agent, from `open` to `commit` or `leave`.

    Attributes:
        continues: whether it is appended to the stored transcript.
        lines: the branches it may continue.
        messages: the stored transcript that it is appended to, in OpenAI's form.
        remembered: what is known of its memory by now.
    """

    def __init__(
        self,
        memory: AgentMemory,
        agent: str,
        words_id: bytes,
        text: TextModel,
        continues: bool,
        limits: Limits | None = None,
    ) -> None:
        self.agent = agent
        self.continues = continues
        self.lines: list[KnownLine] = []
        self.messages: list[Message] = []
        self.remembered = Remembered()
        self._memory = memory
        self._words_id = words_id
        self._text = text
        self._limits = limits
        self._name = uuid.uuid4().hex if continues else ""
        self._since = 0
        self._main: tuple[int, int, int] | None = None
        self._renewing: asyncio.Task[Any] | None = None
        self._over = False

    async def open(self) -> None:
        """Recall the agent's memory; a continuing turn waits for the one before it.

        Raises:
            AgentBusy: that takes too long.
            QuotaExceeded: the agent's tenant may add no words.
            Unavailable: a continuing turn cannot have its transcript.
        """
        if self.continues:
            await self._begin()
            return
        try:
            async with asyncio.timeout(self._memory.timing.brief_answer_s):
                known = self._known()
                epochs = {line.branch: line.epoch for line in known.values()}
                answer = await self._call("recall", self._words_id, epochs, self._limits)
        except QuotaExceeded:
            raise
        except (SatchelError, TimeoutError) as error:
            self._memory.commits["not recalled"] += 1
            _log.warning("agent %s is not recalled: %s", self.agent, error or "the store takes too long")
            return
        self._since = answer["since"]
        self.remembered = Remembered(let_go=answer["let_go"])
        await self._learn(answer["branches"], known)

    async def _begin(self) -> None:
        self._renewing = self._memory.background(self._renew())
        known = self._known()
        epochs = {line.branch: line.epoch for line in known.values()}
        answer = await self._insist("begin", self._name, self._words_id, epochs, self._limits)
        self._since = answer["since"]
        self.remembered = Remembered(let_go=answer["let_go"])
        branch = answer["branch"]
        if branch is None:
            return
        self._main = branch["branch"], branch["epoch"], branch["turns"]
        self.messages = await asyncio.to_thread(json.loads, branch["transcript"])
        # Of another model there are no tokens, and none are known.
        await self._learn([branch], known, all_of_them=False)

    def _known(self) -> dict[int, KnownLine]:
        return self._memory.lines.get((self.agent, self._words_id))

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return await self._memory.store.call(method, self.agent, *arguments, **named)

    async def _insist(self, method: str, *arguments: Any, **named: Any) -> Any:
        """As `_call`, but a store that does not answer may be starting again."""
        timing = self._memory.timing
        ends = time.monotonic() + timing.turn_answer_s
        while True:
            try:
                return await self._call(method, *arguments, **named)
            except MemoryFull:
                # It has done what it can.
                raise
            except Unavailable:
                if time.monotonic() > ends - timing.retry_s:
                    raise
            await asyncio.sleep(timing.retry_s)

    async def _learn(
        self, branches: list[dict[str, Any]], known: dict[int, KnownLine], *, all_of_them: bool = True
    ) -> None:
        """Take the lines of `branches`; those without content are known."""
        new = [branch for branch in branches if "token_ids" in branch]
        prepared = await asyncio.to_thread(lambda: [_known_line(each, self._text) for each in new])
        learned = {line.branch: line for line in prepared}
        for branch in branches:
            line = learned.get(branch["branch"]) or known.get(branch["branch"])
            if line is not None and line.epoch == branch["epoch"]:
                self.lines.append(line)
        if all_of_them:
            known = {}
        self._memory.lines.set((self.agent, self._words_id), known | {line.branch: line for line in self.lines})

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._memory.timing.turn_renewal_s)
            # A store that restarts has no leases; the commit will tell.
            with suppress(SatchelError):
                await self._call("renew", self._name)

    async def commit(self, kept: Kept) -> None:
        """Keep what the turn computed. Where that cannot be, it is logged and counted, and `remembered` says so.

        Raises:
            AgentBusy: a continuing turn was lost, or its agent forgotten, meanwhile.
        """
        self._over = True
        try:
            # The copies on other nodes are waited for too.
            more_s = max(0.0, self._memory.copy_wait_s - 1.0)
            timing = self._memory.timing
            # What was said is worth more than a short wait: where the agent's home has just been lost, another one is
            # found meanwhile.
            async with asyncio.timeout((2 * timing.turn_answer_s if self.continues else timing.answer_s) + more_s):
                outcome, copied = await self._commit(kept)
        except (SatchelError, TimeoutError) as error:
            self._memory.commits["failed"] += 1
            _log.warning("a turn of agent %s is not kept: %s", self.agent, error or "the store takes too long")
            if self.continues:
                self._abandon()
            self._not_kept(FULL if isinstance(error, MemoryFull) else UNANSWERED)
            return
        except asyncio.CancelledError:
            # Perhaps before the store was asked; where it was, there is nothing to give back and no harm done.
            if self.continues:
                self._abandon()
            raise
        finally:
            self._stop_renewing()
        self._memory.commits[outcome] += 1
        if outcome in ("replaced", "opened"):
            self.remembered = replace(self.remembered, copied=copied)
            self._memory.uncopied += not copied
            return
        _log.warning("a turn of agent %s is not kept: %s", self.agent, outcome)
        if self.continues and outcome not in ("no room", "over quota"):
            raise _refusal(self.agent, outcome)
        self._not_kept({"no room": NO_ROOM, "over quota": OVER_QUOTA}.get(outcome, FORGOTTEN))

    def _not_kept(self, reason: str) -> None:
        self.remembered = replace(self.remembered, unkept=reason)
        self._memory.unkept[reason] += 1

    async def _commit(self, kept: Kept) -> tuple[str, bool]:
        """The kind of the outcome, and whether the copies that should be are made."""

        def pack() -> tuple[tuple[int, int, int] | None, bytes, bytes, IndexedLine, History]:
            transcript = json.dumps(kept.messages, ensure_ascii=False, separators=(",", ":")).encode()
            tokens = array("I", kept.tokens)
            line = index_line(Line(kept.text, self._text.plain(tokens)), self._text)
            return self._base(kept), tokens.tobytes(), transcript, line, History(kept.messages)

        base, token_ids, transcript, line, history = await asyncio.to_thread(pack)
        turns = 1 if base is None else base[2] + 1
        fields = {
            "token_ids": token_ids,
            "text": kept.text,
            "transcript": transcript,
            "messages": len(kept.messages),
            "model": kept.model_id,
            "files": self._words_id,
            "since": self._since,
            "branch": base[0] if base else None,
            "epoch": base[1] if base else 0,
            "turns": turns,
            "injected": kept.injected,
            "turn": self._name,
            "limits": self._limits,
        }
        # Where the answer to a first try was lost with the store's process, a second one opens a branch of its own.
        # Where a stateless turn was kept and the answer lost, it opens another branch, which does no harm.
        outcome = await self._insist("commit", **fields)
        if outcome["kind"] in ("replaced", "opened"):
            new = KnownLine(outcome["branch"], outcome["epoch"], turns, line, history, words_in(kept.tokens))
            self._memory.lines.set((self.agent, self._words_id), self._known() | {new.branch: new})
        return outcome["kind"], outcome["copied"]

    def _base(self, kept: Kept) -> tuple[int, int, int] | None:
        """The branch that the turn continues, its epoch and its turns."""
        if self.continues:
            return self._main
        found = kept.continuation
        if found is None or found.line is None:
            return None
        line = self.lines[found.line]
        # Templates that leave an answer's reasoning out of the history change the text of the same conversation.
        if found.match in (Match.EXACT, Match.EXTEND) or line.history.begins(kept.messages):
            return line.branch, line.epoch, line.turns
        return None

    def move_after(self, node: str) -> None:
        """The turn is over; the agent's memory is to move to `node`, "" for nowhere."""
        if node:
            self._memory.moves.follow(self.agent, node)

    def leave(self) -> None:
        """Give the turn back unless it is over. Does not wait."""
        if not self._over:
            self._over = True
            self._stop_renewing()
            if self.continues:
                self._abandon()

    def _abandon(self) -> None:
        async def abandon() -> None:
            # Where that fails the turn's lease runs out.
            with suppress(SatchelError, TimeoutError):
                async with asyncio.timeout(self._memory.timing.turn_answer_s):
                    await self._call("abandon", self._name)

        self._memory.background(abandon())

    def _stop_renewing(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()


def _known_line(branch: dict[str, Any], text: TextModel) -> KnownLine:
    tokens = array("I")
    tokens.frombytes(branch["token_ids"])
    line, history = (
        index_line(Line(branch["text"], text.plain(tokens)), text),
        History(json.loads(branch["transcript"])),
    )
    return KnownLine(branch["branch"], branch["epoch"], branch["turns"], line, history, words_in(tokens))


def _refusal(agent: str, outcome: str) -> AgentBusy:
    name = agent.partition("/")[2]
    return AgentBusy(f"agent {name!r} was {'forgotten' if outcome == 'forgotten' else 'changed'} during this turn")


class AgentMoves:
    """The moves of one endpoint.

    Args:
        background: runs what nobody waits for.

    Attributes:
        total, bytes_total: agents that got another home, and the KV that went with them.
    """

    def __init__(self, store: Store, background: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self.total = self.bytes_total = 0
        self._store = store
        self._background = background
        self._following: set[str] = set()

    async def move(self, key: str, to: Any) -> dict[str, Any]:
        """Make the node `to` the agent's home. Nothing is done where it is that already.

        Returns:
            `from` ("" where nobody knew), `to`, `moved` (False where nothing was done), and what went: `tokens`,
            `blocks`, `bytes`, `seconds`.

        Raises:
            InvalidRequest: there is no such node.
            AgentNotFound, AgentBusy, Unavailable: the agent stays where it is.
        """
        if not isinstance(to, str) or not _NODE_NAME.fullmatch(to):
            raise InvalidRequest("to must be the name of a node, as GET /v1/cluster shows it", param="to")
        try:
            home = (await self._store.where(key))["home"]
        except AgentNotFound:
            # It may be new, so that nobody has told where it is.
            home = ""
        done: dict[str, Any] = {"tokens": 0, "blocks": 0, "bytes": 0, "seconds": 0.0}
        if home != to:
            try:
                done = await self._store.move(key, to)
            except InvalidRequest as error:
                raise InvalidRequest(error.message, param=error.param or "to") from None
            self.total += 1
            self.bytes_total += done["bytes"]
        counts = {name: done[name] for name in ("tokens", "blocks", "bytes", "seconds")}
        identity = {"id": key.partition("/")[2], "object": "agent.move"}
        return {**identity, "from": home, "to": to, "moved": home != to, **counts}

    def follow(self, key: str, to: str) -> None:
        """Move an agent's memory after it, behind its requests. Where that fails it stays where it is."""
        if key not in self._following and len(self._following) < FOLLOWING_MAX:
            self._following.add(key)
            self._background(self._follow(key, to))

    async def _follow(self, key: str, to: str) -> None:
        try:
            await self.move(key, to)
            _log.info("agent %s lives on %s now, where it is answered", key, to)
        except SatchelError as error:
            _log.warning("agent %s does not move to %s yet: %s", key, to, error.message)
        finally:
            self._following.discard(key)
