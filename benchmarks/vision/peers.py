"""The same conversations with other servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import parts
from .parts import warm_ups
from .scenery import OTHER, TALK, asked, picture
from .servers import PEERS, SATCHEL_FP16, VisionServer, targets
from .turns import Answers, Spread, Start, TalkOptions, first_ms

PEER_NAMES = (SATCHEL_FP16, *PEERS)
STEPS = ("turn 1", "turn 2", "turn 3", "another conversation")


def peers(
    start: Start, names: list[str], side: int, talk: TalkOptions, rounds: int, budget: Any, say: Callable[[str], None]
) -> Any:
    part = parts.ResultTable(f"Beside other servers, a picture of {side} x {side}")
    spread = Spread()
    for name in names:
        answers = Answers()
        if budget.left_s <= 0:
            part.notes.append(f"There was no time for {name}.")
            continue
        try:
            with start(name) as server:
                for number in budget.rounds(rounds + warm_ups()):
                    _one_round(server, side, talk, spread if number >= warm_ups() else Spread(), answers)
        except (targets.TargetFailed, RuntimeError, OSError, ValueError, KeyError) as error:
            part.notes.append(f"{name} was not measured: {type(error).__name__}: {error}")
            say(f"  {name}: {error}")
            continue
        if (name, STEPS[0], "kept") not in spread.times:
            part.notes.append(f"There was no time for {name}.")
            continue
        say(f"  {name}: " + ", ".join(f"{spread.median(name, step, 'kept'):,.0f} ms" for step in STEPS))
        row: dict[str, Any] = {"server": name}
        for step in STEPS:
            row[f"{step}, ms"] = spread.median(name, step, "kept")
        for step in STEPS[1:]:
            row[f"{step}, cold / this"] = spread.ratio((name, step, "cold"), (name, step, "kept"))
        right, equal = answers.shares
        part.rows.append({**row, "right": right, "as cold": equal})
    part.notes.append(
        "Times to the first token over HTTP, medians. Each turn is compared with the same prompt about a picture that "
        "nobody has seen (`cold`), within a round. Servers run one after the other with their own defaults, but for "
        "what their names say; Satchel keeps KV in full precision, as the others do. `as cold`: answers about the one "
        "picture that are equal to the cold ones."
    )
    return part


def _one_round(server: VisionServer, side: int, talk: TalkOptions, spread: Spread, answers: Answers) -> None:
    """Every turn first about a picture of its own, then all about one."""
    cold: list[str] = []
    for kind in ("cold", "kept"):
        shown = picture(side)
        for index, step in enumerate(STEPS):
            about = asked(shown, [OTHER[0]], []) if index == len(TALK) else talk.messages(shown, index)
            wanted = (OTHER[1] if talk.known else None) if index == len(TALK) else talk.wanted(index)
            stream = server.eyes.see(about, talk.tokens)
            spread.note(server.name, step, kind, ms=first_ms(stream))
            if kind == "cold":
                cold.append(stream.text)
                shown = picture(side)
            else:
                # Random weights answer otherwise about another picture, though nobody sees the difference.
                answers.check(stream.text, wanted, cold[index] if talk.known else None)
