"""What the cluster serves and where, in Ray's control store: one key a model, a replica, a node. So no actor owns the
lists, and every restart of one finds them again. The only file on `ray.experimental.internal_kv`.

Every function here waits for the control store, about a millisecond: call them from a thread, not from an event loop.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from ray.experimental import internal_kv

from ...cluster.config import Model, name_refusal, parse_model
from ...cluster.connection import NAMESPACE
from ...cluster.errors import InvalidRequest, ModelNotFound

_NAMESPACE = NAMESPACE
_MODEL = "model:"
_REPLICA = "replica:"
_NODE = "node:"
_STARTS = "starts:"


@dataclass(frozen=True)
class ServedEntry:
    """A served model. No two entries ever have the same `order`; the least is the default model's.

    `replicas` are the ids of its replicas and the nodes they are on, whether or not those are there now.
    """

    order: int
    model: Model
    replicas: dict[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class NodeEntry:
    """A machine that has joined, whether or not it is there now.

    Attributes:
        links: (address, kind) of every way to its KV, the fastest first.
        home: the folder of its memory.
        since_s: when it joined last, seconds since 1970.
    """

    name: str
    address: str
    links: tuple[tuple[str, str], ...]
    version: str
    home: str
    since_s: float


def entries() -> tuple[ServedEntry, ...]:
    """Every served model, the default first."""
    placed = _read(_REPLICA)
    found = []
    for data in _read(_MODEL).values():
        model = parse_model(**data["model"])
        replicas = {name: where["node"] for name, where in placed.items() if where["model"] == model.slug}
        found.append(ServedEntry(data["order"], model, dict(sorted(replicas.items(), key=_by_number))))
    return tuple(sorted(found, key=lambda entry: (entry.order, entry.model.name)))


def nodes() -> tuple[NodeEntry, ...]:
    """Every node that has joined and not left, by name."""
    found = []
    for data in _read(_NODE).values():
        links = tuple((str(address), str(kind)) for address, kind in data.pop("links"))
        found.append(NodeEntry(links=links, **data))
    return tuple(sorted(found, key=lambda node: node.name))


def add_node(node: NodeEntry) -> None:
    """The node has joined, or joined again."""
    value = json.dumps(asdict(node))
    internal_kv._internal_kv_put(_NODE + node.name, value, overwrite=True, namespace=_NAMESPACE)


def remove_node(name: str) -> None:
    """The node has left for good."""
    internal_kv._internal_kv_del(_NODE + name, namespace=_NAMESPACE)


def place(model: Model, replica: str, node: str) -> None:
    """A replica of the model belongs on a node."""
    value = json.dumps({"model": model.slug, "node": node})
    internal_kv._internal_kv_put(_REPLICA + replica, value, overwrite=True, namespace=_NAMESPACE)


def unplace(replica: str) -> None:
    """There is no such replica any more."""
    internal_kv._internal_kv_del(_REPLICA + replica, namespace=_NAMESPACE)


def note_start(replica: str, *, again: bool) -> int:
    """A process of the replica starts. How many before it, one after the other, have ended soon after their start.

    Args:
        again: whether it takes the place of one that has ended; else it is the first.
    """
    known = internal_kv._internal_kv_get(_STARTS + replica, namespace=_NAMESPACE) if again else None
    count = int(known or 0)
    internal_kv._internal_kv_put(_STARTS + replica, str(count + 1), overwrite=True, namespace=_NAMESPACE)
    return count


def note_served(replica: str) -> None:
    """The replica's process has served for a while: what ends it now has nothing to do with its start."""
    internal_kv._internal_kv_del(_STARTS + replica, namespace=_NAMESPACE)


def _read(prefix: str) -> dict[str, dict[str, Any]]:
    """The values under a prefix, by what follows it."""
    found = {}
    for key in internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE):
        value = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
        # None where it was removed between the two calls.
        if value is not None:
            found[key.decode().removeprefix(prefix)] = json.loads(value)
    return found


def _by_number(item: tuple[str, str]) -> list[str | int]:
    """`m-10` after `m-9`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]


def check_name(model: Model) -> tuple[ServedEntry, ...]:
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


def remove(name: str) -> ServedEntry:
    """Stop serving a model: whoever asks from now on does not find it. Its replicas run on.

    Raises:
        ModelNotFound: no such model.
        InvalidRequest: it is the only one.
    """
    served = entries()
    found = next((entry for entry in served if entry.model.name == name), None)
    if found is None:
        known = ", ".join(entry.model.name for entry in served) or "none"
        raise ModelNotFound(f"the model {name!r} is not served; there are: {known}", param="model")
    if len(served) == 1:
        raise InvalidRequest(f"{name!r} is the only model; load another one first, or stop the server", param="model")
    if not internal_kv._internal_kv_del(_key(found.model), namespace=_NAMESPACE):
        raise ModelNotFound(f"the model {name!r} has just been unloaded by somebody else", param="model")
    for replica in found.replicas:
        unplace(replica)
    return found


def holds(model: Model) -> bool:
    """Whether a model of that slug is served."""
    return bool(internal_kv._internal_kv_exists(_key(model), namespace=_NAMESPACE))


def _key(model: Model) -> str:
    return _MODEL + model.slug
