"""Results on paper: JSON with everything, and Markdown with the medians and the ratios of one run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

SUBJECTS = ("satchel (4-bit KV)", "satchel")
ENGINE = "satchel engine"

ROWS = 10
"""Of a table of hot spots."""

SHOWN_US = 5.0
"""Processes that take less CPU time a token are not shown."""


class SaidSoFar(Protocol):
    """The part of a session that is told while it runs."""

    levels: list[Any]
    turns: list[Any]
    agents: list[Any]
    interference: Any
    start_s: float
    rss_mb: float
    pss_mb: float | None


def describe(machine: dict[str, Any]) -> str:
    """The machine in a line."""
    chip = f"{machine['gpu']}, " if machine["gpu"] else ""
    return (
        f"{chip}{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}, "
        f"Python {machine['python']}, load {machine['load_before']} before"
    )


def say_session(session: SaidSoFar, say: Callable[[str], None]) -> None:
    for row in session.levels:
        client = "" if row.client_cpu_share is None else f", client {row.client_cpu_share:.0%} of a core"
        say(
            f"    {row.streams:3d} streams of {row.load} {row.tokens_per_s:8.1f} tok/s, TTFT {row.ttft_p50_ms:.0f}/"
            f"{row.ttft_p99_ms:.0f} ms, gaps {row.gap_p50_ms:.1f}/{row.gap_p99_ms:.1f} ms{client}"
        )
    for turns in session.turns:
        say(
            f"    a conversation of {turns.tokens}: first token after {turns.cold_ttft_ms:.0f} ms, next turn "
            f"{turns.next_ttft_ms:.0f}, later ones {turns.later_ttft_ms:.0f}"
        )
    for row in session.agents:
        say(
            f"    {row.agents} agents, {row.load}: {row.tokens_per_s:.1f} tok/s in {row.seconds:.1f} s, TTFT "
            f"{row.ttft_p50_ms:.0f}/{row.ttft_p95_ms:.0f}/{row.ttft_p99_ms:.0f} ms, {row.failed} of {row.turns} failed"
        )
    if session.interference is not None:
        long = session.interference
        say(
            f"    long prompt of {long.long_tokens}: TTFT {long.long_ttft_ms:.0f} ms; running stream's gaps "
            f"{long.gap_p50_ms:.0f}/{long.gap_p99_ms:.0f} ms, alone {long.gap_alone_p50_ms:.1f} ms"
        )
    pss = "" if session.pss_mb is None else f", {session.pss_mb:.0f} MB proportional"
    say(f"    started in {session.start_s:.1f} s; {session.rss_mb:.0f} MB resident{pss}")


Level = tuple[str, int]
"""A load and a number of streams."""


def _of_level(session: dict[str, Any], level: Level) -> list[dict[str, Any]]:
    return [row for row in session["levels"] if (row["load"], row["streams"]) == level]


class _ModelReport:
    """One model's sessions, looked up by target."""

    def __init__(self, entry: dict[str, Any], targets: list[str]) -> None:
        self.failures: dict[str, str] = entry["failures"]
        self._rounds = entry["rounds"]
        self.targets = [name for name in targets if self.sessions(name)]
        # With its defaults, if that was measured.
        self.subject = next((name for name in SUBJECTS if name in self.targets), "")

    def sessions(self, target: str) -> list[dict[str, Any]]:
        return [row for row in self._rounds if row["target"] == target]

    def values(self, target: str, level: Level, name: str, of: str | None = None) -> list[float]:
        """A round's median of a level's field, or of an entry `of` it, for every round that has one."""
        found = []
        for session in self.sessions(target):
            given = [row.get(name) for row in _of_level(session, level)]
            rows = [
                value
                for each in given
                if each is not None and (value := each if of is None else each.get(of)) is not None
            ]
            if rows:
                found.append(statistics.median(rows))
        return found

    def ratios(self, target: str, level: Level) -> list[float]:
        """Satchel's tokens/s over the target's, in every round that has both."""
        found = []
        for session in self.sessions(target):
            mine = [row for row in self.sessions(self.subject) if row["round"] == session["round"]]
            pairs = [[row["tokens_per_s"] for row in _of_level(side, level)] for side in (*mine, session)]
            if len(pairs) == 2 and all(pairs):
                found.append(statistics.median(pairs[0]) / statistics.median(pairs[1]))
        return found

    def interference(self, target: str, name: str) -> list[float]:
        return [row["interference"][name] for row in self.sessions(target) if row["interference"]]


