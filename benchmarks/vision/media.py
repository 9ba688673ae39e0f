"""Pictures of several sizes and videos of several lengths, cold and cached, and the bytes that are kept of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .. import parts
from .parts import Sight, warm_ups
from .scenery import FILM, TALK, asked, circle, film, film_frames, fresh_number, picture
from .servers import VisionServer
from .turns import Answers, Spread, Start, TalkOptions, first_ms

TARGET_FRAMES, FRAMES_TARGET = 32, 24.7
QUESTION, ANSWER = TALK[0]


def resolution(
    sight: Sight,
    start: Start,
    sides: Sequence[int],
    talk: TalkOptions,
    rounds: int,
    budget: Any,
    say: Callable[[str], None],
) -> Any:
    part = parts.ResultTable("Pictures by their size")
    costs = {
        side: sight.costs(rounds, lambda side=side: [circle(side, fresh_number())], QUESTION, video=False)
        for side in sides
    }
    spread, answers = Spread(), Answers()
    with start() as server:
        for side in sides:
            for number in budget.rounds(rounds + warm_ups()):
                server.eyes.forget()
                about = asked(picture(side), [QUESTION], [])
                cold, cached = (server.eyes.see(about, talk.tokens) for _ in range(2))
                answers.check(cached.text, talk.wanted(0), cold.text)
                if number >= warm_ups():
                    spread.note(side, "cold", ms=first_ms(cold))
                    spread.note(side, "cached", ms=first_ms(cached))
            say(f"  {side}: {spread.median(side, 'cold'):,.0f} ms, cached {spread.median(side, 'cached'):,.0f} ms")
    for side in sides:
        if (side, "cold") not in spread.times:
            part.notes.append(f"There was no time for {side} pixels.")
            continue
        part.rows.append(
            {
                "picture": f"{side} x {side}",
                "tokens of the picture": costs[side].seen,
                "cold, ms": spread.median(side, "cold"),
                "cached, ms": spread.median(side, "cached"),
                "cold / cached": spread.ratio((side, "cold"), (side, "cached")),
                "encode, ms": costs[side].encode_s * 1e3,
                "prefill, ms": costs[side].prefill_s * 1e3,
                "first step, ms": costs[side].step_s * 1e3,
            }
        )
    answers.note(part, "Cached answers")
    part.notes.append(
        "First tokens over HTTP of a fresh picture, and of the same request once more; medians, ratios within a round. "
        "Encode, prefill and first step are an engine's without Ray and HTTP, in another process before: encode with "
        "all that it does besides, and the first step of a prompt that is known to the last token."
    )
    return part


def video(
    sight: Sight,
    start: Start,
    lengths: Sequence[int],
    side: int,
    talk: TalkOptions,
    rounds: int,
    budget: Any,
    say: Callable[[str], None],
) -> Any:
    part = parts.ResultTable(f"Videos by their frames of {side} x {side}")
    spread, answers, encodes = Spread(), Answers(), dict[tuple[int, str], int]()
    costs = {
        length: sight.costs(
            rounds, lambda length=length: film_frames(side, length, fresh_number()), FILM[0], video=True
        )
        for length in lengths
    }
    with start() as server:
        for length in lengths:
            for number in budget.rounds(rounds + warm_ups()):
                counted = spread if number >= warm_ups() else Spread()
                _one_video(server, side, length, talk, counted, encodes, answers)
            cold, cached = spread.median(length, "cold"), spread.median(length, "cached")
            say(f"  {length} frames: {cold:,.0f} ms, cached {cached:,.0f} ms")
    for length in lengths:
        if (length, "hot") not in spread.times:
            part.notes.append(f"There was no time for {length} frames.")
            continue
        part.rows.append(
            {
                "frames": length,
                "tokens of the video": costs[length].seen,
                **{f"{kind}, ms": spread.median(length, kind) for kind in ("cold", "cached", "half shared")},
                "cold / cached": spread.ratio((length, "cold"), (length, "cached")),
                "cold / half shared": spread.ratio((length, "cold"), (length, "half shared")),
                **{f"encodes, {kind}": encodes.get((length, kind)) for kind in ("cold", "cached", "half shared")},
                "encode, ms": costs[length].encode_s * 1e3,
                "prefill, ms": costs[length].prefill_s * 1e3,
            }
        )
        if length == TARGET_FRAMES:
            ratio = spread.ratio((length, "cold"), (length, "cached"))
            part.at_least(f"{length} frames: first token, cold / cached", ratio, FRAMES_TARGET)
            fixed_s = max(0.0, spread.median(length, "hot") / 1e3 - costs[length].step_s)
            over_http_s = spread.median(length, "cold") / 1e3
            whole = replace(costs[length], fixed_s=fixed_s, over_http_s=over_http_s)
            part.notes.append(whole.verdict(f"{length} frames, first token", [FRAMES_TARGET]))
    answers.note(part, "Cached answers")
    part.notes.append(
        "First tokens over HTTP of a fresh video, of the same request once more, and of a clip whose first half is its "
        "last half. Frames are encoded in groups as the model's processor makes them (two, for a Qwen3-VL). In the "
        "arithmetic `fixed` includes decoding and hashing the frames, which are sent each time."
    )
    return part


def _one_video(
    server: VisionServer,
    side: int,
    length: int,
    talk: TalkOptions,
    spread: Spread,
    encodes: dict[tuple[int, str], int],
    answers: Answers,
) -> None:
    server.eyes.forget()
    number, texts = fresh_number(), dict[str, str]()
    for kind in ("cold", "cached", "hot", "half shared"):
        clip = film(side, length, number, length // 2 if kind == "half shared" else 0)
        before = server.eyes.encodes()
        stream = server.eyes.see(asked(clip, [FILM[0]], []), talk.tokens)
        encodes[length, kind] = server.eyes.encodes() - before
        spread.note(length, kind, ms=first_ms(stream))
        texts[kind] = stream.text
    answers.check(texts["cached"], FILM[1] if talk.known else None, texts["cold"])


def entries(start: Start, sides: Sequence[int], talk: TalkOptions, say: Callable[[str], None]) -> Any:
    """Bytes of features and KV of a picture, in memory and on the disk."""
    part = parts.ResultTable("Bytes kept of a picture")
    with start() as server:
        # Before anything is on the disk, from where it would come back.
        memory = {side: _in_memory(server, side, talk) for side in sides}
        for side in sides:
            tokens, embeddings, kv = memory[side]
            features_on_disk, kv_on_disk = _on_disk(server, side, talk)
            part.rows.append(
                {
                    "picture": f"{side} x {side}",
                    "tokens of the prompt": tokens,
                    "features, kB": embeddings / 1e3,
                    "KV, kB": kv / 1e3,
                    "features on disk, kB": features_on_disk / 1e3,
                    "KV on disk, kB": kv_on_disk / 1e3,
                }
            )
            say("  " + ", ".join(f"{key} {value}" for key, value in part.rows[-1].items()))
    part.notes.append(
        "Of a first turn, its KV with the answer's. In memory as the server counts it. On the disk after everything "
        "was written: what another agent's turn of as many tokens adds, which begins with another word and so shares "
        "only the features, is KV; the rest of what the first agent's added is features. Both with the files' heads."
    )
    return part


def _beginning(word: str, shown: Any) -> list[dict[str, Any]]:
    """A turn that shares no more with one of another word than its template's first tokens."""
    return [{"role": "user", "content": [{"type": "text", "text": word}, shown, {"type": "text", "text": QUESTION}]}]


def _in_memory(server: VisionServer, side: int, talk: TalkOptions) -> tuple[int, int, int]:
    """Tokens of the prompt, bytes of features, bytes of KV."""
    server.eyes.forget()
    stream = server.eyes.see(_beginning("One", picture(side)), talk.tokens)
    kv = server.eyes.kv_bytes()
    return stream.prompt, server.eyes.forget() - kv, kv


def _on_disk(server: VisionServer, side: int, talk: TalkOptions) -> tuple[int, int]:
    """Bytes of features, bytes of KV."""
    shown, before, added = picture(side), server.disk_bytes(), list[int]()
    for word in ("One", "Two"):
        server.eyes.see(_beginning(word, shown), talk.tokens, f"{word}-{side}")
        after = server.disk_bytes()
        before, added = after, [*added, after - before]
    return added[0] - added[1], added[1]
