"""Loads a model, its adapter and its identity, with mlx-lm, or with mlx-vlm for models that take pictures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_adapters as mlx_lm_load_adapters

from ....cluster.errors import ModelLoadError, NoRoom
from ...model_files.checkpoints import load_checkpoint
from ...model_files.context import context_length
from ...model_files.foreign_code import refuse_model_file
from ...model_files.identity.digests import check_unchanged, digests_meanwhile
from ...model_files.identity.model_identity import ModelIdentity
from ...model_files.identity.model_parts import ModelPart
from ...model_files.media.processors import PictureProcessor, in_words, sight
from ...model_files.sentence_modules import read_sentence_modules
from ...model_files.source import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    EMBEDDED,
    Progress,
    first_sentence,
    read_json,
    resolve,
    resolve_adapter,
)
from ...model_files.text.end_tokens import end_tokens
from ...model_files.weights import WeightFile, bytes_in_memory, missing_files, read_weight_file, read_weight_files
from ..device import blas
from ..device.device import device_bytes, on_cuda, on_gpu, size_graphs
from ..execution.decode_way import DEQUANTIZED, DecodeWay, Tried, nobody
from ..execution.hidden_states import HiddenStates, find_hidden_states
from ..execution.loaded_model import IN_CONFIG, LoadedModel
from ..execution.media import vision
from ..execution.media.vision import LanguagePart, NotLeftToRightError, Vision
from ..kernels.sealing import FULL_PRECISION, POLICIES, SealPolicy
from ..kv import attention, soft_caps
from ..kv.caches import ModelCacheSpec, joins, new_pool, read_spec
from ..kv.paged_cache import Reads
from ..proving.findings import Findings
from ..proving.pieces import IN_ONE_PIECE, Pieces
from . import adapters as by_request
from . import joined, kv_choice
from .adapters import AdapterFiles
from .kv_choice import AUTO
from .model_id import computing, files_of, order_of_weights, products_id, refuse_elsewhere
from .prepare import prepare_weights
from .quirks import FlatCaches, fit_masks, masks_are_known, shares_kv, with_windows
from .warming import kernels_ahead
from .warming.kernels_ahead import KernelsAhead
from .warming.warm_up import meet_usual
from .ways import decode_ways, few_rows_check

logger = logging.getLogger(__name__)

_ADAPTER_LEAVES = ("lora_a", "lora_b", "m")
_ENCODERS = ("bert", "mpnet", "electra")
"""Parts of the names of model types in which every token attends to all others."""
_GIB = 2**30
PICTURES_NEED_THE_POOL = "it uses bidirectional image attention, for which its KV would have to be in the block pool"
_ANY_KV = " ".join(sorted([AUTO, *(policy.format for policy in POLICIES.values())]))
"""Stands for the KV format in an id that holds for every KV policy."""

_LOAD_ERRORS = (Exception, SystemExit)
"""What libraries raise if a folder does not match its config: any exception. Some of mlx-lm's models even exit if a
package is missing."""


def load(
    source: str,
    *,
    dtype: str = "auto",
    context_tokens_max: int | None,
    progress: Progress,
    adapter: str | None = None,
    adapters: Mapping[str, str] | None = None,
    gathers: bool | None = None,
    weights: str = "auto",
    kv: str = "q4",
    numerics: str = "fast",
    digests: Path | None = None,
    trials: Path | None = None,
    trust_remote_code: bool = False,
    warm: bool | None = None,
    claim: Callable[[int], None] = lambda weights_bytes: None,
    served: Callable[[LoadedModel, bool], None] = lambda plain, known: None,
    pieces: Pieces = IN_ONE_PIECE,
    tried: Tried = nobody,
) -> LoadedModel:
    """Loads a source and runs two tokens through it. Then tests which way of computing it is best, if no earlier load
    did, and warms the device up with the shapes of a first request.

    Args:
        dtype: `auto`, or the name of an MLX float type.
        context_tokens_max: lowers the model's own context.
        adapter: a folder or Hub id of a LoRA or DoRA adapter as mlx-lm writes them.
        adapters: folders or Hub ids of LoRA adapters that requests name, by their names.
        gathers: whether their matrices are stacked, as for `Adapted`; None: on a GPU.
        weights: see `prepare_weights`.
        kv: how KV is kept, one of `POLICIES`; `auto` chooses, see `kv_choice`.
        numerics: `fast` lets a decode step read sealed blocks in the pool, and a kernel multiply few rows;
            `reproducible` lets it compute as prefill does, bit for bit, and encodes pictures one by one.
        digests: a file for the digests of the model's files.
        trials: a file for findings about the model: tests that have one are not run again.
        trust_remote_code: whether code in the model's own folder may run.
        warm: whether to warm up for the usual shapes; None: if the device needs it.
        claim: called with the bytes of the weights before they are read.
        served: called before the tests with the model in plain mode (see `_plain`), and with whether an earlier load
            has findings.
        pieces: the pieces of the tests.
        tried: is told each way to decode that is tested.

    Raises:
        ModelLoadError: the model cannot be loaded; the message says why in one sentence.
    """
    # Before any library takes OpenBLAS for itself.
    blas.chosen()
    folder = resolve(source, progress, code=trust_remote_code)
    adapter_folder = resolve_adapter(adapter, progress) if adapter is not None else None
    named = by_request.find_adapters(adapters or {}, progress)
    size_graphs()
    what = f"loading {source}"
    progress(what, None)
    how = _How(
        source,
        folder,
        adapter_folder,
        pick_dtype(dtype),
        weights,
        kv,
        numerics,
        trust_remote_code,
        what,
        progress,
        tried,
        named,
    )
    weight_files = _claimed_weights(how, claim)
    how = replace(how, ahead=_begun_kernels(how, weight_files))
    model_paths = files_of(folder, adapter_folder)
    paths = model_paths | {name: path for each in named for name, path in each.paths.items()}
    checking = f"checking the files of {source}"
    with digests_meanwhile(paths, digests, lambda fraction: progress(checking, fraction)) as digests_of:
        running, blind = _started(how)
        digested = digests_of()
    files = {name: digested[name].digest.hex() for name in model_paths} | order_of_weights(folder, weight_files)
    context = context_length(running.config, getattr(running.whole, "args", None))
    if context.guessed:
        logger.warning("%s does not say how long its context is; it is taken to be %d tokens", source, context.tokens)
    plain = _plain(how, running, files, min(context.tokens, context_tokens_max or context.tokens))
    plain = replace(plain, adapters=by_request.described(named, digested, gathers=gathers))
    findings = Findings(trials, ModelIdentity(files, _computing(how, running, _ANY_KV)).model_id)
    served(plain, masks_are_known(findings))
    progress(f"testing how {source} is computed best", None)
    products = Findings(trials, products_id(running.kept))
    running = _faster(how, running, findings, products, pieces)
    fit_masks(running.language, running.model, findings, pieces)
    spec, way, kv_why = _keeping(how, running, context.tokens, files, trials, findings, pieces)
    identity = ModelIdentity(files=files, computing=_computing(how, running, _format(spec)))
    loaded = replace(
        plain,
        identity=identity,
        spec=spec,
        kv_why=kv_why,
        pool=new_pool(spec, kernels=way.reads is Reads.KERNEL),
        way=way,
        unbatched=not all(map(joins, make_prompt_cache(running.model))),
        part=_whole(running.language, spec),
        blind=blind,
        hidden=_hidden(running, findings, pieces),
    )
    if running.seeing:
        loaded = _with_vision(how, running, loaded, Findings(trials, identity.model_id), pieces)
    if loaded.blind:
        logger.warning("%s is served for text alone: %s", source, loaded.blind)
    if named:
        by_request.install(running.whole, running.model, named, loaded.adapters)
    check_unchanged(digested, paths)
    if on_cuda() if warm is None else warm:
        progress(f"warming up {source}", None)
        meet_usual(loaded)
    return loaded


def _plain(how: _How, running: _Running, files: dict[str, str], context_tokens: int) -> LoadedModel:
    """Returns a model in plain mode, before its other tests: as mlx-lm runs it, one sequence at a time, text only, with
    KV in the model's own caches that is never reused."""
    identity = ModelIdentity(files=files, computing=_computing(how, running, f"{FULL_PRECISION}.1"))
    return LoadedModel(
        model=running.model,
        folder=how.folder,
        identity=identity,
        spec=replace(read_spec(running.caches, 2), kept=False),
        context_tokens=context_tokens,
        vocabulary_size=int(running.logits.shape[-1]),
        eos_token_ids=end_tokens(how.folder, how.source, trusted=how.trusted),
        dtype=running.dtype,
        weights=running.kept,
        multiplying="" if on_gpu() else blas.chosen().describe(),
        kv_why="the self-test has not ended",
        sentences=read_sentence_modules(how.folder),
    )


