"""An engine over a tiny model, driven by hand."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from satchel.actors.model_files.identity.model_identity import adapted_id
from satchel.actors.protocol.block_ids import block_ids, root_id
from satchel.actors.protocol.replica_messages import GenerateRequest, MediaSpan, Sampling, SequenceUpdate
from satchel.actors.replica.execution.draft_model.model_drafts import DraftModel
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.execution.sampling.sampling import Draw
from satchel.actors.replica.loading import models
from satchel.actors.replica.loop.engine import Engine
from satchel.actors.replica.memory.disk_tier import DiskTier
from satchel.cluster.config.config import Scheduling
from satchel.cluster.errors import SatchelError
from tests.worlds.models.families import write_model


def load_tiny(folder: Path, **how: Any) -> LoadedModel:
    """A model of random weights. It says something else after every token, which no rounding may change."""
    folder = write_model(folder, "llama")
    return models.load(
        str(folder), context_tokens_max=None, progress=lambda what, fraction: None, numerics="reproducible", **how
    )


@dataclasses.dataclass
class Received:
    """What an outbox saw of one request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    finish: str | None = None
    cached: int | None = None
    read: int = 0
    """How many of the cached tokens came from disk."""
    queued_s: float | None = None
    prefill_s: float | None = None
    error: dict | None = None
    logprobs: list = dataclasses.field(default_factory=list)


_reader = ThreadPoolExecutor(1)

Logits = dict[tuple[int, int], np.ndarray]
"""By the sequence's number (its seed) and how many tokens it had drawn before."""


