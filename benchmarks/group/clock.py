"""How long stages take together, by a simulated clock: the schedule of `replica/execution` and `replica/group`, with
measured times of its parts. Pure.

A stage begins with something once it was told to, has its hidden states, and has ended what it did before. The leader
has the last stage. It tells the next call once it has launched the last piece of the call before. It tells a step of
all micro-batches, each once its tokens are drawn, then launches its own part of each. Sending is no work of a stage,
but too much that waits to be sent stops it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from satchel.actors.replica.execution.padding import pieces_of
from satchel.actors.replica.group.link.arrays import QUEUE_BYTES_MAX


@dataclass(frozen=True)
class Link:
    """What connects two stages. A message takes `hop_s`, bytes take their time at `bytes_per_s` beside."""

    hop_s: float = 0.0
    bytes_per_s: float = float("inf")


@dataclass(frozen=True)
class PrefillCost:
    """Seconds that a stage needs for a piece: a fixed part, a part for each token, and one for each pair of a token and
    one before it."""

    fixed_s: float
    token_s: float
    pair_s: float = 0.0

    def __call__(self, before: int, tokens: int) -> float:
        return self.fixed_s + tokens * (self.token_s + self.pair_s * (before + tokens / 2))


def whole_prefill_s(costs: Sequence[PrefillCost], tokens: int, chunk_tokens: int, engine_s: float = 0.0) -> float:
    """Returns how long one process with all stages' layers needs for a prompt, in chunks."""
    starts = range(0, tokens, chunk_tokens)
    return sum(engine_s + sum(cost(start, min(chunk_tokens, tokens - start)) for cost in costs) for start in starts)


def prefill_s(
    costs: Sequence[PrefillCost],
    tokens: int,
    chunk_tokens: int,
    piece_tokens: int | None,
    link: Link = Link(),
    token_bytes: int = 0,
    engine_s: float = 0.0,
) -> float:
    """Returns how long stages need for a prompt.

    Args:
        costs: of the stages.
        chunk_tokens: of a call.
        piece_tokens: as `LoadedModel.piece_tokens`.
        token_bytes: of a token's hidden states.
        engine_s: what the leader does between two calls.
    """
    followers, last = costs[:-1], costs[-1]
    leader_s, free_s, ends_s = 0.0, [0.0] * len(followers), 0.0
    senders = [Sender(link, token_bytes) for _ in followers]
    for start in range(0, tokens, chunk_tokens):
        leader_s += engine_s
        told_s, before = leader_s + link.hop_s, start
        call = [("", range(start, min(start + chunk_tokens, tokens)))]
        for piece in pieces_of(call, piece_tokens):
            count = sum(len(part) for _, part in piece)
            ready_s = told_s
            for number, cost in enumerate(followers):
                done_s = max(ready_s, free_s[number]) + cost(before, count)
                free_s[number], ready_s = senders[number].send(done_s, count)
            # The piece before must have ended, and this one is launched.
            leader_s = max(leader_s, ready_s, ends_s)
            ends_s = leader_s + last(before, count)
            before += count
    return ends_s


class Sender:
    """What a stage has to send."""

    def __init__(self, link: Link, token_bytes: int) -> None:
        self._link, self._token_bytes = link, token_bytes
        self._free_s = 0.0
        # When each array that waits is gone, and its bytes.
        self._waiting: deque[tuple[float, int]] = deque()

    def send(self, done_s: float, tokens: int) -> tuple[float, float]:
        """Sends the hidden states of some tokens. Returns when the stage may go on, and when they have arrived."""
        size, free_s = tokens * self._token_bytes, done_s
        while self._waiting and self._waiting[0][0] <= free_s:
            self._waiting.popleft()
        while self._waiting and size + sum(each for _, each in self._waiting) > QUEUE_BYTES_MAX:
            free_s = self._waiting.popleft()[0]
        self._free_s = max(self._free_s, free_s) + size / self._link.bytes_per_s
        self._waiting.append((self._free_s, size))
        return free_s, self._free_s + self._link.hop_s


def step_s(
    costs: Sequence[Callable[[int], float]],
    rows: int,
    micro_batches: int,
    link: Link = Link(),
    row_bytes: int = 0,
    launch_s: float = 0.0,
    engine_s: float = 0.0,
    steps: int = 50,
) -> float:
    """Returns how long a decode step of all sequences takes in the long run.

    Args:
        costs: of the stages: seconds for a step of so many sequences.
        rows: how many sequences there are; divided into as many `micro_batches`, as far as they suffice.
        row_bytes: of a sequence's hidden state.
        launch_s: what the leader needs to launch a micro-batch.
        engine_s: what it does between two steps.
    """
    count = min(rows, micro_batches)
    sizes = [ceil((rows - number) / count) for number in range(count)]
    followers, last = costs[:-1], costs[-1]
    free_s, ends_s, leader_s = [0.0] * len(followers), 0.0, 0.0
    drawn_s, arrived_s = [0.0] * count, [0.0] * count

    def begin(number: int) -> None:
        nonlocal leader_s
        leader_s = max(leader_s, drawn_s[number])
        ready_s = leader_s + link.hop_s
        for stage, cost in enumerate(followers):
            free_s[stage] = max(ready_s, free_s[stage]) + cost(sizes[number])
            ready_s = free_s[stage] + link.hop_s + sizes[number] * row_bytes / link.bytes_per_s
        arrived_s[number] = ready_s

    def finish(number: int) -> None:
        nonlocal leader_s, ends_s
        leader_s = max(leader_s, arrived_s[number]) + launch_s
        ends_s = drawn_s[number] = max(leader_s, ends_s) + last(sizes[number])

    middle_s = 0.0
    for step in range(2 * steps):
        if step == steps:
            middle_s = leader_s
        leader_s += engine_s
        for number in range(count):
            begin(number)
        for number in range(count):
            finish(number)
    return (leader_s - middle_s) / steps
