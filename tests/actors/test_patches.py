"""What is changed of MLX, mlx-lm, mlx-vlm and transformers, and used of their insides, fits the installed versions."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.nn.layers.distributed import shard_linear
from mlx.utils import tree_flatten
from mlx_lm.models import base, llama
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_model
from transformers import AutoTokenizer, dynamic_module_utils

from satchel.actors import patches
from satchel.actors.model_files.source import EMBEDDED
from tests.worlds.models import families, image_families, speech_families, vision_families

LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def model(folder: Path) -> Any:
    return load_model(folder)[0]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of mlx-vlm whose language part notes positions."""
    folder, family = tmp_path_factory.mktemp("seeing"), "qwen2_5_vl"
    return vision_families.build(vision_families.write_files(folder, family, vision_families.FAMILIES[family]))


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "create_attention_mask"])
def test_a_models_code_calls_what_is_bound_under_a_name(model: Any, name: str):
    plain, calls = getattr(llama, name), []
    change = patches.rebound(
        model, name, lambda before: lambda *given, **named: calls.append(1) or before(*given, **named)
    )
    assert change is not None
    with change.for_now():
        model(mx.array([[1, 2]]), cache=make_prompt_cache(model))
        assert len(calls) == (len(model.layers) if name.startswith("scaled") else 1)
    assert getattr(llama, name) is plain
    assert patches.rebound(model, f"no_{name}", lambda before: before) is None


def test_language_parts_of_mlx_vlm_have_that_name_too(seeing: Any):
    change = patches.rebound(seeing.language_model, "scaled_dot_product_attention", lambda before: before)
    assert change is not None


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4)

    def __call__(self, x: mx.array) -> mx.array:
        return self.norm(x)


def test_what_stands_in_is_called_and_the_child_comes_back():
    module, x = Normed(), mx.ones((1, 4)) * 3
    child, parameters = module.norm, dict(tree_flatten(module.parameters()))
    with patches.stood_in([(module, "norm", lambda x: x + 1)]).for_now():
        assert module(x).tolist() == [[4.0] * 4]
        assert dict(tree_flatten(module.parameters())).keys() == parameters.keys()
    assert module.norm is child and mx.allclose(module(x), mx.ones((1, 4)), atol=1e-3)


def test_a_recast_layer_computes_as_its_new_class_with_its_own_arrays():
    class Doubled(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return 2 * super().__call__(x)

    layer, x = nn.Linear(4, 4), mx.ones((1, 4))
    expected, weight = 2 * layer(x), layer.weight
    recast = patches.recast(layer, Doubled)
    assert recast is layer and recast.weight is weight and mx.array_equal(recast(x), expected)


def test_what_a_language_part_notes_of_a_prompt_is_emptied(seeing: Any):
    language, tokens = seeing.language_model, mx.array([[1, 2, 3]])
    empty = patches.emptied(language)
    names = [name for name, value in vars(language).items() if value is None]
    expected = language(tokens).logits
    assert any(getattr(language, name) is not None for name in names)
    empty()
    assert all(getattr(language, name) is None for name in names)
    assert mx.array_equal(language(tokens).logits, expected)


def test_modules_are_reset_to_what_they_were():
    module = Normed()
    weight = module.norm.weight
    reset = patches.reset_to_now(each for _, each in module.named_modules())
    module.noted = 7
    module.positions = mx.ones(3)
    module.norm.weight = mx.zeros(4)
    reset()
    assert not hasattr(module, "noted") and not hasattr(module, "positions") and module.norm.weight is weight


def test_a_model_asks_its_cache_for_masks():
    cache, asked = RotatingKVCache(8), []
    patches.masks_made(cache, lambda *given, **named: asked.append(named["window_size"]))
    base.create_attention_mask(mx.zeros((1, 2, 4)), cache, window_size=9)
    assert asked == [9]


@pytest.mark.parametrize("steps", [3, 8, 11])
def test_a_windows_tokens_come_in_their_order(steps: int):
    cache = RotatingKVCache(8)
    for number in range(steps):
        cache.update_and_fetch(mx.full((1, 1, 1, 4), number), mx.full((1, 1, 1, 4), -number))
    keys, values = patches.window_in_order(cache)
    expected = list(range(max(0, steps - 8), steps))
    assert keys[0, 0, :, 0].tolist() == expected and values[0, 0, :, 0].tolist() == [-number for number in expected]


def test_rotations_for_longer_contexts_say_their_periods():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    longer = initialize_rope(64, 10000.0, False, scaling, 131072)
    assert patches.rope_periods(longer).shape == (32,)
    assert patches.rope_periods(nn.RoPE(64)) is None


def test_mlx_lms_choice_of_classes_is_found():
    assert patches.classes_by_config({"model_type": "llama"}) == (llama.Model, llama.ModelArgs)


def test_weights_are_read_by_another_function(folder: Path):
    seen: list[set[str]] = []
    changes: list[Callable[[], None]] = []

    def classes(config: dict[str, Any]) -> Any:
        kind, arguments = patches.classes_by_config(config)

        def make(given: Any) -> Any:
            model = kind(given)
            own = model.sanitize
            change = patches.weights_read(model, lambda weights: seen.append(set(weights)) or own(weights))
            change.make()
            changes.append(change.undo)
            return model

        return make, arguments

    model, _ = load_model(folder, get_model_classes=classes)
    ((names,), (undo,)) = seen, changes
    assert names >= {name for name, _ in tree_flatten(model.parameters())}
    undo()
    assert "sanitize" not in vars(model)


def test_the_tokenizer_in_mlx_lms_wrapper_is_found():
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "recall")
    wrapper = TokenizerWrapper(tokenizer)
    assert patches.inner_tokenizer(wrapper) is tokenizer and not patches.renders_by_code(wrapper)
    coded = TokenizerWrapper(tokenizer, chat_template=lambda messages, **named: "written by code")
    assert patches.renders_by_code(coded)
    assert coded.apply_chat_template([], tokenize=False) == "written by code"


