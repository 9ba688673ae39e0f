"""The experiments of "Agent Memory Below the Prompt": first tokens cold, warm and hot, two agents one shortly after the
other, how many agents fit, and what 4-bit KV costs in quality."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from satchel.actors.replica.kernels.sealing import POLICIES
from satchel.actors.replica.kv.caches import ModelCacheSpec, read_spec
from satchel.actors.replica.loading.quirks import with_windows

from ..memory.desk import WARM_UP_ROUNDS, Desk, TimedAnswer, on_gpu
from ..memory.first_token import drop_from_page_cache, open_store, restore_prefix, write_prefix
from ..parts import Budget, Say, median
from .figures import AGENT_MEMORY, CAPACITY_BUDGET_BYTES, STAGGER_SHARE, agents_that_fit, first_token_ms, staggered_s
from .folders import random_model
from .page import PaperTable
from .plain_caches import PlainCaches
from .shapes import MODELS

AGENT_MODELS = ("gemma3-12b", "deepseek-v2-lite", "llama3.1-8b")
STATES = ("cold", "warm", "hot")
TURN_TOKENS, ANSWER_TOKENS = 32, 64
PLAIN = "mlx-lm's prompt caches"
STAGGERED_TOKENS = 4096
CONTEXTS = (1024, 2048, 4096, 8192, 16_384)
FIT_CONTEXTS = (4096, 8192, 16_384, 32_768)


def first_tokens(
    name: str, folder: Path, contexts: Sequence[int], rounds: int, work: Path, budget: Budget, say: Say, *, small: bool
) -> PaperTable:
    """The next turn of agents with contexts of several lengths in three states: to its first token, and to the end of
    its answer."""
    title = MODELS[name].title(small=small)
    part = PaperTable(f"{title}: an agent's context cold, warm (on disk) and hot (in memory)", paper=AGENT_MEMORY)
    desk, plain = Desk(str(folder)), PlainCaches(folder)
    for context in contexts:
        # A GPU prepares itself for every new shape.
        warm_ups = WARM_UP_ROUNDS if on_gpu() else int(context == contexts[0])
        ours, theirs = _States(), _States()
        for number in budget.rounds(rounds + warm_ups):
            counted = number >= warm_ups
            tokens = desk.prompt(context + TURN_TOKENS, f"{context}/{number}")
            place = work / f"{name}-{context}-{number}"
            place.mkdir(parents=True)
            _our_round(desk, tokens[:context], tokens[context:], place, ours if counted else _States())
            path = place / "plain.safetensors"
            _plain_round(plain, tokens[:context], tokens[context:], path, theirs if counted else _States())
        if not ours.times:
            part.missing.append(f"{context:,} tokens: there was no time.")
            continue
        say(f"  {context:,} tokens: " + ", ".join(f"{state} {ours.median(state, 'first'):,.0f} ms" for state in STATES))
        _state_rows(part, name, context, ours, theirs)
    part.missing += [f"{context:,} tokens: not asked for." for context in CONTEXTS if context not in contexts]
    part.notes.append(
        f"A context of random tokens, and a turn of {TURN_TOKENS} more. Satchel's engine without Ray and HTTP, KV: "
        f"{desk.loaded.spec.describe()}. The peer keeps KV in full precision. Files are dropped from the page cache "
        "before they are read, where a system can be told to."
    )
    return part


def _state_rows(part: PaperTable, name: str, context: int, ours: _States, theirs: _States) -> None:
    for state in STATES:
        for ends, what in (("first", "first token"), ("whole", f"{ANSWER_TOKENS} tokens")):
            figure = first_token_ms(name, context, state) if ends == "first" else None
            peers = {PLAIN: theirs.median(state, ends)}
            what = f"{context:,} tokens, {state}: {what}"
            part.compare(what, "ms", ours.median(state, ends), peers, figure=figure, less=True)
    for state in STATES[1:]:
        what = f"{context:,} tokens, cold over {state}: first token"
        part.compare(what, "x", ours.cold_over(state), {PLAIN: theirs.cold_over(state)})
    if (least := min(ours.known)) < context:
        part.missing.append(f"{context:,} tokens: of a known context only {least:,} tokens were reused.")


@dataclass
class _States:
    """Milliseconds by state and by what ended, `first` or `whole`, a value a round; and how many tokens of known
    contexts were not computed again."""

    times: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    known: list[int] = field(default_factory=list)

    def note(self, state: str, first_s: float, whole_s: float) -> None:
        for ends, seconds in (("first", first_s), ("whole", whole_s)):
            self.times.setdefault((state, ends), []).append(seconds * 1e3)

    def median(self, state: str, ends: str) -> float:
        return median(self.times[state, ends])

    def cold_over(self, state: str) -> float:
        """The median of the rounds' ratios."""
        pairs = zip(self.times["cold", "first"], self.times[state, "first"], strict=True)
        return median([cold / other for cold, other in pairs])


