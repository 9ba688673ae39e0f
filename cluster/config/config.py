"""The one config tree: frozen dataclasses, read once from YAML and passed down.

Units are the last word of each name: `_s` seconds, `_bytes`, `_tokens`. Sizes may be written `512 MiB` or `2 GB`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BeforeValidator, Field, JsonValue, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass as validated

from ..errors import ConfigError
from .config_errors import told
from .media import Media
from .nodes import Device, Node, host_port
from .stages import Split
from .timing import Timing, broken
from .units import STRICT, AbsolutePath, Bytes, Count, Seconds, StrictOrSeconds, also_named

logger = logging.getLogger(__name__)

T = TypeVar("T")

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$")]
"""What clients call a model."""

_HUB_ID = re.compile(r"[^/.~][^/]*/[^/]+")


@validated(frozen=True, config=STRICT)
class Tls:
    """PEM files: the certificate, followed by its chain if there is one, and its private key without a passphrase.
    `satchel cert` makes both. Replaced files are picked up within seconds."""

    certificate: AbsolutePath
    """The certificate, followed by its chain."""
    key: AbsolutePath
    """Its private key."""


@validated(frozen=True, config=STRICT)
class Endpoint:
    """The HTTP endpoint. It binds loopback unless `listen` says otherwise, which needs keys (`satchel keys`)."""

    listen: str = "127.0.0.1"
    """The address that it binds; `0.0.0.0` and `::` are all."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """The port that it binds."""
    tls: Tls | None = None
    """HTTPS instead of HTTP."""
    hosts: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")], ...] = ()
    """Further host names by which clients may reach it, such as a proxy's. A request with any other host name is
    refused."""
    origins: tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")], ...] = ()
    """Origins of pages that may use it from a browser (`http://localhost:3000`, `*` for all); others are refused."""
    connections_max: Count = 1000
    """Concurrent connections. Beyond that, connections without a request yet are closed."""
    body_bytes_max: Bytes = 32 * 2**20
    """The largest body of one request."""
    bodies_bytes_max: Bytes = 256 * 2**20
    """All bodies that are being read at the same time, together."""
    body_values_max: Count = 250_000
    """The most JSON values and keys in one body, including those in arguments of tool calls; a token id is a value."""
    messages_max: Count = 10_000
    """The most messages in one request."""
    parts_max: Count = 20_000
    """The most content parts in all messages of one request."""
    grammar_bytes_max: Annotated[Bytes, Field(le=256 * 2**10)] = 256 * 2**10
    """The largest grammar of one request (from a schema, a regular expression or tools); at most 256 KiB."""
    unknown_model: Literal["default", "refuse"] | None = None
    """What happens to a request for a model that is not served: with `default` the first model that its caller may use
    answers it, with `refuse` it is an error. None means `default` for Anthropic's protocol, whose programs send their
    own model names, and `refuse` for OpenAI's."""
    responses_bytes_max: Bytes = 256 * 2**20
    """Responses that are stored by id (`store`), with the conversation before them; the least recently used is dropped
    first."""
    background_responses_max: Count = 64
    """Concurrent background responses. If there are several tenants, a tenant may use at most as many places as it
    leaves free. The events of each, which can be read again, take at most `responses_bytes_max` divided by this number;
    the oldest are dropped first."""
    file_bytes_max: Bytes = 256 * 2**20
    """The largest uploaded file (`/v1/files`)."""
    files_bytes_max: Bytes = 4 * 2**30
    """A tenant's uploaded files and results of batches together, on the disk of the endpoint's machine."""
    batch_requests_max: Count = 50_000
    """The most requests of one batch."""
    batch_requests_at_once: Count = 16
    """How many requests of batches are sent to replicas at the same time. They are computed while nothing else is."""
    unread_tokens_max: Count = 4096
    """If a client has this many unread tokens, its sequence is ended, so that a slow reader does not hold a place in
    the batch."""

    @property
    def listens_everywhere(self) -> bool:
        """Whether it binds every address of its machine, so that `listen` is no address for clients."""
        return self.listen in ("0.0.0.0", "::")

    def url(self, everywhere: str) -> str:
        """Returns its URL: with the address that it binds, or with `everywhere` if it binds all."""
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{host_port(everywhere if self.listens_everywhere else self.listen, self.port)}"


def _parse_off(value: object) -> object:
    """Returns `off` for the False that YAML reads in its place."""
    return "off" if value is False else value


