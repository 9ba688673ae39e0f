"""The one config tree: frozen dataclasses, read once from YAML and passed down.

Units are the last word of each name: `_s` seconds, `_bytes`, `_tokens`. Sizes may be written `512 MiB` or `2 GB`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass as validated

from .errors import ConfigError
from .nodes import Node
from .timing import Timing, broken
from .units import STRICT, Bytes, Count, Seconds, StrictOrSeconds

T = TypeVar("T")

_HUB_ID = re.compile(r"[^/.~][^/]*/[^/]+")


def _checked_path(value: str) -> str:
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise ValueError("begins with the home of a user that is not known") from None
    if not path.is_absolute():
        raise ValueError("must be an absolute path, or begin with ~")
    return str(path)


AbsolutePath = Annotated[str, AfterValidator(_checked_path)]


@validated(frozen=True, config=STRICT)
class Tls:
    """Files in PEM form: the certificate, with those that signed it behind it if there are any, and its private key,
    without a passphrase. `satchel cert` makes both. Files that are replaced are taken within seconds."""

    certificate: AbsolutePath
    key: AbsolutePath


@validated(frozen=True, config=STRICT)
class Endpoint:
    """The HTTP endpoint. It binds loopback unless `listen` says otherwise, which needs keys (`satchel keys`)."""

    listen: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    tls: Tls | None = None
    """HTTPS instead of HTTP."""
    hosts: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")], ...] = ()
    """Further names by which clients may reach it, as that of a proxy: a request to another host is refused."""
    origins: tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")], ...] = ()
    """Of pages that may use it from a browser (`http://localhost:3000`, `*` for all); other pages are refused."""
    connections_max: Count = 1000
    """At a time. Where there are more, those that have asked for nothing yet make room."""
    body_bytes_max: Bytes = 32 * 2**20
    bodies_bytes_max: Bytes = 256 * 2**20
    """Of all requests that are being read at a time."""
    body_values_max: Count = 250_000
    """JSON values and keys of one body, those in the arguments of its tool calls included; a token id is a value."""
    messages_max: Count = 10_000
    """In one request."""
    parts_max: Count = 20_000
    """Of contents, in all messages of one request."""
    unread_tokens_max: Count = 4096
    """A row whose client has this many tokens still to read is ended: a slow reader holds no place."""


@validated(frozen=True, config=STRICT)
class Model:
    """One served model.

    `source` is a Hub id (`mlx-community/Qwen3-0.6B-4bit`, with `@REVISION` a certain state of it), a folder, or
    `embedded:NAME` for one that ships with Satchel. The first model in the list is the default of the endpoint.
    """

    name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$")]
    source: Annotated[str, Field(min_length=1)]
    replicas: Count | None = None
    """None puts one on each of its nodes."""
    nodes: tuple[str, ...] = ()
    """Where its replicas may run, by the nodes' names; none means anywhere."""
    context_tokens_max: Count | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    weights: Literal["auto", "stored", "dequantized", "both"] = "auto"
    """Whether quantized weights are multiplied as they are; `auto` takes what the device is faster with."""
    kv: Literal["q4", "k8v4", "fp16"] = "q4"
    """How KV is kept: 4-bit blocks, 8-bit keys and 4-bit values, or as it is computed. Another one is another model."""
    numerics: Literal["fast", "reproducible"] = "fast"
    """`reproducible`: decoding and prefill give equal bits on a CPU; `fast`: equal within rounding. Neither takes KV
    that the other has written."""
    adapter: Annotated[str, Field(min_length=1)] | None = None
    """A LoRA or DoRA adapter as mlx-lm writes them: a folder or a Hub id. The model with it is another model."""
    trust_remote_code: bool = False
    """Whether Python code in the model's folder may run, in its replicas and in the endpoint. A Hub id needs the commit
    that was read: `owner/name@` and 40 hexadecimal digits."""

    @model_validator(mode="after")
    def _pins_code(self) -> Self:
        if self.trust_remote_code and _HUB_ID.fullmatch(self.source) and not Path(self.source).is_dir():
            commit = self.source.partition("@")[2]
            if not re.fullmatch("[0-9a-f]{40}", commit):
                raise ValueError("trust_remote_code needs a folder or owner/name@COMMIT as the source, with 40 digits")
        return self

    @property
    def slug(self) -> str:
        """The name in letters that fit a header, for the ids of its replicas."""
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", self.name).strip("-")


