"""The trial of a model before it is served: rows in company, in parts and from memory must compute what the model
computes alone.

A family that nobody here has seen may look at a batch's padding, share one layer's KV with another, count positions by
itself, or overflow in another number format. All of that loads, and then says wrong words to whoever is not alone. So a
real engine runs three rows of a model, forced along given tokens, and its logits are compared with those that the bare
model has with its own caches. What does not hold is not used, one thing after the other.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ...cluster.config import Model, Scheduling
from ...cluster.errors import ClusterError, ModelLoadError
from ...cluster.home import write_private_json
from ..model_files.source import Progress, first_sentence
from ..protocol.block_ids import block_ids, digest, root_id
from ..protocol.messages import GenerateRequest, RowUpdate, Sampling
from .engine import Engine
from .execution.agreement import MODEL_ERRORS
from .execution.decode_ways import DEQUANTIZED, DecodeWay
from .execution.models import LoadedModel, resealed
from .execution.sampling import Draw
from .kv.device import device_bytes, device_name, on_gpu
from .kv.paged_cache import Reads
from .kv.sealing import FULL_PRECISION, POLICIES

logger = logging.getLogger(__name__)

PROMPTS = (20, 262, 300)
"""Tokens of the rows' prompts: one is within a block, the others are past one, as far as the model's context allows."""

WINDOW_MAX, PAST_WINDOW = 1100, 40
"""The longest window that a row is made for which goes past it, and by how many tokens it does."""

DRAWN = 4
"""How many logits of every row are compared."""

TURN_TOKENS = 9
"""What is new in a second turn."""

MORE_TOKENS = 2 * DRAWN + TURN_TOKENS
"""The most that follows a row's prompt."""

ROUNDING, ROUNDING_16 = 2e-3, 6e-2
"""How far a logit may be off, of the largest one, in float32 and in 16 bits, in three of four places. Sums are added in
another order, and a router may then choose another expert."""

GROSS, GROSS_16 = 5e-2, 0.5
"""How far it may be off in the others. Sealed recurrent models reach 0.02: a state that rounds otherwise takes another
code."""

OWN = "own"
"""KV in the model's own caches, which nothing else reads."""

_STEPS_MAX = 4000
_VERSION = 3
"""Raised whenever the trial or what it tries changes."""

Logits = dict[tuple[int, int], np.ndarray]
"""By the row's number and how many tokens it has drawn, `(vocabulary,) float32`."""


@dataclass(frozen=True)
class Verdict:
    """How a model may be served.

    Attributes:
        kv: how KV is kept instead: `fp16` in sealed blocks as computed, `own` in the model's caches; "" as asked for.
        usual_way: whether decode steps may read sealed KV in the way that was found at load.
        together: whether rows may run at the same time.
        apart: whether steps compute row by row.
        reuses: whether KV may be used again.
        refusal: why it cannot be served at all; empty if it can.
        notes: what of it is not as it was asked for, and why, a sentence each.
    """

    kv: str = ""
    usual_way: bool = True
    together: bool = True
    reuses: bool = True
    apart: bool = False
    refusal: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Proven:
    """A model as it may be served. `notes` say what of it is not as it was asked for, and why, a sentence each."""

    loaded: LoadedModel
    together: bool = True
    notes: Sequence[str] = ()

    def scheduling(self, asked: Scheduling) -> Scheduling:
        """Returns the limits of its scheduler."""
        return asked if self.together else replace(asked, rows_max=1, prefill_rows_max=1)


def prove(loaded: LoadedModel, model: Model, progress: Progress, known: Path | None = None) -> Proven:
    """Tries a loaded model, or takes what an earlier trial of it on this device found. Models that ship with Satchel
    were tried on CPUs by its tests.

    Args:
        known: the file where what was found is kept; None for nowhere.

    Raises:
        ModelLoadError: it cannot be served rightly; the message says what is wrong.
    """
    source = model.source
    if not model.trial:
        note = "it was not tried (trial: false), so nobody knows whether it is right in company and from memory"
        logger.warning("%s: %s", source, note)
        return Proven(loaded, notes=[note])
    if source.startswith("embedded:") and not on_gpu():
        return Proven(loaded)
    key = digest(b"satchel.trial", loaded.model_id, device_name().encode(), bytes([_VERSION])).hex()
    verdict = _read(known).get(key)
    if verdict is None:
        progress(f"trying {source}", None)
        began = time.perf_counter()
        verdict = _try(loaded)
        logger.info("%s was tried in %.1f s", source, time.perf_counter() - began)
        if known is not None:
            _write(known, key, verdict)
    if verdict.refusal:
        raise ModelLoadError(f"{source} cannot be served: {verdict.refusal}")
    for note in verdict.notes:
        logger.warning("%s: %s", source, note)
    if not verdict.usual_way:
        loaded = replace(loaded, way=DEQUANTIZED)
    if verdict.kv:
        loaded = resealed(loaded, POLICIES.get(verdict.kv))
    if verdict.apart:
        loaded = replace(loaded, apart=True)
    if not verdict.reuses:
        loaded = replace(loaded, spec=replace(loaded.spec, kept=False))
    return Proven(loaded, verdict.together, verdict.notes)