@validated(frozen=True, config=STRICT)
class Drafting:
    """A small model, or a head, that drafts for another one."""

    model: Annotated[str, Field(min_length=1)]
    """A folder, a Hub id, or the name of a model of this config. A model must have the same tokenizer, and layers of
    plain attention. An EAGLE-3 head must have been trained for the model that it drafts for. It is loaded beside each
    replica of that model."""
    exact: bool = False
    """Whether nothing is drafted that could change a bit of a token's logits, as with `drafts: exact`. Then a head
    drafts nothing, because no test at the load says what it changes. If false, everything is drafted as with `drafts:
    auto`."""


@validated(frozen=True, config=STRICT)
class Model:
    """One served model. The first one in the list is the default of the endpoint."""

    name: Name
    """What clients call it."""
    source: Annotated[str, Field(min_length=1)]
    """A Hub id (`mlx-community/Qwen3-0.6B-4bit`, with `@REVISION` to pin it), a folder, or `embedded:NAME` for one that
    ships with Satchel."""
    aliases: tuple[Name, ...] = ()
    """Further names by which clients may call it."""
    load: Literal["start", "request"] = "start"
    """`start` loads it when the server starts, and it stays loaded. `request` loads it when a request names it, and
    unloads it when another such model needs its room, or after `idle_s`."""
    idle_s: Seconds | None = None
    """With `load: request`: it is unloaded after this long without a request. None unloads it only for room."""
    replicas: Count | None = None
    """How many replicas it has; None puts one on each of its nodes, with `load: request` on each that has room."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes on which its replicas may run; empty means all."""
    split: Split | None = None
    """With `pipeline` its layers are divided among its nodes (in the order of `nodes`) if none has room for all of
    them; with `tensor` each node has a share of every layer. There is one replica, with a process on each of these
    nodes. None never divides it."""
    context_tokens_max: Count | None = None
    """The most tokens of a prompt and its answer together; None is the model's own context."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """The data type in which it computes."""
    weights: Literal["auto", "stored", "dequantized", "both"] = "auto"
    """Whether quantized weights are multiplied as stored or dequantized; `auto` takes what is faster on the device."""
    kv: Literal["auto", "q4", "k6v4", "k8v4", "fp16"] = "auto"
    """The format of cached KV: 4-bit blocks, 6- or 8-bit keys and 4-bit values, or as computed. `auto` compares them on
    real text at the model's first load, and takes the smallest whose loss is within a bound. KV is not shared between
    formats."""
    numerics: Literal["fast", "reproducible"] = "fast"
    """`reproducible`: on a CPU decoding and prefill give the same result to the bit; `fast`: the same within rounding.
    KV is not shared between the two."""
    drafts: Annotated[Literal["exact", "auto", "off"] | Drafting, BeforeValidator(_parse_off)] = "exact"
    """`exact` guesses the next tokens of a sequence from its own prompt and answer, and computes several in one step
    where that was measured to be faster, and where a test at the load finds that no token's logits change by it in a
    single bit: on CUDA; no Mac has been tried, and on a CPU nothing is drafted. `auto` does so wherever it may be
    faster; then an answer may be another one by rounding, unless `numerics` are `reproducible`. With `model: …` a
    small model or a head guesses too, where the conversation does not tell; as with `auto`, unless it is to be
    `exact`. `off` never guesses."""
    self_test: Annotated[bool, also_named("self_test", "trial")] = True
    """Whether the model runs a self-test when it is loaded: batched, in chunks and from cached KV it must compute what
    it computes unbatched. The result is stored. Without a self-test an untested model family may give wrong answers
    when batched."""
    plain_after_s: Annotated[float, Field(ge=0.0)] | None = None
    """If the self-test takes longer than this, the model is served in plain mode until it ends: text only, one sequence
    at a time, without cached KV. The default is 0 s at a model's first start, and 2 s at later ones."""
    adapter: Annotated[str, Field(min_length=1)] | None = None
    """A LoRA or DoRA adapter as mlx-lm writes them: a folder or a Hub id. Its KV is not shared with the plain model."""
    adapters: dict[Name, Annotated[str, Field(min_length=1)]] = field(default_factory=dict, hash=False)
    """LoRA adapters by the names that clients call them, each a folder or a Hub id. Each is a model of its own for
    clients, computed with the same copy of this model's weights, in the same batches. KV is not shared between them."""
    template_kwargs: dict[str, JsonValue] = field(default_factory=dict, hash=False)
    """Variables for its chat template, such as `clear_thinking: false`, unless a request sets them."""
    control_tokens_in_text: Literal["text", "tokens"] = "text"
    """What a control token's text in a caller's message (`<|im_end|>`, a picture's marker, `<tool_call>`) becomes:
    plain text, or the token itself. With `tokens` the author of a file that an agent reads can end the agent's
    message."""
    schema_in_prompt: Literal["auto", "never"] = "auto"
    """Whether the JSON schema that constrains an answer is appended to the newest message, unless the prompt has it."""
    unseen_media: Literal["omit", "refuse"] = "omit"
    """What happens to pictures, videos and audio that the model does not take. `omit` leaves them out of tool results
    and of earlier messages, so that a conversation can continue: a sentence in their place tells the model, and the
    header `x-satchel-left-out` the client. In the user's newest message they are an error. With `refuse` they are an
    error everywhere."""
    trust_remote_code: bool = False
    """Whether Python code in the model's folder may run, in its replicas and in the endpoint. A Hub id must name the
    reviewed commit: `owner/name@` and 40 hexadecimal digits."""

    @model_validator(mode="after")
    def _comes_and_goes(self) -> Self:
        if self.idle_s is not None and self.load == "start":
            raise ValueError("idle_s is for models with load: request; a model that loads at the start stays loaded")
        return self

    @model_validator(mode="after")
    def _pins_code(self) -> Self:
        if self.trust_remote_code and _HUB_ID.fullmatch(self.source) and not Path(self.source).is_dir():
            commit = self.source.partition("@")[2]
            if not re.fullmatch("[0-9a-f]{40}", commit):
                raise ValueError("trust_remote_code needs a folder or owner/name@COMMIT as the source, with 40 digits")
        return self

    @model_validator(mode="after")
    def _adapts(self) -> Self:
        if self.adapters and self.adapter is not None:
            raise ValueError("a model has either an adapter or adapters")
        return self

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.split is not None and (why := self._undividable()):
            raise ValueError(f"a model with `split` {why}")
        return self

    def _undividable(self) -> str:
        """Returns what a model that is divided among nodes does not support; empty if nothing of it is set."""
        unsupported = {
            "is loaded when the server starts: load: request is not supported": self.load == "request",
            "has one replica: replicas is not supported": self.replicas not in (None, 1),
            "has no adapter": self.adapter is not None,
            "has no adapters": bool(self.adapters),
            "does not run code of its folder: trust_remote_code is not supported": self.trust_remote_code,
            "does not support numerics: reproducible": self.numerics == "reproducible",
            "has no drafting model: drafts must be exact, auto or off": isinstance(self.drafts, Drafting),
        }
        return next((why for why, is_set in unsupported.items() if is_set), "")

    @property
    def slug(self) -> str:
        """The name in characters that an HTTP header allows, for the ids of its replicas."""
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", self.name).strip("-")


