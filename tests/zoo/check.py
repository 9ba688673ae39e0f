"""How one model is served: loaded and tried as a replica does it, then compared with the bare model.

The trial at load decides how a model may be served. What it let through is checked here by other sequences, longer than
its own and than the models' windows: forced along given tokens alone, in company, from memory, and from disk after a
restart.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from satchel.actors.protocol.replica_messages import Sampling
from satchel.actors.replica.loading import models
from satchel.actors.replica.selftest.self_test import Proven, prove
from satchel.cluster.config.config import Model, Scheduling
from satchel.cluster.errors import ModelLoadError
from tests.worlds.replica.bench import Bench, Forced, Logits
from tests.worlds.replica.bench_disk import Node, process, write_down

from . import text_types, vision_types
from .sequences import SAID, Sequences, seeing_sequences, text_sequences

AGENT = "default/alice"

ROUNDING, ROUNDED_SHARE, GROSS = 2e-3, 0.75, 5e-2
"""How far logits may be off, of the largest one, in that share of the places, and in the others: sums in another order
let a router choose another expert."""

SEALED_ROUNDING, SEALED_GROSS = 2e-2, 0.3
"""The same between sequences whose KV is sealed: a number between two codes may take either."""

RIGHT, LIMITED, REFUSED, WRONG, CRASHED = "right", "limited", "refused", "wrong", "crashed"
UNCHECKED = "unchecked"
"""Of a type that loads, but of which the library itself computes nothing to compare with."""

_KINDS = {"text": (text_types.write, text_sequences), "vision": (vision_types.write, seeing_sequences)}


TOGETHER = "the library sees two pictures otherwise than each of them; here they are as each alone"

OTHERWISE = "the library computes prompts otherwise than steps; here both are as its prompts"

SERVED = "it is served"
"""Said when a model has been loaded and tried: a process that dies later would have served it."""


@dataclass
class Outcome:
    """What became of a model. `error` is the largest one of its logits, relative to the largest logit."""

    state: str
    notes: list[str] = field(default_factory=list)
    error: float = 0.0


def check(kind: str, name: str, root: Path, *, brief: bool = False) -> Outcome:
    """Writes a type into a folder under `root`, loads and tries it as it is served if nothing else is asked for, and
    compares.

    Args:
        brief: with fewer and shorter sequences, and only as it is served.
    """
    folder, (write, sequences_of) = root / name, _KINDS[kind]
    try:
        write(folder, name)
    except (Exception, SystemExit) as error:
        # The library itself cannot make one. A user who has one finds the same.
        _leave_empty(folder)
        unmade = f"{type(error).__name__}: {error}"
    else:
        unmade = ""
    known = folder.with_name("trials.json")
    try:
        loaded = models.load(str(folder), context_tokens_max=None, progress=lambda *_: None)
        proven = prove(loaded, Model(name="zoo", source=str(folder)), lambda *_: None, known)
    except ModelLoadError as error:
        return Outcome(
            REFUSED,
            [str(error).replace(str(known), known.name).replace(str(folder), "it"), *([unmade] if unmade else [])],
        )
    print(SERVED, file=sys.stderr, flush=True)
    try:
        sequences = sequences_of(proven.loaded, folder, brief=brief)
    except Exception as error:
        return Outcome(UNCHECKED, [*proven.notes, f"the library fails by itself: {type(error).__name__}: {error}"])
    outcome = run(proven, sequences, brief=brief)
    outcome.notes = [*proven.notes, *sequences.notes, *outcome.notes]
    if outcome.state == RIGHT and outcome.notes:
        outcome.state = LIMITED
    return outcome


def _leave_empty(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": folder.name.partition("+")[0], **text_types.TYPES.get(folder.name, {})}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), {"nothing": mx.zeros((1,))})


def run(proven: Proven, sequences: Sequences, *, brief: bool = False) -> Outcome:
    """Compares sequences with the bare model, and with each other where their KV is sealed."""
    outcome, policy = Outcome(RIGHT), proven.loaded.spec.policy
    sealed = policy is not None and policy.quantizes
    # What a few bits do to the logits is not known, so the same way is compared with KV as it is.
    plain = replace(proven, loaded=models.resealed(proven.loaded, models.POLICIES["fp16"])) if sealed else proven
    alone = _alone(plain, sequences, outcome)
    _settle(sequences, alone)
    how = "with KV as computed" if sealed else ""
    _compare(outcome, how, plain, sequences, (sequences.own, alone), ROUNDING, GROSS, only_alone=sealed and brief)
    if sealed:
        alone = _alone(proven, sequences, outcome)
        _compare(outcome, "", proven, sequences, (alone, alone), SEALED_ROUNDING, SEALED_GROSS)
    return outcome


def _settle(sequences: Sequences, alone: Logits) -> None:
    """Where the library computes two things of the same, takes the one that sequences have `alone`: of several
    pictures, which some pad to one size, and of prompts and steps, whose windows some have of two lengths."""
    for key, expected in sequences.own.items():
        if key not in alone or sequences.error(key, alone[key], expected) <= ROUNDING:
            continue
        if len(sequences.media[key[0]]) > 1:
            sequences.own[key], note = alone[key], TOGETHER
        elif key in sequences.whole and sequences.error(key, alone[key], sequences.whole[key]) <= ROUNDING:
            sequences.own[key], note = sequences.whole[key], OTHERWISE
        else:
            continue
        if note not in sequences.notes:
            sequences.notes.append(note)


def _compare(
    outcome: Outcome,
    how: str,
    proven: Proven,
    sequences: Sequences,
    known: tuple[Logits, Logits],
    rounding: float,
    gross: float,
    *,
    only_alone: bool = False,
) -> None:
    """Compares sequences with what is expected, the first of what is `known`. The second is what they have alone."""
    noted: Logits = {}
    expected, alone = known

    def note(what: str, keys: Sequence[tuple[int, int]]) -> None:
        missing = [key for key in keys if key not in noted]
        off = [sequences.error(key, noted[key], expected[key]) for key in keys if key in noted]
        worst = max(off, default=0.0)
        outcome.error = max(outcome.error, worst)
        right = sum(error <= rounding for error in off) >= ROUNDED_SHARE * len(off) and worst <= gross
        if missing or not right:
            outcome.state = WRONG
            outcome.notes.append(f"{what} {how}: off by {worst:.2g}" + (f", {len(missing)} missing" if missing else ""))
        noted.clear()

    every = list(sequences.own)
    later = [(sequence, drawn) for sequence, drawn in every if drawn > SAID]
    noted |= alone
    note("alone", every)
    if only_alone:
        return
    bench = _bench(proven, sequences, noted)
    for sequence in reversed(sequences.scripts):
        sequences.submit(bench, sequence, f"cold{sequence}")
        bench.turn()
    bench.drain()
    note("in company", every)
    bench = _bench(proven, sequences, noted)
    for turn in (0, SAID + 1):
        noted.clear()
        for sequence in sequences.scripts:
            sequences.submit(bench, sequence, f"turn {turn} of {sequence}", said=turn)
        bench.drain()
    note("from memory", later)
    _ended(bench, outcome)
    if proven.loaded.spec.reusable:
        last = max(sequences.scripts)
        with tempfile.TemporaryDirectory() as root:
            node = Node(Path(root))
            for turn in (0, SAID + 1):
                noted.clear()
                bench, disk = process(proven.loaded, node, **_limits(proven))
                _force(bench, sequences, noted)
                sequences.submit(bench, last, "row", AGENT, said=turn)
                bench.drain()
                write_down(bench, disk)
                node.restart()
            _ended(bench, outcome)
            found = bench.sequences["row"].cached or 0
            note("from disk", [key for key in later if key[0] == last])
            if not found:
                outcome.state = WRONG
                outcome.notes.append(f"nothing was found on disk {how}")
            node.store.close()


class Later(Forced):
    """Notes logits by how many tokens of a sequence's answer the model has got, however many of them are of its
    prompt."""

    def __init__(self, sequences: Sequences, noted: Logits) -> None:
        super().__init__(sequences.scripts, noted)
        self._sequences_of = sequences

    def add(self, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        first = len(self._sequences_of.prompts[sampling.seed])
        super().add(sampling, prompt[:first], [*prompt[first:], *generated])


def _alone(proven: Proven, sequences: Sequences, outcome: Outcome) -> Logits:
    noted: Logits = {}
    for sequence in sequences.scripts:
        bench = _bench(proven, sequences, noted)
        sequences.submit(bench, sequence, f"{sequence}")
        bench.drain()
        _ended(bench, outcome)
    return noted


def _bench(proven: Proven, sequences: Sequences, noted: Logits) -> Bench:
    bench = Bench(proven.loaded, **_limits(proven))
    _force(bench, sequences, noted)
    return bench


def _force(bench: Bench, sequences: Sequences, noted: Logits) -> None:
    bench.engine.executor.make_sampler = lambda: Later(sequences, noted)
    bench.engine.executor.clear_batch()


def _limits(proven: Proven) -> dict[str, Any]:
    asked = proven.scheduling(Scheduling(sequences_max=8))
    return {"sequences_max": asked.sequences_max, "prefill_sequences_max": asked.prefill_sequences_max}


def _ended(bench: Bench, outcome: Outcome) -> None:
    for name, sequence in bench.sequences.items():
        if sequence.finish != "length":
            outcome.state = WRONG
            outcome.notes.append(
                f"sequence {name} ended with {sequence.finish}: {(sequence.error or {}).get('message')}"
            )


def main(kind: str, name: str, root: str) -> None:
    """Prints the outcome of a type as JSON, alone on the last line. What is written lies under `root`."""
    print(json.dumps(asdict(check(kind, name, Path(root)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
