"""The stories of examples/ on a real server: agents know what they were told, and nothing is read twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.stories import gossip, prisoners, replay, story
from examples.stories.endpoint import endpoint_at
from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.api.serve import Deployment
from tests.worlds.api.recordings import FILLER, calls, talk, write


@pytest.fixture
def endpoint(deployment: Deployment) -> Iterator[Any]:
    with endpoint_at(deployment.url) as found:
        before = agents_of(found)
        yield found
        assert agents_of(found) == before, "a run erases its agents"


@pytest.fixture
def run(endpoint: Any) -> Any:
    """Runs a story in the ways named, and returns what came of each."""

    def run(tell: Any, *ways: str) -> list[Any]:
        return list(story.run_all(endpoint, ways, tell, lambda text: None).values())

    return run


def answers(run: Any) -> list[str]:
    return [check.answer for check in run.told.checks]


def agents_of(endpoint: Any) -> list[str]:
    return [agent["id"] for agent in endpoint._json("GET", "/v1/agents?limit=100")["data"]]


def restored_tokens(endpoint: Any) -> float:
    return sum(endpoint.counters("satchel_restored_tokens_total").values())


@pytest.mark.slow
def test_the_prisoners_keep_their_pact_and_read_nothing_twice(endpoint: Any, run: Any) -> None:
    """Five phases: each knows his own secrets, no one knows what he was not told, and no token that an agent has read
    or said is computed again. From the disk the answers are the same."""
    before = restored_tokens(endpoint)
    kept, disk = run(lambda mind: prisoners.prisoners(mind, seed=1, sentences=12), "memory", "disk")
    assert kept.told.right == len(kept.told.checks) == 12, kept.told.checks
    assert kept.ledger.again_tokens == 0, [entry for entry in kept.ledger.entries if entry.again_tokens]
    later = [entry.usage for entry in kept.ledger.entries if not entry.phase.startswith("1")]
    assert max(usage.prompt_tokens for usage in later) > 2 * BLOCK_TOKENS, "conversations cross blocks"
    assert sum(usage.computed_tokens for usage in later) < 0.12 * sum(usage.prompt_tokens for usage in later)
    assert answers(disk) == answers(kept)
    assert restored_tokens(endpoint) - before > BLOCK_TOKENS
    assert disk.ledger.computed_tokens < 2 * kept.ledger.computed_tokens, "phases begin from the disk"
    phases = {entry.phase[0] for entry in kept.ledger.entries}
    assert phases == set("12345")


@pytest.mark.slow
def test_a_rumour_gets_one_neighbour_further_in_a_round(endpoint: Any, run: Any) -> None:
    """Whoever was told knows, in the teller's own words; who is too far away does not. Where nothing is kept the
    answers are the same, and all is read again."""

    def tell(mind: Any) -> Any:
        return gossip.gossip(mind, seed=3, agents=6, rounds=2, rumours=1, shortcuts=0, sentences=4)

    kept, nothing = run(tell, "memory", "nothing")
    assert kept.told.right == len(kept.told.checks) == 6, kept.told.checks
    # Of a ring of six, two rounds leave out the one opposite.
    assert sum("not know" in answer for answer in answers(kept)) == 1
    assert kept.ledger.again_tokens == 0
    assert answers(nothing) == answers(kept)
    assert {entry.usage.cached_tokens for entry in nothing.ledger.entries} == {0}
    assert nothing.ledger.again_tokens > 0
    assert nothing.ledger.computed_tokens > 1.3 * kept.ledger.computed_tokens


def replayed(endpoint: Any, path: Path, *, served: bool, **limits: Any) -> Any:
    chosen = replay.ReplayLimits(**{"conversations": 9, "calls": 50, "cold": 0, **limits})
    return replay.replay(endpoint, path, chosen, lambda text: None, served=served)


@pytest.mark.slow
def test_of_a_replay_with_the_models_own_replies_nothing_is_read_twice(endpoint: Any, tmp_path: Path) -> None:
    """Each later prompt extends what its agent remembers, and prompt and reply are found to the last token."""
    path = write(tmp_path / "talk.jsonl", talk(8))
    found = replayed(endpoint, path, served=True, cold=2)
    assert len(found.ledger.entries) == 8 and found.matches == {"new": 2, "extend": 6}
    assert found.ledger.again_tokens == 0, found.ledger.entries
    assert found.summary()["not prefilled"] > 0.6
    assert len(found.pairs) == 2 and found.cut == 0 and not found.refused


@pytest.mark.slow
def test_of_a_replay_with_recorded_replies_only_these_are_new(endpoint: Any, tmp_path: Path) -> None:
    """The reply in memory is not the recorded one; the prompt before it is found all the same, but for at most the
    block that the reply has filled. A prompt that is too long is counted, and others go on."""
    grown = "Fix the bug. " + FILLER * 30
    prompts = [grown, f"{grown}One.", f"{grown}One.Two. {FILLER * 10}", "Something else."]
    long = [f"{FILLER * 1000}", f"{FILLER * 1001}", "Short again."]
    path = write(tmp_path / "calls.jsonl.gz", calls(*prompts), calls(*long))
    found = replayed(endpoint, path, served=False)
    assert found.cut == 2 and len(found.ledger.entries) == 5 and not found.refused
    assert all(entry.again_tokens < BLOCK_TOKENS for entry in found.ledger.entries)
    later = found.ledger.entries[1:3]
    assert all(entry.usage.cached_tokens >= 400 for entry in later), later
    assert sum(found.matches.values()) >= 5 and found.matches.get("extend", 0) == 0
    assert found.summary()["too long"] == 2


@pytest.mark.slow
def test_a_replay_keeps_its_limits(endpoint: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "talk.jsonl", talk(4), talk(4), talk(4))
    found = replayed(endpoint, path, served=True, conversations=2, calls=1, tokens=1)
    assert len(found.ledger.entries) == 2 and found.conversations == 2
    assert replayed(endpoint, path, served=True, time_s=-1.0).out_of_time
