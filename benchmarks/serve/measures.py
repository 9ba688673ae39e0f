"""From traces to numbers. No clock, no processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .protocol import StreamedTimes, Trace


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; NaN where there are none."""
    if not values:
        return float("nan")
    return sorted(values)[math.ceil(share * len(values)) - 1]


def gaps_ms(stream: StreamedTimes) -> list[float]:
    return [(after - before) * 1e3 for before, after in pairwise(stream.times)]


@dataclass(frozen=True)
class BurstMeasures:
    """One burst of `streams` answers to prompts of `load` tokens, or mixed ones. Times are in milliseconds;
    `tokens_per_piece` says how many tokens a server put into one piece of a stream, of which the gaps are counted.
    `cpu_us_by_process` is the CPU time of each of the server's processes, in microseconds a token; that of requests'
    beginnings is in it. `joules_per_token` is the energy of all that the machine or its card did meanwhile, None if no
    counter of it can be read."""

    load: str
    streams: int
    tokens: int
    prompt_tokens: int
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    tokens_per_piece: float
    client_cpu_share: float | None
    server_cpu_ms_per_token: float
    cpu_us_by_process: dict[str, float]
    joules_per_token: float | None = None


@dataclass(frozen=True)
class Interference:
    """What a long prompt does to a stream that runs: gaps of the running stream between the long prompt's sending and
    its first token, and the time to that token, in milliseconds."""

    long_tokens: int
    long_ttft_ms: float
    gap_alone_p50_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    gaps: int


@dataclass(frozen=True)
class Turns:
    """Times to the first token of a conversation of `tokens` tokens, in milliseconds: when it is new, at its next turn,
    and at those after that (their median). `later_outside_ms` is the part of the latter that is spent outside the
    engine, None if the server does not measure it."""

    tokens: int
    cold_ttft_ms: float
    next_ttft_ms: float
    later_ttft_ms: float
    later_outside_ms: float | None


class Incomplete(Exception):
    """Streams failed or did not bring what was asked for, so there is nothing to compare."""


def check(streams: Sequence[StreamedTimes], tokens: int) -> None:
    """
    Raises:
        Incomplete: a stream failed, or has another number of tokens.
    """
    for stream in streams:
        if stream.error:
            raise Incomplete(stream.error)
        if stream.tokens != tokens or not stream.times:
            raise Incomplete(f"{stream.tokens} tokens in {len(stream.times)} pieces instead of {tokens} tokens")


def level(trace: Trace, load: str, max_tokens: int, cpu_s: Mapping[str, float]) -> BurstMeasures:
    """
    Args:
        cpu_s: CPU seconds of each of the server's processes during the burst.

    Raises:
        Incomplete: as `check`.
    """
    streams = trace.streams
    check(streams, max_tokens)
    wall = max(stream.ended for stream in streams) - min(stream.sent for stream in streams)
    tokens = sum(stream.tokens or 0 for stream in streams)
    pieces = sum(len(stream.times) for stream in streams)
    waits = [(stream.times[0] - stream.sent) * 1e3 for stream in streams]
    gaps = [gap for stream in streams for gap in gaps_ms(stream)]
    return BurstMeasures(
        load=load,
        streams=len(streams),
        tokens=tokens,
        prompt_tokens=sum(stream.prompt_tokens or 0 for stream in streams),
        tokens_per_s=tokens / wall,
        ttft_p50_ms=percentile(waits, 0.5),
        ttft_p99_ms=percentile(waits, 0.99),
        gap_p50_ms=percentile(gaps, 0.5),
        gap_p99_ms=percentile(gaps, 0.99),
        tokens_per_piece=tokens / pieces,
        client_cpu_share=trace.cpu_share,
        server_cpu_ms_per_token=sum(cpu_s.values()) * 1e3 / tokens,
        cpu_us_by_process={name: seconds * 1e6 / tokens for name, seconds in cpu_s.items()},
    )


def turns_of(traces: Sequence[Trace], tokens: int, max_tokens: int, outside_s: Sequence[float | None]) -> Turns:
    """
    Args:
        outside_s: of each answer's time to the first token, the seconds that the server spent outside its engine.

    Raises:
        Incomplete: an answer failed.
    """
    for trace in traces:
        check(trace.streams, max_tokens)
    cold, following, *later = [(stream.times[0] - stream.sent) * 1e3 for trace in traces for stream in trace.streams]
    outside = [seconds * 1e3 for seconds in outside_s[2:] if seconds is not None]
    return Turns(tokens, cold, following, percentile(later, 0.5), percentile(outside, 0.5) if outside else None)


def interference(trace: Trace, long_tokens: int) -> Interference:
    *running, long = trace.streams
    check([long], long_tokens)
    alone: list[float] = []
    during: list[float] = []
    for stream in running:
        if stream.error:
            raise Incomplete(stream.error)
        for before, after in pairwise(stream.times):
            if after <= long.sent:
                alone.append((after - before) * 1e3)
            elif before < long.times[0]:
                during.append((after - before) * 1e3)
        if not during or stream.times[-1] < long.times[0]:
            raise Incomplete("the running stream did not outlast the long prompt")
    return Interference(
        long_tokens=long.prompt_tokens or 0,
        long_ttft_ms=(long.times[0] - long.sent) * 1e3,
        gap_alone_p50_ms=percentile(alone, 0.5),
        gap_p50_ms=percentile(during, 0.5),
        gap_p99_ms=percentile(during, 0.99),
        gap_max_ms=max(during),
        gaps=len(during),
    )
