"""The disk of the home is full, and has room again: answers are given all the while, and nothing kept is lost."""

from __future__ import annotations

import json
import time

from .http import AttackOutcome, ask
from .scene import AttackScene

_KEEPER = "keeper"


def _turn(scene: AttackScene, outcome: AttackOutcome, agent: str, text: str, *, continues: bool = False) -> bytes:
    body = {"messages": [{"role": "user", "content": text}], "agent_id": agent, "max_tokens": 8, "temperature": 0}
    answer = ask(scene.port, "/v1/chat/completions", {**body, "agent_continue": continues})
    outcome.count(answer, f"{agent}: {text[:60]}")
    return answer.body


def run(scene: AttackScene) -> AttackOutcome:
    """Agents talk while nothing is free, then an agent that was there before is asked for what it was told."""
    if scene.disk.bytes_max is None:
        return AttackOutcome(skipped="no file system of its own can be mounted here")
    # 507 and 503 say that words cannot be kept now.
    outcome = AttackOutcome(allowed=(503, 507))
    _turn(scene, outcome, _KEEPER, "Remember: the code of ada is 1815.")
    before = _messages(scene)
    outcome.notes.append(f"{scene.disk.fill()} bytes taken")
    try:
        until, number = scene.ends(), 0
        while time.monotonic() < until:
            number += 1
            _turn(scene, outcome, f"late-{number}", f"Remember: the code of bob is {number}. " + "and " * 200)
            _turn(scene, outcome, _KEEPER, "What is the code of ada?")
            outcome.count(ask(scene.port, "/v1/agents"), "the list of agents")
            time.sleep(0.2)
    finally:
        scene.disk.empty()
    time.sleep(3.0)
    outcome.allowed = ()
    _turn(scene, outcome, _KEEPER, "What is the code of ada?", continues=True)
    after = _messages(scene)
    outcome.notes.append(f"the agent from before has {after} messages, {before} before")
    if after < before:
        outcome.unexpected.append(f"an agent that was kept has {after} of {before} messages")
    return outcome


def _messages(scene: AttackScene) -> int:
    try:
        info = json.loads(ask(scene.port, f"/v1/agents/{_KEEPER}").body)
        return max((branch["messages"] for branch in info["branches"]), default=0)
    except (ValueError, KeyError, TypeError):
        return 0
