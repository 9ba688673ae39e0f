"""Schemathesis: requests drawn from the OpenAPI document that the server itself gives out."""

from __future__ import annotations

import json
import time
from typing import Any

from .bodies import TOKENS_MAX
from .http import AttackAnswer, AttackOutcome, ask
from .scene import AttackScene

_SHARE = 20
"""Of the drawn bodies there are so many times more than of these, which are slow to draw."""


def run(scene: AttackScene) -> AttackOutcome:
    """Every operation's share, one request after the other."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    outcome = AttackOutcome(allowed=(503,))
    schema = schemathesis.openapi.from_dict(json.loads(ask(scene.port, "/openapi.json").body))
    # One that the document describes wrongly raises here.
    operations: list[Any] = [found.ok() for found in schema.get_all_operations()]  # pyright: ignore
    until = time.monotonic() + 6 * scene.seconds

    for operation in operations:

        @seeded(scene.seed)
        @settings(
            max_examples=max(1, scene.bodies // _SHARE // len(operations)),
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),  # pyright: ignore
        )
        @given(case=operation.as_strategy())
        def one(case: Any) -> None:
            if time.monotonic() < until:
                _send(scene.port, case, outcome)

        one()
    outcome.notes.append(f"{len(operations)} operations")
    return outcome


def _send(port: int, case: Any, outcome: AttackOutcome) -> None:
    path, body = case.formatted_path, case.body
    if isinstance(body, dict) and "completions" in path:
        body = {**body, "max_tokens": TOKENS_MAX, "timeout_s": 30}
        body.pop("max_completion_tokens", None)
    try:
        data = json.dumps(body).encode() if isinstance(body, dict | list | str | int | float | bool) else None
        path = path.encode("ascii").decode()
    except (TypeError, ValueError, UnicodeEncodeError):
        return
    answer: AttackAnswer = ask(port, path, data, method=case.method.upper())
    if answer.error == "InvalidURL":
        return
    outcome.count(answer, f"{case.method} {path} {data!r}")
