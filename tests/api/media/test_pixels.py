"""Decoded files: the same pixels in every format, and one kind of error."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from satchel.actors.protocol.media_ids import picture_hash
from satchel.api.media.pixels import Shown, Undecodable, decode, measure

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")

AS_IT_IS = Shown()
PIXELS_MAX = 10**6
ORIENTATION = 0x0112


def packed(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def pixels_of(data: bytes, shown: Shown = AS_IT_IS) -> np.ndarray:
    picture = decode(data, shown, PIXELS_MAX)
    assert picture.hash == picture_hash(picture.width, picture.height, picture.pixels)
    return np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *further: bytes) -> bytes:
    """A PNG of any kind; `rows` each begin with a zero for their filter."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(further) + body


def few_colours(width: int, height: int, seed: int) -> Image.Image:
    """At most 16 colours, so that every format can hold it without loss."""
    numbers = np.random.default_rng(seed)
    palette = numbers.integers(0, 256, (16, 3), dtype=np.uint8)
    return Image.fromarray(palette[numbers.integers(0, 16, (height, width))])


def with_palette(image: Image.Image) -> Image.Image:
    colours = [colour for _, colour in image.getcolors() or []]
    indexed = Image.new("P", image.size)
    indexed.putpalette([part for colour in colours for part in colour])  # type: ignore[union-attr]
    places = {colour: index for index, colour in enumerate(colours)}
    flat = [places[tuple(int(part) for part in colour)] for colour in np.asarray(image).reshape(-1, 3)]
    indexed.putdata(flat)
    return indexed


def lossless(image: Image.Image) -> dict[str, bytes]:
    indexed = with_palette(image)
    return {
        "png": packed(image, "PNG"),
        "png with a palette": packed(indexed, "PNG"),
        "png with alpha": packed(image.convert("RGBA"), "PNG"),
        "webp": packed(image, "WEBP", lossless=True),
        "bmp": packed(image, "BMP"),
        "tiff": packed(image, "TIFF"),
        "tiff, compressed": packed(image, "TIFF", compression="tiff_lzw"),
        "gif": packed(indexed, "GIF"),
    }


@settings(max_examples=15, deadline=None)
@given(width=st.integers(1, 24), height=st.integers(1, 24), seed=st.integers(0, 2**32 - 1))
def test_one_picture_has_one_hash_and_another_pixel_another(width: int, height: int, seed: int) -> None:
    image = few_colours(width, height, seed)
    hashes = {form: decode(data, AS_IT_IS, PIXELS_MAX).hash for form, data in lossless(image).items()}
    assert set(hashes.values()) == {picture_hash(width, height, image.tobytes())}, hashes
    place = (seed % width, seed % height)
    red, green, blue = image.getpixel(place)  # type: ignore[misc]
    image.putpixel(place, (red ^ 1, green, blue))
    assert decode(packed(image, "PNG"), AS_IT_IS, PIXELS_MAX).hash not in hashes.values()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    ("orientation", "turned"),
    [
        (1, lambda a: a),
        (2, lambda a: a[:, ::-1]),
        (3, lambda a: a[::-1, ::-1]),
        (4, lambda a: a[::-1]),
        (5, lambda a: a.transpose(1, 0, 2)),
        (6, lambda a: np.rot90(a, -1)),
        (7, lambda a: a[::-1, ::-1].transpose(1, 0, 2)),
        (8, lambda a: np.rot90(a, 1)),
        (9, lambda a: a),
    ],
)
def test_a_picture_is_turned_as_its_camera_says(form: str, orientation: int, turned: Any) -> None:
    corners = np.zeros((16, 24, 3), np.uint8)
    corners[:8, :8], corners[8:, :8], corners[:8, 8:] = (250, 0, 0), (0, 250, 0), (0, 0, 250)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(form, {})
    shown = pixels_of(packed(Image.fromarray(corners), form, exif=exif, **options))
    assert np.abs(shown.astype(int) - turned(corners)).max(initial=0) <= 4


