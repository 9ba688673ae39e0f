"""What Satchel changes in MLX, mlx-lm, mlx-vlm and transformers, and its uses of their internals. No other file under
`actors/` does either, except for OpenBLAS in place of MLX (`replica/device/blas.py`).

docs/patches.md lists the patches of all libraries. Each fits the versions of requirements.lock. Libraries are imported
when they are needed: they take seconds.
"""

from __future__ import annotations

import inspect
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast


@dataclass(frozen=True)
class Change:
    """A change of a library's objects, and how to undo it."""

    make: Callable[[], None]
    undo: Callable[[], None]

    @contextmanager
    def for_now(self) -> Iterator[None]:
        """While this is open, the change is made."""
        self.make()
        try:
            yield
        finally:
            self.undo()


NO_CHANGE = Change(lambda: None, lambda: None)

IMAGE_TRANSFORMERS = ("transformer", "conditional_transformer", "unconditional_transformer")
IMAGE_COMPONENTS = ("text_encoder", "queryformer", "text_projection", *IMAGE_TRANSFORMERS, "vae")
"""The parts of pipelines of mlx-vlm that make images, by the names of their attributes. None has all of them."""


def rebound(model: Any, name: str, make: Callable[[Any], Any]) -> Change | None:
    """Replaces a function by name in a model's code; None if none of its modules' code has that name.

    Changes: the name, in the Python modules in which the classes of the model's layers are written. It holds for every
        model of that code in this process.
    Why: models import mlx-lm's and mlx-vlm's functions by name, and neither library lets a caller give others.
        Attention has to read sealed blocks where they lie (`replica/kv/attention.py`), in a batch masks of some
        families need one more axis (`replica/loading/quirks.py`), and in a recorded step products compute activations
        (`replica/execution/recorded/fused_products.py`).
    Fits: mlx-lm 0.32.2, mlx-vlm 0.7.10.
    Noticed by: tests/actors/test_patches.py::test_a_models_code_calls_what_is_bound_under_a_name

    Args:
        make: returns what takes a function's place.
    """
    names = {type(module).__module__ for _, module in model.named_modules()}
    callers = [code for each in names if callable(getattr(code := sys.modules[each], name, None))]
    before = [getattr(code, name) for code in callers]

    def bind(functions: Iterable[Any]) -> None:
        for code, function in zip(callers, functions, strict=True):
            setattr(code, name, function)

    return Change(lambda: bind(map(make, before)), lambda: bind(before)) if callers else None


def stood_in(sites: Sequence[tuple[Any, str, Any]]) -> Change:
    """Replaces modules' children by callables.

    Changes: attributes of MLX modules, which hide the children and class attributes of these names until they are gone.
    Why: while a step is recorded, norms, rotations, residual sums and activations are left to kernels (`deferral.py`,
        `residual_sums.py` and `fused_products.py` of `replica/execution/recorded`). MLX's own way to replace children
        takes modules alone.
    Fits: mlx 0.32.4.
    Noticed by: tests/actors/test_patches.py::test_what_stands_in_is_called_and_the_child_comes_back

    Args:
        sites: module, name of its child, and what is called instead.
    """

    def make() -> None:
        for module, name, stand_in in sites:
            object.__setattr__(module, name, stand_in)

    def undo() -> None:
        for module, name, _ in sites:
            object.__delattr__(module, name)

    return Change(make, undo)


def recast(layer: Any, kind: type[Any]) -> Any:
    """Turns a layer of MLX into a subclass that computes differently with the same arrays.

    Changes: the class of that one object.
    Why: MLX makes a layer's arrays when it makes the layer, so a new one would hold others for a moment, of gigabytes.
    Fits: mlx 0.32.4.
    Noticed by: tests/actors/test_patches.py::test_a_recast_layer_computes_as_its_new_class_with_its_own_arrays
    """
    layer.__class__ = kind
    return layer


def emptied(module: Any) -> Callable[[], None]:
    """Returns a function that empties the attributes of a module that are empty now.

    Changes: attributes in which language parts of mlx-vlm note a prompt's positions for their next call.
    Why: here the next call may be for another sequence. The attributes have other names in every family.
    Fits: mlx-vlm 0.7.10.
    Noticed by: tests/actors/test_patches.py::test_what_a_language_part_notes_of_a_prompt_is_emptied
    """
    names = [name for name, value in vars(module).items() if value is None]

    def empty() -> None:
        for name in names:
            setattr(module, name, None)

    return empty


