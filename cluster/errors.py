"""Every error Satchel raises on purpose, as one tree.

::

    SatchelError                    500
    ├── RequestError                400  the caller's fault; `param` names the field
    │   ├── InvalidRequest          400
    │   ├── ContextLengthExceeded   400
    │   ├── KeyRefused              401  no key, or one that is not known
    │   ├── NotAllowed              403  another host, a page of another origin, or not for this key
    │   ├── ModelNotFound           404
    │   ├── InvalidSatchel          400  a file that is no satchel, or damaged
    │   ├── AgentNotFound           404
    │   ├── NodeNotFound            404
    │   ├── ResponseNotFound        404
    │   ├── FileNotFound            404  no uploaded file of that id
    │   ├── BatchNotFound           404
    │   ├── RequestNotFound         404
    │   ├── PreviousResponseNotFound 400
    │   ├── SlowBody                408  the request came too slowly
    │   ├── SlowReader              408  the answer was read too slowly
    │   ├── AgentBusy               409
    │   ├── AgentExists             409
    │   ├── ModelBusy               409  requests wait for the model, so it is not unloaded now
    │   ├── PictureLost             409  a picture of a stored transcript; its KV and its image embeddings are gone
    │   ├── RequestTooLarge         413
    │   ├── UnsupportedMediaType    415
    │   ├── RateLimited             429  more than the key's limits allow
    │   ├── QuotaExceeded           429  the key's agents have filled their disk quota
    │   └── RequestAborted          499  by its owner or an administrator, by its id
    ├── Unavailable                 503  try again after `retry_after_s`
    │   ├── QueueFull               503
    │   ├── NoReplica               503
    │   ├── ComputesOtherwise       503  the replica's model id differs from the request's: make its block ids again
    │   ├── ReplicaLost             503
    │   │   ├── ReplicaDied         503  its process ended, perhaps by what it was computing
    │   │   └── ReplicaLeaves       503  its node leaves the cluster: its sequences fail over
    │   ├── NoAnswer                503  an actor was called, and no answer came
    │   │   ├── ActorLost           503  its process has ended, as far as Ray can tell
    │   │   │   └── ActorAway       503  it cannot be reached now, and may come back by itself
    │   │   ├── ActorSilent         503  it did not answer within the time limit
    │   │   └── OtherVersion        503  its answer is of another protocol version
    │   ├── AgentElsewhere          503  its memory has moved; the new primary answers
    │   ├── MemoryFull              507  no room for agents' transcripts on the disk or in transcripts_bytes_max
    │   └── Draining                503
    ├── DeadlineExceeded            504
    ├── GenerationFailed            500  one sequence failed inside the model; the others in the batch did not
    ├── ModelLoadError              500
    │   └── NoRoom                  500  the memory of its node has no room for it beside the models that are loaded
    ├── DiskError                   500  a call to the disk tier failed; it goes on
    │   ├── DiskFull                507
    │   ├── StoreInUse              500  another process has the folder
    │   ├── StaleEpoch              409  the store was reopened and the writer does not know yet
    │   ├── InvalidRecord           500  a writer's record has impossible values
    │   └── CorruptSegment          500  a file's content is not what was written
    └── ClusterError                500  the cluster cannot be started, found or stopped
        ├── ConfigError             500  `path` is the place in the config file
        ├── KeysDamaged             500
        ├── NotRunning              500
        ├── PortInUse               500
        ├── HomeInUse               500
        ├── NodeRemoved             500  the head has removed this machine from its cluster
        └── LinkError               500  a connection between two nodes' stores
            ├── EntryDamaged        500  an entry does not match its digest
            ├── LinkGarbage         500  the peer speaks another protocol, or was cut off
            ├── LinkVersion         500
            └── LinkRefused         500  the peer lacks the cluster's key, or is another node

Errors cross process borders as data (`to_wire`, `from_wire`), never as pickled exceptions, so the two sides need not
share exception classes.
"""

from __future__ import annotations

import reprlib
from typing import Any, ClassVar

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def quoted(value: Any) -> str:
    """Returns what a caller wrote, for an error message; shortened if it is long."""
    return _SHORT.repr(value)


class SatchelError(Exception):
    """Base of the tree. `status` is the HTTP status, `code` the machine-readable name OpenAI clients see."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_wire(self) -> dict[str, Any]:
        """Returns this error as plain data: class name, message, param, retry_after_s."""
        return {
            "kind": type(self).__name__,
            "message": self.message,
            "param": self.param,
            "retry_after_s": self.retry_after_s,
        }


class RequestError(SatchelError):
    status = 400
    code = "invalid_request"


class InvalidRequest(RequestError):
    pass


class ContextLengthExceeded(RequestError):
    """A prompt that does not fit. `tokens` is its length or a lower bound of it, `tokens_max` the most that a prompt
    may have; None if unknown. They do not cross process borders."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        tokens: int | None = None,
        tokens_max: int | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.tokens = tokens
        self.tokens_max = tokens_max


class KeyRefused(RequestError):
    status = 401
    code = "invalid_api_key"


class NotAllowed(RequestError):
    status = 403
    code = "not_allowed"