def test_metadata_that_cannot_be_read_turns_nothing() -> None:
    image = Image.new("RGB", (4, 2), (200, 0, 0))
    data = packed(image, "PNG", exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff garbage")
    assert pixels_of(data).shape == (2, 4, 3)


WHITE, RED, HALF = [255, 255, 255], [255, 0, 0], [255, 127, 127]


RED_PALETTE = chunk(b"PLTE", bytes([*RED, *RED, *RED]))
HOLES: dict[str, tuple[bytes, list[list[int]]]] = {
    "alpha": (
        packed(Image.fromarray(np.array([[[255, 0, 0, 0], [255, 0, 0, 128], [255, 0, 0, 255]]], np.uint8)), "PNG"),
        [WHITE, HALF, RED],
    ),
    "grey and alpha": (png(2, 1, 8, 4, bytes([0, 0, 0, 7, 255])), [WHITE, [7] * 3]),
    "palette of alphas": (
        png(3, 1, 8, 3, b"\0\0\1\2", RED_PALETTE, chunk(b"tRNS", bytes([0, 128, 255]))),
        [WHITE, HALF, RED],
    ),
    "palette with a hole": (png(2, 1, 8, 3, b"\0\0\1", RED_PALETTE, chunk(b"tRNS", b"\0")), [WHITE, RED]),
    "1 bit": (png(8, 1, 1, 0, b"\0\x55"), [[0] * 3, WHITE] * 4),
    "1 bit, a hole": (png(2, 1, 1, 0, b"\0\0", chunk(b"tRNS", b"\0\0")), [WHITE, WHITE]),
    "4 bits, a hole": (png(2, 1, 4, 0, b"\0\x93", chunk(b"tRNS", b"\0\x09")), [WHITE, [0x33] * 3]),
    "a colour": (
        png(2, 1, 8, 2, bytes([0, *RED, 1, 2, 3]), chunk(b"tRNS", struct.pack(">3H", 1, 2, 3))),
        [RED, WHITE],
    ),
    "a colour of 16 bits": (
        png(2, 1, 16, 2, b"\0" + struct.pack(">6H", 0x1234, 0, 0, *[5] * 3), chunk(b"tRNS", b"\x12\x34\0\0\0\0")),
        [WHITE, [0] * 3],
    ),
}


@pytest.mark.parametrize("kind", HOLES)
def test_what_is_transparent_is_white(kind: str) -> None:
    data, row = HOLES[kind]
    assert pixels_of(data)[0].tolist() == row


def test_sixteen_bits_are_scaled_and_not_cut() -> None:
    values = np.array([[0, 0x00FF, 0x0100, 0x80FF, 0xFFFF]], np.uint16)
    expected = [[value] * 3 for value in (0, 0, 1, 0x80, 0xFF)]
    colours = struct.pack(">15H", *np.repeat(values[0], 3).tolist())
    for form, data in {
        "png": packed(Image.fromarray(values), "PNG"),
        "tiff": packed(Image.fromarray(values), "TIFF"),
        "png in colour": png(5, 1, 16, 2, b"\0" + colours),
    }.items():
        assert pixels_of(data)[0].tolist() == expected, form
    hole = png(2, 1, 16, 0, b"\0" + struct.pack(">2H", 300, 0x8000), chunk(b"tRNS", struct.pack(">H", 300)))
    assert pixels_of(hole)[0].tolist() == [WHITE, [0x80] * 3]


def test_samples_of_32_bits_are_refused() -> None:
    for values in (np.zeros((2, 2), np.int32), np.zeros((2, 2), np.float32)):
        with pytest.raises(Undecodable, match="32 bits"):
            decode(packed(Image.fromarray(values), "TIFF"), AS_IT_IS, PIXELS_MAX)


def test_printers_colours_become_screens() -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    for form, options in (("JPEG", {"quality": 95}), ("TIFF", {})):
        assert np.abs(pixels_of(packed(image, form, **options)).astype(int) - [255, 0, 0]).max() <= 6


def test_of_several_pictures_in_a_file_the_first_is_taken() -> None:
    red, blue = (with_palette(Image.new("RGB", (4, 4), colour)) for colour in ("red", "blue"))
    for form in ("GIF", "TIFF", "PNG", "WEBP"):
        options = {"lossless": True} if form == "WEBP" else {}
        data = packed(red, form, save_all=True, append_images=[blue], **options)
        assert (pixels_of(data) == [255, 0, 0]).all(), form


@settings(max_examples=200, deadline=None)
@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    side=st.none() | st.just(512),
    limits=st.tuples(st.none() | st.integers(1, 10**6), st.none() | st.integers(1, 10**6)),
)
def test_a_shown_size_keeps_to_its_limits(
    width: int, height: int, side: int | None, limits: tuple[int | None, int | None]
) -> None:
    least, most = sorted(limits) if None not in limits else limits  # type: ignore[type-var]
    shown_width, shown_height = Shown(side, least, most).size(width, height)
    assert shown_width >= 1 and shown_height >= 1
    assert most is None or shown_width * shown_height <= most
    assert side is None or max(shown_width, shown_height) <= side
    if (side is None or max(width, height) <= side) and (least or 1) <= width * height <= (most or width * height):
        assert (shown_width, shown_height) == (width, height)
    if least is not None and most is None and side is None:
        assert shown_width * shown_height >= least


