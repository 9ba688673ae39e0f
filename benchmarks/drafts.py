"""What drafts save: edits of files of Python, whose answers repeat most of their prompts, and answers that repeat
nothing, with drafts and without them.

`python -m benchmarks.drafts --model FOLDER` prints for each of the two how many tokens a step computes, which part of
the drafted tokens was right, and how much faster the answers are; and whether they are the same. Runs with drafts and
without are taken in turns. `--width N` computes drafts with steps of up to N tokens whatever they cost, so that the
first two numbers, which hold on every device, can be counted where no draft pays. With `--draft-model FOLDER` a small
model of the same tokenizer drafts too, and what it drafted is counted apart; `--depth N` lets it draft N tokens for
every sequence in each step whatever that costs. With `--exact` nothing is drafted that could change a bit of a token's
logits, which is what servers do by default; it is of no use with `--width` or `--depth`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from satchel.actors.protocol.replica_messages import Sampling
from satchel.actors.replica.drafting.pace import DraftPace, Hope
from satchel.actors.replica.execution.draft_model.model_drafts import DraftModel
from satchel.actors.replica.execution.executor import BatchExecutor
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models
from satchel.actors.replica.loading.draft_model import load_draft_model
from satchel.cluster.environment import default_home, mlx_settings

EDITS = (
    "Rewrite this file with a one-line docstring for every function. Answer with the whole file and nothing else.",
    "Rename one variable of this file to a better name. Answer with the whole file and nothing else.",
)
FILES = (
    "kv_store/disk/changes.py",
    "kv_store/disk/leases.py",
    "protocol/group_clients.py",
    "replica/adapters/adapters.py",
    "replica/energy_pace.py",
    "replica/kv/query_pieces.py",
    "replica/scheduling/limits.py",
    "router/energy.py",
)
"""Under `actors`: of 360 to 620 tokens, so that a model repeats nearly all of a file within its answer."""

STORIES = (
    "Write a story of a lighthouse keeper who finds a letter. Do not repeat yourself.",
    "Explain how a sailing boat can go against the wind, to somebody who has never seen one.",
    "List thirty animals with one peculiar thing about each.",
)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class _Always(DraftPace):
    """A pace that takes every draft."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._always = width

    def lengths(self, hopes: Sequence[Hope], *, ragged: bool) -> list[int]:
        return [min(hope.most, self._always - 1) for hope in hopes]