@validated(frozen=True, config=STRICT)
class Scheduling:
    """Limits of one replica's scheduler."""

    sequences_max: Annotated[Count, also_named("sequences_max", "rows_max")] = 32
    """The most sequences in a batch."""
    queue_requests_max: Count = 256
    """The most requests in the queue; a further one is refused (503)."""
    prefill_chunk_tokens: Annotated[int, Field(ge=256, multiple_of=256)] = 4096
    """The most tokens that a step prefills. The actual number depends on the measured rate and `prefill_pause_s`; on a
    CPU it is at most 256."""
    prefill_sequences_max: Annotated[Count, also_named("prefill_sequences_max", "prefill_rows_max")] = 8
    """How many prompts share the prefill work of a step."""
    prefill_pause_s: Seconds = 0.25
    """How long running sequences may wait for one prefill chunk; the measured rate determines the size of chunks."""
    prepare_while_idle: bool = True
    """Whether a replica that has nothing else to do prefills prompts that agents will probably send next, because their
    program rewrites its history or the model's template drops reasoning, and reads evicted KV of agents back."""
    max_tokens_max: Count | None = None
    """The most tokens a request may ask for; None is limited by the context alone."""
    memory_bytes_max: Bytes | None = None
    """The memory of each node for all of its replicas: models, KV and pictures. None takes 90% of the recommended
    working set on Metal, what is free when the first model is loaded on CUDA, and half of the RAM on a CPU."""
    kv_bytes_max: Bytes | None = None
    """Deprecated, use `memory_bytes_max`. The part of it that a node's running sequences may use."""
    prefix_bytes_max: Bytes | None = None
    """Deprecated, use `memory_bytes_max`. The part of a replica's memory for KV that no sequence needs."""
    unwritten_bytes_max: Bytes = 512 * 2**20
    """Copies of KV that wait to be written to disk. If the disk is slower, further KV is pinned in memory without a
    copy, up to a quarter of what KV may have; beyond that no new sequence begins."""
    vision_bytes_max: Bytes | None = None
    """Deprecated, use `memory_bytes_max`. The part of a replica's memory for image embeddings that no sequence needs;
    None is an eighth."""
    stuck_s: Seconds = 30.0
    """A step that takes longer than this, and longer than 20 measured steps, counts as stuck: its replica is
    restarted. The limit is four times as long on a GPU, and 20 times as long for the first step."""