def reset_to_now(modules: Iterable[Any]) -> Callable[[], None]:
    """Returns a function that undoes all changes of the modules' attributes from now on.

    Changes: attributes and children of modules of mlx-vlm.
    Why: encoders and language parts keep things of the last prompt that they saw, under names of their own.
    Fits: mlx 0.32.4, mlx-vlm 0.7.10.
    Noticed by: tests/actors/test_patches.py::test_modules_are_reset_to_what_they_were
    """
    states = [(module, dict(module), dict(vars(module))) for module in modules]

    def reset() -> None:
        for module, items, attributes in states:
            dict.clear(module)
            dict.update(module, items)
            vars(module).clear()
            vars(module).update(attributes)

    return reset


def masks_made(cache: Any, make_mask: Callable[..., Any]) -> None:
    """Lets a cache make its masks by another function.

    Changes: `make_mask` of that one cache.
    Why: what a model asks of it says how long its windows are (`replica/loading/quirks.py`).
    Fits: mlx-lm 0.32.2.
    Noticed by: tests/actors/test_patches.py::test_a_model_asks_its_cache_for_masks
    """
    cache.make_mask = make_mask


def window_in_order(cache: Any) -> tuple[Any, Any]:
    """Returns keys and values of a sequence's last tokens from mlx-lm's cache of a window layer, `(1, kv_heads, tokens,
    dim)` each.

    Changes: nothing. It calls a method that mlx-lm keeps for itself.
    Why: such a cache overwrites its oldest tokens in place, and only it knows where they begin.
    Fits: mlx-lm 0.32.2.
    Noticed by: tests/actors/test_patches.py::test_a_windows_tokens_come_in_their_order
    """
    return cache._temporal_order(cache.keys), cache._temporal_order(cache.values)


def rope_periods(module: Any) -> Any:
    """Returns the periods of a rotation's pairs of channels, `(dims / 2,)`; None if the module has none.

    Changes: nothing. It reads an attribute that modules of mlx-lm and mlx-vlm keep for themselves.
    Why: the decode kernel rotates by itself, and longer contexts are made with periods that no formula gives.
    Fits: mlx-lm 0.32.2, mlx-vlm 0.7.10.
    Noticed by: tests/actors/test_patches.py::test_rotations_for_longer_contexts_say_their_periods
    """
    return getattr(module, "_freqs", None)


def classes_by_config(config: dict[str, Any]) -> tuple[Any, Any]:
    """Returns mlx-lm's own choice of the classes of a model and of its settings.

    Changes: nothing. The function is the default of an argument of mlx-lm's `load_model`.
    Why: that argument is how a caller gives other classes, and ours stand on the usual ones.
    Fits: mlx-lm 0.32.2.
    Noticed by: tests/actors/test_patches.py::test_mlx_lms_choice_of_classes_is_found
    """
    from mlx_lm.utils import load_model

    return inspect.signature(load_model).parameters["get_model_classes"].default(config=config)


def weights_read(model: Any, read: Callable[[dict[str, Any]], Any]) -> Change:
    """Lets a model's weights be read by another function than its own.

    Changes: `sanitize` of that one model, which mlx-lm calls with all weights of the files.
    Why: files have copies of what is tied, for which models' own functions have no place
        (`model_files/checkpoints.py`).
    Fits: mlx-lm 0.32.2.
    Noticed by: tests/actors/test_patches.py::test_weights_are_read_by_another_function
    """

    def make() -> None:
        model.sanitize = read

    def undo() -> None:
        # The class's own is found again.
        del model.sanitize

    return Change(make, undo)


class _Collective:
    """A function of MLX over processes, which groups of one class of ours compute themselves."""

    def __init__(self, name: str, plain: Callable[..., Any], kind: type[Any]) -> None:
        self._name, self._plain, self._kind = name, plain, kind

    def __call__(self, x: Any, *, group: Any = None, stream: Any = None) -> Any:
        if isinstance(group, self._kind):
            return getattr(group, self._name)(x, self._plain)
        return self._plain(x, group=group, stream=stream)