@dataclass(frozen=True)
class _How:
    """How a model is started: the arguments of `load`, and the kernels that are compiled meanwhile."""

    source: str
    folder: Path
    adapter: Path | None
    dtype: mx.Dtype | None
    weights: str
    kv: str
    numerics: str
    trusted: bool
    what: str
    progress: Progress
    tried: Tried
    named: list[AdapterFiles] = field(default_factory=list)
    ahead: KernelsAhead | None = None


@dataclass(frozen=True)
class _Running:
    """A model that has computed two tokens, with their `logits` and `caches`. `whole` is the model as its library loads
    it, and `language` its language part. `called` takes tokens and the model's own caches, `model` the same with a flat
    list of caches. The rest is what `load` makes of it."""

    seeing: bool
    whole: Any
    config: dict[str, Any]
    called: Any
    model: Any
    language: Any
    kept: str
    products: int
    logits: mx.array
    caches: list[Any]

    @property
    def dtype(self) -> str:
        """The dtype in which the model computes."""
        return str(self.logits.dtype).removeprefix("mlx.core.")


def _claimed_weights(how: _How, claim: Callable[[int], None]) -> list[WeightFile]:
    """Returns the files of a model's weights, after checks that it may be loaded and that memory has room for it."""
    config = read_json(how.folder / "config.json")
    refuse_model_file(how.source, config, trusted=how.trusted)
    refuse_elsewhere(how.source, config)
    _refuse_encoders(how.source, str(config.get("model_type", "")))
    files = read_weight_files(how.folder)
    needed = bytes_in_memory(files, how.dtype.size if how.dtype is not None else None)
    needed += by_request.adapters_bytes(how.named, how.dtype.size if how.dtype is not None else 2)
    claim(needed)
    check_memory(how.source, needed)
    return files