@validated(frozen=True, config=STRICT)
class Scheduling:
    """Limits of one replica's scheduler."""

    rows_max: Count = 32
    queue_requests_max: Count = 256
    prefill_chunk_tokens: Annotated[int, Field(ge=256, multiple_of=256)] = 2048
    prefill_rows_max: Count = 8
    """How many prompts share the prefill work of a step."""
    prefill_pause_s: Seconds = 0.25
    """How long running rows may wait for one prefill chunk; chunks are cut to the measured rate."""
    max_tokens_max: Count | None = None
    """The most tokens a request may ask for; None leaves it to the context."""
    kv_bytes_max: Bytes | None = None
    """KV memory of the running batch; None takes a quarter of the machine's memory, shared by its replicas."""
    prefix_bytes_max: Bytes = 512 * 2**20
    """Finished conversations' KV kept in memory for reuse."""
    unwritten_bytes_max: Bytes = 512 * 2**20
    """KV that waits to be written to the disk. While there is more, no further row begins."""
    vision_bytes_max: Bytes = 512 * 2**20
    """What encoders made of pictures, kept in memory for reuse."""
    stuck_s: Seconds = 30.0
    """A step that takes longer than this, and 20 times what steps take as measured, will not end: its replica is
    started again. On a GPU four times as long, and for the first step 20 times."""


@validated(frozen=True, config=STRICT)
class Routing:
    policy: Literal["satchel", "prefix", "least_loaded", "round_robin"] = "satchel"
    replica_timeout_s: Seconds = 5.0
    """A replica that has not reported for this long is avoided."""
    sticky_penalty_s_max: Seconds = 2.0
    """An agent leaves its replica when another one would answer sooner by this and by what it would compute again."""


def _checked_host(value: str) -> str:
    if "/" in value:
        ip_network(value, strict=False)
    elif not value or value != value.strip() or "://" in value:
        raise ValueError("must be a host's name, an address or a network such as 10.0.0.0/8")
    return value.lower()


@validated(frozen=True, config=STRICT)
class Media:
    """Pictures and videos in messages: from where they are taken, and how much of them."""

    allowed_hosts: tuple[Annotated[str, AfterValidator(_checked_host)], ...] = ()
    """Hosts that are fetched from though their addresses are not public: names, addresses, networks (10.0.0.0/8)."""
    file_roots: tuple[AbsolutePath, ...] = ()
    """Folders of which messages may name files; none means that no file can be named."""
    source_bytes_max: Bytes = 32 * 2**20
    """Of one picture or video, as it is sent."""
    timeout_s: Seconds = 15.0
    """For fetching one picture or video, and again for decoding a video."""
    redirects_max: Annotated[int, Field(ge=0, le=20)] = 3
    pixels_max: Annotated[int, Field(gt=0, le=150_000_000)] = 50_000_000
    """Of one picture, of a video's frames together, and of all that is being decoded at a time."""
    pictures_max: Count = 64
    """In one request; a video counts as one."""
    frames_max: Count = 32
    """Of one video, and never more than `pixels_max` / 8192; of longer ones so many are taken, evenly."""
    held_bytes_max: Bytes = 2**30
    """All requests' pictures, decoded, 3 bytes a pixel."""


@validated(frozen=True, config=STRICT)
class Timeouts:
    request_s: Seconds = 600.0
    """From arrival to the last token."""
    drain_s: Seconds = 8.0
    """How long a stopping server lets running requests finish."""
    model_load_s: Seconds = 3600.0
    turn_wait_s: Seconds = 60.0
    """How long a turn of an agent waits for that agent's previous turn."""
    silent_s: Seconds = 120.0
    """A process of the server that gives no sign of life for this long is ended, and started again."""
    replication_s: Seconds = 30.0
    """How long a turn's last event waits for copies of its words with `replication_wait: strict`."""