def collectives_by(distributed: Any, kind: type[Any]) -> None:
    """Lets groups of a class compute sums and gathers over processes themselves, by methods of MLX's names.

    Changes: `mlx.core.distributed.all_sum` and `all_gather`, in this process, for good. Other groups are MLX's own.
    Why: layers and models that are cut into shares call them by name (`replica/group/tensor/ranks.py`): sums must be
        added in the order of ranks, and a share is loaded before its group is formed.
    Fits: mlx 0.32.4, mlx-lm 0.32.2.
    Noticed by: tests/actors/test_patches.py::test_a_group_of_ours_computes_its_sums_itself

    Args:
        distributed: that module, which is not imported here.
    """
    for name in ("all_sum", "all_gather"):
        plain = getattr(distributed, name)
        if not isinstance(plain, _Collective):
            setattr(distributed, name, _Collective(name, plain, kind))


def pad_with_end(tokenizer: Any) -> None:
    """Lets a tokenizer of transformers that has no token for padding pad with its end of sequence.

    Changes: `pad_token` of a processor's tokenizer, as mlx-vlm does before it calls a processor.
    Why: processors of audio pad, also if there is nothing to pad, and fail without such a token.
    Fits: transformers 5.23.0, mlx-vlm 0.7.10.
    Noticed by: tests/actors/test_patches.py::test_a_tokenizer_without_padding_pads_with_its_end
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def inner_tokenizer(wrapper: Any) -> Any:
    """Returns the tokenizer of transformers in mlx-lm's wrapper.

    Changes: nothing. The wrapper keeps it for itself.
    Why: the wrapper hands on attributes, but its class is not the tokenizer's, which says what encodes and decodes.
    Fits: mlx-lm 0.32.2.
    Noticed by: tests/actors/test_patches.py::test_the_tokenizer_in_mlx_lms_wrapper_is_found
    """
    return wrapper._tokenizer


def renders_by_code(wrapper: Any) -> bool:
    """Whether mlx-lm's wrapper of a tokenizer renders conversations by Python code instead of a template.

    Changes: nothing. The wrapper keeps it for itself.
    Why: such a model has no template that could be read.
    Fits: mlx-lm 0.32.2.
    Noticed by: tests/actors/test_patches.py::test_the_tokenizer_in_mlx_lms_wrapper_is_found
    """
    return wrapper._chat_template is not None


def model_code_checked(wrap: Callable[[Callable[..., str]], Callable[..., str]]) -> None:
    """Wraps the function by which transformers gets a file with a model's own code.

    Changes: `dynamic_module_utils.get_cached_module_file`, in this process, for good.
    Why: some of mlx-vlm's processors tell transformers to trust every folder (`model_files/foreign_code.py`).
    Fits: transformers 5.23.0.
    Noticed by: tests/actors/test_patches.py::test_transformers_gets_a_models_code_through_what_is_wrapped
    """
    from transformers import dynamic_module_utils

    dynamic_module_utils.get_cached_module_file = wrap(dynamic_module_utils.get_cached_module_file)


def without_torch() -> None:
    """Has transformers take torch for not installed; for processes of Satchel's own, before they load a model.

    Changes: what `transformers.utils.is_torch_available` has found, and keeps. While it looks, `sys.modules` says that
        there is no torch.
    Why: where torch is installed, transformers imports it, which takes seconds and hundreds of megabytes in every
        process, and some processors compute with it: a node with torch would prepare other pictures than one without.
    Fits: transformers 5.23.0.
    Noticed by: tests/actors/test_patches.py::test_transformers_leaves_torch_alone
    """
    if "torch" in sys.modules:
        # A program's own process.
        return
    sys.modules["torch"] = cast(Any, None)
    try:
        from transformers.utils.import_utils import is_torch_available

        is_torch_available()
    finally:
        del sys.modules["torch"]


def keep_open_files() -> None:
    """Keeps this process's limit of open files when mlx-lm is imported.

    Changes: `resource.setrlimit`, in this process, for good: it does nothing if mlx-lm calls it.
    Why: mlx-lm sets the limit to 2,048 files, and what may be set later to 4,096, while it is imported. The endpoint
        and the replicas then have fewer than they were started with.
    Fits: mlx-lm 0.32.2.
    Noticed by: tests/actors/test_patches.py::test_mlx_lm_leaves_the_limit_of_open_files
    """
    set_limit = resource.setrlimit

    def set_others(*given: Any) -> None:
        if sys._getframe(1).f_globals.get("__name__") != "mlx_lm.utils":
            set_limit(*given)

    resource.setrlimit = set_others


def image_model_classes(folder: str) -> tuple[Any, Any]:
    """Returns mlx-vlm's classes that generate and that edit images with the model in a folder, None for either that
    there is not.

    Changes: nothing. It calls functions that mlx-vlm keeps for itself.
    Why: its public functions trust the folder's name before the folder's files, and take a text model in a folder
        called `Qwen-7B` for one that makes images.
    Fits: mlx-vlm 0.7.10.
    Noticed by: tests/actors/test_patches.py::test_an_image_model_is_known_by_its_files
    """
    # The package has a function of the second module's name.
    image, edit_image = (import_module(f"mlx_vlm.generate.{name}") for name in ("image", "edit_image"))
    types = image._local_image_model_types(folder)
    made = (image._supported_image_model_class(each, folder) for each in types)
    edited = (edit_image._supported_image_edit_model_class(each, folder) for each in types)
    return next(filter(None, made), None), next(filter(None, edited), None)


def components_shared(pipeline: Any, other: Any) -> None:
    """Gives a pipeline of mlx-vlm the components of another one of the same model.

    Changes: the attributes of that one pipeline for its components, such as text encoder, transformer and VAE.
    Why: mlx-vlm has a pipeline to generate images and one to edit them, each of which loads the weights.
    Fits: mlx-vlm 0.7.10.
    Noticed by: tests/actors/test_patches.py::test_two_pipelines_share_their_components
    """
    for name in IMAGE_COMPONENTS:
        if hasattr(pipeline, name) and getattr(other, name, None) is not None:
            setattr(pipeline, name, getattr(other, name))


def prompts_forgotten(pipeline: Any) -> None:
    """Empties what a pipeline of mlx-vlm keeps of prompts.

    Changes: `prompt_cache` of that one pipeline, if it has one.
    Why: it keeps the embeddings of every prompt for ever.
    Fits: mlx-vlm 0.7.10.
    Noticed by: tests/actors/test_patches.py::test_a_pipeline_forgets_its_prompts
    """
    cache = getattr(pipeline, "prompt_cache", None)
    if isinstance(cache, dict):
        cache.clear()


class _Passed:
    """Another object, of which only some names are replaced."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _ToldEvaluations(_Passed):
    """`mlx.core`, which tells what was evaluated."""

    def __init__(self, inner: Any, evaluated: Callable[[Sequence[Any]], None]) -> None:
        super().__init__(inner)
        self._evaluated = evaluated

    def eval(self, *arrays: Any) -> None:
        self._inner.eval(*arrays)
        self._evaluated(arrays)


