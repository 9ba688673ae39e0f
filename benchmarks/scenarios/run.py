"""Runs all scenarios on a running endpoint, and writes down what they took.

    python -m benchmarks.scenarios.run [--url http://127.0.0.1:8000] [--traces FOLDER] [--out FOLDER]

Answers that are wrong end it with status 1, after everything has run.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import machine
from ..programs import RESULTS
from .endpoint import ScenarioEndpoint, endpoint_at
from .gossip import gossip
from .ledger import Row, table
from .minds import WAYS
from .prisoners import prisoners
from .replay import ReplayLimits, replay
from .story import StoryRun, at_least, common_options, run_all, summary, ways

TRACES = ("whowhen_conversations.jsonl", "agent_text.jsonl.gz")


def say(text: str) -> None:
    print(text, flush=True)


def read_options() -> argparse.Namespace:
    parser = common_options((__doc__ or "").splitlines()[0])
    add, least = parser.add_argument, ReplayLimits()
    add("--ways", type=ways, default=list(WAYS), help="how the stories keep KV: memory, disk, nothing")
    add("--traces", type=Path, help=f"a folder with {' or '.join(TRACES)}; without it nothing is replayed")
    add("--conversations", type=at_least(1), default=least.conversations, help="of each file; default %(default)s")
    add("--calls", type=at_least(1), default=least.calls, help="of each conversation; default %(default)s")
    add("--time-s", type=float, default=least.time_s, help="for each file; default %(default)s")
    add("--cold", type=at_least(0), default=least.cold, help="prompts that are also measured with nothing kept")
    add("--out", type=Path, default=RESULTS)
    add("--machine", help="the name of the endpoint's machine in the results' file names; else nothing is written")
    return parser.parse_args()


def replayed(endpoint: ScenarioEndpoint, options: argparse.Namespace) -> list[Row]:
    """A row for every recording that is there."""
    limits = ReplayLimits(options.conversations, options.calls, options.time_s, cold=options.cold)
    rows: list[Row] = []
    for name in TRACES:
        path = options.traces / name
        if not path.is_file():
            say(f"\n{name} is left out: it is not in the folder of --traces.")
            continue
        rows.append({"recording": name, **replay(endpoint, path, limits, say).summary()})
    return rows


def save(path: Path, result: dict[str, Any]) -> None:
    """As JSON, and as Markdown beside it."""
    machine, versions = result["machine"], result["versions"]
    heading = (
        f"# Scenarios\n\n{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"{machine['system']}, Python {machine['python']}; {', '.join(f'{n} {v}' for n, v in versions.items())}. "
        f"Load before: {machine['load_before']}. {result['when']}. Model: {result['model']}."
    )
    parts = [f"## {name}\n\n{table(rows)}" for name, rows in result["parts"].items() if rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".md").write_text("\n\n".join([heading, *parts]) + "\n", encoding="utf-8")
    rounded = json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.4g}"))
    path.with_name(path.name + ".json").write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    options = read_options()
    # The client's side: the endpoint is taken to run on this machine too. Of a GPU the name has to be said.
    facts, stories = machine.facts("cpu"), dict[str, dict[str, StoryRun]]()
    parts: dict[str, list[Row]] = {}
    with endpoint_at(options.url, options.model) as endpoint:
        for name, tell in (("The prisoner's dilemma", prisoners), ("A rumour network", gossip)):
            say(f"\n# {name}")
            stories[name] = run_all(endpoint, options.ways, lambda mind, tell=tell: tell(mind, options.seed), say)
            parts[name] = summary(stories[name])
        if options.traces is not None:
            say("\n# Recorded conversations")
            parts["Recorded conversations"] = replayed(endpoint, options)
        model = endpoint.model
    if options.machine:
        result = {
            "machine": facts,
            "versions": machine.versions(sys.executable),
            "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "model": model,
            "parts": parts,
        }
        save(options.out / f"scenarios-{options.machine}", result)
    runs = [run.told for found in stories.values() for run in found.values()]
    raise SystemExit(any(told.right < len(told.checks) for told in runs))


if __name__ == "__main__":
    main()