def _our_round(desk: Desk, context: list[int], turn: list[int], place: Path, states: _States) -> None:
    prompt = [*context, *turn]
    desk.clear()
    _note(states, "cold", desk.ask(prompt, ANSWER_TOKENS))
    desk.clear()
    desk.ask(context)
    with open_store(place) as store:
        # All of the context: the last token of what is looked up is always computed.
        entry_ids = write_prefix(desk, prompt[: len(context) + 1], store)
        _note(states, "hot", desk.ask(prompt, ANSWER_TOKENS))
        desk.clear()
        drop_from_page_cache(store.root)
        began = time.perf_counter()
        restore_prefix(desk, store, entry_ids)
        _note(states, "warm", desk.ask(prompt, ANSWER_TOKENS), began)


def _note(states: _States, state: str, answer: TimedAnswer, began: float | None = None) -> None:
    began = answer.sent if began is None else began
    states.note(state, answer.first - began, answer.ended - began)
    if state != "cold":
        states.known.append(answer.cached)


def _plain_round(plain: PlainCaches, context: list[int], turn: list[int], path: Path, states: _States) -> None:
    cold, kept = plain.cold(context, turn, ANSWER_TOKENS)
    hot = plain.hot(turn, kept, ANSWER_TOKENS)
    warm, _ = plain.warm(turn, kept, ANSWER_TOKENS, path)
    for state, answer in (("cold", cold), ("hot", hot), ("warm", warm)):
        states.note(state, answer.first_s, answer.whole_s)


def staggered(
    name: str, folder: Path, tokens: int, rounds: int, budget: Budget, say: Say, *, small: bool
) -> PaperTable:
    """Two agents with cold contexts, the second after the share of the first one's prefill that it was in the
    draft."""
    title = MODELS[name].title(small=small)
    part = PaperTable(f"{title}: two agents of {tokens:,} tokens, the second a little later", paper=AGENT_MEMORY)
    desk, plain = Desk(str(folder)), PlainCaches(folder)
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in budget.rounds(rounds + 1):
        alone = desk.ask(desk.prompt(tokens, f"alone/{number}"), 1)
        delay_s = STAGGER_SHARE * (alone.first - alone.sent)
        prompts = [desk.prompt(tokens, f"staggered/{number}/{agent}") for agent in "ab"]
        runs: dict[tuple[str, str], Callable[[], list[float]]] = {
            ("ours", "batched"): lambda prompts=prompts, delay_s=delay_s: _both(desk, prompts, delay_s),
            ("ours", "sequential"): lambda prompts=prompts, delay_s=delay_s: _in_turn(desk, prompts, delay_s),
            ("peer", "batched"): lambda prompts=prompts, delay_s=delay_s: plain.staggered(
                prompts, ANSWER_TOKENS, delay_s
            ),
            ("peer", "sequential"): lambda prompts=prompts, delay_s=delay_s: plain.one_after_the_other(
                prompts, ANSWER_TOKENS, delay_s
            ),
        }
        for key, run in runs.items():
            desk.clear()
            ended = run()
            if number:
                found.setdefault(key, []).append((max(ended), ended[1]))
        say(f"  round {number}: " + ", ".join(f"{' '.join(key)} {times[-1][0]:.2f} s" for key, times in found.items()))
    if not found:
        part.missing.append("there was no time.")
        return part
    for which, (place, what) in {"wall": (0, "both ended"), "second": (1, "the second ended")}.items():
        for how in ("sequential", "batched"):
            part.compare(
                f"{how}: {what}",
                "s",
                median([times[place] for times in found["ours", how]]),
                {f"mlx-lm, {how}": median([times[place] for times in found["peer", how]])},
                figure=staggered_s(name, which, batched=how == "batched"),
                less=True,
            )
    part.notes.append(
        f"The second one arrives after {STAGGER_SHARE:.0%} of the first one's prefill alone, as in the draft (2 of "
        f"15.5 s). Answers of {ANSWER_TOKENS} tokens, seconds from the first arrival, engines without Ray and HTTP."
    )
    return part