class _ToldCalls(_Passed):
    """A module that tells when it is called."""

    def __init__(self, inner: Any, called: Callable[[], None]) -> None:
        super().__init__(inner)
        self._called = called

    def __call__(self, *given: Any, **named: Any) -> Any:
        self._called()
        return self._inner(*given, **named)


def steps_told(pipeline: Any, called: Callable[[], None], evaluated: Callable[[Sequence[Any]], None]) -> Change:
    """Tells what a pipeline of mlx-vlm does.

    Changes: the name `mx` in the modules in which the pipeline's classes are written, and the pipeline's transformers,
        while an image is made.
    Why: mlx-vlm computes all steps of an image in one call, which takes no function to call between two of them. Each
        step ends with `mx.eval`.
    Fits: mlx-vlm 0.7.10.
    Noticed by: tests/actors/test_patches.py::test_each_step_of_a_pipeline_is_told

    Args:
        called: called before each call of a transformer.
        evaluated: called with the arrays after each evaluation. What it raises ends the image.
    """
    names = {each.__module__ for each in type(pipeline).__mro__}
    modules: list[Any] = [code for each in sorted(names) if hasattr(code := sys.modules[each], "mx")]
    before = [code.mx for code in modules]
    found = ((name, getattr(pipeline, name, None)) for name in IMAGE_TRANSFORMERS)
    transformers = {name: transformer for name, transformer in found if transformer is not None}

    def make() -> None:
        for code, mx in zip(modules, before, strict=True):
            code.mx = _ToldEvaluations(mx, evaluated)
        for name, transformer in transformers.items():
            setattr(pipeline, name, _ToldCalls(transformer, called))

    def undo() -> None:
        for code, mx in zip(modules, before, strict=True):
            code.mx = mx
        for name, transformer in transformers.items():
            setattr(pipeline, name, transformer)

    return Change(make, undo)