def _try(loaded: LoadedModel) -> Verdict:
    if loaded.context_tokens <= MORE_TOKENS + 1:
        return Verdict(notes=["it was not tried: its context is too short"])
    trial = _Trial(loaded)
    try:
        own = trial.alone_with_own_caches(loaded)
    except MODEL_ERRORS as error:
        return Verdict(refusal=f"it does not go on from its own caches ({first_sentence(error)})")
    if _not_finite(own):
        return Verdict(refusal=f"in {loaded.dtype} it computes numbers that are not finite; try another `dtype`")
    tried: list[tuple[_Variant, _Faults]] = []
    for variant in _variants(loaded):
        if variant.apart and not loaded.apart and not any(faults.together for _, faults in tried):
            continue
        tried.append((variant, trial.faults(variant.of(loaded), own)))
        if not tried[-1][1]:
            break
    # The first of those that need the least to be given up.
    place = min(range(len(tried)), key=lambda index: tried[index][1].weight)
    variant, faults = tried[place]
    if faults.alone:
        return Verdict(refusal=f"with a prompt in parts {faults.alone}")
    notes = [f"{variant.means}: otherwise {tried[place - 1][1].first}"] if place else []
    if loaded.apart:
        notes = ["steps compute row by row: its caches cannot be those of a batch", *notes]
    if faults.together:
        notes = [*notes, f"rows are computed one after the other: in company {faults.together}"]
    if not loaded.spec.reusable:
        notes = [
            *notes,
            "nothing is used again, every turn is computed from its beginning: its caches are of other kinds",
        ]
    if faults.again:
        notes = [*notes, f"nothing is used again, every turn is computed from its beginning: {faults.again}"]
    return Verdict(
        variant.kv,
        usual_way=variant.way == loaded.way,
        together=not faults.together,
        reuses=not faults.again,
        apart=variant.apart,
        notes=notes,
    )


@dataclass(frozen=True)
class _Variant:
    """One way to serve a model: how its KV is kept, as in `Verdict`, how decode steps read it, whether they compute row
    by row, and what that `means` for the user."""

    kv: str
    way: DecodeWay
    means: str = ""
    apart: bool = False

    def of(self, loaded: LoadedModel) -> LoadedModel:
        loaded = replace(loaded, apart=self.apart)
        return resealed(loaded, POLICIES.get(self.kv)) if self.kv else replace(loaded, way=self.way)


def _variants(loaded: LoadedModel) -> Iterator[_Variant]:
    """The best first."""
    usual = _Variant("", loaded.way, apart=loaded.apart)
    yield usual
    policy = loaded.spec.policy
    ways = [usual]
    if policy is not None and loaded.way.reads is not Reads.DEQUANTIZED:
        ways.append(replace(usual, way=DEQUANTIZED, means="decode steps copy blocks together"))
    yield from ways[1:]
    if policy is not None and policy.quantizes:
        yield _Variant(FULL_PRECISION, DEQUANTIZED, "KV is kept as computed")
    if policy is not None:
        yield _Variant(OWN, DEQUANTIZED, "KV is kept as computed, in the model's own way")
    for one in ways:
        if not loaded.apart:
            yield replace(one, means="steps compute row by row", apart=True)


@dataclass
class _Faults:
    """What does not hold, as the end of a sentence: of a row `alone` in the engine, of rows `together`, and of turns
    that use KV `again`; empty where it does."""

    alone: str = ""
    together: str = ""
    again: str = ""

    def __bool__(self) -> bool:
        return bool(self.first)

    @property
    def first(self) -> str:
        return self.alone or self.together or self.again

    @property
    def weight(self) -> int:
        """How much has to be given up because of them."""
        return 4 * bool(self.alone) + 2 * bool(self.together) + bool(self.again)


