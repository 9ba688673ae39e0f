"""What a picture or a video shows, and what is true of it, without a single pixel.

Lengths are shares of the picture's width, height or shorter side. What is asked about is unambiguous: between `left`
and `middle`, `small` and `large`, `first` and `second from the left` lies a gap, and what lies in a gap is not asked.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from .palette import COLOURS, Rgb, any_ground, any_shade

SHAPES = ("circle", "square", "triangle", "star")
SMALL, LARGE = 0.28, 0.46  # of the shorter side: small up to the one, large from the other on
NEAR, FAR = 0.30, 0.70  # left of the first is left, right of the second is right
MIDDLE = (0.41, 0.59)
SAME_COLUMN, OTHER_COLUMN = 0.05, 0.13  # of the width: side by side in the list only from the second on
LEAST_PIXELS = 15  # no shape is smaller, or nobody could tell which it is
TRAVEL = 0.28  # of the way across: what moves goes at least so far
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
_SIDES = (64, 80, 96, 100, 112, 128, 150, 160, 192, 200, 224, 240, 256, 300, 320, 336, 384, 400, 448)


@dataclass(frozen=True, slots=True)
class Thing:
    """One shape.

    Attributes:
        x, y: the middle of its box, as shares of the picture's width and height.
        size: the longer side of its box, in pixels.
        stretch: its box's width by its height.
        turn: degrees.
        slimness: how deep a star's notches are, or how a triangle leans; 0 to 1.
        rim: the colour of its thin outline, if it has one.
    """

    colour: str
    shape: str
    rgb: Rgb
    x: float
    y: float
    size: float
    stretch: float = 1.0
    turn: float = 0.0
    slimness: float = 0.5
    rim: Rgb | None = None

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, slots=True)
class Look:
    """How a scene is drawn: the ground, its second colour or noise, the edges, and how it is stored."""

    ground: Rgb
    fade: Rgb | None = None
    fade_turn: int = 0
    noise: float = 0.0
    soft: bool = False
    blur: float = 0.0
    kind: str = "png"
    quality: int = 90
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Scene:
    """One picture."""

    width: int
    height: int
    look: Look
    things: list[Thing] = field(default_factory=list)

    @property
    def side(self) -> int:
        return min(self.width, self.height)

    def size_of(self, thing: Thing) -> str | None:
        """`large`, `small` or, between them, None."""
        share = thing.size / self.side
        return "large" if share >= LARGE else "small" if share <= SMALL else None


@dataclass(frozen=True, slots=True)
class Film:
    """A short video: the things at its beginning, and where one of them goes.

    Attributes:
        times: the second of every frame.
        mover: which of the things moves; None for none.
        direction: where to, one of `DIRECTIONS`.
        travel: how far, as a share of the width or height.
    """

    scene: Scene
    times: list[float]
    mover: int | None
    direction: str
    travel: float

    def frames(self) -> list[Scene]:
        """The scene at each of the times."""
        if self.mover is None:
            return [self.scene] * len(self.times)
        across, down = DIRECTIONS[self.direction]
        shown = []
        for index in range(len(self.times)):
            way = self.travel * index / (len(self.times) - 1)
            things = list(self.scene.things)
            thing = things[self.mover]
            things[self.mover] = replace(thing, x=thing.x + across * way, y=thing.y + down * way)
            shown.append(replace(self.scene, things=things))
        return shown


def place_of(thing: Thing) -> tuple[str, str] | None:
    """(top, middle or bottom; left, middle or right), or None for what lies between two of them."""

    def part(share: float, names: tuple[str, str, str]) -> str | None:
        if share <= NEAR:
            return names[0]
        if share >= FAR:
            return names[2]
        return names[1] if MIDDLE[0] <= share <= MIDDLE[1] else None

    down, across = part(thing.y, ("top", "middle", "bottom")), part(thing.x, ("left", "middle", "right"))
    return None if down is None or across is None else (down, across)


def in_order(things: list[Thing]) -> list[Thing] | None:
    """From left to right, those above each other from top to bottom; None if that is not clear."""
    columns: list[list[Thing]] = []
    for thing in sorted(things, key=lambda thing: thing.x):
        if columns and thing.x - columns[-1][0].x <= SAME_COLUMN:
            columns[-1].append(thing)
        elif not columns or thing.x - columns[-1][-1].x >= OTHER_COLUMN:
            columns.append([thing])
        else:
            return None
    return [thing for column in columns for thing in sorted(column, key=lambda thing: thing.y)]


def any_look(rng: random.Random, plain: bool) -> Look:
    """A ground, edges and a file format; `plain` for hard edges on white in a PNG."""
    if plain:
        return Look((255, 255, 255), seed=rng.getrandbits(31))
    ground, kind = any_ground(rng), rng.random()
    return Look(
        ground,
        fade=any_ground(rng) if kind < 0.15 else None,
        fade_turn=rng.choice((0, 90, 180, 270)),
        noise=rng.uniform(2, 14) if kind > 0.85 else 0.0,
        soft=rng.random() < 0.5,
        blur=rng.uniform(0.4, 1.2) if rng.random() < 0.12 else 0.0,
        kind=rng.choices(("png", "jpeg", "webp"), (0.55, 0.33, 0.12))[0],
        quality=rng.randint(50, 95),
        seed=rng.getrandbits(31),
    )


def any_sides(rng: random.Random, most: int = 448) -> tuple[int, int]:
    """Width and height in pixels; three in five pictures are square, a few are larger than 448."""
    if most == 448 and rng.random() < 0.02:
        return rng.randint(449, 1024), rng.randint(449, 1024)
    sides = [side for side in _SIDES if side <= most]

    def side() -> int:
        if rng.random() < 0.5:
            return min(rng.choice(sides), rng.choice(sides)) if rng.random() < 0.5 else rng.choice(sides)
        return int(64 * (most / 64) ** rng.random())

    width = side()
    if rng.random() < 0.6:
        return width, width
    height = max(64, min(most, int(width * 2 ** rng.uniform(-1.1, 1.1))))
    return width, height


def any_thing(rng: random.Random, scene: Scene, share: float, plain: bool, kind: tuple[str, str] | None) -> Thing:
    """A thing of that share of the shorter side, somewhere inside the picture or, rarely, a little over its border."""
    colour, shape = kind or (rng.choice(COLOURS), rng.choice(SHAPES))
    size = max(LEAST_PIXELS, share * scene.side)
    over = 0.08 if rng.random() < 0.06 else 0.0
    margin_x, margin_y = size * (0.5 - over) / scene.width, size * (0.5 - over) / scene.height
    x, y = rng.uniform(margin_x, 1 - margin_x), rng.uniform(margin_y, 1 - margin_y)
    if rng.random() < 0.15:
        x = rng.choice((margin_x, 0.5, 1 - margin_x))
    if rng.random() < 0.15:
        y = rng.choice((margin_y, 0.5, 1 - margin_y))
    turned = not plain and rng.random() < 0.35
    return Thing(
        colour,
        shape,
        any_shade(rng, colour),
        x,
        y,
        size,
        stretch=rng.uniform(0.92, 1.08) if rng.random() < 0.3 else 1.0,
        turn=rng.uniform(0, 360) if turned else 0.0,
        slimness=rng.random(),
        rim=None if plain or rng.random() < 0.92 else rng.choice(((0, 0, 0), (90, 90, 90), (255, 255, 255))),
    )


def _clear(scene: Scene, one: Thing, other: Thing) -> bool:
    """Whether the boxes of two things do not touch."""
    room = (one.size + other.size) / 2 + max(2.0, 0.02 * scene.side)
    return abs(one.x - other.x) * scene.width > room or abs(one.y - other.y) * scene.height > room


def any_scene(rng: random.Random, most_things: int = 4, sides: tuple[int, int] | None = None) -> Scene:
    """A scene of one thing up to `most_things`, rarely of none; pictures of one are the most frequent."""
    plain = rng.random() < 0.15
    width, height = sides or (rng.choice(((224, 224), (256, 256), (512, 512))) if plain else any_sides(rng))
    scene = Scene(width, height, any_look(rng, plain))
    count = rng.choices(range(5), (0.03, 0.44, 0.26, 0.15, 0.12))[0]
    count = min(count, most_things)
    while len(scene.things) < count:
        scene = replace(scene, things=_things(rng, scene, count, plain))
    return scene


def _things(rng: random.Random, scene: Scene, count: int, plain: bool) -> list[Thing]:
    """Up to `count` things clear of each other; usually in an order that can be told."""
    largest = (0.95, 0.95, 0.52, 0.42, 0.36)[count]
    things: list[Thing] = []
    column: float | None = None
    for _ in range(60):
        if len(things) == count:
            break
        share = rng.uniform(0.13, SMALL) if rng.random() < 0.45 else rng.uniform(0.2, largest)
        kind = (things[-1].colour, things[-1].shape) if things and rng.random() < 0.05 else None
        thing = any_thing(rng, scene, share, plain, kind)
        if column is not None and rng.random() < 0.3:
            thing = replace(thing, x=min(1.0, max(0.0, column + rng.uniform(-0.01, 0.01))))
        ordered = in_order([*things, thing]) is not None or rng.random() < 0.05
        if ordered and all(_clear(scene, thing, other) for other in things):
            things.append(thing)
            column = thing.x
    return things


def any_film(rng: random.Random) -> Film:
    """Four to sixteen frames with one or two things, of which one moves, or rarely none."""
    width, height = any_sides(rng, 320)
    plain = rng.random() < 0.15
    look = replace(any_look(rng, plain), noise=0.0)
    direction = rng.choice(list(DIRECTIONS))
    count = 1 if rng.random() < 0.45 else 2
    while True:
        scene = Scene(width, height, look)
        things = [any_thing(rng, scene, rng.uniform(0.16, 0.42), plain, None) for _ in range(count)]
        film = _set_moving(rng, replace(scene, things=things), direction)
        if film is not None and in_order(things) is not None and len({thing.name for thing in things}) == count:
            return film


def _set_moving(rng: random.Random, scene: Scene, direction: str) -> Film | None:
    """A film of this scene, or None if its thing has no way to go or would meet the other."""
    times = _times(rng)
    mover = rng.randrange(len(scene.things))
    thing = scene.things[mover]
    across, down = DIRECTIONS[direction]
    half = thing.size / 2 / (scene.width if across else scene.height)
    place = thing.x if across else thing.y
    room = (1 - half - place) if across + down > 0 else place - half
    if room < TRAVEL:
        return None
    film = Film(scene, times, mover, direction, rng.uniform(TRAVEL, room))
    others = [other for other in scene.things if other is not thing]
    for frame in film.frames():
        if not all(_clear(scene, frame.things[mover], other) for other in others):
            return None
    return replace(film, mover=None) if rng.random() < 0.06 else film


def _times(rng: random.Random) -> list[float]:
    """The seconds of 4 to 16 frames: evenly, at one of the usual rates."""
    count = rng.choice((4, 4, 5, 6, 6, 8, 8, 8, 10, 12, 16))
    rate = rng.choice((1.0, 2.0, 2.0, 2.0, 3.0, 4.0, 5.0, 8.0, 10.0)) if rng.random() < 0.8 else rng.uniform(0.5, 12)
    return [index / rate for index in range(count)]
