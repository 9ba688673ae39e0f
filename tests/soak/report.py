"""What the soak found, as laws that held or not, and the figures behind them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .driver import Seen
from .ledger import BLOCK_TOKENS, LAWS, Attempt, Broken, Fault, by_reason, computed_again, excesses
from .reference import Compared

SHOWN = 40
"""Broken laws that are written out; the others are counted."""

BLOCK_BYTES, TAIL_TOKEN_BYTES = 239_616, 6_144
"""Of the embedded model's KV: 1,536 numbers a token, in 4.9 bits and in float32."""


def kv_bytes(tokens: int) -> int:
    """What the KV of a conversation takes."""
    blocks, tail = divmod(tokens, BLOCK_TOKENS)
    return blocks * BLOCK_BYTES + tail * TAIL_TOKEN_BYTES


def attempts_of(seen: Seen) -> list[Attempt]:
    return sorted(
        (record for records in seen.records.values() for record in records if isinstance(record, Attempt)),
        key=lambda attempt: attempt.number,
    )


def histories(seen: Seen) -> dict[str, list[Attempt]]:
    """The attempts of every life, behind those of the life that it was forked from."""
    found: dict[str, list[Attempt]] = {}
    for records in seen.records.values():
        for record in records:
            if isinstance(record, Attempt):
                found.setdefault(record.life, []).append(record)
            elif record.kind == "fork":
                found[record.other] = [*found.get(record.life, [])]
    return found


def summary(
    seen: Seen, compared: Compared | None, counters: Mapping[str, float], settings: dict[str, Any], roomy: bool
) -> dict[str, Any]:
    """Everything, as plain data. `broken` counts by law; the run has passed where it counts nothing."""
    attempts = attempts_of(seen)
    by_number = {attempt.number: attempt for attempt in attempts}
    broken = list(seen.broken)
    broken += [Broken("answers", "undisturbed", failure) for failure in (compared.failures if compared else ())]
    for number, wrong in (compared.wrong if compared else {}).items():
        attempt = by_number[number]
        broken.append(Broken("answers", attempt.life, f"turn {number} ({attempt.kind}): {wrong}"))
    over = excesses(histories(seen), seen.faults, roomy)
    for each in over:
        if not each.reason:
            again = ", a repeat" if each.repeat else ""
            attempt = by_number[each.number]
            what = f"{each.tokens} tokens too many{again}: turn {each.number} ({attempt.kind}, {each.tier})"
            what += f", {attempt.prompt} of which {attempt.cached} cached, {attempt.held} held"
            broken.append(Broken("recomputed", each.life, what))
    for error in seen.errors:
        if not error["fault"]:
            broken.append(Broken("answered", error["life"], f"{error['kind']}: {error['error']}"))
    counted = Counter(each.law for each in broken)
    spoken = [attempt for attempt in attempts if attempt.kind != "inject"]
    whole = [attempt for attempt in spoken if attempt.whole]
    known = [attempt for attempt in whole if attempt.expected and not attempt.stop]
    peak = max((sample["tokens held"] for sample in seen.samples), default=0)
    held = sum(kv_bytes(tokens) for tokens in seen.held_tokens)
    return {
        "settings": settings,
        "turns": {
            "requests": len(spoken),
            "answered whole": len(whole),
            "cut short": sum(bool(attempt.text) and not attempt.whole for attempt in spoken),
            "ended by a stop string": sum(attempt.stop != "" and attempt.finish == "stop" for attempt in whole),
            "injections": len(attempts) - len(spoken),
            "repeated after a cut": sum(attempt.repeats for attempt in attempts),
            "lives": len({attempt.life for attempt in attempts}),
            "longest prompt, tokens": max((attempt.prompt for attempt in attempts), default=0),
            "right by the model's own measure": f"{sum(a.text == a.expected for a in known)} of {len(known)}",
        },
        "operations": dict(sorted(seen.operations.items())),
        "faults": faults_of(seen.faults),
        "restarts, s": seen.restarts_s,
        "filled, bytes": seen.filled_bytes,
        "tokens": {
            "prompts": sum(attempt.prompt for attempt in attempts),
            "of memory": sum(attempt.cached for attempt in attempts),
            "drawn": sum(attempt.drawn for attempt in attempts),
        },
        "answers": {
            "compared": compared.answers if compared else 0,
            "of them whole": compared.whole if compared else 0,
            "different": len(compared.wrong) if compared else 0,
        },
        "computed beyond the bound, because of": by_reason(over),
        "computed again, after": computed_again(histories(seen)),
        "words": dict(sorted(seen.counts.items())),
        "looked for before deletion": dict(seen.controls),
        "errors during faults": dict(Counter(e["fault"] for e in seen.errors if e["fault"])),
        "memory": {
            "tokens held at most": peak,
            "KV of the agents at the end, bytes": held,
            "on disk at most, bytes": max((sample["disk bytes"] for sample in seen.samples), default=0),
            "in memory at most, bytes": max((sample["prefix bytes"] for sample in seen.samples), default=0),
        },
        "counters": {name: value for name, value in sorted(counters.items()) if value},
        "broken": {law: counted.get(law, 0) for law in LAWS},
        "what broke": [f"{each.law}: {each.life}: {each.what}" for each in broken[:SHOWN]],
        "controls missed": controls_missed(seen),
    }


def faults_of(faults: Sequence[Fault]) -> dict[str, int]:
    return dict(sorted(Counter(fault.kind for fault in faults).items()))


def controls_missed(seen: Seen) -> bool:
    """Whether the search found nothing of agents that were there: then it would have found nothing afterwards."""
    looked = seen.controls["looked before"]
    return bool(looked) and min(seen.controls["words found before"], seen.controls["token ids found before"]) < looked


def passed(part: Mapping[str, Any]) -> bool:
    return not any(part["broken"].values()) and not part["controls missed"] and bool(part["turns"]["answered whole"])


def markdown(result: dict[str, Any]) -> str:
    """The results as tables."""
    facts = result["machine"]
    lines = ["# Soak", ""]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines += [f"{facts['processor']}, {facts['cores']} cores, {facts['system']}; {versions}.", ""]
    for name, part in result["parts"].items():
        settings = part["settings"]
        lines += [f"## A disk with room for {'all' if name == 'roomy' else 'a tenth'}", ""]
        lines += [f"{part['when']}: {_sentence(settings)}", ""]
        lines += ["| law | broken |", "| --- | ---: |"]
        lines += [f"| {LAWS[law]} | {count} |" for law, count in part["broken"].items()]
        lines.append("")
        titles = (
            "turns", "operations", "faults", "tokens", "answers", "words", "looked for before deletion",
            "errors during faults", "memory", "counters",
        )  # fmt: skip
        for title in titles:
            if part[title]:
                lines += [f"| {title} | |", "| --- | ---: |"]
                lines += [f"| {key} | {_shown(value)} |" for key, value in part[title].items()] + [""]
        for title in ("computed beyond the bound, because of", "computed again, after"):
            if part[title]:
                lines += [f"| {title} | turns | tokens |", "| --- | ---: | ---: |"]
                found = part[title].items()
                lines += [f"| {name} | {each['turns']:,} | {each['tokens']:,} |" for name, each in found] + [""]
        if part["what broke"]:
            lines += ["What broke:", ""] + [f"- {what}" for what in part["what broke"]] + [""]
    return "\n".join(lines)


def _sentence(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in settings.items()) + "."


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
