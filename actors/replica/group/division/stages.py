"""Divides a model's layers into stages: the first has the embedding, the last the final norm and the output layer.

Names of model families are not used. A model can be divided if its layers form a chain: each is called once, in order,
gets exactly what the one before it returned, and besides that nothing that depends on tokens. That is found out by
running the model with recorders in place of its layers, which computes nothing.

A stage runs the model's own code. Layers of other stages pass on what they get: the one before the stage gives the
hidden states that came from the stage before, and the one after it takes those that the next stage needs. So masks,
positions and whatever else a model makes for its layers are made as in the whole model. Weights of other stages are
never read: MLX reads lazy weights only when they are computed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import CacheList, make_prompt_cache

from .....cluster.errors import ModelLoadError
from ....model_files.source import first_sentence

_TOKENS = ((1, 2, 3), (4, 5, 6))
"""Tokens of the texts with which a model is recorded."""

MADE_UP = 16
"""How many different hidden states are made up."""

_ERRORS = (Exception, SystemExit)
"""What a model's code raises if its layers are something else than it expects."""


class Stage:
    """Layers [start, stop) of a model, as a model of its own. Used on one thread.

    Args:
        chain: of the model, which is the stage's from then on.
        embeds: whether it keeps what the model has before its layers, though it has other layers than the first.

    Raises:
        ModelLoadError: layers on both sides of a cut share KV, or the model's code asks for what other layers have.

    Attributes:
        start, stop, count: its layers, and how many the whole model has.
        last: whether it has the final norm and the output layer.
        model: the whole model, in which stand-ins take the places of what other stages have. Its `parameters` are this
            stage's.
        adds_levels: as in `Chain`.
        all_kinds: whether it has a layer of each kind that the whole model has.
        width: numbers of a hidden state.
        joins: whether each layer of the whole model has one cache.
    """

    def __init__(self, chain: Chain, start: int, stop: int, *, embeds: bool = False) -> None:
        count = len(chain.layers)
        if not 0 <= start < stop <= count:
            raise ValueError(f"layers {start} to {stop} are no stage of {count} layers")
        self.model, self._called, self.width = chain.model, chain.called, chain.width
        self.start, self.stop, self.count, self.last = start, stop, count, stop == count
        self._passing = _Passing()
        self._drawn: mx.array | None = None
        empty = make_prompt_cache(self._called)
        kinds = [_kind(cache) for cache in empty]
        self.joins = all(len(layer) == 1 for layer in chain.caches) and not any(
            type(each) is CacheList for each in empty
        )
        self._own = sorted({cache for layer in chain.caches[start:stop] for cache in layer})
        elsewhere = {cache for layer in (*chain.caches[:start], *chain.caches[stop:]) for cache in layer}
        if shared := elsewhere.intersection(self._own):
            raise ModelLoadError(
                f"the model cannot be divided between layers {start} and {stop}: layers on both sides share the KV of "
                f"cache {min(shared)}"
            )
        # A model makes its masks from any layer's cache: here from one of the same kind, which is as long.
        places = {kinds[cache]: place for place, cache in reversed([*enumerate(self._own)])}
        self.adds_levels, self.all_kinds = chain.adds_levels, places.keys() == {*kinds}
        places_of = [
            self._own.index(cache) if cache in self._own else places.get(kinds[cache]) for cache in range(len(kinds))
        ]
        self._caches: list[int | _CacheElsewhere] = [
            _CacheElsewhere(cache) if place is None else place for cache, place in zip(empty, places_of, strict=True)
        ]
        chain.divide(self._passing, start, stop, embeds=embeds)
        try:
            # Nothing of it is computed.
            self(mx.zeros((1, 2), mx.uint32), self.make_cache())
        except _ERRORS as error:
            raise ModelLoadError(
                f"layers {start} to {stop} of the model cannot be a stage of their own: {first_sentence(error)}"
            ) from error

    def __call__(
        self, tokens: mx.array, cache: Sequence[Any], hidden: mx.array | None = None, **given: mx.array
    ) -> mx.array:
        """Computes the stage's layers.

        Args:
            tokens: `(sequences, tokens)`, an integer dtype; only the first stage reads more than their shape.
            cache: one for each of `make_cache`.
            hidden: `(sequences, tokens, width)`, from the stage before. Without them all stages but the first compute
                with made-up ones, which depend on the token only: no result, but good for tests of how it is computed.
            given: the model's other inputs, if it is a vision model (`LanguageInputs`).

        Returns:
            `(sequences, tokens, width)`, the hidden states for the next stage; of the last stage
            `(sequences, tokens, vocabulary)`, the logits.
        """
        passing = self._passing
        passing.given, passing.taken = self._made_up(tokens) if hidden is None else hidden, None
        logits = self._called(tokens, cache=self._all_caches(cache), **given)
        taken, passing.given, passing.taken = passing.taken, None, None
        if self.last:
            return logits
        assert taken is not None, "the layer after the stage was not called"
        return taken

    def _made_up(self, tokens: mx.array) -> mx.array:
        dtype = self._passing.dtype
        if dtype is None:
            # It is the first stage, which has its own, or nothing is computed yet.
            return mx.zeros((*tokens.shape, self.width))
        if self._drawn is None or self._drawn.dtype != dtype:
            # Drawn once, in the model's own dtype: a GPU would have to compile kernels for drawing them in a recorded
            # step, and for taking them in another dtype than those of an embedding.
            self._drawn = mx.random.normal((MADE_UP, self.width), key=mx.random.key(0)).astype(dtype)
            mx.eval(self._drawn)
        return self._drawn[tokens % MADE_UP]

    def make_cache(self) -> list[Any]:
        """Returns empty caches of one sequence for the stage's layers."""
        caches = make_prompt_cache(self._called)
        return [caches[place] for place in self._own]

    def _all_caches(self, own: Sequence[Any]) -> list[Any]:
        """Returns a cache for every layer of the model."""
        flat = [each for cache in own for each in (cache.caches if type(cache) is CacheList else [cache])]
        offset = next((cache.offset for cache in flat if hasattr(cache, "offset")), None)
        found = []
        for each in self._caches:
            if isinstance(each, _CacheElsewhere):
                each.stands_at(offset)
            found.append(each if isinstance(each, _CacheElsewhere) else own[each])
        return found


