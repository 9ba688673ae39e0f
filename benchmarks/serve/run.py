"""Measures Satchel beside its peers over HTTP, and beside bare engines, on this machine in one run.

    python -m benchmarks.serve.run [--models recall,random-30m] [--streams 1,4,16] [--rounds 3] [--only satchel,...]

Every round starts each server anew, in another order, warms it up, measures and ends it; figures are medians over the
rounds, ratios are taken within a round. See README.md in benchmarks/.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from .. import machine
from ..energy import EnergySpent
from ..options import names_among
from ..programs import RESULTS, ROOT, program
from . import report
from .agents import LOADS, AgentMeasures, growing, measured, recorded
from .hotspots import BurstLoad, profile
from .measures import BurstMeasures, Incomplete, Interference, Turns, interference, level, turns_of
from .prompts import Prompts
from .protocol import Burst, Mix
from .shapes import SHAPES
from .targets import NAMES, CannotStart, RunFolder, Target, TargetFailed, make_place, vllm_mlx_python, with_path

MIXED = "mixed"
MIXED_TOKENS = (128, 8000, 512, 1500)
"""Prompts of this load, taken in turn: what agents send at the same time."""

TURN_TOKENS = 200
"""What a next turn adds to a conversation."""
NEXT_TURNS = 5

WARM_UP_TOKENS = 8
WARM_UP_PROMPT_TOKENS = 32
"""Of several streams at once; a single one has a prompt of full length."""
PASSES_OF_ONE = 3
"""One answer has few gaps: it is asked for several times."""
WARM_UP_TIMEOUT_S = 180.0
"""Where a GPU's kernels are compiled when they are first used, that is a minute."""
MIX_TOKENS = 3000
"""Enough for the running stream to outlast the long prompt everywhere; the rest is never generated."""
LONG_ONCE_S = 15.0
"""A target that takes longer than this for the long prompt gets it in the first round only."""


@dataclass(frozen=True)
class RunOptions:
    models: list[str]
    streams: list[int]
    rounds: int
    only: list[str]
    tokens: int
    prompt_tokens: list[str]
    turns: list[int]
    agents: list[int]
    long_prompt_tokens: int
    together: bool
    profile: bool
    budget_s: float
    answer_timeout_s: float
    cards: int
    settle_s: float
    traces: str


@dataclass
class TargetSession:
    """What one target gave in one round."""

    levels: list[BurstMeasures] = field(default_factory=list)
    turns: list[Turns] = field(default_factory=list)
    agents: list[AgentMeasures] = field(default_factory=list)
    interference: Interference | None = None
    start_s: float = 0.0
    self_test_s: float | None = None
    rss_mb: float = 0.0
    pss_mb: float | None = None
    processes: int = 0
    memory_by_process: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def say(text: str) -> None:
    print(text, flush=True)


def lengths_of(load: str, streams: int) -> list[int]:
    """Returns the prompts' lengths in tokens."""
    return [MIXED_TOKENS[index % len(MIXED_TOKENS)] if load == MIXED else int(load) for index in range(streams)]


