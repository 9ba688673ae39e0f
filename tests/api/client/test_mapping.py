"""Every row has its answer, in order, whatever the cluster says meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from satchel.actors.protocol.replica_messages import IDLE_PRIORITY
from satchel.api.batches import patience
from satchel.api.client.mapping import map_batch, map_rows
from satchel.cluster.errors import GenerationFailed, InvalidRequest, QueueFull

ROWS = [{"name": name, "number": number} for number, name in enumerate("abcdefgh")]


class Model:
    def __init__(self) -> None:
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self.running = self.most = 0
        self.fails: dict[str, list[Exception]] = {}

    async def __call__(self, prompt: Any, **options: Any) -> Any:
        self.asked.append((prompt, options))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001 * (9 - len(self.asked) % 9))
        self.running -= 1
        if fails := self.fails.get(str(prompt)):
            raise fails.pop()
        return SimpleNamespace(
            text=f"{prompt}!", finish_reason="stop", prompt_tokens=3, completion_tokens=2, cached_tokens=1
        )


async def test_rows_are_answered_in_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(patience, "RETRY_S", (0.001, 0.002))
    model = Model()
    model.fails = {"Say b 1": [QueueFull("full"), QueueFull("full")], "Say c 2": [GenerationFailed("broken")]}
    answered = await map_rows(model, ROWS, "Say {name} {number}", at_once=3, temperature=0.0)
    assert [row["name"] for row in answered] == list("abcdefgh") and model.most == 3
    assert [row["answer"] for row in answered if row["name"] != "c"][:2] == ["Say a 0!", "Say b 1!"]
    assert answered[0] | {"error": None} == {
        "name": "a", "number": 0, "answer": "Say a 0!", "finish_reason": "stop", "prompt_tokens": 3,
        "completion_tokens": 2, "cached_tokens": 1, "error": None,
    }  # fmt: skip
    assert (answered[2]["answer"], answered[2]["error"]) == (None, "broken")
    assert len(model.asked) == 10
    assert all(options == {"temperature": 0.0, "priority": IDLE_PRIORITY} for _, options in model.asked)


async def test_a_prompt_may_be_a_function_and_what_it_raises_ends_all():
    model = Model()
    answered = await map_rows(model, ROWS[:2], lambda row: [row["name"]], at_once=1, priority=0)
    assert [row["answer"] for row in answered] == ["['a']!", "['b']!"] and model.asked[0][1]["priority"] == 0
    with pytest.raises(KeyError):
        await map_rows(model, ROWS, "{nothing}", at_once=2)
    with pytest.raises(InvalidRequest):
        await map_rows(model, ROWS, "{name}", at_once=0)


def test_a_batch_of_a_dataset_has_columns():
    """As Ray Data passes and expects it."""

    def map_sync(rows: list[dict[str, Any]], prompt: str, *, at_once: int, model: str) -> list[dict[str, Any]]:
        assert (at_once, model) == (4, "m")
        return [{**row, "answer": prompt.format(**row), "error": None} for row in rows]

    homes: list[str] = []

    def connect(home: str) -> Any:
        homes.append(home)
        return SimpleNamespace(map_sync=map_sync)

    batch = {"name": ["a", "b"], "number": [1, 2]}
    answered = map_batch(batch, connect, "/home", "{name}-{number}", 4, {"model": "m"})
    assert answered == {**batch, "answer": ["a-1", "b-2"], "error": [None, None]} and homes == ["/home"]