@validated(frozen=True, config=STRICT)
class Routing:
    """How the replica for a request is chosen."""

    policy: Literal["satchel", "prefix", "least_loaded", "round_robin"] = "satchel"
    """How a replica is chosen: by estimated time and memory (`satchel`), or by a simpler policy, for comparison."""
    prefer: Literal["speed", "energy"] = "speed"
    """What decides: the estimated time, or the joules that a request takes, if all candidates have measured theirs
    (with the policy `satchel`)."""
    energy_delay_s_max: Seconds = 5.0
    """With `prefer: energy`: a replica is not chosen if its cost is above the lowest one by more than this."""
    replica_timeout_s: Seconds = 5.0
    """A replica that has not reported for this long is avoided."""
    sticky_penalty_s_max: Seconds = 2.0
    """An agent leaves its replica only if another one would answer earlier by more than this plus the time to recompute
    its KV."""
    split: bool = True
    """Whether a prompt of an agent may be prefilled on one node and its answer decoded on another."""
    split_tokens_min: Count = 2048
    """A prompt is not split if fewer tokens of it must be computed."""
    split_gain_min: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.25
    """A prompt is split only if that saves this share of the time that the best single node would take for the prompt
    and 128 tokens of the answer."""


@validated(frozen=True, config=STRICT)
class Logs:
    """The logs, one file a process in `run/logs` of the home."""

    format: Literal["text", "json"] = "text"
    """How a line is written: for people, or as a JSON object."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important of Satchel's own lines that are written. Of libraries there are warnings and errors."""


@validated(frozen=True, config=STRICT)
class Traces:
    """Traces of requests, for an OpenTelemetry collector."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$")] | None = None
    """The collector's URL for OTLP over HTTP, without `/v1/traces`: `http://127.0.0.1:4318`. None takes the environment
    variable OTEL_EXPORTER_OTLP_ENDPOINT; without that there are no traces."""
    sample: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """The share of requests that are traced. If a caller has decided for its own trace, that counts."""


@validated(frozen=True, config=STRICT)
class Timeouts:
    """Time limits for requests, models and processes."""

    request_s: Seconds = 600.0
    """A request's time from its arrival to its last token."""
    drain_s: Seconds = 8.0
    """How long a stopping server lets running requests finish."""
    model_load_s: Seconds = 3600.0
    """How long a start, or a load while the server runs, waits for a model."""
    turn_wait_s: Seconds = 60.0
    """How long a turn of an agent waits for that agent's previous turn."""
    silent_s: Seconds = 120.0
    """A process of the server without a heartbeat for this long is killed and restarted."""
    replication_s: Seconds = 30.0
    """How long the end of an answer waits for the secondaries with `replication_wait: strict`."""