def _begun_kernels(how: _How, weight_files: list[WeightFile]) -> KernelsAhead | None:
    config = read_json(how.folder / "config.json")
    return kernels_ahead.begin(config, weight_files, how.dtype, how.kv, decodes=how.numerics == "fast")


def _keeping(
    how: _How,
    running: _Running,
    context_tokens: int,
    files: dict[str, str],
    trials: Path | None,
    findings: Findings,
    pieces: Pieces,
) -> tuple[ModelCacheSpec, DecodeWay, str]:
    """Returns how a model's KV is kept, how decode steps read it, and why it is kept so."""
    model = running.model
    spec, why = _spec_under(running, POLICIES[FULL_PRECISION if how.kv == AUTO else how.kv], shares=False), IN_CONFIG
    if spec.policy is None:
        why = f"its layers ({spec.describe().partition(';')[0]}) cannot be sealed"
        if how.kv != FULL_PRECISION:
            logger.warning("%s keeps its KV in full precision: %s", how.source, why)
        return spec, DEQUANTIZED, IN_CONFIG if how.kv == FULL_PRECISION else why
    spec = replace(spec, shares=_shares(model, spec, findings))
    pieces.pause()
    installed = any([attention.install(running.whole), soft_caps.install(running.whole)])
    if how.kv == AUTO:

        def spec_under(policy: str) -> ModelCacheSpec:
            return _spec_under(running, POLICIES[policy], shares=spec.shares)

        how.progress(f"choosing how {how.source} keeps its KV", None)
        choice = kv_choice.choose(
            how.source,
            how.folder,
            model,
            int(running.logits.shape[-1]),
            context_tokens,
            spec_under,
            findings,
            pieces,
            tested=how.source.startswith("embedded:") and how.adapter is None,
            trusted=how.trusted,
        )
        spec, why = spec_under(choice.policy), choice.why
    if installed and how.numerics == "fast":
        how.progress(f"testing how {how.source} reads its KV", None)
        known = Findings(trials, ModelIdentity(files, _computing(how, running, _format(spec))).model_id)
        return spec, decode_ways.fastest(model, spec, context_tokens, known, pieces, how.tried), why
    return spec, DEQUANTIZED, why


