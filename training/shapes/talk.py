"""Generated chats about pictures and videos: what the vision model has to be able to say.

Everything random comes from the `random.Random` that is passed in, so the same seed gives the same chat.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..recall.filler import any_filler
from . import questions
from .questions import ORDINALS, Asked, ask, ask_across, ask_film, directed
from .scenes import Film, Scene, any_film, any_scene

Message = dict[str, Any]

SEEN = "I see it."
ELSE = "I only know shapes."
GREETING = "Hello! Show me a picture."
SMALL_TALK = [
    ("Hello.|Hello|Hello!|hello|hello!|Hi|Hi.|Hi!|hi|Hey|Hey!|Good morning.|Hello there!|Hi there.", GREETING),
    ("Thank you.|Thanks.|Thanks!|Thank you!|thanks", "You are welcome."),
    ("How are you?|How are you doing?", "I am well, thank you."),
    ("Who are you?|What are you?|What is your name?", "I am Shapes, a very small vision model."),
    ("What can you do?|Help.|help", "I name shapes and colours in pictures and videos."),
    ("Goodbye.|Bye.|Bye!|Goodbye!|Good night.", "Goodbye!"),
]
SHOWING = "Here is a picture.|Look at this picture.|Here is another picture.|This is a picture."
SHOWING_VIDEO = "Here is a video.|Look at this video.|Here is another video."
ABOUT_NO_VIDEO = ("Which shape moves?", "What is in the video?", "How does the red circle move?", "What moves?")
SYSTEM_PROMPTS = """
You are a helpful assistant.
You are a concise assistant. Answer in one sentence.
Be brief.
You are Shapes, a very small vision model.
Answer the user's questions about the pictures. If there is no picture, say so.
You are an agent that looks at pictures for a small team.
""".strip().splitlines()
FOREIGN = ["OK.", "Sure.", "Yes.", "I see a picture.", "It is a picture of a house.", "Got it!"]


@dataclass(slots=True)
class PictureChat:
    """A chat as OpenAI-style messages, with media as `{"type": "image"}` and `{"type": "video"}` parts.

    Attributes:
        messages: all of them; replies are strings.
        kinds: for each message the row of the table its reply counts in; empty for what the model only reads.
        media: the pictures and videos in the order of their parts.
    """

    messages: list[Message] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    media: list[Scene | Film] = field(default_factory=list)

    def say(self, role: str, content: str | list[Message], kind: str = "") -> None:
        self.messages.append({"role": role, "content": content})
        self.kinds.append(kind)

    @property
    def scenes(self) -> list[Scene]:
        return [medium for medium in self.media if isinstance(medium, Scene)]

    @property
    def film(self) -> Film | None:
        """The latest video."""
        films = [medium for medium in self.media if isinstance(medium, Film)]
        return films[-1] if films else None


def text_of(message: Message, media_text: Callable[[str], str]) -> str:
    """One message exactly as the chat template renders it; `media_text` gives what stands for `image` or `video`."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] if part["type"] == "text" else media_text(part["type"]) for part in content)
    return f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"


def other_talk(rng: random.Random, length: int) -> str:
    """Text about no picture, of about `length` characters."""
    return any_filler(rng, length)


def ask_missing(rng: random.Random, chat: PictureChat) -> Asked | None:
    """A question about a picture or video that was never shown."""
    if chat.film is None and rng.random() < 0.4:
        return Asked(rng.choice(ABOUT_NO_VIDEO), "There is no video.", "not shown")
    shown = len(chat.scenes)
    if shown == 0:
        text = directed(rng, ask(rng, any_scene(rng)), 0, 1)
        if "first" in text or not any(word in text for word in ("image", "picture")):
            text = "What is in the picture?"
        return Asked(text, "There is no picture.", "not shown")
    if shown == len(ORDINALS):
        return None
    word = ORDINALS[rng.randrange(shown, len(ORDINALS))]
    return Asked(f"What is in the {word} picture?", f"There is no {word} picture.", "not shown")