def test_the_hash_is_of_what_is_shown() -> None:
    image = few_colours(600, 300, seed=1)
    data = packed(image, "PNG")
    assert pixels_of(data, Shown(side=512)).shape == (256, 512, 3)
    assert pixels_of(data, Shown(pixels_max=45_000)).shape == (150, 300, 3)
    assert pixels_of(data, Shown(pixels_min=720_000)).shape == (600, 1200, 3)
    assert len({decode(data, shown, PIXELS_MAX).hash for shown in (AS_IT_IS, Shown(512), Shown(512, None, 9))}) == 3


def giant(form: str) -> bytes:
    """Returns a file whose header claims 10,000 x 10,000 pixels."""
    side = 10_000
    if form == "PNG":
        return png(side, side, 8, 2, b"\0" * 100)
    small = packed(
        Image.new("P" if form == "GIF" else "RGB", (4, 4)), form, **({"lossless": True} if form == "WEBP" else {})
    )
    if form == "GIF":
        return small[:6] + struct.pack("<HH", side, side) + small[10:]
    if form == "BMP":
        return small[:18] + struct.pack("<ii", side, side) + small[26:]
    if form == "JPEG":
        start = small.index(b"\xff\xc0")
        return small[: start + 5] + struct.pack(">HH", side, side) + small[start + 9 :]
    if form == "WEBP":
        start = small.index(b"VP8L") + 9
        return small[:start] + struct.pack("<I", (side - 1) | (side - 1) << 14) + small[start + 4 :]
    return packed(Image.new("1", (side, side)), "TIFF", compression="group4")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"])
def test_a_bomb_is_refused_by_its_header(form: str) -> None:
    data = giant(form)
    assert len(data) < 20_000
    for read in (measure, decode):
        with pytest.raises(Undecodable, match=r"media\.pixels_max"):
            read(data, AS_IT_IS, PIXELS_MAX)


def test_larger_bombs_are_refused_like_smaller_ones() -> None:
    with pytest.raises(Undecodable, match=r"^has more than 1000000 pixels \(media\.pixels_max\)$"):
        measure(png(2**31 - 1, 2**31 - 1, 8, 2, b""), AS_IT_IS, PIXELS_MAX)


