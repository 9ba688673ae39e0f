"""vllm-mlx's experiments with text: models by engine, models by server at several concurrencies, and a shared
prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..energy import EnergySpent
from ..parts import Budget, median
from ..serve.measures import Incomplete, check, level
from ..serve.prompts import Prompts
from ..serve.protocol import Agents, Burst
from ..serve.targets import RunFolder, Target, TargetFailed
from .engines import LIMIT_S, OURS, joules_of, single_runs, started
from .figures import BATCHED_SPEEDUP_16, PEAK_TOKENS_PER_S, VLLM_MLX
from .page import PaperTable
from .shapes import MODELS

ENGINE_MODELS = (
    "qwen3-0.6b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "llama3.2-1b",
    "llama3.2-3b",
    "gemma3-4b",
    "nemotron-30b-a3b",
)
SATCHEL = "satchel"
SERVERS = (SATCHEL, "mlx_lm.server", "mlx_vlm.server", "vllm-mlx")
PREFIX_TOKENS, SUFFIX_TOKENS, PREFIX_ANSWER = 512, 32, 8
LATER = 3
"""Requests with the same prefix after the first one."""


def engines(
    name: str,
    folder: Path,
    place: RunFolder,
    prompt_tokens: int,
    tokens: int,
    rounds: int,
    budget: Budget,
    *,
    small: bool,
    weights: str,
) -> PaperTable:
    """One model on engines, one sequence.

    Args:
        weights: as the title says it, such as `4-bit`.
    """
    title = MODELS[name].title(small=small)
    part = PaperTable(f"{title}, {weights}: one sequence on an engine", paper=VLLM_MLX)
    found = single_runs(folder, place, prompt_tokens, tokens, rounds, budget, part.missing.append)
    ours = found.pop(OURS, None)
    for kind, what in (("decode_per_s", "tokens a second"), ("prefill_per_s", "prefill")):
        part.compare(
            f"{what}, {prompt_tokens:,} in, {tokens:,} out",
            "tokens/s",
            ours and getattr(ours, kind),
            {peer: getattr(run, kind) for peer, run in found.items()},
            figure=PEAK_TOKENS_PER_S if (name, kind) == (ENGINE_MODELS[0], "decode_per_s") else None,
            joules=joules_of(ours, found) if kind == "decode_per_s" else None,
        )
    part.notes.append("Without Ray and HTTP, each engine in a process of its own, KV in full precision.")
    return part


@dataclass
class _Served:
    """What one server did: tokens and requests a second by number of streams, and joules a token where they are known;
    times to first tokens in milliseconds, of a new prefix and of a known one."""

    tokens_per_s: dict[int, float] = field(default_factory=dict)
    requests_per_s: dict[int, float] = field(default_factory=dict)
    joules: dict[int, float] = field(default_factory=dict)
    new_ms: float = 0.0
    known_ms: float = 0.0


def served(
    name: str,
    folder: Path,
    place: RunFolder,
    streams: Sequence[int],
    prompt_tokens: int,
    tokens: int,
    budget: Budget,
    names: Sequence[str] = SERVERS,
    *,
    small: bool,
    weights: str,
) -> PaperTable:
    """One model over HTTP: concurrent requests, and requests that share 512 tokens."""
    title = MODELS[name].title(small=small)
    part = PaperTable(f"{title}, {weights}: over HTTP", paper=VLLM_MLX)
    found: dict[str, _Served] = {}
    for server in names:
        if budget.left_s <= 0:
            part.missing.append(f"{server}: there was no time.")
            continue
        try:
            with started(server, folder, place) as target:
                found[server] = _measured(target, Prompts(folder), streams, prompt_tokens, tokens)
        except (TargetFailed, Incomplete) as error:
            part.missing.append(f"{server}: {error}")
    ours = found.get(SATCHEL)
    peers = {server: figures for server, figures in found.items() if server != SATCHEL}
    for count in streams:
        for kind, unit in (("tokens_per_s", "tokens/s"), ("requests_per_s", "requests/s")):
            part.compare(
                f"{count} concurrent request{'s' if count > 1 else ''}",
                unit,
                ours and getattr(ours, kind)[count],
                {server: getattr(figures, kind)[count] for server, figures in peers.items()},
                joules=_joules(found, count) if kind == "tokens_per_s" else None,
            )
    if len(streams) > 1:
        least, most = min(streams), max(streams)
        part.compare(
            f"{most} requests over {least}, tokens a second",
            "x",
            ours and ours.tokens_per_s[most] / ours.tokens_per_s[least],
            {peer: each.tokens_per_s[most] / each.tokens_per_s[least] for peer, each in peers.items()},
            figure=BATCHED_SPEEDUP_16 if (least, most) == (1, 16) else None,
        )
    shared = f"prefix of {PREFIX_TOKENS} tokens"
    for kind, what in (("new_ms", f"{shared}, new"), ("known_ms", f"{shared}, known")):
        times = {server: getattr(figures, kind) for server, figures in peers.items()}
        part.compare(f"{what}: first token", "ms", ours and getattr(ours, kind), times, less=True)
    part.compare(
        f"{shared}, new over known",
        "x",
        ours and ours.new_ms / ours.known_ms,
        {server: figures.new_ms / figures.known_ms for server, figures in peers.items()},
    )
    part.notes.append(
        f"Prompts of {prompt_tokens:,} random words, answers of {tokens:,} tokens, streamed over HTTP on loopback; one "
        f"server after the other, each warmed up. The prefix is a system prompt, behind which {SUFFIX_TOKENS} other "
        "words follow each time; known: the median of later requests. Satchel keeps KV in full precision, as the "
        "others do."
    )
    return part


def _joules(found: dict[str, _Served], count: int) -> dict[str, float]:
    """Known joules a token by server; "" for ours."""
    return {
        "" if server == SATCHEL else server: figures.joules[count]
        for server, figures in found.items()
        if count in figures.joules
    }


def _measured(target: Target, prompts: Prompts, streams: Sequence[int], prompt_tokens: int, tokens: int) -> _Served:
    """
    Raises:
        Incomplete, TargetFailed: an answer is not whole.
    """
    found = _Served()
    for count in streams:
        # The first pass warms up.
        for number in range(2):
            texts = prompts.some([prompt_tokens] * count, f"{number}/{count}", as_ids=False)
            energy = EnergySpent()
            trace = target.run(Burst(texts, tokens, LIMIT_S))
            joules = energy.per_token(count * tokens)
            measures = level(trace, str(prompt_tokens), tokens, {})
            found.tokens_per_s[count] = measures.tokens_per_s
            found.requests_per_s[count] = measures.tokens_per_s / tokens
            if joules is not None:
                found.joules[count] = joules
    for number in range(2):
        system = prompts.one(PREFIX_TOKENS, f"prefix/{number}", as_ids=False)
        times = [_first_ms(target, prompts, system, f"{number}/{request}") for request in range(1 + LATER)]
        found.new_ms, found.known_ms = times[0], median(times[1:])
    return found


def _first_ms(target: Target, prompts: Prompts, system: str, seed: str) -> float:
    """Of a user nobody has seen, behind that system prompt."""
    text = prompts.one(SUFFIX_TOKENS, f"suffix/{seed}", as_ids=False)
    name = f"user-{seed.replace('/', '-')}"
    trace = target.run(Agents(system, [name], [[(text, PREFIX_ANSWER)]], grows=False, timeout_s=LIMIT_S))
    check(trace.streams, PREFIX_ANSWER)
    return (trace.streams[0].times[0] - trace.streams[0].sent) * 1e3
