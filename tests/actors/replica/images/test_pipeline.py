"""mlx-vlm's pipelines make the same images here as there, and can be ended between two steps."""

from __future__ import annotations

import inspect
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_vlm.generate.edit_image import ImageEditRequest, load_image_edit_model
from mlx_vlm.generate.image import ImageGenerationRequest, generate_image, load_image_generation_model
from mlx_vlm.models.ernie_image.pipeline import ErnieImagePipeline
from PIL import Image

from satchel.actors.model_files.image_folders import has_image_layout
from satchel.actors.model_files.source import EMBEDDED
from satchel.actors.pool.needs import weights_bytes
from satchel.actors.protocol.replica_messages import ImageRequest, Pixels
from satchel.actors.replica.images.pipeline import ImagePipeline
from satchel.api.cli.models.choosing import source_of
from satchel.cluster.config.config import Model
from satchel.cluster.errors import InvalidRequest, ModelLoadError

REQUEST = ImageRequest("r", "m", "a red cube on the left", 48, 32, 7, steps=3, guidance=2.0)
FAMILIES = ("z_image", "moss_image")


def array(pixels: Pixels) -> np.ndarray:
    return np.frombuffer(pixels.data, np.uint8).reshape(pixels.height, pixels.width, pixels.channels)


def ignore(step: int) -> None:
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_is_that_of_mlx_vlm_to_the_bit(family: str, image_folders: dict[str, Path], pipelines):
    made = pipelines[family].make(REQUEST, ignore)
    # A name that says nothing, for mlx-vlm trusts names.
    folder = image_folders[family].parent / f"copy of {family}"
    if not folder.exists():
        folder.symlink_to(image_folders[family])
    model = load_image_generation_model(str(folder))
    own = generate_image(
        model, ImageGenerationRequest(REQUEST.prompt, seed=7, steps=3, width=48, height=32, guidance=2.0)
    )
    np.testing.assert_array_equal(array(made.pixels), np.array(own.array))
    assert made.prompt_tokens == own.prompt_tokens != 0
    assert len(np.unique(array(made.pixels))) > 50


def test_an_edit_is_that_of_mlx_vlm_to_the_bit(image_folders: dict[str, Path], pipelines, tmp_path: Path):
    given = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
    Image.fromarray(given).save(tmp_path / "given.png")
    made = pipelines["z_image"].make(replace(REQUEST, images=[Pixels(48, 32, given.tobytes())]), ignore)
    folder = tmp_path / "copy"
    folder.symlink_to(image_folders["z_image"])
    how = {"seed": 7, "steps": 3, "width": 48, "height": 32, "guidance": 2.0}
    own = load_image_edit_model(str(folder)).edit(ImageEditRequest(REQUEST.prompt, (tmp_path / "given.png",), **how))
    np.testing.assert_array_equal(array(made.pixels), np.array(own.array))


def test_a_seed_gives_one_image_whatever_came_before_and_another_seed_another(pipelines):
    pipeline = pipelines["z_image"]
    first = pipeline.make(REQUEST, ignore)
    assert pipeline.make(replace(REQUEST, seed=8), ignore) != first
    assert pipeline.make(replace(REQUEST, prompt="blue"), ignore) != first
    assert pipeline.make(REQUEST, ignore) == first


@pytest.mark.parametrize("family", FAMILIES)
def test_partial_images_change_nothing_and_come_between_the_steps(family: str, pipelines):
    pipeline, events = pipelines[family], []
    request = replace(REQUEST, steps=6, partial_images=2)
    whole = pipeline.make(replace(request, partial_images=0), ignore)
    made = pipeline.make(request, events.append, events.append)
    assert made == whole
    partial = [each for each in events if isinstance(each, Pixels)]
    steps = [each for each in events if isinstance(each, int)]
    assert [(each.width, each.height) for each in partial] == [(48, 32)] * 2
    assert partial[0] != partial[1] != whole.pixels
    # One more step each time, and one fewer in a family that leaves the last one out.
    assert steps == sorted(steps) and set(steps) == {*range(6 if family == "z_image" else 7)}
    assert events.index(2) < events.index(partial[0]) < events.index(3)