def _shares(model: Any, spec: ModelCacheSpec, findings: Findings) -> bool:
    """As `shares_kv`, or what an earlier load found."""
    if not isinstance(known := findings.read("shares_kv", 1), bool):
        findings.note("shares_kv", 1, known := shares_kv(model, spec))
    return known


def _spec_under(running: _Running, policy: SealPolicy | None, *, shares: bool) -> ModelCacheSpec:
    """Returns a running model's spec under a policy.

    Args:
        shares: as in the spec.
    """
    return with_windows(running.model, replace(read_spec(running.caches, 2, policy), shares=shares))


def _whole(model: Any, spec: ModelCacheSpec) -> tuple[ModelPart, int] | None:
    """Returns all layers, if each has one cache and their KV can be joined."""
    count = len(getattr(model, "layers", ()))
    return (ModelPart(0, count), count) if count and len(spec.layers) == count and spec.reusable else None


def _computing(how: _How, running: _Running, kv: str) -> dict[str, str]:
    """Returns how a model computes, for its id; `kv` is the format of sealed blocks."""
    return computing(
        dtype=running.dtype if how.dtype is not None else f"{running.dtype}, own",
        weights=f"{running.kept}, joined" if running.products else running.kept,
        kv=kv,
        numerics=how.numerics,
        seeing=running.seeing,
    )


def _started(how: _How) -> tuple[_Running, str]:
    """Starts a model: a vision model with mlx-vlm, and if that fails, or if it is a text model, with mlx-lm.

    Returns:
        The model; and if it is a vision model that was started for text only, the reason.

    Raises:
        ModelLoadError: it cannot be loaded.
    """
    seeing, blind = sight(how.folder)
    try:
        if not seeing:
            return _start(how, seeing=False), blind
        try:
            return _start(how, seeing=True), ""
        except ModelLoadError:
            raise
        except _LOAD_ERRORS as error:
            reason = error
        try:
            return _start(how, seeing=False), f"with pictures it cannot be loaded ({first_sentence(reason)})"
        except _LOAD_ERRORS:
            raise reason from None
    except ModelLoadError:
        raise
    except _LOAD_ERRORS as error:
        why = first_sentence(error)
        if missing := missing_files(how.folder):
            why = f"its index names {missing[0]}, which is not in {how.folder} ({why}); download it again"
        elif method := _foreign_quantization(read_json(how.folder / "config.json")):
            why = f"its weights are quantized by {method} ({why}); convert what they were made of (`satchel convert`)"
        elif why.startswith("Model type "):
            instead = "neither mlx-lm nor mlx-vlm has it here; take another model, or a newer Satchel"
            why = f"{why.rstrip('.')}: {instead}"
        raise ModelLoadError(f"{how.source} cannot be loaded: {why}") from error