def measure(
    target: Target, prompts: Prompts, options: RunOptions, round: int, device: str, *, long: bool
) -> TargetSession:
    """One target's figures of one round. What fails is noted in `errors`; the rest is measured all the same."""
    session = TargetSession(start_s=target.start_s, self_test_s=target.self_test_s)
    if target.unproven:
        session.errors.append(target.unproven)
        say(f"    {target.name}: {target.unproven}")
    some = partial(prompts.some, as_ids=target.is_engine)

    def attempt(what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except (Incomplete, TargetFailed) as error:
            session.errors.append(f"{what}: {error}")
            say(f"    {target.name}: {what}: {error}")

    for load in options.prompt_tokens:
        for streams in options.streams:
            # A GPU compiles a kernel for every new shape; on a CPU a short prompt warms as well.
            whole = streams == 1 or options.together or device == "gpu"
            lengths = lengths_of(load, streams) if whole else [WARM_UP_PROMPT_TOKENS] * streams
            warm = Burst(some(lengths, f"{round}/warm/{load}/{streams}"), WARM_UP_TOKENS, WARM_UP_TIMEOUT_S)
            attempt("warm-up", lambda warm=warm: target.run(warm))
        for streams in options.streams:
            for turn in range(PASSES_OF_ONE if streams == 1 else 1):
                seed = f"{round}/{load}/{streams}/{turn}"
                burst = Burst(some(lengths_of(load, streams), seed), options.tokens, options.answer_timeout_s)
                what = f"{streams} streams of {load}"
                attempt(what, lambda burst=burst, load=load: session.levels.append(_level(target, burst, load)))
    for length in options.turns:
        attempt(
            f"turns of {length}",
            lambda length=length: session.turns.append(_turns(target, prompts, options, length, f"{round}/{length}")),
        )
    if options.agents and not target.is_engine:
        seed = f"{round}/agents"
        warm = Burst(some([WARM_UP_PROMPT_TOKENS], f"{seed}/warm"), WARM_UP_TOKENS, WARM_UP_TIMEOUT_S)
        attempt("warm-up", lambda: target.run(warm))
        for agents in options.agents:
            for load in ("growing", *(["recorded"] if options.traces else [])):
                attempt(
                    f"{agents} agents, {load}",
                    lambda agents=agents, load=load: session.agents.append(
                        _agents(target, prompts, options, agents, load, f"{seed}/{agents}/{load}", device)
                    ),
                )
    if long and options.together and options.long_prompt_tokens:
        attempt("warm-up", lambda: target.run(_mix(target, prompts, options, f"{round}/warm")))
    assert target.server is not None
    memory = target.server.memory()
    session.rss_mb, session.processes = memory.rss_bytes / 1e6, memory.processes
    session.pss_mb = None if memory.pss_bytes is None else memory.pss_bytes / 1e6
    session.memory_by_process = target.server.memory_by_name()
    if long and options.long_prompt_tokens:
        mix = _mix(target, prompts, options, str(round))

        def interfere() -> None:
            session.interference = interference(target.run(mix), mix.long_tokens)

        attempt("long prompt", interfere)
    return session


def _mix(target: Target, prompts: Prompts, options: RunOptions, seed: str) -> Mix:
    """A running stream, and a long prompt that comes meanwhile."""
    running = prompts.some(lengths_of(options.prompt_tokens[0], 1), f"{seed}/running", as_ids=target.is_engine)
    prompt = prompts.one(options.long_prompt_tokens, f"{seed}/long", as_ids=target.is_engine)
    return Mix(running, prompt, MIX_TOKENS, options.answer_timeout_s)


def _level(target: Target, burst: Burst, load: str) -> BurstMeasures:
    assert target.server is not None
    before, energy = target.server.cpu_s(), EnergySpent()
    trace = target.run(burst)
    joules = energy.per_token(sum(stream.tokens or 0 for stream in trace.streams))
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in target.server.cpu_s().items()}
    return replace(level(trace, load, burst.max_tokens, spent), joules_per_token=joules)


def _turns(target: Target, prompts: Prompts, options: RunOptions, length: int, seed: str) -> Turns:
    """A conversation of that length, and then `NEXT_TURNS` next turns; the first of these meets what is new to the
    device."""
    text, traces, outside = prompts.one(length, seed, as_ids=target.is_engine), [], [target.outside_s()]
    for turn in range(1 + NEXT_TURNS):
        traces.append(target.run(Burst([text], WARM_UP_TOKENS, options.answer_timeout_s)))
        outside.append(target.outside_s())
        text += prompts.one(TURN_TOKENS, f"{seed}/{turn}", as_ids=target.is_engine)
    spent = [None if one is None or other is None else other - one for one, other in pairwise(outside)]
    return turns_of(traces, length, WARM_UP_TOKENS, spent)


