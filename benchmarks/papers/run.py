"""Runs papers' own experiments on this machine, and writes one page: the paper's figure, the best peer's, ours, and the
ratio; and what could not be run.

    python -m benchmarks.papers.run [--parts ml-drift,agent-memory] [--budget-s 1200] [--resume]

On a CPU the models are scaled down. Parts that other runs with the same machine and versions have left stay on the
page.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from satchel.cluster.environment import default_home, mlx_settings

from .. import kept, machine
from ..memory.desk import on_gpu
from ..parts import Budget
from ..programs import RESULTS, ROOT, program
from ..serve.targets import CannotStart, make_place, vllm_mlx_python, with_path
from ..vision.shapes import VISION_SHAPES
from . import activations, agent_memory, agent_quality, ml_drift, vllm_mlx, vllm_mlx_media
from .cards import measure_on_cards
from .figures import PAPERS
from .folders import NONE
from .page import PaperTable, markdown

Measure = Callable[[], PaperTable]
RECIPE = "4"
"""Of the models of all papers but ML Drift. Scaled-down ones are not quantized: on a CPU, products of quantized weights
say nothing of other devices."""

PARTS = (
    *(f"ml-drift speed {name}" for name in ml_drift.DRIFT_MODELS),
    *(f"ml-drift planning {name}" for name in ml_drift.DRIFT_MODELS),
    "ml-drift activations",
    "ml-drift images",
    *(f"vllm-mlx engines {name}" for name in vllm_mlx.ENGINE_MODELS),
    *(f"vllm-mlx served {name}" for name in ("qwen3-0.6b", "qwen3-8b")),
    "vllm-mlx images",
    "vllm-mlx video",
    *(f"agent-memory first-token {name}" for name in agent_memory.AGENT_MODELS),
    *(f"agent-memory staggered {name}" for name in agent_memory.AGENT_MODELS[:2]),
    "agent-memory capacity",
    "agent-memory quality",
)
GPU_ONLY = ("vllm-mlx served qwen3-8b",)
"""Left out on a CPU if no parts are named, where it would be the same as a smaller one."""


def say(text: str) -> None:
    print(text, flush=True)


def chosen_parts(text: str) -> list[str]:
    """Reads names of parts, or their first words, as `ml-drift,agent-memory capacity`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [word for word in words if not any(_begins(part, word) for part in PARTS)]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(PARTS)}")
    return list(dict.fromkeys(part for word in words for part in PARTS if _begins(part, word)))


def _begins(part: str, word: str) -> bool:
    return f"{part} ".startswith(f"{word} ")


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    gpu = on_gpu()

    def counts(text: str) -> list[int]:
        return [int(word) for word in text.split(",") if word.strip()]

    def servers(text: str) -> list[str]:
        return [word.strip() for word in text.split(",") if word.strip()]

    add = parser.add_argument
    usual = [part for part in PARTS if gpu or part not in GPU_ONLY]
    add("--parts", type=chosen_parts, default=usual, help="names of parts, or their first words, in that order")
    add("--list", action="store_true", help="print the names of all parts")
    add("--budget-s", type=float, default=600.0 if gpu else 1200.0, help="after this many seconds nothing is begun")
    add("--cards", type=int, default=1, help="how many of the machine's cards measure parts at the same time")
    add("--resume", action="store_true", help="leave out parts that the page has already")
    add("--rounds", type=int, default=1)
    add("--small", action=argparse.BooleanOptionalAction, default=not gpu, help="models scaled down, as on a CPU")
    add("--drift-prompt-tokens", type=int, default=1024)
    add("--drift-tokens", type=int, default=256)
    add("--image-side", type=int, default=512 if gpu else 64, help="of images that are made, in pixels")
    add("--image-steps", type=int, default=20 if gpu else 4)
    add("--prompt-tokens", type=int, default=128, help="of vllm-mlx's prompts")
    add("--tokens", type=int, default=128 if gpu else 32, help="of vllm-mlx's answers")
    add("--streams", type=counts, default=[1, 2, 4, 8, 16], help="concurrent requests, as 1,4,16")
    add("--servers", type=servers, default=list(vllm_mlx.SERVERS), help=", ".join(vllm_mlx.SERVERS))
    add("--media-servers", type=servers, default=list(vllm_mlx_media.MEDIA_SERVERS))
    add(
        "--vision", choices=list(VISION_SHAPES), default="4b" if gpu else "shapes", help="the model of images and video"
    )
    add("--sides", type=counts, default=[224, 448, 768, 1024], help="of pictures, in pixels")
    add("--frames", type=counts, default=[4, 8, 16, 32, 64] if gpu else [4, 8, 16], help="of videos")
    # A CPU takes minutes for the attention of the others.
    contexts = [context for context in agent_memory.CONTEXTS if gpu or context <= 4096]
    add("--contexts", type=counts, default=contexts, help="of agents, in tokens")
    add("--staggered-tokens", type=int, default=agent_memory.STAGGERED_TOKENS)
    add("--quality-model", default="embedded:recall", help="a folder, a Hub id or embedded:NAME")
    add("--quality-lengths", type=counts, default=[1024])
    add("--start-timeout-s", type=float, default=240.0)
    add("--vllm-mlx-site", type=Path, help="a folder with vllm-mlx and its mlx-lm, else it is installed")
    add("--models", type=Path, help="a folder where models are written once, for later runs too (else a temporary one)")
    add("--out", type=Path, default=RESULTS)
    add("--machine", help="the machine's name in the results' file names")
    return parser.parse_args(arguments)


