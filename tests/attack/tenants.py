"""One tenant tries to learn what another has, by every route, and then to leave it nothing of the server."""

from __future__ import annotations

import json
import statistics
import threading
import time
from itertools import product
from typing import Any

from .http import AttackAnswer, AttackOutcome, ask, at_a_time
from .scene import ADMIN, OTHER, STREAMS, AttackScene

_AGENT, _SECRET = "diary", "quokka"
_TOLD = f"Remember: the code of {_SECRET} is 4711. " + "The weather was fine and nothing happened. " * 60
_SPELLINGS = (
    _AGENT,
    f"{STREAMS}/{_AGENT}",
    f"{STREAMS}%2F{_AGENT}",
    f"../{STREAMS}/{_AGENT}",
    f"..%2f{STREAMS}%2f{_AGENT}",
)
_FLOOD = 200
_LONG = "Tell me a long story about a robot, a whale and a lighthouse. " * 60
_EVERY_S = 1.0


def _as(key: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **more}


def _chat(scene: AttackScene, who: str, text: str, agent: str = "", tokens: int = 8, **fields: Any) -> AttackAnswer:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0, **fields}
    named = {"X-Agent-ID": agent} if agent else {}
    return ask(scene.port, "/v1/chat/completions", body, headers=_as(scene.keys[who], **named), timeout_s=300.0)


def _usage(answer: AttackAnswer) -> int:
    """How many tokens were read from memory."""
    return int(json.loads(answer.body)["usage"]["prompt_tokens_details"]["cached_tokens"])


def _agent(scene: AttackScene) -> dict[str, Any]:
    """What its tenant is told of the agent, less what changes by itself."""
    answer = ask(scene.port, f"/v1/agents/{_AGENT}", headers=_as(scene.keys[STREAMS]))
    return {name: value for name, value in json.loads(answer.body).items() if name in ("id", "tokens", "branches")}


def spying(scene: AttackScene) -> AttackOutcome:
    """The other's agent by every route and spelling, and what the memory of it would show."""
    outcome = AttackOutcome(allowed=())
    outcome.count(_chat(scene, STREAMS, _TOLD, _AGENT), "an agent is told")
    warm = _chat(scene, STREAMS, _TOLD, _AGENT)
    if _usage(warm) == 0:
        outcome.unexpected.append("its own tenant finds nothing in memory, so this shows nothing")
    told = _agent(scene)
    bodies: tuple[tuple[str, str, Any], ...] = (
        ("GET", "", None), ("DELETE", "", None), ("POST", "/release", {}), ("POST", "/fork", {"as": "copy"}),
        ("POST", "/inject", {"messages": [{"role": "user", "content": "Hi"}]}), ("POST", "/move", {"to": "local"}),
    )  # fmt: skip
    for spelling, (method, path, body) in product(_SPELLINGS, bodies):
        # An agent of one's own that does not exist yet is made by what is injected: of another name than the other's.
        if path == "/inject" and spelling == _AGENT:
            continue
        answer = ask(scene.port, f"/v1/agents/{spelling}{path}", body, method=method, headers=_as(scene.keys[OTHER]))
        outcome.count(answer, f"{method} {spelling}{path}")
        # Letting go of what one has not is no mistake.
        _shows_nothing(outcome, answer, f"{method} {spelling}{path}", fails=path != "/release")
    for path in ("/v1/agents", "/v1/agents?after=" + _AGENT, "/health", "/v1/models", "/openapi.json"):
        answer = ask(scene.port, path, headers=_as(scene.keys[OTHER]))
        outcome.count(answer, path)
        _shows_nothing(outcome, answer, path)
    for method, path in (
        ("GET", "/v1/cluster"),
        ("GET", "/v1/cache/stats"),
        ("DELETE", "/v1/cache"),
        ("GET", "/metrics"),
    ):
        answer = ask(scene.port, path, method=method, headers=_as(scene.keys[OTHER]))
        outcome.count(answer, path)
        if answer.status != 403:
            outcome.unexpected.append(f"{method} {path} is for administrators, and was {answer.status}")
    cold = _chat(scene, OTHER, _TOLD, _AGENT)
    outcome.count(cold, "the other's own words")
    if _usage(cold):
        outcome.unexpected.append("cached_tokens says that another was told the same")
    if _agent(scene) != told:
        outcome.unexpected.append(f"the agent was {told} and is {_agent(scene)}")
    for headers in ({"Authorization": ""}, _as("sk-satchel-0-wrong"), _as(scene.keys[OTHER][:-1] + "!")):
        answer = ask(scene.port, "/v1/agents", headers=headers)
        outcome.count(answer, "no good key")
        if answer.status != 401:
            outcome.unexpected.append(f"a key that is none: {answer.status}")
    return outcome


def _shows_nothing(outcome: AttackOutcome, answer: AttackAnswer, what: str, *, fails: bool = False) -> None:
    if _SECRET.encode() in answer.body:
        outcome.unexpected.append(f"{what} shows the other's words")
    if fails and answer.status < 400:
        outcome.unexpected.append(f"{what} was {answer.status}")


def greedy(scene: AttackScene) -> AttackOutcome:
    """Two hundred long requests at a time, of one tenant, while another streams and a third asks something short."""
    outcome, until, over = AttackOutcome(allowed=(503,)), scene.ends(), threading.Event()

    def asked() -> float:
        began = time.monotonic()
        outcome.count(_chat(scene, ADMIN, "Hi", tokens=8), "a short question of another tenant")
        return time.monotonic() - began

    calm = [asked() for _ in range(5)]
    statuses: list[int] = []

    def flood(number: int) -> None:
        while not over.is_set() and time.monotonic() < until:
            left_s = max(1.0, until - time.monotonic())
            agent = f"agent-{number % 20}"
            answer = _chat(scene, OTHER, f"{number} {_LONG}", agent, 64, ignore_eos=True, timeout_s=left_s)
            statuses.append(answer.status)
            # Refused for want of room, 200 clients at a time would measure how fast that goes.
            time.sleep(0.0 if answer.status == 200 else _EVERY_S)

    flooding = threading.Thread(target=at_a_time, args=(_FLOOD, flood, range(_FLOOD), until))
    flooding.start()
    time.sleep(5.0)
    beside = []
    while not beside or time.monotonic() < until:
        beside.append(asked())
        time.sleep(_EVERY_S)
    over.set()
    flooding.join()
    counts = {status: statuses.count(status) for status in sorted(set(statuses))}
    outcome.notes.append(f"the flood: {counts}")
    outcome.notes.append(
        f"a short question took {statistics.median(calm):.2f} s before and {statistics.median(beside):.2f} s beside it "
        f"(longest {max(beside):.2f} s, {len(beside)} of them)"
    )
    return outcome