@validated(frozen=True, config=STRICT)
class Config:
    """The whole tree. `models` has at least one entry and unique names."""

    models: Annotated[tuple[Model, ...], Field(min_length=1)]
    """What is served, at least one."""
    nodes: tuple[Node, ...] = ()
    """The machines; `satchel serve` runs on the first. Empty means this machine alone."""
    devices: Literal["auto"] | Count | Annotated[tuple[Device, ...], Field(min_length=1)] | None = None
    """The CUDA cards of this machine, each of which becomes a node: all (`auto`), the first N, or these, by numbers as
    `nvidia-smi` lists them or by UUIDs. With `nodes`, which must then be local, each of them gets one, in order. None
    is one node, which computes on the first card."""
    replication: Annotated[int, Field(ge=0, le=3)] = 1
    """How many copies of an agent's memory other nodes have (its secondaries), if there are enough nodes."""
    replication_wait: StrictOrSeconds = 1.0
    """How long the end of an answer waits until its turn is copied to the secondaries; `strict` waits
    `timeouts.replication_s`. If that is not long enough, the answer says so, and the copy is made later."""
    control_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """The port at the first node's address at which other machines join; 0 takes a free one."""
    endpoint: Endpoint = field(default_factory=Endpoint)
    scheduling: Scheduling = field(default_factory=Scheduling)
    routing: Routing = field(default_factory=Routing)
    media: Media = field(default_factory=Media)
    timeouts: Timeouts = field(default_factory=Timeouts)
    timing: Timing = field(default_factory=Timing)
    logs: Logs = field(default_factory=Logs)
    traces: Traces = field(default_factory=Traces)
    transcripts_bytes_max: Bytes = 256 * 2**20
    """Agents' transcripts and manifests on disk; the least recently used agents are evicted first."""
    branches_max: Count = 8
    """How many branches (lines of conversation) an agent keeps; the least recently used is evicted."""
    date_days: Annotated[int, Field(ge=0, le=3650)] = 7
    """If the model's template shows the date, an agent's conversation keeps the date of its first turn for this many
    days; then it takes the current date, for as many days again. With 0 it always shows the current date. When the date
    changes, the whole prompt is prefilled again."""
    disk_bytes_max: Bytes = 20 * 2**30
    """Agents' KV on each node's disk; the least recently used is evicted first."""
    disk_reserve_bytes: Bytes = 2**30
    """The space on each node's disk that KV leaves free for agents' transcripts; at most an eighth of the disk."""
    satchel_bytes_max: Bytes = 32 * 2**30
    """The largest satchel, packed or unpacked. Meanwhile it is on the disk of the first node."""
    share: Literal["tenant", "agent", "none"] = "tenant"
    """Who may reuse the KV of an equal prefix: all requests of a tenant, only those of the same agent, or none."""

    @property
    def machines(self) -> tuple[Node, ...]:
        """The nodes, at least one, the head first."""
        return self.nodes or (Node(name="local"),)

    @property
    def copy_wait_s(self) -> float:
        """Seconds that a turn's last event waits for its secondaries."""
        return self.timeouts.replication_s if self.replication_wait == "strict" else self.replication_wait


def parse_config(data: Any, *, source: str = "config") -> Config:
    """Builds the tree from plain data.

    Raises:
        ConfigError: a value is wrong (every one is named by its path), or times do not fit each other.
    """
    config = _validated(Config, data if data is not None else {}, source)
    sources = {model.name: model.source for model in config.models}
    config = replace(config, models=tuple(_drafted_by_source(model, sources) for model in config.models))
    for index, model in enumerate(config.models):
        for key, refusal in (("name", name_refusal), ("aliases", aliases_refusal), ("adapters", adapters_refusal)):
            if (why := refusal(model, config.models[:index])) is not None:
                where = f"models[{index}].{key}"
                raise ConfigError(f"{source}: {where}: {why}", param=where)
    check_nodes(config, source=source)
    if unfitting := tuple(broken(config)):
        raise ConfigError(f"{source}: {'; '.join(unfitting)}", param=unfitting[0].partition(" ")[0])
    for settings in (config.scheduling, *config.nodes):
        for name in ("kv_bytes_max", "prefix_bytes_max", "vision_bytes_max"):
            if getattr(settings, name, None) is not None:
                logger.warning("%s: %s bounds only a part of the memory: use memory_bytes_max instead", source, name)
    return config


def _drafted_by_source(model: Model, sources: Mapping[str, str]) -> Model:
    """Returns a model whose drafting model, if it names one of the config, is given by its source."""
    if not isinstance(model.drafts, Drafting) or model.drafts.model not in sources:
        return model
    return replace(model, drafts=replace(model.drafts, model=sources[model.drafts.model]))


def local_nodes(count: int) -> tuple[Node, ...]:
    """Returns the nodes of this machine that the config does not name; the first one is called as if it were alone."""
    return tuple(Node(name=f"local-{number}" if number else "local") for number in range(count))


def check_nodes(config: Config, *, source: str) -> None:
    """Checks the nodes, their cards, and that models name no others.

    Raises:
        ConfigError: there is a mistake.
    """
    for where, refusal in (*_node_refusals(config), *_device_refusals(config)):
        raise ConfigError(f"{source}: {where}: {refusal}", param=where)