def _agents(
    target: Target, prompts: Prompts, options: RunOptions, agents: int, kind: str, seed: str, device: str
) -> AgentMeasures:
    """So many agents at once, `growing` or `recorded`.

    Raises:
        Incomplete: the recordings cannot be used.
        TargetFailed: as `Target.run`.
    """
    load, limit_s = LOADS[device], options.answer_timeout_s
    try:
        if kind == "recorded":
            command = recorded(Path(options.traces), prompts, load, agents, seed, limit_s)
        else:
            command = growing(prompts, load, agents, seed, limit_s)
    except (OSError, ValueError) as error:
        raise Incomplete(str(error)) from error
    return measured(kind, command, target.run(command).streams)


class Targets:
    """The targets of one model, started when they are needed. One that does not start is tried no more."""

    def __init__(self, folder: Path, place: RunFolder, failures: dict[str, str]) -> None:
        self._folder, self._place, self.failures = folder, place, failures
        self._running: dict[str, Target] = {}

    def start_all(self, names: list[str]) -> None:
        """At once, each in a thread, because most of the time goes in imports."""
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(self._start, names))

    def _start(self, name: str) -> None:
        if name in self.failures:
            return
        try:
            self._running[name] = Target(name, self._folder, self._place)
        except CannotStart as error:
            self.failures[name] = str(error)
            say(f"    {name} cannot start: {error}")

    @contextmanager
    def use(self, name: str, *, keep: bool) -> Iterator[Target | None]:
        """The running target; None where it does not start."""
        if name not in self._running:
            self._start(name)
        try:
            yield self._running.get(name)
        finally:
            if not keep and name in self._running:
                self._running.pop(name).stop()

    def stop_all(self) -> None:
        if self._running:
            with ThreadPoolExecutor(len(self._running)) as pool:
                list(pool.map(Target.stop, self._running.values()))
            self._running.clear()


def sessions(
    targets: Targets, prompts: Prompts, options: RunOptions, ends: float, device: str
) -> Generator[tuple[int, str, TargetSession]]:
    """All rounds of one model, target by target, in another order each time."""
    slow: set[str] = set()
    names = options.only
    try:
        if options.together:
            say("  starting all")
            targets.start_all(names)
            time.sleep(options.settle_s)
        for round in range(options.rounds):
            turn = round % len(names)
            for name in [*names[turn:], *names[:turn]]:
                if name in targets.failures or time.monotonic() > ends:
                    continue
                say(f"  round {round + 1}: {name}")
                with targets.use(name, keep=options.together) as target:
                    if target is None:
                        continue
                    session = measure(target, prompts, options, round, device, long=name not in slow)
                if session.interference and session.interference.long_ttft_ms > LONG_ONCE_S * 1e3:
                    slow.add(name)
                report.say_session(session, say)
                yield round, name, session
    finally:
        targets.stop_all()


