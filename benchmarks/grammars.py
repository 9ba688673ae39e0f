"""What constrained sequences cost the others: decode steps of plain sequences, with and without constrained sequences
in the batch; and what a constrained sequence that runs alone saves by getting several tokens in one step if its grammar
allows no others.

`python -m benchmarks.grammars` prints medians in ms, of runs of steps taken in turns so that a busy machine troubles
all alike, and whether the plain sequences drew the same tokens. The constrained sequences write a list of strings that
does not end meanwhile; the one that runs alone writes tool calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from typing import Any

import mlx.core as mx

from satchel.actors.protocol.replica_messages import Sampling
from satchel.actors.replica.execution import executor
from satchel.actors.replica.execution.executor import FORCED_MAX, BatchExecutor
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.execution.sampling.grammar import Grammars, SequenceGrammar
from satchel.actors.replica.loading import models

WORDS = {"type": "array", "minItems": 500, "items": {"type": "string", "maxLength": 20}}
GRAMMAR = "start: form\nform: %json " + json.dumps(WORDS)
ARGUMENTS = {
    "type": "object",
    "properties": {
        "file_path": {"type": "string", "maxLength": 20},
        "offset": {"type": "integer", "minimum": 0, "maximum": 99},
        "replace_all": {"type": "boolean"},
        "description": {"type": "string", "maxLength": 16},
    },
    "required": ["file_path", "offset", "replace_all", "description"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CALL = 'start: "{\\"name\\": \\"replace\\", \\"arguments\\": " form "}"\nform: %json ' + json.dumps(ARGUMENTS)
CALLS = 12
RUN_STEPS = 30
BATCHES = {
    "plain": (8, 0),
    "one more plain": (9, 0),
    "one bound": (8, 1),
    "four more plain": (12, 0),
    "four bound": (8, 4),
}


class Batch:
    """Decoding sequences: first the `plain` ones, then the constrained ones (`bound`); every sequence has its own
    seed."""

    def __init__(self, loaded: LoadedModel, grammars: Grammars, plain: int, bound: int, prompt_tokens: int) -> None:
        self.executor = BatchExecutor(loaded)
        self.times_s: list[float] = []
        self.tokens: dict[str, list[int]] = {}
        prompt = [100 + index % 900 for index in range(prompt_tokens)]
        for sequence in range(plain + bound):
            grammar: SequenceGrammar | None = grammars.sequence(GRAMMAR, []) if sequence >= plain else None
            asked = Sampling(
                temperature=1.0, seed=sequence, max_tokens=10**6, ignore_eos=True, grammar="x" if grammar else ""
            )
            self.executor.open(str(sequence), [], None, 0)
            self.executor.prefill([(str(sequence), prompt[:-1])])
            self.executor.join(str(sequence), prompt, asked, 0, grammar)

    def step(self) -> None:
        began = time.perf_counter()
        ready = self.executor.step()
        self.times_s.append(time.perf_counter() - began)
        for drawn in ready:
            assert not drawn.failure, drawn
            self.tokens.setdefault(drawn.sequence_id, []).append(drawn.token)


def measure(loaded: LoadedModel, steps: int, prompt_tokens: int) -> dict[str, dict[str, Any]]:
    grammars = Grammars(loaded)
    batches = {name: Batch(loaded, grammars, *sequences, prompt_tokens) for name, sequences in BATCHES.items()}
    for _ in range(steps // RUN_STEPS):
        for batch in batches.values():
            # The first step of a run waits for what another batch has left to the device.
            for _ in range(RUN_STEPS + 1):
                batch.step()
            del batch.times_s[-RUN_STEPS - 1]
    plain = batches["plain"].tokens
    return {
        name: {
            "median_ms": round(1000 * statistics.median(batch.times_s), 2),
            "p90_ms": round(1000 * statistics.quantiles(batch.times_s, n=10)[-1], 2),
            "same": all(batch.tokens[sequence] == tokens for sequence, tokens in plain.items()),
        }
        for name, batch in batches.items()
    }


def measure_calls(loaded: LoadedModel, prompt_tokens: int) -> dict[str, Any]:
    """Returns what `CALLS` calls take with tokens together and one by one, taken in turns."""
    grammars = Grammars(loaded)
    tokens: dict[bool, list[list[int]]] = {True: [], False: []}
    steps, seconds = Counter[bool](), dict.fromkeys(tokens, 0.0)
    for seed in range(CALLS):
        for together in (True, False):
            executor.FORCED_MAX = FORCED_MAX if together else 0
            batch = BatchExecutor(loaded)
            prompt = [100 + index % 900 for index in range(prompt_tokens)]
            batch.open("call", [], None, 0)
            batch.prefill([("call", prompt[:-1])])
            asked = Sampling(temperature=1.0, seed=seed, max_tokens=300, grammar="x")
            batch.join("call", prompt, asked, 0, grammars.sequence(CALL, []))
            mx.synchronize()
            said: list[int] = []
            began = time.perf_counter()
            while not loaded.eos_token_ids.intersection(said):
                said += [drawn.token for drawn in batch.step()]
                steps[together] += 1
            seconds[together] += time.perf_counter() - began
            tokens[together].append(said)
    return {
        "tokens": sum(map(len, tokens[True])),
        "steps": (steps[True], steps[False]),
        "time": round(seconds[True] / seconds[False], 2),
        "same": tokens[True] == tokens[False],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(models.EMBEDDED / "recall"))
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    given = parser.parse_args()
    loaded = models.load(given.model, context_tokens_max=None, progress=lambda what, fraction: None)
    for name, figures in measure(loaded, given.steps, given.prompt_tokens).items():
        print(f"{name:16} {figures}")
    print(f"calls, together and one by one: {measure_calls(loaded, given.prompt_tokens)}")


if __name__ == "__main__":
    main()