def test_a_tokenizer_without_padding_pads_with_its_end():
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "recall")
    own = tokenizer.pad_token
    patches.pad_with_end(tokenizer)
    assert own is None or tokenizer.pad_token == own
    tokenizer.pad_token = None
    patches.pad_with_end(tokenizer)
    assert (
        tokenizer.pad_token == tokenizer.eos_token
        and len(set(map(len, tokenizer(["a", "a b c"], padding=True).input_ids))) == 1
    )


def test_transformers_gets_a_models_code_through_what_is_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dynamic_module_utils, "get_cached_module_file", dynamic_module_utils.get_cached_module_file)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    (tmp_path / "own.py").write_text("class Own: pass\n")

    def refusing(fetch: Callable[..., str]) -> Callable[..., str]:
        def refuse(folder: Any, file: str, *given: Any, **named: Any) -> str:
            raise PermissionError(file)

        return refuse

    patches.model_code_checked(refusing)
    with pytest.raises(PermissionError, match=r"own\.py"):
        AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)


def test_mlx_lm_leaves_the_limit_of_open_files():
    program = "import resource; limit = resource.RLIMIT_NOFILE; resource.setrlimit(limit, (5000, 6000))\n"
    program += "import {first}, mlx_lm.utils; print(resource.getrlimit(limit))\n"
    program += "resource.setrlimit(limit, (300, 4096)); print(resource.getrlimit(limit)[0])"
    for first, kept in (("satchel.actors", "(5000, 6000)"), ("resource", "(2048, 4096)")):
        command = [sys.executable, "-c", program.format(first=first)]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.splitlines()
        assert said == [kept, "300"], "or the patch is not needed any more"