def _device_refusals(config: Config) -> Iterable[tuple[str, str]]:
    """Yields mistakes in the cards of nodes, as (path in the config, reason)."""
    devices, taken = config.devices, dict[Device, str]()
    for index, node in enumerate(config.nodes):
        if devices is not None and node.device is not None:
            yield f"nodes[{index}].device", "give either `devices` or a `device` for each node"
        if devices is not None and not node.is_loopback:
            yield "devices", f"is for nodes on this machine alone, and {node.name} has an address: give it a `device`"
        if node.device is not None and node.ssh is None:
            if node.device in taken:
                yield f"nodes[{index}].device", f"{taken[node.device]} has card {node.device}, too"
            taken[node.device] = node.name
    if isinstance(devices, tuple):
        for position, device in enumerate(devices):
            if device in devices[:position]:
                yield f"devices[{position}]", f"card {device} is there twice"
    count = len(devices) if isinstance(devices, tuple) else devices
    if isinstance(count, int) and config.nodes and count != len(config.nodes):
        yield "devices", f"there are {len(config.nodes)} nodes for {count} cards"


def _node_refusals(config: Config) -> Iterable[tuple[str, str]]:
    """Yields mistakes in the nodes, as (path in the config, reason)."""
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
    devices = config.devices
    if devices == "auto" and not names:
        # How many there are is known where they are counted (`devices/devices.py`).
        return
    count = len(devices) if isinstance(devices, tuple) else devices if isinstance(devices, int) else 1
    known = set(names) or {node.name for node in local_nodes(count)}
    for index, model in enumerate(config.models):
        for position, name in enumerate(model.nodes):
            if name not in known:
                where = f"models[{index}].nodes[{position}]"
                yield where, f"there is no node {name!r}; there are: {', '.join(sorted(known))}"


def parse_model(**fields: Any) -> Model:
    """Builds one model from its fields; None means the default.

    Raises:
        ConfigError: a field is wrong; every one is named.
    """
    return _validated(Model, {name: value for name, value in fields.items() if value is not None}, "model")


def name_refusal(model: Model, others: Iterable[Model]) -> str | None:
    """Returns why the model's name cannot be used beside those of `others`; None if it can.

    Replicas are named by the slug, so two models must differ in it.
    """
    if not model.slug:
        return "needs a letter or a digit"
    for other in others:
        if other.slug == model.slug:
            return (
                f"two models are called {other.name!r}" if other.name == model.name else f"too much like {other.name!r}"
            )
        if model.name in other.aliases:
            return f"it is an alias of {other.name!r}"
        if model.name in other.adapters:
            return f"it is an adapter of {other.name!r}"
    return None


def aliases_refusal(model: Model, others: Iterable[Model]) -> str | None:
    """Returns why the model's aliases cannot be used beside the names of `others`; None if they can."""
    taken = _names_of(others)
    for alias in model.aliases:
        if alias in taken:
            return f"{alias!r} is a name of {taken[alias]!r}"
        if model.aliases.count(alias) > 1 or alias == model.name:
            return f"{alias!r} is there twice"
    return None


def adapters_refusal(model: Model, others: Iterable[Model]) -> str | None:
    """Returns why the names of the model's adapters cannot be used beside its own and those of `others`; None if they
    can."""
    taken = _names_of(others)
    for name in model.adapters:
        if name in taken:
            return f"{name!r} is a name of {taken[name]!r}"
        if name == model.name or name in model.aliases:
            return f"{name!r} is a name of the model itself"
    return None


def _names_of(models: Iterable[Model]) -> dict[str, str]:
    """Returns models' names, by all names that clients may call for them or for their adapters."""
    return {name: model.name for model in models for name in (model.name, *model.aliases, *model.adapters)}


def _validated(kind: type[T], data: Any, source: str) -> T:
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        wrong = told(kind, error.errors(include_url=False))
        details = "; ".join(f"{where}: {what}" for where, what in wrong)
        raise ConfigError(f"{source}: {details}", param=wrong[0][0]) from None


def load_config(path: Path) -> Config:
    """Reads the tree from a YAML file.

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
    """Returns what is served if no config file is given; the same as `configs/one-mac.yaml`."""
    return Config(
        models=(
            Model(name="satchel/recall", source="embedded:recall"),
            Model(name="satchel/shapes", source="embedded:shapes"),
        )
    )