def _number(values: list[float], digits: int = 0) -> str:
    return f"{statistics.median(values):,.{digits}f}" if values else "–"


def _spread(values: list[float]) -> str:
    if not values:
        return "–"
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f}–{max(values):.2f})"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" + " ---: |" * (len(head) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _levels(model: _ModelReport, load: str, streams: list[int]) -> list[str]:
    def pair(target: str, count: int, name: str, digits: int) -> str:
        low, high = (model.values(target, (load, count), f"{name}_{share}_ms") for share in ("p50", "p99"))
        return f"{_number(low, digits)} / {_number(high, digits)}"

    def gap(target: str, count: int) -> str:
        tokens = model.values(target, (load, count), "tokens_per_piece")
        merged = f" ({statistics.median(tokens):.1f})" if tokens and statistics.median(tokens) > 1.05 else ""
        return pair(target, count, "gap", 1) + merged

    def cpu(target: str, count: int) -> str:
        share = model.values(target, (load, count), "client_cpu_share")
        client = f"; {statistics.median(share):.0%}" if share else ""
        return _number(model.values(target, (load, count), "server_cpu_ms_per_token"), 2) + client

    def rate(target: str, count: int) -> str:
        return _number(model.values(target, (load, count), "tokens_per_s"), 1)

    columns = [f"{count} stream{'s' if count > 1 else ''}" for count in streams]
    what = f"prompts of {int(load):,} tokens" if load.isdigit() else "prompts of mixed lengths"
    lines = [f"### {what[0].upper()}{what[1:]}", "", "Tokens a second:", ""]
    lines += _table(["", *columns], [[name, *(rate(name, n) for n in streams)] for name in model.targets])
    if model.subject:
        lines += [f"Those of {model.subject} over the other's (median and range of the rounds):", ""]
        others = [name for name in model.targets if name != model.subject]
        ratios = [[name, *(_spread(model.ratios(name, (load, n))) for n in streams)] for name in others]
        lines += _table(["", *columns], ratios)
    lines += ["Time to first token, p50 / p99 in ms:", ""]
    lines += _table(["", *columns], [[name, *(pair(name, n, "ttft", 0) for n in streams)] for name in model.targets])
    lines += ["Between two pieces of a stream, p50 / p99 in ms (and tokens a piece, where it is not one):", ""]
    lines += _table(["", *columns], [[name, *(gap(name, n) for n in streams)] for name in model.targets])
    lines += ["CPU time of all of the server's processes, ms a token; the client's share of a core:", ""]
    lines += _table(["", *columns], [[name, *(cpu(name, n) for n in streams)] for name in model.targets])
    joules = {name: [model.values(name, (load, n), "joules_per_token") for n in streams] for name in model.targets}
    if any(found for each in joules.values() for found in each):
        lines += ["Joules a token, of all that the card or the machine did meanwhile:", ""]
        lines += _table(
            ["", *columns], [[name, *(_number(found, 3) for found in each)] for name, each in joules.items()]
        )
    return lines + _way_to_clients(model, load, streams)


def _way_to_clients(model: _ModelReport, load: str, streams: list[int]) -> list[str]:
    """What Satchel's HTTP and Ray cost beside its engine alone, if both were measured with KV in full precision."""
    ours = "satchel"
    if ours not in model.targets or ENGINE not in model.targets:
        return []

    def lost(count: int) -> str:
        found = []
        for session in model.sessions(ENGINE):
            pair = [session, *(row for row in model.sessions(ours) if row["round"] == session["round"])]
            rates = [[row["tokens_per_s"] for row in _of_level(side, (load, count))] for side in pair]
            if len(rates) == 2 and all(rates):
                found.append(100 * (1 - statistics.median(rates[1]) / statistics.median(rates[0])))
        return _number(found, 1)

    def cpu(name: str, count: int) -> list[float]:
        return model.values(ours, (load, count), "cpu_us_by_process", of=name)

    def alone(count: int) -> str:
        return _number([1e3 * spent for spent in model.values(ENGINE, (load, count), "server_cpu_ms_per_token")])

    rows = [row for count in streams for each in model.sessions(ours) for row in _of_level(each, (load, count))]
    names = {name for row in rows for name, spent in row["cpu_us_by_process"].items() if spent >= SHOWN_US}
    columns = [f"{count} stream{'s' if count > 1 else ''}" for count in streams]
    table = [
        ["the engine alone", *(alone(count) for count in streams)],
        *([name, *(_number(cpu(name, count)) for count in streams)] for name in sorted(names)),
        ["lost of its tokens a second, %", *(lost(count) for count in streams)],
    ]
    lines = ["From the engine to the client: CPU time of the engine alone and of Satchel's processes, µs a token:", ""]
    return lines + _table(["", *columns], table)


def _turns(model: _ModelReport, lengths: list[int]) -> list[str]:
    lines = [
        "### Conversations that go on",
        "",
        "Time to first token in ms, of a new prompt and its next turns, and the part of later ones outside the engine:",
        "",
    ]
    kinds = {"new": "cold_ttft_ms", "next turn": "next_ttft_ms", "later turns": "later_ttft_ms"}
    kinds["outside"] = "later_outside_ms"
    rows = []
    for name in model.targets:
        row = [name]
        for length in lengths:
            found = [turns for each in model.sessions(name) for turns in each["turns"] if turns["tokens"] == length]
            for field in kinds.values():
                known = [turns[field] for turns in found if turns[field] is not None]
                row.append(_number(known, int(field == "later_outside_ms")))
        rows.append(row)
    head = [f"{length:,}, {kind}" for length in lengths for kind in kinds]
    return [*lines, *_table(["", *head], rows)]


def _agents(model: _ModelReport, counts: list[int], loads: dict[str, Any]) -> list[str]:
    """Tables of agents that run at once."""
    lines = [
        "### Agents",
        "",
        f"Every agent sends {loads['turns']} turns, each as soon as it has the answer to the one before. Growing: "
        f"{loads['system_tokens']:,} tokens that all share, {loads['turn_tokens']:,} more with each turn, and answers "
        f"of {loads['answer_tokens']}. Recorded: sessions of a coding agent, of whose blocks of 64 tokens "
        f"{loads['block_tokens']} are sent.",
        "",
    ]
    head = ["", "tokens a second", "seconds", "first token, p50", "p95", "p99", "later turns, p50", "p95", "p99"]
    fields = [f"{kind}_{share}_ms" for kind in ("ttft", "later") for share in ("p50", "p95", "p99")]
    found = {name: [row for each in model.sessions(name) for row in each["agents"]] for name in model.targets}
    for kind in ("growing", "recorded"):
        for count in counts:
            rows = []
            for name, measured in found.items():
                those = [row for row in measured if (row["load"], row["agents"]) == (kind, count)]
                if those:
                    figures = [_number([row["tokens_per_s"] for row in those], 1)]
                    figures += [_number([row["seconds"] for row in those], 1)]
                    figures += [_number([row[field] for row in those if row[field] == row[field]]) for field in fields]
                    rows.append([name, *figures, _number([row["failed"] for row in those]), str(those[0]["turns"])])
            if rows:
                lines += [f"{count} agents, {kind}, times in ms:", ""]
                lines += _table([*head, "turns failed", "of"], rows)
    return lines


def _rest(model: _ModelReport, long_prompt_tokens: int) -> list[str]:
    lines: list[str] = []
    if long_prompt_tokens:
        lines += [f"A running stream while a prompt of {long_prompt_tokens:,} tokens prefills, in ms:", ""]
        names = ("gap_alone_p50_ms", "gap_p50_ms", "gap_p99_ms", "gap_max_ms", "long_ttft_ms")
        head = ["", "gap before, p50", "gap meanwhile, p50", "p99", "longest", "the long prompt's first token"]
        rows = [[name, *(_number(model.interference(name, field), 1) for field in names)] for name in model.targets]
        lines += _table(head, rows)
    lines += [
        "Memory of all processes after the bursts, in MB, and the seconds to start, with and without self-test:",
        "",
    ]
    rows = []
    for name in model.targets:
        found = model.sessions(name)
        pss = [row["pss_mb"] for row in found if row["pss_mb"] is not None]
        rss, start, count = ([row[key] for row in found] for key in ("rss_mb", "start_s", "processes"))
        tested = [row["self_test_s"] for row in found if row.get("self_test_s") is not None]
        rows.append([name, _number(rss), _number(pss), _number(count), _number(start, 1), _number(tested, 1)])
    lines += _table(["", "resident", "proportional", "processes", "start, s", "self-test ended, s"], rows)
    if model.subject:
        parts = model.sessions(model.subject)[-1]["memory_by_process"]
        lines += ["Satchel's processes, in MB (last round):", ""]
        rows = [[name, f"{row['processes']:.0f}", f"{row['rss_mb']:.0f}", f"{row['pss_mb']:.0f}"]
                for name, row in parts.items()]  # fmt: skip
        lines += _table(["", "processes", "resident", "proportional"], rows)
    return lines


def _profile(found: dict[str, Any] | None) -> list[str]:
    if not found:
        return []
    if "error" in found:
        return [f"Satchel's time was not looked into: {found['error']}", ""]
    rate = found["tokens_per_s"]
    tables = {name: table for name, table in found["processes"].items() if "error" not in table}
    lines = [
        f"Satchel's processes at {found['streams']} streams and {rate:,.0f} tokens a second:",
        "",
    ]
    shares = {name: share for name, share in found["cpu_share"].items() if share >= 0.002}
    rows = [[name, f"{share:.1%}", f"{share / rate * 1e6:,.0f}"] for name, share in shares.items()]
    lines += _table(["", "CPU, of a core", "CPU, µs a token"], rows)
    lines += ["The interpreter's lock, which a process has only once, and who held it, as py-spy saw it:", ""]
    lines += [f"- {name}: {table['error']}" for name, table in found["processes"].items() if "error" in table]
    rows = [
        [name, f"{table['gil_share']:.1%}", f"{table['gil_share'] / rate * 1e6:,.0f}"] for name, table in tables.items()
    ]
    lines += _table(["", "held, of the time", "held, µs a token"], rows)
    for name, table in tables.items():
        for title, part in (
            ("by package of the innermost function", "by_package"),
            ("under Satchel's functions, with all they call", "under_ours"),
        ):
            held = [[what, f"{share:.0%}"] for what, share in list(table[part].items())[:ROWS]]
            lines += _table([f"{name}, {title}", "of the lock"], held) if held else []
    return lines


def markdown(result: dict[str, Any]) -> str:
    options, versions = result["options"], result["versions"]
    lines = [
        "# Serving, measured",
        "",
        f"{describe(result['machine'])}.",
        "",
        *(f"- {name}: " + ", ".join(f"{key} {value}" for key, value in found.items())
          for name, found in versions.items()),
        "",
        f"Answers of {options['tokens']} tokens, streamed over HTTP on loopback; "
        f"medians of at most {options['rounds']} rounds in one run"
        f"{', all servers started once' if options['together'] else ', every server started anew in each'}. "
        "Bare engines have no HTTP. Ratios hold for this machine and this run only.",
        "",
    ]  # fmt: skip
    for name, entry in result["models"].items():
        model = _ModelReport(entry, options["only"])
        lines += [f"## {name}", ""]
        lines += [f"- {target} was not measured: {why}" for target, why in model.failures.items()]
        errors = sorted({f"{row['target']}: {error}" for row in entry["rounds"] for error in row["errors"]})
        lines += [*(f"- {error}" for error in errors), *([""] if model.failures or errors else [])]
        if model.targets:
            for load in options["prompt_tokens"] if options["streams"] else ():
                lines += _levels(model, load, options["streams"])
            lines += _turns(model, options["turns"]) if options["turns"] else []
            lines += _agents(model, options["agents"], result["agent_load"]) if options["agents"] else []
            lines += _rest(model, options["long_prompt_tokens"])
        lines += _profile(entry["profile"])
    return "\n".join(lines)


def write(result: dict[str, Any], stem: Path) -> None:
    """Write both files; what is there after every session is what is known so far."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown(result))
