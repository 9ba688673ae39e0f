"""What the cluster serves, in Ray's control store: one key a model, so that no actor owns the list and every restart of
one finds it again. The only file on `ray.experimental.internal_kv`.

Every function here waits for the control store, about a millisecond: call them from a thread, not from an event loop.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from ray.experimental import internal_kv

from ..cluster.config import Model, name_refusal, parse_model
from ..cluster.errors import InvalidRequest, ModelNotFound

READ_S = 0.5
"""How long a reader may rely on what it has read."""

_NAMESPACE = "satchel"
_MODEL = "model:"


@dataclass(frozen=True)
class Entry:
    """A served model. No two entries ever have the same `order`; the least is the default model's."""

    order: int
    model: Model


def entries() -> tuple[Entry, ...]:
    """Every served model, the default first."""
    found = []
    for key in internal_kv._internal_kv_list(_MODEL, namespace=_NAMESPACE):
        value = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
        # None where it was removed between the two calls.
        if value is not None:
            data = json.loads(value)
            found.append(Entry(data["order"], parse_model(**data["model"])))
    return tuple(sorted(found, key=lambda entry: (entry.order, entry.model.name)))


def check_name(model: Model) -> tuple[Entry, ...]:
    """Refuse a model that could not be added.

    Returns:
        What is served, which was read for that.

    Raises:
        InvalidRequest: its name is taken, or its replicas would be called like another model's.
    """
    served = entries()
    refusal = name_refusal(model, (entry.model for entry in served))
    if refusal is not None:
        raise InvalidRequest(f"the name {model.name!r}: {refusal}; choose another", param="name")
    return served


def add(model: Model) -> None:
    """Serve a model, as the last one. Its replicas must be running, or be started next.

    Raises:
        InvalidRequest: as `check_name`.
    """
    served = check_name(model)
    # By the clock, so that a model that is loaded again differs from what it was; after all others whatever it says.
    order = max([time.time_ns(), *(entry.order + 1 for entry in served)])
    value = json.dumps({"order": order, "model": asdict(model)})
    if internal_kv._internal_kv_put(_key(model), value, overwrite=False, namespace=_NAMESPACE):
        raise InvalidRequest(f"the name {model.name!r} has just been taken; choose another", param="name")


def remove(name: str) -> Model:
    """Stop serving a model: whoever asks from now on does not find it. Its replicas run on.

    Raises:
        ModelNotFound: no such model.
        InvalidRequest: it is the only one.
    """
    served = [entry.model for entry in entries()]
    model = next((model for model in served if model.name == name), None)
    if model is None:
        known = ", ".join(model.name for model in served) or "none"
        raise ModelNotFound(f"the model {name!r} is not served; there are: {known}", param="model")
    if len(served) == 1:
        raise InvalidRequest(f"{name!r} is the only model; load another one first, or stop the server", param="model")
    if not internal_kv._internal_kv_del(_key(model), namespace=_NAMESPACE):
        raise ModelNotFound(f"the model {name!r} has just been unloaded by somebody else", param="model")
    return model


def holds(model: Model) -> bool:
    """Whether a model of that slug is served."""
    return bool(internal_kv._internal_kv_exists(_key(model), namespace=_NAMESPACE))


def _key(model: Model) -> str:
    return _MODEL + model.slug
