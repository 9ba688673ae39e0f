"""Loads one process's part of a model: a stage, of which only the layers' weights are read, or a share of every
layer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

from ....cluster.config.config import Model
from ....cluster.config.stages import Stage as PlannedStage
from ....cluster.environment import default_home
from ....cluster.errors import ModelLoadError, NoRoom
from ...model_files.context import context_length
from ...model_files.foreign_code import refuse_model_file
from ...model_files.identity.digests import digests_meanwhile
from ...model_files.identity.model_identity import ModelIdentity
from ...model_files.identity.model_parts import ModelPart, identity_of
from ...model_files.source import Progress, first_sentence, read_json, resolve
from ...model_files.text.end_tokens import end_tokens
from ...model_files.weights import read_weight_files
from ..device import blas
from ..device.device import device_bytes, on_cuda, on_gpu, size_graphs
from ..execution.decode_way import DEQUANTIZED
from ..execution.loaded_model import LoadedModel
from ..execution.media.language_inputs import LanguageInputs, separate
from ..execution.media.vision import Vision
from ..execution.padding import PIECE_TOKENS, PIECE_TOKENS_ELSEWHERE
from ..kernels import gpu_kernels
from ..kernels.sealing import FULL_PRECISION, POLICIES
from ..kv import attention, soft_caps
from ..kv.caches import ModelCacheSpec, joins, new_pool, read_spec
from ..kv.paged_cache import Reads
from ..loading import joined
from ..loading.model_id import computing, files_of, order_of_weights, products_id, refuse_elsewhere
from ..loading.models import pick_dtype
from ..loading.prepare import prepare_weights
from ..loading.quirks import with_windows
from ..loading.warming import kernels_ahead
from ..loading.ways import few_rows_check
from ..loading.ways.decode_ways import fastest
from ..proving.findings import Findings
from .division.needs import policy_of
from .division.opened import Opened, open_lazily
from .division.pipeline import PipelinedStage
from .division.stages import Stage
from .pictures.encoder import encoder_of
from .tensor.joining import refuse_missing
from .tensor.model import SharePart
from .tensor.ranks import Ranks

logger = logging.getLogger(__name__)

_GIB = 2**30


class Part(Protocol):
    """Which part of a model a process has.

    Attributes:
        words: of it, for errors.
        logits: whether what it computes are logits.
        leads: whether its process leads the group, and has a vision model's encoder. Known once a model was cut.
        shares: how many processes have equal shares of its layers, this one included.
    """

    @property
    def words(self) -> str: ...

    @property
    def logits(self) -> bool: ...

    @property
    def leads(self) -> bool: ...

    @property
    def shares(self) -> int: ...

    def cut(self, opened: Opened) -> None:
        """Cuts a model with lazy weights to the part."""

    def model(self) -> Any:
        """Returns the part as a model that a batch calls."""

    def identity(self, whole: ModelIdentity) -> ModelIdentity:
        """Returns the identity of the part, given that of the whole model."""
        ...

    def joinable(self, spec: ModelCacheSpec) -> tuple[ModelPart, int] | None:
        """Returns the part, and how many layers the model has, if KV of other parts can be joined to its own."""

    def piece_tokens(self, spec: ModelCacheSpec) -> int | None:
        """As in `LoadedModel`."""

    def language_inputs(self, whole: Any) -> LanguageInputs:
        """Returns the inputs of the part's layers, given a vision model that was cut to it."""
        ...

    def encoder(
        self, whole: Any, given: LanguageInputs, folder: Path, spec: ModelCacheSpec, findings: Findings
    ) -> tuple[Vision | None, str]:
        """Returns the leader's encoder of pictures; the rest and errors as for `encoder_of`."""
        ...