class Forced:
    """Stands for `BatchSampler`: each sequence gets its next token from `scripts`, and its logits are recorded."""

    def __init__(self, scripts: dict[int, list[int]], noted: Logits) -> None:
        self._scripts = scripts
        self._noted = noted
        self._sequences: list[list[int]] = []

    def add(self, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        self._sequences.append([sampling.seed, len(prompt), len(generated)])

    def keep(self, indices: Sequence[int]) -> None:
        self._sequences = [self._sequences[index] for index in indices]

    def ahead(self, drafts: Sequence[Sequence[int]]) -> Forced:
        ahead = Forced(self._scripts, self._noted)
        for (seed, prompt, drawn), draft in zip(self._sequences, drafts, strict=True):
            ahead._sequences += [[seed, prompt, drawn + place] for place in range(len(draft) + 1)]
        return ahead

    def __call__(self, logits: mx.array, masks: None) -> Draw:
        values = np.array(logits.astype(mx.float32))
        tokens = []
        for index, sequence in enumerate(self._sequences):
            seed, prompt, drawn = sequence
            self._noted[(seed, drawn)] = values[index]
            script = self._scripts[seed]
            tokens.append(script[min(prompt + drawn, len(script) - 1)])
            sequence[2] += 1
        return Draw(mx.array(tokens, dtype=mx.uint32), mx.ones((len(tokens),), dtype=mx.bool_))


class Bench:
    """An engine without its thread: `submit`, `turn`, and the results. Every turn checks the engine's tables."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        kv_tokens_max: int | None = None,
        memory_bytes_max: int = 2**32,
        disk: DiskTier | None = None,
        drafts: bool = False,
        exact_drafts: bool = False,
        draft_model: DraftModel | None = None,
        **scheduling: int,
    ) -> None:
        self.loaded = loaded
        spec, sequences = loaded.spec, scheduling.get("sequences_max", 8)
        kv_bytes = 100_000 * spec.bytes_per_token + 2 * sequences * spec.bytes_per_sequence
        chosen: dict[str, Any] = {"sequences_max": sequences, "kv_bytes_max": kv_bytes, **scheduling}
        settings = Scheduling(**chosen)
        drafting: dict[str, Any] = {
            "drafts": drafts or exact_drafts or draft_model is not None,
            "exact_drafts": exact_drafts,
            "draft_model": draft_model,
        }
        self.engine = Engine(loaded, settings, memory_bytes_max, self._take, disk, **drafting)
        if kv_tokens_max is not None:
            # Open blocks, which are large in these models, cost nothing then.
            scheduler = self.engine.scheduler
            scheduler.limits = dataclasses.replace(scheduler.limits, kv_tokens_max=kv_tokens_max, sequence_tokens=0)
        self.sequences: dict[str, Received] = {}
        self.refused: dict[str, SatchelError] = {}

    def _take(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        for update in updates.get("bench", []):
            sequence = self.sequences.setdefault(update.request_id, Received())
            assert sequence.finish is None, "nothing comes after the end of a sequence"
            sequence.tokens += update.tokens
            sequence.finish = update.finish
            sequence.error = update.error
            sequence.logprobs += update.logprobs or []
            if update.cached_tokens is not None:
                assert sequence.cached is None
                sequence.cached, sequence.read = update.cached_tokens, update.disk_tokens
                assert update.queued_s is not None
                sequence.queued_s = update.queued_s
            if update.prefill_s is not None:
                assert sequence.prefill_s is None and len(sequence.tokens) == len(update.tokens)
                sequence.prefill_s = update.prefill_s

    def digest_of(self, adapter: str) -> bytes:
        """The digest of one of the model's adapters by its name."""
        return {"": b"", **{each.name: each.digest for each in self.loaded.adapters.all}}[adapter]

    def submit(
        self,
        name: str,
        prompt: list[int],
        *,
        generated: int = 0,
        deadline_s: float = 600.0,
        priority: int = 0,
        choices: int = 1,
        agent: str = "",
        media: Sequence[MediaSpan] = (),
        remembered: int = 0,
        lasting: int = 0,
        saved: bool = False,
        reusable: bool = True,
        flow: str = "",
        tenant: str = "",
        memory: int | None = None,
        on_disk: int | None = None,
        adapter: str = "",
        **sampling,
    ):
        scope = f"tenant:{tenant or 'test'}"
        digest = self.digest_of(adapter)
        model_id = adapted_id(self.loaded.model_id, digest)
        root = root_id(model_id, scope)
        fields = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **sampling}
        request = GenerateRequest(
            request_id=name,
            consumer="bench",
            model="m",
            agent=agent,
            prompt=prompt,
            block_ids=block_ids(root, prompt),
            root_id=root,
            scope=scope,
            sampling=Sampling(**fields),
            priority=priority,
            deadline_s=deadline_s,
            generated=generated,
            choices=choices,
            media=list(media),
            remembered_tokens=remembered,
            lasting_tokens=lasting,
            lasting_saved=saved,
            reusable=reusable,
            flow=flow,
            tenant=tenant,
            memory_bytes_max=memory,
            disk_bytes_max=on_disk,
            model_id=model_id if adapter else b"",
            adapter=digest,
        )
        # On another thread than the engine's, as in a replica.
        known, embeddings = _reader.submit(self.engine.look_up, request).result()
        refuse = lambda error: self.refused.update({name: error}) if error else None  # noqa: E731
        grammar = _reader.submit(self.engine.grammar_of, request).result()
        self.engine.submit(request, refuse, known, embeddings, grammar)

    def prepare(
        self,
        agent: str,
        prompt: list[int],
        *,
        tenant: str = "",
        memory: int | None = None,
        most: int = 1000,
        adapter: str = "",
    ) -> None:
        """Have a prompt prepared, and compute at most so many of its chunks."""
        scope = f"tenant:{tenant or 'test'}"
        digest = self.digest_of(adapter)
        root = root_id(adapted_id(self.loaded.model_id, digest), scope)
        fields: dict[str, Any] = {
            "scope": scope,
            "agent": agent,
            "prompt": prompt,
            "tenant": tenant,
            "memory_bytes_max": memory,
            "adapter": digest,
        }
        ids, nothing = block_ids(root, prompt), Sampling(max_tokens=0)
        self.engine.prepare_prompt(
            GenerateRequest("prepared", "", "m", block_ids=ids, root_id=root, sampling=nothing, **fields)
        )
        self.engine.step()
        self.rest(most)

    def rest(self, most: int = 1000) -> None:
        """Let the engine compute at most so many chunks of what is to be prepared."""
        while self.engine.prepare and most:
            self.engine.step()
            self.engine.wait()
            most -= 1
            self.engine.prefixes.check()
            self.engine.executor.check()

    def turn(self) -> bool:
        busy = self.engine.step()
        # What is read back comes from another thread.
        ends = time.monotonic() + 60
        while self.engine.restores and time.monotonic() < ends:
            time.sleep(0.002)
            self.engine._take_commands()
        self.engine.scheduler.check()
        self.engine.prefixes.check()
        self.engine.executor.check()
        return busy

    def submit_between_turns(self, asked: Sequence[tuple[list[int], dict[str, Any]]], rng: random.Random) -> None:
        """Submits prompts, with how each is drawn, in any order and with some turns in between, and drains. Each
        sequence is called by its number."""
        order = list(range(len(asked)))
        rng.shuffle(order)
        for index in order:
            prompt, how = asked[index]
            self.submit(str(index), prompt, **how)
            for _ in range(rng.randrange(4)):
                self.turn()
        self.drain()

    def drain(self) -> None:
        """Turn until nothing is left to do."""
        for _ in range(5000):
            if self.turn():
                continue
            if self.engine.pictures:
                # They are encoded on another thread.
                time.sleep(0.005)
            elif not self.engine.scheduler.waiting:
                return
        raise AssertionError("the engine does not come to rest")

    def run(self, name: str, prompt: list[int], **fields) -> Received:
        """Submit one request and run it to its end."""
        self.submit(name, prompt, **fields)
        self.drain()
        return self.sequences[name]