def tiled(tile: int) -> bytes:
    """A TIFF of 16 x 16 grey pixels in one tile of `tile` x `tile`."""
    tags = {256: 16, 257: 16, 258: 8, 259: 1, 262: 1, 277: 1, 322: tile, 323: tile, 324: 200, 325: 256}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    return head.ljust(200, b"\0") + bytes([7] * 256)


def test_a_tile_larger_than_its_picture_is_refused() -> None:
    assert (pixels_of(tiled(16)) == 7).all()
    with pytest.raises(Undecodable, match=r"media\.pixels_max"):
        measure(tiled(2**16), AS_IT_IS, PIXELS_MAX)


def test_enlarging_has_the_same_limit() -> None:
    with pytest.raises(Undecodable, match="is to be enlarged"):
        measure(packed(Image.new("RGB", (4, 4)), "PNG"), Shown(pixels_min=2 * PIXELS_MAX), PIXELS_MAX)


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    data = packed(Image.new("RGB", (900, 900)), "JPEG", progressive=True)
    start = data.index(b"\xff\xda")
    scan = data[start : data.index(b"\xff", start + 2 + 12)]
    with pytest.raises(Undecodable, match="scans"):
        decode(data[:start] + scan * 3000 + data[start:], AS_IT_IS, PIXELS_MAX)


def test_what_stands_behind_a_jpeg_has_no_scans() -> None:
    """Phones put a video there."""
    chance = random.Random(11)
    film = b"".join(b"\xff\xda" + chance.randbytes(6) for _ in range(3000))
    assert pixels_of(packed(Image.new("RGB", (900, 900)), "JPEG", progressive=True) + film).shape == (900, 900, 3)


def test_a_picture_that_is_a_line_is_refused() -> None:
    for size in ((201, 1), (3, 601)):
        for read in (measure, decode):
            with pytest.raises(Undecodable, match="one side is more than 200 times the other"):
                read(packed(Image.new("1", size), "PNG"), AS_IT_IS, PIXELS_MAX)
    assert pixels_of(packed(Image.new("1", (200, 1)), "PNG")).shape == (1, 200, 3)


def test_text_that_inflates_is_not_unpacked() -> None:
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(64 * 2**20)))
    with pytest.raises(Undecodable, match="damaged"):
        decode(png(1, 1, 8, 0, b"\0\0", text), AS_IT_IS, PIXELS_MAX)


def test_pixels_past_the_end_are_not_unpacked() -> None:
    assert pixels_of(png(1, 1, 8, 0, b"\0\7" + bytes(64 * 2**20))).tolist() == [[[7, 7, 7]]]


def noisy() -> Image.Image:
    return Image.fromarray(np.random.default_rng(5).integers(0, 256, (40, 50, 3), dtype=np.uint8))


def test_half_a_file_is_no_picture() -> None:
    files = {**lossless(few_colours(50, 40, seed=3)), "jpeg": packed(noisy(), "JPEG")}
    for form, data in files.items():
        with pytest.raises(Undecodable):
            decode(data[: len(data) // 2], AS_IT_IS, PIXELS_MAX)
            pytest.fail(f"half of a {form} was read")
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def test_damaged_files_are_read_or_refused_and_nothing_else() -> None:
    chance = random.Random(7)
    files = [*lossless(few_colours(20, 10, seed=2)).values(), packed(noisy(), "JPEG")]
    refused = 0
    for _ in range(400):
        data = bytearray(chance.choice(files))
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(min(len(data), 200))] = chance.randrange(256)
        try:
            pixels_of(bytes(data[: chance.randint(1, len(data))] if chance.random() < 0.3 else data))
        except Undecodable:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    "data", [b"", b"GIF89a", b"<svg/>", b"%PDF-1.7", b"%!PS-Adobe-3.0 EPSF-3.0", b"P6 1 1 255 abc"]
)
def test_other_files_are_no_pictures(data: bytes) -> None:
    with pytest.raises(Undecodable):
        decode(data, AS_IT_IS, PIXELS_MAX)