@validated(frozen=True, config=STRICT)
class Config:
    """The whole tree. `models` has at least one entry and unique names."""

    models: Annotated[tuple[Model, ...], Field(min_length=1)]
    nodes: tuple[Node, ...] = ()
    """The machines, the first of them that on which `satchel serve` runs; none means this machine alone."""
    replication: Annotated[int, Field(ge=0, le=3)] = 1
    """On how many further nodes an agent's memory is kept, as far as there are nodes."""
    replication_wait: StrictOrSeconds = 1.0
    """How long a turn's last event waits until its words are there too; `strict` waits `timeouts.replication_s`. An
    answer that did not wait long enough says so, and the copy is made later."""
    control_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Where other machines join, at the first node's address; 0 takes a free port."""
    endpoint: Endpoint = field(default_factory=Endpoint)
    scheduling: Scheduling = field(default_factory=Scheduling)
    routing: Routing = field(default_factory=Routing)
    media: Media = field(default_factory=Media)
    timeouts: Timeouts = field(default_factory=Timeouts)
    timing: Timing = field(default_factory=Timing)
    transcripts_bytes_max: Bytes = 256 * 2**20
    """What agents' transcripts and manifests may take on disk; the least recently used agents are forgotten first."""
    branches_max: Count = 8
    """Lines of conversation that one agent remembers; of further ones the least recently used goes."""
    disk_bytes_max: Bytes = 20 * 2**30
    """Agents' KV on each node's disk; the least recently used goes first."""
    disk_reserve_bytes: Bytes = 2**30
    """What KV leaves free on each node's disk, whoever fills it, for agents' words: of a small disk an eighth of it."""
    share: Literal["tenant", "agent", "none"] = "tenant"
    """Who may reuse equal prefixes: everyone of a tenant, only the same agent, or nobody."""

    @property
    def machines(self) -> tuple[Node, ...]:
        """The nodes, of which there is at least one: the head first."""
        return self.nodes or (Node(name="local"),)

    @property
    def copy_wait_s(self) -> float:
        """How long a turn's last event waits for copies of its words on other nodes."""
        return self.timeouts.replication_s if self.replication_wait == "strict" else self.replication_wait


@dataclass(frozen=True)
class Home:
    """Where one cluster keeps its state (SATCHEL_HOME)."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def cluster_file(self) -> Path:
        """Where others find the running cluster; absent while none runs."""
        return self.run / "cluster.json"

    @property
    def lock_file(self) -> Path:
        """Locked (flock) by the server that uses this home; holds its process id."""
        return self.run / "lock"

    @property
    def session_file(self) -> Path:
        """The Ray processes of the last run, for cleaning up after a killed one."""
        return self.run / "session.json"

    @property
    def token_file(self) -> Path:
        """The secret that Ray's processes show each other."""
        return self.run / "ray_token"

    @property
    def keys_file(self) -> Path:
        """The endpoint's keys; absent where none was ever made."""
        return self.root / "keys.json"

    @property
    def owner_key_file(self) -> Path:
        """The secret of this user's command line for the endpoint that runs."""
        return self.run / "owner_key"

    @property
    def audit_file(self) -> Path:
        """What administrators did, and whose keys were refused."""
        return self.root / "audit.log"

    @property
    def tls(self) -> Path:
        """Keys and certificates: by which machines know each other, and the endpoint's where it was made here."""
        return self.root / "tls"

    @property
    def key_file(self) -> Path:
        """This machine's own key."""
        return self.tls / "node.key"

    @property
    def certificate_file(self) -> Path:
        """This machine's certificate, of the cluster that it was in last."""
        return self.tls / "node.pem"

    @property
    def authority_file(self) -> Path:
        """The certificate of who signs those of that cluster."""
        return self.tls / "authority.pem"

    @property
    def membership_file(self) -> Path:
        """Where this machine was let in last."""
        return self.tls / "membership.json"

    @property
    def endpoint_key_file(self) -> Path:
        """The key of the endpoint's certificate that `satchel cert` made."""
        return self.tls / "endpoint.key"

    @property
    def endpoint_certificate_file(self) -> Path:
        """That certificate."""
        return self.tls / "endpoint.pem"

    @property
    def shown_certificate_file(self) -> Path:
        """The certificate that the running endpoint shows, wherever it is from."""
        return self.run / "endpoint.pem"

    @property
    def invitations(self) -> Path:
        """Hashes of the invitations that are open."""
        return self.tls / "invitations"

    @property
    def kv(self) -> Path:
        """Agents' memory: transcripts, manifests, and blocks of KV."""
        return self.root / "kv"

    @property
    def kernels_file(self) -> Path:
        """Which kernels this machine is fast with, as measured."""
        return self.root / "kernels.json"

    @property
    def digests_file(self) -> Path:
        """Digests of models' files, so that each is read once."""
        return self.root / "digests.json"

    @property
    def log_file(self) -> Path:
        """What Ray said while it started."""
        return self.run / "ray.log"

    @property
    def incidents_file(self) -> Path:
        """What went wrong lately, of this run and of earlier ones."""
        return self.run / "incidents.jsonl"

    @property
    def ray_logs(self) -> Path:
        """The logs of Ray's processes, of the last time that it did not start or ended by itself."""
        return self.run / "ray-logs"