class Ended(BaseException):
    pass


def test_an_image_ends_between_two_steps_and_the_next_one_is_right(pipelines):
    pipeline, steps = pipelines["z_image"], []
    whole = pipeline.make(REQUEST, ignore)

    def end(step: int) -> None:
        steps.append(step)
        if step == 2:
            raise Ended

    with pytest.raises(Ended):
        pipeline.make(replace(REQUEST, steps=50), end)
    assert max(steps) == 2
    assert pipeline.make(REQUEST, ignore) == whole


def test_what_a_model_can_do_is_found_at_its_load(pipelines):
    z_image, moss = pipelines["z_image"].info, pipelines["moss_image"].info
    assert (z_image.family, z_image.generates, z_image.edits) == ("z_image", True, True)
    assert (z_image.steps_min, z_image.edit_steps_min, z_image.steps, z_image.guidance) == (2, 1, 50, 4.0)
    assert (moss.family, moss.generates, moss.edits) == ("moss_image", True, False)
    assert (moss.steps_min, moss.steps, moss.guidance) == (1, 50, 3.0)


def test_what_a_pipeline_refuses_is_the_callers_error(pipelines):
    with pytest.raises(InvalidRequest, match="multiple of 16"):
        pipelines["z_image"].make(replace(REQUEST, width=50), ignore)
    assert pipelines["z_image"].make(REQUEST, ignore).pixels.width == 48


def test_folders_are_told_apart_by_their_layout(image_folders: dict[str, Path]):
    assert all(map(has_image_layout, image_folders.values()))
    assert not has_image_layout(EMBEDDED / "recall") and not has_image_layout(EMBEDDED)


def test_a_folder_of_images_is_served_by_its_path_and_its_weights_count(image_folders: dict[str, Path]):
    folder = image_folders["z_image"]
    assert source_of(str(folder)) == (str(folder), folder.name)
    stored = sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))
    assert 0.9 * stored < weights_bytes(Model(name="painter", source=str(folder))) <= stored


def test_families_keep_their_weights_and_the_prompt_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[dict[str, Any]] = []

    class Ernie:
        model_type = "ernie_image"

        @classmethod
        def from_model_id(cls, model: str, **options: Any) -> Any:
            asked.append(options)
            raise ValueError("nothing to load")

    monkeypatch.setattr("satchel.actors.replica.images.pipeline.image_model_classes", lambda folder: (Ernie, None))
    with pytest.raises(ModelLoadError, match="nothing to load"):
        ImagePipeline.load(tmp_path, "ernie")
    evicted = {"evict_text_encoder": False, "evict_transformer": False}
    assert asked == [{"model_path": tmp_path, "download": False, "use_prompt_enhancer": False, **evicted}]
    taken = inspect.signature(ErnieImagePipeline.from_pretrained).parameters
    assert {"use_prompt_enhancer", *evicted} <= set(taken)


def test_code_in_a_components_folder_is_never_run(image_folders: dict[str, Path], tmp_path: Path):
    folder = tmp_path / "code"
    shutil.copytree(image_folders["z_image"], folder)
    config = json.loads((folder / "tokenizer" / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": [None, "own.Own"]}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\nfrom transformers import "
    (folder / "tokenizer" / "own.py").write_text(
        f"{code}PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"
    )
    with pytest.raises(ModelLoadError, match=r"code of its own \(tokenizer/own.py\), which is never run"):
        ImagePipeline.load(folder, "code")
    assert not (tmp_path / "ran").exists()


def test_an_unknown_kind_and_a_damaged_file_are_said_in_one_sentence(image_folders: dict[str, Path], tmp_path: Path):
    folder = tmp_path / "odd"
    shutil.copytree(image_folders["moss_image"], folder)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    with pytest.raises(ModelLoadError, match="of a kind that mlx-vlm does not have"):
        ImagePipeline.load(folder, "odd")
    shutil.copy(image_folders["moss_image"] / "model_index.json", folder)
    (folder / "transformer" / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="odd cannot be loaded: "):
        ImagePipeline.load(folder, "odd")
