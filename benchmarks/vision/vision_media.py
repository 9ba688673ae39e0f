"""Pictures of several sizes and videos of several lengths, cold and cached, and the bytes that are kept of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scenery import FILM, TALK, asked, circle, film, film_frames, fresh_number, picture
from vision_beside import neighbour
from vision_parts import Sight, median_costs, warm_ups
from vision_servers import Server
from vision_turns import Answers, Spread, Start, Talk, first_ms

parts = neighbour("memory", "parts")
TARGET_FRAMES, FRAMES_TARGET = 32, 24.7
QUESTION, ANSWER = TALK[0]


def resolution(
    sight: Sight, start: Start, sides: Sequence[int], talk: Talk, rounds: int, budget: Any, say: Callable[[str], None]
) -> Any:
    part = parts.Part("Pictures by their size")
    costs = {
        side: median_costs(
            [sight.look([circle(side, fresh_number())], QUESTION) for _ in range(rounds + warm_ups())][warm_ups() :]
        )
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
        "Encode, prefill and first step are an engine's without Ray and HTTP, in another process before."
    )
    return part


def video(
    sight: Sight,
    start: Start,
    lengths: Sequence[int],
    side: int,
    talk: Talk,
    rounds: int,
    budget: Any,
    say: Callable[[str], None],
) -> Any:
    part = parts.Part(f"Videos by their frames of {side} x {side}")
    spread, answers, encodes = Spread(), Answers(), dict[tuple[int, str], int]()
    costs = {
        length: median_costs(
            [
                sight.look(film_frames(side, length, fresh_number()), FILM[0], video=True)
                for _ in range(rounds + warm_ups())
            ][warm_ups() :]
        )
        for length in lengths
    }
    with start() as server:
        for length in lengths:
            for number in budget.rounds(rounds + warm_ups()):
                counted = spread if number >= warm_ups() else Spread()
                _one_video(server, side, length, talk, counted, encodes, answers)
            say(
                f"  {length} frames: {spread.median(length, 'cold'):,.0f} ms, cached {spread.median(length, 'cached'):,.0f}"
            )
    for length in lengths:
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
        if length == TARGET_FRAMES and (length, "hot") in spread.times:
            ratio = spread.ratio((length, "cold"), (length, "cached"))
            part.at_least(f"{length} frames: first token, cold / cached", ratio, FRAMES_TARGET)
            fixed_s = max(0.0, spread.median(length, "hot") / 1e3 - costs[length].step_s)
            whole = median_costs([costs[length]], fixed_s)
            part.notes.append(whole.verdict(f"{length} frames, first token", FRAMES_TARGET))
    answers.note(part, "Cached answers")
    part.notes.append(
        "First tokens over HTTP of a fresh video, of the same request once more, and of a clip that has the last half of "
        "its frames first. Frames are encoded in groups as the model's processor makes them (two, for a Qwen3-VL)."
    )
    return part


def _one_video(
    server: Server,
    side: int,
    length: int,
    talk: Talk,
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


def entries(start: Start, sides: Sequence[int], talk: Talk, say: Callable[[str], None]) -> Any:
    """Bytes of features and KV of a picture, in memory and on the disk."""
    part = parts.Part("Bytes kept of a picture")
    with start() as server:
        for side in sides:
            part.rows.append(_entry(server, side, talk))
            say(f"  {side}: " + ", ".join(f"{key} {value}" for key, value in part.rows[-1].items()))
    part.notes.append(
        "Of an agent's first turn, its KV with the answer's. In memory as the server counts it. On the disk, after "
        "everything was written: what another agent's turn of as many tokens adds, which begins with another word and so "
        "shares only the features, is KV; the rest of the first agent's is features."
    )
    return part


def _entry(server: Server, side: int, talk: Talk) -> dict[str, Any]:
    eyes, shown = server.eyes, picture(side)
    eyes.forget()
    written, memory = [server.disk_bytes()], (0, 0)
    for word in ("One", "Two"):
        about = [
            {"role": "user", "content": [{"type": "text", "text": word}, shown, {"type": "text", "text": QUESTION}]}
        ]
        stream = eyes.see(about, talk.tokens, f"{word}-{side}")
        if word == "One":
            kv = eyes.kv_bytes()
            memory = (eyes.forget() - kv, kv)
        written.append(server.disk_bytes())
    first, second = written[1] - written[0], written[2] - written[1]
    return {
        "picture": f"{side} x {side}",
        "tokens of the prompt": stream.prompt,
        "features, kB": memory[0] / 1e3,
        "KV, kB": memory[1] / 1e3,
        "features on disk, kB": (first - second) / 1e3,
        "KV on disk, kB": second / 1e3,
    }
