"""A budget for reasoning, from the model's markers to the answer: reasoning stays within it, and content is clean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.replica.execution.sampling.thinking_limit import ThinkingLimit
from satchel.api.requests.requests import ChatRequest, prepare_chat
from satchel.api.text.answers.sequence_text import TextDelta
from satchel.api.text.model import TextModel, load_text_model
from satchel.api.tools.answer_pieces import ReasoningDelta
from tests.worlds.api.fake_backend import served_model
from tests.worlds.models.harmony import write_harmony
from tests.worlds.models.tiny_tokenizers import write_tokenizer

Writer = Callable[[Path], Path]
MODELS: dict[str, Writer] = {
    "special": lambda folder: write_tokenizer(folder, markers="special", thinking=True),
    "added": lambda folder: write_tokenizer(folder, markers="added", thinking=True),
    "harmony": write_harmony,
}
THOUGHT, CONTENT = "the lazy dog jumps ", "the quick brown fox"


@pytest.fixture(scope="module", params=MODELS)
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(MODELS[request.param](tmp_path_factory.mktemp("model")), name=request.param)


def answered(text: TextModel, budget: int | None, variables: dict[str, object]) -> tuple[str, str, int]:
    """The reasoning and the content of a model that never stops thinking, and says the content if it must; and how many
    tokens of reasoning there were."""
    kwargs = {"enable_thinking": True, **variables}
    asked = ChatRequest(messages=[{"role": "user", "content": "hi"}], template_kwargs=kwargs, thinking_budget=budget)
    chat = prepare_chat(text, served_model(folder=Path(), context_tokens=10_000), asked)
    limited = chat.thinking_budget
    limit = None if limited is None else ThinkingLimit(limited, [], 2000)
    begins = "" if chat.thinking else "<|channel|>analysis<|message|>" if text.template.is_harmony else "<think>\n"
    wanted = text.tokenizer.encode(begins + THOUGHT * 20)
    drawn: list[int] = []
    for token in wanted:
        logits = mx.array(np.eye(2000, dtype=np.float32)[token])
        drawn.append(token if limit is None else int(mx.argmax(limit(logits))))
        if limit is not None:
            limit.drawn(mx.array([drawn[-1]]))
        if limited is not None and drawn[-len(limited.closing) :] == limited.closing:
            break
    sequence = chat.sequence_text()
    events = [*sequence.add([*drawn, *text.tokenizer.encode(CONTENT)]), *sequence.finish()]
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    content = "".join(event.text for event in events if isinstance(event, TextDelta))
    return reasoning, content, sequence.reasoning_tokens


@pytest.mark.parametrize("open_thought", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 7, 30])
def test_reasoning_keeps_within_its_budget(text: TextModel, budget: int, open_thought: bool):
    reasoning, content, tokens = answered(text, budget, {"open_thought": open_thought})
    assert content == CONTENT
    assert (THOUGHT * 20).startswith(reasoning)
    assert len(text.tokenizer.encode(reasoning)) <= budget and (reasoning or budget < 7)
    markers = 12
    assert tokens <= budget + markers


def test_without_a_budget_nothing_ends_it(text: TextModel):
    reasoning, content, _ = answered(text, None, {})
    assert reasoning.count("dog") == 20 and content == ""
