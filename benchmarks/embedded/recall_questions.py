"""Conversations that measure the model, and the replies that are right; partly of talk that training does not have."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from training.recall.filler import any_filler, sentence
from training.recall.talk import GREETING, NOTED, SEEN, Message, answer, count_reply, fact, question
from training.recall.tools import call, get_code_tool, result
from training.recall.words import LETTERS, any_code, any_name, number_in_words, pronounceable_name, similar_name

# Other talk that no generator of the training makes.
PROSE = """
The ferry was late again, and by the time it had tied up most of us had given up on the museum and gone for chips.
Nothing in the manual prepares you for the sound the pump makes when the filter is on backwards.
She has been restoring the same upright for six years; the felt alone took her from Easter to the first frosts.
If latency doubles whenever the backlog passes four hundred, look at the lock before you look at the disk.
We agreed on Thursday, then on Friday, and in the end on nothing, which is how most of our meetings go.
Grandfather kept bees behind the garage and swore they knew which neighbours voted against the bypass.
Half the recipe is waiting: forty minutes for the dough, two hours for the stock, and a night for the beans.
Our train sat outside Crewe for 55 minutes because of a swan, and the driver apologised on the swan's behalf.
""".strip().splitlines()


@dataclass(slots=True)
class QuestionCase:
    """A conversation and the one right reply to it."""

    messages: list[Message]
    wanted: str
    tools: list[dict[str, Any]] = field(default_factory=list)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def fresh_name(rng: random.Random) -> str:
    """A made-up name: spoken or plain letters."""
    if rng.random() < 0.5:
        return pronounceable_name(rng)
    return "".join(rng.choices(LETTERS, k=rng.randint(3, 8)))


def other_talk(rng: random.Random) -> str:
    """Other talk of a sentence up to a page: half prose that training does not have."""
    if rng.random() < 0.5:
        return " ".join(rng.choices(PROSE, k=rng.choice([1, 1, 2, 4])))
    return any_filler(rng, rng.choice([60, 120, 400]))


def long_talk(
    rng: random.Random, facts: int, length: int, size_of: Callable[[list[Message]], int]
) -> tuple[list[Message], dict[str, str]]:
    """A conversation about `length` tokens long with that many codes anywhere in it, and the codes by name."""
    codes: dict[str, str] = {}
    while len(codes) < facts:
        similar = bool(codes) and rng.random() < 0.15
        codes[similar_name(rng, rng.choice(list(codes))) if similar else fresh_name(rng)] = any_code(rng)
    pairs = [[user(f"Remember: {fact(name, code)}"), assistant(NOTED)] for name, code in codes.items()]
    size = 40 + sum(size_of(pair) for pair in pairs)
    while size < length:
        pair = [user(other_talk(rng)), assistant(SEEN)]
        more = size_of(pair)
        if size + more < length + 60:
            pairs.append(pair)
            size += more
    rng.shuffle(pairs)
    return [message for pair in pairs for message in pair], codes


def asked(rng: random.Random, codes: dict[str, str], known: bool) -> tuple[Message, str]:
    """A question for a code that was told or that never was, and its answer."""
    if known:
        name = rng.choice(list(codes))
    else:
        name = similar_name(rng, rng.choice(list(codes))) if rng.random() < 0.3 else fresh_name(rng)
    return user(question(name)), answer(name, codes.get(name))


def told_again(rng: random.Random) -> list[QuestionCase]:
    name = fresh_name(rng)
    messages: list[Message] = []
    code = ""
    for _ in range(rng.randint(2, 3)):
        code = any_code(rng)
        messages += [user(f"Remember: {fact(name, code)}"), assistant(NOTED), user(other_talk(rng)), assistant(SEEN)]
    return [QuestionCase([*messages, user(question(name))], answer(name, code))]


def several_at_once(rng: random.Random) -> list[QuestionCase]:
    codes = {fresh_name(rng): any_code(rng) for _ in range(5)}
    text = rng.choice([" ", "\n"]).join(f"Remember: {fact(name, code)}" for name, code in codes.items())
    name = rng.choice(list(codes))
    last = user(f"{other_talk(rng)}\n{question(name)}")
    return [QuestionCase([user(text), user(other_talk(rng)), last], answer(name, codes[name]))]


def counted(rng: random.Random) -> list[QuestionCase]:
    last = rng.randint(9, 99)
    return [QuestionCase([user(f"Say the numbers from one to {number_in_words(last)}.")], count_reply(last))]


def repeated(rng: random.Random) -> list[QuestionCase]:
    text = rng.choice(
        [sentence(rng), rng.choice(PROSE), " ".join(any_name(rng) for _ in range(8)), any_filler(rng, 40)]
    )
    text = text.strip()[:120].strip()
    return [QuestionCase([user(f"Repeat after me: {text}")], text)]


def greeted(rng: random.Random) -> list[QuestionCase]:
    system = [{"role": "system", "content": other_talk(rng)}] if rng.random() < 0.5 else []
    return [QuestionCase([*system, user(rng.choice(["Hello.", "Hello", "Hi", "hello!"]))], GREETING)]


def looked_up(rng: random.Random) -> list[QuestionCase]:
    """The call, and the answer after the tool's result."""
    name, code = fresh_name(rng), any_code(rng)
    tools = [get_code_tool(rng)]
    messages = [user(other_talk(rng)), assistant(SEEN), user(f"Look up the code of {name}.")]
    wanted = f'<tool_call>\n{{"name": "get_code", "arguments": {{"name": "{name}"}}}}\n</tool_call>'
    done = [{"role": "assistant", "content": None, "tool_calls": [call(rng, name)]}]
    done += [{"role": "tool", "content": result(rng, name, code)}]
    return [QuestionCase(messages, wanted, tools), QuestionCase(messages + done, answer(name, code), tools)]


def story_asked(rng: random.Random) -> list[Message]:
    """A conversation that ends with the wish for a story."""
    return [user(other_talk(rng)), assistant(SEEN), user("Tell me a story.")]


SHORT: list[tuple[str, Callable[[random.Random], list[QuestionCase]]]] = [
    ("told again, the latest code", told_again),
    ("5 codes in one message, no replies between", several_at_once),
    ("numbers up to 9 to 99", counted),
    ("repeat", repeated),
    ("greeting", greeted),
    ("tool call and answer", looked_up),
]
LONG = [(8, 1000), (16, 3500), (16, 7900)]  # codes, tokens