class _CacheElsewhere:
    """The cache of another stage's layer, of a kind that none of this stage's layers has. So no layer here needs its
    masks, but a model may ask it for the position."""

    def __init__(self, empty: Any) -> None:
        self._empty = empty
        self._offset: Any = None

    @property
    def offset(self) -> Any:
        """The position of the next token, as in the stage's own caches."""
        if self._offset is None:
            raise LookupError("none of its layers counts tokens")
        return self._offset

    def stands_at(self, offset: Any) -> None:
        """Sets the position; None if it is not known."""
        self._offset = offset

    def make_mask(self, *given: Any, **named: Any) -> None:
        """Returns None: nobody uses the mask."""

    def __getitem__(self, index: Any) -> Any:
        return self._empty[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._empty, name)


@dataclass
class _Passing:
    """What passes a stage's ends in a call: the hidden states that it is given, and those that are taken from it.
    `dtype` is that in which its first layer gets them, None before the first call and for the first stage."""

    given: mx.array | None = None
    taken: mx.array | None = None
    dtype: mx.Dtype | None = None


@dataclass
class _Call:
    """How a layer was called: what it got and what it returned, and its other arguments, flat. A cache is noted by its
    number in the model."""

    layer: int
    x: mx.array
    returned: mx.array
    caches: list[int]
    others: list[Any]


@dataclass
class _Record:
    """What was called in one run of a model whose layers were recorded.

    Attributes:
        caches: the model's.
        calls: of layers, in order.
        before, after: names of other modules that were used before the first layer and after it.
    """

    caches: list[Any]
    calls: list[_Call] = field(default_factory=list)
    before: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)