def read_options() -> tuple[RunOptions, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def counts(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    def loads(text: str) -> list[str]:
        return [part if part == MIXED else str(int(part)) for part in text.split(",")]

    add = parser.add_argument
    add("--models", type=names_among(tuple(SHAPES)), default=["recall", "random-30m"], help=", ".join(SHAPES))
    add("--streams", type=counts, default=[1, 4, 16], help="concurrent streams, as 1,4,16")
    add("--rounds", type=int, default=3)
    unquantized = [name for name in NAMES if "(" not in name]
    add("--only", type=names_among(NAMES), default=unquantized, help=", ".join(NAMES))
    add("--tokens", type=int, default=64, help="tokens of each answer")
    add("--prompt-tokens", type=loads, default=["128", "1500"], help="of each prompt, as 128,512,1500,8000,mixed")
    add("--turns", type=counts, default=[], help="lengths of conversations that go on, as 10000,30000")
    add("--agents", type=counts, default=[], help="agents at once behind one system prompt, as 8,32")
    add("--traces", default="", help="a folder with recorded sessions, for --agents")
    add("--long-prompt-tokens", type=int, default=3000, help="0 leaves that measurement out")
    add("--together", action="store_true", help="start all targets once; for a machine with cores to spare")
    add("--profile", action="store_true", help="also look where Satchel's time outside the model goes, with py-spy")
    add("--budget-s", type=float, default=3600.0, help="after this many seconds no measurement is begun")
    add("--start-timeout-s", type=float, default=240.0)
    add("--answer-timeout-s", type=float, default=400.0, help="for all answers of a burst together")
    add("--cards", type=int, default=2, help="how many the targets of several cards use; without any, nodes on the CPU")
    add("--settle-s", type=float, default=0.0, help="with --together: wait until nobody prepares for further shapes")
    add("--out", type=Path, default=RESULTS)
    add("--machine", help="the machine's name in the results' file names")
    add("--vllm-mlx-site", type=Path, help="a folder with vllm-mlx and its mlx-lm, else it is installed")
    arguments = parser.parse_args()
    fields = {name: getattr(arguments, name) for name in RunOptions.__dataclass_fields__}
    return RunOptions(**fields), arguments


def write_folder(name: str, work: Path, place: RunFolder) -> tuple[Path, str]:
    """The model's folder, and the device that MLX computes on."""
    folder = work / "models" / name
    command = program("serve.folders", folder, name)
    said = subprocess.run(command, cwd=ROOT, env=place.environment, capture_output=True, text=True, timeout=300)
    if said.returncode:
        raise SystemExit(f"{name} cannot be written:\n{said.stderr}")
    return folder, json.loads(said.stdout.splitlines()[-1])["device"]


def fitting_turns(folder: Path, lengths: list[int]) -> list[int]:
    """Returns the lengths of conversations that the model's context has room for."""
    context = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    return [length for length in lengths if length + (NEXT_TURNS + 1) * TURN_TOKENS <= context]


def all_versions(options: RunOptions, place: RunFolder, failures: dict[str, str]) -> dict[str, dict[str, str]]:
    """What computes, by environment; notes a peer that does not install."""
    found = {"satchel": machine.versions(sys.executable, place.environment)}
    if "vllm-mlx" not in options.only:
        return found
    if place.vllm_mlx_site is not None:
        found["vllm-mlx"] = machine.versions(sys.executable, with_path(place.environment, place.vllm_mlx_site))
        return found
    try:
        found["vllm-mlx"] = machine.versions(str(vllm_mlx_python()), {})
    except CannotStart as error:
        failures["vllm-mlx"] = str(error)
    return found


def _profile(folder: Path, place: RunFolder, options: RunOptions) -> dict[str, Any]:
    try:
        return profile(
            folder,
            place,
            BurstLoad(max(options.streams), options.tokens, lengths_of(options.prompt_tokens[0], 1)[0]),
            say,
        )
    except (Incomplete, TargetFailed) as error:
        return {"error": str(error)}


def main() -> None:
    options, arguments = read_options()
    # Ended from outside, it still ends its servers.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    ends = time.monotonic() + options.budget_s
    with tempfile.TemporaryDirectory(prefix="serve-") as temporary:
        work = Path(temporary)
        place = make_place(work, arguments.vllm_mlx_site, arguments.start_timeout_s, options.cards)
        failures: dict[str, str] = {}
        versions = all_versions(options, place, failures)
        result: dict[str, Any] = {"options": asdict(options), "versions": versions, "models": {}}
        for name in options.models:
            folder, device = write_folder(name, work, place)
            result.setdefault("machine", machine.facts(device))
            result.setdefault("agent_load", asdict(LOADS[device]))
            stem = arguments.out / f"serve-{arguments.machine or machine.name_of(result['machine'])}"
            say(f"{name}: {report.describe(result['machine'])}")
            entry: dict[str, Any] = {"rounds": [], "failures": dict(failures), "profile": None}
            result["models"][name] = entry
            fitting = replace(options, turns=fitting_turns(folder, options.turns))
            targets = Targets(folder, place, entry["failures"])
            with closing(sessions(targets, Prompts(folder), fitting, ends, device)) as found:
                for round, target, session in found:
                    entry["rounds"].append({"round": round, "target": target, **asdict(session)})
                    report.write(result, stem)
            if options.profile:
                entry["profile"] = _profile(folder, place, options)
            report.write(result, stem)
        say(f"\nWritten: {stem}.json, {stem}.md\n")
        say(stem.with_suffix(".md").read_text())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("Stopped; all servers are ended")
        sys.exit(130)
