"""What the attacks did to the streams beside them and to the server, as tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .http import SHOWN, AttackOutcome
from .streams import LongestWait, StreamedAnswer

STOPPED_S = 1.0
MEMORY_SHARE, MEMORY_MIB = 0.25, 100.0
"""A process that has grown by more than both of what it had is not back where it was."""


@dataclass(frozen=True)
class Peace:
    """The streams while nobody attacked: what each says, and their longest gap in seconds."""

    texts: Mapping[int, str]
    gap_s: float


@dataclass(frozen=True)
class AttackSpan:
    began: float
    ended: float

    def has(self, at: float) -> bool:
        return self.began <= at <= self.ended


def peace(said: Sequence[StreamedAnswer]) -> Peace:
    """
    Raises:
        ValueError: a stream fails, or says different things, where nobody disturbs it.
    """
    texts: dict[int, str] = {}
    for each in said:
        if each.error or each.refused:
            raise ValueError(f"stream {each.stream} failed in peace: {each.error or each.refused}")
        if texts.setdefault(each.stream, each.text) != each.text:
            raise ValueError(f"stream {each.stream} says different things in peace")
    return Peace(texts, max((each.gap_s for each in said), default=0.0))


def streams_in(
    said: Sequence[StreamedAnswer], waiting: Sequence[LongestWait], span: AttackSpan, calm: Peace
) -> dict[str, Any]:
    """What happened to the streams that ran, or should have begun, during an attack. Gaps count where they end."""
    here = [each for each in said if each.began <= span.ended and each.ended >= span.began]
    whole = [each for each in here if not each.error and not each.refused]
    gaps = [each.gap_s for each in here if span.has(each.gap_at)] + [w.longest_s for w in waiting if span.has(w.at)]
    cut = [each for each in here if each.error]
    return {
        "streams": len(here),
        "changed": sum(each.text != calm.texts.get(each.stream) for each in whole),
        "cut off": len(cut),
        "refused": sum(bool(each.refused) for each in here),
        "longest gap, s": max(gaps, default=0.0),
        "errors": [f"stream {each.stream}: {each.error or each.refused}"[:200] for each in here if each not in whole][
            :3
        ],
    }


def entry(
    name: str,
    told: tuple[str, str],
    outcome: AttackOutcome,
    streams: Mapping[str, Any],
    memory: tuple[Mapping[str, float], Mapping[str, float]],
    seconds: float,
    *,
    judged: bool,
    calm: Peace,
    alive: bool,
) -> dict[str, Any]:
    """One attack's row. `told` is what it does and what is expected; `memory` before it and after it had settled."""
    if outcome.skipped:
        return {"name": name, "does": told[0], "expected": told[1], "skipped": outcome.skipped, "broken": []}
    broken: list[str] = []
    if outcome.unexpected:
        broken.append(f"{len(outcome.unexpected)} unexpected answers")
    if judged and streams["changed"] + streams["cut off"]:
        broken.append(f"{streams['changed']} streams changed, {streams['cut off']} cut off")
    if judged and streams["longest gap, s"] > max(STOPPED_S, calm.gap_s):
        broken.append(f"a stream stood still for {streams['longest gap, s']:.1f} s")
    before, after = memory
    for kind, mib in before.items():
        grown = after.get(kind, 0.0) - mib
        if grown > MEMORY_MIB and grown > MEMORY_SHARE * mib:
            broken.append(f"the {kind} keeps {grown:.0f} MiB")
    if not alive:
        broken.append("no answer afterwards")
    return {
        "name": name,
        "does": told[0],
        "expected": told[1],
        "seconds": seconds,
        "requests": sum(outcome.statuses.values()),
        "statuses": dict(sorted(outcome.statuses.items())),
        "unexpected": len(outcome.unexpected),
        "what was unexpected": list(dict.fromkeys(outcome.unexpected))[:SHOWN],
        "streams": dict(streams),
        "memory before, MiB": dict(before),
        "memory after, MiB": dict(after),
        "notes": outcome.notes,
        "broken": broken,
    }


def passed(part: Mapping[str, Any]) -> bool:
    return not any(attack["broken"] for attack in part["attacks"])


def markdown(result: dict[str, Any]) -> str:
    """The results as tables."""
    facts = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = ["# Attacks", "", f"{facts['processor']}, {facts['cores']} cores, {facts['system']}; {versions}.", ""]
    for part in result["parts"].values():
        settings = ", ".join(f"{name} {value}" for name, value in part["settings"].items())
        lines += [f"{part['when']}: {settings}.", ""]
        lines += [
            f"{part['settings']['streams']} greedy streams ran all the while. Where nobody attacked, the longest gap "
            f"between two pieces of one was {part['gap in peace, s']:.2f} s.",
            "",
        ]
        lines += [
            "| attack | requests | unexpected | streams changed, cut, refused | gap, s | endpoint, MiB | broken |",
            "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
        ]
        lines += [_row(attack) for attack in part["attacks"]] + [""]
        for attack in part["attacks"]:
            lines += _details(attack)
        lines += ["What `satchel doctor` says afterwards:", "", "```", *part["doctor"], "```", ""]
    return "\n".join(lines)


def _row(attack: Mapping[str, Any]) -> str:
    if attack.get("skipped"):
        return f"| {attack['name']} | | | | | | not done: {attack['skipped']} |"
    streams = attack["streams"]
    before, after = (attack[f"memory {when}, MiB"].get("endpoint", float("nan")) for when in ("before", "after"))
    cells = (
        f"{attack['requests']:,}",
        str(attack["unexpected"]),
        f"{streams['changed']}, {streams['cut off']}, {streams['refused']}",
        f"{streams['longest gap, s']:.2f}",
        f"{before:.0f} → {after:.0f}",
        "; ".join(attack["broken"]) or "nothing",
    )
    return f"| {attack['name']} | {' | '.join(cells)} |"


def _details(attack: Mapping[str, Any]) -> list[str]:
    lines = [f"**{attack['name']}**: {attack['does']}. Expected: {attack['expected']}.", ""]
    if attack.get("skipped"):
        return lines
    statuses = ", ".join(f"{status} {count:,} times" for status, count in attack["statuses"].items())
    lines += [f"- {attack['seconds']:.0f} s; {statuses or 'no answers'}"]
    lines += [f"- {note}" for note in attack["notes"]]
    lines += [f"- unexpected: `{what}`" for what in attack["what was unexpected"]]
    lines += [f"- {error}" for error in attack["streams"]["errors"]]
    return [*lines, ""]