class _StandIn(nn.Module):
    """Takes the place of a module. It has no weights, and all that it does not have itself is the module's."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        # Not as a child, whose weights would be this model's.
        vars(self)["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


class _Passed(_StandIn):
    """A layer that passes on the hidden states that it gets."""

    def __call__(self, *given: Any, **named: Any) -> mx.array:
        x, *others = (*given, *named.values())
        return self._pass_on(x, others)

    def _pass_on(self, x: mx.array, others: list[Any]) -> mx.array:
        return x


class _RecordedLayer(_Passed):
    """A layer that notes how it is called."""

    def __init__(self, module: Any, number: int, record: _Record) -> None:
        super().__init__(module)
        self._number, self._record = number, record

    def _pass_on(self, x: mx.array, others: list[Any]) -> mx.array:
        record, arguments = self._record, [value for _, value in tree_flatten(others)]
        caches = [number for number, cache in enumerate(record.caches) if any(cache is each for each in arguments)]
        others = [each for each in arguments if not any(each is cache for cache in record.caches)]
        # A new array, so that it is seen whether the next layer gets it.
        returned = x + 0
        record.calls.append(_Call(self._number, x, returned, caches, others))
        return returned


class _Entrance(_Passed):
    """The layer before a stage: gives what came from the stage before."""

    def __init__(self, module: Any, passing: _Passing) -> None:
        super().__init__(module)
        self._passing = passing

    def _pass_on(self, x: mx.array, others: list[Any]) -> mx.array:
        assert self._passing.given is not None, "the layer before the stage was called twice"
        self._passing.dtype = x.dtype
        return self._passing.given.astype(x.dtype)


class _Exit(_Passed):
    """The layer after a stage: takes what the next stage needs."""

    def __init__(self, module: Any, passing: _Passing) -> None:
        super().__init__(module)
        self._passing = passing

    def _pass_on(self, x: mx.array, others: list[Any]) -> mx.array:
        self._passing.taken = x
        return x


class _Absent(_StandIn):
    """An embedding, a norm or an output layer of another stage. What it computes is never evaluated."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        return vars(self)["_module"](*given, **named)


class _RecordedModule(_Absent):
    """A module outside of the layers whose uses are noted."""

    def __init__(self, module: Any, name: str, record: _Record) -> None:
        super().__init__(module)
        self._name, self._record = name, record

    def __call__(self, *given: Any, **named: Any) -> Any:
        self._note()
        return super().__call__(*given, **named)

    def __getattr__(self, name: str) -> Any:
        self._note()
        return super().__getattr__(name)

    def _note(self) -> None:
        record = self._record
        (record.after if record.calls else record.before).add(self._name)


@dataclass(frozen=True)
class Chain:
    """A model's layers, if they form a chain.

    Attributes:
        model: the module that has the layers.
        called: takes tokens and caches as mlx-lm's models do.
        name: of the list of layers in the model.
        caches: for every layer, the numbers of its caches.
        width: numbers of a hidden state.
        before, after: names of the modules with weights that the model uses before its layers and after them.
        unused: names of those that it does not use.
        adds_levels: whether what a picture adds to hidden states is added level by level, one after each layer.
    """

    model: Any
    called: Any
    name: str
    layers: list[Any]
    caches: list[list[int]]
    width: int
    before: frozenset[str]
    after: frozenset[str]
    unused: frozenset[str]
    adds_levels: bool = False

    def divide(self, passing: _Passing, start: int, stop: int, *, embeds: bool = False) -> None:
        """Puts stand-ins into the model for all but layers [start, stop) and what belongs to them. With `embeds` what
        is before the layers stays too."""
        count, layers = len(self.layers), self.layers
        found: dict[int, Any] = {number: _Passed(layers[number]) for number in (*range(start), *range(stop, count))}
        if start > 0:
            found[start - 1] = _Entrance(layers[start - 1], passing)
        if stop < count:
            found[stop] = _Exit(layers[stop], passing)
        _replace(self.model, {f"{self.name}.{number}": layer for number, layer in found.items()})
        used = (self.before if start == 0 or embeds else frozenset()) | (self.after if stop == count else frozenset())
        modules = dict(self.model.named_modules())
        absent = (self.before | self.after | self.unused) - used
        _replace(self.model, {name: _Absent(modules[name]) for name in absent})


def find_chain(model: Any, called: Any = None) -> Chain:
    """Finds out whether a model's layers form a chain. Its weights may be lazy, and are not read.

    Args:
        called: takes tokens and caches as mlx-lm's models do, and the inputs of `LanguageInputs`, if the model is the
            language part of a vision model; None if the model is called itself.

    Raises:
        ModelLoadError: they do not; the message says why in one sentence.
    """
    place, layers = _layers_of(model)
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = {
        name: module
        for name, module in model.named_modules()
        if name and id(module) not in inside and _has_own_weights(module)
    }
    recording = _Recording(model, model if called is None else called, place, layers, outside)
    try:
        records = [recording.of(tokens) for tokens in _TOKENS]
    except _ERRORS as error:
        raise _refused(f"its code needs more of a layer than hidden states ({first_sentence(error)})") from error
    if why := _why_no_chain(records[0], records[1], len(layers)):
        raise _refused(why)
    calls, before, after = records[0].calls, records[0].before, records[0].after
    width = calls[0].x.shape[-1]
    if {cache for call in calls for cache in call.caches} != {*range(len(records[0].caches))}:
        raise _refused("some of its caches are of no layer")
    return Chain(
        model,
        recording.called,
        place,
        layers,
        [call.caches for call in calls],
        width,
        frozenset(before),
        frozenset(after),
        frozenset(outside.keys() - before - after),
        called is not None and _adds_levels(recording, width),
    )


