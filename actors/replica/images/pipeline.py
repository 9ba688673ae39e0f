"""A model of mlx-vlm that makes images: how it is loaded, its limits, and one image, with pauses between its steps.

mlx-vlm's pipelines compute all steps of an image in one call, each ended by one `mx.eval`. `steps_told` (`patches.py`)
tells of them. What is called there may end the image by an exception.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn import Module
from mlx_vlm.generate.edit_image import ImageEditRequest
from mlx_vlm.generate.image import ImageGenerationRequest
from PIL import Image

from ....cluster.errors import InvalidRequest, ModelLoadError
from ...model_files.foreign_code import own_code_only
from ...model_files.source import first_sentence
from ...patches import IMAGE_COMPONENTS, components_shared, image_model_classes, prompts_forgotten, steps_told
from ...protocol.replica_messages import ImageInfo, ImageRequest, Pixels
from ..jobs.engine import Paused

logger = logging.getLogger(__name__)

SIDES_MIN = {"z_image": 16, "ernie_image": 16, "moss_image": 16, "mage_flow": 512}
"""The least width and height of families, in pixels, as their pipelines check them."""

USUAL_SIDE_MIN = 256
MULTIPLE = 16
TRIED_STEPS = (1, 2)
_EXTRA = {"upsample_prompt": False}
"""Without it, FLUX.3 downloads a model that rewrites prompts."""

_LOADED_WITH: Mapping[str, dict[str, Any]] = MappingProxyType({"ernie_image": {"use_prompt_enhancer": False}})
"""How families are loaded besides. ERNIE-Image would rewrite prompts, during which an image cannot be ended."""

_ERRORS = (Exception, SystemExit)


@dataclass(frozen=True)
class FinishedImage:
    """A finished image, and the number of its prompt's tokens."""

    pixels: Pixels
    prompt_tokens: int


class ImagePipeline:
    """A loaded model. Use it on one thread.

    Attributes:
        info: what it can do.
        models: mlx-vlm's model by task, `generate` or `edit`; None if there is none.
    """

    def __init__(self, generator: Any, editor: Any, info: ImageInfo) -> None:
        self.info = info
        self.models = {"generate": generator, "edit": editor}

    @classmethod
    def load(cls, folder: Path, source: str) -> ImagePipeline:
        """Loads the model in a folder, with all weights in memory, and makes the smallest image with it.

        Raises:
            ModelLoadError: it is no model that mlx-vlm makes images with, a file is damaged, or it needs code in its
                folder.
        """
        with own_code_only(source, folder, trusted=False):
            return cls._loaded(folder, source)

    @classmethod
    def _loaded(cls, folder: Path, source: str) -> ImagePipeline:
        try:
            made, edited = image_model_classes(str(folder))
        except _ERRORS as error:
            raise ModelLoadError(f"{source} cannot be loaded: {first_sentence(error)}") from error
        if made is None and edited is None:
            raise ModelLoadError(
                f"{source} cannot be loaded: its layout is that of a model that makes images, of a kind that mlx-vlm "
                "does not have here, or files are missing"
            )
        try:
            editor = edited.from_model_id(str(folder), **_options(edited, folder)) if edited is not None else None
            # One class may do both.
            if made is edited:
                generator = editor
            else:
                generator = made.from_model_id(str(folder), **_options(made, folder)) if made is not None else None
            return cls._tried(generator, editor)
        except ModelLoadError:
            raise
        except _ERRORS as error:
            raise ModelLoadError(f"{source} cannot be loaded: {first_sentence(error)}") from error

    @classmethod
    def _tried(cls, generator: Any, editor: Any) -> ImagePipeline:
        """Tries which steps are possible, by the smallest image."""
        first = editor if editor is not None else generator
        family = str(first.family)
        pipeline = cls(generator, editor, ImageInfo(family, side_min=SIDES_MIN.get(family, USUAL_SIDE_MIN)))
        side = pipeline.info.side_min
        request = ImageRequest("", "", "a", side, side, 0, guidance=None)
        found: dict[str, Any] = {"multiple": MULTIPLE}
        # Edits first: their VAE has an encoder too.
        if editor is not None and (fewest := pipeline.fewest_steps(_grey(request))) is not None:
            usual = editor.default_sampling
            found |= {"edits": True, "edit_steps": usual.steps, "edit_guidance": float(usual.guidance)}
            found |= {"edit_steps_min": fewest}
            if generator is not None and generator is not editor:
                components_shared(generator.pipeline, editor.pipeline)
        if generator is not None and (fewest := pipeline.fewest_steps(request)) is not None:
            usual = generator.default_sampling
            found |= {"generates": True, "steps": usual.steps, "guidance": float(usual.guidance)}
            found |= {"steps_min": fewest}
        pipeline.info = replace(pipeline.info, **found)
        if not (pipeline.info.generates or pipeline.info.edits):
            raise ModelLoadError(f"the {family} model makes no image")
        pipeline.evaluate()
        return pipeline

    def fewest_steps(self, request: ImageRequest) -> int | None:
        """Returns the fewest steps with which an image is made; None if the model refuses all that are tried."""
        for steps in TRIED_STEPS:
            try:
                self.make(replace(request, steps=steps), lambda step: None)
                return steps
            except InvalidRequest as error:
                # Such as an edit model that does not generate.
                logger.info("%s is not possible with %d steps: %s", _task(request), steps, error.message)
        return None

    def evaluate(self) -> None:
        """Evaluates all weights: those that the smallest image did not use are lazy."""
        for model in filter(None, self.models.values()):
            parts = [getattr(model.pipeline, name, None) for name in IMAGE_COMPONENTS]
            mx.eval([part.parameters() for part in parts if isinstance(part, Module)])
        mx.clear_cache()

    def steps_of(self, request: ImageRequest) -> int:
        """Returns how many steps the request asks for."""
        if request.steps is not None:
            return request.steps
        return self.info.edit_steps if request.images else self.info.steps

    def make(
        self, request: ImageRequest, paused: Paused, partial: Callable[[Pixels], None] | None = None
    ) -> FinishedImage:
        """Makes an image.

        Args:
            paused: called between steps.
            partial: called with each partial image.

        Raises:
            InvalidRequest: the pipeline does not take the request.
        """
        with ExitStack() as opened:
            paths = _written(request.images, opened)
            watched = _Watched(self, request, paths, paused, partial)
            try:
                made = watched.run()
            except (ValueError, TypeError) as error:
                if watched.evaluations:
                    raise
                # Pipelines check what they are asked for before they compute.
                raise InvalidRequest(f"the model does not take this: {first_sentence(error)}") from error
            finally:
                for model in filter(None, self.models.values()):
                    prompts_forgotten(model.pipeline)
        return FinishedImage(_pixels(made.array), int(made.prompt_tokens or 0))


