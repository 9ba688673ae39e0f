"""Models that make text, and models that make images. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...cluster.errors import InvalidRequest
from ..requests.backend import ListedModel, ServedModel

IMAGE_ROUTES = ("/v1/images/generations", "/v1/images/edits")
"""The routes that serve models that make images; no other route does."""


def check_makes_text(model: ServedModel) -> None:
    """
    Raises:
        InvalidRequest: the model makes images.
    """
    if model.info.images.family:
        message = f"the model {model.info.name!r} makes images: POST {' and '.join(IMAGE_ROUTES)} serve it"
        raise InvalidRequest(message, param="model")


def check_makes_images(model: ServedModel) -> None:
    """
    Raises:
        InvalidRequest: the model makes text.
    """
    if not model.info.images.family:
        message = (
            f"the model {model.info.name!r} makes no images: it is served by POST /v1/chat/completions and the other"
        )
        raise InvalidRequest(f"{message} routes of text", param="model")


def image_models(models: Iterable[ServedModel]) -> list[str]:
    """Returns the names of the models that make images."""
    return [model.info.name for model in models if model.info.images.family]


def first_of_text(listed: Sequence[ListedModel], models: Iterable[ServedModel]) -> ListedModel:
    """Returns the first model that makes text, as far as is known; the first one if none does.

    Args:
        listed: at least one.
        models: those that have been loaded.
    """
    others = image_models(models)
    return next((model for model in listed if model.name not in others), listed[0])