class _Trial:
    """The rows of a trial. Their tokens are drawn from the vocabulary, always the same ones."""

    def __init__(self, loaded: LoadedModel) -> None:
        draw, vocabulary = random.Random(1).randrange, loaded.vocabulary_size
        # The first ones are often special.
        first = min(256, vocabulary // 2)
        window = max((layer.window for layer in loaded.spec.layers if layer.window <= WINDOW_MAX), default=0)
        prompts = [*PROMPTS, *([window + PAST_WINDOW] if window + PAST_WINDOW > PROMPTS[-1] else [])]
        self._prompts = [min(prompt, loaded.context_tokens - MORE_TOKENS) for prompt in prompts]
        self._scripts = [[draw(first, vocabulary) for _ in range(prompt + MORE_TOKENS)] for prompt in self._prompts]
        self._rounding, self._gross = (ROUNDING, GROSS) if loaded.dtype == "float32" else (ROUNDING_16, GROSS_16)

    def alone_with_own_caches(self, loaded: LoadedModel) -> Logits:
        """What the bare model computes, as mlx-lm would: a prompt in one piece, then steps."""
        logits: Logits = {}
        for row, (prompt, script) in self._rows():
            caches = make_prompt_cache(loaded.model)
            loaded.model(mx.array([script[: prompt - 1]], mx.uint32), cache=caches)
            mx.eval([cache.state for cache in caches])
            for drawn in range(DRAWN):
                step = loaded.model(mx.array([[script[prompt - 1 + drawn]]], mx.uint32), cache=caches)[0, -1]
                logits[(row, drawn)] = np.array(step.astype(mx.float32))
        return logits

    def in_one_piece(self, loaded: LoadedModel) -> Logits:
        """What the bare model computes without a step. Some models' windows are one longer in prompts than in steps;
        then either is right."""
        logits: Logits = {}
        for row, (prompt, script) in self._rows():
            given = mx.array([script[: prompt + DRAWN - 1]], mx.uint32)
            whole = loaded.model(given, cache=make_prompt_cache(loaded.model))[0, prompt - 1 :]
            logits |= {(row, drawn): np.array(one) for drawn, one in enumerate(whole.astype(mx.float32))}
        return logits

    def _rows(self) -> Iterable[tuple[int, tuple[int, list[int]]]]:
        return enumerate(zip(self._prompts, self._scripts, strict=True))

    def faults(self, loaded: LoadedModel, own: Logits) -> _Faults:
        """What does not hold of a model in an engine."""
        found, policy = _Faults(), loaded.spec.policy
        alone, wrong = self._alone(loaded)
        plain = alone
        if policy is not None and policy.quantizes and not wrong:
            # What rounding to a few bits does is not known, so the same way is compared with KV as it is.
            plain, wrong = self._alone(replace(resealed(loaded, POLICIES[FULL_PRECISION]), way=loaded.way))
        found.alone = wrong or self._difference(own, plain)
        if found.alone and not wrong and not self._difference(self.in_one_piece(loaded), plain):
            found.alone = ""
        if found.alone:
            return found
        *short, long = range(len(self._prompts))
        with self._scene(loaded) as scene:
            scene.run([long], short)
            found.together = scene.failure or self._difference(alone, scene.noted)
        if loaded.spec.reusable:
            more = DRAWN + TURN_TOKENS
            rows = [1, long] if long >= len(PROMPTS) else [1]
            with self._scene(loaded) as anew:
                anew.run(rows, more=more)
            with self._scene(loaded) as scene:
                scene.run(rows)
                scene.noted.clear()
                scene.run(rows, more=more)
                found.again = scene.failure or self._difference(anew.noted, scene.noted)
        return found

    def _alone(self, loaded: LoadedModel) -> tuple[Logits, str]:
        """Returns what an engine computes of every row alone, and what is wrong of it."""
        with self._scene(loaded) as scene:
            for row in range(len(self._prompts)):
                scene.run([row])
        return scene.noted, scene.failure or _not_finite(scene.noted)

    def _scene(self, loaded: LoadedModel) -> _Scene:
        return _Scene(loaded, self._prompts, self._scripts)

    def _difference(self, expected: Logits, got: Logits) -> str:
        """How logits differ more than rounding explains; empty if they do not."""
        if missing := _not_finite(got) or ("" if expected.keys() <= got.keys() else "it ends too soon"):
            return missing
        off = [float(np.abs(got[place] - one).max() / np.abs(one).max()) for place, one in expected.items()]
        wrong = max(off) > self._gross or 4 * sum(one > self._rounding for one in off) > len(off)
        return f"it computes something else, off by {max(off):.2g} of its logits" if wrong else ""


def _not_finite(logits: Logits) -> str:
    finite = all(np.isfinite(values).all() for values in logits.values())
    return "" if finite else "it computes numbers that are not finite"


class _Forced:
    """In place of a batch's sampler: gives every row the next token of its script, and notes its logits."""

    def __init__(self, scripts: Sequence[Sequence[int]], noted: Logits) -> None:
        self._scripts = scripts
        self._noted = noted
        self._rows: list[tuple[int, int, int]] = []

    def add(self, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        self._rows.append((sampling.seed, len(prompt), len(generated)))

    def keep(self, indices: Sequence[int]) -> None:
        self._rows = [self._rows[index] for index in indices]

    def __call__(self, logits: mx.array, masks: object) -> Draw:
        values, tokens = np.array(logits.astype(mx.float32)), []
        for place, (row, prompt, drawn) in enumerate(self._rows):
            script = self._scripts[row]
            self._noted.setdefault((row, drawn), values[place])
            tokens.append(script[min(prompt + drawn, len(script) - 1)])
            self._rows[place] = (row, prompt, drawn + 1)
        return Draw(mx.array(tokens, mx.uint32), mx.ones((len(tokens),), mx.bool_))


class _Scene:
    """An engine of its own whose rows are forced. What its model raises is heard, not logged.

    Attributes:
        noted: the logits of its rows.
        failure: what went wrong, as the end of a sentence; empty if nothing did.
    """

    def __init__(self, loaded: LoadedModel, prompts: Sequence[int], scripts: Sequence[Sequence[int]]) -> None:
        self.noted: Logits = {}
        self._ends: dict[str, str] = {}
        self._heard: list[BaseException] = []
        self._prompts = prompts
        self._scripts = scripts
        self._runs = 0
        self._root = root_id(loaded.model_id, "trial")
        memory_bytes = device_bytes(free=True)
        self._engine = engine = Engine(loaded, Scheduling(rows_max=8), memory_bytes, self._take)
        engine.executor.make_sampler = lambda: _Forced(scripts, self.noted)
        engine.executor.clear_batch()

    def __enter__(self) -> _Scene:
        self._listening = _listening(self._heard)
        self._listening.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._engine.prefixes.clear()
            self._engine.executor.clear_batch()
            self._engine.executor.give_back(0)
        finally:
            self._listening.__exit__(None, None, None)

    @property
    def failure(self) -> str:
        if self._heard:
            return f"it fails ({first_sentence(self._heard[0])})"
        wrong = {end for end in self._ends.values() if end != "length"}
        return f"its rows end with {min(wrong)}" if wrong else ""

    def run(self, rows: Sequence[int], later: Sequence[int] = (), *, more: int = 0) -> None:
        """Runs rows to their ends; some of them join `later`, when the others have drawn a token.

        Args:
            more: how many tokens after its prompt belong to it too.
        """
        self._runs += 1
        waiting = [self._request(row, more) for row in later]
        for row in rows:
            self._submit(self._request(row, more))
        for _ in range(_STEPS_MAX):
            busy = self._engine.step()
            if waiting and (self.noted or not busy):
                for request in waiting:
                    self._submit(request)
                waiting = []
            elif not busy:
                return
        self._ends["all"] = "no end"

    def _request(self, row: int, more: int) -> GenerateRequest:
        prompt = list(self._scripts[row][: self._prompts[row] + more])
        return GenerateRequest(
            request_id=f"{self._runs}/{row}",
            consumer="trial",
            model="",
            agent="",
            prompt=prompt,
            block_ids=block_ids(self._root, prompt),
            root_id=self._root,
            sampling=Sampling(temperature=0.0, max_tokens=DRAWN, seed=row, ignore_eos=True),
        )

    def _submit(self, request: GenerateRequest) -> None:
        def reply(refusal: Exception | None) -> None:
            if refusal is not None:
                self._heard.append(refusal)

        self._engine.submit(request, reply)

    def _take(self, updates: dict[str, list[RowUpdate]]) -> None:
        for one in updates.get("trial", []):
            if one.finish is not None:
                said = (one.error or {}).get("message")
                self._ends[one.request_id] = f"{one.finish} ({said})" if said else one.finish


@contextmanager
def _listening(heard: list[BaseException]) -> Iterator[None]:
    """Takes what is logged as an exception of the replica's own modules; everything else goes on to the log."""
    ours = logging.getLogger(__package__)

    class Listener(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if record.exc_info and record.exc_info[1] is not None:
                heard.append(record.exc_info[1])
                return False
            return True

    # Filters of a logger see only what is logged on it, so those of its modules' get it too.
    names = [name for name in logging.root.manager.loggerDict if name.startswith(f"{__package__}.")]
    listener, loggers = Listener(), [ours, *map(logging.getLogger, names)]
    for one in loggers:
        one.addFilter(listener)
    try:
        yield
    finally:
        for one in loggers:
            one.removeFilter(listener)


def _read(path: Path | None) -> dict[str, Verdict]:
    with suppress(OSError, ValueError, TypeError):
        if path is not None:
            entries = json.loads(path.read_text(encoding="utf-8"))
            return {key: Verdict(**entry) for key, entry in entries.items()}
    return {}


def _write(path: Path, key: str, verdict: Verdict) -> None:
    entries = {known: asdict(one) for known, one in _read(path).items()} | {key: asdict(verdict)}
    # Without it the model is tried again at the next start.
    with suppress(ClusterError):
        write_private_json(path, entries)