class _Watched:
    """One image as it is made."""

    def __init__(
        self,
        pipeline: ImagePipeline,
        request: ImageRequest,
        paths: Sequence[str],
        paused: Paused,
        partial: Callable[[Pixels], None] | None,
    ) -> None:
        self._pipeline, self._request, self._paths = pipeline, request, paths
        self._model = pipeline.models[_task(request)]
        self._paused, self._partial = paused, partial
        self._steps, self._called, self._shows = 0, False, False
        self.evaluations = 0
        self._shown = _shown_after(pipeline.steps_of(request), request.partial_images) if partial is not None else set()

    def run(self) -> Any:
        """Returns mlx-vlm's result."""
        with steps_told(self._model.pipeline, self._note_call, self._note_evaluation).for_now():
            return _made(self._model, self._request, self._paths)

    def _note_call(self) -> None:
        self._called = not self._shows

    def _note_evaluation(self, arrays: Sequence[Any]) -> None:
        if self._shows:
            # Of the partial image, not of this one.
            self._paused(self._steps)
            return
        self.evaluations += 1
        is_step, self._called = self._called, False
        self._steps += is_step
        if is_step and self._steps in self._shown and self._partial is not None:
            latents = next((each for each in arrays if isinstance(each, mx.array)), None)
            if latents is not None and (shown := self._as_image(latents)) is not None:
                self._partial(shown)
        self._paused(self._steps)

    def _as_image(self, latents: mx.array) -> Pixels | None:
        """Returns latents as an image, by the pipeline's own decoder: another image is made in the fewest steps, whose
        latents are replaced by these. None if the pipeline's step ends with other arrays."""
        info, replaced = self._pipeline.info, False

        def replace_latents(arrays: Sequence[Any]) -> None:
            nonlocal replaced
            first = next((each for each in arrays if isinstance(each, mx.array)), None)
            if first is not None and (first.shape, first.dtype) == (latents.shape, latents.dtype):
                # In place: the pipeline goes on with this array.
                first[...] = latents
                replaced = True

        fewest, self._shows = info.edit_steps_min if self._request.images else info.steps_min, True
        try:
            with steps_told(self._model.pipeline, lambda: None, replace_latents).for_now():
                made = _made(self._model, replace(self._request, steps=fewest), self._paths)
        finally:
            self._shows = False
        return _pixels(made.array) if replaced else None


def _made(model: Any, request: ImageRequest, paths: Sequence[str]) -> Any:
    """Has mlx-vlm make an image, and returns its result."""
    how: dict[str, Any] = {
        "seed": request.seed,
        "steps": request.steps,
        "width": request.width,
        "height": request.height,
        "guidance": request.guidance,
        "extra": dict(_EXTRA),
    }
    if request.images:
        return model.edit(ImageEditRequest(request.prompt, tuple(paths), **how))
    return model.generate(ImageGenerationRequest(request.prompt, **how))


def _options(kind: Any, folder: Path) -> dict[str, Any]:
    """Returns how mlx-vlm's class loads the model in a folder."""
    options: dict[str, Any] = {"model_path": folder, "download": False}
    # Without eviction, or weights would be read from the disk again for each image.
    options |= {"evict_text_encoder": False, "evict_transformer": False}
    return options | _LOADED_WITH.get(kind.model_type, {})


def _task(request: ImageRequest) -> str:
    return "edit" if request.images else "generate"


def _grey(request: ImageRequest) -> ImageRequest:
    """Returns the request as an edit of a grey image."""
    data = b"\x80" * (3 * request.width * request.height)
    return replace(request, images=[Pixels(request.width, request.height, data)])


def _shown_after(steps: int, count: int) -> set[int]:
    """Returns after which steps `count` partial images are shown: evenly, and not after the last step."""
    return {round(steps * (index + 1) / (count + 1)) for index in range(count)} - {0, steps}


def _written(images: Sequence[Pixels], opened: ExitStack) -> list[str]:
    """Writes images into files, which pipelines read, and returns their paths. Closing `opened` removes them."""
    if not images:
        return []
    folder = Path(opened.enter_context(TemporaryDirectory(prefix="satchel-")))
    paths = []
    for number, image in enumerate(images):
        path = folder / f"{number}.png"
        mode = "RGBA" if image.channels == 4 else "RGB"
        Image.frombytes(mode, (image.width, image.height), image.data).save(path, compress_level=0)
        paths.append(str(path))
    return paths


def _pixels(array: mx.array) -> Pixels:
    """Returns an image, `(height, width, channels)` uint8, as a message."""
    pixels = np.array(array)
    height, width, channels = pixels.shape
    return Pixels(width, height, pixels.tobytes(), channels)
