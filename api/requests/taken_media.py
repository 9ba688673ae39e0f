"""Which media a served model takes, and requests without the others.

Plain functions on plain data; large inputs belong in a worker thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...actors.model_files.media.processors import PictureProcessor
from ..media.prompt import is_refused
from ..media.sources import AudioSource
from ..text.model import TextModel
from .backend import ServedModel
from .conversation import no_audio_error
from .history import Message
from .left_out import LeftOut
from .unsupported_media import without_refused, without_unseen


def processor_of(text: TextModel, model: ServedModel) -> PictureProcessor | None:
    """Returns the processor of the media that a model takes; None if it takes none."""
    if model.info.blind or text.pictures is None:
        return None
    pictures = text.pictures.of_stills() if model.info.stills else text.pictures
    return pictures if may_take_audio(model) else pictures.without_audio()


def may_take_audio(model: ServedModel) -> bool:
    """Returns whether a model takes audio, or may do once its self-test has ended; until then its replica says so."""
    return model.info.audio or bool(model.info.proving)


def kinds_not_taken(processor: PictureProcessor | None) -> tuple[str, ...]:
    """Returns the kinds of media that a model does not take; videos may be shown to it as pictures."""
    if processor is None:
        return ("image", "video", "audio")
    return () if processor.audio is not None else ("audio",)


def has_audio(messages: Sequence[Message]) -> bool:
    """Returns whether there is audio in messages that are not the assistant's."""
    return _first_audio(messages) is not None


def without_audio(messages: Sequence[Message], left_out: LeftOut, model: ServedModel) -> Sequence[Message]:
    """Returns messages for a model that takes pictures and no audio: without audio, which a sentence replaces.

    Args:
        left_out: gets the kinds of the removed media.

    Raises:
        InvalidRequest: audio must not be left out, such as that of the newest message.
    """
    if model.omits_unseen:
        messages = without_unseen(messages, left_out, ("audio",))
    if (audio := _first_audio(messages)) is not None:
        raise no_audio_error(audio.where, model.info.no_audio)
    return messages


def transcript_taken(
    messages: Sequence[Message], processor: PictureProcessor | None, left_out: LeftOut
) -> Sequence[Message]:
    """Returns messages of a transcript without audio whose length the model's processor refuses. Slow.

    Args:
        left_out: gets the kinds of the removed media.
    """
    if processor is None or processor.audio is None:
        return messages
    return without_refused(messages, partial(is_refused, processor), left_out)


def _first_audio(messages: Sequence[Message]) -> AudioSource | None:
    for message in messages:
        if message["role"] != "assistant" and not isinstance(message["content"], str):
            for part in message["content"]:
                if isinstance(part, AudioSource):
                    return part
    return None
