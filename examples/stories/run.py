"""Runs all stories on a running endpoint, and replays recordings if it is given some.

    python -m examples.stories.run [--url http://127.0.0.1:8000] [--traces FOLDER]

Answers that are wrong end it with status 1, after everything has run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .endpoint import ScenarioEndpoint, endpoint_at
from .gossip import gossip
from .minds import WAYS
from .prisoners import prisoners
from .replay import ReplayLimits, replay
from .story import at_least, common_options, run_all, ways

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
    return parser.parse_args()


def replay_all(endpoint: ScenarioEndpoint, options: argparse.Namespace) -> None:
    limits = ReplayLimits(options.conversations, options.calls, options.time_s, cold=options.cold)
    for name in TRACES:
        path = options.traces / name
        if path.is_file():
            replay(endpoint, path, limits, say)
        else:
            say(f"\n{name} is left out: it is not in the folder of --traces.")


def main() -> None:
    options = read_options()
    right = True
    with endpoint_at(options.url, options.model) as endpoint:
        for name, tell in (("The prisoner's dilemma", prisoners), ("A rumour network", gossip)):
            say(f"\n# {name}")
            runs = run_all(endpoint, options.ways, lambda mind, tell=tell: tell(mind, options.seed), say)
            right &= all(run.told.right == len(run.told.checks) for run in runs.values())
        if options.traces is not None:
            say("\n# Recorded conversations")
            replay_all(endpoint, options)
    raise SystemExit(not right)


if __name__ == "__main__":
    main()
