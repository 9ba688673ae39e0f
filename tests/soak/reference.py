"""The undisturbed run: what was done and kept, once more, in the same order, with room for all and nobody killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .client import Ask, Http
from .driver import Record
from .ledger import Attempt, Deed, wrong_answer

POLL_S = 0.2


@dataclass
class Compared:
    """Answers that were compared, how many of them were whole, what was wrong, by attempt, and what the undisturbed
    server refused."""

    answers: int = 0
    whole: int = 0
    wrong: dict[int, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def is_settled(records: Sequence[Record], index: int) -> bool:
    """Whether it is known what became of a record: of a request once its life has had another one."""
    if index >= len(records):
        return False
    record = records[index]
    return isinstance(record, Deed) or any(later.life == record.life for later in records[index + 1 :])


class Reference:
    """Replays the records of each slot one by one.

    A turn that was not kept is taken by a copy of its agent, which is deleted then: the agent is as before it.
    """

    def __init__(self, url: str, rows: int, say: Callable[[str], None], spoil: int = 0) -> None:
        self._http = Http(url)
        self._gate = asyncio.Semaphore(rows)
        self._say = say
        self._spoil = spoil
        self._compared = Compared()
        self._done = 0

    async def run(self, slots: dict[int, list[Record]], over: asyncio.Event | None = None) -> Compared:
        """Replay them all. A slot of which the undisturbed server refuses something ends there.

        Args:
            slots: they may grow until it is `over`, if that is given.
        """
        try:
            work = (self._slot(records, over) for records in slots.values())
            done = await asyncio.gather(*work, return_exceptions=True)
            self._compared.failures = [repr(failure) for failure in done if failure is not None]
        finally:
            await self._http.close()
        return self._compared

    async def _slot(self, records: list[Record], over: asyncio.Event | None) -> None:
        known: set[str] = set()
        index = 0
        while True:
            while over is not None and not over.is_set() and not is_settled(records, index):
                await asyncio.sleep(POLL_S)
            if index >= len(records):
                return
            record, index = records[index], index + 1
            async with self._gate:
                if isinstance(record, Deed):
                    await self._deed(record, known)
                elif record.kind == "inject":
                    await self._inject(record)
                else:
                    await self._turn(record, known)
            self._done += 1
            if self._done % 100 == 0:
                self._say(f"  {self._done} done")

    async def _deed(self, deed: Deed, known: set[str]) -> None:
        if deed.kind == "fork":
            await self._json("POST", f"/v1/agents/{deed.life}/fork", {"as": deed.other})
            known.add(deed.other)
        else:
            await self._forget(deed.life, known)

    async def _forget(self, life: str, known: set[str]) -> None:
        if life in known:
            await self._json("DELETE", f"/v1/agents/{life}")
            known.discard(life)

    async def _inject(self, attempt: Attempt) -> None:
        if attempt.kept:
            body = await self._json("POST", f"/v1/agents/{attempt.life}/inject", {"messages": attempt.messages})
            if attempt.whole:
                self._compare(attempt, "", "", body["tokens"])

    async def _turn(self, attempt: Attempt, known: set[str]) -> None:
        if not attempt.kept and not attempt.text and not attempt.whole:
            return
        agent = attempt.life
        if not attempt.kept:
            agent = f"{attempt.life}.unkept"
            if attempt.life in known:
                await self._json("POST", f"/v1/agents/{attempt.life}/fork", {"as": agent})
        told = await self._http.say(
            Ask(agent, attempt.messages, attempt.continues, attempt.tokens_max, attempt.stop, streamed=False)
        )
        if not told.whole:
            raise RuntimeError(f"the undisturbed run was refused: {attempt.life} {attempt.number}: {told.error}")
        known.add(agent)
        if not attempt.kept:
            await self._forget(agent, known)
        self._compare(attempt, told.text, told.finish, told.prompt)

    def _compare(self, attempt: Attempt, text: str, finish: str, prompt: int) -> None:
        if self._spoil and attempt.whole and attempt.text:
            self._spoil -= 1
            text = text[:-1] + chr(ord(text[-1]) + 1) if text else "x"
        self._compared.answers += 1
        self._compared.whole += attempt.whole
        if wrong := wrong_answer(attempt, text, finish, prompt):
            self._compared.wrong[attempt.number] = wrong
            self._say(f"  BROKEN: answers: {attempt.life} {attempt.number} ({attempt.kind}): {wrong}")

    async def _json(self, method: str, path: str, body: object = None) -> dict[str, int]:
        status, answer = await self._http.json(method, path, body)
        if status != 200:
            raise RuntimeError(f"the undisturbed run was refused: {method} {path}: {status} {answer}")
        return answer