class ModelNotFound(RequestError):
    """`model` is the name that was asked for, "" if unknown; it does not cross process borders."""

    status = 404
    code = "model_not_found"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None, model: str = ""
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.model = model


class AgentNotFound(RequestError):
    status = 404
    code = "agent_not_found"


class NodeNotFound(RequestError):
    status = 404
    code = "node_not_found"


class InvalidSatchel(RequestError):
    """A file that is no satchel, or damaged."""

    code = "invalid_satchel"


class ResponseNotFound(RequestError):
    status = 404
    code = "not_found"


class FileNotFound(RequestError):
    status = 404
    code = "not_found"


class BatchNotFound(RequestError):
    status = 404
    code = "not_found"


class PreviousResponseNotFound(RequestError):
    code = "previous_response_not_found"


class RequestNotFound(RequestError):
    """No such request runs."""

    status = 404
    code = "request_not_found"


class SlowBody(RequestError):
    status = 408
    code = "slow_body"


class SlowReader(RequestError):
    status = 408
    code = "slow_reader"


class AgentBusy(RequestError):
    status = 409
    code = "agent_busy"


class AgentExists(RequestError):
    status = 409
    code = "agent_exists"


class ModelBusy(RequestError):
    status = 409
    code = "model_busy"


class PictureLost(RequestError):
    status = 409
    code = "picture_lost"


class RequestTooLarge(RequestError):
    status = 413
    code = "request_too_large"


class UnsupportedMediaType(RequestError):
    status = 415
    code = "unsupported_media_type"


class RateLimited(RequestError):
    status = 429
    code = "rate_limit_exceeded"


class QuotaExceeded(RequestError):
    status = 429
    code = "insufficient_quota"


class RequestAborted(RequestError):
    """Its status is nginx's for a request that was given up: clients do not repeat it."""

    status = 499
    code = "request_aborted"


class Unavailable(SatchelError):
    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = 1.0) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)


class QueueFull(Unavailable):
    code = "queue_full"


class NoReplica(Unavailable):
    code = "no_replica"


class ComputesOtherwise(Unavailable):
    code = "computes_otherwise"


class ReplicaLost(Unavailable):
    code = "replica_lost"


class ReplicaDied(ReplicaLost):
    pass


class ReplicaLeaves(ReplicaLost):
    code = "replica_leaves"


class NoAnswer(Unavailable):
    """An actor that was called gave no answer; also if there is no actor of that name, or its method failed."""


class ActorLost(NoAnswer):
    pass


class ActorAway(ActorLost):
    pass


class ActorSilent(NoAnswer):
    pass


class OtherVersion(NoAnswer):
    pass


class AgentElsewhere(Unavailable):
    code = "agent_elsewhere"


class MemoryFull(Unavailable):
    status = 507
    code = "memory_full"


class Draining(Unavailable):
    code = "draining"


class DeadlineExceeded(SatchelError):
    status = 504
    code = "deadline_exceeded"


class GenerationFailed(SatchelError):
    code = "generation_failed"


class ModelLoadError(SatchelError):
    code = "model_load_error"


class NoRoom(ModelLoadError):
    code = "no_room"


class DiskError(SatchelError):
    code = "disk_error"


class DiskFull(DiskError):
    status = 507
    code = "disk_full"


class StoreInUse(DiskError):
    code = "store_in_use"


class StaleEpoch(DiskError):
    status = 409
    code = "stale_epoch"


class InvalidRecord(DiskError):
    code = "invalid_record"


class CorruptSegment(DiskError):
    code = "corrupt_segment"


class ClusterError(SatchelError):
    code = "cluster_error"


class ConfigError(ClusterError):
    """A mistake in a config file. `param` is the path inside the file, such as `models[0].source`."""

    code = "config_error"


class KeysDamaged(ClusterError):
    code = "keys_damaged"


class NotRunning(ClusterError):
    code = "not_running"


class PortInUse(ClusterError):
    code = "port_in_use"


class HomeInUse(ClusterError):
    code = "home_in_use"


class NodeRemoved(ClusterError):
    code = "node_removed"


class LinkError(ClusterError):
    """A connection between two nodes cannot be used."""

    code = "link_error"


class EntryDamaged(LinkError):
    """An entry that was sent does not match its digest."""

    code = "entry_damaged"


class LinkGarbage(LinkError):
    """The peer does not speak this protocol, or its data is cut off or damaged."""

    code = "link_garbage"


class LinkVersion(LinkError):
    """The peer speaks another protocol version."""

    code = "link_version"


class LinkRefused(LinkError):
    """The peer does not have the cluster's key, or is not the expected node."""

    code = "link_refused"


def _tree(cls: type[SatchelError]) -> dict[str, type[SatchelError]]:
    classes = {cls.__name__: cls}
    for child in cls.__subclasses__():
        classes.update(_tree(child))
    return classes


def from_wire(data: dict[str, Any]) -> SatchelError:
    """Rebuilds the error that `to_wire` described; an unknown kind becomes a plain `SatchelError`."""
    cls = _tree(SatchelError).get(str(data.get("kind")), SatchelError)
    return cls(str(data.get("message", "")), param=data.get("param"), retry_after_s=data.get("retry_after_s"))