def _where(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path or "(top level)"


def parse_config(data: Any, *, source: str = "config") -> Config:
    """The tree from plain data.

    Raises:
        ConfigError: naming every wrong place by its path, and times that do not fit each other.
    """
    config = _validated(Config, data if data is not None else {}, source)
    for index, model in enumerate(config.models):
        refusal = name_refusal(model, config.models[:index])
        if refusal is not None:
            where = f"models[{index}].name"
            raise ConfigError(f"{source}: {where}: {refusal}", param=where)
    for where, refusal in _node_refusals(config):
        raise ConfigError(f"{source}: {where}: {refusal}", param=where)
    if unfitting := tuple(broken(config)):
        raise ConfigError(f"{source}: {'; '.join(unfitting)}", param=unfitting[0].partition(" ")[0])
    return config


def _node_refusals(config: Config) -> Iterable[tuple[str, str]]:
    """What cannot be among nodes, as (place, why)."""
    names = [node.name for node in config.nodes]
    for index, node in enumerate(config.nodes):
        if node.name in names[:index]:
            yield f"nodes[{index}].name", f"two nodes are called {node.name!r}"
        if index == 0 and node.ssh is not None:
            yield f"nodes[{index}].ssh", "the first node is the one on which the server is started"
        if index and node.ssh is None and not (node.is_loopback and config.nodes[0].is_loopback):
            yield f"nodes[{index}]", "needs `ssh`, to be started on its machine"
        if node.is_loopback != config.nodes[0].is_loopback:
            yield f"nodes[{index}].address", "either all nodes have loopback addresses or none"
    known = set(names) or {node.name for node in config.machines}
    for index, model in enumerate(config.models):
        for position, name in enumerate(model.nodes):
            if name not in known:
                where = f"models[{index}].nodes[{position}]"
                yield where, f"there is no node {name!r}; there are: {', '.join(sorted(known))}"


def parse_model(**fields: Any) -> Model:
    """One model from its fields, of which None means the default.

    Raises:
        ConfigError: naming every wrong field.
    """
    return _validated(Model, {name: value for name, value in fields.items() if value is not None}, "model")


def name_refusal(model: Model, others: Iterable[Model]) -> str | None:
    """Why the model's name cannot stand beside those of `others`; None where it can.

    Replicas are named by the slug, so two models must differ in it.
    """
    if not model.slug:
        return "needs a letter or a digit"
    for other in others:
        if other.slug == model.slug:
            return (
                f"two models are called {other.name!r}" if other.name == model.name else f"too much like {other.name!r}"
            )
    return None


def _validated(kind: type[T], data: Any, source: str) -> T:
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        details = [f"{_where(e['loc'])}: {e['msg']}" for e in error.errors(include_url=False)]
        raise ConfigError(f"{source}: " + "; ".join(details), param=_where(error.errors()[0]["loc"])) from None


def load_config(path: Path) -> Config:
    """The tree from a YAML file.

    Raises:
        ConfigError: the file is missing, is not YAML, or has a wrong value (every one is named by its path).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    return parse_config(data, source=str(path))


def default_config() -> Config:
    """What is served where no config file is given; the same as `configs/one-mac.yaml`."""
    return Config(
        models=(
            Model(name="satchel/recall", source="embedded:recall"),
            Model(name="satchel/shapes", source="embedded:shapes"),
        )
    )
