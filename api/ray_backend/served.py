"""The served models: the registry's entries, and their replicas' descriptions.

No request waits for a replica that does not answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from ...actors.model_files.identity.adapter_infos import with_adapter
from ...actors.protocol import registry
from ...actors.protocol.registry import ServedEntry
from ...actors.protocol.replica_messages import ModelInfo
from ...cluster.config.timing import Timing
from ...cluster.detached import detached
from ...cluster.errors import NoReplica
from ..requests.backend import ServedModel

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_ANSWER_S = 1.0
"""How long requests wait for a model's description the first time that its replicas are asked."""

ASK_AGAIN_S = 1.0

FOLLOWED_S = 30.0
"""So long after a request the registry is still read, so that the next request need not wait for it."""

Ask = Callable[[str], Awaitable[ModelInfo | None]]
"""Returns a replica's description of its model; None if not loaded, or without an answer in time."""


@dataclass
class _Asking:
    """A query to one model's replicas. Requests wait only for the first query, and at most until `waits_until`."""

    task: asyncio.Task[None]
    waits_until: float
    again_at: float = math.inf


class ServedModels:
    """One event loop's view of the served models, at most `registry_s` old. If the registry does not answer, a request
    waits `brief_answer_s` and then uses the last view."""

    def __init__(self, ask: Ask, timing: Timing) -> None:
        self._ask, self._timing = ask, timing
        self._entries: tuple[ServedEntry, ...] | None = None
        self._read_at = self._reading_from = self._stale_before = self._wanted_at = -math.inf
        """When the last reading began that ended, and the one under way; before when readings do not count; and when
        the view was last asked for."""
        self._reading: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._known: dict[ServedEntry, ServedModel] = {}
        self._asking: dict[ServedEntry, _Asking] = {}
        self._unloaded: set[ServedEntry] = set()
        """Models that have had no replicas since they were asked: their files may be others when they are loaded."""

    async def entries(self) -> tuple[ServedEntry, ...]:
        """Returns every served model, the default first, whether its replicas have answered or not.

        Raises:
            NoReplica: the registry could never be read.
        """
        self._wanted_at = time.monotonic()
        if self._wanted_at - self._read_at > self._timing.registry_s or self._read_at < self._stale_before:
            await asyncio.wait({self._begin_reading()}, timeout=self._timing.brief_answer_s)
        if self._following is None or self._following.done():
            self._following = detached(self._follow())
        if self._entries is None:
            raise NoReplica("the cluster's control store does not answer now", retry_after_s=2.0)
        return self._entries

    def refresh(self) -> None:
        """Makes the next caller wait for a reading of the registry that begins now or later: it has just changed."""
        self._stale_before = time.monotonic()

    async def models(self) -> list[ServedModel]:
        """Returns the models whose replicas have ever answered, the default first.

        Raises:
            NoReplica: the registry could never be read.
        """
        entries = await self.entries()
        now = time.monotonic()
        first = []
        for entry in entries:
            known = self._known.get(entry)
            settled = known is not None and not known.info.proving and entry not in self._unloaded
            if settled or not entry.replicas:
                continue
            asking = self._asking.get(entry)
            if asking is None or now >= asking.again_at:
                waits_until = now + FIRST_ANSWER_S if asking is None else now
                asking = self._asking[entry] = _Asking(detached(self._learn(entry)), waits_until)
            if (known is None or entry in self._unloaded) and now < asking.waits_until and not asking.task.done():
                first.append(asking)
        if first:
            waits_until = max(asking.waits_until for asking in first)
            await asyncio.wait({asking.task for asking in first}, timeout=waits_until - now)
        known = [(entry, self._known[entry]) for entry in entries if entry in self._known]
        return [model for entry, served in known for model in (served, *_with_adapters(served, entry))]

    async def replicas_of(self, name: str) -> str:
        """Returns the name of the model whose replicas compute a model: of an adapter the one that it belongs to.

        Raises:
            NoReplica: as `entries`.
        """
        found = (entry.model.name for entry in await self.entries() if name in entry.model.adapters)
        return next(found, name)

    def close(self) -> None:
        """Cancels all queries."""
        tasks = [asking.task for asking in self._asking.values()]
        for task in [*tasks, self._reading, self._following]:
            if task is not None:
                task.cancel()

    def _begin_reading(self) -> asyncio.Task[None]:
        if self._reading is None or self._reading.done() or self._reading_from < self._stale_before:
            self._reading_from = time.monotonic()
            self._reading = detached(self._read(self._reading_from))
        return self._reading

    async def _follow(self) -> None:
        """Reads the registry again and again until nobody has asked for `FOLLOWED_S`, or a reading fails."""
        before = -math.inf
        while time.monotonic() - self._wanted_at < FOLLOWED_S and self._read_at > before:
            before = self._read_at
            await asyncio.sleep(self._timing.registry_s / 2)
            await asyncio.wait({self._begin_reading()})

    async def _read(self, began: float) -> None:
        try:
            entries = await asyncio.to_thread(registry.entries)
        except Exception:
            # The control store may be restarting: what was served before is the best guess.
            logger.warning("the registry cannot be read", exc_info=True)
            return
        if began < self._read_at:
            # A later reading has ended already.
            return
        self._entries, self._read_at = entries, began
        for gone in (self._known.keys() | self._asking.keys()) - set(entries):
            self._known.pop(gone, None)
            self._forget_asking(gone)
        for entry in entries:
            if not entry.replicas:
                self._unloaded.add(entry)
                self._forget_asking(entry)
        self._unloaded &= set(entries)

    def _forget_asking(self, entry: ServedEntry) -> None:
        if (asking := self._asking.pop(entry, None)) is not None:
            asking.task.cancel()

    async def _learn(self, entry: ServedEntry) -> None:
        """Asks all of the model's replicas at once, and takes the first description, preferably of a replica whose
        self-test has ended."""
        asked = [asyncio.ensure_future(self._ask(name)) for name in entry.replicas]
        try:
            for answer in asyncio.as_completed(asked):
                info = await answer
                if info is not None:
                    self._known[entry] = _served(info, entry)
                    self._unloaded.discard(entry)
                    if not info.proving:
                        return
        finally:
            for task in asked:
                task.cancel()
            if (asking := self._asking.get(entry)) is not None:
                asking.again_at = time.monotonic() + ASK_AGAIN_S


def _with_adapters(served: ServedModel, entry: ServedEntry) -> list[ServedModel]:
    """Returns the model with each of its adapters, as models of their own."""
    infos = [with_adapter(served.info, adapter) for adapter in served.info.adapters]
    return [replace(served, info=info) for info in infos if info.name in entry.model.adapters]


def _served(info: ModelInfo, entry: ServedEntry) -> ServedModel:
    return ServedModel(
        info,
        template_kwargs=entry.model.template_kwargs,
        marks_are_tokens=entry.model.control_tokens_in_text == "tokens",
        schema_in_prompt=entry.model.schema_in_prompt == "auto",
        omits_unseen=entry.model.unseen_media == "omit",
    )