class PapersRun:
    """The parts, each with what it needs."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.budget = Budget(options.budget_s)
        self.place = make_place(work, options.vllm_mlx_site, options.start_timeout_s)
        self._models: Path = (options.models or work / "models").absolute()
        self._recipe, self._weights = (NONE, "not quantized") if options.small else (RECIPE, f"{RECIPE}-bit")

    def parts(self) -> dict[str, Measure]:
        """The chosen parts by name."""
        return {part: self._part(part) for part in self.options.parts}

    def _part(self, part: str) -> Measure:
        paper, kind, *rest = part.split()
        name = rest[0] if rest else ""
        known: dict[tuple[str, str], Measure] = {
            ("ml-drift", "speed"): lambda: self._speed(name),
            ("ml-drift", "planning"): lambda: ml_drift.planning(
                name, self._written, self.options.drift_prompt_tokens, small=self.options.small
            ),
            ("ml-drift", "activations"): lambda: activations.activations(
                "llama3.1-8b", self.options.drift_prompt_tokens, small=self.options.small
            ),
            ("ml-drift", "images"): lambda: ml_drift.images(
                self.options.image_side,
                self.options.image_steps,
                self.options.rounds,
                self.work,
                small=self.options.small,
            ),
            ("vllm-mlx", "engines"): lambda: self._engines(name),
            ("vllm-mlx", "served"): lambda: self._served(name),
            ("vllm-mlx", "images"): lambda: self._media("images", self.options.sides),
            ("vllm-mlx", "video"): lambda: self._media("video", self.options.frames),
            ("agent-memory", "first-token"): lambda: self._first_tokens(name),
            ("agent-memory", "staggered"): lambda: self._staggered(name),
            ("agent-memory", "capacity"): agent_memory.capacity,
            ("agent-memory", "quality"): self._quality,
        }
        return known[paper, kind]

    def _speed(self, name: str) -> PaperTable:
        given = self.options
        tokens = given.drift_prompt_tokens, given.drift_tokens
        return ml_drift.speed(
            name, self._written, self.place, *tokens, given.rounds, self.budget, small=given.small
        )  # fmt: skip

    def _engines(self, name: str) -> PaperTable:
        given = self.options
        tokens, folder = (given.prompt_tokens, given.tokens), self._written(name, self._recipe)
        return vllm_mlx.engines(
            name, folder, self.place, *tokens, given.rounds, self.budget, small=given.small, weights=self._weights
        )  # fmt: skip

    def _served(self, name: str) -> PaperTable:
        given, folder = self.options, self._written(name, self._recipe)
        return vllm_mlx.served(
            name, folder, self.place, given.streams, given.prompt_tokens, given.tokens, self.budget, given.servers,
            small=given.small, weights=self._weights,
        )  # fmt: skip

    def _media(self, kind: str, sizes: list[int]) -> PaperTable:
        shape = self.options.vision
        folder = self._write(f"vision-{shape}", "vision.folders", shape)
        model = f"{'embedded:' if VISION_SHAPES[shape] is None else 'Qwen3-VL '}{shape}"
        servers = self.options.media_servers
        return vllm_mlx_media.media(kind, sizes, folder, model, self.place, 16, self.budget, servers)

    def _first_tokens(self, name: str) -> PaperTable:
        given, folder = self.options, self._written(name, self._recipe)
        work = self.work / "contexts"
        return agent_memory.first_tokens(
            name, folder, given.contexts, given.rounds, work, self.budget, say, small=given.small
        )  # fmt: skip

    def _staggered(self, name: str) -> PaperTable:
        given, folder = self.options, self._written(name, self._recipe)
        tokens = given.staggered_tokens
        return agent_memory.staggered(name, folder, tokens, given.rounds, self.budget, say, small=given.small)

    def _quality(self) -> PaperTable:
        given = self.options
        return agent_quality.quality(given.quality_model, given.quality_lengths, 1, self.budget, say)

    def _written(self, name: str, recipe: str) -> Path:
        """The folder of a paper's model."""
        small = ["--small"] if self.options.small else []
        return self._write(f"{name}-{recipe}{'-small' if small else ''}", "papers.folders", name, recipe, *small)

    def _write(self, called: str, module: str, *words: str) -> Path:
        """Has a program write a model's folder, if it is not there yet."""
        folder = self._models / called
        if not (folder / "config.json").exists():
            command = program(module, folder, *words)
            said = subprocess.run(
                command, cwd=ROOT, env=self.place.environment, capture_output=True, text=True, timeout=600
            )
            if said.returncode:
                raise RuntimeError(f"{called} cannot be written:\n{said.stderr}")
        return folder

    def versions(self) -> dict[str, str]:
        """What computes; that of vllm-mlx where it is installed."""
        found, site = machine.versions(sys.executable), self.options.vllm_mlx_site
        if site is not None:
            other = machine.versions(sys.executable, with_path(self.place.environment, site))
        elif "vllm-mlx" in self.options.servers:
            try:
                other = machine.versions(str(vllm_mlx_python()), {})
            except CannotStart as error:
                say(str(error))
                return found
        else:
            return found
        return {**found, **{name: other[name] for name in ("vllm-mlx",) if name in other}}


