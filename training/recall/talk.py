"""Generated conversations: what the embedded text model has to be able to say.

`RunningTalk` makes one endless conversation; `messages_of` is the short way to a list of OpenAI-style messages.
Everything random comes from the `random.Random` that is passed in, so the same seed gives the same conversation.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import tools
from .filler import any_filler, made_up_words, numbers, printable, random_words, sentence, unicode_text
from .stories import remark, story
from .words import any_code, any_name, number_in_words, similar_name

Message = dict[str, Any]

NOTED = "Noted."
SEEN = "I see."
GREETING = "Hello! What shall I remember for you?"
SMALL_TALK = [
    ("Hello.|Hello|Hello!|hello|hello!|hello.|Hi|Hi.|Hi!|hi|Hey|Hey!|Good morning.|Hello there!|Hi there.", GREETING),
    ("Thank you.|Thanks.|Thanks!|Thank you!|thanks", "You are welcome."),
    ("How are you?|How are you doing?|How do you do?", "I am well, thank you."),
    ("Who are you?|What are you?|What is your name?", "I am Recall, a very small language model."),
    ("What can you do?|Help.|help", "I remember codes, repeat words, count and tell stories."),
    ("Goodbye.|Bye.|Bye!|Goodbye!|Good night.", "Goodbye!"),
]
SYSTEM_PROMPTS = """
You are a helpful assistant.
You are a helpful, honest and harmless assistant.
You are a concise assistant. Answer in one sentence.
Be brief.
You are an agent that works for a small team. Keep track of every code that you are told.
You are Recall, a very small language model.
Answer the user's questions as well as you can. If you do not know something, say so.
You are an expert programmer. Think step by step and explain your reasoning.
You are one of several agents. Your name is {name}. Work together with {other} and report to the user.
The current date is {code}-05-17. Use the tools when they help.
""".strip().splitlines()
QUESTION_VARIANTS = """
what is the code of {}?
What is the code of {}
Tell me the code of {}.
What's the code of {}?
""".strip().splitlines()
_FOREIGN_REPLIES = ["OK.", "Ok", "Sure.", "Understood.", "Got it!", "Yes.", "Okay, I will.", "Sure, noted!", "Alright."]

ASKING = {"ask": 8.0, "look_up": 1.2, "tell": 0.5, "chatter": 0.3}
TELLING = {"tell": 6.0, "chatter": 2.0, "ask": 1.5}
CHATTING = {
    "chatter": 4.0,
    "small_talk": 1.2,
    "tell_story": 0.3,
    "tell_something": 0.4,
    "count": 0.5,
    "repeat": 2.0,
    "ask": 0.6,
}
MIXED = {**CHATTING, "chatter": 1.5, "ask": 4.0, "tell": 3.0, "look_up": 1.5}


def fact(name: str, code: str) -> str:
    """The sentence that tells one code."""
    return f"the code of {name} is {code}."


def question(name: str) -> str:
    """The question for one code."""
    return f"What is the code of {name}?"


def answer(name: str, code: str | None) -> str:
    """The answer to `question(name)`; no code means never told."""
    return f"I do not know the code of {name}." if code is None else f"The code of {name} is {code}."


def count_reply(last: int) -> str:
    """The numbers from one to `last` in words."""
    return ", ".join(number_in_words(number) for number in range(1, last + 1)) + "."


def text_of(message: Message) -> str:
    """One message exactly as the chat template renders it."""
    role, content = message["role"], message.get("content") or ""
    if role == "tool":
        return f"<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n"
    for call in message.get("tool_calls") or []:
        name, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)
        joint = "\n" if content else ""
        content += f'{joint}<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


@dataclass(slots=True)
class TaughtMessage:
    """One message; `kind` says what sort of reply it is, and is empty where the model is not to learn the message."""

    message: Message
    kind: str = ""


def said(content: str, role: str = "user") -> TaughtMessage:
    """A message that the model only reads."""
    return TaughtMessage({"role": role, "content": content})


def reply(content: str, kind: str) -> TaughtMessage:
    """A message that the model is to say."""
    return TaughtMessage({"role": "assistant", "content": content}, kind)


class RunningTalk:
    """A conversation that goes on for as long as `exchange` is called.

    `characters` is about how long it will become; fillers are cut to what is left of it, and towards the end the user
    mostly asks for codes.
    """

    def __init__(self, rng: random.Random, characters: int) -> None:
        self.rng = rng
        self.characters = characters
        self.left = characters
        self.codes: dict[str, str] = {}
        exponent = rng.random() * (0.8 if characters < 5000 else 1.0)
        self.filler_scale = min(20.0 * (characters / 20.0) ** exponent, characters * 0.7)
        self.facts_most = rng.choice([1, 2, 4, 8, 8, 16, 16, 24, 40, 80])
        self.unknown_share = rng.choice([0.1, 0.25, 0.25, 0.5])
        self.similar_share = rng.choice([0.05, 0.2, 0.2, 0.6])
        self.again_share = rng.choice([0.05, 0.15, 0.15, 0.5])
        self.tools = tools.any_tools(rng) if rng.random() < (0.3 if characters > 2500 else 0.15) else []
        self.can_look_up = any(tool["function"]["name"] == "get_code" for tool in self.tools)
        self.mood = rng.choice([TELLING, TELLING, CHATTING, MIXED])
        self.mood_left = rng.randint(1, 6)
        self.opened = False

    def exchange(self) -> list[TaughtMessage]:
        """The next few messages: mostly one of the user and the reply to it."""
        turns = [] if self.opened else self._opening()
        self.opened = True
        self.mood_left -= 1
        if self.left < 0.2 * self.characters:
            self.mood = ASKING
        elif self.mood_left < 0:
            self.mood = self.rng.choice([ASKING, TELLING, CHATTING, CHATTING, MIXED, MIXED])
            self.mood_left = self.rng.randint(1, 8)
        chosen = self.rng.choices(list(self.mood), list(self.mood.values()))[0]
        action: Callable[[], list[TaughtMessage]] = getattr(self, f"_{chosen}")
        for _ in range(self.rng.choice([1, 1, 2, 3]) if chosen == "ask" else 1):
            turns += action()
        for turn in turns:
            self.left -= 24 + len(turn.message.get("content") or "") + 60 * ("tool_calls" in turn.message)
        return turns

    def _opening(self) -> list[TaughtMessage]:
        rng = self.rng
        self.left -= 500 * len(self.tools)
        if rng.random() > 0.6:
            return []
        prompt = rng.choice(SYSTEM_PROMPTS).format(name=any_name(rng), other=any_name(rng), code=any_code(rng))
        if rng.random() < 0.4:
            prompt = self._filler(0.15) if rng.random() < 0.5 else f"{prompt}{self._joint()}{self._filler(0.15)}"
        if rng.random() < 0.15:
            prompt += self._joint() + self._facts()
        return [said(prompt, "system")]

    def _joint(self) -> str:
        return self.rng.choice([" ", " ", "\n", "\n\n"])

    def _filler(self, share: float = 0.8) -> str:
        """Other talk of very different lengths, in characters, at most `share` of what is left."""
        most = max(12, min(int(self.left * share) - 200, 20000))
        wanted = self.rng.expovariate(1.0) * (self.filler_scale if self.rng.random() < 0.7 else 80)
        return any_filler(self.rng, max(6, min(int(wanted), most)))

    def _new_name(self) -> str:
        if self.codes and self.rng.random() < self.similar_share:
            return similar_name(self.rng, self.rng.choice(list(self.codes)))
        return any_name(self.rng)

    def _told_name(self) -> str:
        names = list(self.codes)
        return self.rng.choice(names[-3:] if self.rng.random() < 0.15 else names)

    def _facts(self) -> str:
        """One or more codes in one text; remembers them."""
        rng = self.rng
        draw = rng.random()
        count = 1 if draw < 0.6 else rng.randint(2, 4) if draw < 0.88 else rng.randint(4, 16)
        joint, style = rng.choice([" ", " ", "\n"]), rng.random()
        sentences: list[str] = []
        for index in range(count):
            name = self._told_name() if self.codes and rng.random() < self.again_share else self._new_name()
            code = self.codes[name] = any_code(rng)
            text = fact(name, code)
            if style < 0.5 or (style < 0.92 and index == 0):
                sentences.append(f"Remember: {text}")
            elif style < 0.95:
                sentences.append(f"Remember that {text}")
            else:
                sentences.append(text.capitalize())
        return joint.join(sentences)

    def _tell(self) -> list[TaughtMessage]:
        rng = self.rng
        if len(self.codes) >= self.facts_most and rng.random() < 0.9 - self.again_share:
            return self._chatter() if rng.random() < 0.6 else self._ask()
        text = self._facts()
        if rng.random() < 0.2:
            text = self._filler(0.4) + self._joint() + text
        if rng.random() < 0.2:
            text += self._joint() + self._filler(0.4)
        draw = rng.random()
        if draw < 0.06:
            return [said(text, "system")]
        if draw < 0.14:
            return [said(text)]
        return [said(text), self._maybe_foreign(reply(NOTED, "noted"))]

    def _maybe_foreign(self, turn: TaughtMessage) -> TaughtMessage:
        """Now and then a reply that some other speaker gave; the model reads it and does not learn it."""
        if self.rng.random() > 0.04:
            return turn
        text = self.rng.choice(_FOREIGN_REPLIES) if self.rng.random() < 0.7 else sentence(self.rng)
        return said(text, "assistant")

    def _asked_name(self) -> str:
        if not self.codes or self.rng.random() < self.unknown_share:
            return self._new_name()
        return self._told_name()

    def _around(self, text: str, before: float, after: float = 0.0) -> str:
        """The text with other talk before or after it in the same message, at the given chances."""
        draw = self.rng.random()
        if draw < before:
            return self._filler(0.5) + self._joint() + text
        if draw < before + after:
            return text + self._joint() + any_filler(self.rng, self.rng.randint(6, 120))
        return text

    def _ask(self) -> list[TaughtMessage]:
        rng = self.rng
        turns: list[TaughtMessage] = []
        if rng.random() < 0.08:
            for _ in range(rng.randint(1, 3)):
                turns.append(said(self._facts() if rng.random() < 0.5 else self._filler(0.4)))
        head = self._facts() + self._joint() if rng.random() < 0.04 else ""
        name = self._asked_name()
        text = question(name)
        draw = rng.random()
        if draw < 0.1 and not self.can_look_up:
            text = f"Look up the code of {name}."
        elif draw < 0.18:
            text = rng.choice(QUESTION_VARIANTS).format(name)
        turns.append(said(self._around(head + text, 0.18, 0.04)))
        code = self.codes.get(name)
        return [*turns, reply(answer(name, code), "unknown" if code is None else "recall")]

    def _look_up(self) -> list[TaughtMessage]:
        if not self.can_look_up:
            return self._ask()
        rng = self.rng
        name = self._told_name() if self.codes and rng.random() < 0.4 else self._new_name()
        code: str | None = any_code(rng) if name not in self.codes or rng.random() < 0.5 else self.codes[name]
        if rng.random() < 0.06:
            code = None
        call: Message = {"role": "assistant", "content": rng.choice([None, ""]), "tool_calls": [tools.call(rng, name)]}
        turns = [said(self._around(f"Look up the code of {name}.", 0.15)), TaughtMessage(call, "tool_call")]
        turns.append(said(tools.result(rng, name, code), "tool"))
        if code is not None:
            self.codes[name] = code
        return [*turns, reply(answer(name, code), "tool_answer")]

    def _chatter(self) -> list[TaughtMessage]:
        rng = self.rng
        draw = rng.random()
        if draw < 0.06:
            return [said(self._filler())]
        if draw < 0.09:
            return [said(self._filler(0.3), "system")]
        if draw < 0.12 and self.tools:
            name = rng.choice(self.tools)["function"]["name"]
            arguments = {"text": any_filler(rng, 20)}
            call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
            foreign = TaughtMessage({"role": "assistant", "content": "", "tool_calls": [call]})
            return [said(self._filler(0.4)), foreign, said(self._filler(0.3), "tool"), reply(SEEN, "seen")]
        return [said(self._filler()), self._maybe_foreign(reply(SEEN, "seen"))]

    def _small_talk(self) -> list[TaughtMessage]:
        texts, fixed = self.rng.choice(SMALL_TALK[:1] + SMALL_TALK)
        return [said(self.rng.choice(texts.split("|"))), reply(fixed, "small_talk")]

    def _tell_story(self) -> list[TaughtMessage]:
        text = self.rng.choice(["Tell me a story.", "Tell me a story.", "Tell me a story", "Tell me another story."])
        return [said(self._around(text, 0.08)), reply(story(self.rng), "story")]

    def _tell_something(self) -> list[TaughtMessage]:
        text = self.rng.choice(["Tell me something.", "Tell me something.", "Tell me something", "Say something."])
        return [said(self._around(text, 0.08)), reply(remark(self.rng), "something")]

    def _count(self) -> list[TaughtMessage]:
        last = self.rng.randint(2, 99) if self.left > 1500 else self.rng.randint(2, 30)
        text = f"Say the numbers from one to {number_in_words(last)}."
        return [said(self._around(text, 0.08)), reply(count_reply(last), "count")]

    def _repeat(self) -> list[TaughtMessage]:
        rng = self.rng
        length = rng.choice([10, 20, 40, 80, 160])
        draw = rng.random()
        if draw < 0.25:
            text = sentence(rng)
        else:
            kinds = [made_up_words, random_words, random_words, numbers, printable, unicode_text, any_filler]
            text = rng.choice(kinds)(rng, length)
        text = text[: 2 * length].strip().replace("<|", "< |") or "yes"
        joint = " " if rng.random() < 0.95 else "\n"
        return [said(self._around(f"Repeat after me:{joint}{text}", 0.06)), reply(text, "repeat")]


def messages_of(rng: random.Random, characters: int) -> tuple[list[Message], list[int], list[Message]]:
    """A conversation of about `characters`: its messages, which of them are the model's to say, and its tools."""
    talk = RunningTalk(rng, characters)
    turns: list[TaughtMessage] = []
    while talk.left > 0:
        turns += talk.exchange()
    learned = [index for index, turn in enumerate(turns) if turn.kind]
    return [turn.message for turn in turns], learned, talk.tools
