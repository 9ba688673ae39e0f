"""A program's rewriting is learned from one rewrite: what is predicted is what the program sends. What cannot be
predicted is not guessed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory.rewriting import Rewriter
from satchel.api.agents import rewrites
from satchel.api.agents.programs import Programs, program_of
from satchel.api.agents.rewrites import Edit, Keep, Shortening
from satchel.api.requests.history import Message

KEY = b"program"


def turns(rng: random.Random, count: int, tools: Sequence[str] = ("read",)) -> Iterator[tuple[list[Message], Message]]:
    """What comes before each answer, and the answer: a task, then results of the call that the answer before made, and
    sometimes a user's message after an answer without a call."""
    new: list[Message] = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Do it."}]
    for turn in range(count):
        answer: Any = {"role": "assistant", "content": f"Step {turn}."}
        if rng.random() < 0.8:
            function = {"name": rng.choice(tools), "arguments": "{}"}
            answer["tool_calls"] = [{"id": f"call{turn}", "type": "function", "function": function}]
        yield new, answer
        if "tool_calls" in answer:
            text = f"result {turn}\n" * rng.randrange(6, 200)
            new = [{"role": "tool", "tool_call_id": f"call{turn}", "content": text}]
        else:
            new = [{"role": "user", "content": f"Go on {turn}."}]


def play(programs: Programs, agent: str, program: Rewriter, steps: Any) -> tuple[int, int]:
    """Plays an agent. Returns how often its history was rewritten, and how often that had been predicted exactly for
    the messages of that turn."""
    rewrites = right = 0
    said: list[Message] = []
    expected: list[Message] | None = None
    for new, answer in steps:
        asked = program.request(new)
        if said and asked[: len(said)] != said:
            rewrites += 1
            right += expected is not None and asked[: len(said)] == expected
        program.answered(answer)
        expected = programs.turn(KEY, agent, asked, answer)
        said = [*asked, answer]
    return rewrites, right


REWRITERS = st.builds(
    Rewriter,
    newest=st.integers(0, 4),
    oldest=st.integers(0, 2),
    placeholder=st.sampled_from(["[cleared]", "({lines} lines omitted)", "[{characters} characters left out]"]),
    every_turn=st.just(True),
)


@settings(max_examples=50, deadline=None)
@given(REWRITERS, st.integers(0, 1000))
def test_a_program_that_keeps_the_newest_results_is_known_after_one_rewrite(program: Rewriter, seed: int):
    rewrites, right = play(programs := Programs(), "ann", program, turns(random.Random(seed), 25))
    # After the second it is known that each turn is rewritten.
    assert right >= rewrites - 2
    assert programs.confirmed >= rewrites - 1 and programs.contradicted == 0


@pytest.mark.parametrize(
    "program",
    [
        Rewriter(characters=40_000, newest=2),
        Rewriter(characters=40_000, newest_characters=12_000),
        Rewriter(characters=40_000, head=100, tail=60, placeholder="\n[{characters} characters left out]\n"),
    ],
    ids=["newest", "budget of characters", "cut in the middle"],
)
def test_other_agents_of_a_program_are_predicted_too(program: Rewriter):
    """The first agent's rewrite comes as a surprise. Those of others are mostly predicted before they come, each
    at most once."""
    programs = Programs()
    play(programs, "ann", program, turns(random.Random(1), 100))
    found: list[int] = []
    for seed in range(2, 8):
        program.history = []
        predicted = 0
        for new, answer in turns(random.Random(seed), 100):
            before = list(program.history)
            asked = program.request(new)
            predicted_now = programs.turn(KEY, f"agent{seed}", asked, answer) is not None
            program.answered(answer)
            if asked[: len(before)] != before:
                found.append(predicted)
                predicted = 0
            predicted += predicted_now
    assert max(found) == 1 and sum(found) > len(found) / 2 > 4
    assert programs.confirmed > 5 and programs.contradicted <= 3


def test_results_of_some_tools_may_stay():
    rng, programs = random.Random(3), Programs()
    steps = list(turns(rng, 40, ["read", "skill"]))
    spared = {call.get("id") for _, answer in steps for call in answer.get("tool_calls", ()) if "skill" in str(call)}

    class Sparing(Rewriter):
        def _rewritten(self) -> list[Message]:
            cleared = super()._rewritten()
            pairs = zip(self.history, cleared, strict=True)
            return [old if old.get("tool_call_id") in spared else new for old, new in pairs]

    rewrites, right = play(programs, "ann", Sparing(newest=1, every_turn=True), steps)
    assert rewrites > 8 and right >= rewrites - 4 and programs.confirmed > programs.contradicted