def evaluations_told(told: Callable[[], None]) -> Change:
    """Tells whenever this process has evaluated arrays.

    Changes: `mlx.core.eval` and `mlx.core.async_eval`, in this process.
    Why: mlx-audio writes down a whole file, and speaks a whole segment, in one call, which takes no function to call
        meanwhile. Whisper and others evaluate arrays at every step.
    Fits: mlx 0.32.4, mlx-audio 0.6.2.
    Noticed by: tests/actors/test_patches.py::test_each_evaluation_is_told

    Args:
        told: called after each evaluation, on its thread. What it raises ends the call.
    """
    mx: Any = import_module("mlx.core")
    evaluate, begin = mx.eval, mx.async_eval

    def evaluated(*arrays: Any) -> None:
        evaluate(*arrays)
        told()

    def begun(*arrays: Any) -> None:
        begin(*arrays)
        told()

    def bind(one: Any, other: Any) -> None:
        mx.eval, mx.async_eval = one, other

    return Change(lambda: bind(evaluated, begun), lambda: bind(evaluate, begin))


def hub_closed() -> Change:
    """Has the Hub's client find nothing: it neither asks the Hub nor looks into its cache.

    Changes: `HF_HUB_OFFLINE` and `HF_HUB_CACHE` of `huggingface_hub.constants`, in this process.
    Why: some of mlx-audio's families load further repositories by name, while they are loaded or in a request. They
        would not be part of the model's id, and a request would wait for the network.
    Fits: huggingface-hub 2.4.0.
    Noticed by: tests/actors/test_patches.py::test_a_closed_hub_is_not_asked
    """
    from huggingface_hub import constants

    names = ("HF_HUB_OFFLINE", "HF_HUB_CACHE")
    before = [getattr(constants, name) for name in names]

    def bind(values: Iterable[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(constants, name, value)

    return Change(lambda: bind((True, "/nonexistent")), lambda: bind(before))


def windows_decoded_by(model: Any, decode: Callable[..., Any]) -> Change:
    """Has another function decode the windows of a Whisper model of mlx-audio.

    Changes: `decode` of that one model.
    Why: mlx-audio writes down a whole file in one call, and tells nobody what it has so far.
    Fits: mlx-audio 0.6.2.
    Noticed by: tests/actors/test_patches.py::test_a_whisper_models_windows_are_decoded_by_another_function

    Args:
        decode: gets the model's own function, a window and what else it is called with.
    """
    own = model.decode

    def decoded(window: Any, *given: Any, **named: Any) -> Any:
        return decode(own, window, *given, **named)

    def undo() -> None:
        # The class has it too.
        del model.decode

    return Change(lambda: setattr(model, "decode", decoded), undo)


def windows_encoded_by(model: Any, encode: Callable[..., Any]) -> Change:
    """Has another function encode the windows of a Whisper model of mlx-audio.

    Changes: `encoder` of that one model.
    Why: mlx-audio encodes a window anew for each temperature that it is decoded with, and for the times of words.
    Fits: mlx 0.32.4, mlx-audio 0.6.2.
    Noticed by: tests/actors/test_patches.py::test_a_whisper_models_windows_are_encoded_by_another_function

    Args:
        encode: gets the model's own encoder and the mel frames, `(1, frames, mels)`.
    """
    own = model.encoder

    def undo() -> None:
        # MLX keeps layers and other attributes in two places, and looks for others first.
        del model.encoder
        model.encoder = own

    return Change(lambda: setattr(model, "encoder", lambda mel: encode(own, mel)), undo)