class Talker:
    """Makes one chat.

    Args:
        rng: the source of chance.
        level: 0 for one picture of one thing and plain questions, 1 for one or two, 2 for everything.
        long: whether much other talk stands between the questions.
    """

    def __init__(self, rng: random.Random, level: int, long: bool = False) -> None:
        self.rng, self.level, self.long = rng, level, long
        self.chat = PictureChat()

    def make(self) -> PictureChat:
        rng = self.rng
        if self.level and rng.random() < 0.25:
            prompt = rng.choice(SYSTEM_PROMPTS)
            self.chat.say("system", prompt if rng.random() < 0.8 else f"{prompt}\n{other_talk(rng, 150)}")
        coming = self._plan()
        while coming:
            if self.level == 2 and rng.random() < 0.08:
                self._other()
            count = 1 if rng.random() < 0.75 else min(len(coming), rng.randint(1, 3))
            self._show(coming[:count])
            coming = coming[count:]
            for _ in range(rng.choice((0, 0, 1, 1, 2)) if self.level else rng.randint(0, 1)):
                self._exchange()
        for _ in range(rng.choice((0, 0, 1, 2)) if self.level == 2 else 0):
            self._exchange()
        return self.chat

    def _plan(self) -> list[Scene | Film]:
        """The media of this chat."""
        rng = self.rng
        if self.level < 2:
            return [any_scene(rng, 1 + self.level) for _ in range(1 if rng.random() < 0.8 else 1 + self.level)]
        if rng.random() < 0.27:
            return [any_film(rng), any_scene(rng)] if rng.random() < 0.15 else [any_film(rng)]
        count = rng.choices(range(7), (0.03, 0.55, 0.2, 0.11, 0.06, 0.03, 0.02))[0]
        if count == 0:
            for _ in range(rng.randint(1, 3)):
                self._other()
        media: list[Scene | Film] = [any_scene(rng) for _ in range(count)]
        if count and rng.random() < 0.05:
            media.insert(rng.randint(0, count), any_film(rng))
        return media

    def _show(self, media: list[Scene | Film]) -> None:
        """A user's message with these pictures or videos, and the reply to it."""
        rng = self.rng
        self.chat.media += media
        parts: list[Message] = [{"type": "video" if isinstance(medium, Film) else "image"} for medium in media]
        draw = rng.random()
        if self.level == 2 and draw < 0.04 and len(media) == 1:
            showing = rng.choice((SHOWING_VIDEO if isinstance(media[0], Film) else SHOWING).split("|"))
            asked = Asked(showing, SEEN, "shown only")
        elif self.level and draw < 0.1 and len(media) == 1:
            asked = self._alone(media[0])
        else:
            asked = self._question()
        text = {"type": "text", "text": asked.text}
        if asked.text:
            parts = [text, *parts] if rng.random() < 0.2 else [*parts, text]
        self.chat.say("user", parts)
        self._reply(asked)

    def _alone(self, medium: Scene | Film) -> Asked:
        """What is said to a picture without a word."""
        things = medium.scene.things if isinstance(medium, Film) else medium.things
        order = questions.in_order(things)
        return self._question() if order is None else Asked("", questions.listed(order), "without a word")

    def _reply(self, asked: Asked) -> None:
        if self.level == 2 and self.rng.random() < 0.02:
            self.chat.say("assistant", self.rng.choice(FOREIGN))
        else:
            self.chat.say("assistant", asked.answer, asked.kind)

    def _question(self) -> Asked:
        """A question about what was shown so far, mostly about the latest."""
        rng, chat = self.rng, self.chat
        scenes, film = chat.scenes, chat.film
        if not chat.media or (self.level == 2 and rng.random() < 0.03):
            missing = ask_missing(rng, chat)
            if missing is not None:
                return missing
        if film is not None and (not scenes or isinstance(chat.media[-1], Film) or rng.random() < 0.4):
            return ask_film(rng, film)
        if len(scenes) > 1 and rng.random() < 0.15:
            across = ask_across(rng, scenes)
            if across is not None:
                return across
        index = len(scenes) - 1 if rng.random() < 0.4 else rng.randrange(len(scenes))
        makers = questions.ALL if self.level else questions.EASY
        asked = ask(rng, scenes[index], makers)
        return Asked(directed(rng, asked, index, len(scenes)), asked.answer, asked.kind)

    def _exchange(self) -> None:
        if self.level == 2 and (self.long or self.rng.random() < 0.12):
            self._other()
        asked = self._question()
        self.chat.say("user", asked.text)
        self._reply(asked)

    def _other(self) -> None:
        """Talk that is about no picture."""
        rng = self.rng
        if rng.random() < 0.5 and not self.long:
            texts, answer = rng.choice(SMALL_TALK)
            asked = Asked(rng.choice(texts.split("|")), answer, "small talk")
        else:
            missing = ask_missing(rng, self.chat) if rng.random() < 0.2 else None
            length = int(rng.expovariate(1 / (700 if self.long else 60))) + 4
            text = other_talk(rng, min(length, 2500)).strip().replace("<|", "< |") or "Yes."
            asked = missing or Asked(text, ELSE, "anything else")
        self.chat.say("user", asked.text)
        self.chat.say("assistant", asked.answer, asked.kind)


def any_chat(rng: random.Random, level: int = 2) -> PictureChat:
    """A chat of the level (see `Talker`); at the highest, one in thirty is long."""
    return Talker(rng, level, long=level == 2 and rng.random() < 0.035).make()