def test_transformers_leaves_torch_alone(tmp_path: Path):
    """There is one, and mlx-lm's import of transformers would import it."""
    (tmp_path / "torch.py").write_text("print('imported')")
    metadata = tmp_path / "torch-2.9.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    program = "import sys; sys.path.insert(0, {place!r})\n"
    program += "from satchel.actors.patches import without_torch; {first}\n"
    program += "import transformers.modeling_rope_utils, importlib.util; print(importlib.util.find_spec('torch').name)"
    for first, said in (("without_torch()", "torch\n"), ("pass", "imported\n")):
        command = [sys.executable, "-c", program.format(place=str(tmp_path), first=first)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert run.stdout.startswith(said), run.stderr


def test_a_group_of_ours_computes_its_sums_itself():
    """MLX's layers call it by that name, and other groups are MLX's own."""

    class Double:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 1

        def all_sum(self, x: mx.array, plain: Callable[..., mx.array]) -> mx.array:
            return 2 * plain(x)

        def all_gather(self, x: mx.array, plain: Callable[..., mx.array]) -> mx.array:
            return mx.concatenate([plain(x)] * 2)

    before = {name: getattr(mx.distributed, name) for name in ("all_sum", "all_gather")}
    try:
        for name, function in before.items():
            # As it was before anything changed it.
            setattr(mx.distributed, name, getattr(function, "_plain", function))
        patches.collectives_by(mx.distributed, Double)
        patches.collectives_by(mx.distributed, Double)
        group: Any = Double()
        x = mx.array([1.0, 2.0])
        assert mx.distributed.all_sum(x, group=group).tolist() == [2.0, 4.0]
        assert mx.distributed.all_gather(x, group=group).tolist() == [1.0, 2.0] * 2
        assert mx.distributed.all_sum(x).tolist() == [1.0, 2.0]
        whole = nn.Linear(4, 3, bias=False)
        half = shard_linear(whole, "sharded-to-all", group=group)
        given = mx.array([[1.0, 2.0]])
        assert mx.allclose(half(given), 2 * given @ whole.weight[:, 2:].T).item()
    finally:
        for name, function in before.items():
            setattr(mx.distributed, name, function)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_families.write_image_model(tmp_path_factory.mktemp("images") / "tiny", "z_image")


@pytest.fixture(scope="module")
def image_pipeline(image_folder: Path) -> Any:
    """A pipeline of mlx-vlm that makes images, with all its components."""
    made, _ = patches.image_model_classes(str(image_folder))
    model = made.from_model_id(str(image_folder), model_path=image_folder, evict_text_encoder=False)
    model.pipeline.generate_array("a", steps=2, width=16, height=16)
    return model.pipeline


def test_an_image_model_is_known_by_its_files(image_folder: Path, folder: Path, tmp_path: Path):
    for name in ("Qwen-7B", "flux2-klein-4b", "any"):
        for target, known in ((image_folder, True), (folder, False)):
            link = tmp_path / f"{known}" / name
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(target)
            found = [each and each.model_type for each in patches.image_model_classes(str(link))]
            assert found == (["z_image"] * 2 if known else [None, None])


def test_two_pipelines_share_their_components(image_folder: Path, image_pipeline: Any):
    made, _ = patches.image_model_classes(str(image_folder))
    other = made.from_model_id(str(image_folder), model_path=image_folder).pipeline
    assert other.transformer is None
    patches.components_shared(other, image_pipeline)
    names = [name for name in patches.IMAGE_COMPONENTS if hasattr(image_pipeline, name)]
    assert names == ["text_encoder", "transformer", "vae"]
    for name in names:
        assert getattr(other, name) is getattr(image_pipeline, name) is not None
    # The others are those of other families.
    families = ("ideogram4", "llada_image")
    code = [str(import_module(f"mlx_vlm.models.{family}.pipeline").__file__) for family in families]
    written = "".join(Path(path).read_text(encoding="utf-8") for path in code)
    assert all(f"self.{name}" in written for name in patches.IMAGE_COMPONENTS)


def test_a_pipeline_forgets_its_prompts():
    # Two families keep them in an OrderedDict, which has an order beside its entries.
    for cache in ({"a": 1}, OrderedDict(a=1)):
        pipeline = SimpleNamespace(prompt_cache=cache)
        patches.prompts_forgotten(pipeline)
        assert list(pipeline.prompt_cache) == []
        pipeline.prompt_cache["b"] = 2
        assert list(pipeline.prompt_cache) == ["b"]
    patches.prompts_forgotten(object())
    # It is still there, under that name.
    for family in ("flux2", "mage_flow"):
        code = import_module(f"mlx_vlm.models.{family}.pipeline")
        assert "self.prompt_cache[" in Path(str(code.__file__)).read_text(encoding="utf-8")


def test_each_step_of_a_pipeline_is_told(image_pipeline: Any):
    code, transformer = sys.modules[type(image_pipeline).__module__], image_pipeline.transformer
    plain, events = code.mx, list[str]()
    how = {"steps": 4, "width": 16, "height": 16, "seed": 1}
    whole = image_pipeline.generate_array("a", **how)
    change = patches.steps_told(image_pipeline, lambda: events.append("call"), lambda arrays: events.append("eval"))
    with change.for_now():
        told = image_pipeline.generate_array("a", **how)
    assert mx.array_equal(whole, told)
    # The prompt, three steps, the decoder.
    assert events == ["eval", *["call", "eval"] * 3, "eval"]
    assert code.mx is plain and image_pipeline.transformer is transformer
    with pytest.raises(KeyError), patches.steps_told(image_pipeline, lambda: None, lambda arrays: {}["end"]).for_now():
        image_pipeline.generate_array("a", **how)
    assert code.mx is plain and image_pipeline.transformer is transformer


def test_each_evaluation_is_told():
    told, before = list[int](), (mx.eval, mx.async_eval)

    def tell() -> None:
        told.append(1)
        if len(told) > 2:
            raise KeyError("ended")

    with patches.evaluations_told(tell).for_now():
        made = mx.ones(2) + 1
        mx.eval(made)
        mx.async_eval(made + 1)
        with pytest.raises(KeyError):
            mx.eval(made + 2)
    assert len(told) == 3 and made.tolist() == [2.0, 2.0] and (mx.eval, mx.async_eval) == before
    # The families of mlx-audio call both by these names.
    for kind, family in (("stt", "whisper.decoding"), ("tts", "soprano.soprano")):
        code = import_module(f"mlx_audio.{kind}.models.{family}")
        written = Path(str(code.__file__)).read_text(encoding="utf-8")
        assert code.mx is mx and "mx.eval(" in written
    assert "mx.async_eval(" in Path(str(import_module("mlx_audio.stt.models.whisper.decoding").__file__)).read_text()


def test_a_closed_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    known = tmp_path / "models--owner--model"
    (known / "snapshots/abc").mkdir(parents=True)
    (known / "refs").mkdir()
    (known / "refs/main").write_text("abc")
    (known / "snapshots/abc/config.json").write_text("{}")
    fetch = {"filename": "config.json", "local_files_only": True}
    assert huggingface_hub.hf_hub_download("owner/model", **fetch).startswith(str(tmp_path))

    def asked(*address: Any) -> None:
        raise AssertionError(f"{address} was asked")

    monkeypatch.setattr(socket.socket, "connect", asked)
    monkeypatch.setattr(socket, "getaddrinfo", asked)
    with patches.hub_closed().for_now():
        for call in (
            lambda: huggingface_hub.hf_hub_download("owner/model", "config.json"),
            lambda: huggingface_hub.snapshot_download("owner/model"),
            lambda: AutoTokenizer.from_pretrained("owner/model"),
        ):
            with pytest.raises((LocalEntryNotFoundError, OSError)):
                call()
    assert huggingface_hub.hf_hub_download("owner/model", **fetch).startswith(str(tmp_path))


def test_a_whisper_models_windows_are_decoded_by_another_function(tmp_path: Path):
    from mlx_audio.stt.utils import load_model as load_listener

    folder = speech_families.write_speech_model(tmp_path / "m", "whisper")
    model: Any = load_listener(folder, model_type="whisper", model_name_parts=[])
    windows: list[Any] = []

    def decode(own: Callable[..., Any], window: Any, *given: Any, **named: Any) -> Any:
        windows.append(window)
        return own(window, *given, **named)

    samples, plain = mx.array(speech_families.noise(31)), model.decode
    how = {"temperature": 0.0, "language": "en"}
    with patches.windows_decoded_by(model, decode).for_now():
        made = model.generate(samples, **how)
    assert len({id(window) for window in windows}) == 2
    assert model.decode == plain and model.generate(samples, **how).text == made.text


def test_a_whisper_models_windows_are_encoded_by_another_function(tmp_path: Path):
    from mlx_audio.stt.utils import load_model as load_listener

    folder = speech_families.write_speech_model(tmp_path / "m", "whisper")
    model: Any = load_listener(folder, model_type="whisper", model_name_parts=[])
    shapes, own = list[tuple[int, ...]](), model.encoder

    def encode(encoder: Callable[[mx.array], Any], frames: mx.array) -> Any:
        shapes.append(frames.shape)
        return encoder(frames)

    samples, how = mx.array(speech_families.noise(1)), {"temperature": (0.0, 0.5), "logprob_threshold": 0.0}
    names = [name for name, _ in model.named_modules()]
    with patches.windows_encoded_by(model, encode).for_now():
        model.generate(samples, language="en", word_timestamps=True, **how)
    assert shapes == 3 * [(1, 3000, 80)], "one for each temperature, and one for the words"
    assert model.encoder is own and sorted(name for name, _ in model.named_modules()) == sorted(names)
    assert model.generate(samples, language="en", temperature=0.0).text


def test_so_are_those_of_a_pipeline_with_two_transformers():
    events, pipeline = list[str](), SimpleNamespace(conditional_transformer=abs, unconditional_transformer=abs)
    with patches.steps_told(pipeline, lambda: events.append("call"), lambda arrays: None).for_now():
        assert pipeline.conditional_transformer(-1) == pipeline.unconditional_transformer(-1) == 1
    assert events == ["call", "call"]
    assert pipeline.conditional_transformer is pipeline.unconditional_transformer is abs