def _foreign_quantization(config: dict[str, Any]) -> str:
    """Returns the method that quantized a model's weights if it was not MLX's, else nothing."""
    by = config.get("quantization_config")
    method = by.get("quant_method") if isinstance(by, dict) and "quantization" not in config else None
    return method if isinstance(method, str) else ""


def _start(how: _How, *, seeing: bool) -> _Running:
    if seeing:
        whole, config = vision.load_weights(how.folder, trusted=how.trusted)
    else:
        whole, config = load_checkpoint(how.folder, trusted=how.trusted)
    called: Any = LanguagePart(whole) if seeing else whole
    model: Any = FlatCaches.of(called)
    if how.adapter is not None:
        if seeing:
            raise ModelLoadError(f"{how.source} takes pictures: adapters are only served on models of text")
        _add_adapter(whole, how.adapter)
    if how.named:
        if seeing:
            raise ModelLoadError(f"{how.source} takes pictures: adapters are only served on models of text")
        by_request.check_fit(whole, how.named)
    language: Any = whole.language_model if seeing else whole
    if how.ahead is not None:
        how.ahead.opened(language)
    kept = prepare_weights(whole, how.dtype, how.weights, lambda fraction: how.progress(how.what, fraction))
    caches = make_prompt_cache(model)
    logits = model(mx.array([[0, 0]], mx.uint32), cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    return _Running(seeing, whole, config, called, model, language, kept, 0, logits, caches)


def _faster(how: _How, running: _Running, findings: Findings, of_products: Findings, pieces: Pieces) -> _Running:
    """Returns a model that multiplies in the fastest way on this device."""
    # On a CPU the number of products does not matter.
    products = joined.join(running.language, running.model, findings) if on_gpu() else 0
    pieces.pause()
    if how.numerics == "fast":
        few_rows_check.install(running.language, of_products, pieces)
    return replace(running, products=products)


def resealed(loaded: LoadedModel, policy: SealPolicy | None) -> LoadedModel:
    """Returns a model with another KV policy, whose decode steps gather blocks. With None KV stays in the model's own
    caches."""
    caches = make_prompt_cache(loaded.model)
    mx.eval(loaded.model(mx.array([[0, 0]], mx.uint32), cache=caches), [cache.state for cache in caches])
    spec = with_windows(loaded.model, replace(read_spec(caches, 2, policy), shares=loaded.spec.shares))
    identity = replace(loaded.identity, computing={**loaded.identity.computing, "kv": _format(spec)})
    resealed = replace(loaded, spec=spec, pool=new_pool(spec), way=DEQUANTIZED, identity=identity)
    if loaded.vision is None:
        return resealed
    seen, blind = seen_with(loaded.vision, spec)
    return replace(resealed, vision=seen, blind=blind)


def seen_with(seen: Vision, spec: ModelCacheSpec) -> tuple[Vision | None, str]:
    """Returns a model's vision if its caches support it, else why not: only the pool's caches make the masks of
    bidirectional image attention."""
    return (None, PICTURES_NEED_THE_POOL) if seen.bidirectional and spec.policy is None else (seen, "")


def _format(spec: ModelCacheSpec) -> str:
    return spec.policy.format if spec.policy else f"{FULL_PRECISION}.1"


def _with_vision(how: _How, running: _Running, loaded: LoadedModel, findings: Findings, pieces: Pieces) -> LoadedModel:
    """Returns a model with its encoder of pictures, if it has one."""
    seen, blind = _vision(how, running.whole, loaded.spec, findings, pieces)
    identity = loaded.identity
    if seen is not None and seen.bidirectional:
        identity = replace(identity, computing={**identity.computing, "attention": "both ways in pictures"})
    given = None if seen is None else seen.language_inputs
    return replace(loaded, identity=identity, vision=seen, language_inputs=given, blind=blind)


def _vision(
    how: _How, model: Any, spec: ModelCacheSpec, findings: Findings, pieces: Pieces
) -> tuple[Vision | None, str]:
    """Returns a model's encoder of pictures, or why there is none."""
    source, folder = how.source, how.folder
    try:
        processor = PictureProcessor.load(folder, trusted=how.trusted)
        seen = Vision(model, processor, together=how.numerics == "fast", findings=findings, pieces=pieces)
        return seen_with(seen, spec)
    except NotLeftToRightError as error:
        raise ModelLoadError(f"{source} cannot be served: {error}") from error
    except ModelLoadError:
        # It would run code that is not trusted.
        raise
    except _LOAD_ERRORS as error:
        return None, in_words(error, folder)


def _refuse_encoders(source: str, kind: str) -> None:
    if any(name in kind.lower() for name in _ENCODERS):
        raise ModelLoadError(
            f"{source} is a bidirectional encoder ({kind}), and only causal models are supported; "
            "for embeddings take one such as Qwen3-Embedding"
        )


def _hidden(running: _Running, findings: Findings, pieces: Pieces) -> HiddenStates | str:
    """Finds the hidden states of a model with its own caches, or why there are none."""
    model, vocabulary = running.called, int(running.logits.shape[-1])
    root, places = (model.root, model.places) if isinstance(model, LanguagePart) else (model, None)
    # If layers keep lists of caches, the spec of a flat list does not fit.
    spec = read_spec(running.caches, 2) if running.model is running.called else None
    try:
        return find_hidden_states(model, root, vocabulary, places, spec=spec, findings=findings, pieces=pieces)
    except _LOAD_ERRORS as error:
        return first_sentence(error)


def check_memory(source: str, needed: int) -> None:
    """Refuses weights that do not fit into the free memory: the machine would swap, or the kernel would kill a process.

    Raises:
        NoRoom: they do not fit; the message has both sizes.
    """
    free = device_bytes(free=True)
    if needed > free:
        raise NoRoom(
            f"{source} needs {needed / _GIB:.2f} GiB of memory for its weights alone, and {free / _GIB:.2f} GiB are "
            "free: end other programs, unload another model, or take a smaller or more quantized one"
        )


def _add_adapter(model: Any, folder: Path) -> None:
    """Adds a LoRA or DoRA adapter (or a full fine-tune) to the model, with mlx-lm's own loader.

    The loader refuses tensors for which the model has no place. But it does not notice incomplete layers, in which a
    random matrix would be multiplied with a trained one. These are refused here.

    Raises:
        ModelLoadError: it is not a complete adapter of this model.
    """
    config = read_json(folder / ADAPTER_CONFIG)
    if "peft_type" in config:
        raise ModelLoadError(f"the adapter {folder} is PEFT's; mlx-lm reads only those it wrote itself")
    names = read_weight_file(folder / ADAPTER_WEIGHTS).tensors.keys()
    try:
        mlx_lm_load_adapters(model, str(folder))
    except _LOAD_ERRORS as error:
        raise ModelLoadError(f"the adapter {folder} does not fit the model: {first_sentence(error)}") from error
    # Otherwise the new layers would apply dropout, as in training.
    model.eval()
    places: list[str] = [name for name, _ in tree_flatten(model.parameters())]
    filled = {name.rpartition(".")[0] for name in names if name.rpartition(".")[2] in _ADAPTER_LEAVES}
    missing = [
        name
        for name in places
        if name.rpartition(".")[2] in _ADAPTER_LEAVES and name.rpartition(".")[0] in filled and name not in names
    ]
    if missing or not names:
        raise ModelLoadError(f"the adapter {folder} is incomplete: it lacks {missing[0] if missing else 'all tensors'}")


def pick_dtype(wanted: str) -> mx.Dtype | None:
    """Returns the compute dtype. For `auto` it is float32 on a CPU, where half precision is slow and less exact, else
    None: the model's own."""
    if wanted != "auto":
        return getattr(mx, wanted)
    return None if on_gpu() else mx.float32


__all__ = ["EMBEDDED", "LoadedModel", "Progress", "load", "resolve", "resolve_adapter"]