def _both(desk: Desk, prompts: Sequence[list[int]], delay_s: float) -> list[float]:
    """Both on the engine as they arrive. Returns when each ended, in seconds from the begin."""
    began = time.perf_counter()
    first = desk.submit(prompts[0], ANSWER_TOKENS)
    desk.turn_until(lambda: time.perf_counter() - began >= delay_s)
    answers = desk.finish([first, desk.submit(prompts[1], ANSWER_TOKENS)])
    return [answer.ended - began for answer in answers]


def _in_turn(desk: Desk, prompts: Sequence[list[int]], delay_s: float) -> list[float]:
    """The second waits until the first has ended."""
    began, ended = time.perf_counter(), list[float]()
    for number, prompt in enumerate(prompts):
        time.sleep(max(0.0, began + number * delay_s - time.perf_counter()))
        ended.append(desk.ask(prompt, ANSWER_TOKENS).ended - began)
    return ended


def capacity(names: Sequence[str] = AGENT_MODELS) -> PaperTable:
    """How many agents' KV fits into a budget. Arithmetic over the whole models' shapes; nothing is computed."""
    part = PaperTable(f"Agents that fit into {CAPACITY_BUDGET_BYTES / 1e9:g} GB of KV", paper=AGENT_MEMORY)
    for name in names:
        specs = {kv: cache_spec(name, kv) for kv in ("fp16", "q4")}
        for context in FIT_CONTEXTS:
            for kv, spec in specs.items():
                part.compare(
                    f"{MODELS[name].name}, {context:,} tokens, {kv}",
                    "agents",
                    agents_in(spec, context),
                    {"mlx-lm, fp16": agents_in(specs["fp16"], context)},
                    figure=agents_that_fit(name, context, kv),
                )
        part.notes.append(
            f"{MODELS[name].name}: "
            + "; ".join(
                f"{kv}: {spec.bytes_per_token / 1e3:,.1f} kB a token and {spec.bytes_per_sequence / 1e6:,.1f} MB a "
                f"sequence ({spec.describe()})"
                for kv, spec in specs.items()
            )
            + "."
        )
    part.notes.append(
        "Windows count for at most their own length, and the open block of a sequence in full precision, as Satchel's "
        "scheduler reckons. The draft counts every layer for the whole context."
    )
    return part


def cache_spec(name: str, kv: str) -> ModelCacheSpec:
    """Returns what the KV of a paper's whole model takes in bfloat16."""
    model: Any = random_model(MODELS[name].config(small=False))
    model.set_dtype(mx.bfloat16)
    caches = make_prompt_cache(model)
    model(mx.array([[0, 0]], mx.uint32), cache=caches)
    return with_windows(model, read_spec(caches, 2, POLICIES[kv]))


def agents_in(spec: ModelCacheSpec, context: int) -> int:
    """Returns how many sequences of that length fit into `CAPACITY_BUDGET_BYTES`."""
    return CAPACITY_BUDGET_BYTES // (spec.bytes_per_sequence + context * spec.bytes_per_token)
