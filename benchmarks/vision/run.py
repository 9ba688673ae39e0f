"""Measures pictures and videos on this machine: what keeping features and KV saves, what it takes, and beside others.

    python -m benchmarks.vision.run [--parts turns,video] [--shape shapes] [--rounds 3] [--budget-s 1800]

Figures are medians over the rounds. Nothing here is a test of speed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from satchel.cluster.environment import default_home, mlx_settings

from .. import kept, machine
from .. import parts as tables
from ..programs import RESULTS, ROOT, program
from .media import entries, resolution, video
from .parts import Sight
from .peers import PEER_NAMES, peers
from .servers import FRAMES_MAX, KEPT, SATCHEL, VisionServer, targets
from .shapes import EMBEDDED, VISION_SHAPES
from .turns import TARGET_SIDE, TalkOptions, ablation, turns

PARTS = ("turns", "ablation", "resolution", "video", "entries", "peers")
STEP = 32
"""Pixels along a side that become one token."""


def say(text: str) -> None:
    print(text, flush=True)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def count(text: str, most: float = math.inf) -> int:
        if not 0 < (found := int(text)) <= most:
            raise argparse.ArgumentTypeError(f"{text}: not from 1 to {most:g}")
        return found

    def counts(text: str, most: float = math.inf) -> list[int]:
        return [count(word, most) for word in text.split(",") if word.strip()]

    def names(known: Sequence[str], text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return chosen

    add = parser.add_argument
    add("--parts", type=partial(names, PARTS), default=list(PARTS), help=", ".join(PARTS))
    add("--shape", choices=list(VISION_SHAPES), default=EMBEDDED, help="the model: the embedded one, or random weights")
    add("--rounds", type=count, default=3)
    add("--budget-s", type=float, default=1800.0, help="after this many seconds nothing is begun")
    add("--side", type=count, default=TARGET_SIDE, help="of the picture of turns, ablation and peers")
    add("--limit-side", type=count, help="the other picture of turns (else the largest that the model takes as it is)")
    add("--sides", type=counts, default=[224, 448, 768, 1024], help="for resolution and entries")
    add("--frames", type=partial(counts, most=FRAMES_MAX), default=[4, 8, 16, 32, 64], help=f"at the most {FRAMES_MAX}")
    add("--frame-side", type=count, default=448)
    add("--tokens", type=count, default=16, help="of an answer at the most; a random model's has exactly as many")
    add("--only", type=partial(names, PEER_NAMES), default=list(PEER_NAMES), help=f"for peers: {', '.join(PEER_NAMES)}")
    add("--start-timeout-s", type=float, default=240.0)
    add("--vllm-mlx-site", type=Path, help="a folder with vllm-mlx and what it needs, else it is installed")
    add("--models", type=Path, help="a folder where models are written once, for later runs too (else a temporary one)")
    add("--work", type=Path, help="where files are written, on the disk that is to be measured (else a temporary one)")
    add("--out", type=Path, default=RESULTS)
    add("--machine", help="the machine's name in the results' file names")
    return parser.parse_args(arguments)


class VisionRun:
    """The parts, each with what it needs."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.budget = tables.Budget(options.budget_s)
        self._place = targets.make_place(work, options.vllm_mlx_site, options.start_timeout_s)
        self._folder = (options.models or work / "models").absolute() / options.shape
        command = program("vision.folders", self._folder, options.shape)
        said = subprocess.run(
            command, cwd=ROOT, env=self._place.environment, capture_output=True, text=True, timeout=600
        )
        if said.returncode:
            raise SystemExit(f"{options.shape} cannot be written:\n{said.stderr}")
        self.device: str = json.loads(said.stdout.splitlines()[-1])["device"]
        self._talk = TalkOptions(options.tokens, known=VISION_SHAPES[options.shape] is None)
        self._sight: Sight | None = None

    @contextmanager
    def start(self, name: str = SATCHEL, settings: Mapping[str, Any] = KEPT["both"]) -> Iterator[VisionServer]:
        """A server that is ready, ended afterwards."""
        server = VisionServer(name, self._folder, self._place, settings)
        try:
            yield server
        finally:
            server.stop()

    def parts(self) -> dict[str, Callable[[], Any]]:
        """The chosen parts by name."""
        chosen, talk, budget = self.options, self._talk, self.budget
        common = (talk, chosen.rounds, budget, say)
        known: dict[str, Callable[[], Any]] = {
            "turns": lambda: turns(self._seer(), self.start, [chosen.side, self._limit_side()], *common),
            "ablation": lambda: ablation(self.start, chosen.side, *common),
            "resolution": lambda: resolution(self._seer(), self.start, chosen.sides, *common),
            "video": lambda: video(self._seer(), self.start, chosen.frames, chosen.frame_side, *common),
            "entries": lambda: entries(self.start, chosen.sides, talk, say),
            "peers": lambda: peers(self.start, chosen.only, chosen.side, *common),
        }
        return {name: known[name] for name in dict.fromkeys(chosen.parts)}

    def _seer(self) -> Sight:
        if self._sight is None:
            self._sight = Sight(self._folder)
        return self._sight

    def _limit_side(self) -> int:
        """Of the largest square picture that the model's processor leaves as large as it is."""
        settings = json.loads((self._folder / "preprocessor_config.json").read_text())
        return self.options.limit_side or math.isqrt(settings["size"]["longest_edge"]) // STEP * STEP


def label(part: str, shape: str) -> str:
    """A part's name in the results, where every model has its own."""
    return part if shape == EMBEDDED else f"{part} {shape}"


def main() -> None:
    options = read_options()
    # As a replica's process has it.
    os.environ.update(mlx_settings(default_home()))
    # Ended from outside, it still ends its servers.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="satchel-vision-", dir=options.work) as work:
        run = VisionRun(options, Path(work))
        facts = {**machine.facts(run.device), "load_before": round(load_before, 2)}
        result = kept.begun(facts, options)
        path = options.out / f"vision-{options.machine or machine.name_of(facts)}"
        every = [label(part, shape) for shape in VISION_SHAPES for part in PARTS]
        result["parts"] = kept.earlier(path, result, every)
        model = f"{'embedded:' if options.shape == EMBEDDED else 'random weights, '}{options.shape}"

        def finish(name: str, part: Any, note: str) -> str:
            part.title += f" ({model})"
            return label(kept.noted(name, part, note), options.shape)

        kept.measure_all(run.parts(), run.budget, path, result, markdown, finish)


def markdown(result: dict[str, Any]) -> str:
    """The results as tables."""
    return tables.markdown(result).replace("# Memory", "# Pictures and videos", 1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("Stopped; all servers are ended")
        sys.exit(130)
