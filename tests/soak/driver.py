"""The soak itself: slots that follow their plans, faults meanwhile, and what is seen of both.

No ambiguity is left: after every request the server is asked what it has of the agent. A turn that was cut short is
kept if and only if it is there; what was answered whole must be there, or have said that it is not.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from .client import Ask, Http, TurnResult
from .ledger import (
    EXITED,
    FULL,
    AgentRecord,
    Attempt,
    Broken,
    Deed,
    Fault,
    Marks,
    RestartedCounters,
    excuse_of,
    found_in,
    tokens_held,
)
from .plan import SPOKEN, SlotPlan, SoakStep
from .server import EVERYTHING, HomeDisk, SoakServer

SETTLE_S = 1.0
"""So long a server that is well has to have ended a turn whose client has gone."""

WELL_S = 240.0
TRIES_MAX = 40
SCRAPE_S = 5.0
SWEEP_S = 15.0
CONTROLS = 30
"""So many deleted lives are looked for on the disk before their deletion: who finds nothing then, finds nothing."""

Record = Attempt | Deed


class Stuck(RuntimeError):
    """The server does not get well, or a turn does not succeed."""


@dataclass
class Seen:
    """What happened, for the report."""

    records: dict[int, list[Record]] = field(default_factory=dict)
    broken: list[Broken] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)
    errors: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)
    filled_bytes: list[int] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    controls: Counter[str] = field(default_factory=Counter)
    stuck: list[str] = field(default_factory=list)
    held_tokens: list[int] = field(default_factory=list)


class Soak:
    """One run.

    Args:
        plans: of the slots.
        rows: turns at a time.
        needles: the forms that a mark has on the disk, by its name and code.
        log: where every attempt is written down as it ends.
    """

    def __init__(
        self,
        server: SoakServer,
        disk: HomeDisk,
        plans: list[SlotPlan],
        rows: int,
        seed: int,
        needles: Callable[[str, str], list[bytes]],
        log: Path,
        say: Callable[[str], None],
    ) -> None:
        self.seen = Seen(records={plan.slot: [] for plan in plans})
        self.counters = RestartedCounters()
        self.lives: dict[str, AgentRecord] = {}
        self.marks = Marks()
        self._codes: dict[str, str] = {}
        self._server, self._disk, self._plans = server, disk, plans
        self._gate = asyncio.Semaphore(rows)
        self._rng = random.Random(f"{seed}/faults")
        self._needles = needles
        self._log = log.open("a", encoding="utf-8")
        self._say = say
        self._http = Http(server.url)
        self._well = asyncio.Event()
        self._well.set()
        self._number = 0

    async def run(self, minutes: float, kinds: Sequence[str], kill_every_s: float, fills: int, fill_s: float) -> None:
        """Follow the plans for so long, with a kill of one of `kinds` every so many seconds, and the disk full so many
        times."""
        began = time.time()
        ends = began + 60 * minutes
        watching = [asyncio.create_task(self._scrape()), asyncio.create_task(self._sweep())]
        slots = [asyncio.create_task(self._slot(plan, ends)) for plan in self._plans]
        harm = asyncio.create_task(self._harm(began, ends, kinds, kill_every_s, fills, fill_s))
        try:
            await asyncio.gather(*slots)
            await harm
            self._say("  closing")
            await asyncio.gather(*(self._close(plan) for plan in self._plans))
            self.seen.counts["starts that Ray gave up"] += self._server.failed_starts
            await self._last_sweep()
            await self._scrape_once()
        finally:
            for task in [*watching, harm, *slots]:
                task.cancel()
            await asyncio.gather(*watching, harm, *slots, return_exceptions=True)
            await self._http.close()
            self._log.close()

    # Slots.

    async def _slot(self, plan: SlotPlan, ends: float) -> None:
        while time.time() < ends:
            step = plan.next()
            async with self._gate:
                await self._do(plan, step)

    async def _close(self, plan: SlotPlan) -> None:
        for step in plan.closing():
            async with self._gate:
                await self._do(plan, step)
        # Half of the agents are deleted at the end, sources and forks alike.
        lives = [step.life for step in plan.closing()]
        for life in lives[: len(lives) if plan.slot % 2 else 1]:
            self.seen.held_tokens.append(self.lives[life].tokens if life in self.lives else 0)
            await self._do(plan, SoakStep("delete", life))
        self.seen.held_tokens += [self.lives[life].tokens for life in lives if life in self.lives]

    async def _do(self, plan: SlotPlan, step: SoakStep) -> None:
        self.seen.operations[step.kind] += 1
        life = self.lives.setdefault(step.life, AgentRecord(step.life, plan.continues))
        try:
            if step.kind in SPOKEN or step.kind == "inject":
                await self._speak(plan, life, step)
            elif step.kind == "fork":
                await self._fork(plan, life, step)
            elif step.kind == "delete":
                await self._delete(plan, life)
            else:
                await self._until(
                    life.id, "release", lambda: self._http.json("POST", f"/v1/agents/{life.id}/release"), (200, 404)
                )
        except Stuck as stuck:
            self.seen.stuck.append(f"{life.id} {step.kind}: {stuck}")
            self._break("answered", life, f"{step.kind}: {stuck}")

    async def _speak(self, plan: SlotPlan, life: AgentRecord, step: SoakStep) -> None:
        for mark in step.marks:
            self._codes[mark.name] = mark.code
        self.marks.tell(life.id, [mark.name for mark in step.marks])
        message = {"role": "user", "content": step.text}
        cut: Attempt | None = None
        for number in range(TRIES_MAX):
            info = await self._check(life)
            if step.kind == "inject":
                if info is None or (not life.continues and info["messages"] != len(life.messages)):
                    # It would go to another line of the conversation than the client's.
                    self.seen.counts["injections left out"] += 1
                    return
                attempt = await self._inject(life, message, info)
            else:
                # Only the first try is cut short.
                attempt = await self._turn(plan, life, step, message, first=not number, info=info)
            attempt.repeats = cut is not None and cut.messages == attempt.messages
            self.seen.records[plan.slot].append(attempt)
            life.history.append(attempt)
            await self._settle(life, attempt)
            self._log.write(json.dumps(asdict(attempt)) + "\n")
            if attempt.whole and (attempt.kept or not life.continues):
                if not life.continues:
                    life.messages += [message]
                    if step.kind != "inject":
                        life.messages += [{"role": "assistant", "content": attempt.text}]
                return
            if attempt.kept and life.continues:
                return
            if step.goes_on and step.kind in ("hang_up", "timeout") and not number:
                return
            cut = attempt if attempt.text and not attempt.whole else None
            if step.kind not in ("hang_up", "timeout") or number:
                await asyncio.sleep(min(2.0, 0.25 * (number + 1)))
        raise Stuck(f"not within {TRIES_MAX} tries")

    async def _turn(
        self, plan: SlotPlan, life: AgentRecord, step: SoakStep, message: dict[str, str], *, first: bool, info: Any
    ) -> Attempt:
        messages = [message] if life.continues else [*life.messages, message]
        ask = Ask(
            life.id, messages, life.continues, step.tokens_max, step.stop, step.streamed, plan.official,
            step.pieces if first else 0, step.timeout_s if first else None,
        )  # fmt: skip
        attempt = self._attempt(life, step.kind, messages, info)
        attempt.stop, attempt.tokens_max, attempt.expected = step.stop, step.tokens_max, step.expected
        told = await self._http.say(ask)
        self._take(attempt, told)
        return attempt

    async def _inject(self, life: AgentRecord, message: dict[str, str], info: Any) -> Attempt:
        attempt = self._attempt(life, "inject", [message], info)
        told = TurnResult()
        try:
            status, body = await self._http.json("POST", f"/v1/agents/{life.id}/inject", {"messages": [message]})
            told.error = "" if status == 200 else f"{status} {body}"
        except httpx.HTTPError as error:
            body, told.error = {}, f"connection: {type(error).__name__}"
        if not told.error:
            told.whole, told.prompt, told.cached = True, body["tokens"], body["cached_tokens"]
        self._take(attempt, told)
        return attempt

    def _attempt(self, life: AgentRecord, kind: str, messages: list[dict[str, str]], info: Any) -> Attempt:
        self._number += 1
        found = Attempt(self._number, life.id, kind, messages, life.continues or kind == "inject")
        found.held, found.after_stop, found.began = life.tokens, life.stopped, time.time()
        found.tier = "" if info is None else info.get("tier", "")
        return found

    def _take(self, attempt: Attempt, told: TurnResult) -> None:
        attempt.ended = time.time()
        attempt.text, attempt.whole, attempt.finish, attempt.error = told.text, told.whole, told.finish, told.error
        attempt.prompt, attempt.cached, attempt.drawn = told.prompt, told.cached, told.drawn
        attempt.told_unkept, attempt.why = told.unkept, told.why
        if told.error and not (attempt.kind == "timeout" and "deadline_exceeded" in told.error):
            excuse = excuse_of(told.error, attempt.began, attempt.ended, self.seen.faults)
            error = {"life": attempt.life, "kind": attempt.kind, "error": told.error[:300], "fault": excuse}
            self.seen.errors.append({**error, "at": attempt.ended})

    # What the server has.

    async def _settle(self, life: AgentRecord, attempt: Attempt) -> None:
        """Learn whether the attempt was kept."""
        wanted = life.after(attempt)
        if not attempt.whole:
            await self._well.wait()
            await asyncio.sleep(SETTLE_S)
        info = await self._info(life.id)
        tokens = tokens_held(info, life.continues, wanted)
        if tokens is None:
            attempt.kept = False
            if attempt.whole and not attempt.told_unkept:
                excuse = excuse_of("", attempt.began, attempt.ended, self.seen.faults)
                self.seen.counts[f"not kept and not said, during: {excuse or 'nothing'}"] += 1
                self._break(
                    "said", life, f"turn {attempt.number} is not kept and did not say so ({excuse or 'no fault'})"
                )
            elif attempt.whole:
                self.seen.counts["not kept, and said so"] += 1
            return
        self._kept(life, attempt, wanted, tokens)

    def _kept(self, life: AgentRecord, attempt: Attempt, messages: int, tokens: int) -> None:
        attempt.kept = True
        if attempt.told_unkept:
            self.seen.counts["kept, and said that it is not"] += 1
        life.kept, life.tokens = messages, tokens
        life.stopped = attempt.finish == "stop" and bool(attempt.stop)

    async def _check(self, life: AgentRecord) -> Any:
        """The agent is what its client believes. Returns what the server says of it."""
        info = await self._info(life.id)
        tokens = tokens_held(info, life.continues, life.kept)
        if tokens == life.tokens:
            return info
        last = life.history[-1] if life.history else None
        if last is not None and last.kept is False and not last.whole:
            late = tokens_held(info, life.continues, life.after(last))
            if late is not None:
                self.seen.counts["kept after its client had gone"] += 1
                self._kept(life, last, life.after(last), late)
                return info
        has = {name: info[name] for name in ("messages", "tokens")} if info else None
        self.seen.counts["agents that were not what they were"] += 1
        self._break("words", life, f"{life.kept} messages of {life.tokens} tokens were kept; there are {has}")
        # From here on it is what the server says, so that one loss is told once.
        life.kept, life.tokens = (info["messages"], info["tokens"]) if info else (0, 0)
        return info

    async def _info(self, agent: str) -> Any:
        _, info = await self._until(agent, "look", lambda: self._http.json("GET", f"/v1/agents/{agent}"), (200, 404))
        return info if "error" not in info else None

    async def _until(
        self, life: str, what: str, ask: Callable[[], Any], wanted: Iterable[int], limit_s: float = WELL_S
    ) -> tuple[int, Any]:
        """Ask until the answer is one of those wanted.

        Raises:
            Stuck: it is none in time.
        """
        ends = time.monotonic() + limit_s
        while True:
            await self._well.wait()
            began = time.time()
            try:
                status, body = await ask()
                if status in wanted:
                    return status, body
                error = f"{status} {json.dumps(body)}"
            except httpx.HTTPError as failure:
                error = f"connection: {type(failure).__name__}"
            excuse = excuse_of(error, began, time.time(), self.seen.faults)
            self.seen.errors.append(
                {"life": life, "kind": what, "error": error[:300], "fault": excuse, "at": time.time()}
            )
            if time.monotonic() > ends:
                raise Stuck(f"{what}: {error[:200]}")
            await asyncio.sleep(0.5)

    # Other operations.

    async def _fork(self, plan: SlotPlan, life: AgentRecord, step: SoakStep) -> None:
        await self._check(life)
        other = self.lives[step.other] = life.forked(step.other)
        if not life.kept:
            other.history.clear()
            return
        path = f"/v1/agents/{life.id}/fork"
        # 409: an earlier try has done it.
        await self._until(life.id, "fork", lambda: self._http.json("POST", path, {"as": other.id}), (200, 409))
        kept = self.marks.of(life.id)
        # What the source was told in turns that were not kept is the source's alone.
        said = json.dumps([attempt.messages for attempt in life.history if attempt.kept])
        self.marks.tell(other.id, [name for name in kept if name in said])
        self.seen.records[plan.slot].append(Deed("fork", life.id, other.id))
        await self._check(other)

    async def _delete(self, plan: SlotPlan, life: AgentRecord) -> None:
        names = self.marks.of(life.id)
        if names and life.kept and self.seen.controls.total() < CONTROLS:
            kept = json.dumps([attempt.messages for attempt in life.history if attempt.kept])
            known = [name for name in names if name in kept]
            found = await asyncio.to_thread(self._look, known[:3])
            forms = Counter(form for _, form in found)
            self.seen.controls["words found before"] += bool(forms["text"])
            self.seen.controls["token ids found before"] += bool(forms["tokens"])
            self.seen.controls["looked before"] += 1
        path = f"/v1/agents/{life.id}"
        await self._until(life.id, "delete", lambda: self._http.json("DELETE", path), (200, 404))
        self.marks.forget(life.id, time.time())
        self.seen.records[plan.slot].append(Deed("delete", life.id))
        del self.lives[life.id]
        if await self._info(life.id) is not None:
            self._break("forgotten", life, "it is still known")

    # Forgetting.

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self._sweep_once()

    async def _sweep_once(self) -> None:
        names = self.marks.due(time.time(), self.seen.faults)
        if not names:
            return
        self.seen.counts["words looked for after a minute"] += len(names)
        found = await asyncio.to_thread(self._look, names)
        if found:
            # A file may have gone while it was read.
            await asyncio.sleep(2.0)
            found = await asyncio.to_thread(self._look, sorted({name for name, _ in found}))
        for (name, form), paths in sorted(found.items()):
            self.seen.counts[f"words found after a minute, as {form}"] += 1
            where = ", ".join(sorted(paths)[:4])
            self.seen.broken.append(Broken("forgotten", name, f"{form} in {len(paths)} files: {where}"))

    async def _last_sweep(self) -> None:
        while len(self.marks.checked) < len(self.marks.gone):
            await asyncio.sleep(2.0)
            await self._sweep_once()

    def _look(self, names: list[str]) -> dict[tuple[str, str], set[str]]:
        """In which files the marks are, by name and form."""
        found: dict[tuple[str, str], set[str]] = {}
        texts = {name: [name.encode()] for name in names}
        tokens = {name: self._needles(name, self._codes[name]) for name in names}
        for path, data in self._server.files():
            for form, needles in (("text", texts), ("tokens", tokens)):
                for name in found_in(data, needles):
                    found.setdefault((name, form), set()).add(path)
        return found

    # Faults.

    async def _harm(
        self, began: float, ends: float, kinds: Sequence[str], kill_every_s: float, fills: int, fill_s: float
    ) -> None:
        left: list[str] = []
        minutes = ends - began
        full = [began + minutes * (n + 1) / (fills + 1) for n in range(fills)] if self._disk.bytes_max else []
        kill = began + kill_every_s
        while True:
            now = time.time()
            await self._revive()
            if full and now >= full[0]:
                full.pop(0)
                await self._fill(fill_s)
                kill = max(kill, time.time() + 0.5 * kill_every_s)
            elif kinds and now >= kill and now < ends - 10:
                if not left:
                    left = [*kinds]
                    self._rng.shuffle(left)
                await self._kill(left.pop())
                kill = time.time() + kill_every_s * self._rng.uniform(0.7, 1.3)
            elif now >= ends:
                return
            await asyncio.sleep(0.5)

    async def _revive(self) -> None:
        """A server that has ended by itself is started again; that it has ended is a broken law."""
        if (said := self._server.ended) is None:
            return
        fault = Fault(EXITED, time.time())
        self.seen.faults.append(fault)
        self._well.clear()
        self._break("answered", AgentRecord("server", False), f"it ended by itself: {said}")
        # It may lack what a full disk does not give.
        self._disk.empty()
        await asyncio.to_thread(self._server.start)
        await self._await_well(EVERYTHING)
        fault.ended = time.time()
        self._well.set()

    async def _fill(self, fill_s: float) -> None:
        fault = Fault(FULL, time.time())
        self.seen.faults.append(fault)
        taken = await asyncio.to_thread(self._disk.fill)
        self.seen.filled_bytes.append(taken)
        self._say(f"  the disk is full: {taken / 1e6:.0f} MB taken")
        try:
            ends = time.monotonic() + fill_s
            while time.monotonic() < ends and self._server.ended is None:
                await asyncio.sleep(0.5)
        finally:
            self._disk.empty()
        fault.ended = time.time()
        self._say("  the disk is free again")

    async def _kill(self, kind: str) -> None:
        await self._scrape_once()
        fault = Fault(kind, time.time())
        self.seen.faults.append(fault)
        if kind == EVERYTHING:
            self._well.clear()
        killed = await asyncio.to_thread(self._server.kill, kind)
        self._say(f"  killed: {kind}, {killed} processes")
        if kind == EVERYTHING:
            await asyncio.to_thread(self._server.start)
        await self._await_well(kind)
        fault.ended = time.time()
        self._well.set()
        self.seen.restarts_s.append(fault.ended - fault.began)
        self._say(f"  well after {fault.ended - fault.began:.1f} s")

    async def _await_well(self, kind: str) -> None:
        ends = time.monotonic() + WELL_S
        while time.monotonic() < ends:
            await asyncio.sleep(0.5)
            try:
                health, _ = await self._http.json("GET", "/health", timeout_s=15.0)
                store, _ = await self._http.json("GET", "/v1/agents?limit=1", timeout_s=15.0)
            except httpx.HTTPError:
                continue
            alive = kind == EVERYTHING or await asyncio.to_thread(self._server.pid_of, kind) is not None
            if health == 200 and store == 200 and alive:
                return
            if self._server.ended is not None:
                return
        self._break("answered", AgentRecord("server", False), f"{kind} does not come back within {WELL_S:g} s")

    # Figures.

    async def _scrape(self) -> None:
        while True:
            await asyncio.sleep(SCRAPE_S)
            await self._scrape_once()

    async def _scrape_once(self) -> None:
        if not self._well.is_set():
            return
        try:
            self.counters.add(await self._http.metrics())
            _, cluster = await self._http.json("GET", "/v1/cluster?agents=0", timeout_s=15.0)
            _, cache = await self._http.json("GET", "/v1/cache/stats", timeout_s=15.0)
        except httpx.HTTPError:
            return
        tiers = cluster["nodes"][0]["tiers"] if cluster.get("nodes") else {}
        held = sum(life.tokens for life in self.lives.values())
        sample = {"at": time.time(), "tokens held": held, "disk bytes": tiers.get("disk_bytes") or 0}
        self.seen.samples.append({**sample, "prefix bytes": cache.get("current_memory_bytes") or 0})

    def _break(self, law: str, life: AgentRecord, what: str) -> None:
        self.seen.broken.append(Broken(law, life.id, what))
        self._say(f"  BROKEN: {law}: {life.id}: {what}")
