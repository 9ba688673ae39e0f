"""Questions about pictures and videos, and their one right answer each.

A question's text has `{p}` where the words go that say which picture is meant. `None` instead of a question means that
this one cannot be asked of this scene without being ambiguous.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .palette import COLOURS
from .scenes import SHAPES, Film, Scene, Thing, in_order, place_of

WAYS = {"right": "To the right.", "left": "To the left.", "up": "Up.", "down": "Down."}
NUMBERS = ("None", "One", "Two", "Three", "Four", "Five", "Six")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


@dataclass(frozen=True, slots=True)
class Asked:
    """One question with its answer; `kind` is the row of the table it counts in."""

    text: str
    answer: str
    kind: str


Maker = Callable[[random.Random, Scene], Asked | None]


def pick(rng: random.Random, usual: str, others: str = "") -> str:
    """The usual wording in half of the cases, else one of the others, which `|` divides."""
    return usual if not others or rng.random() < 0.5 else rng.choice(others.split("|"))


def with_article(name: str) -> str:
    return ("an " if name[0] in "aeiou" else "a ") + name


def sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."


def listed(things: list[Thing]) -> str:
    """`A red circle, a blue square and a green star.`, or `Nothing.`"""
    names = [with_article(thing.name) for thing in things]
    if not names:
        return "Nothing."
    return sentence(names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1])


def _matching(scene: Scene, name: str) -> list[Thing]:
    """The things that a name like `red circle`, `circle` or `red object` is about."""
    words = [word for word in name.split() if word != "object"]
    return [thing for thing in scene.things if all(word in (thing.colour, thing.shape) for word in words)]


def _any_name(rng: random.Random, scene: Scene) -> str:
    """A name that often, but not always, is that of something in the scene."""
    colour, shape = rng.choice(COLOURS), rng.choice(SHAPES)
    if scene.things and rng.random() < 0.75:
        thing = rng.choice(scene.things)
        colour = thing.colour if rng.random() < 0.8 else colour
        shape = thing.shape if rng.random() < 0.8 else shape
    return rng.choice((f"{colour} {shape}", f"{colour} {shape}", shape, f"{colour} object"))


def _the_one(rng: random.Random, scene: Scene) -> tuple[str, Thing | None] | None:
    """A name and what has it, at most one thing; None if several have it."""
    name = _any_name(rng, scene)
    found = _matching(scene, name)
    return None if len(found) > 1 else (name, found[0] if found else None)


def _no(name: str) -> str:
    return f"There is no {name}."


def ask_list(rng: random.Random, scene: Scene) -> Asked | None:
    """What is in the picture?"""
    things = in_order(scene.things)
    if things is None:
        return None
    others = "What do you see{p}?|Describe the picture.|What's in the picture?|What can you see{p}?|What is this?"
    others += "|What does the picture show?|What is shown{p}?|what is in the picture?|What is in the picture"
    return Asked(pick(rng, "What is in the picture?", others), listed(things), f"what is in it, {len(things)} objects")


def ask_count(rng: random.Random, scene: Scene) -> Asked:
    """How many objects are there?"""
    others = "How many shapes are there{p}?|How many objects do you see{p}?|How many things are in the picture?"
    text = pick(rng, "How many objects are there{p}?", others + "|How many objects are in the picture?")
    return Asked(text, NUMBERS[len(scene.things)] + ".", "how many")


def ask_count_of(rng: random.Random, scene: Scene) -> Asked:
    """How many circles are there?"""
    name = _any_name(rng, scene)
    text = pick(rng, f"How many {name}s are there{{p}}?", f"How many {name}s do you see{{p}}?")
    return Asked(text, NUMBERS[len(_matching(scene, name))] + ".", "how many of a kind")


def ask_colour(rng: random.Random, scene: Scene) -> Asked | None:
    """What colour is the circle?"""
    word = rng.choice(("colour", "color"))
    if len(scene.things) == 1 and rng.random() < 0.4:
        thing = scene.things[0]
        text = pick(rng, f"What {word} is it?", f"Which {word} is it?|What {word} is the object{{p}}?|What {word}?")
        return Asked(text, sentence(thing.colour), "colour")
    shape = rng.choice(scene.things).shape if scene.things and rng.random() < 0.9 else rng.choice(SHAPES)
    found = _matching(scene, shape)
    if len(found) > 1:
        return None
    text = pick(rng, f"What {word} is the {shape}{{p}}?", f"Which {word} is the {shape}{{p}}?")
    return Asked(text, sentence(found[0].colour) if found else _no(shape), "colour")


def ask_shape(rng: random.Random, scene: Scene) -> Asked | None:
    """Which shape is red?"""
    if len(scene.things) == 1 and rng.random() < 0.4:
        text = pick(rng, "What shape is it?", "Which shape is it?|What shape is this?|What shape is in the picture?")
        return Asked(text, sentence(with_article(scene.things[0].shape)), "shape")
    colour = rng.choice(scene.things).colour if scene.things and rng.random() < 0.9 else rng.choice(COLOURS)
    found = _matching(scene, colour)
    if len(found) > 1:
        return None
    others = f"What shape is the {colour} object{{p}}?|What is {colour}{{p}}?"
    text = pick(rng, f"Which shape is {colour}{{p}}?", others)
    return Asked(text, sentence(with_article(found[0].shape)) if found else _no(f"{colour} object"), "shape")


def ask_where(rng: random.Random, scene: Scene) -> Asked | None:
    """Where is the red circle?"""
    one = _the_one(rng, scene)
    if one is None:
        return None
    text = pick(rng, f"Where is the {one[0]}{{p}}?", f"Where in the picture is the {one[0]}?")
    if one[1] is None:
        return Asked(text, _no(one[0]), "where")
    place = place_of(one[1])
    if place is None:
        return None
    words = [word for word in place if word != "middle"]
    return Asked(text, f"At the {' '.join(words)}." if words else "In the middle.", "where")


def ask_size(rng: random.Random, scene: Scene) -> Asked | None:
    """Is the red circle large or small?"""
    one = _the_one(rng, scene)
    if one is None:
        return None
    others = f"How large is the {one[0]}{{p}}?|How big is the {one[0]}{{p}}?|Is the {one[0]} small or large{{p}}?"
    text = pick(rng, f"Is the {one[0]} large or small{{p}}?", others)
    if one[1] is None:
        return Asked(text, _no(one[0]), "how large")
    size = scene.size_of(one[1])
    return None if size is None else Asked(text, sentence(size), "how large")


def ask_whether(rng: random.Random, scene: Scene) -> Asked | None:
    """Is there a red circle? Is the circle red?"""
    if rng.random() < 0.6:
        name = _any_name(rng, scene)
        texts = f"Is there {with_article(name)} in the picture?|Do you see {with_article(name)}{{p}}?"
        text = pick(rng, f"Is there {with_article(name)}{{p}}?", texts)
        return Asked(text, "Yes." if _matching(scene, name) else "No.", "yes or no")
    if not scene.things:
        return None
    thing = rng.choice(scene.things)
    colour = thing.colour if rng.random() < 0.5 else rng.choice(COLOURS)
    shape = thing.shape if rng.random() < 0.5 else rng.choice(SHAPES)
    if rng.random() < 0.5:
        if len(_matching(scene, thing.shape)) > 1:
            return None
        return Asked(f"Is the {thing.shape} {colour}{{p}}?", "Yes." if thing.colour == colour else "No.", "yes or no")
    if len(_matching(scene, thing.colour)) > 1:
        return None
    text = f"Is the {thing.colour} object {with_article(shape)}{{p}}?"
    return Asked(text, "Yes." if thing.shape == shape else "No.", "yes or no")


def ask_beside(rng: random.Random, scene: Scene) -> Asked | None:
    """What is to the left of the blue square?"""
    things = in_order(scene.things)
    if things is None or len(things) != 2 or abs(things[0].x - things[1].x) < 0.15:
        return None
    thing = rng.choice(things)
    if things[0].name == things[1].name:
        return None
    side = rng.choice(("left", "right"))
    other = things[0] if side == "left" else things[1]
    answer = "Nothing." if other is thing else sentence(with_article(other.name))
    return Asked(f"What is to the {side} of the {thing.name}{{p}}?", answer, "what is beside it")


EASY: list[tuple[Maker, float]] = [(ask_list, 3.0), (ask_colour, 1.0), (ask_shape, 1.0)]
ALL: list[tuple[Maker, float]] = [
    (ask_list, 4.0),
    (ask_colour, 1.0),
    (ask_shape, 1.0),
    (ask_where, 1.6),
    (ask_size, 1.0),
    (ask_count, 1.2),
    (ask_count_of, 0.8),
    (ask_whether, 1.3),
    (ask_beside, 0.6),
]


def ask(rng: random.Random, scene: Scene, makers: list[tuple[Maker, float]] = ALL) -> Asked:
    """Some question about the scene."""
    while True:
        asked = rng.choices([maker for maker, _ in makers], [weight for _, weight in makers])[0](rng, scene)
        if asked is not None:
            return asked


def directed(rng: random.Random, asked: Asked, index: int, count: int) -> str:
    """The question's text, about picture `index` of the `count` shown so far; the latest needs no number."""
    text = asked.text
    latest = index == count - 1
    if latest and rng.random() < (0.8 if count == 1 else 0.5):
        text = text.replace("{p}", rng.choice(("", "", " in the picture", " in the image")))
        return text.replace("the picture", "the image") if rng.random() < 0.1 else text
    word = "last" if latest and rng.random() < 0.2 else ORDINALS[index]
    if "{p}" not in text and "the picture" not in text:
        return f"What is in the {word} picture?" if asked.kind.startswith("what is in it") else _about(text, word)
    text = text.replace("{p}", f" in the {word} picture").replace("the picture", f"the {word} picture")
    return text.replace("picture", "image") if rng.random() < 0.1 else text


