"""What the cluster serves and where, in Ray's control store: one key per model, replica and node. So no actor owns the
lists, and every restarted one finds them.

Every function waits for the control store, about a millisecond: call them from a thread, not from an event loop.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...cluster.config.config import Model, adapters_refusal, aliases_refusal, name_refusal, parse_model
from ...cluster.config.stages import Stage
from ...cluster.errors import InvalidRequest, ModelNotFound
from . import control_store
from .router_messages import NodeEntry

logger = logging.getLogger(__name__)

SERVED_S = 30.0
"""If a replica ends sooner than this after its model was loaded, the next process waits before it loads."""

_MODEL = "model:"
_REPLICA = "replica:"
_NODE = "node:"
_STARTS = "starts:"


@dataclass(frozen=True)
class ServedEntry:
    """A served model. No two entries ever have the same `order`; the default model has the lowest.

    `replicas` has the node of each replica by the replica's id, whether or not it is present now. A model that comes
    and goes has none while it is not loaded. `stages` has those of a divided model, by its replica.
    """

    order: int
    model: Model
    replicas: dict[str, str] = field(default_factory=dict, compare=False)
    stages: dict[str, tuple[Stage, ...]] = field(default_factory=dict, compare=False)

    @property
    def comes_and_goes(self) -> bool:
        """Whether the pool loads and unloads it."""
        return self.model.load == "request"


def entries() -> tuple[ServedEntry, ...]:
    """Returns every served model, the default first."""
    placed = _read(_REPLICA)
    served = []
    for data in _read(_MODEL).values():
        model = parse_model(**data["model"])
        own = {name: where for name, where in placed.items() if where["model"] == model.slug}
        replicas = {name: where["node"] for name, where in own.items()}
        stages = {
            name: tuple(Stage(*each) for each in where["stages"]) for name, where in own.items() if where.get("stages")
        }
        served.append(ServedEntry(data["order"], model, dict(sorted(replicas.items(), key=_by_number)), stages))
    return tuple(sorted(served, key=lambda entry: (entry.order, entry.model.name)))


def nodes() -> tuple[NodeEntry, ...]:
    """Returns every node that has joined and not left, sorted by name."""
    joined = []
    for data in _read(_NODE).values():
        links = tuple((str(address), str(kind)) for address, kind in data.pop("links"))
        joined.append(NodeEntry(links=links, **data))
    return tuple(sorted(joined, key=lambda node: node.name))


def add_node(node: NodeEntry) -> None:
    """Records that the node has joined, perhaps again."""
    value = json.dumps(asdict(node))
    control_store.put(_NODE + node.name, value)


def remove_node(name: str) -> None:
    """Records that the node has left for good."""
    control_store.delete(_NODE + name)


def place(model: Model, replica: str, node: str, stages: Sequence[Stage] = ()) -> None:
    """Records that a replica of the model belongs on a node; that of the last stage, if its layers are divided."""
    value = json.dumps({"model": model.slug, "node": node, "stages": stages})
    control_store.put(_REPLICA + replica, value)


def unplace(replica: str) -> None:
    """Removes the replica's entry."""
    control_store.delete(_REPLICA + replica)


def note_start(replica: str, *, again: bool) -> int:
    """Records the start of a replica's process. Returns how many processes in a row before it ended soon after their
    start.

    Args:
        again: whether it replaces one that has ended; if not, it is the first.
    """
    known = control_store.get(_STARTS + replica) if again else None
    count = int(known or 0)
    control_store.put(_STARTS + replica, str(count + 1))
    return count


def note_served(replica: str) -> None:
    """Records that the replica's process has served for a while: its end will not count as an early one."""
    control_store.delete(_STARTS + replica)


def note_served_later(replica: str) -> None:
    """Calls `note_served` in `SERVED_S`, on a thread of its own."""

    def note() -> None:
        try:
            note_served(replica)
        except Exception as error:
            logger.warning("the control store does not answer: %s", error)

    timer = threading.Timer(SERVED_S, note)
    timer.daemon = True
    timer.start()


def _read(prefix: str) -> dict[str, dict[str, Any]]:
    """Returns the values under a prefix, by the rest of the key."""
    values = {}
    for key in control_store.keys(prefix):
        value = control_store.get(key)
        # None if it was removed between the two calls.
        if value is not None:
            values[key.removeprefix(prefix)] = json.loads(value)
    return values


def _by_number(item: tuple[str, str]) -> list[str | int]:
    """Sorts `m-10` after `m-9`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]


def check_name(model: Model) -> tuple[ServedEntry, ...]:
    """Checks that a model could be added. Returns the served models.

    Raises:
        InvalidRequest: its name is taken, or its replicas would have the names of another model's.
    """
    served = entries()
    others = [entry.model for entry in served]
    refusal = name_refusal(model, others)
    if refusal is not None:
        raise InvalidRequest(f"the name {model.name!r}: {refusal}; choose another", param="name")
    refusal = aliases_refusal(model, others)
    if refusal is not None:
        raise InvalidRequest(f"aliases: {refusal}; choose another", param="aliases")
    refusal = adapters_refusal(model, others)
    if refusal is not None:
        raise InvalidRequest(f"adapters: {refusal}; choose another", param="adapters")
    return served


def add(model: Model) -> None:
    """Adds a model, as the last one. Its replicas must be running, or be started next.

    Raises:
        InvalidRequest: as `check_name`.
    """
    served = check_name(model)
    # From the clock, so that a model that is loaded again gets another number, and above all others, even if the clock
    # was set back.
    order = max([time.time_ns(), *(entry.order + 1 for entry in served)])
    value = json.dumps({"order": order, "model": asdict(model)})
    if control_store.put(_key(model), value, overwrite=False):
        raise InvalidRequest(f"the name {model.name!r} has just been taken; choose another", param="name")


def remove(name: str) -> ServedEntry:
    """Removes a model: new requests do not find it. Its replicas keep running. Returns its last entry.

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
    if not control_store.delete(_key(found.model)):
        raise ModelNotFound(f"the model {name!r} has just been removed by somebody else", param="model")
    for replica in found.replicas:
        unplace(replica)
    return found


def places(replica: str) -> bool:
    """Returns whether the replica has an entry."""
    return control_store.holds(_REPLICA + replica)


def _key(model: Model) -> str:
    return _MODEL + model.slug