def _refused(why: str) -> ModelLoadError:
    return ModelLoadError(f"the model cannot be divided among processes: {why}")


def _layers_of(model: Any) -> tuple[str, list[Any]]:
    """Returns the name of the list of a model's layers, and the layers."""
    try:
        layers = list(model.layers)
    except _ERRORS:
        layers = []
    for name, module in model.named_modules() if layers else ():
        for key, child in module.children().items():
            if isinstance(child, list) and len(child) == len(layers) and all(map(_same, child, layers)):
                return f"{name}.{key}" if name else key, layers
    raise _refused("it has no list of layers")


def _same(one: Any, other: Any) -> bool:
    return one is other


def _has_own_weights(module: nn.Module) -> bool:
    return any(isinstance(value, mx.array) for value in module.values()) and not any(
        isinstance(value, nn.Module | list | dict) for value in module.values()
    )


def _replace(model: Any, modules: dict[str, Any]) -> None:
    model.update_modules(tree_unflatten(list(modules.items())))


@dataclass(frozen=True)
class _Recording:
    """Runs a model with recorders in place of its layers, and of the modules outside of them.

    Attributes:
        model, called: as for `find_chain`.
        place: the name of the list of layers.
        outside: modules outside of the layers, by name.
    """

    model: Any
    called: Any
    place: str
    layers: list[Any]
    outside: dict[str, Any]

    def of(self, tokens: Sequence[int], **given: Any) -> _Record:
        """Returns what the model does with a text.

        Args:
            given: its inputs besides tokens and caches.
        """
        record = _Record(make_prompt_cache(self.called))
        own = {f"{self.place}.{number}": layer for number, layer in enumerate(self.layers)}
        recorders = {name: _RecordedLayer(layer, number, record) for number, (name, layer) in enumerate(own.items())}
        _replace(self.model, recorders)
        _replace(self.model, {name: _RecordedModule(module, name, record) for name, module in self.outside.items()})
        try:
            self.called(mx.array([tokens], mx.uint32), cache=record.caches, **given)
        finally:
            _replace(self.model, self.outside | own)
        return record


def _adds_levels(recording: _Recording, width: int) -> bool:
    """Whether a language part that gets as many levels as it has layers adds one after each."""
    tokens = _TOKENS[0]
    seen, level = mx.ones((1, len(tokens)), mx.bool_), mx.zeros((len(tokens), width))
    levels = [level] * len(recording.layers)
    for each in (levels, mx.stack(levels, axis=1)[None]):
        given = {"inputs_embeds": level[None], "visual_pos_masks": seen, "deepstack_visual_embeds": each}
        try:
            calls = recording.of(tokens, **given).calls
        except _ERRORS:
            continue
        if all(after.x is not before.returned for before, after in pairwise(calls)):
            return True
    return False


def _why_no_chain(one: _Record, other: _Record, count: int) -> str:
    """Returns why the layers that were recorded with two texts are no chain; empty if they are one."""
    if [call.layer for call in one.calls] != [*range(count)] or len(other.calls) != count:
        return "its layers are not called once each, in order"
    for before, after in zip(one.calls, one.calls[1:], strict=False):
        if after.x is not before.returned:
            return f"layer {after.layer} gets something else than what layer {before.layer} returns"
    for call, again in zip(one.calls, other.calls, strict=True):
        if call.caches != again.caches or not _alike(call.others, again.others):
            return f"layer {call.layer} gets more that depends on the tokens than hidden states"
    return ""


def _alike(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(
        bool(mx.array_equal(one, other, equal_nan=True).item())
        if isinstance(one, mx.array) and isinstance(other, mx.array)
        else type(one) is type(other) and (not isinstance(one, str | int | float) or one == other)
        for one, other in zip(some, others, strict=True)
    )


def _kind(cache: Any) -> Any:
    """Returns what caches have in common from which a model makes the same masks."""
    inner = tuple(map(_kind, cache.caches)) if type(cache) is CacheList else ()
    settings = tuple(sorted((name, value) for name, value in vars(cache).items() if isinstance(value, int | str)))
    return type(cache), settings, inner
