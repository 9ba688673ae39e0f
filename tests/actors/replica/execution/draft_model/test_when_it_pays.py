"""When a model drafts, on devices that are numbers: seconds of a step, of a drafted token and of a prompt's tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.drafting.pace import MEASURED_LEAST, TOKENS_MOST
from satchel.actors.replica.execution.draft_model.model_drafts import DraftModel
from satchel.actors.replica.execution.drafts import Checked, Drafts
from satchel.actors.replica.execution.sequence_states import ExecutorSequence

VOCABULARY = 50_000
END = 2**40


@dataclass
class Device:
    """Attributes: seconds of a step of one token, and of each further token of it; of a drafted token, and of a token
    of a prompt; which part of drafted tokens is right."""

    step_s: float
    further_s: float
    drafted_s: float
    prompt_s: float
    right: float
    now_s: float = 0.0


class FakeKV:
    """Stands for `RecentKV`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.lengths: list[int] = []

    def bare(self) -> FakeKV:
        return FakeKV(self._device)

    def open(self) -> None:
        self.lengths.append(0)

    def join(self, other: FakeKV) -> None:
        self.lengths += other.lengths

    def take(self, index: int) -> FakeKV:
        taken = self.bare()
        taken.lengths = [self.lengths[index]]
        return taken

    def keep(self, indices: Sequence[int]) -> None:
        self.lengths = [self.lengths[index] for index in indices]

    def arrays(self) -> list[mx.array]:
        return []

    def compute(self, tokens: Sequence[Sequence[int]], width: int, states: Any = None) -> mx.array:
        self._device.now_s += max(self._device.drafted_s, width * self._device.prompt_s)
        return mx.zeros((len(self.lengths), VOCABULARY))

    def compute_one(self, tokens: mx.array) -> mx.array:
        self._device.now_s += self._device.drafted_s
        return mx.zeros((len(self.lengths), VOCABULARY))


def answer(device: Device, drafts: Drafts, prompt_tokens: int, tokens: int, seed: int) -> float:
    """Returns how long an answer takes in which nothing repeats, without its prompt."""
    rng = random.Random(seed)
    script = [rng.randrange(VOCABULARY) for _ in range(prompt_tokens + tokens)]
    sequence = ExecutorSequence("one", prompt_tokens - 1, tokens=script[:prompt_tokens], tokens_max=len(script))
    drafts.join(sequence)
    began = device.now_s

    def guessing(indices: Sequence[int]) -> Any:
        at = iter(range(sequence.length + 1, END))

        def guess(logits: mx.array) -> Any:
            place = next(at)
            right = rng.random() < device.right and place < len(script)
            return SimpleNamespace(tokens=mx.array([script[place] if right else 7]))

        return guess

    while sequence.length < len(script) - 1:
        token = script[sequence.length]
        sampler: Any = SimpleNamespace(guessing=guessing)
        chosen = drafts.choose([sequence], lambda token=token: [token], sampler, ragged=True)
        if not any(chosen):
            device.now_s += device.step_s
            drafts.note_step(1)
            drafts.note([sequence], [token])
            sequence.length += 1
            continue
        (draft,) = chosen
        device.now_s += device.step_s + len(draft) * device.further_s
        right = 0
        while right < len(draft) and draft[right] == script[sequence.length + 1 + right]:
            assert sequence.drafter is not None
            sequence.drafter.add(draft[right])
            right += 1
        ready: list[Any] = [None] * right
        drafts.note_wide(Checked(ready, [1 + right], [right], [0], [None] * (1 + len(draft)), True))
        sequence.length += 1 + right
    drafts.pause()
    return device.now_s - began


def drafting(device: Device, tokens_most: int = TOKENS_MOST) -> Drafts:
    kv: Any = FakeKV(device)
    model = DraftModel("small", VOCABULARY, kv, 0, {16: 16 * device.prompt_s}, device.drafted_s)
    return Drafts(VOCABULARY, lambda: device.now_s, wanted=True, model=model, tokens_most=tokens_most)


GAINS = {
    "a large model on a GPU": Device(0.009, 0.001, 0.0015, 0.00003, right=0.75),
    "a large model on a Mac": Device(0.05, 0.005, 0.006, 0.0003, right=0.8),
}
LOSES = {
    "a CPU": Device(0.1, 0.08, 0.04, 0.02, right=0.8),
    "a model that is not much smaller": Device(0.003, 0.0005, 0.0025, 0.0001, right=0.9),
    "a model that is wrong": Device(0.009, 0.001, 0.0015, 0.00003, right=0.05),
}


@pytest.mark.parametrize("name", GAINS)
def test_where_it_pays_answers_are_faster(name: str):
    """With their prompts in the model, and although answers end."""
    device = GAINS[name]
    drafts = drafting(device)
    seconds = [answer(device, drafts, 1500, 500, seed) for seed in range(4)]
    assert max(seconds[1:]) < 0.8 * 500 * device.step_s
    assert drafts.right_by_model > 500


@pytest.mark.parametrize("name", LOSES)
def test_where_it_does_not_pay_no_more_than_three_percent_is_lost(name: str):
    """It is tried, and after a few trials it is not."""
    device = LOSES[name]
    drafts = drafting(device)
    answers = 30
    seconds = sum(answer(device, drafts, 1500, 500, seed) for seed in range(answers))
    assert seconds < 1.03 * answers * 500 * device.step_s
    assert drafts.drafted_by_model < 0.02 * answers * 500


def test_a_short_answer_is_not_worth_its_prompt():
    device = GAINS["a large model on a Mac"]
    drafts = drafting(device)
    seconds = answer(device, drafts, 4000, 12, seed=1)
    assert drafts.model is not None and not drafts.model.followed
    assert seconds < 12 * device.step_s


def test_a_trial_has_no_more_tokens_than_other_steps(monkeypatch: pytest.MonkeyPatch):
    """Those have the same bits up to so many tokens."""
    device = Device(0.009, 0.001, 0.00001, 0.00001, right=0.01)
    drafts, count = drafting(device, tokens_most=16), 7
    sequences = [ExecutorSequence(str(at), 8, tokens=[*range(9)], tokens_max=100) for at in range(count)]
    for sequence in sequences:
        drafts.join(sequence)
    model: Any = drafts.model
    model.pace.credit_s = 1.0
    model.is_ready = lambda sequence: True
    monkeypatch.setattr(model.pace, "share", lambda own=None: 0.01)
    for _ in range(MEASURED_LEAST):
        drafts.pace.note(count, count, device.step_s)
    plan = drafts._plan(sequences, ragged=True)
    assert plan.is_trial and count < count + sum(plan.lengths) <= 16