def test_reasoning_that_is_never_sent_back_is_left_out_of_the_prediction():
    programs = Programs()
    asked: list[Message] = [{"role": "user", "content": "Hi"}]
    answer: Message = {"role": "assistant", "content": "Hello", "reasoning_content": "They greet."}
    assert programs.turn(KEY, "ann", asked, answer) is None
    asked = [*asked, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And?"}]
    predicted = programs.turn(KEY, "ann", asked, {**answer, "content": "What?"})
    assert predicted == [*asked, {"role": "assistant", "content": "What?"}]
    # Another program that does the same sends it back, so nothing is left out.
    again: list[Message] = [{"role": "user", "content": "Hi"}]
    programs.turn(b"other", "bob", again, answer)
    again = [*again, answer, {"role": "user", "content": "And?"}]
    assert programs.turn(b"other", "bob", again, answer) is None


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_a_rule_that_is_wrong_once_is_never_used_again(seed: int):
    """A program changes a random result to a new text each time."""
    rng, programs = random.Random(seed), Programs()
    history: list[Message] = []
    wrong = list[str]()
    for new, answer in turns(rng, 20):
        history += new
        sent = history[: len(history) - len(new)]
        results = [place for place, message in enumerate(sent) if message["role"] == "tool"]
        if results and rng.random() < 0.5:
            place = rng.choice(results)
            text = "".join(rng.choices("abcdefghijklmnop", k=12))
            wrong.append(text)
            history[place] = {**history[place], "content": text}
        predicted = programs.turn(KEY, "ann", list(history), answer)
        history.append(answer)
        for old, now in zip(history, predicted or [], strict=False):
            # Only the newest text may be taken for a placeholder.
            assert old == now or now["content"] == wrong[-1]


def test_a_long_text_is_no_placeholder():
    """It would be kept for every program, and looked through for counts."""
    told = "".join(f"{number} " for number in range(2000))
    call: Any = {"id": "a", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    before: list[Message] = [
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": told},
        {"role": "assistant", "content": "Done."},
    ]
    for short, explained in ((told[:1000], True), (told[1:5000], False)):
        after: list[Message] = [*before, {"role": "user", "content": "And?"}]
        after[2] = {**before[2], "content": "x" + short}
        assert bool(rewrites.learned(before, after)) == explained


def test_a_summary_is_not_guessed():
    programs = Programs()
    for agent in ("ann", "bob"):
        history: list[Message] = []
        for turn, (new, answer) in enumerate(turns(random.Random(5), 12)):
            if turn == 8:
                history = [history[0], {"role": "user", "content": f"Summary for {agent}: all is well."}]
            history = [*history, *new]
            assert programs.turn(KEY, agent, history, answer) is None
            history.append(answer)


def test_what_is_remembered_has_a_limit():
    programs = Programs(programs_max=4, characters_max=50_000)
    for number in range(50):
        play(programs, f"agent{number}", Rewriter(newest=1), turns(random.Random(number), 8))
        programs.turn(bytes([number]), "ann", [{"role": "user", "content": "Hi"}], {"role": "assistant", "content": ""})
    assert len(programs._programs) <= 4 and programs._agents.currsize <= 50_000
    long: Message = {"role": "user", "content": "x" * 60_000}
    assert programs.turn(KEY, "bob", [long], {"role": "assistant", "content": ""}) is None
    assert "bob" not in programs._agents
    asked: list[Message] = [{"role": "user", "content": "Hi"}]
    programs.turn(KEY, "bob", asked, {"role": "assistant", "content": "", "reasoning_content": "x" * 60_000})
    assert "bob" not in programs._agents
    programs.forget("agent49")
    assert "agent49" not in programs._agents


def test_an_agent_that_is_forgotten_while_its_turn_is_noted_is_not_remembered(monkeypatch: pytest.MonkeyPatch):
    programs = Programs()
    remember, forgets = programs._remember, threading.Thread(target=programs.forget, args=["ann"])

    def slowly(agent: str, lines: Any) -> None:
        forgets.start()
        forgets.join(0.2)
        remember(agent, lines)

    monkeypatch.setattr(programs, "_remember", slowly)
    programs.turn(KEY, "ann", [{"role": "user", "content": "Hi"}], {"role": "assistant", "content": ""})
    forgets.join()
    assert "ann" not in programs._agents


def test_the_tools_of_a_long_conversation_are_looked_up_once(monkeypatch: pytest.MonkeyPatch):
    asked: list[Message] = []
    for new, answer in turns(random.Random(4), 60, ["read", "skill"]):
        asked += [*new, answer]
    looked = list[int]()
    find = rewrites.called_tools
    monkeypatch.setattr(rewrites, "called_tools", lambda messages: looked.append(len(messages)) or find(messages))
    edit = Edit("tool", Keep("messages", 1, 1), Shortening(0, ("[cleared]",), (), 0), spared=frozenset(["skill"]))
    edited = edit.apply(asked)
    assert looked == [len(asked)]
    names = find(asked)
    results = [place for place, message in enumerate(asked) if message["role"] == "tool"][:-1]
    cleared = {place for place in results if edited[place]["content"] == "[cleared]"}
    assert cleared == {place for place in results if names[place] == "read"} and 0 < len(cleared) < len(results)


def test_a_program_is_known_by_its_tools_or_its_system_prompt():
    tools = [{"type": "function", "function": {"name": name}} for name in ("read", "write")]
    system: Message = {"role": "system", "content": "Today is Monday."}
    other: Message = {"role": "system", "content": "Today is Tuesday."}
    assert program_of("code", "t", tools, [system]) == program_of("code", "t", tools[::-1], [other])
    assert program_of("code", "t", [], [system]) != program_of("code", "t", [], [other])
    assert program_of("code", "t", tools, [system]) != program_of("code", "u", tools, [system])