class _OfModel(DraftPace):
    """A pace that takes every draft of a model, of so many tokens."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._depth = depth

    def best(self, hopes: Sequence[Hope], *, ragged: bool, before_s: float = 0.0) -> tuple[float, list[int]]:
        if before_s == 0.0 or not self.is_timed(len(hopes)):
            return 1.0, [0] * len(hopes)
        return 100.0 - before_s, [min(hope.most, self._depth) for hope in hopes]

    def single_s(self, sequences: int) -> float:
        """A time that is worth every prompt."""
        return 1e6


class Run:
    """Some sequences, decoded together to their ends, or to so many tokens."""

    def __init__(
        self,
        loaded: LoadedModel,
        draft_model: DraftModel | None,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        how: dict[str, Any],
        exact: bool,
    ) -> None:
        self._loaded, self._prompts, self._tokens, self._how = loaded, prompts, tokens, how
        self._draft_model, self._exact = draft_model, exact
        self._executors: dict[bool, BatchExecutor] = {}

    def __call__(self, drafted: bool, width: int | None, depth: int | None) -> dict[str, Any]:
        if drafted not in self._executors:
            # A server's goes on too, and has recorded the steps of many shapes.
            self._executors[drafted] = executor = BatchExecutor(
                self._loaded, drafts=drafted, exact_drafts=self._exact, draft_model=self._draft_model
            )
            executor.batched_prefill |= len(self._prompts) > 1
            if width is not None:
                executor.drafts.pace = _Always(width)
            if depth is not None:
                executor.drafts.pace = _OfModel(depth)
        executor = self._executors[drafted]
        before = _counts(executor)
        asked = Sampling(max_tokens=self._tokens, **self._how)
        for number, prompt in enumerate(self._prompts):
            executor.open(str(number), [], None, 0)
            executor.prefill([(str(number), prompt[:-1])])
            executor.join(str(number), prompt, asked, 0)
        mx.synchronize()
        said: dict[str, list[int]] = {str(number): [] for number in range(len(self._prompts))}
        open_, steps = set(said), 0
        began = time.perf_counter()
        while open_:
            ready = executor.step()
            steps += 1
            for drawn in ready:
                if drawn.sequence_id not in open_:
                    continue
                assert not drawn.failure, drawn
                tokens = said[drawn.sequence_id]
                tokens.append(drawn.token)
                if drawn.token in self._loaded.eos_token_ids or len(tokens) == self._tokens:
                    open_.remove(drawn.sequence_id)
                    executor.leave([drawn.sequence_id])
        seconds = time.perf_counter() - began
        counts = [now - then for now, then in zip(_counts(executor), before, strict=True)]
        return {"said": said, "steps": steps, "seconds": seconds, "counts": counts}


def _counts(executor: BatchExecutor) -> list[int]:
    drafts = executor.drafts
    return [drafts.drafted, drafts.right, drafts.drafted_by_model, drafts.right_by_model]


def measure(run: Run, rounds: int, width: int | None, depth: int | None) -> dict[str, Any]:
    """Returns what answers take with drafts and without."""
    found = {True: list[dict[str, Any]](), False: list[dict[str, Any]]()}
    for _ in range(rounds):
        for drafts in (True, False):
            found[drafts].append(run(drafts, width, depth))
    ahead, single = (min(found[drafts], key=lambda one: one["seconds"]) for drafts in (True, False))
    tokens = sum(map(len, ahead["said"].values()))
    drafted, right, by_model, right_by_model = ahead["counts"]
    return {
        "tokens": tokens,
        "steps": (ahead["steps"], single["steps"]),
        "tokens a step": round(tokens / ahead["steps"], 2),
        "drafted": drafted,
        "right": round(right / max(1, drafted), 2),
        "drafted by the model": by_model,
        "right of these": round(right_by_model / max(1, by_model), 2),
        "tokens a second": (round(tokens / ahead["seconds"], 1), round(tokens / single["seconds"], 1)),
        "same": all(one["said"] == single["said"] for one in found[True] + found[False]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(models.EMBEDDED / "recall"))
    parser.add_argument("--files", nargs="*", type=Path, default=[Path("actors", name) for name in FILES])
    parser.add_argument("--streams", type=int, default=1, help="how many answers at once")
    parser.add_argument("--tokens", type=int, default=400, help="the most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--width", type=int)
    parser.add_argument("--draft-model")
    parser.add_argument("--depth", type=int)
    parser.add_argument("--exact", action="store_true", help="as `drafts: exact`")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--numerics", default="fast")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sampling", type=json.loads, default={"temperature": 0.0})
    given = parser.parse_args()
    if given.exact and (given.width or given.depth):
        parser.error("--exact is of no use with --width or --depth")
    # As servers set it; MLX reads it once it computes.
    os.environ.update(mlx_settings(default_home()))
    loaded = models.load(
        given.model,
        dtype=given.dtype,
        context_tokens_max=None,
        progress=lambda what, fraction: None,
        numerics=given.numerics,
        kv=given.kv,
    )
    print(f"{mx.default_device()}, {loaded.spec.describe()}, {loaded.weights}, {loaded.way.describe()}")
    draft_model = None
    if given.draft_model:
        draft_model = load_draft_model(
            given.draft_model, loaded, dtype=given.dtype, progress=lambda what, fraction: None, exact=given.exact
        )
        print(f"{draft_model.name}: {draft_model.token_s * 1e3:.2f} ms a token, pieces {draft_model.pieces}")
    tokenizer = Tokenizer.from_file(str(loaded.folder / "tokenizer.json"))
    edits = [f"{edit}\n\n{path.read_text()}" for path in given.files for edit in EDITS]
    for name, texts in (("edits", edits), ("stories", STORIES)):
        prompts = [tokenizer.encode(CHAT.format(text)).ids for text in texts]
        for first in range(0, len(prompts), given.streams):
            together = prompts[first : first + given.streams]
            run = Run(loaded, draft_model, together, given.tokens, given.sampling, given.exact)
            print(
                name,
                [len(prompt) for prompt in together],
                measure(run, given.rounds, given.width, given.depth),
                flush=True,
            )


if __name__ == "__main__":
    main()