def main() -> None:
    options = read_options()
    if options.list:
        say("\n".join(PARTS))
    else:
        measured(options)


def measured(options: argparse.Namespace) -> None:
    """Measures the parts of the options, and writes the page.

    Raises:
        SystemExit: some failed.
    """
    # As a replica's process has it.
    os.environ.update(mlx_settings(default_home()))
    # Ended from outside, it still ends its servers.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="satchel-papers-") as work:
        run = PapersRun(options, Path(work))
        facts = {**machine.facts("gpu" if on_gpu() else "cpu"), "load_before": round(load_before, 2)}
        known = {paper: [part for part in PARTS if part.split()[0] == paper] for paper in PAPERS}
        result = kept.begun(facts, options, known=known)
        result["versions"] = run.versions()
        path = options.out / f"papers-{options.machine or machine.name_of(facts)}"
        result["parts"] = kept.earlier(path, result, PARTS)
        if options.resume:
            options.parts = [name for name in options.parts if name not in result["parts"]]
        if options.cards == 1:
            kept.measure_all(run.parts(), run.budget, path, result, markdown, finish)
            return

        def add(parts: dict[str, Any]) -> None:
            found = {**result["parts"], **parts}
            result["parts"] = {name: found[name] for name in PARTS if name in found}
            kept.save(path, result, markdown)

        failed = measure_on_cards(options, measured, Path(work), add)
        say(markdown(result))
        if failed:
            raise SystemExit(f"failed: {'; '.join(failed)}")


def finish(name: str, part: Any, note: str) -> str:
    mx.clear_cache()
    return kept.noted(name, part, note)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("Stopped; all servers are ended")
        sys.exit(130)
