"""Small generated stories and sentences that the model tells by itself."""

from __future__ import annotations

import random

_HEROES = """
fox|owl|bear|rabbit|turtle|mouse|otter|crow|goat|cat|dog|horse|frog|duck|lion|robot|sailor|baker|farmer|pilot|tailor|wizard
""".strip().split("|")
_TRAITS = ["small", "brave", "quiet", "curious", "calm", "young", "clever", "kind", "tired", "lucky", "shy", "patient"]
_PLACES = ["a green valley", "a dark forest", "a warm village", "a stone tower", "a quiet harbor"]
_PLACES += ["a high mountain", "a little island", "an old mill", "a narrow street", "a wide meadow"]
_THINGS = ["lantern", "key", "map", "bell", "kite", "ring", "letter", "drum", "compass", "book", "feather", "mirror"]
_METALS = ["golden", "silver", "wooden", "broken", "shiny", "tiny", "heavy", "blue"]
_NAMES = ["Ada", "Ben", "Clara", "Dora", "Emil", "Flora", "Hugo", "Ivy"]
_NAMES += ["Leo", "Mia", "Nora", "Otto", "Ruby", "Sam", "Tom", "Zoe"]
_WEATHERS = ["rain", "snow", "wind", "fog", "thunder", "sunshine"]
_FRIENDS = ["heron", "squirrel", "beaver", "hedgehog", "swan", "badger", "donkey", "sparrow"]
_OPENINGS = [
    "Once upon a time there was a {trait} {hero} named {name}, who lived in {place}.",
    "Long ago, in {place}, there lived a {trait} {hero} called {name}.",
    "There once was a {trait} {hero} in {place}, and everybody called the {hero} {name}.",
]
_FINDS = [
    "One morning {name} found a {metal} {thing} under a tree.",
    "One evening, after the {weather}, {name} saw a {metal} {thing} on the road.",
    "On a cold day {name} opened an old box and there was a {metal} {thing} in it.",
]
_QUESTIONS = [
    "Nobody knew who had lost the {thing}, so {name} decided to look for its owner.",
    "{name} wanted to know whose {thing} it was, and began a long journey.",
    "The {thing} was not a toy, and {name} wished to bring it back to its owner.",
]
_MEETINGS = [
    "On the way {name} met a friendly {friend}, who was afraid of the {weather}.",
    "Near the river a {friend} sat alone and did not know the way home because of the {weather}.",
    "Behind a hill {name} heard a {friend} crying in the {weather}.",
]
_HELPS = [
    "{name} shared some bread with the {friend}, and they walked on together.",
    "{name} took the {friend} along, and the two of them sang all the way.",
    "{name} waited with the {friend} until the sky was clear again.",
]
_TURNS = [
    "Then the {friend} looked at the {thing} and laughed, because it belonged to the {friend}'s own grandmother.",
    "Then the {friend} told {name} about a kind old queen, who had been missing her {thing} for many years.",
    "Then they came to a little house, and over its door they saw a picture of the very same {thing}.",
]
_ENDINGS = [
    "When the {thing} was home again, there was a great feast, and {name} and the {friend} stayed friends for ever.",
    "So the {thing} went back to its place, and from that day on {name} was never lonely again.",
    "In the end the {thing} was returned with many thanks, and {name} went home happy and fell asleep at once.",
]
_PARTS = [_OPENINGS, _FINDS, _QUESTIONS, _MEETINGS, _HELPS, _TURNS, _ENDINGS]
_REMARKS = [
    "The {trait} {hero} keeps a {metal} {thing} near the window.",
    "A {friend} never walks far in the {weather}.",
    "In {place} there is a {metal} {thing} that nobody may touch.",
    "My friend {name} has seen a {trait} {hero} in {place}.",
    "After the {weather} comes a quiet evening.",
    "Every {hero} needs a {trait} friend.",
]


def _details(rng: random.Random) -> dict[str, str]:
    return {
        "hero": rng.choice(_HEROES), "trait": rng.choice(_TRAITS), "place": rng.choice(_PLACES),
        "thing": rng.choice(_THINGS), "metal": rng.choice(_METALS), "name": rng.choice(_NAMES),
        "weather": rng.choice(_WEATHERS), "friend": rng.choice(_FRIENDS),
    }  # fmt: skip


def story(rng: random.Random) -> str:
    """A story of seven sentences; always more than 80 words."""
    details = _details(rng)
    return " ".join(rng.choice(part).format(**details) for part in _PARTS)


def remark(rng: random.Random) -> str:
    """One or two sentences."""
    return " ".join(part.format(**_details(rng)) for part in rng.sample(_REMARKS, rng.randint(1, 2)))