class StagePart:
    """Layers [start, stop) of a model."""

    def __init__(self, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._stage: Stage | None = None

    @property
    def words(self) -> str:
        return f"layers {self._start} to {self._stop}"

    @property
    def logits(self) -> bool:
        return self.stage.last

    leads = logits
    shares = 1

    @property
    def stage(self) -> Stage:
        assert self._stage is not None, "no model was cut yet"
        return self._stage

    def cut(self, opened: Opened) -> None:
        """As `Part.cut`."""
        chain = opened.chain()
        # Among a picture's tokens are some of text, whose embeddings the encoder needs.
        self._stage = Stage(chain, self._start, self._stop, embeds=opened.seeing and self._stop == len(chain.layers))

    def model(self) -> PipelinedStage:
        """As `Part.model`."""
        return PipelinedStage(self.stage)

    def identity(self, whole: ModelIdentity) -> ModelIdentity:
        """As `Part.identity`."""
        return identity_of(whole, ModelPart(self._start, self._stop), self.stage.count)

    def joinable(self, spec: ModelCacheSpec) -> tuple[ModelPart, int] | None:
        """As `Part.joinable`."""
        part = ModelPart(self._start, self._stop)
        return (part, self.stage.count) if self.stage.joins and spec.reusable else None

    def piece_tokens(self, spec: ModelCacheSpec) -> int | None:
        """As `Part.piece_tokens`."""
        # Recurrent layers' scans of other lengths round otherwise.
        return None if spec.recurrent else PIECE_TOKENS if on_cuda() else PIECE_TOKENS_ELSEWHERE

    def language_inputs(self, whole: Any) -> LanguageInputs:
        """As `Part.language_inputs`."""
        return LanguageInputs(separate(whole), embeds=self._start == 0, levels_from=self._start)

    def encoder(
        self, whole: Any, given: LanguageInputs, folder: Path, spec: ModelCacheSpec, findings: Findings
    ) -> tuple[Vision | None, str]:
        """As `Part.encoder`."""
        if not self.stage.all_kinds:
            raise ModelLoadError("give the last node more layers: it has none of some of the model's kinds of layers")
        stage = self.model()

        def compute(tokens: mx.array, embeds: mx.array, others: dict[str, Any]) -> mx.array:
            return stage.compute(tokens, stage.make_cache(), embeds, **others)[0]

        return encoder_of(whole, given, compute, folder, spec, findings, adds_levels=self.stage.adds_levels)


def load_stage(source: str, start: int, stop: int, **how: Any) -> LoadedModel:
    """Loads layers [start, stop) of a model. Its model is a `PipelinedStage`, which computes with made-up
    hidden states until it is connected. Arguments and errors as for `load_part`."""
    return load_part(source, StagePart(start, stop), **how)


def load_part(
    source: str,
    part: Part,
    *,
    dtype: str = "auto",
    weights: str = "stored",
    kv: str = "q4",
    context_tokens_max: int | None = None,
    digests: Path | None = None,
    trials: Path | None = None,
    progress: Progress = lambda what, fraction: None,
    claim: Callable[[int], None] = lambda nbytes: None,
    memory_bytes_max: int | None = None,
) -> LoadedModel:
    """Loads a part of a model. The part that leads has the encoder of a vision model too.

    Args:
        dtype: `auto`, or the name of an MLX float type.
        weights: see `prepare_weights`. With `auto` each process decides for its own part; on CPUs they are `stored`.
        kv: how KV is kept, one of `POLICIES`.
        digests: a file for the digests of the model's files.
        trials: a file for what tests find.
        claim: called with the bytes of the part's weights before they are read.
        memory_bytes_max: what this process may use, at most; None for all of the device's memory.

    Raises:
        ModelLoadError: it cannot be loaded or divided; the message says why in one sentence.
    """
    size_graphs()
    if weights == "auto" and not on_gpu():
        weights = "stored"
    # Before any library takes OpenBLAS for itself.
    blas.chosen()
    folder = resolve(source, progress)
    config = read_json(folder / "config.json")
    refuse_model_file(source, config, trusted=False)
    refuse_elsewhere(source, config)
    files = read_weight_files(folder)
    ahead = kernels_ahead.begin(config, files, pick_dtype(dtype), kv, shares=part.shares, whole=False)
    paths = files_of(folder)
    what = f"checking the files of {source}"
    with digests_meanwhile(paths, digests, lambda fraction: progress(what, fraction)) as digests_of:
        try:
            opened = open_lazily(folder)
            if (chosen := pick_dtype(dtype)) is not None:
                # Before it is divided, so that what stands in for other parts has the same type.
                opened.whole.set_dtype(chosen)
            part.cut(opened)
            if ahead is not None:
                ahead.opened(opened.language)
            own = opened.whole if part.leads else opened.language
            _check_memory(own, claim)
            told = partial(progress, f"loading {source}")
            kept = prepare_weights(own, None, weights, told, memory_bytes_max)
            model = part.model()
            caches = model.make_cache()
            states = model(mx.array([[0, 0]], mx.uint32), cache=caches)
            mx.eval(states, [cache.state for cache in caches])
        except NoRoom:
            raise
        except (Exception, SystemExit) as error:
            why = error.message if isinstance(error, ModelLoadError) else first_sentence(error)
            raise ModelLoadError(f"{part.words} of {source} cannot be loaded: {why}") from error
        digested = digests_of()
    spec = with_windows(model, read_spec(caches, 2, POLICIES[kv]))
    installed = any([attention.install(opened.whole), soft_caps.install(opened.whole)])
    seen = str(states.dtype).removeprefix("mlx.core.")
    files_digests = {name: each.digest.hex() for name, each in digested.items()} | order_of_weights(folder, files)

    def identity(weights: str) -> ModelIdentity:
        # As of a model that is not divided.
        dtype_seen = seen if pick_dtype(dtype) is not None else f"{seen}, own"
        how = _computing(dtype_seen, weights, spec, seeing=opened.seeing)
        return part.identity(ModelIdentity(files_digests, how))

    context = context_length(opened.config, getattr(opened.whole, "args", None)).tokens
    context = min(context, context_tokens_max or context)
    multiplied, way = kept, DEQUANTIZED
    if on_gpu() or gpu_kernels.is_available():
        # As for a model that is not divided. Each process tests its part alone, all at the same time.
        whose = f"{part.words} of {source}"
        progress(f"testing how products of {whose} are joined", None)
        if joined.join(opened.language, model, Findings(trials, identity(kept).model_id)):
            multiplied = f"{kept}, joined"
        progress(f"testing how {whose} multiply few rows", None)
        few_rows_check.install(opened.language, Findings(trials, products_id(kept)))
        if installed and spec.policy is not None:
            progress(f"testing how {whose} read their KV", None)
            known = Findings(trials, identity(multiplied).model_id)
            way = replace(fastest(model, spec, context, known, whole=False, shared=part.shares > 1), drafts=False)
    loaded = LoadedModel(
        model=model,
        folder=folder,
        identity=identity(multiplied),
        spec=spec,
        context_tokens=context,
        vocabulary_size=int(states.shape[-1]) if part.logits else 0,
        eos_token_ids=end_tokens(folder, source, trusted=False),
        dtype=seen,
        weights=kept,
        multiplying="" if on_gpu() else blas.chosen().describe(),
        pool=new_pool(spec, kernels=way.reads is Reads.KERNEL),
        way=way,
        unbatched=not all(map(joins, caches)),
        hidden="its layers are divided among processes",
        part=part.joinable(spec),
        piece_tokens=part.piece_tokens(spec),
        blind=opened.blind,
    )
    return _with_pictures(loaded, opened, part, source, trials) if opened.seeing else loaded


def _with_pictures(loaded: LoadedModel, opened: Opened, part: Part, source: str, trials: Path | None) -> LoadedModel:
    """Returns a part of a vision model with what its layers get of pictures, and the leader's with the encoder."""
    given, identity = part.language_inputs(opened.whole), loaded.identity
    loaded = replace(loaded, language_inputs=given)
    if not part.leads:
        return loaded
    try:
        seen, blind = part.encoder(opened.whole, given, loaded.folder, loaded.spec, Findings(trials, identity.model_id))
    except ModelLoadError as error:
        raise ModelLoadError(f"{source} cannot be divided: {error.message}") from error
    if blind:
        logger.warning("%s is served for text alone: %s", source, blind)
    if seen is not None and seen.audio is not None:
        # No self-test of a group has audio.
        seen = seen.without_audio("its layers are divided among processes")
    return replace(loaded, vision=seen, blind=blind)


def load_planned(
    model: Model,
    stage: PlannedStage,
    rank: int,
    progress: Progress,
    claim: Callable[[int], None],
    memory_bytes_max: int | None,
) -> LoadedModel:
    """Loads a process's part of a model as the config says, the same in all processes of a group. Errors as for
    `load_part`."""
    part: Part = StagePart(stage.start, stage.stop)
    if model.split is not None and model.split.tensor is not None:
        refuse_missing(model.split)
        part = SharePart(Ranks(rank, model.split.tensor))
    return load_part(
        model.source,
        part,
        dtype=model.dtype,
        weights=model.weights,
        kv=policy_of(model.kv),
        context_tokens_max=model.context_tokens_max,
        digests=default_home().digests_file,
        trials=default_home().trials_file,
        progress=progress,
        claim=claim,
        memory_bytes_max=memory_bytes_max,
    )


def _computing(dtype: str, weights: str, spec: ModelCacheSpec, *, seeing: bool) -> dict[str, str]:
    """Returns how a stage computes, as in a model's identity; chips of one kind may differ within a group."""
    kv = f"{FULL_PRECISION}.1" if spec.policy is None else spec.policy.format
    return computing(dtype=dtype, weights=weights, kv=kv, numerics="fast", seeing=seeing)


def _check_memory(model: Any, claim: Callable[[int], None]) -> None:
    arrays: list[Any] = [array for _, array in tree_flatten(model.parameters())]
    needed = sum(array.nbytes for array in arrays)
    claim(needed)
    free = device_bytes(free=True)
    if needed > free:
        raise NoRoom(
            f"its weights need {needed / _GIB:.2f} GiB of memory, and {free / _GIB:.2f} GiB are free: give this node "
            "fewer layers, or end other programs"
        )
