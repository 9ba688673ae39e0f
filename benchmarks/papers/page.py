"""The page of all papers: what each paper reports, the best peer here, ours, and their ratio; and what was not run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..parts import ResultTable, shown
from .figures import PAPERS, Figure

HEADS = ("what", "unit", "paper", "best peer", "which", "ours", "ratio")
JOULES = ("J, peer", "J, ours")


@dataclass
class PaperTable(ResultTable):
    """One experiment of a paper.

    Attributes:
        paper: one of `PAPERS`.
        missing: what of the experiment was not run, and why.
    """

    paper: str = ""
    missing: list[str] = field(default_factory=list)

    def compare(
        self,
        what: str,
        unit: str,
        ours: float | None,
        peers: Mapping[str, float],
        *,
        figure: Figure | None = None,
        less: bool = False,
        ratio: bool = True,
        joules: Mapping[str, float] | None = None,
    ) -> None:
        """Adds a row. The ratio is above 1 if ours is better than the best peer.

        Args:
            peers: by name; none if no peer was measured.
            figure: the paper's own.
            less: whether less is better.
            ratio: whether a ratio says anything.
            joules: of a token, by name of peer, "" for ours.
        """
        best = (min if less else max)(peers, key=lambda name: peers[name], default="")
        other, found = peers.get(best), None
        if ratio and ours and other:
            found = other / ours if less else ours / other
        known = joules or {}
        self.rows.append(
            {
                "what": what,
                "unit": unit,
                "paper": f"{figure.value:,g} ({figure.where})" if figure else None,
                "best peer": other,
                "which": best or None,
                "ours": ours,
                "ratio": found,
                **({"J, peer": known.get(best), "J, ours": known.get("")} if known else {}),
            }
        )


def markdown(result: dict[str, Any]) -> str:
    """The page."""
    machine, versions = result["machine"], result["versions"]
    lines = [
        "# Papers",
        "",
        f"{machine['gpu'] or machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"{machine['system']}, Python {machine['python']}; {', '.join(f'{n} {v}' for n, v in versions.items())}. "
        f"Load before: {machine['load_before']}. {result['when']}.",
        "",
        "A paper's figures are of its own machine and models; only ours and the peers' were measured here, in one run. "
        "The ratio is ours over the best peer's, or the other way round where less is better: above 1 ours is better. "
        "Models have random weights in the shapes of the named ones. J: joules a token of the whole machine or card, "
        "where it counts them.",
        "",
    ]
    for name, paper in PAPERS.items():
        parts = {key: part for key, part in result["parts"].items() if part["paper"] == name}
        lines += [f"## {paper.title}", "", f"{paper.reference}. {paper.sources}", ""]
        for key, part in parts.items():
            lines += _table(key, part)
        lines += _missing(name, parts, result)
    return "\n".join(lines)


def _table(key: str, part: dict[str, Any]) -> list[str]:
    lines = [f"### {part['title']}", ""]
    if part["rows"]:
        heads = [*HEADS, *(JOULES if any(JOULES[1] in row for row in part["rows"]) else ())]
        # Numbers are right-aligned, names are not.
        lines += ["| " + " | ".join(heads) + " |", "|" + "".join(_column(head) for head in heads)]
        lines += ["| " + " | ".join(shown(row.get(head)) for head in heads) + " |" for row in part["rows"]]
        lines.append("")
    lines += [f"- {note}" for note in part["notes"]]
    return [*lines, f"- `{key}` in {part['seconds']:.0f} s", ""]


def _column(head: str) -> str:
    return " --- |" if head in ("what", "unit", "which") else " ---: |"


def _missing(name: str, parts: Mapping[str, dict[str, Any]], result: dict[str, Any]) -> list[str]:
    """What of a paper was not run."""
    told = [*PAPERS[name].never]
    told += [f"{key}: {each}" for key, part in parts.items() for each in part["missing"]]
    told += [f"`{key}` has not been run." for key in result["known"].get(name, ()) if key not in result["parts"]]
    return ["Not run:", "", *(f"- {each}" for each in dict.fromkeys(told)), ""] if told else []
