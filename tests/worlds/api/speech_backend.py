"""A backend with models of speech: the tiny backend, with an engine of each on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from satchel.actors.model_files.identity.model_identity import ModelIdentity
from satchel.actors.protocol.speech_messages import SpeechPiece, SpeechRequest
from satchel.actors.replica.audio.engine import SpeechEngine
from satchel.actors.replica.audio.listening import ListeningModel
from satchel.actors.replica.audio.speaking import SpeakingModel
from satchel.actors.replica.jobs.host import JobHost
from satchel.api.requests.backend import ServedModel, SpeechAnswer
from satchel.api.text.model import TextModel
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import from_wire
from tests.worlds.api.fake_backend import FakeBackend
from tests.worlds.api.served_models import served_model


class SpeechBackend(FakeBackend):
    """Serves what `FakeBackend` serves, and models of speech by name. Make it on its event loop; `close` ends the
    engines' threads."""

    def __init__(
        self,
        text: TextModel,
        served: list[ServedModel],
        models: dict[str, ListeningModel | SpeakingModel],
        waiting_max: int,
    ) -> None:
        named = (served_model(name=name, folder=Path(f"/{name}"), speech=each.info) for name, each in models.items())
        super().__init__(text, [*served, *named])
        self.asked: list[SpeechRequest] = []
        self.hosts = {name: JobHost(USUAL) for name in models}
        self.engines = {
            name: SpeechEngine(each, ModelIdentity({}, {}), waiting_max, 2**33, self.hosts[name].send)
            for name, each in models.items()
        }
        self._threads = [threading.Thread(target=engine.run, daemon=True) for engine in self.engines.values()]
        for name, engine in self.engines.items():
            self.hosts[name].take_up(engine, Path(f"/{name}"))
        for thread in self._threads:
            thread.start()

    async def do_speech(
        self, model: ServedModel, request: SpeechRequest, told: Callable[[SpeechPiece], None]
    ) -> SpeechAnswer:
        self.asked.append(request)
        name, number = model.info.name, 0
        host, engine = self.hosts[name], self.engines[name]
        try:
            await host.queue(engine, request)
            while True:
                update: Any = await host.next_update(request.request_id, number)
                if update is None:
                    continue
                number = update.number
                for piece in update.partial:
                    told(piece)
                if update.error is not None:
                    raise from_wire(update.error)
                if update.done:
                    return SpeechAnswer(update, f"{name}#0", "mac0", "test: the only one")
        finally:
            host.abort((request.request_id,))

    async def idle(self) -> None:
        """Waits until no engine has a request."""
        async with asyncio.timeout(60):
            while any(engine.queue.request_ids for engine in self.engines.values()):
                await asyncio.sleep(0.02)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.end_all()
            engine.stop()
        for thread in self._threads:
            thread.join(60)
