"""Callers' texts with the markers of pictures, beside real pictures: in every model family pictures are only where the
template puts them."""

from __future__ import annotations

import pytest
from PIL import Image

from satchel.actors.protocol.media_ids import media_tokens_in, picture_hash
from satchel.api.media.prompt import Medium
from satchel.api.media.sources import Picture, PictureSource
from satchel.api.requests.requests import Chat, ChatRequest, Past, prepare_chat
from satchel.api.text.continuation import StoredBranch
from satchel.api.text.model import TextModel, load_text_model
from tests.worlds.api.served_models import served_model
from tests.worlds.models.vision_families import FAMILIES, write_files

SERVED = served_model(context_tokens=10_000, vocabulary_size=10_000)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("families") / request.param
    write_files(folder, request.param, FAMILIES[request.param])
    return load_text_model(folder)


def shown() -> Medium:
    image = Image.new("RGB", (120, 90), "red")
    return Medium([Picture(120, 90, image.tobytes(), picture_hash(120, 90, image.tobytes()))])


def prepared(model: TextModel, said: str, past: Past | None = None, more: bool = False) -> Chat:
    part = {"type": "text", "text": said}
    messages = [
        {"role": "user", "content": [part, PictureSource("messages[0].content[1]", "/picture.png"), part]},
        {"role": "assistant", "content": said},
        {"role": "user", "content": said},
    ]
    if more:
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": said}]
    return prepare_chat(model, SERVED, ChatRequest(messages=messages), past, [shown()])  # type: ignore[arg-type]


def structure(model: TextModel, chat: Chat) -> tuple[list[int], list[int], int]:
    """Returns control tokens, tokens of pictures, and the number of pictures."""
    tokens = model.plain(chat.prompt)
    return (
        [token for token in tokens if token in model.tokenizer.controls.ids],
        media_tokens_in(chat.prompt),
        len(chat.media),
    )


def test_a_mark_in_a_text_is_no_picture(model: TextModel):
    assert model.pictures is not None and model.pictures.placeholder.strip() in model.tokenizer.controls.marks
    plain = structure(model, prepared(model, "x"))
    for said in (*sorted(model.tokenizer.controls.marks), " ".join(sorted(model.tokenizer.controls.marks))):
        chat = prepared(model, f"a {said} b")
        assert structure(model, chat) == plain
        assert model.tokenizer.decode(model.plain(chat.prompt)).count(f"a {said} b") == 4


def test_a_conversation_with_both_is_found_again(model: TextModel):
    said = f"a {model.pictures.placeholder} b" if model.pictures is not None else ""
    before = prepared(model, said)
    answer = f"{said}<|im_end|>"
    tokens = [*before.prompt, *model.tokenizer.encode(f"{model.tokenizer.controls.guarded(said)}<|im_end|>")]
    line = model.spelling.index(StoredBranch(before.text + answer, model.plain(tokens)))
    after = prepared(model, said, Past(lines=[line], media_tokens=[media_tokens_in(tokens)]), more=True)
    assert after.continuation is not None
    assert (after.continuation.kept_tokens, after.continuation.reason) == (len(tokens), "")
    assert structure(model, after) == structure(model, prepared(model, said, more=True))