def _about(text: str, word: str) -> str:
    """A question that names no picture, with the picture named in front."""
    return f"In the {word} picture, {text[0].lower()}{text[1:]}"


def ask_across(rng: random.Random, scenes: list[Scene]) -> Asked | None:
    """A question about all pictures so far: how many, or which of them shows something."""
    if rng.random() < 0.3:
        others = "How many images are there?|How many pictures have I shown you?|How many pictures do you see?"
        return Asked(pick(rng, "How many pictures are there?", others), NUMBERS[len(scenes)] + ".", "how many pictures")
    name = _any_name(rng, rng.choice(scenes))
    having = [index for index, scene in enumerate(scenes) if _matching(scene, name)]
    if len(having) > 1:
        return None
    answer = f"In the {ORDINALS[having[0]]} picture." if having else "In no picture."
    others = f"Which picture has {with_article(name)}?|In which image is {with_article(name)}?"
    return Asked(pick(rng, f"In which picture is {with_article(name)}?", others), answer, "in which picture")


def ask_film(rng: random.Random, film: Film) -> Asked:
    """A question about a video."""
    things = film.scene.things
    mover = None if film.mover is None else things[film.mover]
    kind = rng.random()
    if kind < 0.34:
        others = "What moves?|What is moving?|Which shape moves in the video?"
        others += "|Which object moves?|What moves in the video?"
        answer = "Nothing." if mover is None else f"The {mover.name}."
        return Asked(pick(rng, "Which shape moves?", others), answer, "video: which shape moves")
    if kind < 0.74:
        return _ask_way(rng, film, mover)
    if kind < 0.86:
        thing = rng.choice(things)
        others = f"Is the {thing.name} moving?|Does the {thing.name} move in the video?"
        text = pick(rng, f"Does the {thing.name} move?", others)
        return Asked(text, "Yes." if thing is mover else "No.", "video: does it move")
    if kind < 0.95:
        others = "What do you see in the video?|Describe the video.|What does the video show?"
        order = in_order(things) or things
        return Asked(pick(rng, "What is in the video?", others), listed(order), "video: what is in it")
    return Asked("How many objects are in the video?", NUMBERS[len(things)] + ".", "video: how many")


def _ask_way(rng: random.Random, film: Film, mover: Thing | None) -> Asked:
    thing = mover if mover is not None and rng.random() < 0.85 else rng.choice(film.scene.things)
    name = thing.name if rng.random() < 0.8 or _matching(film.scene, thing.shape) != [thing] else thing.shape
    others = f"Where does the {name} move?|In which direction does the {name} move?|How is the {name} moving?"
    if len(film.scene.things) == 1:
        others += "|How does it move?|Where does it go?"
    answer = WAYS[film.direction] if thing is mover else "It does not move."
    return Asked(pick(rng, f"How does the {name} move?", others), answer, "video: how it moves")
