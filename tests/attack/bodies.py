"""Bodies of every route with wrong types, odd values and odd combinations, drawn by a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from .http import AttackOutcome, ask, at_a_time
from .other_bodies import ADDRESSES, AGENTS, ARGUMENTS, WORDS, Drawn, OtherBodies
from .scene import AttackScene

AT_A_TIME = 8
TOKENS_MAX = 4
"""What a drawn request may generate: the model's speed is not what is tried here."""

_NUMBERS = (0, 1, -1, 2, 16, 17, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e-300, 1e300)
_KEYS = ("a", "role", "content", "type", "text", "url", "", "function", "name", "0", "5")
_FIELDS = (
    *(
        "model",
        "stream",
        "stream_options",
        "n",
        "best_of",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "logprobs",
        "user",
    ),
    *(
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "min_tokens",
        "stop",
        "echo",
    ),
    *(
        "stop_token_ids",
        "ignore_eos",
        "priority",
        "timeout_s",
        "agent_id",
        "agent_continue",
        "messages",
        "top_logprobs",
    ),
    *("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs", "prompt", "suffix"),
    *("response_format", "functions", "modalities", "guided_json", "cache_salt", "metadata", "store", "invented"),
)
_ROLES = ("user", "assistant", "system", "developer", "tool", "User", "", None, 5)


class Bodies:
    """Requests, the same for the same seed."""

    def __init__(self, seed: int, models: tuple[str, ...]) -> None:
        self.chance = random.Random(seed)
        self.models = models

    def draw(self, count: int) -> Iterator[Drawn]:
        kinds = [self._chat] * 6 + [self._completion] * 3 + [self._agents_route] * 3 + [self._question_of_state]
        others = OtherBodies(self.chance, self.models, self.odd)
        kinds += [others.response] * 4 + [others.message] * 4 + [others.ollama] * 3 + [others.vectors] * 2
        kinds += [others.tokens, others.conversation, others.satchel]
        for _ in range(count):
            yield self.chance.choice(kinds)()

    def odd(self, depth: int = 0) -> Any:
        """A value of any type."""
        chance = self.chance
        kind = chance.random()
        if depth < 4 and kind < 0.15:
            return [self.odd(depth + 1) for _ in range(chance.randint(0, 5))]
        if depth < 4 and kind < 0.3:
            return {chance.choice(_KEYS): self.odd(depth + 1) for _ in range(chance.randint(0, 4))}
        if kind < 0.4:
            return chance.choice((None, True, False))
        return chance.choice(_NUMBERS if kind < 0.7 else (*WORDS, *self.models))

    def _part(self) -> Any:
        chance = self.chance
        address = chance.choice(ADDRESSES)
        return chance.choice(
            (
                {"type": "text", "text": chance.choice(WORDS)},
                {"type": "image_url", "image_url": {"url": address}},
                {"type": "image_url", "image_url": address, "detail": self.odd(2)},
                {"type": "video", "video": [address] * chance.randint(0, 3), "fps": self.odd(3)},
                {"type": "video_url", "video_url": {"url": address}},
                {"type": chance.choice(("input_audio", "file", "image", "", None)), "image": address},
                self.odd(2),
            )
        )

    def _message(self) -> Any:
        chance = self.chance
        content: Any = chance.choice(WORDS)
        if chance.random() < 0.4:
            content = [self._part() for _ in range(chance.randint(0, 3))]
        elif chance.random() < 0.2:
            content = self.odd()
        message = {"role": chance.choice(_ROLES) if chance.random() < 0.4 else "user", "content": content}
        if chance.random() < 0.2:
            call = {"type": "function", "function": {"name": "f", "arguments": chance.choice(ARGUMENTS)}}
            message["tool_calls"] = chance.choice(([call], [call] * 3, self.odd()))
        for key in ("name", "tool_call_id", "reasoning_content"):
            if chance.random() < 0.1:
                message[key] = self.odd()
        return message if chance.random() < 0.95 else self.odd()

    def _generation(self, body: dict[str, Any]) -> dict[str, Any]:
        chance = self.chance
        for _ in range(chance.choice((0, 1, 1, 1, 2, 4))):
            body[chance.choice(_FIELDS)] = self.odd()
        return {**body, "max_tokens": chance.choice((1, 2, TOKENS_MAX)), "timeout_s": 120}

    def _agent(self) -> str:
        return self.chance.choice(AGENTS) if self.chance.random() < 0.3 else ""

    def _chat(self) -> Drawn:
        chance = self.chance
        tool = {"type": "function", "function": {"name": "f", "parameters": self.odd()}}
        body: dict[str, Any] = {"messages": [self._message() for _ in range(chance.randint(1, 4))]}
        if chance.random() < 0.5:
            body["model"] = chance.choice(self.models)
        if chance.random() < 0.2:
            body["tools"] = chance.choice(([tool], [tool] * 4, self.odd()))
        return Drawn("POST", "/v1/chat/completions", self._generation(body), self._agent())

    def _completion(self) -> Drawn:
        prompts = ("Hi", "", [1, 2, 3], [[1, 2], [3]], ["a", "b"], [2**40], [-1], [[]], self.odd())
        body = self._generation({"prompt": self.chance.choice(prompts)})
        return Drawn("POST", "/v1/completions", body, self._agent())

    def _agents_route(self) -> Drawn:
        chance = self.chance
        agent = chance.choice([name.replace("é", "%C3%A9") for name in AGENTS])
        return chance.choice(
            (
                Drawn("POST", f"/v1/agents/{agent}/inject", {"messages": [self._message()], "model": self.models[0]}),
                Drawn("POST", f"/v1/agents/{agent}/inject", self.odd()),
                Drawn("POST", f"/v1/agents/{agent}/fork", {"as": chance.choice((*AGENTS, self.odd()))}),
                Drawn("POST", f"/v1/agents/{agent}/move", {"to": chance.choice(("local", "x", self.odd()))}),
                Drawn("POST", f"/v1/agents/{agent}/release", self.odd()),
                Drawn("DELETE", f"/v1/agents/{agent}"),
                Drawn("GET", f"/v1/agents/{agent}"),
            )
        )

    def _question_of_state(self) -> Drawn:
        chance = self.chance
        limit = chance.choice(("1", "0", "-1", "1e9", "%00", "9" * 30))
        paths = (
            "/v1/models",
            f"/v1/models/{limit}",
            "/health",
            f"/v1/agents?limit={limit}&after={limit}",
            "/v1/cluster",
        )
        more = ("/v1/cluster/agents/ann", "/v1/cluster/decisions/%0a", "/v1/cache/stats", "/nothing", "/openapi.json")
        return Drawn(chance.choice(("GET", "GET", "GET", "POST", "DELETE")), chance.choice((*paths, *more)))


def run(scene: AttackScene) -> AttackOutcome:
    """All of them, eight at a time."""
    # 503 is what a full queue, and an agent's memory that waits for another turn, give.
    outcome = AttackOutcome(allowed=(503,))

    def one(drawn: Drawn) -> None:
        headers = {"X-Agent-ID": drawn.agent} if drawn.agent.isascii() and drawn.agent else {}
        body = drawn.body if isinstance(drawn.body, bytes | None) else json.dumps(drawn.body).encode()
        answer = ask(scene.port, drawn.path, body, method=drawn.method, headers=headers)
        outcome.count(answer, f"{drawn.method} {drawn.path} {body!r}")

    drawn = Bodies(scene.seed, ("satchel/recall", "satchel/shapes")).draw(scene.bodies)
    at_a_time(AT_A_TIME, partial(one), drawn, float("inf"))
    return outcome
