"""Models that make text, models that make images, and models of speech; and models with hidden states. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...actors.protocol.replica_messages import ModelInfo
from ...actors.protocol.speech_messages import SPEAK, TRANSLATE, SpeechInfo
from ...cluster.errors import InvalidRequest, Unavailable
from ..requests.backend import ListedModel, ServedModel

TEXT_ROUTES = "POST /v1/chat/completions and the other routes of text"
IMAGE_ROUTES = "POST /v1/images/generations and /v1/images/edits"
LISTENING_ROUTES = "POST /v1/audio/transcriptions and /v1/audio/translations"
SPEAKING_ROUTE = "POST /v1/audio/speech"
"""The routes that serve models of a kind; no other route does."""


def does(info: ModelInfo) -> tuple[str, str]:
    """Returns what a model does, and the routes that serve it."""
    if info.images.family:
        return "makes images", IMAGE_ROUTES
    if info.speech.speaks:
        return "speaks", SPEAKING_ROUTE
    if info.speech.listens:
        return "writes down speech", LISTENING_ROUTES
    return "makes text", TEXT_ROUTES


def check_makes_text(model: ServedModel) -> None:
    """
    Raises:
        InvalidRequest: the model does something else.
    """
    if not model.info.makes_text:
        raise _other(model, "no text")


def check_pools(model: ServedModel, what: str, param: str) -> None:
    """
    Args:
        what: is wanted of the model's hidden states, in the plural.
        param: the field that asks for it.

    Raises:
        InvalidRequest: the model has none.
        Unavailable: that is not known yet.
    """
    info = model.info
    if info.proving:
        message = f"the self-test of {info.name!r} has not ended: {what} are not supported yet"
        raise Unavailable(message, retry_after_s=5.0)
    if info.embedding.refusal:
        message = f"the model {info.name!r} does not support {what}: {info.embedding.refusal}"
        raise InvalidRequest(message, param=param)


def check_makes_images(model: ServedModel) -> None:
    """
    Raises:
        InvalidRequest: the model does something else.
    """
    if not model.info.images.family:
        raise _other(model, "no images")


def check_does_speech(model: ServedModel, task: str) -> None:
    """
    Raises:
        InvalidRequest: the model does not speak, if the task is `speak`, or writes down no speech.
    """
    speech = model.info.speech
    if not (speech.speaks if task == SPEAK else speech.listens):
        raise _other(model, "no audio" if task == SPEAK else "no transcripts")


def _other(model: ServedModel, wanted: str) -> InvalidRequest:
    what, routes = does(model.info)
    message = f"the model {model.info.name!r} {what}, and makes {wanted}: it is served by {routes}"
    return InvalidRequest(message, param="model")


def image_models(models: Iterable[ServedModel]) -> list[str]:
    """Returns the names of the models that make images."""
    return [model.info.name for model in models if model.info.images.family]


def speech_models(models: Iterable[ServedModel], task: str) -> list[str]:
    """Returns the names of the models that speak, that write down speech, or that translate it."""
    return [model.info.name for model in models if _does(model.info.speech, task)]


def _does(speech: SpeechInfo, task: str) -> bool:
    if task == SPEAK:
        return speech.speaks
    return speech.listens and (task != TRANSLATE or speech.translates)


def first_of_text(listed: Sequence[ListedModel], models: Iterable[ServedModel]) -> ListedModel:
    """Returns the first model that makes text, as far as is known; the first one if none does.

    Args:
        listed: at least one.
        models: those that have been loaded.
    """
    others = {model.info.name for model in models if not model.info.makes_text}
    return next((model for model in listed if model.name not in others), listed[0])
